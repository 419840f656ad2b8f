"""Ways to reduce in turn in real steps: the one whose reductions end first stays."""

from __future__ import annotations

import statistics
from typing import Generic, TypeVar

from lightning_dp.reduction.wire import Wire

Way = TypeVar("Way")


class Trial(Generic[Way]):
    """Some ways to reduce, each in force for one reduction, again and again.

    In turn, because then what else the machine does falls on all of them alike. Where their number is even, each round
    begins with the next one: with two optimizers in turn every way then meets both equally often.

    Args:
        wire: The ranks that agree.
        ways: What is tried, the same on all ranks.
    """

    ROUNDS = 4  # an even number, for two optimizers in turn

    def __init__(self, wire: Wire, ways: tuple[Way, ...]) -> None:
        self._wire = wire
        self._ways = ways
        self._seen: list[float | None] = []

    @property
    def turn(self) -> Way:
        """The way whose turn it is."""
        return self._ways[self._way_at(len(self._seen))]

    def _way_at(self, reduction: int) -> int:
        """Which way is in force for a reduction, by its number."""
        ways = len(self._ways)
        number, place = divmod(reduction, ways)
        return place if ways % 2 else (place + number) % ways

    def observe(self, end: float | None) -> bool:
        """Takes note of a reduction by the way whose turn it was.

        Args:
            end: Seconds after the start of backward at which it was complete; ``None`` on a rank without data.

        Returns:
            Whether enough has been seen; the same on all ranks.
        """
        self._seen.append(end)
        return len(self._seen) == self.ROUNDS * len(self._ways)

    def agree(self) -> tuple[float | None, ...]:
        """With one message: how the ways did.

        Returns:
            For each the median end of its reductions, on the slowest rank, in seconds after the start of backward;
            ``None`` if no rank had data when it was its turn. The same on all ranks.
        """
        everyone = self._wire.gather(self._seen)
        slowest = [max((end for end in ends if end is not None), default=None) for ends in zip(*everyone, strict=True)]
        of_way: list[list[float]] = [[] for _ in self._ways]
        for reduction, end in enumerate(slowest):
            if end is not None:
                of_way[self._way_at(reduction)].append(end)
        return tuple(statistics.median(ends) if ends else None for ends in of_way)
