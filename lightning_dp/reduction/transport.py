"""How a bucket is summed over ranks: as it is, in fewer bytes, or in fewer bytes but added up in float32.

With a reduce dtype, wider gradients travel rounded to it and arrive in their own dtype, so that weights and optimizer
keep their precision; and with float32, narrower ones are accumulated and summed in it. How far sums err is told in
:mod:`lightning_dp.reduction.narrow_sum`.

A dtype of less range than the gradients' (fp16 for float32) gets them scaled by a power of two, which rounds nothing:
so that the sum over ranks of the bucket's largest number fits, and small ones stay as far above underflow as they can.
Ranks agree on it with one number more a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.reduction.buckets import Bucket
from lightning_dp.reduction.narrow_sum import AllReduced, Chunked, Course, Exchanged, NarrowSum
from lightning_dp.reduction.wire import Wire

REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Transfer:
    """One bucket on its way.

    Attributes:
        flat: The bucket.
        what: What it is called in messages.
        work: The collective under way.
        course: Sends one message each time it is resumed, when the one before is complete, and in the end puts the sum
            into the bucket.
        left: Messages that it has not sent yet.
    """

    flat: Tensor
    what: str
    work: dist.Work | None = None
    course: Course | None = None
    left: int = 0


class Transport:
    """Sums buckets over ranks.

    Args:
        wire: The ranks.
        reduce_dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``: dtype on the wire of what is wider, and with ``"fp32"`` also
            that in which narrower gradients are accumulated and summed; ``None`` sends all as it is.
        exact_sums: With a reduce dtype, add up in float32.
    """

    # Buckets that wait for their next message when a later one starts. It must be sent at the same point of the
    # sequence on all ranks, so it waits until so many later buckets have started.
    LAG = 2
    # Whether finite numbers, none of them LARGE, may come out as Inf: no, as they are scaled to fit.
    LOSES_RANGE = False

    def __init__(self, wire: Wire, reduce_dtype: str | None = None, exact_sums: bool = False) -> None:
        self._wire = wire
        self._dtype = REDUCE_DTYPES[reduce_dtype] if reduce_dtype is not None else None
        self._kind: Callable[[Tensor, torch.dtype, Wire], NarrowSum] = AllReduced
        if exact_sums:
            self._kind = Exchanged if wire.world_size == 2 else Chunked
        self._waiting: list[Transfer] = []
        self._narrow: dict[int, NarrowSum] = {}  # by number of bucket

    def sums_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of this one are accumulated and summed."""
        widens = self._dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if widens else dtype

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether buckets of this dtype travel in a narrower one."""
        wide = dtype in (torch.float32, torch.float64)
        return self._dtype is not None and wide and self._dtype.itemsize < dtype.itemsize and self._wire.world_size > 1

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes that an element of a gradient of this dtype takes on the wire."""
        dtype = self.sums_in(dtype)
        return self._dtype.itemsize if self._dtype is not None and self.narrows(dtype) else dtype.itemsize

    def reserve(self, bucket: Bucket, number: int) -> None:
        """Makes the memory in which a bucket travels, if it is narrowed; a number stands for one bucket from now on.

        On a CPU new memory costs more than rounding into it, so it is not made anew in every step.
        """
        if self._dtype is not None and self._is_narrowed(bucket.flat):
            self._narrow[number] = self._kind(bucket.flat, self._dtype, self._wire)

    def start(self, bucket: Bucket, number: int, total: int) -> Transfer:
        """Starts to sum a filled bucket, one of ``total``; all ranks start the same ones in the same order."""
        flat = bucket.flat
        transfer = Transfer(flat, f"the all-reduce of bucket {number} of {total}")
        if self._is_narrowed(flat):
            narrow = self._narrow[number]
            transfer.course = self._narrowed(flat, narrow)
            transfer.left = self._scales(flat.dtype) + narrow.MESSAGES
            self._proceed(transfer)
            if len(self._waiting) > self.LAG:
                self._proceed(self._waiting.pop(0))
        else:
            transfer.work = self._wire.all_reduce(flat)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Waits until a bucket holds the sum (on a GPU: makes the current stream wait); in the order of starting.

        Raises:
            CommunicationError: If another rank stopped or did not arrive in time.
        """
        while self._waiting:
            self._proceed(self._waiting.pop(0))
        self._wire.wait(transfer.work, transfer.what)
        if transfer.course is not None:
            next(transfer.course, None)

    def _proceed(self, transfer: Transfer) -> None:
        """Sends the next message of a transfer."""
        assert transfer.course is not None
        self._wire.wait(transfer.work, transfer.what)
        transfer.work = next(transfer.course)
        transfer.left -= 1
        if transfer.left:
            self._waiting.append(transfer)

    def _is_narrowed(self, flat: Tensor) -> bool:
        return self.narrows(flat.dtype) and flat.numel() > 0

    def _scales(self, dtype: torch.dtype) -> bool:
        """Whether the dtype on the wire has less range."""
        return self._dtype is not None and 2 * torch.finfo(self._dtype).max < torch.finfo(dtype).max

    def _narrowed(self, flat: Tensor, narrow: NarrowSum) -> Course:
        scale = None
        if self._scales(flat.dtype):
            peak = _peak(flat)
            yield self._wire.all_reduce(peak, dist.ReduceOp.MAX)
            scale = _power_of_two(torch.finfo(narrow.mine.dtype).max, peak, self._wire.world_size)
        if scale is None:
            narrow.mine.copy_(flat)
        else:
            torch.mul(flat, scale, out=narrow.mine)
        yield from narrow.send()
        narrow.put(flat)
        if scale is not None:
            flat.div_(scale)


def _peak(flat: Tensor) -> Tensor:
    """The largest absolute value, zero-dimensional; Inf where there is a NaN, as a maximum over ranks may lose NaN."""
    low, high = torch.aminmax(flat)
    return torch.maximum(high, -low).nan_to_num_(nan=math.inf, posinf=math.inf)


def _power_of_two(largest: float, peak: Tensor, ranks: int) -> Tensor:
    """The largest power of two that lets ``ranks`` numbers of size ``peak`` add up to half of ``largest`` at most.

    The other half is for roundings on the way, each by a factor of ``1 + eps / 2`` at most. NaN if ``peak`` is Inf.
    """
    room = largest / (2 * ranks) / peak.clamp(min=largest / torch.finfo(peak.dtype).max)
    return room / (2 * torch.frexp(room).mantissa)
