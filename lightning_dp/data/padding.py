"""What a rank does with a padding batch: skip the step, or replay one that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

UNEVEN_POLICIES = ("auto", "skip", "replay", "error")


class PaddingPolicy:
    """Decides whether a padding batch's step is run.

    Skipping costs nothing and is right for any step that does not communicate. A step that does (``all_gather``,
    ``self.log(on_step=True, sync_dist=True)``, SyncBatchNorm) must be run by every rank, or the others wait for ever.

    Args:
        mode: ``"replay"`` always; ``"skip"`` where this rank has run a step in this epoch, without which its
            ``self.log`` keys do not exist; ``"auto"`` as ``"skip"``, but replay where a step of this loop was seen to
            communicate over the default group. ``"error"`` allows no padding at all.
        must_replay: A step communicates for certain: SyncBatchNorm, manual optimization.
    """

    def __init__(self, mode: str, must_replay: bool = False) -> None:
        self._mode = mode
        self._must_replay = must_replay
        self._communicates = False
        self._ran_this_epoch = False

    def start_epoch(self) -> None:
        """A new pass over the loader begins."""
        self._ran_this_epoch = False

    def ran_step(self, communicated: bool) -> None:
        """A step was run; ``communicated`` tells whether it used a collective."""
        self._communicates |= communicated
        self._ran_this_epoch = True

    @property
    def replays(self) -> bool:
        """Whether the step of a padding batch is run."""
        if self._mode == "replay" or self._must_replay or not self._ran_this_epoch:
            return True
        return self._mode == "auto" and self._communicates


@contextmanager
def without_trace(
    module: nn.Module,
    logged: Callable[[], Iterable[Metric]],
    keeps: Callable[[Metric], bool] = lambda metric: False,
) -> Generator[None, None, None]:
    """Runs a block and puts back what it changed.

    That is: buffers (the statistics of BatchNorm), metrics, logged values and the state of random numbers.

    A metric that the block creates stays, in its default state, so that all ranks end an epoch with the same ones.

    Args:
        module: Its buffers and the torchmetrics metrics in it are put back.
        logged: Gives the metrics kept elsewhere; called before and after.
        keeps: Which of those that held nothing before keep what the block puts into them.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    metrics = {id(metric): _metric_state(metric) for metric in _metrics(module, logged())}
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if on_gpu else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for name, buffer in module.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                # Through `data`: backward is still to come and must not find its saved tensors changed.
                buffer.data.copy_(buffers[name])
        for metric in _metrics(module, logged()):
            before = metrics.get(id(metric))
            if keeps(metric) and not (before and before["_update_count"]):
                pass
            elif before is not None:
                vars(metric).update(before)
            else:
                Metric.reset(metric)
            # Or a rank would answer from an earlier epoch's cache while the others communicate.
            metric._computed = None


def _metrics(module: nn.Module, logged: Iterable[Metric]) -> list[Metric]:
    return [m for m in module.modules() if isinstance(m, Metric)] + list(logged)


def _metric_state(metric: Metric) -> dict[str, Any]:
    kept = (*metric._defaults, "_update_count", "_forward_cache")
    return {name: _copy(getattr(metric, name)) for name in kept}


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def sequence_number() -> int | None:
    """How many collectives the default group has run; ``None`` if it does not tell (checked on gloo of torch 2.13)."""
    if not dist.is_initialized():
        return 0
    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
