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
        self._sends_buffers = settings.broadcast_buffers == "step"
        self._stale: list[str] = []  # buffers that some rank has changed since rank 0's were sent
        self._changing: set[str] = set()  # those that any rank has ever changed
        self._checked_at = 0
        self._replicas = ReplicaCheck(wire, self._state, settings.on_replica_mismatch, module.device)
        self._facts: Sequence[SamplerFacts] = ()
        self._same_data: SameDataCheck | None = None
        self._word: int | None = None
        self.spikes = SpikeRule(settings.spike_factor) if settings.spike_factor is not None else None
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

    def receive(self, batch: Any, padding: bool, epoch: int, first: bool) -> None:
        """Takes the fingerprint of a training batch, while it is on the host, in the first steps of an epoch."""
        if self._settings.same_data == "off" or self._wire.world_size == 1:
            return
        if self._same_data is None:
            self._same_data = SameDataCheck(self._facts, legitimate=self._expects_equal_data)
        if first:
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
        """Before a batch is worked on: when a window begins, buffers are sent if they are to be, and remembered.

        Args:
            steps: Optimizer steps taken or skipped so far.
        """
        if not self._reducer.window_begins:
            return
        if self._stale:
            self._buffers.broadcast(self._wire, self._stale)
            self._stale = []
        every = self._settings.check_replicas_every
        if every and steps >= self._checked_at + every:
            self.check_replicas(steps)
        self._buffers.begin()

    def cast(self) -> None:
        """Before the backward that ends a window: what this rank's ballot is to say."""
        if self._sends_buffers:
            self._reducer.notes = self._buffers.changed()
        self._reducer.word, self._word = self._word, None

    def judge(self, tally: Tally, verdict: Verdict, scale: float) -> Verdict:
        """After a reduction: what follows from what the ranks have said.

        Args:
            tally: What they said.
            verdict: The verdict so far.
            scale: What a GradScaler has multiplied gradients by.

        Returns:
            The verdict, or another one if the gradient is a spike.

        Raises:
            SameDataError: If ranks are fed the same data and the policy is to raise.
        """
        changed = [name for name, ranks in zip(self._buffers.names, tally.notes, strict=False) if ranks]
        self._stale = list(dict.fromkeys([*self._stale, *changed]))
        self._changing.update(changed)
        self._judge_data(tally.words)
        self._note_unused(tally)
        if self.spikes is not None and verdict.step:
            spike = self.spikes.judge(self._reducer.gradient_norm() / scale)
            if spike:
                return Verdict(Reason.VETO, detail=spike)
        return verdict

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
        if self._settings.broadcast_buffers != "off":
            self._buffers.broadcast(self._wire)
            self._stale = []

    def check_replicas(self, steps: int) -> None:
        """Compares what ranks hold; all ranks together.

        Raises:
            ReplicaMismatchError: If they differ, by policy.
        """
        if self._settings.check_replicas_every and self._wire.world_size > 1:
            self._checked_at = steps
            self._replicas.check(f"before step {steps}")

    def _state(self) -> Iterator[tuple[str, Any]]:
        def compares(buffer: str) -> bool:
            own = buffer in self._ignored or not self._sends_buffers
            return not own and (not self._stale or buffer not in self._changing)

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
        """What a resumed run needs."""
        return {"spikes": self.spikes.state_dict() if self.spikes is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result."""
        if self.spikes is not None and state["spikes"] is not None:
            self.spikes.load_state_dict(state["spikes"])


def grad_scale(precision: Any) -> float:
    """What a precision plugin's GradScaler multiplies gradients by; 1 if there is none."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else 1.0
