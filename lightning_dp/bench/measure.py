"""The rounds of a benchmark, on one rank: every contender in turn, again and again."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp.bench.clock import StepSeconds, StepTimer, sent_bytes
from lightning_dp.bench.contenders import Contender, OptimizerFactory, Transfer, Watched
from lightning_dp.bench.memory import Footprint, footprint, rehearse
from lightning_dp.bench.workloads import Workload
from lightning_dp.reduction.wire import Wire

ContenderFactory = Callable[[Workload, OptimizerFactory], Contender]


@dataclass(frozen=True)
class Series:
    """One contender's figures, a number per round.

    Attributes:
        steps: Seconds of each step; the slowest rank's.
        exposed: Seconds from the last gradient of all ranks to the end of backward; of the rank that waits least, since
            what others wait for its gradients is no communication.
        sent: Bytes that a rank's interface sent in a step, mean over ranks; ``None`` where they cannot be counted.
        footprint: Memory and messages, on rank 0.
        predicted_exposed: What its plan was predicted to leave exposed, if it was.
    """

    steps: list[float]
    exposed: list[float]
    sent: list[float] | None
    footprint: Footprint
    predicted_exposed: float | None = None


@dataclass(frozen=True)
class Anatomy:
    """What a step consists of, from medians over rounds; for seconds those of the slowest rank.

    Attributes:
        forward: Seconds of forward without communication, and of all micro-batches before the last.
        backward: Seconds of backward without communication.
        optimizer: Seconds of the optimizer.
        ready: Seconds after the start of backward at which each gradient is ready, by parameter.
        nbytes: Size of each gradient.
        transfer: Seconds that the all-reduce of all gradients takes by itself.
        beside: For each round seconds of a step without communication, of one beside a transfer of all gradients, and
            of that transfer.
    """

    forward: float
    backward: float
    optimizer: float
    ready: list[float]
    nbytes: list[int]
    transfer: float
    beside: list[tuple[float, float, float]]


class Rounds:
    """Runs contenders in turn on the same ranks.

    Args:
        workload: The model; each contender gets a copy.
        optimizer: Makes an optimizer.
        contenders: How to make each contender, by name.
        device: Where to run.
        interface: Network interface whose counter is read; ``None`` reads none.
        sharing: Ranks that send through that interface.
        micro_batches: Micro-batches in a step; all but the last are accumulated.
    """

    WARM_UP = 3

    def __init__(
        self,
        workload: Workload,
        optimizer: OptimizerFactory,
        contenders: Mapping[str, ContenderFactory],
        device: torch.device,
        interface: str | None,
        sharing: int,
        micro_batches: int = 1,
    ) -> None:
        self._workload, self._optimizer, self._device = workload.to(device), optimizer, device
        self._interface, self._sharing, self._micro_batches = interface, sharing, micro_batches
        batch = workload.make_batch(seed=dist.get_rank())
        self._count = workload.count(batch)
        self._batch = _to(batch, device)
        self._watched = Watched(copy.deepcopy(workload), optimizer)
        self._watched_timer = StepTimer(self._watched.workload, device, 0, micro_batches)
        self._watched_timer.step(self._watched, self._batch, self._count)
        ready = self._watched.ready[-1]
        self._last = ready.index(max(ready))
        self._nbytes = [
            p.numel() * p.element_size() if p.requires_grad else 0 for p in self._watched.workload.parameters()
        ]
        self._wire = Wire()
        self._transfer = Transfer(sum(self._nbytes), device)
        self._transfer.start()  # what the first collective of a process allocates is no contender's
        self._transfer.wait()
        self._footprints: dict[str, Footprint] = {}
        self._contenders: dict[str, tuple[Contender, StepTimer]] = {}
        for name, make in contenders.items():
            self._contenders[name], self._footprints[name] = self._make(make)
        self._plain, _ = self._make(Contender)

    def run(self, rounds: int) -> tuple[dict[str, Series], Anatomy]:
        """Measures.

        Args:
            rounds: Rounds that count, after a few that do not.

        Returns:
            Each contender's figures, and what a step consists of; the same on every rank.
        """
        steps: dict[str, list[tuple[StepSeconds, int | None]]] = {name: [] for name in self._contenders}
        watched: list[StepSeconds] = []
        alone: list[float] = []
        beside: list[tuple[float, float, float]] = []
        for number in range(self.WARM_UP + rounds):
            if number == self.WARM_UP:
                watched, alone, beside, self._watched.ready = [], [], [], []
                steps = {name: [] for name in self._contenders}
            for name, (contender, timer) in self._contenders.items():
                steps[name].append(self._counted_step(contender, timer))
            dist.barrier()
            watched.append(self._watched_timer.step(self._watched, self._batch, self._count))
            dist.barrier()
            start = time.perf_counter()
            self._transfer.start()
            alone.append(self._transfer.wait() - start)
            beside.append(self._step_beside_transfer())
        return self._gather(steps), self._anatomy(watched, alone, beside)

    def _make(self, make: ContenderFactory) -> tuple[tuple[Contender, StepTimer], Footprint]:
        rehearse(make(copy.deepcopy(self._workload), self._optimizer), self._batch, self._count)
        workload = copy.deepcopy(self._workload)
        timer = StepTimer(workload, self._device, self._last, self._micro_batches)
        contender, seen = footprint(lambda: make(workload, self._optimizer), self._batch, self._count, self._device)
        return (contender, timer), seen

    def _counted_step(self, contender: Contender, timer: StepTimer) -> tuple[StepSeconds, int | None]:
        dist.barrier()
        before = self._sent()
        dist.barrier()
        seconds = timer.step(contender, self._batch, self._count)
        dist.barrier()
        after = self._sent()
        return seconds, after - before if after is not None and before is not None else None

    def _sent(self) -> int | None:
        return sent_bytes(self._interface) if self._interface is not None else None

    def _step_beside_transfer(self) -> tuple[float, float, float]:
        contender, timer = self._plain
        dist.barrier()
        plain = timer.step(contender, self._batch, self._count).total
        dist.barrier()
        start = time.perf_counter()
        self._transfer.start()
        with self._wire.beside_compute(self._device):  # a limit for all, so the transport takes no more than it must
            beside = timer.step(contender, self._batch, self._count).total
        return plain, beside, self._transfer.wait() - start

    def _gather(self, steps: Mapping[str, list[tuple[StepSeconds, int | None]]]) -> dict[str, Series]:
        everyone = _gathered(steps)
        series = {}
        for name in steps:
            by_round = list(zip(*(theirs[name] for theirs in everyone), strict=True))
            sent = [[nbytes for _, nbytes in ranks] for ranks in by_round]
            counted = all(nbytes is not None for ranks in sent for nbytes in ranks)
            series[name] = Series(
                [max(seconds.total for seconds, _ in ranks) for ranks in by_round],
                [min(seconds.exposed for seconds, _ in ranks) for ranks in by_round],
                [statistics.mean(n or 0 for n in ranks) / self._sharing for ranks in sent] if counted else None,
                self._footprints[name],
                self._contenders[name][0].predicted_exposed,
            )
        return series

    def _anatomy(
        self, watched: list[StepSeconds], alone: list[float], beside: list[tuple[float, float, float]]
    ) -> Anatomy:
        median = statistics.median
        mine = (
            median(s.forward for s in watched),
            median(s.backward for s in watched),
            median(s.optimizer for s in watched),
            median(alone),
            [median(times) for times in zip(*self._watched.ready, strict=True)],
        )
        everyone = _gathered(mine)
        slowest = max(everyone, key=lambda theirs: theirs[1])
        return Anatomy(
            max(theirs[0] for theirs in everyone),
            slowest[1],
            max(theirs[2] for theirs in everyone),
            slowest[4],
            self._nbytes,
            max(theirs[3] for theirs in everyone),
            [max(ranks) for ranks in zip(*_gathered(beside), strict=True)],
        )


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, (list, tuple)):
        return [_to(part, device) for part in batch]
    if isinstance(batch, dict):
        return {key: _to(part, device) for key, part in batch.items()}
    return batch
