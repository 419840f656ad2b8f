"""The one small message per optimizer step by which ranks agree: ballot, tally, verdict.

Encoding and decision are pure; the reducer sends the encoded ballot through one SUM all-reduce.

A ballot is an int64 tensor, so that counts stay exact. After the two counts follow 16-bit lanes packed four to an
integer: one lane per rank, which only that rank fills (so the sum tells who said what), then one lane per parameter,
in which each rank adds 1 if it has a gradient. A lane cannot overflow into its neighbour below 32,768 ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_HEADER = 2  # int64 words before the lanes
_LANES_PER_WORD = 4


class Flag(enum.IntFlag):
    """What a rank can say in its own lane."""

    NONFINITE = 1


@dataclass(frozen=True)
class Ballot:
    """What one rank casts.

    Attributes:
        count: Its samples, tokens, ... in this accumulation window.
        micro_batches: Its micro-batches in this window.
        used: For each parameter whether this rank has a gradient.
    """

    count: int
    micro_batches: int
    used: Sequence[bool]


@dataclass(frozen=True)
class Tally:
    """The sum of all ranks' ballots; the same on every rank.

    Attributes:
        count: Samples, tokens, ... of all ranks.
        micro_batches: Micro-batches of all ranks.
        flags: What each rank said, by rank.
        users: For each parameter the number of ranks that have a gradient for it.
    """

    count: int
    micro_batches: int
    flags: tuple[int, ...]
    users: tuple[int, ...]

    @property
    def nonfinite_ranks(self) -> tuple[int, ...]:
        """Ranks whose own gradients held NaN or Inf."""
        return tuple(rank for rank, flags in enumerate(self.flags) if flags & Flag.NONFINITE)


class Reason(enum.Enum):
    """Why a step is skipped."""

    NONFINITE = "non-finite gradient"
    OVERFLOW = "the sum of finite gradients overflowed"
    EMPTY = "no rank had data"


@dataclass(frozen=True)
class Verdict:
    """What all ranks do with this step: take it, or leave weights and optimizer as they are.

    Attributes:
        reason: Why the step is skipped; ``None`` if it is taken.
        ranks: Ranks that caused the skip, if it was caused by some.
        detail: What those ranks say of it, by rank; empty unless gathered.
    """

    reason: Reason | None = None
    ranks: tuple[int, ...] = ()
    detail: str = ""

    @property
    def step(self) -> bool:
        """Whether the optimizer steps."""
        return self.reason is None

    def describe(self) -> str:
        """Why the step is skipped, in one line."""
        assert self.reason is not None
        return f"{self.reason.value}{': ' + self.detail if self.detail else ''}"


def encode(ballot: Ballot, flag: Tensor, rank: int, world_size: int) -> Tensor:
    """Packs a ballot for a SUM all-reduce.

    Args:
        ballot: What this rank casts.
        flag: Zero-dimensional tensor holding this rank's :class:`Flag` bits; may still be being computed on a GPU, so
            it is never read by the host here.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        One-dimensional int64 tensor on the device of ``flag``, of the same length on every rank.
    """
    lanes = world_size + len(ballot.used)
    words = -(-lanes // _LANES_PER_WORD)
    message = torch.zeros(_HEADER + words, dtype=torch.int64)
    message[0], message[1] = ballot.count, ballot.micro_batches
    packed = message[_HEADER:].view(torch.int16)
    packed[world_size:lanes] = torch.tensor(ballot.used, dtype=torch.int16)
    message = message.to(flag.device, non_blocking=True)
    message[_HEADER:].view(torch.int16)[rank] = flag
    return message


def decode(message: Tensor, world_size: int, num_parameters: int) -> Tally:
    """Unpacks the sum of all ballots. On a GPU this is the one place where the host waits for the device."""
    message = message.cpu()
    count, micro_batches = message[:_HEADER].tolist()
    lanes = message[_HEADER:].view(torch.int16).tolist()
    users = lanes[world_size : world_size + num_parameters]
    return Tally(count, micro_batches, tuple(lanes[:world_size]), tuple(users))


def decide(tally: Tally, overflow: bool = False) -> Verdict:
    """The decision that follows from a tally.

    Args:
        tally: The same on every rank.
        overflow: Whether the reduced gradients hold NaN or Inf; the same on every rank, since all of them hold the
            same bits.
    """
    if tally.nonfinite_ranks:
        return Verdict(Reason.NONFINITE, tally.nonfinite_ranks)
    if tally.count == 0:
        return Verdict(Reason.EMPTY)
    if overflow:
        return Verdict(Reason.OVERFLOW)
    return Verdict()
