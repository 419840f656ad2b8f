"""When buckets became ready, were launched and were done."""

import time

import pytest
import torch

from lightning_dp.insight.timeline import BucketTimes, StepTimes, Timeline

CPU = torch.device("cpu")


class Clock:
    """Stands in for the host's clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def play(timeline: Timeline, clock: Clock, events: list[tuple]) -> None:
    """Marks each ``(time, event, bucket)``; the bucket is left out where there is none."""
    for at, event, *bucket in events:
        clock.now = at
        if event == "start":
            timeline.start()
        else:
            timeline.mark(event, *bucket)


# Times are sums of powers of two, so that differences are exact.
HIDDEN_BUT_FOR_THE_LAST = [
    (100.0, "start"),
    (101.0, "ready", 0),
    (101.0, "launch", 0),
    (102.0, "ready", 1),
    (102.5, "launch", 1),
    (104.0, "backward_end"),
    (104.0, "done", 0),
    (104.25, "done", 1),
    (104.75, "end"),
]
NOTHING_TO_WAIT_FOR = [(8.0, "start"), (10.0, "backward_end"), (10.0, "end")]
ALL_AFTER_BACKWARD = [
    (0.0, "start"),
    (3.0, "backward_end"),
    (3.0, "ready", 0),
    (3.0, "launch", 0),
    (5.0, "done", 0),
    (5.5, "end"),
]


@pytest.mark.parametrize(
    ("events", "buckets", "backward_end", "end", "exposed"),
    [
        (HIDDEN_BUT_FOR_THE_LAST, [(1.0, 1.0, 4.0), (2.0, 2.5, 4.25)], 4.0, 4.75, 0.75),
        (NOTHING_TO_WAIT_FOR, [], 2.0, 2.0, 0.0),
        (ALL_AFTER_BACKWARD, [(3.0, 3.0, 5.0)], 3.0, 5.5, 2.5),
    ],
    ids=["hidden but for the last", "nothing to wait for", "all after backward"],
)
def test_times_count_from_the_start_of_backward(clock, events, buckets, backward_end, end, exposed):
    timeline = Timeline(CPU)
    play(timeline, clock, events)
    times = timeline.read(len(buckets))
    assert times == StepTimes(tuple(BucketTimes(*bucket) for bucket in buckets), backward_end, end)
    assert times.exposed == exposed


def test_the_first_mark_of_an_event_counts(clock):
    timeline = Timeline(CPU)
    later = [(200.0 + at, event, *bucket) for at, event, *bucket in ALL_AFTER_BACKWARD if event != "start"]
    play(timeline, clock, ALL_AFTER_BACKWARD + later)
    assert timeline.read(1).end == 5.5


def test_a_new_start_forgets_the_last_reduction(clock):
    timeline = Timeline(CPU)
    play(timeline, clock, ALL_AFTER_BACKWARD)
    play(timeline, clock, HIDDEN_BUT_FOR_THE_LAST)
    assert timeline.read(2).exposed == 0.75
    clock.now = 500.0
    timeline.start()
    with pytest.raises(KeyError):  # what was not marked is not made up
        timeline.read(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_device_tells_the_time():
    """The host only queues the work: its own clock would see next to none of the seconds that the device is busy."""
    device = torch.device("cuda")
    timeline = Timeline(device)
    torch.cuda._sleep(1000)  # compiles the kernel
    torch.cuda.synchronize()
    timeline.start()
    timeline.mark("ready", 0)
    timeline.mark("launch", 0)
    timeline.mark("backward_end")
    before = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    timeline.mark("done", 0)
    timeline.mark("end")
    times = timeline.read(1)
    waited = time.perf_counter() - before
    assert times.buckets[0].ready <= times.buckets[0].launch <= times.backward_end < times.buckets[0].done <= times.end
    assert waited / 2 < times.exposed < waited * 1.05  # the clocks of host and device differ a little
