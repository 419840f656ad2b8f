"""What memory a contender takes, and how many messages it sends."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dp.bench.contenders import Contender

STEPS = 3
LAST_STEP = "bench: last step"


@dataclass(frozen=True)
class Footprint:
    """What making a contender and some steps of it showed.

    Attributes:
        held: Bytes of gradients and buckets after a step, before gradients are zeroed; optimizer state is left out.
        peak: The most bytes during a step beyond weights and optimizer state; activations are part of it. On a CPU
            what the transport's threads free within that step is not seen.
        messages: Collectives that one step issues.
    """

    held: int
    peak: int
    messages: int


def footprint(
    make: Callable[[], Contender], batch: Any, count: int, device: torch.device
) -> tuple[Contender, Footprint]:
    """Makes a contender and runs steps until it works as it will from now on, the last ones under the profiler.

    Args:
        make: Makes the contender around a workload of its own that exists already.
        batch: A batch.
        count: What it weighs.
        device: Where the tensors are.

    Returns:
        The contender, and what it takes.
    """
    gc.collect()
    before = _allocated(device)
    contender = make()
    for _ in range(STEPS):
        _step(contender, batch, count)
    while not contender.settled:
        _step(contender, batch, count)
    gc.collect()
    held = _allocated(device) - before - _state_bytes(contender)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        _step(contender, batch, count)  # what the next step frees must have been seen to be allocated
        with torch.profiler.record_function(LAST_STEP):
            _step(contender, batch, count)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    last = next(event for event in events if event.name() == LAST_STEP)
    inside = [e for e in events if last.start_ns() <= e.start_ns() <= last.start_ns() + last.duration_ns()]
    rise, highest = 0, 0
    for event in inside:
        if event.name() == "[memory]" and event.device_type().name == device.type.upper():
            rise += event.nbytes()
            highest = max(highest, rise)
    messages = sum(event.name().startswith("c10d::") for event in inside)
    return contender, Footprint(held, held + highest, messages)


def rehearse(contender: Contender, batch: Any, count: int) -> None:
    """Takes a step with a contender of its own, so that what its kind allocates in its first one is there."""
    _step(contender, batch, count)
    contender.give_up()


def _step(contender: Contender, batch: Any, count: int) -> None:
    contender.optimizer.zero_grad()
    contender.backward(contender.loss(batch), count)
    contender.update()


def _state_bytes(contender: Contender) -> int:
    states = contender.optimizer.state.values()
    tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple(zip(_names, [ctypes.c_size_t] * len(_names), strict=True))


def _allocated(device: torch.device) -> int:
    """Bytes in use on the device; for a CPU those of glibc's malloc, tensors above all, in whichever thread."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    mallinfo = ctypes.CDLL(None).mallinfo2  # glibc 2.33 and later
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
