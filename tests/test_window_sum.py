"""The sum of an accumulation window: who goes on with what, with as many ranks as before and with others.

That parts are added up, and a resumed run trains as the whole one, is tested with processes: test_resume_window.py.
"""

from __future__ import annotations

import pytest
import torch

from lightning_dp.reduction.window import Window
from lightning_dp.reduction.window_sum import WindowSum

GRAD = torch.arange(3.0)


def saved(vetoes: list[str], bad: list[str], weight: float | None = 0.5) -> WindowSum:
    return WindowSum({"weight": GRAD}, 12, 4, vetoes, bad, weight)


def parts(total: WindowSum, ranks: int, weight: float = 0.5) -> list[Window]:
    return [total.part_of(rank, ranks, weight) for rank in range(ranks)]


# Ranks now, what was bad of three ranks, and who has the sum.
HOLDERS = [
    (3, ["", "", ""], 0),
    (3, ["NaN", "", ""], 1),
    (3, ["NaN", "NaN", ""], 2),
    (3, ["NaN", "NaN", "NaN"], 0),
    (2, ["NaN", "", ""], 0),
    (4, ["", "NaN", ""], 0),
]


@pytest.mark.parametrize(("ranks", "bad", "holder"), HOLDERS)
def test_one_rank_has_the_sum_and_the_others_nothing(ranks: int, bad: list[str], holder: int) -> None:
    for rank, part in enumerate(parts(saved(["", "", ""], bad), ranks)):
        assert not part.begins
        assert part.describe() == "the batches before the checkpoint"
        assert (part.count, part.micro_batches) == ((12, 4) if rank == holder else (0, 0))
        assert list(part.resumed) == (["weight"] if rank == holder else [])


@pytest.mark.parametrize(("then", "factor"), [(0.5, 1.0), (0.25, 2.0), (None, 1.0)])
def test_the_sum_is_weighted_as_micro_batches_are_now(then: float | None, factor: float) -> None:
    held = parts(saved(["", ""], ["", ""], then), 2, weight=0.5)[0]
    assert torch.equal(held.resumed["weight"], GRAD * factor)


# Ranks now, and what each then says of ["a", "", "c"].
SPEAKERS = [(3, [["a"], [], ["c"]]), (2, [["a", "c"], []]), (4, [["a", "c"], [], [], []])]


@pytest.mark.parametrize(("ranks", "expected"), SPEAKERS)
def test_ranks_stand_by_what_they_said_or_rank_zero_does_for_all(ranks: int, expected: list[list[str]]) -> None:
    said = ["a", "", "c"]
    assert [saved([""] * 3, said).bad_of(rank, ranks) for rank in range(ranks)] == expected
    vetoes = [part.veto for part in parts(saved(said, [""] * 3), ranks)]
    assert vetoes == [words[-1] if words else "" for words in expected]


def test_a_checkpoints_dictionary_makes_it_again() -> None:
    total = saved(["", "veto"], ["NaN", ""])
    assert WindowSum(**total.as_dict()) == total
    earlier = {name: value for name, value in total.as_dict().items() if name != "weight"}  # of an earlier version
    assert WindowSum(**earlier).weight is None
