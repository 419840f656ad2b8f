"""Non-finite gradients: found in one pass over a bucket, described only when there is something to describe."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def _bound(flat: Tensor) -> float:
    """A number that no absolute value exceeds; NaN or Inf if there is one, or where the square leaves the range."""
    if flat.dtype in (torch.float16, torch.bfloat16):  # whose products are slow on a CPU
        return max(map(abs, map(float, torch.aminmax(flat))))
    return math.sqrt(float(torch.dot(flat, flat)))


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

    def look(self, bucket: Bucket) -> None:
        """Looks at one filled bucket. Never makes a GPU's host wait."""
        if bucket.flat.numel() == 0:
            return
        limit = torch.finfo(bucket.layout.dtype).max / (self._ranks * self.MAX_FACTOR)
        if bucket.flat.device.type == "cpu":
            # The norm is the cheapest reading of memory there is: NaN and Inf show in it, and so do large numbers.
            if not _bound(bucket.flat) <= limit:
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
