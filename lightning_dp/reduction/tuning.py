"""From what a few backwards and the link show to a bucket plan that all ranks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from lightning_dp.reduction.buckets import BucketPlan
from lightning_dp.reduction.planner import Link, predict_finish, sturdy_segments
from lightning_dp.reduction.wire import Wire

Beside = Literal["interrupting", "in batches"]  # how threads that move messages behave beside compute

KIB = 1024
MAX_BURST_SECONDS = 10.0
MAX_MEASURING_SECONDS = 5.0  # after which no further size is measured


@dataclass(frozen=True)
class Candidate:
    """A bucket plan that may stay, and how the transport's threads are to behave.

    Attributes:
        name: For messages.
        segments: How many gradients each bucket holds, in order.
        predicted: Seconds after the start of backward at which the last bucket is complete, as the planner sees it.
        measured: The same in a trial, after the start of the backward that began last; mean over the faster two thirds
            of usual steps. ``None`` before it, or if it met no data.
        in_batches: Whether threads that move messages do not interrupt backward; ``None`` where nobody has a choice.
    """

    name: str
    segments: tuple[int, ...]
    predicted: float
    measured: float | None = None
    in_batches: bool | None = None

    @property
    def label(self) -> str:
        """Its name, and whether threads that move messages do not interrupt backward."""
        return f"{self.name}, in batches" if self.in_batches else self.name


@dataclass(frozen=True)
class Forecast:
    """What the planner expects of its plan and of simpler ones, and what came of it; the same on all ranks.

    Attributes:
        candidates: A plan of the planner's own first; none twice.
        backward_end: When backward ended, in seconds after its start, as measured.
        chosen: The number of the candidate that won the trial; before that the planner's own.
    """

    candidates: tuple[Candidate, ...]
    backward_end: float
    chosen: int = 0

    @property
    def best(self) -> Candidate:
        """The candidate that won the trial; before that the planner's own."""
        return self.candidates[self.chosen]

    @property
    def exposed(self) -> float:
        """Seconds of communication that are predicted to come after backward, with the best candidate."""
        return max(0.0, self.best.predicted - self.backward_end)

    def with_trial(self, ends: Sequence[float | None], chosen: int) -> Forecast:
        """With what :class:`lightning_dp.reduction.trial.Trial` has measured, and the number of the winner."""
        pairs = zip(self.candidates, ends, strict=True)
        candidates = tuple(replace(candidate, measured=end) for candidate, end in pairs)
        return replace(self, candidates=candidates, chosen=chosen)

    def describe(self) -> str:
        """In one line."""
        best = self.best
        tried = "; ".join(f"{c.label}: {_ms(c.measured)} (predicted {_ms(c.predicted)})" for c in self.candidates)
        return (
            f"bucket plan '{best.label}' stays, with {len(best.segments)} buckets; time from when the last rank began"
            " backward until all were reduced, mean of the faster two thirds of steps, which are fewer for plans given"
            f" up early: {tried}; backward took {_ms(self.backward_end)}"
        )


class PlanTuner:
    """Watches some backwards, measures the link, and makes a plan.

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

    def forecast(
        self, simple: Mapping[str, tuple[int, ...]], order: Sequence[int], nbytes: Sequence[int], overlap: bool
    ) -> Forecast | None:
        """Makes a plan, the same on all ranks; a few messages, once.

        Args:
            simple: Segments of plans that may do as well, by name.
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
        answers = self._wire.gather((mine, overlap and self._wire.shares_cores(self._device)))
        everyone = [theirs for theirs, _ in answers if theirs is not None]
        if not everyone:
            return None
        # A bucket is reduced when the last rank has it. All ranks compute on the same numbers, so they agree.
        ready = [max(times) for times in zip(*(theirs[0] for theirs in everyone), strict=True)]
        sizes = [nbytes[index] for index in order]
        candidates: list[Candidate] = []
        waiting = measure_link(self._wire, self._device)
        for in_batches in (True, False) if any(has_choice for _, has_choice in answers) else (None,):
            link = waiting
            if overlap and self._device.type == "cpu":
                beside = measure_link(self._wire, self._device, "in batches" if in_batches else "interrupting")
                link = replace(beside, latency=waiting.latency, waiting=waiting.points)
            plans: dict[tuple[int, ...], str] = {}
            for name, segments in {"planned": sturdy_segments(ready, sizes, link), **simple}.items():
                plans.setdefault(segments, name)
            candidates += [
                Candidate(name, segments, predict_finish(segments, ready, sizes, link), in_batches=in_batches)
                for segments, name in plans.items()
            ]
        return Forecast(tuple(candidates), max(theirs[1] for theirs in everyone))


def segments_of(plan: BucketPlan, order: Sequence[int]) -> tuple[int, ...]:
    """Where the plan cuts the order: behind the last gradient of each bucket."""
    position = {index: at for at, index in enumerate(order)}
    ends = [max(position[index] for index in layout.indices) + 1 for layout in plan.buckets]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def measure_link(wire: Wire, device: torch.device, beside_compute: Beside | None = None) -> Link:
    """Times bursts of all-reduces of a few sizes; the same result on all ranks.

    On a CPU the transport runs on the cores that compute, where each message then costs several times what it does on
    idle ones; so both are to be known. Larger sizes are left out where time grows with size and a burst would take more
    than half a second, and where all has taken long.

    Args:
        wire: The ranks.
        device: Where gradients are.
        beside_compute: Whether cores are kept busy meanwhile, as they are during backward, and how the threads that
            move messages behave; ``None``: ranks only wait.
    """
    burst = partial(_burst_seconds, wire, device, beside_compute)
    sizes, points, longest = [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB], [], 0.0
    latency = burst(4 * KIB, 1)
    slow, spent = False, 0.0
    for size in sizes:
        messages = 8 if size <= 256 * KIB else 4
        repeats = 1 if slow else 3
        seconds = burst(size, messages, repeats)
        spent += (1 + repeats) * seconds
        before, longest = max(longest, latency), max(longest, seconds / messages)  # what takes less time is noise
        points.append((float(size), longest))
        slow = 4 * seconds > 0.5
        grows = longest > 2 * before  # else each message has its price, and larger ones are hardly dearer
        if (slow and grows) or spent > MAX_MEASURING_SECONDS:
            break
    return Link(latency, tuple(points))


def _burst_seconds(
    wire: Wire, device: torch.device, beside_compute: Beside | None, nbytes: int, messages: int, repeats: int = 3
) -> float:
    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(messages)]
    seconds = []
    for _ in range(1 + repeats):
        wire.gather(None)  # ranks start together
        _synchronize(device)
        start = time.perf_counter()
        with wire.beside_compute(device, beside_compute == "in batches"):
            works = [wire.all_reduce(buffer) for buffer in buffers]
            if beside_compute is not None:
                _compute_during(works)
        for work in works:
            wire.wait(work, "the measurement of the link")
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return max(wire.gather(statistics.median(seconds[1:])))


def _compute_during(works: Sequence[dist.Work | None]) -> None:
    """Keeps the cores busy until messages are complete, or something must be wrong with them."""
    factor = torch.ones(256, 256)
    end = time.perf_counter() + MAX_BURST_SECONDS
    while not all(work is None or work.is_completed() for work in works) and time.perf_counter() < end:
        torch.mm(factor, factor)


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
