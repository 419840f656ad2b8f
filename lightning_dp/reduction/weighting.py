"""How losses and sums are scaled, so that the average over ranks and micro-batches weighs by count. Pure."""

from __future__ import annotations

import math

from lightning_dp.reduction.ballot import Tally


class Weighting:
    """Factors of losses before backward, and of the sums over ranks after it.

    A loss is multiplied by ``count / reference``, where the reference is the usual count, the same on all ranks. So
    gradients stay in range, and with equal counts the sum is the average already.

    Args:
        ranks: Number of ranks.
        averages: Whether what travels is averaged over ranks, not summed: by a communication hook.

    Attributes:
        reference: Total count and number of micro-batches whose ratio losses are scaled by.
        wide: Whether some sums are wider than their gradients, and rounded in the end.
    """

    def __init__(self, ranks: int, averages: bool) -> None:
        self._ranks = ranks
        self._averages = averages
        self.reference: tuple[int, int] | None = None
        self.wide = False

    def refer_to(self, count: int, micro_batches: int) -> None:
        """From now on losses are scaled by these, if there was any data."""
        if count:
            self.reference = (count, micro_batches)

    def of_loss(self, count: int) -> float:
        """The factor for the loss of a micro-batch of this count."""
        total, micro_batches = self._unit()
        ranks = 1 if self._averages else self._ranks
        return count * micro_batches / (total * ranks)

    def of_sums(self, tally: Tally, divided_by: int | None) -> float:
        """The factor that makes the sums over ranks averages.

        Args:
            tally: Counts of all ranks.
            divided_by: What losses had been divided by before; ``None`` multiplies by the micro-batches per rank.
        """
        if tally.count == 0:
            return 1.0
        total, micro_batches = self._unit()
        # Integers up to the last division: with equal counts the factor is exactly 1 and costs no pass over memory.
        if divided_by is None:
            return (total * tally.micro_batches) / (micro_batches * tally.count)
        return (total * self._ranks * divided_by) / (micro_batches * tally.count)

    def _unit(self) -> tuple[int, int]:
        """Total count and number of micro-batches whose ratio is 1 in the scaled losses."""
        total, micro_batches = self.reference or (1, 1)
        if not self.wide:
            return total, micro_batches
        # A narrow gradient is rounded when its loss has been scaled. By a power of two that costs nothing, and a count
        # of up to 256 is a factor that bf16 holds; what is left is made good in float32.
        return 1 << max(0, round(math.log2(total * self._ranks / micro_batches))), self._ranks
