"""The gradient reducer: hooks, in-order launch, ``no_sync``, finish."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_dp.errors import LightningDPError, UnreducedGradientError
from lightning_dp.insight.timeline import Timeline
from lightning_dp.reduction import ballot as ballots
from lightning_dp.reduction import sums
from lightning_dp.reduction.ballot import Ballot, Flag, Reason, Tally, Verdict
from lightning_dp.reduction.buckets import BucketPlan
from lightning_dp.reduction.comm_hooks import HookTransport
from lightning_dp.reduction.config import ReducerConfig
from lightning_dp.reduction.launcher import Launcher
from lightning_dp.reduction.nonfinite import LocalCheck
from lightning_dp.reduction.outcome import Reduction
from lightning_dp.reduction.replication import verify_same_settings, verify_same_structure
from lightning_dp.reduction.schedule import Schedule
from lightning_dp.reduction.transport import Transport
from lightning_dp.reduction.tuning import Forecast
from lightning_dp.reduction.weighting import Weighting
from lightning_dp.reduction.window import Window
from lightning_dp.reduction.window_sum import WindowSum
from lightning_dp.reduction.wire import Wire


class GradientReducer:
    """Averages gradients over ranks, weighted by count, in buckets that travel during backward.

    After the last backward of an accumulation window every rank's ``p.grad`` is, bit for bit the same::

        g = sum over ranks r, micro-batches j of  count[r, j] * grad L[r, j]  /  sum over r, j of  count[r, j]

    with ``L[r, j]`` the mean loss of a micro-batch: the gradient that one device with all the data would have. A
    parameter that no rank used keeps ``grad = None``. ::

        reducer = GradientReducer(model.named_parameters())
        for batches in windows:
            optimizer.zero_grad()
            for batch in batches[:-1]:
                with reducer.no_sync():
                    reducer.backward(loss(batch), count=len(batch))
            reducer.backward(loss(batches[-1]), count=len(batches[-1]))
            if reducer.last.verdict.step:
                optimizer.step()

    Args:
        named_parameters: Names and parameters, the same on all ranks. Frozen ones join when they are thawed.
        group: Process group; ``None`` is the default group.
        config: Caps and switches.

    Attributes:
        last: The last reduction, ``None`` before the first.
        plan: The bucket plan in force.
        wire: The process group, with counters.
        flags: What this rank says in its next ballot, beside what the reducer finds.
        notes: Its answers to yes-or-no questions, in an order that all ranks share; as many on every rank.
        word: An integer of its own; either all ranks have one or none has. Taken back when the ballot is cast.

    Raises:
        StructureMismatchError: If ranks pass parameters of different names, shapes or dtypes.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        group: dist.ProcessGroup | None = None,
        config: ReducerConfig | None = None,
    ) -> None:
        self.config = config or ReducerConfig()
        self.wire = Wire(group)
        self._weighting = Weighting(self.wire.world_size, averages=self.config.comm_hook is not None)
        self.last: Reduction | None = None
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(named_parameters))}
        self._all = list(reversed(unique.values()))
        self._ids = frozenset(unique)
        self._handles: dict[Parameter, Any] = {}
        self._named: list[tuple[str, Parameter]] = []
        self.flags = Flag.NONE
        self.notes: Sequence[bool] = ()
        self.word: int | None = None
        self._learnt: dict[str, Any] = {}  # in the run that this one resumes
        self._window = Window()
        self._sync = True
        self._pass_open = False
        self._discard = False
        self._sends_now = False  # whether buckets leave during the backward under way
        self._stray: set[Parameter] = set()
        self._unsynced: set[Parameter] = set()
        self._averaged = False  # whether gradients that are still there have been averaged
        self._carry: dict[Tensor, Tensor] = {}
        verify_same_settings(self.config.to_agree_on, self.wire)
        self._set_up()

    # ------------------------------------------------------------------------------------------- public

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Inside it backward accumulates on this rank and nothing is sent."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def agree_reference(self, count: int) -> None:
        """Agrees, with one blocking message, on the usual count of a micro-batch; called before the first backward.

        Losses are scaled by ``count / usual count``, so that a low-precision gradient stays in range. Without this
        call the first window is scaled by the bare count. Later windows use the average of the window before.
        """
        if self.reference is None:
            total = torch.tensor([count, 1], dtype=torch.int64, device=self._device)
            self.wire.wait(self.wire.all_reduce(total), "the agreement on the usual count")
            self._weighting.refer_to(*total.tolist())

    @property
    def reference(self) -> tuple[int, int] | None:
        """Total count and number of micro-batches whose ratio losses are scaled by: those of the last window."""
        return self._weighting.reference

    @property
    def syncs(self) -> bool:
        """Whether the next backward ends an accumulation window."""
        return self._sync

    @property
    def window_begins(self) -> bool:
        """Whether the next backward is the first of an accumulation window."""
        return self._window.begins

    def veto(self, reason: str) -> None:
        """Makes all ranks skip the step that the next ballot is about; one rank's veto is enough.

        Args:
            reason: For the message, with whatever helps to find the cause.
        """
        self.flags |= Flag.VETO
        self._window.veto = reason

    @contextmanager
    def backward_pass(
        self, count: int, label: str = "", divided_by: int | None = 1, loss: Tensor | None = None
    ) -> Generator[float, None, None]:
        """Runs one backward: ``with reducer.backward_pass(count=n) as weight: (loss * weight).backward()``.

        Outside ``no_sync`` gradients are final when the block ends, and :attr:`last` tells what came of it.

        Args:
            count: Weight of the micro-batch: the number of samples, tokens, ... that its mean loss is over. With 0
                its gradient is dropped, NaN or not, and this rank still takes part. A loss that reaches no parameter,
                like a constant, counts 0 by itself.
            label: What to call the micro-batch in messages, like ``"batch 17"``.
            divided_by: What the loss has been divided by already for accumulation; undone in the final average.
                ``None`` takes losses as they are and adds micro-batches up, as repeated ``backward`` calls on one
                device do: the average times the number of micro-batches per rank. That is what one device has if the
                ranks' counts are in the same proportion in each micro-batch of the window.
            loss: The mean loss, for messages; read only if there is one.

        Yields:
            The factor for the loss.

        Raises:
            CountError: If ``count`` is negative or not an integer.
            LateGradientError: If a gradient changes after its bucket was sent.
            UnreducedGradientError: If there are gradients that were made outside.
            CommunicationError: If another rank does not take part.
        """
        # Should the block raise, the pass stays open on purpose: part of the window's gradients is missing and buckets
        # may have left, so the next pass refuses to go on.
        weight = self._begin(count, label, loss)
        with self.wire.beside_compute(self._device, self._sends_now and self._schedule.in_batches):
            yield weight
        self._end(divided_by)

    def backward(self, loss: Tensor, count: int, label: str = "", divided_by: int | None = 1) -> None:
        """:meth:`backward_pass` over ``loss.backward()``."""
        with self.backward_pass(count, label, divided_by, loss) as weight:
            torch.autograd.backward(loss * weight)

    @property
    def forecast(self) -> Forecast | None:
        """With ``bucket_cap_mb="auto"`` what the plan is predicted to do, once it has been made by measurement."""
        return self._schedule.forecast

    @property
    def has_final_plan(self) -> bool:
        """Whether nothing more is to be learnt about buckets, and the plan in force stays; the same on all ranks."""
        return self._schedule.is_final

    @property
    def predicted_exposed(self) -> float | None:
        """Seconds of communication after backward that the plan in force was predicted to leave, if it was."""
        return self.forecast.exposed if self.forecast is not None else None

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter is one of those this reducer was given."""
        return id(parameter) in self._ids

    def names_used(self, tally: Tally) -> list[str]:
        """Names of the parameters for which some rank had a gradient."""
        return [name for (name, _), users in zip(self._named, tally.users, strict=True) if users]

    @property
    def has_unreduced(self) -> bool:
        """Whether there are gradients that were accumulated outside of :meth:`backward_pass`."""
        return any(parameter.grad is not None for parameter in self._stray)

    def is_local(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of them has a gradient that was accumulated within :meth:`no_sync` and not averaged since."""
        return bool(self._unsynced) and any(p in self._unsynced and p.grad is not None for p in parameters)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to repeat this one to the last bit: plain numbers and strings."""
        return {
            "reference": list(self.reference) if self.reference else None,
            **self._schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result, on every rank, before the first backward."""
        self._weighting.reference = tuple(state["reference"]) if state["reference"] else None
        self._learnt = state
        self._set_up()

    def window_state(self) -> dict[str, Any] | None:
        """What the accumulation window under way holds so far, summed over the ranks, which take part together.

        Returns:
            A :class:`WindowSum` as a dictionary; ``None`` between windows.
        """
        if self._window.begins:
            return None
        weight = self._weighting.of_loss(1)
        total = WindowSum.over_ranks(self._window, self._named, weight, self._transport, self.wire, self._device)
        return total.as_dict()

    def resume_window(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`window_state`'s result: one rank goes on with the sum, the others with nothing."""
        total, rank, ranks = WindowSum(**state), self.wire.rank, self.wire.world_size
        self._window = total.part_of(rank, ranks, self._weighting.of_loss(1))
        if self._window.veto:
            self.veto(self._window.veto)
        for bad in total.bad_of(rank, ranks):
            self._check.blame(bad)

    def detach(self) -> None:
        """Removes the hooks. Gradients stay where they are; the reducer is not used after this."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            if parameter.grad is None or parameter.grad.dtype == parameter.dtype:
                parameter.grad_dtype = parameter.dtype

    # ------------------------------------------------------------------------------------------- the plan

    def _set_up(self) -> None:
        """Plans, allocates and hooks for the parameters that are trainable now."""
        # A parameter stays in the plan when it is frozen for a while, as a GAN's are on every step.
        earlier = {p for _, p in self._named}
        self._named = [(n, p) for n, p in self._all if p.requires_grad or p in earlier]
        self._index = {id(p): index for index, (_, p) in enumerate(self._named)}  # a tensor's own hash is slow
        verify_same_structure(self._named, self.wire)
        self._parameters = [p for _, p in self._named]
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._timeline = Timeline(self._device)
        self._check = LocalCheck([name for name, _ in self._named], self._device, self.wire.world_size)
        self._schedule = Schedule(self._named, self.wire, self._device, self.config, self._learnt)
        self._allocate()
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._on_accumulated)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle
        self._unhooked = [p for _, p in self._all if p not in self._handles]

    def _allocate(self) -> None:
        config = self.config
        self.plan: BucketPlan = self._schedule.adopt()
        check = self._check if config.check_nonfinite else None
        # The old buckets are given up first; a gradient that lives in one keeps it until it has moved.
        self.__dict__.pop("_launcher", None)
        if config.comm_hook is not None:
            self._transport: Transport = HookTransport(self.wire, config.comm_hook, config.comm_state)
        else:
            self._transport = Transport(self.wire, config.reduce_dtype, config.exact_sums)
        self._launcher = Launcher(self.plan, self._named, self._transport, self.wire.rank, check, self._timeline)
        self._weighting.wide = any(bucket.wide for bucket in self._launcher.buckets)

    # ------------------------------------------------------------------------------------------- one backward

    def _begin(self, count: int, label: str, loss: Tensor | None) -> float:
        if self._pass_open:
            raise LightningDPError("a backward pass is still open: an earlier one ended in an error, or is nested")
        where = f"rank {self.wire.rank}{', ' + label if label else ''}"
        ballots.check_count(count, where)
        if any(p.requires_grad for p in self._unhooked):
            self._set_up()
        if self.has_unreduced:  # asked before averaged gradients are set aside, among which they would pass
            raise UnreducedGradientError(
                f"{where}: there are gradients that were made by loss.backward() outside of the reducer, so each rank"
                " has its own; make them inside or zero them"
            )
        self._stray.clear()
        self._start_window()
        self._put_resumed()
        self._pass_open, self._reached = True, False
        self._discard = count == 0
        self._pass_count = count
        self._window.labels.append((label, None if loss is None or not count else loss.detach()))
        self._window.micro_batches += 1
        self._timeline.start()
        self._schedule.watch()
        self._sends_now = self.config.sends_during_backward and self._sync and not self._discard
        self._launcher.arm(self._schedule.expected if self._sends_now else None)
        self._held = [p.grad for p in self._parameters] if self._discard else []
        if self._discard:
            self._set_grads([None] * len(self._parameters))
        return self._weighting.of_loss(count) if count else 1.0

    def _put_resumed(self) -> None:
        """Puts gradients from before a checkpoint in place: no sooner, as a Trainer zeroes gradients before."""
        resumed, self._window.resumed = self._window.resumed, {}
        for name, parameter in self._named if resumed else ():
            if name in resumed:
                parameter.grad = resumed[name].to(parameter.device, self._transport.sums_in(parameter.dtype))

    def _start_window(self) -> None:
        """The first backward after a reduction: sets aside gradients that were not zeroed, and re-plans."""
        if not self._averaged:
            return
        self._averaged = False
        self._check.reset()
        # An averaged gradient is equal on all ranks; summed once more it would be multiplied by their number.
        self._carry = {p: p.grad.clone() for p in self._parameters if p.grad is not None}
        for parameter in self._carry:
            parameter.grad = None
        if self._schedule.has_changed:
            self._allocate()

    def _on_accumulated(self, parameter: Parameter) -> None:
        if not self._pass_open:
            self._stray.add(parameter)
            return
        index = self._index[id(parameter)]
        self._reached = True
        if self._schedule.measures:
            self._timeline.mark("gradient", index)
        self._schedule.record(index)
        if self._discard:
            parameter.grad = None
            return
        if not self._sync:
            self._unsynced.add(parameter)
        self._launcher.arrived(index)

    def _end(self, divided_by: int | None) -> None:
        self._timeline.mark("backward_end")
        self._pass_open = False
        if self._reached:
            self._window.count += self._pass_count
        if self._discard:
            self._set_grads(self._held)
            self._held = []
        if not self._sync:
            for bucket in self._launcher.buckets:
                bucket.take_all()
            return
        if self.config.drop_nonfinite:
            self._launcher.prepare_rest()
            if int(self._check.flag()) & Flag.NONFINITE:
                self._launcher.leave_out()
                self._window.count = 0
        self._launcher.launch_rest()
        self._finish(divided_by)

    def _set_grads(self, grads: list[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad

    # ------------------------------------------------------------------------------------------- finish

    def _finish(self, divided_by: int | None) -> None:
        """Casts the ballot, waits, and makes the gradients final."""
        window = self._window
        cast = Ballot(window.count, window.micro_batches, self._launcher.used, self.flags, self.notes, self.word)
        message = ballots.encode(cast, self._check.flag(), self.wire.rank, self.wire.world_size)
        if self.config.comm_hook is not None:
            self._launcher.wait()  # a hook may send further messages when its first has arrived
        ballot_work = self.wire.all_reduce(message)
        self._launcher.wait()
        self.wire.wait(ballot_work, "the ballot")
        self._timeline.mark("end")
        tally = ballots.decode(
            message, self.wire.world_size, len(self._parameters), len(self.notes), self.word is not None
        )
        self.flags, self.word = Flag.NONE, None
        factor = self._weighting.of_sums(tally, divided_by)
        overflow = self._scale(factor, tally)
        norm = sums.norm(self._launcher.buckets) if self.config.measure_norm else 0.0
        carried = frozenset(name for name, p in self._named if p in self._carry) if self._carry else frozenset()
        verdict = self._explain(ballots.decide(tally, overflow, self.config.drop_nonfinite))
        sums.publish(self._launcher.buckets, tally.users, self._carry)
        self._carry = {}
        self._weighting.refer_to(tally.count, tally.micro_batches)
        self._schedule.learn()
        self.last = Reduction(
            verdict,
            tally,
            carried,
            factor,
            self.wire.messages,
            self.wire.nbytes,
            self._timeline.read(len(self.plan.buckets)),
            norm,
        )
        times = self.last.times
        self._schedule.tune(self._timeline.gradients, times.backward_end, times.end, self._transport.itemsize)
        self.wire.reset_counters()
        self._unsynced.clear()
        self._averaged, self._window = True, Window()

    def _scale(self, factor: float, tally: Tally) -> bool:
        """Multiplies all buckets; tells whether a sum is not finite, the same on every rank."""
        in_range = not tally.ranks_with(Flag.LARGE) and factor <= LocalCheck.MAX_FACTOR
        looks = self.config.check_nonfinite and (not in_range or self._transport.LOSES_RANGE)
        return sums.scale_(self._launcher.buckets, factor, looks)

    def _explain(self, verdict: Verdict) -> Verdict:
        """Adds what the ranks concerned have to say; a message of its own, which only a spoilt step pays for."""
        ranks = verdict.ranks or verdict.dropped
        if not ranks:
            return verdict
        mine = self._window.veto if verdict.reason is Reason.VETO else self._check.description()
        said = self.wire.gather(f"{mine}, {self._window.describe()}" if self.wire.rank in ranks else "")
        return replace(verdict, detail="; ".join(f"rank {rank}: {said[rank]}" for rank in ranks))
