"""The planner against a search of every contiguous plan, and against a link simulated event by event."""

import itertools
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp.reduction import planner
from lightning_dp.reduction.planner import (
    STRETCHES,
    Link,
    best_segments,
    filled_segments,
    predict_finish,
    sturdy_segments,
)

FAST = Link(0.001, ((1000.0, 0.01), (10_000.0, 0.05), (100_000.0, 0.4)))


def all_cuts(n):
    for inner in itertools.product([False, True], repeat=n - 1):
        ends = [0, *(k + 1 for k, cut in enumerate(inner) if cut), n]
        yield tuple(b - a for a, b in pairwise(ends))


def simulated(segments, ready, nbytes, link):
    """A queue: a message joins when its last gradient is there, the link takes one at a time, in order.

    Ranks compute until the last gradient is there; until then and from then on a message advances at two speeds.
    """
    joined, now, clock = [], 0.0, 0.0
    for a, b in pairwise([0, *accumulate(segments)]):
        now = max([now, *ready[a:b]])
        joined.append((now, sum(nbytes[a:b])))
    for when, size in joined:
        if clock < when:
            clock = when
        beside = min(1.0, max(0.0, max(ready) - clock) / link.busy(size))  # of the message
        clock += beside * link.busy(size) + (1 - beside) * link.busy(size, waiting=True)
    return clock + link.latency


gradients = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50_000)), min_size=1, max_size=9)
links = st.builds(
    lambda latency, overhead, beta, knee, waiting: Link(
        latency,
        ((1.0, overhead), (1e3, overhead + knee), (1e5, 1e5 * beta + 1)),
        ((1e3, waiting * overhead), (1e5, waiting * (1e5 * beta + 1))) if waiting else (),
    ),
    st.floats(0, 0.01),
    st.floats(1e-4, 0.1),
    st.floats(1e-7, 1e-4),
    st.floats(0, 0.1),
    st.sampled_from([None, 0.2, 0.9, 1.0, 1.3]),
)


@given(gradients, links)
@settings(max_examples=80, deadline=None)
def test_no_contiguous_plan_finishes_earlier(rows, link):
    ready, nbytes = [r for r, _ in rows], [float(b) for _, b in rows]
    mine = best_segments(ready, nbytes, link)
    assert sum(mine) == len(rows)
    every = {cut: predict_finish(cut, ready, nbytes, link) for cut in all_cuts(len(rows))}
    best = min(every.values())
    assert every[mine] <= best + planner.TOLERANCE * best
    # And none with fewer messages is as good.
    assert all(len(cut) >= len(mine) for cut, finish in every.items() if finish <= best)


@given(gradients, links, st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_the_predicted_finish_is_that_of_a_queue(rows, link, random):
    ready, nbytes = [r for r, _ in rows], [float(b) for _, b in rows]
    cut = random.choice(list(all_cuts(len(rows))))
    assert predict_finish(cut, ready, nbytes, link) == pytest.approx(simulated(cut, ready, nbytes, link), rel=1e-12)


@given(gradients, st.floats(1.0, 4.0))
@settings(max_examples=50, deadline=None)
def test_a_slower_link_never_finishes_earlier(rows, factor):
    ready, nbytes = [r for r, _ in rows], [float(b) for _, b in rows]
    slow = Link(FAST.latency, tuple((size, seconds * factor) for size, seconds in FAST.points))
    finishes = [predict_finish(best_segments(ready, nbytes, link), ready, nbytes, link) for link in (FAST, slow)]
    assert finishes[0] <= finishes[1] * (1 + planner.TOLERANCE)


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(10, 0.01), (1000, 0.01), (5500, 0.03), (10_000, 0.05), (55_000, 0.225), (100_000, 0.4), (200_000, 0.8)],
)
def test_the_cost_of_a_message(nbytes, seconds):
    assert FAST.busy(nbytes) == pytest.approx(seconds, rel=1e-12)


def test_what_it_costs_while_ranks_wait():
    link = Link(0.0, FAST.points, ((1000.0, 0.001), (10_000.0, 0.002)))
    assert link.busy(5500) == pytest.approx(0.03)
    assert link.busy(5500, waiting=True) == pytest.approx(0.0015)
    assert FAST.busy(5500, waiting=True) == FAST.busy(5500)


@pytest.mark.parametrize(
    ("start", "free"),
    [
        pytest.param(0.0, 0.4, id="beside compute"),
        pytest.param(0.6, 1.0, id="to the end of it"),
        pytest.param(0.9, 1.0 + 0.75 * 0.1, id="a quarter beside it"),
        pytest.param(1.0, 1.1, id="after it"),
        pytest.param(2.0, 2.1, id="long after it"),
    ],
)
def test_a_message_is_faster_from_when_ranks_only_wait(start, free):
    assert Link(0.0, ((1e5, 0.4),), ((1e5, 0.1),)).free_after(start, 1e5, compute_end=1.0) == pytest.approx(free)


@pytest.mark.parametrize(
    ("ready", "nbytes", "link", "expected"),
    [
        pytest.param([], [], FAST, (), id="no gradients"),
        pytest.param([0.0] * 4, [100.0] * 4, FAST, (4,), id="all there at once: one message"),
        pytest.param([0.0, 1.0], [1e5, 10.0], FAST, (1, 1), id="a small tail, sent while nothing else is"),
        pytest.param(
            [0.1, 0.2, 0.3, 0.4],
            [1e6] * 4,
            Link(0.0, ((1.0, 1e-9), (1e6, 1.0))),
            (1, 3),
            id="a slow link starts at once, and then has all the rest",
        ),
        pytest.param(
            [0.1, 0.2, 0.3, 0.4], [1e4] * 4, Link(0.0, ((1.0, 5.0), (1e6, 5.1))), (4,), id="where they cost all, one"
        ),
    ],
)
def test_known_plans(ready, nbytes, link, expected):
    assert best_segments(ready, nbytes, link) == expected


def test_many_gradients_are_merged_and_the_plan_is_close_to_the_ideal(monkeypatch):
    ready = [0.001 * k for k in range(300)]
    nbytes = [float(1 + 977 * k % 5000) for k in range(300)]
    link = Link(0.001, ((1000.0, 0.002), (1e6, 0.4)))
    merged = best_segments(ready, nbytes, link)
    monkeypatch.setattr(planner, "MAX_UNITS", 300)
    exact = best_segments(ready, nbytes, link)
    finishes = [predict_finish(plan, ready, nbytes, link) for plan in (merged, exact)]
    assert sum(merged) == 300
    assert finishes[1] * (1 - planner.TOLERANCE) <= finishes[0] <= finishes[1] * 1.03


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=1000))
def test_no_more_units_than_the_search_bears(sizes):
    units = planner._merged(sizes)
    assert sum(units) == len(sizes)
    assert min(units) >= 1
    assert len(units) <= planner.MAX_UNITS + 1


# ---------------------------------------------------------------------------------------------- sturdy plans


def losses(cut, ready, nbytes, link):
    """By how much a plan finishes later than the best one, for a backward that is slower or faster than measured."""
    found = []
    for stretch in STRETCHES:
        stretched = [stretch * when for when in ready]
        best = min(predict_finish(other, stretched, nbytes, link) for other in all_cuts(len(ready)))
        found.append(predict_finish(cut, stretched, nbytes, link) / best - 1)
    return found


@given(gradients, links)
@settings(max_examples=30, deadline=None)
def test_a_sturdy_plan_loses_least_of_the_best_ones(rows, link):
    ready, nbytes = [r for r, _ in rows], [float(b) for _, b in rows]
    mine = sum(losses(sturdy_segments(ready, nbytes, link), ready, nbytes, link))
    for stretch in STRETCHES:
        other = best_segments([stretch * when for when in ready], nbytes, link)
        assert mine <= sum(losses(other, ready, nbytes, link)) + 1e-9 + len(STRETCHES) * planner.TOLERANCE


def test_a_sturdy_plan_does_not_need_exact_measurements():
    # A link that takes twice as long as backward: the best plan's messages grow, each to be there just in time.
    ready, nbytes = [0.01 * k for k in range(1, 33)], [1e6] * 32
    link = Link(0.0, ((1e5, 0.004), (1e6, 0.02), (4e6, 0.08)))
    exact, sturdy = best_segments(ready, nbytes, link), sturdy_segments(ready, nbytes, link)

    def worst(cut):
        finishes = []
        for stretch in STRETCHES:
            stretched = [stretch * when for when in ready]
            best = predict_finish(best_segments(stretched, nbytes, link), stretched, nbytes, link)
            finishes.append(predict_finish(cut, stretched, nbytes, link) / best)
        return max(finishes)

    assert worst(exact) > 1.1
    assert worst(sturdy) < 1.02
    assert predict_finish(sturdy, ready, nbytes, link) <= 1.01 * predict_finish(exact, ready, nbytes, link)


def test_without_gradients_there_is_no_plan():
    assert sturdy_segments([], [], FAST) == ()


@pytest.mark.parametrize(
    ("nbytes", "size", "segments"),
    [
        pytest.param([1, 2, 3, 4], 3, (2, 1, 1), id="the one that fills it ends it"),
        pytest.param([2, 2, 2], 3, (2, 1), id="and may go beyond"),
        pytest.param([9, 0, 1], 3, (1, 2), id="a large one by itself"),
        pytest.param([1, 1], 100, (2,), id="all in one"),
        pytest.param([0, 0, 0], 0, (1, 1, 1), id="nothing to fill"),
        pytest.param([], 3, (), id="no gradient"),
    ],
)
def test_messages_end_with_what_fills_them(nbytes, size, segments):
    assert filled_segments(nbytes, size) == segments


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_only_the_last_message_is_smaller_than_it_should_be(nbytes, size):
    segments = filled_segments(nbytes, size)
    messages = [nbytes[a:b] for a, b in pairwise([0, *accumulate(segments)])]
    assert [gradient for message in messages for gradient in message] == nbytes
    assert all(sum(message) >= size for message in messages[:-1])
    assert all(sum(message[:-1]) < size for message in messages)
