"""The order in which gradients become ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.reduction.arrivals import Arrivals


def recorded(num_parameters: int, fired: list[int]) -> Arrivals:
    arrivals = Arrivals(num_parameters)
    for index in fired:
        arrivals.record(index)
    return arrivals


@pytest.mark.parametrize(
    ("fired", "previous", "order", "fires"),
    [
        pytest.param([2, 0, 1], [0, 1, 2], [2, 0, 1], [1, 1, 1], id="all fired once"),
        pytest.param([], [2, 0, 1], [2, 0, 1], [0, 0, 0], id="nothing fired: as it was"),
        pytest.param([1], [2, 1, 0], [1, 2, 0], [0, 1, 0], id="the silent follow, as they stood"),
        pytest.param([0, 2, 0, 1], [0, 1, 2], [0, 2, 1], [2, 1, 1], id="fired twice: stands where it fired first"),
        pytest.param([1, 1, 1], [0, 1, 2], [1, 0, 2], [0, 3, 0], id="only one, three times"),
        pytest.param([], [], [], [], id="no parameter"),
    ],
)
def test_order_and_fires(fired, previous, order, fires):
    arrivals = recorded(len(previous), fired)
    assert arrivals.order(previous) == order
    assert arrivals.fires == fires


@given(st.data(), st.integers(1, 12))
def test_an_order_names_every_parameter_once(data, num_parameters):
    fired = data.draw(st.lists(st.integers(0, num_parameters - 1), max_size=30))
    previous = data.draw(st.permutations(range(num_parameters)))
    arrivals = recorded(num_parameters, fired)
    order = arrivals.order(previous)

    def rank_of(index: int) -> tuple[int, int]:
        return (0, fired.index(index)) if index in fired else (1, previous.index(index))

    assert order == sorted(range(num_parameters), key=rank_of)
    assert arrivals.fires == [fired.count(index) for index in range(num_parameters)]


def test_the_previous_order_is_left_alone():
    previous = [2, 1, 0]
    arrivals = recorded(3, [1])
    arrivals.order(previous).append(99)
    assert previous == [2, 1, 0]
    assert arrivals.order(previous) == [1, 2, 0]
