"""Loaders that keep ranks in step: all ranks iterate equally often, whatever their loaders hold.

Lightning communicates in every iteration of its training loop, so no rank may leave the loop before the others. A rank
whose data has run out goes on with *padding batches*, which count 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp.data.joint import JointLoader, has_state, length_of
from lightning_dp.data.padding import PaddingPolicy
from lightning_dp.data.samplers import UnpaddedSampler
from lightning_dp.data.window import END, LookAhead, WindowCounter, WindowTotals
from lightning_dp.errors import UnevenDataError
from lightning_dp.reduction.wire import Wire


@dataclass(frozen=True)
class Delivery:
    """What is known of one batch that was handed out.

    Attributes:
        padding: Whether it only keeps the rank in step.
        position: Lockstep position in the epoch after it: how many batches each rank has been handed.
        own: How many of them came from the rank's own loader.
        inner: State of a stateful loader after it.
        window: What its accumulation window holds on all ranks, where that is counted.
    """

    padding: bool
    position: int
    own: int
    inner: Any = None
    window: WindowTotals | None = None


@dataclass(frozen=True)
class LoaderState:
    """Where a rank stands in an epoch; plain values, for a checkpoint.

    Attributes:
        position: Lockstep position, the same on every rank.
        own: Batches taken from the rank's own loader.
        samples: Samples of the epoch's order seen by all ranks together, if the loader's sampler knows; else ``None``.
        finished: Whether the epoch's data is used up on all ranks, so that the next epoch starts afresh.
        exhausted: Whether this rank's own data is used up.
        rng: State of torch's global generator when the epoch's iteration began, for loaders that shuffle by it.
        rng_now: State of torch's global generator now, for a model that draws from it (dropout).
        generators: The same as ``rng`` of the generators that the loader and its samplers have of their own.
        seed: Seed of the order that an :class:`UnpaddedSampler` deals out.
        epoch: Epoch of that order.
        inner: State of a stateful loader.
        after_first: Its state after the first batch of an epoch, by which one that begins anew is known.
    """

    position: int
    own: int
    samples: int | None
    finished: bool
    exhausted: bool
    rng: Tensor
    rng_now: Tensor | None = None
    generators: list[Tensor] = field(default_factory=list)
    seed: int | None = None
    epoch: int | None = None
    inner: Any = None
    after_first: Any = None

    as_dict = asdict


class LockstepLoader:
    """Wraps a rank's loader so that all ranks iterate equally often.

    Sized loaders agree on the largest length with one message an epoch. Loaders without a length ask, one batch ahead,
    whether any rank has another batch; the answer is on its way while the current batch is trained on.

    Args:
        loader: The rank's own loader, of any kind that can be iterated.
        wire: The ranks, over a group that works on CPU tensors.
        policy: What becomes of padding batches.
        ends_early: End here, instead of padding, where ``policy`` would skip the step: for loops that do not
            communicate by themselves. Loaders without a length are padded all the same: their ranks ask each other.
        strict: Raise on all ranks where ranks have different numbers of batches.
        counter: Counts each accumulation window before it is handed out; by default nothing is counted.

    Attributes:
        sized: Whether all ranks' loaders have a length.

    Raises:
        UnevenDataError: While iterating, if ``strict``.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        wire: Wire,
        policy: PaddingPolicy,
        ends_early: bool = False,
        strict: bool = False,
        counter: WindowCounter | None = None,
    ) -> None:
        self.loader = loader
        self._counter = counter or WindowCounter()
        self.policy = policy
        self._wire = wire
        self._ends_early = ends_early
        self._strict = strict
        self._handed_out: deque[Delivery] = deque()
        self._used = Delivery(False, 0, 0)
        self._resumed_from: LoaderState | None = None
        self._rng_to_restore: Tensor | None = None
        self._spare = END
        self._source = LookAhead(iter(()), lambda: None)
        self._go_on_from: Any = None
        self._rewind_to: Any = None
        self._after_first: Any = None
        self._parts = loader.parts if isinstance(loader, JointLoader) else [loader]
        samplers = [getattr(part, "sampler", None) for part in self._parts]
        self._samplers = [sampler for sampler in samplers if isinstance(sampler, UnpaddedSampler)]
        self.sized = None not in wire.gather(length_of(loader))
        self._begin_epoch()

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)  # with the latter two Lightning would save rank 0's state for all ranks
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets these on what it takes for the loader.
        target = self.loader if name in ("worker_init_fn", "_iterator") else self
        object.__setattr__(target, name, value)

    def __len__(self) -> int:
        """Batches that every rank iterates over in this epoch."""
        if not self.sized:
            raise TypeError("a rank's loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Starts an epoch; nothing is loaded before the first batch is asked for."""
        ahead = bool(self._handed_out) or self._source.ahead
        self._rewind_to = self._used.inner if ahead and not self._ends_early else None
        self._begin_epoch()
        self._resumed_from = None
        self.policy.start_epoch()
        return self._iterate_sized() if self.sized else self._iterate_unsized()

    def take(self) -> bool | None:
        """Takes note that the batch handed out first goes into a step now.

        The loop may fetch ahead, so what was handed out and what was used are two things; state is of what was used.

        Returns:
            Whether it is padding; ``None`` if there is no batch of this loader in the step.
        """
        if not self._handed_out:
            return None
        self._before = self._used
        self._used = self._handed_out.popleft()
        if self._after_first is None and self._used.own == 1:
            self._after_first = self._used.inner
        return self._used.padding

    @property
    def window(self) -> WindowTotals | None:
        """What the accumulation window of the batch last taken holds on all ranks, where that is counted."""
        return self._used.window

    # ------------------------------------------------------------------------------------------- state

    def state(self, batch_in_hand: bool = False) -> LoaderState:
        """Where this rank stands, as of the batches used.

        Args:
            batch_in_hand: The batch last taken is still being worked on, and is to come again.
        """
        used = self._before if batch_in_hand else self._used
        finished = used.position >= self._length if self.sized else self._ended and not self._handed_out
        return LoaderState(
            position=used.position,
            own=used.own,
            samples=self._samples_seen(used),
            finished=finished,
            exhausted=used.padding,
            rng=self._rng,
            rng_now=torch.get_rng_state(),
            generators=self._generator_states,
            seed=self._samplers[0].seed if self._samplers else None,
            epoch=self._epoch,
            inner=self._source.end if finished and self._source.ended else used.inner,
            after_first=self._after_first,
        )

    def resume(self, states: Sequence[LoaderState]) -> None:
        """Makes the next epoch that is started go on behind where all ranks stood, unless that one was finished.

        Args:
            states: The states of all ranks that there were then.

        Raises:
            UnevenDataError: If there is another number of ranks now and the loader's data is not dealt out by an
                :class:`UnpaddedSampler`, so that nobody knows who has seen what.
        """
        same_ranks = len(states) == self._wire.world_size
        state = states[self._wire.rank if same_ranks else 0]
        self._after_first = state.after_first
        self._rng_to_restore = state.rng_now if same_ranks else None
        if state.finished:
            self._go_on_from = state.inner if same_ranks else None
            return
        if not same_ranks and (self._dealt_out is None or state.samples is None):
            raise UnevenDataError(
                f"the checkpoint was written within an epoch by {len(states)} ranks and there are"
                f" {self._wire.world_size} now, which works for map-style datasets under Lightning's own sampler only;"
                " resume with as many ranks, or from a checkpoint written at the end of an epoch"
            )
        self._resumed_from = state
        self._begin_epoch()

    def _samples_seen(self, used: Delivery) -> int | None:
        sampler = self._dealt_out
        if sampler is None:
            return None
        steps = used.position - self._first_position
        batch_size: int = self.loader.batch_size  # type: ignore[attr-defined]
        return min(sampler.total_size, sampler.start + steps * batch_size * self._wire.world_size)

    @property
    def _dealt_out(self) -> UnpaddedSampler | None:
        """The sampler, if it deals one order out to all ranks, so that any number of ranks can go on in it."""
        if not isinstance(self.loader, DataLoader) or self.loader.batch_size is None:
            return None
        return self._samplers[0] if self._samplers else None

    # ------------------------------------------------------------------------------------------- an epoch

    def _begin_epoch(self) -> None:
        """Sets the epoch's start: its beginning, or behind what a resumed run has seen."""
        state = self._resumed_from or self._epoch_start()
        self._handed_out.clear()
        self._ended = False
        self._rng, self._generator_states = state.rng, state.generators
        self._epoch = state.epoch
        self._first_position = state.position
        self._used = Delivery(state.exhausted, state.position, state.own, state.inner)
        self._before = self._used
        if self._dealt_out is not None:
            self._dealt_out.start = state.samples or 0
        if state.seed is not None:
            for sampler in self._samplers:
                sampler.seed = state.seed
        if self.sized:
            self._agree_on_length()

    def _agree_on_length(self) -> None:
        mine = length_of(self.loader) or 0
        if self._dealt_out is not None:
            mine += self._first_position  # the sampler has left out what was seen
        # Of other loaders the length is what they say, which may be more than they have.
        known = type(self.loader) in (list, tuple) or self._dealt_out is not None
        told = self._wire.gather((mine, known))
        lengths = [length for length, _ in told]
        if self._strict and len(set(lengths)) > 1:
            by_rank = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            raise UnevenDataError(f"ranks have different numbers of batches ({by_rank}); uneven='auto' allows it")
        self._length = max(lengths)
        self._someone_may_have_none = min(lengths) <= self._first_position or not all(known for _, known in told)

    def _own_batches(self) -> Iterator[Any]:
        """The rank's own batches, behind those that were seen before."""
        inner, skip = self._used.inner, self._used.own
        for sampler in self._samplers:
            # As late as this: when a run is resumed, Lightning may count the epoch that goes on as the next one.
            sampler.set_epoch(sampler.epoch if self._epoch is None else self._epoch)
        self._epoch = self._samplers[0].epoch if self._samplers else None
        if not self._first_position:
            self._restore_rng()  # of a run that is resumed between epochs
            # As late as this: the loop may have drawn random numbers since the epoch was started.
            self._rng, self._generator_states = self._random_states()
        for generator, generator_state in zip(self._generators(), self._generator_states, strict=False):
            generator.set_state(generator_state)
        if inner is not None:
            self.loader.load_state_dict(inner)  # type: ignore[attr-defined]
        elif self._go_on_from is not None:
            # As late as this: Lightning gives every rank the state of rank 0's loader.
            self._go_on(self._go_on_from)
        self._go_on_from = None
        if self._used.padding:
            source = iter(())  # a stateful loader that has come to its end would start its next epoch
        elif skip and self._dealt_out is None and (inner is None or isinstance(self.loader, JointLoader)):
            source = self._drawn_again(skip)
        else:
            source = self._iterator()
        if self._first_position:
            self._restore_rng()
        return source

    def _go_on(self, state: Any) -> None:
        """Brings the loader to where it stood when its last epoch had ended, for the next one."""
        if isinstance(self.loader, JointLoader):
            self.loader.go_on(state)
            return
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        # A loader that resumes in the next iteration is not to do so in that of a new epoch: so there is one between.
        outside = torch.get_rng_state()
        next(iter(self.loader), None)
        torch.set_rng_state(outside)
        self._rewind_to = state

    def _iterator(self) -> Iterator[Any]:
        """Begins an iteration. A loader that goes on where it stood is to give once more what was drawn ahead.

        That is what an epoch that a limit cut short did not use. A loader that begins anew has another state then, or,
        if its ``__iter__`` is a generator, the state after the first batch that it had before.
        """
        rewind_to, self._rewind_to = self._rewind_to, None
        if rewind_to is None or isinstance(self.loader, JointLoader):
            return iter(self.loader)
        before = self.loader.state_dict()  # type: ignore[attr-defined]
        source = iter(self.loader)
        if self.loader.state_dict() != before:  # type: ignore[attr-defined]
            return source
        rng = torch.get_rng_state()
        first = list(islice(source, 1))
        if first and self.loader.state_dict() == self._after_first:  # type: ignore[attr-defined]
            return chain(first, source)
        torch.set_rng_state(rng)
        self.loader.load_state_dict(rewind_to)  # type: ignore[attr-defined]
        return iter(self.loader)

    def _drawn_again(self, skip: int) -> Iterator[Any]:
        """Draws seen batches once more and drops them, from the same random numbers, so that the order is the same."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._rng)
        source = iter(self.loader)
        for _ in range(skip):
            next(source, None)
        torch.set_rng_state(outside)
        return source

    def _restore_rng(self) -> None:
        if self._rng_to_restore is not None:
            torch.set_rng_state(self._rng_to_restore)
            self._rng_to_restore = None

    def _epoch_start(self) -> LoaderState:
        rng, generators = self._random_states()
        return LoaderState(0, 0, 0, finished=False, exhausted=False, rng=rng, generators=generators)

    def _random_states(self) -> tuple[Tensor, list[Tensor]]:
        return torch.get_rng_state(), [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """The generators that the loader and its samplers have of their own, each once."""
        owners = list(self._parts)
        for name in ("sampler", "batch_sampler", "source"):
            owners += [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _iterate_sized(self) -> Iterator[Any]:
        source = self._source = self._look_ahead()
        own, window = self._used.own, None
        for position in range(self._first_position, self._length):
            if length := self._counter.starts(position, self._first_position):
                window = self._counter.count(source.peek(length), self._wire)
            batch, inner = source.take()
            if position == self._first_position and self._someone_may_have_none:
                self._find_spare(batch)
            if batch is END and (self._spare is END or (self._ends_early and not self.policy.replays)):
                return
            own += batch is not END
            if position + 1 == self._length and inner is not None:
                source.peek(1)  # a loader with a state is to know that it has come to its end
            yield self._hand_out(batch, Delivery(batch is END, position + 1, own, inner, window))

    def _iterate_unsized(self) -> Iterator[Any]:
        source = self._source = self._look_ahead()
        own, position, window = self._used.own, self._first_position, None
        self._find_spare(*source.peek(1))
        question = self._ask(source.peek(1) != [])
        while self._answer(question):
            if length := self._counter.starts(position, self._first_position):
                window = self._counter.count(source.peek(length), self._wire)
            batch, inner = source.take()
            position += 1
            own += batch is not END
            question = self._ask(source.peek(1) != [])
            yield self._hand_out(batch, Delivery(batch is END, position, own, inner, window))
        self._ended = True

    def _look_ahead(self) -> LookAhead:
        snapshot = getattr(self.loader, "state_dict", lambda: None)
        return LookAhead(self._own_batches(), snapshot)

    def _hand_out(self, batch: Any, delivery: Delivery) -> Any:
        self._handed_out.append(delivery)
        if batch is not END:
            self._spare = batch
        return self._spare

    def _find_spare(self, batch: Any = END) -> None:
        """A rank without any batch borrows one, to pad with, from the first rank that has one."""
        if batch is not END:
            self._spare = batch
        has = self._wire.gather(self._spare is not END)
        if all(has) or not any(has):
            return
        lender = has.index(True)
        lent = self._wire.broadcast_object(self._spare if self._wire.rank == lender else None, lender)
        if not has[self._wire.rank]:
            self._spare = lent

    def _ask(self, has_batch: bool) -> tuple[Tensor, dist.Work | None]:
        """Asks all ranks whether they have another batch; the answer is awaited a batch later."""
        ranks = torch.zeros(self._wire.world_size, dtype=torch.int32)
        ranks[self._wire.rank] = int(has_batch)
        return ranks, self._wire.all_reduce(ranks)

    def _answer(self, question: tuple[Tensor, dist.Work | None]) -> bool:
        ranks, work = question
        self._wire.wait(work, "the question whether any rank has another batch")
        has = ranks.tolist()
        if self._strict and len(set(has)) > 1:
            out = ", ".join(f"rank {rank}" for rank, more in enumerate(has) if not more)
            raise UnevenDataError(f"the data of {out} has run out before the others'; uneven='auto' allows it")
        return any(has)


class StatefulLockstepLoader(LockstepLoader):
    """A LockstepLoader over a loader that has a state; Lightning sees one, too."""

    def state_dict(self) -> Any:
        """The inner loader's state as of the batches used."""
        return self.loader.state_dict() if self._used.inner is None else self._used.inner  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Hands a state on to the inner loader."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]


def lockstep(loader: Iterable[Any], *args: Any, **kwargs: Any) -> LockstepLoader:
    """A :class:`LockstepLoader` of the kind that suits ``loader``; see there for the arguments."""
    stateful = has_state(loader) and not isinstance(loader, JointLoader)
    return (StatefulLockstepLoader if stateful else LockstepLoader)(loader, *args, **kwargs)
