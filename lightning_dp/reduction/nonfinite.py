"""Non-finite gradients: found in one pass over a bucket, described only when there is something to describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from lightning_dp.reduction.ballot import Flag
from lightning_dp.reduction.buckets import Bucket


def scale_and_check_(flat: Tensor, factor: float = 1.0) -> Tensor:
    """Multiplies ``flat`` by ``factor`` in place and tells whether the result holds NaN or Inf, mostly in one pass.

    Args:
        flat: Floating-point tensor of any real dtype.
        factor: Finite factor.

    Returns:
        Zero-dimensional float32 tensor on the same device: 1.0 if an element is not finite, else 0.0.
    """
    if factor > 1.0 or (flat.dtype is torch.float64 and factor != 1.0):
        # The fused operator looks before it multiplies, so it would miss an overflow; and it takes its factor in
        # float32, which would cost float64 half its digits.
        flat.mul_(factor)
        factor = 1.0
    found = torch.zeros((), dtype=torch.float32, device=flat.device)
    scale = torch.full((), factor, dtype=torch.float32, device=flat.device)
    # The operator behind GradScaler (checked on torch 2.13): one pass where mul_ and isfinite().all() take three.
    torch._amp_foreach_non_finite_check_and_unscale_([flat], found, scale)
    return found


def _square(flat: Tensor) -> float:
    """A number that no square exceeds; NaN or Inf if there is one, or where the square leaves the range."""
    if flat.numel() == 0:
        return 0.0
    if flat.dtype in (torch.float16, torch.bfloat16):  # whose products are slow on a CPU
        return float(max(map(abs, map(float, torch.aminmax(flat)))) ** 2)
    # The norm is the cheapest reading of memory there is: NaN and Inf show in it, and so do large numbers.
    return float(torch.dot(flat, flat))


def _as_run(grad: Tensor | None) -> Tensor | None:
    """A gradient as one run of real numbers, if it lies in memory so."""
    if grad is None or grad.layout is not torch.strided or grad.is_complex() or not grad.is_contiguous():
        return None
    return grad.detach().view(-1)


@dataclass
class _Glances:
    """What has been seen of a bucket by looking at gradients one by one, when each had just been made.

    Attributes:
        version: The bucket's version, as PyTorch counts writes to it, at the last glance.
        slots: The gradients looked at.
        square: A number that the square of no number in them exceeds.
        valid: Nobody has written to the bucket between two glances.
    """

    version: int
    slots: set[int] = field(default_factory=set)
    square: float = 0.0
    valid: bool = True


class LocalCheck:
    """Looks for non-finite values among this rank's own gradients, before they are summed.

    After the sum every rank holds the NaN and nobody knows whose it was, so this is the only moment to tell. And where
    all ranks find that their gradients are far from the largest number there is, their sum need not be looked at.

    Args:
        names: Name of each parameter of the plan.
        device: Where the gradients are.
        ranks: How many ranks' gradients are added up.
    """

    MAX_NAMED = 3
    MAX_FACTOR = 64.0  # a sum may be multiplied by this much and stays in range, if no rank said LARGE

    def __init__(self, names: Sequence[str], device: torch.device, ranks: int = 1) -> None:
        self._names = names
        self._device = device
        self._ranks = ranks
        self.reset()
        self.start_pass()

    def reset(self) -> None:
        """Forgets the last window."""
        self._flags = Flag.NONE
        self._found: list[Tensor] = []
        self._suspects: list[tuple[Bucket, Tensor]] = []
        self._described: list[str] = []

    def blame(self, description: str) -> None:
        """Takes note that this rank's gradients of the window were found to be bad before."""
        self._flags |= Flag.NONFINITE
        self._described.append(description)

    def start_pass(self) -> None:
        """A backward begins."""
        self._glances: dict[Bucket, _Glances] = {}

    def take(self, bucket: Bucket, slot: int) -> None:
        """Moves a gradient that has just been made into its bucket, and looks at it while it is in the cache.

        For gradients on a CPU. Should somebody write to the bucket afterwards, all of it is looked at again before it
        leaves, as far as PyTorch counts the write: it does not count one through ``grad.data``.
        """
        grad, version = bucket.parameters[slot].grad, bucket.flat._version
        glances = self._glances.get(bucket)
        if glances is None:
            glances = self._glances[bucket] = _Glances(version)
        # Autograd itself writes to a gradient that is in the bucket already.
        glances.valid &= version == glances.version + (grad is bucket.views[slot] and bool(glances.slots))
        run = _as_run(grad)
        square = None if run is None else _square(run)
        bucket.take(slot)
        glances.square += _square(bucket.part(slot, slot + 1)) if square is None else square
        glances.version = bucket.flat._version
        glances.slots.add(slot)

    def close(self, bucket: Bucket) -> None:
        """A bucket is about to be filled up with gradients that have not been looked at."""
        glances = self._glances.get(bucket)
        if glances is not None and not (glances.valid and bucket.flat._version == glances.version):
            del self._glances[bucket]  # somebody has changed what was looked at

    def look(self, bucket: Bucket) -> None:
        """Looks at what it has not glanced at of a filled bucket. Never makes a GPU's host wait."""
        if bucket.flat.numel() == 0:
            return
        limit = torch.finfo(bucket.layout.dtype).max / (self._ranks * self.MAX_FACTOR)
        if bucket.flat.device.type == "cpu":
            if not math.sqrt(self._square_of(bucket)) <= limit:
                if scale_and_check_(bucket.flat):
                    self._flags |= Flag.NONFINITE
                    self._described += self._describe(bucket)
                else:
                    self._flags |= Flag.LARGE
        else:
            # The gradients are overwritten by their sum before the host knows the flag, so what names the culprit
            # is kept aside on the device: the largest absolute value of each gradient, NaN if it holds one.
            views = [torch.view_as_real(v) if v.is_complex() else v for v in bucket.views if v.numel()]
            peaks = torch.stack(torch._foreach_norm(views, float("inf")))
            finite = torch.isfinite(peaks)
            nonfinite, large = (~finite).any(), (finite & (peaks > limit)).any()
            self._found.append(nonfinite * int(Flag.NONFINITE) + large * int(Flag.LARGE))
            self._suspects.append((bucket, peaks))

    def _square_of(self, bucket: Bucket) -> float:
        glances = self._glances.get(bucket)
        if glances is None:
            return _square(bucket.flat)
        square = glances.square
        for seen, run in groupby(range(len(bucket.views)), key=glances.slots.__contains__):
            if not seen:
                slots = list(run)
                square += _square(bucket.part(slots[0], slots[-1] + 1))
        return square

    def flag(self) -> Tensor:
        """What was found in the buckets looked at, as :class:`Flag` bits; stays on the device."""
        flags = torch.full((), int(self._flags), device=self._device)
        for found in self._found:
            flags |= found.to(self._device)
        return flags

    def description(self) -> str:
        """The first bad parameters of this rank, ready for a message; empty if there are none."""
        described = list(self._described)
        for bucket, peaks in self._suspects:
            names = [
                self._names[i] for i, view in zip(bucket.layout.indices, bucket.views, strict=True) if view.numel()
            ]
            for name, peak in zip(names, peaks.tolist(), strict=True):
                if peak != peak:
                    described.append(f"{name} NaN")
                elif peak == float("inf"):
                    described.append(f"{name} Inf")
        more = len(described) - self.MAX_NAMED
        return ", ".join(described[: self.MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

    def _describe(self, bucket: Bucket) -> list[str]:
        described = []
        for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
            bad = int((~torch.isfinite(view)).sum())
            if bad:
                kind = "NaN" if bool(torch.isnan(view).any()) else "Inf"
                described.append(f"{self._names[index]} {kind} ({bad} of {view.numel()} elements)")
        return described
