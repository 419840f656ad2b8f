"""Where a run stands: steps attempted and skipped, and the ranks' verdict on the gradients that there are."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_dp.errors import NonFiniteGradientError
from lightning_dp.reduction.ballot import Reason, Verdict

_SAVED = ("attempted", "skipped", "consecutive_skips", "dropped", "total_count")


class Progress:
    """Counters of a run; equal on all ranks, as every change follows from a verdict that all ranks share.

    Args:
        raises: Raise at the first step that is skipped for a non-finite gradient.
        max_consecutive_skips: Raise after that many skipped steps in a row.

    Attributes:
        attempted: Optimizer steps taken or skipped; the number of the step under way.
        skipped: Steps skipped.
        consecutive_skips: Steps skipped for a non-finite gradient or by a veto since the last step taken.
        dropped: Parts of steps, each of one rank, that were left out for a non-finite gradient.
        total_count: Samples, tokens, ... seen by all ranks.
        last_skipped: Whether the last step was skipped.
        skipped_in_a_row: Steps skipped since the last one taken, for whatever reason.
        verdict: On the gradients that there are.
    """

    def __init__(self, raises: bool, max_consecutive_skips: int) -> None:
        self._raises = raises
        self._max_consecutive_skips = max_consecutive_skips
        self.verdict = Verdict()
        self._spoiled: Set[str] = frozenset()  # parameters whose gradients it is of, if it is a bad one
        self.attempted = 0
        self.skipped = 0
        self.consecutive_skips = 0
        self.dropped = 0
        self.total_count = 0
        self.last_skipped = False
        self.skipped_in_a_row = 0

    def note(self, verdict: Verdict, count: int, carried: Set[str], reduced: Iterable[str]) -> None:
        """Takes in a reduction's verdict and count.

        A verdict holds for as long as the gradients do that it is of, whatever optimizers step on them.

        Args:
            verdict: Of the reduction.
            count: Samples, tokens, ... in it.
            carried: Parameters whose earlier gradients were still there, and were added; then one bad part spoils the
                sum, and a part without data adds nothing.
            reduced: Parameters that it has gradients of.
        """
        self._spoiled &= carried
        keeps_earlier = bool(self._spoiled) or (verdict.reason is Reason.EMPTY and bool(carried))
        if not keeps_earlier or self.verdict.reason is Reason.EMPTY:
            self.verdict = verdict
            self._spoiled = frozenset() if verdict.step else frozenset(reduced)
        self.total_count += count

    def skips(self, where: str, scaler_skips: bool) -> bool:
        """Whether the strategy skips the step under way, by the verdict on the gradients that there are.

        Args:
            where: Step and batch, for messages.
            scaler_skips: A GradScaler finds the same Inf on every rank, skips, and lowers its scale by itself.

        Raises:
            NonFiniteGradientError: If the policy is to raise, or after too many skips in a row.
        """
        verdict = self.verdict
        self.last_skipped = not verdict.step
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.last_skipped else 0
        by_scaler = scaler_skips and verdict.reason in (Reason.NONFINITE, Reason.OVERFLOW)
        if verdict.dropped:
            self.dropped += len(verdict.dropped)
            rank_zero_warn(
                f"{where}: {verdict.describe()}; left out of the step, which is that of the other ranks"
                f" ({self.dropped} parts left out so far)"
            )
        if verdict.step or by_scaler:
            self.consecutive_skips = 0
            self.skipped += by_scaler
        elif verdict.reason is Reason.EMPTY:
            self.skipped += 1
            rank_zero_warn(f"{where}: no rank had data, the step is skipped on all ranks")
        else:
            self.skipped += 1
            self.consecutive_skips += 1
            self._complain(where, verdict)
        return self.last_skipped and not by_scaler

    def _complain(self, where: str, verdict: Verdict) -> None:
        cause = f"{where}: {verdict.describe()}"
        row, limit = self.consecutive_skips, self._max_consecutive_skips
        if self._raises and verdict.reason is not Reason.VETO:
            raise NonFiniteGradientError(f"{cause}; weights are as before this step")
        if row >= limit:
            raise NonFiniteGradientError(
                f"{cause}; {row} steps in a row were skipped (max_consecutive_skips={limit}); look at the data and the"
                " learning rate"
            )
        rank_zero_warn(f"{cause}; the step is skipped on all ranks ({row} in a row, at most {limit - 1} are let pass)")

    def state_dict(self) -> dict[str, Any]:
        """The counters, as plain numbers."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result."""
        for name in _SAVED:
            setattr(self, name, state.get(name, 0))
