"""The sum over ranks of a bucket that travels rounded to a narrower dtype, in memory of its own.

An all-reduce in a narrow dtype rounds after each addition, so that its error grows with the number of ranks. Exact
sums add up in the bucket's own dtype, or in float32: among two ranks each gets the other's bucket, among more each
gets everybody's part of one chunk. With ``u`` half the narrow dtype's ``eps`` and ``x`` what ``n`` ranks add up, the
error is at most ``((1 + u)^n - 1) sum |x|`` by an all-reduce, and ``u sum |x|`` for the addends and, from three ranks
on, one rounding of the sum if it is exact (N. Higham, Accuracy and Stability of Numerical Algorithms, ch. 4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.reduction.wire import Wire

Course = Generator[dist.Work | None, None, None]


class NarrowSum(ABC):
    """Memory of one bucket in a narrower dtype, and how it becomes the sum over ranks.

    Each kind is made from a bucket, the narrower dtype and the ranks.

    Attributes:
        mine: What this rank adds, of the bucket's shape: to be filled before :meth:`send`.
    """

    MESSAGES = 1

    def __init__(self, mine: Tensor, wire: Wire) -> None:
        self.mine, self._wire = mine, wire

    @abstractmethod
    def send(self) -> Course:
        """Sends one message each time it is resumed, when the one before is complete; ``MESSAGES`` in all."""

    def put(self, flat: Tensor) -> None:
        """Puts the sum into the bucket, when all messages are complete."""
        flat.copy_(self.mine)


class AllReduced(NarrowSum):
    """One all-reduce, which adds up in the narrow dtype."""

    def __init__(self, flat: Tensor, dtype: torch.dtype, wire: Wire) -> None:
        super().__init__(torch.zeros_like(flat, dtype=dtype), wire)

    def send(self) -> Course:
        """The all-reduce."""
        yield self._wire.all_reduce(self.mine)


class Exchanged(NarrowSum):
    """Between two ranks: each gets the other's bucket and adds up itself; the same bytes, and no sum is rounded.

    Among more ranks that would be more bytes.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype, wire: Wire) -> None:
        self._both = torch.zeros(2, flat.numel(), dtype=dtype, device=flat.device)
        super().__init__(self._both[wire.rank], wire)

    def send(self) -> Course:
        """One all-gather."""
        yield self._wire.all_gather(self._both.view(-1), self.mine)

    def put(self, flat: Tensor) -> None:
        """Adds up in the bucket's dtype."""
        flat.copy_(self._both[0]).add_(self._both[1])


class Chunked(NarrowSum):
    """Each rank gets everybody's part of one chunk, adds it up in float32 and hands the result to all."""

    MESSAGES = 2

    def __init__(self, flat: Tensor, dtype: torch.dtype, wire: Wire) -> None:
        chunk = -(-flat.numel() // wire.world_size)
        self._chunks = torch.zeros(wire.world_size, chunk, dtype=dtype, device=flat.device)
        super().__init__(self._chunks.view(-1)[: flat.numel()], wire)

    def send(self) -> Course:
        """All-to-all, then all-gather."""
        parts = torch.empty_like(self._chunks)
        yield self._wire.all_to_all(parts.view(-1), self._chunks.view(-1))
        # In the order of ranks, and the same bits for all, as each chunk is added up once.
        total = parts.sum(0, dtype=torch.float32).to(parts.dtype)
        del parts
        yield self._wire.all_gather(self._chunks.view(-1), total)
