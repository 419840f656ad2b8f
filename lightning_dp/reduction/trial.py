"""Ways to reduce in turn in real steps, in heats: the better half goes on, until one is left, which stays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Generic, TypeVar

from lightning_dp.reduction.wire import Wire

Way = TypeVar("Way")


class Trial(Generic[Way]):
    """Some ways to reduce, each in force for one reduction, again and again.

    In turn, because then what else the machine does falls on all of them alike. Those that are clearly slower are soon
    known, those that are close need many steps to be told apart, so each heat spends as many steps as the one before
    on half as many ways: sequential halving (Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed
    bandits", ICML 2013). What earlier heats have seen of a way still counts.

    In a heat of an even number of ways each round begins with the next one: with two optimizers in turn every way then
    meets both equally often.

    Args:
        wire: The ranks that agree.
        ways: What is tried, the same on all ranks; at least one.

    Attributes:
        typical: For each way when its reductions end, in seconds after the start of the backward that began last: the
            mean over the faster two thirds of usual steps, as far as heats are over; ``None`` if no rank had data when
            it was its turn. The same on all ranks.
    """

    ROUNDS = 4  # of the first heat; an even number, for two optimizers in turn
    SHORT = 0.8  # of the median: what takes less had less to do

    def __init__(self, wire: Wire, ways: Sequence[Way]) -> None:
        self._wire = wire
        self._ways = ways
        self._left = list(range(len(ways)))
        self._ends: list[list[float]] = [[] for _ in ways]
        self._heat: list[float | None] = []
        self.typical: list[float | None] = [None for _ in ways]

    @property
    def turn(self) -> Way:
        """The way whose turn it is; when the trial is over, the one that stays."""
        return self._ways[self._way_at(len(self._heat))]

    @property
    def best(self) -> int:
        """The number of the way that stays, when the trial is over."""
        return self._left[0]

    def _way_at(self, reduction: int) -> int:
        """Which way is in force for a reduction of this heat, by its number."""
        left = len(self._left)
        number, place = divmod(reduction, left)
        return self._left[place if left % 2 else (place + number) % left]

    @property
    def _heat_length(self) -> int:
        """Reductions in this heat: about as many as in the first one, in an even number of rounds."""
        left = len(self._left)
        return 2 * math.ceil(self.ROUNDS * len(self._ways) / (2 * left)) * left

    def observe(self, end: float | None) -> bool:
        """Takes note of a reduction by the way whose turn it was; at the end of a heat ranks agree, with one message.

        Args:
            end: Seconds after the start of backward at which it was complete; ``None`` on a rank without data.

        Returns:
            Whether the trial is over; the same on all ranks.
        """
        self._heat.append(end)
        if len(self._heat) == self._heat_length:
            self._end_heat()
        return len(self._left) == 1 and not self._heat

    def _end_heat(self) -> None:
        everyone = self._wire.gather(self._heat)
        for reduction, ends in enumerate(zip(*everyone, strict=True)):
            # All ranks are through at about the same time: the least is the time of the rank that began last. What
            # others waited for it to begin says nothing about the way.
            since_last_began = min((end for end in ends if end is not None), default=None)
            if since_last_began is not None:
                self._ends[self._way_at(reduction)].append(since_last_began)
        self.typical = [self._typical(ends) if ends else None for ends in self._ends]
        # What nobody had data for comes last; of equal ones the first is preferred.
        ranked = sorted(self._left, key=lambda way: math.inf if (end := self.typical[way]) is None else end)
        self._left = sorted(ranked[: math.ceil(len(ranked) / 2)])
        self._heat = []

    @classmethod
    def _typical(cls, ends: Sequence[float]) -> float:
        """The mean over the faster two thirds, without those that are far faster than the median.

        What else the machine does makes steps slower, in bursts: the slowest third is left out, and what is left tells
        two ways apart better than medians do. A short batch makes a step faster. Where two optimizers take turns and
        differ as much, the longer reduction decides.
        """
        shortest = cls.SHORT * statistics.median(ends)
        usual = sorted(end for end in ends if end >= shortest)
        return statistics.mean(usual[: math.ceil(2 * len(usual) / 3)])
