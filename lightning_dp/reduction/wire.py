"""The process group as the reducer sees it: every collective of a reduction passes here and is counted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.errors import CommunicationError
from lightning_dp.reduction.roll_call import missing_ranks
from lightning_dp.reduction.transport_threads import TransportThreads

T = TypeVar("T")


class Wire:
    """A process group with counters.

    Args:
        group: The process group; ``None`` is the default group, or a single process where there is none.

    Attributes:
        rank: This process's rank in the group.
        world_size: Ranks in the group.
        messages: Collectives issued since the last :meth:`reset_counters`.
        nbytes: Bytes of all-reduces that send as much.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.world_size = dist.get_world_size(group) if distributed else 1
        self._threads = TransportThreads()
        self.reset_counters()

    def shares_cores(self, device: torch.device) -> bool:
        """Whether messages are moved on the cores that compute, by threads that can be kept from interrupting."""
        return self._sends_beside(device) and self._threads.can_change

    def beside_compute(self, device: torch.device, in_batches: bool = True) -> AbstractContextManager[object]:
        """While this process computes: on a CPU the threads that move messages do not interrupt, if ``in_batches``."""
        return self._threads.in_batches() if in_batches and self._sends_beside(device) else nullcontext()

    def _sends_beside(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.world_size > 1

    def reset_counters(self) -> None:
        """Starts counting anew."""
        self.messages = 0
        self.nbytes = 0

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work | None:
        """Starts an asynchronous all-reduce in place; nothing is sent when there is one rank or no element."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        self.messages += 1
        self.nbytes += tensor.numel() * tensor.element_size()
        work: dist.Work | None = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        """Starts to send the r-th of n equal chunks of ``sent`` to rank r; they come in by rank into ``received``."""
        self._count_half(sent)
        work: dist.Work | None = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return work

    def all_gather(self, gathered: Tensor, mine: Tensor) -> dist.Work | None:
        """Starts to send ``mine`` to all; everybody's comes by rank into ``gathered``, of which it may be a part."""
        self._count_half(gathered)
        work: dist.Work | None = dist.all_gather_single(gathered, mine, group=self.group, async_op=True)
        return work

    def _count_half(self, tensor: Tensor) -> None:
        # Each sends (n - 1) / n of the bytes, half of what an all-reduce of them does.
        self.messages += 1
        self.nbytes += tensor.numel() * tensor.element_size() // 2

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Waits for a collective (on a GPU: makes the current stream wait).

        Args:
            work: What :meth:`all_reduce` returned.
            what: Which collective, for the message.

        Raises:
            CommunicationError: If a peer stopped or did not arrive within the group's timeout; it names who is missing.
        """
        if work is not None:
            with self._telling(what):
                work.wait()

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value`` (any small picklable object), by rank. Blocks; not for the hot path."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with self._telling("an exchange between all ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def broadcast_object(self, value: T, source: int) -> T:
        """Rank ``source``'s ``value`` (any picklable object), on every rank. Blocks; not for the hot path."""
        if self.world_size == 1:
            return value
        values = [value]
        with self._telling(f"a message from rank {source}"):
            dist.broadcast_object_list(values, src=self._global_rank(source), group=self.group)
        return values[0]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites ``tensor`` in place with the bits that rank ``source`` holds; it must be contiguous. Blocks."""
        if self.world_size > 1 and tensor.numel():
            with self._telling(f"sending rank {source}'s tensors"):
                dist.broadcast(tensor, src=self._global_rank(source), group=self.group)

    @contextmanager
    def _telling(self, what: str) -> Generator[None, None, None]:
        """Turns a backend's error into one line that says who is missing."""
        try:
            yield
        except RuntimeError as error:
            ranks = [self._global_rank(rank) for rank in range(self.world_size)]
            missing = missing_ranks(dist.get_rank(), ranks)
            who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            raise CommunicationError(
                f"rank {self.rank} of {self.world_size}: {what} did not complete, because {who} stopped or did not"
                f" arrive within the timeout; look for the first error among the other ranks' output"
                f" ({str(error).splitlines()[0]})"
            ) from error

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank
