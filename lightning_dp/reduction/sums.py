"""What becomes of buckets once they hold sums over ranks: scaled, measured, and handed to the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_dp.reduction.buckets import Bucket
from lightning_dp.reduction.nonfinite import scale_and_check_


def scale_(buckets: Sequence[Bucket], factor: float, looks: bool) -> bool:
    """Multiplies the sums in place.

    Args:
        buckets: Buckets with the same sums on every rank.
        factor: What they are multiplied by.
        looks: Whether sums are looked at.

    Returns:
        Whether one is not finite, if they were looked at, then or as it is rounded in the end; the same on every rank.
    """
    found: list[Tensor] = []
    for bucket in buckets:
        if looks and bucket.flat.numel():
            found.append(scale_and_check_(bucket.flat, factor))
            if bucket.wide:
                found.append(scale_and_check_(bucket.flat.to(bucket.layout.dtype)))
        elif factor != 1.0:
            bucket.flat.mul_(factor)
    return bool(found) and bool(torch.stack([f.to(found[0].device) for f in found]).any())


def norm(buckets: Sequence[Bucket]) -> float:
    """Euclidean norm over all buckets."""
    flats = [bucket.flat for bucket in buckets if bucket.flat.numel()]
    norms = [torch.linalg.vector_norm(f, dtype=torch.promote_types(f.dtype, torch.float32)) for f in flats]
    return float(torch.stack([norm.double() for norm in norms]).norm()) if norms else 0.0


def publish(buckets: Sequence[Bucket], users: Sequence[int], carry: Mapping[Tensor, Tensor]) -> None:
    """Makes each parameter's gradient the view of its bucket, or ``None`` where no rank had one.

    Args:
        buckets: Buckets that hold averages.
        users: For each parameter of the plan the number of ranks that had a gradient for it.
        carry: Gradients of an earlier reduction, by parameter, that are to be added.
    """
    for bucket in buckets:
        carried = [slot for slot, p in enumerate(bucket.parameters) if p in carry] if carry else []
        for slot in carried:
            bucket.views[slot].add_(carry[bucket.parameters[slot]])
        final = bucket.round()
        # Where this rank had a gradient it is the view already, unless that has been rounded.
        for slot in range(len(final)) if bucket.wide else (*bucket.missing, *carried):
            used = slot in carried or users[bucket.layout.indices[slot]] > 0
            bucket.parameters[slot].grad = final[slot] if used else None
