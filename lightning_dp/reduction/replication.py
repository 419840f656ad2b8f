"""Making replicas: the same structure is checked on every rank, then rank 0's values are sent once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_dp.errors import ConfigurationError, StructureMismatchError
from lightning_dp.reduction.wire import Wire

T = TypeVar("T", bound=Tensor)


def make_replicas(module: Module, wire: Wire) -> None:
    """Makes every rank's module a replica of rank 0's.

    Args:
        module: This rank's module.
        wire: The ranks.

    Raises:
        ConfigurationError: If a part of it is a lazy module that has not seen a batch yet.
        StructureMismatchError: On every rank, if their modules differ in structure.
    """
    named = replicated(module, (*module.named_parameters(), *module.named_buffers()))
    verify_same_structure(named, wire)
    broadcast_from_rank_zero((tensor for _, tensor in named), wire)


def replicated(module: Module, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Those of a module's tensors that are to be the same on all ranks."""
    ignored = ignored_names(module)
    return [(name, tensor) for name, tensor in named if name not in ignored]


def ignored_names(module: Module) -> frozenset[str]:
    """Names that a module wants left alone on each rank, by torch DDP's convention."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def verify_same_structure(named_tensors: Iterable[tuple[str, Tensor]], wire: Wire) -> None:
    """Checks that all ranks hold tensors of the same names, shapes and dtypes, in the same order.

    Sends a digest; only if digests differ are the descriptions themselves gathered, to name the first difference.

    Args:
        named_tensors: Parameters or buffers of this rank.
        wire: The ranks to compare with.

    Raises:
        ConfigurationError: If a tensor belongs to a lazy module that has not seen a batch yet.
        StructureMismatchError: On every rank, naming the first rank and tensor that differ from rank 0's.
    """
    described = [_describe(name, tensor) for name, tensor in named_tensors]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    if len(set(wire.gather(digest))) == 1:
        return
    everyone = wire.gather(described)
    reference = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs == reference:
            continue
        pairs = zip_longest(theirs, reference, fillvalue="nothing more")
        here, there = next((a, b) for a, b in pairs if a != b)
        raise StructureMismatchError(
            f"the model differs between ranks: rank {rank} has '{here}' where rank 0 has '{there}'; build the same"
            " modules, frozen in the same places, on every rank"
        )


def verify_same_settings(settings: Mapping[str, object], wire: Wire) -> None:
    """Checks that all ranks work the same way; with different buckets or dtypes they would wait for each other.

    Args:
        settings: By name; each is compared by its ``repr``.
        wire: The ranks to compare with.

    Raises:
        ConfigurationError: On every rank, naming the first rank and setting that differ from rank 0's.
    """
    everyone = wire.gather({name: repr(value) for name, value in settings.items()})
    for rank, theirs in enumerate(everyone):
        for name, there in everyone[0].items():
            if theirs[name] != there:
                raise ConfigurationError(
                    f"settings differ between ranks: rank {rank} has {name}={theirs[name]} where rank 0 has {there};"
                    " give all ranks the same"
                )


def _describe(name: str, tensor: Tensor) -> str:
    if is_lazy(tensor):
        raise ConfigurationError(
            f"the shape of '{name}' is not known yet, as its module is a lazy one: run a batch through the module"
            " before training, for instance in __init__ or setup, so that all replicas can start from rank 0's values"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Gradients lie in memory as their parameters do, so a sum over different strides would mix elements.
    strides = "" if tensor.is_contiguous() else f" strides {tensor.stride()}"
    return f"{name}: {dtype} {tuple(tensor.shape)}{strides}{' trainable' if tensor.requires_grad else ''}"


def broadcast_from_rank_zero(tensors: Iterable[Tensor], wire: Wire) -> None:
    """Overwrites every rank's tensors with rank 0's, bit for bit, whatever their dtype and strides."""
    broadcast_from(0, tensors, wire)


def broadcast_from(rank: int, tensors: Iterable[Tensor], wire: Wire) -> None:
    """Overwrites every rank's tensors with those of one rank, bit for bit, whatever their dtype and strides."""
    for tensor in tensors:
        source = tensor.detach()
        for dim, stride in enumerate(source.stride()):
            if stride == 0 and source.shape[dim] > 1:  # an expanded tensor: its elements are one in memory
                source = source.narrow(dim, 0, 1)
        contiguous = source.resolve_conj().contiguous()
        # As bytes: backends differ in the dtypes that they accept (bool, complex, float8).
        wire.broadcast(contiguous.reshape(-1).view(torch.uint8), rank)
        if contiguous.data_ptr() != source.data_ptr():
            source.copy_(contiguous)
