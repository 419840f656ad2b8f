"""How a bucket is summed over ranks: as it is, in fewer bytes, or in fewer bytes but added up in float32.

With a reduce dtype, wider gradients travel rounded to it and arrive in their own dtype, so that weights and optimizer
keep their precision; and with float32, narrower ones are accumulated and summed in it. An all-reduce in a narrow dtype
rounds after each addition, so that its error grows with the number of ranks. With ``exact_sums`` each rank gets
everybody's part of one chunk (all-to-all), adds it up in float32 and hands the result to all (all-gather): the same
bytes, and two roundings whatever the number of ranks. Two ranks do with one message of the same bytes: each gets the
other's bucket (all-gather) and adds up itself, so that the sum is not rounded.

With ``u`` half the dtype's ``eps`` and ``x`` what ``n`` ranks add up, the error is at most ``((1 + u)^n - 1) sum |x|``
without exact sums, and with them ``u sum |x|`` for the addends and, from three ranks on, one rounding of the sum
(N. Higham, Accuracy and Stability of Numerical Algorithms, ch. 4).

A dtype of less range than the gradients' (fp16 for float32) gets them scaled by a power of two, which rounds nothing:
so that the sum over ranks of the bucket's largest number fits, and small ones stay as far above underflow as they can.
Ranks agree on it with one number more a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.reduction.buckets import Bucket
from lightning_dp.reduction.wire import Wire

REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Course = Generator[dist.Work | None, None, None]


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
        self._exact = exact_sums
        self._waiting: list[Transfer] = []
        self._narrow: dict[int, Tensor] = {}  # what travels, by number of bucket

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
        flat = bucket.flat
        if self.narrows(flat.dtype) and flat.numel():
            ranks = self._wire.world_size if self._exact else 1
            chunk = flat.numel() if self._swaps else -(-flat.numel() // ranks)
            self._narrow[number] = torch.zeros(ranks * chunk, dtype=self._dtype, device=flat.device)

    def start(self, bucket: Bucket, number: int, total: int) -> Transfer:
        """Starts to sum a filled bucket, one of ``total``; all ranks start the same ones in the same order."""
        flat = bucket.flat
        transfer = Transfer(flat, f"the all-reduce of bucket {number} of {total}")
        if self.narrows(flat.dtype) and flat.numel():
            transfer.course = self._narrowed(flat, self._narrow[number])
            transfer.left = self._scales(flat.dtype) + (2 if self._exact and not self._swaps else 1)
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

    @property
    def _swaps(self) -> bool:
        """Whether each rank gets the other's whole bucket and adds up itself; among more that would be more bytes."""
        return self._exact and self._wire.world_size == 2

    def _scales(self, dtype: torch.dtype) -> bool:
        """Whether the dtype on the wire has less range."""
        return self._dtype is not None and 2 * torch.finfo(self._dtype).max < torch.finfo(dtype).max

    def _narrowed(self, flat: Tensor, narrow: Tensor) -> Course:
        assert self._dtype is not None
        scale = None
        if self._scales(flat.dtype):
            peak = _peak(flat)
            yield self._wire.all_reduce(peak, dist.ReduceOp.MAX)
            scale = _power_of_two(torch.finfo(self._dtype).max, peak, self._wire.world_size)
        both = narrow.view(2, -1) if self._swaps else None
        filled = narrow[: flat.numel()] if both is None else both[self._wire.rank]
        if scale is None:
            filled.copy_(flat)
        else:
            torch.mul(flat, scale, out=filled)
        if both is not None:
            yield self._wire.all_gather(narrow, filled)
            flat.copy_(both[0]).add_(both[1])
        else:
            yield from self._sums(narrow)
            flat.copy_(filled)
        if scale is not None:
            flat.div_(scale)

    def _sums(self, narrow: Tensor) -> Course:
        """Puts the sum over ranks in the place of what this one adds to it."""
        if not self._exact:
            yield self._wire.all_reduce(narrow)
            return
        parts = torch.empty_like(narrow)
        yield self._wire.all_to_all(parts, narrow)
        # In the order of ranks, and the same bits for all, as each chunk is added up once.
        mine = parts.view(self._wire.world_size, -1).sum(0, dtype=torch.float32).to(narrow.dtype)
        del parts
        yield self._wire.all_gather(narrow, mine)


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
