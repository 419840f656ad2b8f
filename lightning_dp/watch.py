"""What is looked after beside the gradients of a run: buffers, replicas, data, spikes, unused parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_dp.errors import SameDataError
from lightning_dp.health.buffers import ModuleBuffers
from lightning_dp.health.replicas import ReplicaCheck, named_state
from lightning_dp.health.same_data import SameDataCheck, batch_fingerprint
from lightning_dp.health.samplers import SamplerFacts, compare_samplers
from lightning_dp.health.spikes import SpikeRule
from lightning_dp.reduction.ballot import Reason, Tally, Verdict
from lightning_dp.reduction.outcome import Reduction
from lightning_dp.reduction.reducer import GradientReducer
from lightning_dp.reduction.wire import Wire
from lightning_dp.settings import Settings

MAX_NAMED = 8


class Watch:
    """Looks after a module while it is fitted; the strategy says what happens when.

    Args:
        module: The module.
        optimizers: Gives its optimizers.
        reducer: The reducer of its gradients, which takes along what is to be said to the other ranks.
        wire: The ranks, over the group that the module's tensors travel by.
        settings: What the user chose.
        ignored: Names of parameters and buffers that are each rank's own business.
        expects_equal_data: The user wants batches to be equal: ``overfit_batches``.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Callable[[], Sequence[Optimizer]],
        reducer: GradientReducer,
        wire: Wire,
        settings: Settings,
        ignored: Iterable[str],
        expects_equal_data: bool,
    ) -> None:
        self._module, self._optimizers = module, optimizers
        self._reducer, self._wire, self._settings = reducer, wire, settings
        self._ignored = frozenset(ignored)
        self._expects_equal_data = expects_equal_data
        self._buffers = ModuleBuffers(module, self._ignored)
        self._stale = False  # whether some rank has changed buffers since rank 0's were sent
        self._unsent: set[str] = set()  # buffers that cannot be sent
        self._checked_at = 0
        self._replicas = ReplicaCheck(wire, self._state, settings.on_replica_mismatch, module.device)
        self._facts: Sequence[SamplerFacts] = ()
        self._same_data: SameDataCheck | None = None
        self._epoch = -1
        self._word: int | None = None
        self._spikes: dict[str, SpikeRule] = {}  # by the optimizers whose gradients they judge
        self._steps = 0
        self._never_used = {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    # ------------------------------------------------------------------------------------------- data

    def loader_is_set_up(self, facts: Sequence[SamplerFacts]) -> None:
        """Compares what the ranks' training loaders are set to; the same on every rank.

        Raises:
            SameDataError: If samplers disagree and the policy is to raise.
        """
        self._facts = facts
        if self._settings.same_data != "off":
            for complaint in compare_samplers(facts):
                self._complain_of_data(f"training loaders differ between ranks: {complaint}")

    def receive(self, batch: Any, padding: bool, epoch: int) -> None:
        """Takes the fingerprint of a training batch, while it is on the host, in the first steps of an epoch."""
        if self._settings.same_data == "off" or self._wire.world_size == 1:
            return
        if self._same_data is None:
            self._same_data = SameDataCheck(self._facts, legitimate=self._expects_equal_data)
        if epoch != self._epoch:
            self._epoch = epoch
            self._same_data.start_epoch(epoch)
        if self._same_data.wants_more:
            mine = None if padding else batch_fingerprint(batch)
            before, self._word = self._word, 0
            if mine is not None and before != 0:
                self._word = mine if before is None else (before * 1_000_003 + mine) % 2**63 or 1

    def _judge_data(self, words: Sequence[int]) -> None:
        if not words or self._same_data is None:
            return
        found = self._same_data.observe([word or None for word in words])
        if found is not None:
            self._complain_of_data(found.describe())

    def _complain_of_data(self, complaint: str) -> None:
        if self._settings.same_data == "raise":
            raise SameDataError(f"{complaint} (same_data='warn' only warns)")
        rank_zero_warn(f"{complaint} (same_data='off' does not look)")

    # ------------------------------------------------------------------------------------------- a window, a step

    def start_batch(self, steps: int) -> None:
        """Before a batch is worked on: when a window begins, buffers are sent if they are to be, and copied.

        Args:
            steps: Optimizer steps taken or skipped so far.
        """
        if not self._reducer.window_begins:
            if not self._buffers.has_begun:
                self._buffers.begin()  # resumed within a window
            return
        if self._stale and self._settings.broadcast_buffers == "step":
            self._send_buffers()
        every = self._settings.check_replicas_every
        if every and steps >= self._checked_at + every:
            self.check_replicas(steps)
        self._buffers.begin()

    def cast(self) -> None:
        """Before the backward that ends a window: what this rank's ballot is to say."""
        if self._settings.broadcast_buffers != "off":
            self._reducer.notes = [*self._buffers.changed(), *self._buffers.resized()]
        self._reducer.word, self._word = self._word, None

    def judge(self, reduction: Reduction, scale: float) -> Verdict:
        """After a reduction: what follows from what the ranks have said.

        Args:
            reduction: What they said, and the verdict so far.
            scale: What a GradScaler has multiplied gradients by.

        Returns:
            The verdict, or another one if the gradient is a spike.

        Raises:
            SameDataError: If ranks are fed the same data and the policy is to raise.
        """
        tally, verdict = reduction.tally, reduction.verdict
        self._note_buffers(tally.notes)
        self._judge_data(tally.words)
        self._note_unused(tally)
        if self._wire.rank in verdict.dropped:
            self.put_back()
        if self._settings.spike_factor is not None and verdict.step:
            spike = self._spike_rule(tally).judge(reduction.norm / scale)
            if spike:
                return Verdict(Reason.VETO, detail=spike)
        return verdict

    def _spike_rule(self, tally: Tally) -> SpikeRule:
        """The rule for these gradients: those of one optimizer say nothing of what is usual for another's."""
        used = set(self._reducer.names_used(tally))
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        owners = [
            str(number)
            for number, optimizer in enumerate(self._optimizers())
            if any(names.get(id(p)) in used for group in optimizer.param_groups for p in group["params"])
        ]
        assert self._settings.spike_factor is not None
        return self._spikes.setdefault(",".join(owners), SpikeRule(self._settings.spike_factor))

    def put_back(self) -> None:
        """A step is skipped: its forward passes are to leave nothing in the buffers."""
        lost = self._buffers.put_back()
        if lost:
            warnings.warn(
                f"rank {self._wire.rank}: the skipped step was the first to change {', '.join(lost[:MAX_NAMED])}; of"
                " buffers as large as that no copy is kept before, so they stay changed",
                stacklevel=2,
            )

    def stepped(self) -> None:
        """An optimizer has stepped; should the batch be worked on further, that is another step's."""
        if not self._module.automatic_optimization:
            self._buffers.begin()

    # ------------------------------------------------------------------------------------------- replicas, buffers

    def start_evaluation(self) -> None:
        """All ranks evaluate with rank 0's buffers."""
        if self._settings.broadcast_buffers != "off" and self._buffers.names:
            self._agree_on_buffers()
            self._send_buffers()

    def _send_buffers(self) -> None:
        self._stale = False
        sent = [n for n in self._buffers.names if n in self._buffers.changing and n not in self._unsent]
        if sent:
            self._buffers.broadcast(self._wire, sent)

    def _note_buffers(self, notes: Sequence[int]) -> None:
        """Takes in how many ranks have changed each buffer, and how many have one of another size."""
        names = self._buffers.names
        if not notes or not names:
            return
        changed = {name for name, ranks in zip(names, notes[: len(names)], strict=True) if ranks}
        resized = {name for name, ranks in zip(names, notes[len(names) :], strict=True) if ranks}
        self._buffers.changing |= changed
        self._stale = self._stale or bool(changed)
        if resized - self._unsent:
            rank_zero_warn(
                f"rank 0's {', '.join(sorted(resized - self._unsent)[:MAX_NAMED])} cannot be sent to the other ranks,"
                " as on some rank it has another shape or dtype than at the start, or is gone; it stays each rank's own"
            )
            self._unsent |= resized

    def _agree_on_buffers(self) -> None:
        """Asks all ranks which buffers change, beyond what their ballots have said.

        Where a value differs from the first one on some ranks only, and nobody has seen it written, it is not taken
        for a change: all ranks run the same code.
        """
        written = self._buffers.changed()
        differs = self._buffers.compare()
        answers = [*written, *self._buffers.resized(), *(name in differs for name in self._buffers.names)]
        counts = torch.tensor(answers, dtype=torch.int64, device=self._module.device)
        self._wire.wait(self._wire.all_reduce(counts), "the agreement on buffers that change")
        size = len(self._buffers.names)
        *notes, values = counts[:size].tolist(), counts[size : 2 * size].tolist(), counts[2 * size :].tolist()
        everywhere = [int(ranks == self._wire.world_size) for ranks in values]
        self._note_buffers([*(a + b for a, b in zip(notes[0], everywhere, strict=True)), *notes[1]])

    def check_replicas(self, steps: int) -> None:
        """Compares what ranks hold; all ranks together.

        Raises:
            ReplicaMismatchError: If they differ, by policy.
        """
        if self._settings.check_replicas_every and self._wire.world_size > 1:
            self._checked_at = steps
            if self._buffers.names and self._settings.broadcast_buffers != "off":
                self._agree_on_buffers()
            self._replicas.check(f"before step {steps}")

    def _state(self) -> Iterator[tuple[str, Any]]:
        constants = set(self._buffers.names) - self._buffers.changing - self._unsent

        def compares(buffer: str) -> bool:
            # Buffers that change are made equal when they are sent, and not before.
            return buffer in constants and self._settings.broadcast_buffers != "off"

        # A sharded optimizer holds another part on every rank.
        whole = [o for o in self._optimizers() if type(o).__name__ != "ZeroRedundancyOptimizer"]
        for name, value in named_state(self._module, whole, compares):
            if name.removeprefix("parameter ") not in self._ignored:
                yield name, value

    # ------------------------------------------------------------------------------------------- unused parameters

    def _note_unused(self, tally: Tally) -> None:
        limit = self._settings.report_unused_after
        if not tally.count or self._steps >= limit:
            return
        self._steps += 1
        self._never_used.difference_update(self._reducer.names_used(tally))
        if self._steps < limit or not self._never_used:
            return
        parameters = dict(self._module.named_parameters())
        names = [name for name in parameters if name in self._never_used and parameters[name].requires_grad]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        if names:
            rank_zero_warn(
                f"in {limit} steps no rank had a gradient for {', '.join(names[:MAX_NAMED])}{more}: the loss does not"
                " depend on them; freeze them (requires_grad_(False)) or take them out if that is meant"
                " (report_unused_after=0 does not look)"
            )

    # ------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; within an accumulation window also the buffers that it began with."""
        within = not self._reducer.window_begins and self._buffers.has_begun
        return {
            "spikes": {owners: rule.state_dict() for owners, rule in self._spikes.items()},
            "buffers": self._buffers.copies() if within else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result."""
        for owners, norms in state["spikes"].items():
            if self._settings.spike_factor is not None:
                self._spikes[owners] = SpikeRule(self._settings.spike_factor)
                self._spikes[owners].load_state_dict(norms)
        if state["buffers"] is not None:
            self._buffers.begin_from(state["buffers"])


def grad_scale(precision: Any) -> float:
    """What a precision plugin's GradScaler multiplies gradients by; 1 if there is none."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else 1.0
