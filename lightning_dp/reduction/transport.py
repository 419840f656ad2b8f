"""How a bucket is summed over ranks: as it is, in fewer bytes, or in fewer bytes but added up in float32.

With a reduce dtype, gradients travel rounded to it and arrive in their own dtype, so that weights and optimizer keep
their precision. An all-reduce in the narrow dtype rounds after each addition, so that its error grows with the number
of ranks. With ``exact_sums`` each rank gets everybody's part of one chunk (all-to-all), adds it up in float32 and hands
the result to all (all-gather): the same bytes, and two roundings whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.reduction.buckets import Bucket
from lightning_dp.reduction.wire import Wire

REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Transfer:
    """One bucket on its way; keeps every buffer of its messages until they are complete.

    Attributes:
        flat: The bucket.
        what: What it is called in messages.
        work: The collective under way.
        narrow: What travels, if that is not ``flat``.
        parts: With exact sums: everybody's part of this rank's chunk, a row a rank.
    """

    flat: Tensor
    what: str
    work: dist.Work | None = None
    narrow: Tensor | None = None
    parts: Tensor | None = None


class Transport:
    """Sums buckets over ranks.

    Args:
        wire: The ranks.
        reduce_dtype: ``"bf16"`` or ``"fp16"``: dtype on the wire of what is wider; ``None`` sends all as it is.
        exact_sums: With a reduce dtype, add up in float32.
    """

    # Buckets whose chunks are still collected when a later one starts. The second message of a bucket must be sent at
    # the same point of the sequence on all ranks, so it waits until so many later buckets have started.
    LAG = 2

    def __init__(self, wire: Wire, reduce_dtype: str | None = None, exact_sums: bool = False) -> None:
        self._wire = wire
        self._dtype = REDUCE_DTYPES[reduce_dtype] if reduce_dtype is not None else None
        self._exact = exact_sums
        self._collecting: list[Transfer] = []

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether buckets of this dtype travel in another one."""
        wide = dtype in (torch.float32, torch.float64)
        return self._dtype is not None and wide and self._wire.world_size > 1

    def loses_range(self, dtype: torch.dtype) -> bool:
        """Whether a number that this dtype can hold may be Inf on the wire."""
        return (
            self._dtype is not None
            and self.narrows(dtype)
            and 2 * torch.finfo(self._dtype).max < torch.finfo(dtype).max
        )

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes that an element of this dtype takes on the wire."""
        return self._dtype.itemsize if self._dtype is not None and self.narrows(dtype) else dtype.itemsize

    def start(self, bucket: Bucket, number: int, total: int) -> Transfer:
        """Starts to sum a filled bucket, one of ``total``; all ranks start the same ones in the same order."""
        flat = bucket.flat
        transfer = Transfer(flat, f"the all-reduce of bucket {number} of {total}")
        if not self.narrows(flat.dtype) or flat.numel() == 0:
            transfer.work = self._wire.all_reduce(flat)
            return transfer
        assert self._dtype is not None
        if not self._exact:
            transfer.narrow = flat.to(self._dtype)
            transfer.work = self._wire.all_reduce(transfer.narrow)
            return transfer
        ranks = self._wire.world_size
        chunk = -(-flat.numel() // ranks)
        transfer.narrow = torch.zeros(ranks * chunk, dtype=self._dtype, device=flat.device)
        transfer.narrow[: flat.numel()].copy_(flat)
        transfer.parts = torch.empty(ranks, chunk, dtype=self._dtype, device=flat.device)
        transfer.work = self._wire.all_to_all(transfer.parts.view(-1), transfer.narrow)
        self._collecting.append(transfer)
        if len(self._collecting) > self.LAG:
            self._hand_out(self._collecting.pop(0))
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Waits until a bucket holds the sum (on a GPU: makes the current stream wait); in the order of starting.

        Raises:
            CommunicationError: If another rank stopped or did not arrive in time.
        """
        while self._collecting:
            self._hand_out(self._collecting.pop(0))
        self._wire.wait(transfer.work, transfer.what)
        if transfer.narrow is not None:
            transfer.flat.copy_(transfer.narrow[: transfer.flat.numel()])
            transfer.narrow = None

    def _hand_out(self, transfer: Transfer) -> None:
        """The second message: this rank's chunk, summed."""
        assert transfer.parts is not None and transfer.narrow is not None
        self._wire.wait(transfer.work, transfer.what)
        # In the order of ranks, and the same bits for all, as each chunk is added up once.
        mine = transfer.parts.sum(0, dtype=torch.float32).to(transfer.parts.dtype)
        transfer.parts = mine
        transfer.work = self._wire.all_gather(transfer.narrow, mine)
