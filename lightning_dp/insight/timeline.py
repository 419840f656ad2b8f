"""When the buckets of one step became ready, were launched and were done."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket, in seconds after the start of backward.

    Attributes:
        ready: All gradients of the bucket had been accumulated.
        launch: Its all-reduce was started.
        done: Its all-reduce was seen complete. Buckets are waited for in order after backward, so a bucket that
            completed during backward shows the end of backward here.
    """

    ready: float
    launch: float
    done: float


@dataclass(frozen=True)
class StepTimes:
    """Times of one reduction, in seconds after the start of its backward.

    Attributes:
        buckets: One entry per bucket, in launch order.
        backward_end: The end of the backward computation.
        end: Buckets and ballot had been waited for.
    """

    buckets: tuple[BucketTimes, ...]
    backward_end: float
    end: float

    @property
    def exposed(self) -> float:
        """Seconds that the step waited for the network after backward had ended."""
        return self.end - self.backward_end


class Timeline:
    """Marks the events of one reduction at a time.

    On the CPU a mark is a reading of the host's clock. On a GPU it is an event on the current stream, so that it
    tells when the device got there, not when the host queued the work.

    Args:
        device: Where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[tuple[str, int], float | torch.cuda.Event] = {}

    def start(self) -> None:
        """Forgets the last reduction and marks the start of backward."""
        self._marks.clear()
        self.mark("start")

    def mark(self, event: str, bucket: int = -1) -> None:
        """Marks now as the time of ``event`` (of ``bucket``); the first mark of an event counts."""
        key = (event, bucket)
        if key in self._marks:
            return
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
            self._marks[key] = now
        else:
            self._marks[key] = time.perf_counter()

    def read(self, num_buckets: int) -> StepTimes:
        """The times of the reduction just finished. On a GPU, waits for its last event."""
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        buckets = tuple(
            BucketTimes(*(self._since_start(event, bucket) for event in ("ready", "launch", "done")))
            for bucket in range(num_buckets)
        )
        return StepTimes(buckets, self._since_start("backward_end"), self._since_start("end"))

    def gradients(self) -> dict[int, float]:
        """When, in seconds after the start of backward, what was marked as ``"gradient"`` was there, by its number."""
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        return {number: self._since_start(event, number) for event, number in self._marks if event == "gradient"}

    def _since_start(self, event: str, bucket: int = -1) -> float:
        start, now = self._marks[("start", -1)], self._marks[(event, bucket)]
        if isinstance(start, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            return float(start.elapsed_time(now)) / 1e3
        assert isinstance(start, float) and isinstance(now, float)
        return now - start
