"""Contenders: ways to take one data-parallel training step with the same model on the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dp.bench.workloads import Workload
from lightning_dp.health.same_data import batch_fingerprint
from lightning_dp.reduction.config import ReducerConfig
from lightning_dp.reduction.reducer import GradientReducer
from lightning_dp.reduction.transport_threads import TransportThreads

MIB = 1024 * 1024

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Contender:
    """One way to take a step; by itself the step without any communication.

    Args:
        workload: A model of this contender's own.
        optimizer: Makes its optimizer.
    """

    def __init__(self, workload: Workload, optimizer: OptimizerFactory) -> None:
        self.workload = workload
        self.optimizer = optimizer(workload.parameters())

    def loss(self, batch: Any) -> Tensor:
        """Forward."""
        loss: Tensor = self.workload(batch)
        return loss

    def accumulate(self, batch: Any, count: int) -> None:
        """Forward and backward of a micro-batch that is not the last of a step; nothing is sent."""
        torch.autograd.backward(self.loss(batch))

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward; at its end gradients are final."""
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Optimizer step."""
        self.optimizer.step()

    def give_up(self) -> None:
        """It is not used any more: lets go of what would outlive it."""

    @property
    def settled(self) -> bool:
        """Whether it works as it will from now on; the same on all ranks."""
        return True

    @property
    def predicted_exposed(self) -> float | None:
        """Seconds of communication after backward that its plan was predicted to leave, if it was."""
        return None


class ReduceAfter(Contender):
    """All gradients in one message after backward: nothing is hidden behind it."""

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward, then the mean over ranks."""
        torch.autograd.backward(loss)
        grads = [p.grad for p in self.workload.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        parts = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


class StockDDP(Contender):
    """Torch's DistributedDataParallel, as Lightning's ``DDPStrategy`` uses it.

    Args:
        workload: The model.
        optimizer: Makes its optimizer.
        bucket_cap_mb: Cap on a bucket in MiB; ``None`` is torch's default (25, and 1 for the first bucket).
        gradient_as_bucket_view: Whether gradients are views of the buckets.
        compress: Whether gradients travel in bf16 (torch's ``bf16_compress_hook``).
        in_batches: Whether the transport's threads do not interrupt backward, as with this package: something that
            torch does not do, to tell what it gives from the rest.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: OptimizerFactory,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        compress: bool = False,
        in_batches: bool = False,
    ) -> None:
        super().__init__(workload, optimizer)
        self._ddp = DistributedDataParallel(
            workload, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view
        )
        if compress:
            self._ddp.register_comm_hook(None, _compress)
        self._in_batches = TransportThreads().in_batches if in_batches else nullcontext

    def accumulate(self, batch: Any, count: int) -> None:
        """Within ``no_sync``."""
        with self._ddp.no_sync():
            super().accumulate(batch, count)

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward; gradients are averaged meanwhile."""
        with self._in_batches():
            super().backward(loss, count)

    def loss(self, batch: Any) -> Tensor:
        """Forward through the wrapper."""
        loss: Tensor = self._ddp(batch)
        return loss


def _compress(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    # A function of our own: torch goes by the name of its hook when it says that gloo on a CPU cannot do this.
    return default_hooks.bf16_compress_hook(group, bucket)


_compress.__annotations__.clear()  # torch compares them with types, and here they are strings


class Bucketed(Contender):
    """This package's reducer, with counts, the vote on non-finite gradients and the same-data check.

    Args:
        workload: The model.
        optimizer: Makes its optimizer.
        same_data: Whether a fingerprint of each batch travels with the ballot.
        **config: Fields of :class:`lightning_dp.reduction.config.ReducerConfig`.
    """

    def __init__(self, workload: Workload, optimizer: OptimizerFactory, same_data: bool = True, **config: Any) -> None:
        super().__init__(workload, optimizer)
        self._same_data = same_data
        self._reducer = GradientReducer(workload.named_parameters(), config=ReducerConfig(**config))

    def loss(self, batch: Any) -> Tensor:
        """Forward, and the batch's fingerprint."""
        if self._same_data:
            self._reducer.word = batch_fingerprint(batch) or 0
        return super().loss(batch)

    def accumulate(self, batch: Any, count: int) -> None:
        """Within ``no_sync``."""
        loss = self.loss(batch)
        with self._reducer.no_sync():
            self.backward(loss, count)

    def backward(self, loss: Tensor, count: int) -> None:
        """Weighted backward."""
        self._reducer.agree_reference(count)
        self._reducer.backward(loss, count)

    def update(self) -> None:
        """Optimizer step, if all ranks' verdict is to step."""
        assert self._reducer.last is not None
        if self._reducer.last.verdict.step:
            self.optimizer.step()

    def give_up(self) -> None:
        """Hooks keep a reducer, and with it the weights, for as long as there is a process."""
        self._reducer.detach()

    @property
    def settled(self) -> bool:
        """When the bucket plan is final."""
        return self._reducer.has_final_plan

    @property
    def predicted_exposed(self) -> float | None:
        """With ``bucket_cap_mb="auto"``."""
        return self._reducer.predicted_exposed


class Watched(Contender):
    """No communication, and a note of when each gradient is ready: what an ideal reduction has to work with.

    Attributes:
        ready: For each backward the seconds after its start at which each gradient was final, by parameter index.
    """

    def __init__(self, workload: Workload, optimizer: OptimizerFactory) -> None:
        super().__init__(workload, optimizer)
        self.ready: list[list[float]] = []
        self._start_watching()
        for index, parameter in enumerate(workload.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward under watch."""
        self._start_watching()
        torch.autograd.backward(loss)
        self.ready.append(self._now)

    def _start_watching(self) -> None:
        self._now = [0.0] * sum(1 for _ in self.workload.parameters())
        self._start = time.perf_counter()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._now[index] = time.perf_counter() - self._start

        return note


class Transfer:
    """Nothing but the all-reduce of as many bytes as the gradients have; also in the background of a step.

    Args:
        nbytes: Bytes of gradient.
        device: Where the buffers are.
        piece_mb: Size of one message in MiB; large enough to reach the wire's speed.
    """

    def __init__(self, nbytes: int, device: torch.device, piece_mb: float = 4.0) -> None:
        numel = max(1, nbytes // 4)
        self._pieces = list(torch.split(torch.zeros(numel, device=device), int(piece_mb * MIB) // 4))
        self._works: list[Any] = []
        self._done: list[float] = []

    def start(self) -> None:
        """Queues all messages."""
        self._done = []
        self._works = [dist.all_reduce(piece, async_op=True) for piece in self._pieces]
        for work in self._works:
            work.get_future().add_done_callback(lambda _: self._done.append(time.perf_counter()))

    def wait(self) -> float:
        """Waits for all of them.

        Returns:
            The time (``time.perf_counter``) at which the last one was complete.
        """
        for work in self._works:
            work.wait()
        return max(self._done, default=time.perf_counter())
