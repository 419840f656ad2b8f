"""Which bucket plan is in force, and the next one: from a backward, from measurement, or from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.reduction.arrivals import Arrivals
from lightning_dp.reduction.buckets import BucketPlan, plan_buckets, plan_segments
from lightning_dp.reduction.config import FIXED_CAP_MB, MIB, TRIED_MB, ReducerConfig
from lightning_dp.reduction.planner import filled_segments
from lightning_dp.reduction.trial import Trial
from lightning_dp.reduction.tuning import Candidate, Forecast, PlanTuner, segments_of
from lightning_dp.reduction.wire import Wire

log = logging.getLogger(__name__)


class Schedule:
    """In which order gradients are sent, and in which buckets; the same on all ranks.

    It starts from reverse registration, or from what a checkpoint knows of the same parameters. The first backward
    teaches the order in which gradients become ready, and how often; with ``bucket_cap_mb="auto"`` more teach when,
    which makes a plan, and a trial of it and of some simple ones decides.

    Args:
        named: The parameters.
        wire: The ranks.
        device: Where gradients are.
        config: Caps.
        learnt: What :meth:`state_dict` of an earlier run gave; may be empty.

    Attributes:
        expected: How often each parameter fires in a backward; ``None`` until that is known.
        in_batches: Whether the transport's threads are not to interrupt backward.
        forecast: What a plan made by measurement is predicted to do, and what it did in the trial.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        wire: Wire,
        device: torch.device,
        config: ReducerConfig,
        learnt: Mapping[str, Any],
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._wire, self._config = wire, config
        self._arrivals: Arrivals | None = None
        self._measured = config.plans_by_measurement and wire.world_size > 1
        self._tuner = PlanTuner(wire, device) if self._measured else None
        self._trial: Trial[Candidate] | None = None
        self.in_batches = True
        self.expected: list[int] | None = None
        self.forecast: Forecast | None = None
        self._next_order = list(range(len(named)))[::-1]
        self._next_segments: tuple[int, ...] | None = None
        self._recall(learnt)

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        order = learnt.get("order")
        at = {name: index for index, name in enumerate(self._names)}
        if order is None or set(order) != set(at):
            return
        self._next_order = [at[name] for name in order]
        self.expected = [learnt["fires"][name] for name in self._names]
        if self._measured and learnt.get("world_size") == self._wire.world_size:
            self._next_segments, self._tuner = tuple(learnt["segments"]), None
            self.in_batches = learnt.get("in_batches", True)

    @property
    def is_final(self) -> bool:
        """Whether the plan in force stays, as far as is known; the same on all ranks."""
        return self.expected is not None and not self.measures and not self.has_changed

    @property
    def has_changed(self) -> bool:
        """Whether the next plan is another one than that in force."""
        return (self._next_order, self._next_segments) != (self._order, self._segments)

    def adopt(self) -> BucketPlan:
        """Puts the next plan in force."""
        self._order, self._segments = self._next_order, self._next_segments
        if self._segments is not None:
            self._plan = plan_segments(self._parameters, self._order, self._segments)
        else:
            self._plan = self._by_caps(self._config.cap_mb)
        return self._plan

    def _by_caps(self, cap_mb: float) -> BucketPlan:
        first = self._config.first_bucket_cap_mb
        return plan_buckets(self._parameters, self._order, cap_mb * MIB, first * MIB)

    def watch(self) -> None:
        """A backward begins."""
        if self.expected is None:
            self._arrivals = Arrivals(len(self._parameters))

    def record(self, index: int) -> None:
        """The gradient of parameter ``index`` has just been accumulated."""
        if self._arrivals is not None:
            self._arrivals.record(index)

    def learn(self) -> None:
        """Adopts, on every rank, the order of the first rank that ran a backward, and the highest counts of all.

        A parameter that has not fired yet is expected once: should it never fire, its bucket, which stands last in
        the new order, is launched at the end of backward.
        """
        if self._arrivals is None:
            return
        mine = (self._arrivals.order(self._order), self._arrivals.fires)
        everyone = [(order, fires) for order, fires in self._wire.gather(mine) if any(fires)]
        if everyone:  # else there was no data at all; the next backward is watched instead
            self._next_order = everyone[0][0]
            self.expected = [max(1, *fires) for fires in zip(*(fires for _, fires in everyone), strict=True)]
        self._arrivals = None

    @property
    def measures(self) -> bool:
        """Whether it is to be told when gradients are ready."""
        return self._tuner is not None or self._trial is not None

    def tune(
        self,
        ready: Callable[[], Mapping[int, float]],
        backward_end: float,
        end: float,
        itemsize: Callable[[torch.dtype], int],
    ) -> None:
        """After a reduction: learns from it, if it ran in the final order, and decides which plan comes next.

        Args:
            ready: Gives when each gradient was ready, in seconds after the start of backward.
            backward_end: When backward ended.
            end: When the reduction ended.
            itemsize: Gives the bytes of an element on the wire.
        """
        if self.expected is None or self.has_changed or not self.measures:
            return
        seen = ready()
        if self._trial is not None:
            self._go_on_trying(end if seen else None)
        elif self._tuner is not None and self._tuner.observe(seen, backward_end):
            nbytes = [p.numel() * itemsize(p.dtype) for p in self._parameters]
            sizes = [nbytes[index] for index in self._order]
            simple = {f"{size:g} MiB": filled_segments(sizes, size * MIB) for size in TRIED_MB}
            simple[f"{FIXED_CAP_MB:g} MiB"] = segments_of(self._by_caps(FIXED_CAP_MB), self._order)
            self.forecast = self._tuner.forecast(simple, self._order, nbytes, self._config.sends_during_backward)
            if self.forecast is not None:
                self._tuner = None
                self._trial = Trial(self._wire, self.forecast.candidates)
                self._take(self._trial.turn)

    def _take(self, candidate: Candidate) -> None:
        self._next_segments = candidate.segments
        if candidate.in_batches is not None:
            self.in_batches = candidate.in_batches

    def _go_on_trying(self, end: float | None) -> None:
        assert self._trial is not None and self.forecast is not None
        is_over = self._trial.observe(end)
        self._take(self._trial.turn)
        if is_over:
            self.forecast = self.forecast.with_trial(self._trial.typical, self._trial.best)
            self._trial = None
            if self._wire.rank == 0:
                log.info(self.forecast.describe())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to send the same sums in the same order: plain numbers and strings."""
        known = self.expected is not None
        state: dict[str, Any] = {
            "order": [self._names[index] for index in self._next_order] if known else None,
            "fires": dict(zip(self._names, self.expected, strict=True)) if self.expected is not None else None,
        }
        if self._measured and not self.measures:
            state["segments"] = list(self._next_segments or ())
            state["in_batches"] = self.in_batches
            state["world_size"] = self._wire.world_size
        return state
