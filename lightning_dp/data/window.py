"""What an accumulation window holds on all ranks, known before its first backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.data.counts import CountFunction, as_count
from lightning_dp.reduction.wire import Wire

END: Any = object()


@dataclass
class WindowTotals:
    """Sums over the micro-batches of a window on all ranks; the message is awaited when they are first read."""

    _names: tuple[str, ...]
    _sums: Tensor
    _wire: Wire
    _work: dist.Work | None

    def __getitem__(self, name: str) -> int:
        """The total of one normalizer."""
        return int(self._read()[1 + self._names.index(name)])

    @property
    def micro_batches(self) -> int:
        """Micro-batches, padding ones not among them."""
        return int(self._read()[0])

    def _read(self) -> Tensor:
        self._wire.wait(self._work, "the totals of the accumulation window")
        self._work = None
        return self._sums


@dataclass(frozen=True)
class WindowCounter:
    """Counts a window ahead.

    Attributes:
        normalizers: What is counted, by name: functions of a batch as the loader gives it. Nothing is counted and no
            batch is looked at ahead of time if there are none.
        length: Gives the number of micro-batches in a full window.
        limit: Gives the number of micro-batches in the epoch, as far as the loop goes.
    """

    normalizers: Mapping[str, CountFunction] = field(default_factory=dict)
    length: Callable[[], int] = lambda: 1
    limit: Callable[[], float] = lambda: float("inf")

    def starts(self, position: int, first: int) -> int:
        """How many micro-batches the window has that starts here, in an epoch taken up at ``first``; 0 if none does."""
        full = self.length()
        if not self.normalizers or (position % full and position != first):
            return 0
        return int(min(full - position % full, max(1, self.limit() - position)))

    def count(self, batches: Iterable[Any], wire: Wire) -> WindowTotals:
        """Sums up this rank's batches of a window and sends the sums on their way; all ranks together."""
        sums = [0] * (1 + len(self.normalizers))
        for batch in batches:
            sums[0] += 1
            for at, (name, count) in enumerate(self.normalizers.items()):
                sums[1 + at] += as_count(count(batch), f"rank {wire.rank}, normalizer '{name}'")
        tensor = torch.tensor(sums, dtype=torch.int64)
        return WindowTotals(tuple(self.normalizers), tensor, wire, wire.all_reduce(tensor))


class LookAhead:
    """A loader's batches, some of which can be looked at before they are due.

    Args:
        batches: The batches.
        snapshot: Gives the loader's state; kept for each batch as it was right after it was drawn.

    Attributes:
        ended: Whether it is known that there are no more batches than those drawn.
        end: The loader's state then.
    """

    def __init__(self, batches: Iterator[Any], snapshot: Callable[[], Any]) -> None:
        self._batches = batches
        self._snapshot = snapshot
        self._drawn: deque[tuple[Any, Any]] = deque()
        self.ended = False
        self.end: Any = None

    @property
    def ahead(self) -> bool:
        """Whether batches were drawn and not taken."""
        return bool(self._drawn)

    def take(self) -> tuple[Any, Any]:
        """The next batch and the state after it; ``END`` and the state then, when there is none."""
        self.peek(1)
        return self._drawn.popleft() if self._drawn else (END, self.end)

    def peek(self, count: int) -> list[Any]:
        """The next ``count`` batches, or as many as there are."""
        while len(self._drawn) < count and not self.ended:
            batch = next(self._batches, END)
            if batch is END:
                self.ended, self.end = True, self._snapshot()
            else:
                self._drawn.append((batch, self._snapshot()))
        return [batch for batch, _ in list(self._drawn)[:count]]
