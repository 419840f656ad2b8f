"""The bucket plan that finishes first, from when gradients are ready and what the link does. Pure.

Which runs of gradients to merge into one message is the question of MG-WFBP (Shi, Chu and Li, "MG-WFBP: Efficient data
communication for distributed synchronous SGD algorithms", INFOCOM 2019). Their answer is greedy and believes in one
latency per message; here a dynamic programme weighs every contiguous plan, with a cost that is measured.

The best plan for exactly what was measured sends each message just when the link is free, so that any delay leaves the
link idle: beside transfers a backward is slower than it was when it was measured, and another batch takes another time.
What is chosen, then, is the plan that loses least on average over backwards that are faster and slower than that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

# Above this many, neighbours are merged before the search: it takes time and memory quadratic in them.
MAX_UNITS = 128
# A plan with fewer messages is preferred if it finishes within this share of the best: they cost the host time too.
TOLERANCE = 0.002
# How many times as long as measured a backward may take, against the link; for each there is a best plan.
STRETCHES = (0.7, 0.85, 1.0, 1.2, 1.45)


@dataclass(frozen=True)
class Link:
    """What all-reduces cost when they follow each other closely.

    Several are in flight at a time, so each costs the link less than it takes by itself: the next one's bytes travel
    while the last bytes of this one are waited for. How much less depends on size, so it is measured at a few. On a CPU
    it also depends on whether the cores that move messages compute meanwhile, as they do until the last gradient is
    ready, or only wait.

    Attributes:
        latency: Seconds between a message's end on the link and its completion on the ranks.
        points: (bytes, seconds that the link is busy with one message of them), by ascending size; at least one.
            Between them costs are interpolated, below the first they stay, above the last they grow in proportion.
        waiting: The same while ranks only wait; empty where that makes no difference.
    """

    latency: float
    points: tuple[tuple[float, float], ...]
    waiting: tuple[tuple[float, float], ...] = ()

    def busy(self, nbytes: float, waiting: bool = False) -> float:
        """Seconds that the link is busy with one message, while ranks compute or, with ``waiting``, only wait."""
        points = self.waiting if waiting and self.waiting else self.points
        sizes = [size for size, _ in points]
        at = bisect_right(sizes, nbytes)
        if at == 0:
            return points[0][1]
        (size, seconds) = points[at - 1]
        if at == len(points):
            return seconds * nbytes / size
        next_size, next_seconds = points[at]
        return seconds + (next_seconds - seconds) * (nbytes - size) / (next_size - size)

    def free_after(self, start: float, nbytes: float, compute_end: float) -> float:
        """When the link is free again after a message that it takes up at ``start``, if ranks compute until then."""
        beside = self.busy(nbytes)
        if start + beside <= compute_end:
            return start + beside
        left = 1.0 if start >= compute_end else 1.0 - (compute_end - start) / beside
        return max(start, compute_end) + left * self.busy(nbytes, waiting=True)


def predict_finish(segments: Sequence[int], ready: Sequence[float], nbytes: Sequence[float], link: Link) -> float:
    """When the last of some messages is complete.

    Args:
        segments: How many gradients each message holds, in order.
        ready: When each gradient is ready, in seconds after the start of backward; with the last one ranks are taken
            to stop computing.
        nbytes: Size of each.
        link: The link.

    Returns:
        Seconds after the start of backward.
    """
    assert sum(segments) == len(ready) == len(nbytes)
    free, latest, compute_end = 0.0, 0.0, max(ready, default=0.0)
    for first, end in pairwise([0, *accumulate(segments)]):
        latest = max(latest, *ready[first:end])  # messages leave in order
        free = link.free_after(max(free, latest), sum(nbytes[first:end]), compute_end)
    return free + link.latency if segments else 0.0


def filled_segments(nbytes: Sequence[float], size: float) -> tuple[int, ...]:
    """Messages that end with the gradient that fills them up to ``size`` bytes, or goes beyond."""
    segments, filled = [], 0.0
    for n, gradient in enumerate(nbytes):
        if n == 0 or filled >= size:
            segments.append(0)
            filled = 0.0
        segments[-1] += 1
        filled += gradient
    return tuple(segments)


def sturdy_segments(ready: Sequence[float], nbytes: Sequence[float], link: Link) -> tuple[int, ...]:
    """Of the plans that are best for a backward :data:`STRETCHES` times as long, the one that is good for all of them.

    Args:
        ready: When each gradient is ready, in the order in which they are sent.
        nbytes: Size of each.
        link: The link.

    Returns:
        How many gradients each message holds: the plan whose predicted finish, as a multiple of the best one's, is the
        lowest on average.
    """
    backwards = [[when * stretch for when in ready] for stretch in STRETCHES]
    plans = [best_segments(backward, nbytes, link) for backward in backwards]
    best = [predict_finish(plan, backward, nbytes, link) for plan, backward in zip(plans, backwards, strict=True)]

    def loss(plan: tuple[int, ...]) -> float:
        finishes = [predict_finish(plan, backward, nbytes, link) for backward in backwards]
        return sum(finish / least for finish, least in zip(finishes, best, strict=True) if least > 0)

    return min(plans, key=loss)


def best_segments(ready: Sequence[float], nbytes: Sequence[float], link: Link) -> tuple[int, ...]:
    """The contiguous cut with the earliest predicted finish; of nearly equal ones that with the fewest messages.

    Exact up to :data:`MAX_UNITS` gradients, above it for neighbours merged into at most as many runs of similar size.

    Args:
        ready: When each gradient is ready, in the order in which they are sent.
        nbytes: Size of each.
        link: The link.

    Returns:
        How many gradients each message holds.
    """
    if not ready:
        return ()
    units = _merged(nbytes)
    ends = [0, *accumulate(units)]
    n = len(units)
    latest = list(accumulate(ready, max))
    at = torch.tensor([latest[end - 1] for end in ends[1:]], dtype=torch.float64)
    total = list(accumulate(nbytes, initial=0.0))
    # beside[i, j]: the link's time for units i to j in one message while ranks compute; after[i, j]: while they wait.
    beside, after = (torch.full((n, n), float("inf"), dtype=torch.float64) for _ in range(2))
    for i in range(n):
        for j in range(i, n):
            size = total[ends[j + 1]] - total[ends[i]]
            beside[i, j], after[i, j] = link.busy(size), link.busy(size, waiting=True)
    # free[m][j]: when the link is free again after the first j units in m messages.
    free = [torch.full((n + 1,), float("inf"), dtype=torch.float64)]
    free[0][0] = 0.0
    came_from = []
    for _ in range(n):
        start = torch.maximum(free[-1][:-1, None], at[None, :])
        left = (1 - (at[-1] - start) / beside).clamp(max=1.0)  # of a message, when the last gradient is ready
        late = torch.maximum(start, at[-1]) + left * after
        finish = torch.where((left > 0) & (beside < float("inf")), late, start + beside)
        best, where = finish.min(0)
        free.append(torch.cat([torch.full((1,), float("inf"), dtype=torch.float64), best]))
        came_from.append(where.tolist())
    ideal = min(float(finish[n]) for finish in free[1:])
    messages = next(m for m in range(1, n + 1) if float(free[m][n]) <= ideal * (1 + TOLERANCE))
    cuts, j = [n], n
    for m in range(messages, 0, -1):
        j = came_from[m - 1][j - 1]
        cuts.append(j)
    return tuple(ends[b] - ends[a] for a, b in pairwise(reversed(cuts)))


def _merged(nbytes: Sequence[float]) -> list[int]:
    """How many gradients each unit of the search holds: one, or as many as make an equal part of all bytes."""
    if len(nbytes) <= MAX_UNITS:
        return [1] * len(nbytes)
    part = sum(nbytes) / MAX_UNITS
    units: list[int] = []
    filled, last = 0.0, -1
    for size in nbytes:
        # Into the part in which its middle lies, so that no more parts arise than there are.
        number = int((filled + size / 2) / part) if part else 0
        if number == last:
            units[-1] += 1
        else:
            units.append(1)
        last = number
        filled += size
    return units
