"""What a run did, in a few figures."""

import dataclasses

import pytest

from lightning_dp.insight.run_report import RunFigures

PLAIN = {"steps": 10, "skipped_steps": 2, "count": 320, "buckets": 3}


def report(reductions: list[tuple], world_size: int = 4, gradient_bytes: int = 1000, window: int = 1000):
    figures = RunFigures(window)
    for nbytes, messages, exposed, backward in reductions:
        figures.add(nbytes, messages, exposed, backward)
    return figures.report(world_size=world_size, gradient_bytes=gradient_bytes, **PLAIN)


def test_what_is_known_is_passed_on():
    values = dataclasses.asdict(report([(800, 4, 0.5, 2.0)]))
    assert {name: values[name] for name in PLAIN} == PLAIN
    assert values["world_size"] == 4


@pytest.mark.parametrize(
    ("reductions", "nbytes", "messages", "exposed", "backward"),
    [
        pytest.param([], 0, 0, 0, 0, id="before the first step"),
        pytest.param([(800, 4, 0.5, 2.0)], 800, 4, 0.5, 2.0, id="one step"),
        # The first steps of a run are slow: a mean would remember them for ever.
        pytest.param([(800, 4, 90.0, 70.0), (800, 4, 0.5, 2.0), (800, 4, 0.25, 3.0)], 800, 4, 0.5, 3.0, id="median"),
        pytest.param([(100, 2, 1.0, 1.0), (300, 4, 2.0, 5.0)], 200, 3, 1.5, 3.0, id="an even number of steps"),
        pytest.param([(1, 1, 9, 1), (2, 2, 1, 9), (3, 9, 2, 2)], 2, 2, 2, 2, id="each figure has its own median"),
    ],
)
def test_figures_are_medians(reductions, nbytes, messages, exposed, backward):
    got = report(reductions)
    assert got.bytes_per_step == 2 * 3 / 4 * nbytes  # 2 (n - 1) / n with n = 4
    assert got.messages_per_step == messages
    assert got.exposed_seconds == exposed
    assert got.backward_seconds == backward


@pytest.mark.parametrize(("world_size", "sent_of_1000"), [(1, 0), (2, 1000), (4, 1500), (5, 1600)])
def test_bytes_are_those_that_a_ring_sends(world_size, sent_of_1000):
    got = report([(500, 4, 0.5, 2.0)], world_size)
    assert got.formula_bytes_per_step == sent_of_1000
    assert got.bytes_per_step == sent_of_1000 / 2  # measured, not the formula


def test_only_recent_steps_count():
    slow, fast = (800, 4, 9.0, 9.0), (400, 2, 1.0, 2.0)
    got = report([slow] * 50 + [fast] * 3, window=3)
    assert (got.exposed_seconds, got.backward_seconds, got.messages_per_step) == (1.0, 2.0, 2)
