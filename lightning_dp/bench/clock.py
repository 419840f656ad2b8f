"""Reading clocks and counters around a step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dp.bench.contenders import Contender
from lightning_dp.bench.workloads import Workload


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step.

    Attributes:
        total: From zeroing the gradients to the end of the optimizer.
        forward: Zeroing, all micro-batches but the last, and forward.
        backward: The last backward, with what it waits for the network.
        optimizer: The optimizer's step.
        exposed: From the last gradient to the end of backward.
    """

    total: float
    forward: float
    backward: float
    optimizer: float
    exposed: float


class StepTimer:
    """Times the steps of one contender; made before it, so that no hook of the contender's runs before the timer's.

    Args:
        workload: The contender's.
        device: On a GPU the host waits for it at the ends of a step, and events time what is between.
        last: Index of the parameter whose gradient arrives last.
        micro_batches: Micro-batches in a step.
    """

    def __init__(self, workload: Workload, device: torch.device, last: int, micro_batches: int = 1) -> None:
        self._micro_batches = micro_batches
        self._cuda = device.type == "cuda"
        parameter = list(workload.parameters())[last]
        parameter.register_post_accumulate_grad_hook(self._note_last)  # type: ignore[no-untyped-call]

    def step(self, contender: Contender, batch: Any, count: int) -> StepSeconds:
        """Takes one step."""
        self._synchronize()
        start = self._mark()
        contender.optimizer.zero_grad()
        for _ in range(self._micro_batches - 1):
            contender.accumulate(batch, count)
        loss = contender.loss(batch)
        forward = self._mark()
        self._last = forward
        contender.backward(loss, count)
        backward = self._mark()
        contender.update()
        end = self._mark()
        self._synchronize()
        between = self._between
        return StepSeconds(
            between(start, end),
            between(start, forward),
            between(forward, backward),
            between(backward, end),
            between(self._last, backward),
        )

    def _note_last(self, parameter: torch.Tensor) -> None:
        self._last = self._mark()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3 if self._cuda else float(second - first)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def sent_bytes(interface: str, table: Path = Path("/proc/self/net/dev")) -> int | None:
    """Bytes that this host has sent through a network interface since it came up.

    Args:
        interface: Its name, as seen in this process's network namespace.
        table: The kernel's table of counters.

    Returns:
        ``None`` where there is no such table or interface.
    """
    if not table.exists():
        return None
    for line in table.read_text().splitlines():
        name, found, counters = line.partition(":")
        if found and name.strip() == interface:
            return int(counters.split()[8])
    return None
