"""Weights of losses and of sums: together they make the average over all samples."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lightning_dp.reduction.ballot import Tally
from lightning_dp.reduction.weighting import Weighting

RANKS = 3
Counts = Sequence[Sequence[int]]  # by micro-batch, then by rank

CASES: dict[str, Counts] = {
    "one micro-batch": [[4, 3, 2]],
    "several": [[4, 3, 2], [1, 7, 5]],
    "a rank without data": [[4, 0, 2], [1, 0, 5]],
    "large": [[2**40, 1, 1]],
}
REFERENCES = [None, (9, 3), (700, 3), (1, 6)]


def tally_of(counts: Counts) -> Tally:
    flat = [count for by_rank in counts for count in by_rank]
    return Tally(sum(flat), len(flat), flags=(0,) * RANKS, users=())


def weighting_of(reference: tuple[int, int] | None, wide: bool = False, averages: bool = False) -> Weighting:
    weighting = Weighting(RANKS, averages)
    weighting.wide = wide
    if reference is not None:
        weighting.refer_to(*reference)
    return weighting


def reduced(weighting: Weighting, counts: Counts, divided_by: int | None, averages: bool) -> float:
    """What arrives of gradients that are 10 times the micro-batch plus the rank; a hook averages over ranks."""
    divisor = 1 if divided_by is None else divided_by
    total = sum(
        weighting.of_loss(count) * (10 * j + rank) / divisor
        for j, by_rank in enumerate(counts)
        for rank, count in enumerate(by_rank)
    )
    return total / (RANKS if averages else 1) * weighting.of_sums(tally_of(counts), divided_by)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_what_arrives_is_the_mean_over_all_samples(
    counts: Counts, reference: tuple[int, int] | None, wide: bool, averages: bool
) -> None:
    samples = sum(count for by_rank in counts for count in by_rank)
    mean = sum(c * (10 * j + r) for j, by_rank in enumerate(counts) for r, c in enumerate(by_rank)) / samples
    weighting = weighting_of(reference, wide, averages)
    for divided_by in (1, 4):
        assert reduced(weighting, counts, divided_by, averages) == pytest.approx(mean, rel=1e-14)
    # As on one device, that adds up its micro-batches.
    assert reduced(weighting, counts, None, averages) == pytest.approx(mean * len(counts), rel=1e-14)
    unweighted = sum(10 * j + r for j, by_rank in enumerate(counts) for r in range(RANKS)) / (RANKS * len(counts))
    assert unweighted != pytest.approx(mean, rel=1e-3), "negative control"


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_equal_counts_cost_no_scaling_of_the_sums(micro_batches: int) -> None:
    draws = random.Random(micro_batches)
    for _ in range(100):
        count = draws.randint(1, 2**40)
        weighting = weighting_of((count * RANKS, RANKS))
        window = tally_of([[count] * RANKS] * micro_batches)
        assert weighting.of_sums(window, micro_batches) == 1.0
        other = tally_of([[count, count, count + 1]] * micro_batches)
        if count < 2**20:
            assert weighting.of_sums(other, micro_batches) != 1.0, "negative control"


def test_narrow_gradients_are_scaled_by_powers_of_two() -> None:
    weights = [weighting_of(reference, wide=True).of_loss(1) for reference in REFERENCES]
    assert all((1 / weight).is_integer() and int(1 / weight).bit_count() == 1 for weight in weights)
    plain = [weighting_of(reference).of_loss(1) for reference in REFERENCES]
    assert not all((1 / weight).is_integer() for weight in plain), "negative control"


def test_a_window_without_data_changes_nothing() -> None:
    weighting = weighting_of((9, 3))
    assert weighting.of_sums(tally_of([[0, 0, 0]]), 1) == 1.0
    weighting.refer_to(0, 3)
    assert weighting.reference == (9, 3)
