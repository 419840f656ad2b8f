"""What a run did, in a few figures."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from lightning_dp.insight.cost_model import ring_all_reduce_bytes


@dataclass(frozen=True)
class RunReport:
    """Figures of the training so far, equal on all ranks but for the times.

    Attributes:
        world_size: Number of ranks.
        steps: Optimizer steps taken.
        skipped_steps: Steps that all ranks skipped.
        count: Samples, tokens, ... seen by all ranks together, those of skipped steps included.
        bytes_per_step: Bytes that a rank sends per step: what was really handed to all-reduces, ballot included, as
            the ring sends it. Median over the recent steps.
        formula_bytes_per_step: ``2 (n - 1) / n`` times the bytes of all trainable parameters.
        messages_per_step: All-reduces per step, the ballot included; median.
        buckets: Buckets in the plan.
        exposed_seconds: Time per step that this rank waited after its backward had ended, for the network and for ranks
            that were later; median.
        backward_seconds: Time per step from the start to the end of the last backward of a window; median.
        predicted_exposed_seconds: What ``exposed_seconds`` was predicted to be for a plan made by measurement;
            ``None`` if there is none.
    """

    world_size: int
    steps: int
    skipped_steps: int
    count: int
    bytes_per_step: float
    formula_bytes_per_step: float
    messages_per_step: float
    buckets: int
    exposed_seconds: float
    backward_seconds: float
    predicted_exposed_seconds: float | None


class RunFigures:
    """Collects the figures of a :class:`RunReport`, one reduction at a time; medians over the last ``window``."""

    def __init__(self, window: int = 1000) -> None:
        self._nbytes: deque[float] = deque(maxlen=window)
        self._messages: deque[float] = deque(maxlen=window)
        self._exposed: deque[float] = deque(maxlen=window)
        self._backward: deque[float] = deque(maxlen=window)

    def add(self, nbytes: int, messages: int, exposed: float, backward: float) -> None:
        """Notes one reduction: bytes and number of all-reduces, seconds exposed and seconds of backward."""
        self._nbytes.append(nbytes)
        self._messages.append(messages)
        self._exposed.append(exposed)
        self._backward.append(backward)

    def report(
        self,
        world_size: int,
        steps: int,
        skipped_steps: int,
        count: int,
        buckets: int,
        gradient_bytes: int,
        predicted_exposed_seconds: float | None = None,
    ) -> RunReport:
        """The report; ``gradient_bytes`` is the size of all trainable parameters."""

        def median(values: deque[float]) -> float:
            return statistics.median(values) if values else 0.0

        return RunReport(
            world_size=world_size,
            steps=steps,
            skipped_steps=skipped_steps,
            count=count,
            bytes_per_step=ring_all_reduce_bytes(median(self._nbytes), world_size),
            formula_bytes_per_step=ring_all_reduce_bytes(gradient_bytes, world_size),
            messages_per_step=median(self._messages),
            buckets=buckets,
            exposed_seconds=median(self._exposed),
            backward_seconds=median(self._backward),
            predicted_exposed_seconds=predicted_exposed_seconds,
        )
