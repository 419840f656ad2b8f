"""What a reduction did."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.insight.timeline import StepTimes
from lightning_dp.reduction.ballot import Tally, Verdict


@dataclass(frozen=True)
class Reduction:
    """What one reduction did; equal on all ranks but for ``times``.

    Attributes:
        verdict: Whether the optimizer steps.
        tally: Counts and flags of all ranks.
        carried: Names of parameters whose gradients of an earlier reduction were still there; they have been added.
        factor: What the summed gradients were multiplied by at the end; 1 with equal counts.
        messages: All-reduces issued, the ballot included.
        nbytes: Bytes handed to them.
        times: When buckets were ready, launched and done.
        norm: Euclidean norm of the averaged gradients, without earlier ones that were added; 0 if not measured.
    """

    verdict: Verdict
    tally: Tally
    carried: frozenset[str]
    factor: float
    messages: int
    nbytes: int
    times: StepTimes
    norm: float = 0.0
