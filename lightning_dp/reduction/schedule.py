"""Which bucket plan is in force, and the next one: from a backward, from measurement, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.reduction.arrivals import Arrivals
from lightning_dp.reduction.buckets import BucketPlan, plan_buckets, plan_segments
from lightning_dp.reduction.config import AUTO, AUTO_START_MB, MIB, ReducerConfig
from lightning_dp.reduction.tuning import Forecast, PlanTuner
from lightning_dp.reduction.wire import Wire


class Schedule:
    """In which order gradients are sent, and in which buckets; the same on all ranks.

    It starts from reverse registration, or from what a checkpoint knows of the same parameters. The first backward
    teaches the order in which gradients become ready, and how often; with ``bucket_cap_mb="auto"`` more teach when.

    Args:
        named: The parameters.
        wire: The ranks.
        device: Where gradients are.
        config: Caps.
        learnt: What :meth:`state_dict` of an earlier run gave; may be empty.

    Attributes:
        expected: How often each parameter fires in a backward; ``None`` until that is known.
        forecast: What a plan made by measurement is predicted to do.
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
        self._tuner = PlanTuner(wire, device) if config.bucket_cap_mb == AUTO else None
        self.expected: list[int] | None = None
        self.forecast: Forecast | None = None
        self._next_order = list(range(len(named)))[::-1]
        self._next_segments: tuple[int, ...] | None = None
        self._recall(learnt)

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        order, segments = learnt.get("order"), learnt.get("segments")
        at = {name: index for index, name in enumerate(self._names)}
        if order is None or set(order) != set(at):
            return
        self._next_order = [at[name] for name in order]
        self.expected = [learnt["fires"][name] for name in self._names]
        if segments is not None and self._tuner is not None:
            self._next_segments, self._tuner = tuple(segments), None

    @property
    def has_changed(self) -> bool:
        """Whether the next plan is another one than that in force."""
        return (self._next_order, self._next_segments) != (self._order, self._segments)

    def adopt(self) -> BucketPlan:
        """Puts the next plan in force."""
        config = self._config
        self._order, self._segments = self._next_order, self._next_segments
        if self._segments is not None:
            self._plan = plan_segments(self._parameters, self._order, self._segments)
        else:
            cap = config.bucket_cap_mb if not isinstance(config.bucket_cap_mb, str) else AUTO_START_MB
            self._plan = plan_buckets(self._parameters, self._order, cap * MIB, config.first_bucket_cap_mb * MIB)
        return self._plan

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
        return self._tuner is not None

    def tune(
        self, ready: Callable[[], Mapping[int, float]], backward_end: float, itemsize: Callable[[torch.dtype], int]
    ) -> None:
        """After a reduction: lets the tuner see it, if it ran in the final order; adopts the tuner's plan, if any.

        Args:
            ready: Gives when each gradient was ready, in seconds after the start of backward.
            backward_end: When backward ended.
            itemsize: Gives the bytes of an element on the wire.
        """
        if self._tuner is None or self.expected is None or self.has_changed:
            return
        if not self._tuner.observe(ready(), backward_end):
            return
        nbytes = [p.numel() * itemsize(p.dtype) for p in self._parameters]
        self.forecast = self._tuner.forecast(self._plan, self._order, nbytes, self._config.overlap)
        if self.forecast is not None:
            self._next_segments = self.forecast.segments
            self._tuner = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to send the same sums in the same order: plain numbers and strings."""
        known = self.expected is not None
        state: dict[str, Any] = {
            "order": [self._names[index] for index in self._next_order] if known else None,
            "fires": dict(zip(self._names, self.expected, strict=True)) if self.expected is not None else None,
        }
        if self._next_segments is not None:
            state["segments"] = list(self._next_segments)
        return state
