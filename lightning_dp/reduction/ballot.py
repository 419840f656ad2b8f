"""The one small message per optimizer step by which ranks agree: ballot, tally, verdict.

Encoding and decision are pure; the reducer sends the encoded ballot through one SUM all-reduce.

A ballot is an int64 tensor, so that counts stay exact. After the two counts come, if there are any, the words: one
integer per rank, which only that rank fills. Then follow 16-bit lanes packed four to an integer: one lane per rank,
which only that rank fills (so the sum tells who said what), then one lane per parameter and one per note, in which
each rank adds 1 if it has a gradient, or means yes. A lane cannot overflow into its neighbour below 32,768 ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.errors import CountError

MAX_COUNT = 2**40  # of a micro-batch: sums over a window and 32,767 ranks stay within the integers
_HEADER = 2  # int64 words before the lanes
_LANES_PER_WORD = 4


class Flag(enum.IntFlag):
    """What a rank can say in its own lane."""

    NONE = 0
    NONFINITE = 1  # its own gradients hold NaN or Inf
    VETO = 2  # it wants this step skipped
    STOP = 4  # it wants to end the run after this step
    LARGE = 8  # its gradients are finite, but so large that the sum may overflow


@dataclass(frozen=True)
class Ballot:
    """What one rank casts.

    Attributes:
        count: Its samples, tokens, ... in this accumulation window.
        micro_batches: Its micro-batches in this window.
        used: For each parameter whether this rank has a gradient.
        flags: What it says beside the flag that is still being computed.
        notes: Its answers to yes-or-no questions that all ranks ask in the same order.
        word: An integer of its own for all to see; either all ranks have one in this step or none has.
    """

    count: int
    micro_batches: int
    used: Sequence[bool]
    flags: Flag = Flag.NONE
    notes: Sequence[bool] = ()
    word: int | None = None


@dataclass(frozen=True)
class Tally:
    """The sum of all ranks' ballots; the same on every rank.

    Attributes:
        count: Samples, tokens, ... of all ranks.
        micro_batches: Micro-batches of all ranks.
        flags: What each rank said, by rank.
        users: For each parameter the number of ranks that have a gradient for it.
        notes: For each note the number of ranks that mean yes.
        words: The ranks' words, by rank; empty if there were none.
    """

    count: int
    micro_batches: int
    flags: tuple[int, ...]
    users: tuple[int, ...]
    notes: tuple[int, ...] = ()
    words: tuple[int, ...] = ()

    def ranks_with(self, flag: Flag) -> tuple[int, ...]:
        """Ranks that raised a flag."""
        return tuple(rank for rank, flags in enumerate(self.flags) if flags & flag)


class Reason(enum.Enum):
    """Why a step is skipped."""

    NONFINITE = "non-finite gradient"
    VETO = "vetoed"
    OVERFLOW = "the sum of finite gradients overflowed"
    EMPTY = "no rank had data"


@dataclass(frozen=True)
class Verdict:
    """What all ranks do with this step: take it, or leave weights and optimizer as they are.

    Attributes:
        reason: Why the step is skipped; ``None`` if it is taken.
        ranks: Ranks that caused the skip, if it was caused by some.
        detail: What those ranks, or the dropped ones, say of it, by rank; empty unless gathered.
        dropped: Ranks whose part, which was not finite, was left out of a step that is taken.
    """

    reason: Reason | None = None
    ranks: tuple[int, ...] = ()
    detail: str = ""
    dropped: tuple[int, ...] = ()

    @property
    def step(self) -> bool:
        """Whether the optimizer steps."""
        return self.reason is None

    def describe(self) -> str:
        """Why the step is skipped, or a part of it dropped, in one line."""
        assert self.reason is not None or self.dropped
        cause = self.reason or Reason.NONFINITE
        return f"{cause.value}{': ' + self.detail if self.detail else ''}"


def check_count(count: object, where: str) -> None:
    """Checks that the count of a micro-batch can be told and added up.

    Args:
        count: What is to be the count.
        where: Rank and micro-batch, for the message.

    Raises:
        CountError: If it is no integer, negative or too large.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_COUNT:
        raise CountError(
            f"{where}: the count of a micro-batch must be an integer of at least 0 (and at most {MAX_COUNT:,}),"
            f" got {count!r}"
        )


def encode(ballot: Ballot, flag: Tensor, rank: int, world_size: int) -> Tensor:
    """Packs a ballot for a SUM all-reduce.

    Args:
        ballot: What this rank casts.
        flag: Zero-dimensional tensor with the flags that come from this rank's gradients; may still be being computed
            on a GPU, so it is never read by the host here.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        One-dimensional int64 tensor on the device of ``flag``, of the same length on every rank.
    """
    words = 0 if ballot.word is None else world_size
    lanes = world_size + len(ballot.used) + len(ballot.notes)
    start = _HEADER + words
    message = torch.zeros(start - (-lanes // _LANES_PER_WORD), dtype=torch.int64)
    message[0], message[1] = ballot.count, ballot.micro_batches
    if ballot.word is not None:
        message[_HEADER + rank] = ballot.word
    packed = message[start:].view(torch.int16)
    answers = bytearray([*ballot.used, *ballot.notes])  # much faster than a tensor from a list
    if answers:
        packed[world_size:lanes] = torch.frombuffer(answers, dtype=torch.uint8)
    packed[rank] = int(ballot.flags)
    message = message.to(flag.device, non_blocking=True)
    message[start:].view(torch.int16)[rank] += flag.to(torch.int16)
    return message


def decode(message: Tensor, world_size: int, num_parameters: int, num_notes: int = 0, has_words: bool = False) -> Tally:
    """Unpacks the sum of all ballots. On a GPU this is the one place where the host waits for the device."""
    message = message.cpu()
    start = _HEADER + (world_size if has_words else 0)
    count, micro_batches, *words = message[:start].tolist()
    lanes = message[start:].view(torch.int16).tolist()
    first_note = world_size + num_parameters
    return Tally(
        count,
        micro_batches,
        flags=tuple(lanes[:world_size]),
        users=tuple(lanes[world_size:first_note]),
        notes=tuple(lanes[first_note : first_note + num_notes]),
        words=tuple(words),
    )


def decide(tally: Tally, overflow: bool = False, drops: bool = False) -> Verdict:
    """The decision that follows from a tally.

    Args:
        tally: The same on every rank.
        overflow: Whether the reduced gradients hold NaN or Inf; the same on every rank, since all of them hold the
            same bits.
        drops: Ranks with non-finite gradients have left themselves out: the step is taken if others have data.
    """
    bad, vetoes = tally.ranks_with(Flag.NONFINITE), tally.ranks_with(Flag.VETO)
    if bad and not (drops and tally.count):
        return Verdict(Reason.NONFINITE, bad)
    if vetoes:
        return Verdict(Reason.VETO, vetoes)
    if tally.count == 0:
        return Verdict(Reason.EMPTY)
    if overflow:
        return Verdict(Reason.OVERFLOW)
    return Verdict(dropped=bad)
