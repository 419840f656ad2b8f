"""Ballot, tally, verdict."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp.reduction.ballot import Ballot, Flag, Reason, Tally, Verdict, decide, decode, encode

MAX_COUNT = 2**40
MAX_LANE_RANKS = 32_767  # what a 16-bit lane can count

FLAG_TENSORS = {
    "float32": lambda said: torch.tensor(float(said)),  # as the check of gradients makes it
    "int64": lambda said: torch.tensor(said),
    "bool": lambda said: torch.tensor(bool(said)),
}


def add_up(messages: list[Tensor]) -> Tensor:
    """What a SUM all-reduce of int64 does, in Python's own integers."""
    assert len({len(message) for message in messages}) == 1, "all ranks must send the same length"
    sums = [sum(words) for words in zip(*(message.tolist() for message in messages), strict=True)]
    return torch.tensor(sums, dtype=torch.int64)  # raises where a sum leaves int64


def tally_of(ballots: list[Ballot], flags: list[int], make_flag=FLAG_TENSORS["float32"]) -> Tally:
    world_size = len(ballots)
    messages = [
        encode(ballot, make_flag(flag), rank, world_size)
        for rank, (ballot, flag) in enumerate(zip(ballots, flags, strict=True))
    ]
    first = ballots[0]
    return decode(add_up(messages), world_size, len(first.used), len(first.notes), first.word is not None)


def check(ballots: list[Ballot], flags: list[int], make_flag=FLAG_TENSORS["float32"]) -> None:
    """Compares the tally with sums made without any packing."""
    tally = tally_of(ballots, flags, make_flag)
    assert tally.count == sum(ballot.count for ballot in ballots)
    assert tally.micro_batches == sum(ballot.micro_batches for ballot in ballots)
    assert tally.flags == tuple(flag | ballot.flags for flag, ballot in zip(flags, ballots, strict=True))
    assert tally.notes == tuple(sum(column) for column in zip(*(ballot.notes for ballot in ballots), strict=True))
    assert tally.words == tuple(ballot.word for ballot in ballots if ballot.word is not None)
    assert tally.users == tuple(sum(column) for column in zip(*(ballot.used for ballot in ballots), strict=True))
    assert tally.ranks_with(Flag.NONFINITE) == tuple(rank for rank, flag in enumerate(flags) if flag)


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 300),
    num_parameters=st.integers(0, 100),
    num_notes=st.integers(0, 9),
    has_words=st.booleans(),
    kind=st.sampled_from(sorted(FLAG_TENSORS)),
    seed=st.integers(0, 2**32),
)
def test_every_tally_is_the_exact_sum(
    world_size: int, num_parameters: int, num_notes: int, has_words: bool, kind: str, seed: int
):
    rng = random.Random(seed)
    ballots = [
        Ballot(
            rng.randint(0, MAX_COUNT),
            rng.randint(0, 1000),
            [rng.random() < 0.5 for _ in range(num_parameters)],
            rng.choice([Flag.NONE, Flag.VETO, Flag.STOP, Flag.VETO | Flag.STOP]),
            [rng.random() < 0.5 for _ in range(num_notes)],
            rng.randint(-(2**63), 2**63 - 1) if has_words else None,
        )
        for _ in range(world_size)
    ]
    check(ballots, [rng.randint(0, 1) for _ in range(world_size)], FLAG_TENSORS[kind])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_parameters", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("everyone", [False, True])
def test_edges_of_the_packing(world_size, num_parameters, everyone):
    """Lanes that end before, on and after the end of an integer; everybody says nothing, or everything."""
    ballots = [Ballot(MAX_COUNT, 1, [everyone] * num_parameters) for _ in range(world_size)]
    check(ballots, [int(everyone)] * world_size)


@pytest.mark.parametrize("kind", sorted(FLAG_TENSORS))
@pytest.mark.parametrize("culprit", range(9))
def test_a_flag_belongs_to_the_rank_that_raised_it(culprit, kind):
    flags = [int(rank == culprit) for rank in range(9)]
    tally = tally_of([Ballot(1, 1, [True, False])] * 9, flags, FLAG_TENSORS[kind])
    assert tally.ranks_with(Flag.NONFINITE) == (culprit,)
    assert tally.users == (9, 0)


@pytest.mark.parametrize("lane", range(6))
def test_a_full_lane_does_not_carry_into_its_neighbours(lane):
    """As many ranks as a lane can count all use one parameter, and the first and last raise their flags."""
    used = [at == lane for at in range(6)]
    ballot = Ballot(MAX_COUNT // MAX_LANE_RANKS, 1, used)
    quiet, loud = torch.tensor(0.0), torch.tensor(1.0)
    # Ranks that say nothing send the same message, so one stands for all of them.
    total = encode(ballot, quiet, 0, MAX_LANE_RANKS) * (MAX_LANE_RANKS - 2)
    for rank in (0, MAX_LANE_RANKS - 1):
        total += encode(ballot, loud, rank, MAX_LANE_RANKS)
    tally = decode(total, MAX_LANE_RANKS, 6)
    assert tally.users == tuple(MAX_LANE_RANKS * at for at in used)
    assert tally.ranks_with(Flag.NONFINITE) == (0, MAX_LANE_RANKS - 1)
    assert tally.count == ballot.count * MAX_LANE_RANKS


@pytest.mark.parametrize(("world_size", "num_parameters"), [(1, 0), (2, 3), (8, 161), (300, 100)])
def test_a_ballot_is_small(world_size, num_parameters):
    """Two integers, and two bytes for each rank and each parameter, rounded up to whole integers."""
    message = encode(Ballot(1, 1, [True] * num_parameters), torch.tensor(0.0), 0, world_size)
    assert (message.dtype, message.ndim) == (torch.int64, 1)
    nbytes = message.numel() * 8
    assert 0 <= nbytes - (16 + 2 * (world_size + num_parameters)) < 8


def test_the_largest_counts_stay_exact():
    """One more or less among 300 times 2**40 is not lost, as it would be in float32."""
    for odd in (0, 1):
        ballots = [Ballot(MAX_COUNT - odd * (rank == 7), 1, []) for rank in range(300)]
        assert tally_of(ballots, [0] * 300).count == 300 * MAX_COUNT - odd


def test_a_ballot_with_words_is_longer_by_one_integer_a_rank():
    plain = encode(Ballot(1, 1, [True]), torch.tensor(0.0), 0, 5)
    wordy = encode(Ballot(1, 1, [True], word=-7), torch.tensor(0.0), 3, 5)
    assert len(wordy) - len(plain) == 5
    assert wordy[2:7].tolist() == [0, 0, 0, -7, 0]


@pytest.mark.parametrize(
    ("count", "flags", "expected"),
    [
        (8, (0, 0, 0), Verdict()),
        (8, (0, 1, 0), Verdict(dropped=(1,))),
        (8, (1, 0, 1), Verdict(dropped=(0, 2))),
        (0, (1, 1, 1), Verdict(Reason.NONFINITE, (0, 1, 2))),  # nobody is left
        (8, (1, Flag.VETO, 0), Verdict(Reason.VETO, (1,))),
        (0, (0, 0, 0), Verdict(Reason.EMPTY)),
    ],
)
def test_verdict_where_bad_ranks_leave_themselves_out(count, flags, expected):
    tally = Tally(count=count, micro_batches=len(flags), flags=flags, users=())
    assert decide(tally, drops=True) == expected


@pytest.mark.parametrize(
    ("count", "flags", "overflow", "expected"),
    [
        (8, (0, 0, 0), False, Verdict()),
        (1, (0,), False, Verdict()),
        (0, (0, 0, 0), False, Verdict(Reason.EMPTY)),
        (8, (0, 0, 0), True, Verdict(Reason.OVERFLOW)),
        (8, (0, Flag.NONFINITE, 0), False, Verdict(Reason.NONFINITE, (1,))),
        (8, (1, 0, 1), False, Verdict(Reason.NONFINITE, (0, 2))),
        (8, (0, 0, 1), True, Verdict(Reason.NONFINITE, (2,))),  # the culprits are known: say so
        (0, (1, 0, 0), False, Verdict(Reason.NONFINITE, (0,))),
        (8, (0, Flag.VETO, Flag.VETO), False, Verdict(Reason.VETO, (1, 2))),
        (8, (Flag.NONFINITE, Flag.VETO, 0), False, Verdict(Reason.NONFINITE, (0,))),
        (8, (0, Flag.STOP, 0), False, Verdict()),  # the step is taken, and the last one
    ],
)
def test_verdict(count, flags, overflow, expected):
    verdict = decide(Tally(count=count, micro_batches=len(flags), flags=flags, users=()), overflow)
    assert verdict == expected
    assert verdict.step == (expected.reason is None)


def test_only_a_verdict_without_reason_steps():
    assert Verdict().step
    assert not any(Verdict(reason).step for reason in Reason)
