"""Who is missing when a collective fails."""

from __future__ import annotations

import re
import time

import pytest
import torch
from rank_pool import RankFailureError, RankPool

from lightning_dp import GradientReducer
from lightning_dp.reduction.roll_call import missing_ranks
from lightning_dp.reduction.wire import Wire


def step_without(rank: int, absent: int, how: str) -> str | None:
    """One rank crashes, or sleeps longer than the group's timeout, before its second step."""
    model = torch.nn.Linear(3, 2)
    reducer = GradientReducer(model.named_parameters())
    for step in range(2):
        if step == 1 and rank == absent:
            if how == "crashes":
                raise ArithmeticError("enough")
            time.sleep(14)
            return None
        model.zero_grad()
        reducer.backward(model(torch.ones(4, 3)).sum(), count=4)
    return None


@pytest.mark.parametrize(("absent", "how"), [(1, "crashes"), (2, "crashes"), (1, "sleeps"), (2, "sleeps")])
def test_the_message_names_who_is_missing(pool: RankPool, absent: int, how: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailureError) as failure:
        pool.run(3, step_without, absent, how, timeout=60, group_timeout=3)
    assert time.monotonic() - started < 40
    told = re.findall(
        r"CommunicationError: rank (\d) of 3: .* did not complete, because (.*?) stopped", str(failure.value)
    )
    waiting = {rank: who for rank, who in told}
    assert waiting == {str(rank): f"rank {absent}" for rank in range(3) if rank != absent}


def sign_in(rank: int, late: int | None) -> tuple[int, ...]:
    Wire().gather(rank)
    if rank == late:
        time.sleep(1.5)
    return missing_ranks(rank, range(3), grace=0.5)


def test_who_signs_in_is_not_missing(pool: RankPool) -> None:
    assert pool.run(3, sign_in, None) == [(), (), ()]


def test_who_comes_late_is_missing_to_the_others(pool: RankPool) -> None:
    assert pool.run(3, sign_in, 1) == [(1,), (), (1,)]
