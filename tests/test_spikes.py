"""The rule that finds spikes of the gradient's norm."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.health.spikes import SpikeRule

NAN, INF = float("nan"), float("inf")


def spikes(rule: SpikeRule, norms: Sequence[float]) -> list[int]:
    """Positions of those that are called spikes."""
    return [index for index, norm in enumerate(norms) if rule.judge(norm)]


@pytest.mark.parametrize(
    ("norms", "found"),
    [
        ([1, 1, 1, 5.001], [3]),
        ([1, 1, 1, 5.0], []),  # not more than 5 times
        ([1, 2, 100, 9.9], []),  # the median is 2, whatever the largest is
        ([1, 2, 100, 10.1], [3]),
        ([1, 2, 4, 8, 15.1], [4]),  # of an even number: (2 + 4) / 2
        ([1, 2, 4, 8, 14.9], []),
        ([1000, 1, 1, 1], []),  # while norms are few, none is a spike
        ([1, 1, 1000, 5.001], [3]),
        ([1, 1, 1, 0], []),
    ],
)
def test_a_spike_is_more_than_so_many_medians(norms: list[float], found: list[int]) -> None:
    assert spikes(SpikeRule(5.0, warmup=3), norms) == found


def test_as_many_norms_as_the_warm_up_must_be_known() -> None:
    """20 by default: the 21st norm is the first that can be a spike."""
    assert spikes(SpikeRule(2.0), [1.0] * 19 + [100.0]) == []
    assert spikes(SpikeRule(2.0), [1.0] * 20 + [100.0]) == [20]


def test_spikes_are_not_counted_in_the_median() -> None:
    norms = [1.0] * 5 + [9.0] * 50 + [1.0, 9.0]
    assert spikes(SpikeRule(5.0, warmup=3), norms) == [*range(5, 55), 56]
    # Negative control: norms that are let pass are counted, and what comes after them is judged by them.
    assert spikes(SpikeRule(5.0, warmup=3), [1.0] * 5 + [4.0] * 50 + [9.0]) == []


def test_the_median_is_over_the_latest_norms() -> None:
    norms = [1.0] * 10 + [4.0] * 5 + [19.0, 21.0]
    assert spikes(SpikeRule(5.0, window=5, warmup=3), norms) == [16], "the window holds 4s only"
    assert spikes(SpikeRule(5.0, window=100, warmup=3), norms) == [15, 16], "and this one mostly 1s"


def test_a_median_of_zero_calls_nothing_a_spike() -> None:
    """A hinge loss that is mostly satisfied has gradients of 0, and now and then another one."""
    assert spikes(SpikeRule(5.0, window=10, warmup=3), [0.0] * 10 + [1.0, 0.0, 1000.0] * 2) == []
    learned = [0.0] * 10 + [1.0] * 6 + [6.0]
    assert spikes(SpikeRule(5.0, window=10, warmup=3), learned) == [16], "most of the latest ten are 1"


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_is_neither_a_spike_nor_counted(value: float) -> None:
    """Gradients that are not finite have a verdict of their own. Sorting a NaN would spoil the median."""
    assert spikes(SpikeRule(5.0, window=10, warmup=3), [value, value, 1, 1, 100]) == [], "two norms are known"
    assert spikes(SpikeRule(5.0, window=10, warmup=3), [1.0] * 10 + [value] * 60 + [1e9, 4.9]) == [70]


def test_the_message_says_what_was_compared_with_what() -> None:
    rule = SpikeRule(5.0, warmup=3)
    spikes(rule, [2.0, 4.0, 3.0])
    line = rule.judge(123.456)
    assert "norm 123.5 is more than 5 times the median 3 of the last 3 steps" in line
    assert "spike_factor" in line
    assert "\n" not in line


@pytest.mark.parametrize("known", [0, 2, 7, 30])
def test_a_rule_goes_on_from_its_state(known: int) -> None:
    before, after = [1.0 + 0.1 * (i % 7) for i in range(known)], [1.0, 7.0, 40.0, 2.0, NAN, 9.0] * 5
    whole, first, second = (SpikeRule(5.0, window=10, warmup=5) for _ in range(3))
    spikes(whole, before)
    spikes(first, before)
    second.judge(1e6)  # what a rule knew before is forgotten
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))  # plain values
    assert spikes(second, after) == spikes(whole, after) != []
    if known >= 5:
        assert spikes(SpikeRule(5.0, window=10, warmup=5), after) != spikes(first, after), "negative control"


def by_definition(norms: Sequence[float], factor: float, window: int, warmup: int) -> list[int]:
    """All from the norms themselves, with nothing kept from one to the next but which ones were let pass."""
    passed: list[int] = []
    found = []
    for index, norm in enumerate(norms):
        latest = sorted(norms[i] for i in passed[-window:])
        half = len(latest) // 2
        median = (latest[half] if len(latest) % 2 else (latest[half - 1] + latest[half]) / 2) if latest else 0.0
        if len(latest) >= warmup and median > 0 and norm > factor * median:
            found.append(index)
        else:
            passed.append(index)
    return found


@given(
    norms=st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 2.0, 10.0]), max_size=40),
    factor=st.sampled_from([1.5, 2.0, 10.0]),
    window=st.integers(1, 12),
    warmup=st.integers(1, 12),
)
def test_any_row_of_norms_is_judged_by_the_definition(
    norms: list[float], factor: float, window: int, warmup: int
) -> None:
    assert spikes(SpikeRule(factor, window, warmup), norms) == by_definition(norms, factor, window, warmup)


@given(norms=st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=30), exponent=st.integers(-30, 30))
def test_the_scale_of_the_loss_does_not_matter(norms: list[float], exponent: int) -> None:
    scaled = [norm * 2.0**exponent for norm in norms]  # a power of 2, so that nothing is rounded
    assert spikes(SpikeRule(3.0, 10, 4), scaled) == spikes(SpikeRule(3.0, 10, 4), norms)
