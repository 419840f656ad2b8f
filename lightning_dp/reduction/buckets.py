"""Buckets: which gradients travel together, and the flat memory that holds them.

A :class:`BucketPlan` is pure layout; a :class:`Bucket` is its storage on one rank. Neither communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BucketLayout:
    """Layout of one bucket: a flat run of gradients of one dtype on one device.

    Attributes:
        indices: Which parameters (positions in the list that the plan was made from) it holds, in order.
        offsets: Where each one's gradient starts in the flat buffer, in elements.
        numel: Elements of the flat buffer.
        dtype: Their dtype.
        device: Their device.
    """

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, in the order in which every rank launches them."""

    buckets: tuple[BucketLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of gradient that one step reduces."""
        return sum(layout.nbytes for layout in self.buckets)


def plan_buckets(
    parameters: Sequence[Tensor], order: Sequence[int], cap_bytes: float, first_cap_bytes: float
) -> BucketPlan:
    """Cuts parameters, in the order in which their gradients become ready, into buckets.

    Consecutive parameters of one dtype and device share a bucket until the next one would push it over its cap; a
    parameter above the cap has a bucket to itself. Buckets are launched in the order in which they are complete.

    Args:
        parameters: The parameters whose gradients are reduced.
        order: A permutation of their positions: first expected gradient first.
        cap_bytes: Cap on a bucket's size in bytes.
        first_cap_bytes: Cap on the first bucket of each dtype and device; small, so that communication starts early.

    Returns:
        The plan; a pure function of the arguments.
    """
    assert sorted(order) == list(range(len(parameters))), "order must name every parameter once"
    closed: list[tuple[int, BucketLayout]] = []  # (position in `order` of its last gradient, layout)
    open_runs: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    position = {index: at for at, index in enumerate(order)}
    caps = dict.fromkeys(((p.dtype, p.device) for p in parameters), first_cap_bytes)

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        run = open_runs.pop(key)
        closed.append((position[run[-1]], _layout(run, parameters)))
        caps[key] = cap_bytes

    for index in order:
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        nbytes = parameter.numel() * parameter.dtype.itemsize
        if key in open_runs and open_bytes[key] + nbytes > caps[key]:
            close(key)
        if key not in open_runs:
            open_runs[key], open_bytes[key] = [], 0
        open_runs[key].append(index)
        open_bytes[key] += nbytes
    for key in list(open_runs):
        close(key)
    return BucketPlan(tuple(layout for _, layout in sorted(closed, key=lambda entry: entry[0])))


def plan_segments(parameters: Sequence[Tensor], order: Sequence[int], segments: Sequence[int]) -> BucketPlan:
    """Cuts parameters, in the order in which their gradients become ready, where it is told to.

    Args:
        parameters: The parameters whose gradients are reduced.
        order: A permutation of their positions: first expected gradient first.
        segments: How many of them each bucket takes; one that mixes dtypes or devices becomes a bucket for each.

    Returns:
        The plan; a pure function of the arguments.
    """
    assert sum(segments) == len(order) == len(parameters), "segments must cover every parameter"
    layouts, start = [], 0
    for length in segments:
        runs: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in order[start : start + length]:
            runs.setdefault((parameters[index].dtype, parameters[index].device), []).append(index)
        layouts += [_layout(run, parameters) for run in runs.values()]
        start += length
    return BucketPlan(tuple(layouts))


def _layout(run: Sequence[int], parameters: Sequence[Tensor]) -> BucketLayout:
    offsets, numel = [], 0
    for index in run:
        offsets.append(numel)
        numel += parameters[index].numel()
    first = parameters[run[0]]
    return BucketLayout(tuple(run), tuple(offsets), numel, first.dtype, first.device)


class Bucket:
    """One bucket's memory on this rank, and the gradients that live in it.

    Args:
        layout: Where each gradient lies.
        parameters: The list that the plan was made from.
        sums_in: The dtype in which gradients are accumulated and summed, if it is not their own but a wider one.

    Attributes:
        flat: The one-dimensional buffer that is reduced (complex gradients as pairs of real numbers).
        parameters: The parameters whose gradients it holds.
        views: For each of them the view of ``flat`` that becomes its ``grad``, with the parameter's own strides.
        missing: Slots of the parameters that had no gradient when the buffer was last filled.
        wide: Whether the buffer is wider than the parameters, so that it is rounded in the end: see :meth:`round`.
    """

    def __init__(self, layout: BucketLayout, parameters: Sequence[Tensor], sums_in: torch.dtype | None = None) -> None:
        storage = torch.zeros(layout.numel, dtype=sums_in or layout.dtype, device=layout.device)
        self.layout = layout
        self.wide = storage.dtype != layout.dtype
        self.flat = torch.view_as_real(storage).view(-1) if storage.is_complex() else storage
        self.parameters = [parameters[index] for index in layout.indices]
        self._storage = storage
        self.views = [self._view(slot) for slot in range(len(self.parameters))]
        self._pointers = [view.data_ptr() for view in self.views]
        self.missing: list[int] = []
        for parameter in self.parameters if self.wide else ():
            parameter.grad_dtype = None  # any: autograd then adds a narrow gradient to the wide view as it is

    def take(self, slot: int) -> None:
        """Moves one gradient into the buffer, if it is not there yet, and makes it a view of the buffer."""
        parameter = self.parameters[slot]
        grad = parameter.grad
        if grad is not None and not self._holds(slot, grad):
            self.views[slot].copy_(_dense(grad).detach())
            parameter.grad = self.views[slot]

    def take_all(self) -> list[int]:
        """Moves every gradient that is not in the buffer yet into it, with one fused copy.

        Returns:
            The slots of the parameters that have no gradient.
        """
        if [view.data_ptr() for view in self.views] != self._pointers:
            for slot in range(len(self.views)):
                self._own_memory(slot)
        views, grads, missing = [], [], []
        for slot, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is None:
                missing.append(slot)
            elif grad is not view:
                views.append(view)
                grads.append(_dense(grad))
                parameter.grad = view
        if views:
            with torch.no_grad():  # a gradient may have a graph of its own
                torch._foreach_copy_(views, grads)
        return missing

    def part(self, first: int, end: int) -> Tensor:
        """The run of :attr:`flat` that holds slots ``first`` to ``end - 1``."""
        factor = 2 if self._storage.is_complex() else 1
        offsets = self.layout.offsets
        start = offsets[first]
        stop = offsets[end] if end < len(offsets) else self.layout.numel
        return self.flat[factor * start : factor * stop]

    def _holds(self, slot: int, grad: Tensor) -> bool:
        """Whether ``grad`` lies in the buffer already."""
        return self._own_memory(slot) and grad is self.views[slot]

    def _own_memory(self, slot: int) -> bool:
        """Whether the view still had its place in the buffer; else it is made anew."""
        if self.views[slot].data_ptr() == self._pointers[slot]:
            return True
        # `p.grad.data = ...` (or `module.float()`) has given our view other memory: it is theirs now.
        self.views[slot] = self._view(slot)
        return False

    def round(self) -> list[Tensor]:
        """Makes the buffer's contents final, in the parameters' dtype.

        A wide buffer is rounded within its own memory: until it is next filled, its front half holds the result.

        Returns:
            For each parameter the view that holds its gradient.
        """
        if not self.wide:
            return self.views
        rounded = self._storage.view(self.layout.dtype)[: self.layout.numel]
        rounded.copy_(self._storage.to(self.layout.dtype))  # by way of a copy, as the two overlap
        return [
            _view_like(rounded, offset, parameter)
            for offset, parameter in zip(self.layout.offsets, self.parameters, strict=True)
        ]

    def _view(self, slot: int) -> Tensor:
        return _view_like(self._storage, self.layout.offsets[slot], self.parameters[slot])

    def fill(self) -> list[int]:
        """Completes the buffer for sending: moves in what is missing and zeroes what has no gradient.

        Returns:
            The slots of the parameters for which this rank has no gradient.
        """
        self.missing = self.take_all()
        # A stale number from the last step must not travel in the place of a missing gradient.
        if self.missing:
            torch._foreach_zero_([self.views[slot] for slot in self.missing])
        return self.missing


def _view_like(storage: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view with the parameter's strides, so that the optimizer and autograd see the layout they expect."""
    flat = storage[offset : offset + parameter.numel()]
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one gapless run of memory, in any order of dimensions (channels_last, transposed)."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
