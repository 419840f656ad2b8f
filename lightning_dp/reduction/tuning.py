"""From what a few backwards and the link show to a bucket plan that all ranks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_dp.reduction.buckets import BucketPlan
from lightning_dp.reduction.planner import Link, best_segments, predict_finish
from lightning_dp.reduction.wire import Wire

KIB = 1024


@dataclass(frozen=True)
class Forecast:
    """What the planner expects of the plan it has chosen; the same on all ranks.

    Attributes:
        segments: How many gradients each bucket holds, in order.
        finish: Seconds after the start of backward at which the last bucket is complete.
        backward_end: When backward ended, as measured.
        capped_finish: ``finish`` of the plan that was in force before, for comparison.
        link: The link, as measured.
    """

    segments: tuple[int, ...]
    finish: float
    backward_end: float
    capped_finish: float
    link: Link

    @property
    def exposed(self) -> float:
        """Seconds of communication that are expected after backward."""
        return max(0.0, self.finish - self.backward_end)


class PlanTuner:
    """Watches some backwards, measures the link, and finds the plan with the earliest predicted finish.

    Args:
        wire: The ranks that agree.
        device: Where gradients are.
    """

    BACKWARDS = 4  # the first, a warm-up, is not used

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._device = device
        self._reductions = 0
        self._ready: list[Mapping[int, float]] = []
        self._ends: list[float] = []

    def observe(self, ready: Mapping[int, float], backward_end: float) -> bool:
        """Takes note of one reduction, whether or not this rank had data for it.

        Args:
            ready: When, in seconds after the start of backward, each parameter's gradient was ready.
            backward_end: When backward ended.

        Returns:
            Whether enough has been seen; the same on all ranks.
        """
        self._reductions += 1
        if ready and self._reductions > 1:
            self._ready.append(ready)
            self._ends.append(backward_end)
        return self._reductions >= self.BACKWARDS

    def forecast(self, plan: BucketPlan, order: Sequence[int], nbytes: Sequence[int], overlap: bool) -> Forecast | None:
        """Agrees with all ranks on a plan; a few messages, once.

        Args:
            plan: The plan in force; the new one is not predicted to finish later.
            order: The order in which gradients are sent.
            nbytes: Size of each parameter's gradient.
            overlap: Whether buckets leave during backward.

        Returns:
            ``None`` if no rank had a gradient.
        """
        mine = None
        if self._ready:
            last = statistics.median(self._ends)
            seen = [
                [ready.get(index, end) for ready, end in zip(self._ready, self._ends, strict=True)] for index in order
            ]
            mine = ([statistics.median(times) if overlap else last for times in seen], last)
        everyone = [theirs for theirs in self._wire.gather(mine) if theirs is not None]
        if not everyone:
            return None
        # A bucket is reduced when the last rank has it. All ranks compute on the same numbers, so they agree.
        ready = [max(times) for times in zip(*(theirs[0] for theirs in everyone), strict=True)]
        link = measure_link(self._wire, self._device)
        sizes = [nbytes[index] for index in order]
        capped = predict_finish(_segments_of(plan, order), ready, sizes, link)
        best = best_segments(ready, sizes, link)
        finish = predict_finish(best, ready, sizes, link)
        if finish > capped:
            best, finish = _segments_of(plan, order), capped
        return Forecast(best, finish, max(theirs[1] for theirs in everyone), capped, link)


def _segments_of(plan: BucketPlan, order: Sequence[int]) -> tuple[int, ...]:
    """Where the plan cuts the order: behind the last gradient of each bucket."""
    position = {index: at for at, index in enumerate(order)}
    ends = [max(position[index] for index in layout.indices) + 1 for layout in plan.buckets]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def measure_link(wire: Wire, device: torch.device) -> Link:
    """Times bursts of all-reduces of a few sizes; the same result on all ranks.

    Larger sizes are left out where a burst would take more than half a second.
    """
    sizes, points, longest = [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB], [], 0.0
    latency = _burst_seconds(wire, device, 4 * KIB, 1)
    for size in sizes:
        messages = 8 if size <= 256 * KIB else 4
        busy = _burst_seconds(wire, device, size, messages) / messages
        longest = max(longest, busy)  # more bytes take no less time; what says so is noise
        points.append((float(size), longest))
        if busy * 4 * messages > 0.5:
            break
    return Link(latency, tuple(points))


def _burst_seconds(wire: Wire, device: torch.device, nbytes: int, messages: int, repeats: int = 3) -> float:
    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(messages)]
    seconds = []
    for _ in range(1 + repeats):
        wire.gather(None)  # ranks start together
        _synchronize(device)
        start = time.perf_counter()
        works = [wire.all_reduce(buffer) for buffer in buffers]
        for work in works:
            wire.wait(work, "the measurement of the link")
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return max(wire.gather(statistics.median(seconds[1:])))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
