"""Making replicas: the same structure is checked on every rank, then rank 0's values are sent once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dp.errors import StructureMismatchError
from lightning_dp.reduction.wire import Wire


def verify_same_structure(named_tensors: Iterable[tuple[str, Tensor]], wire: Wire) -> None:
    """Checks that all ranks hold tensors of the same names, shapes and dtypes, in the same order.

    Sends a digest; only if digests differ are the descriptions themselves gathered, to name the first difference.

    Args:
        named_tensors: Parameters or buffers of this rank.
        wire: The ranks to compare with.

    Raises:
        StructureMismatchError: On every rank, naming the first rank and tensor that differ from rank 0's.
    """
    described = [
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        + (" trainable" if tensor.requires_grad else "")
        for name, tensor in named_tensors
    ]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    if len(set(wire.gather(digest))) == 1:
        return
    everyone = wire.gather(described)
    reference = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs == reference:
            continue
        here, there = next(
            ((a, b) for a, b in zip(theirs, reference, strict=False) if a != b),
            (f"{len(theirs)} tensors", f"{len(reference)} tensors"),
        )
        raise StructureMismatchError(
            f"the model differs between ranks: rank {rank} has '{here}' where rank 0 has '{there}'; build the same"
            " modules, frozen in the same places, on every rank"
        )


def broadcast_from_rank_zero(tensors: Iterable[Tensor], wire: Wire) -> None:
    """Overwrites every rank's tensors with rank 0's, bit for bit, whatever their dtype and strides."""
    for tensor in tensors:
        source = tensor.detach()
        contiguous = source.contiguous()
        # As bytes: backends differ in the dtypes that they accept (bool, complex, float8).
        wire.broadcast(contiguous.reshape(-1).view(torch.uint8))
        if contiguous.data_ptr() != source.data_ptr():
            source.copy_(contiguous)
