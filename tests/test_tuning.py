"""``bucket_cap_mb="auto"``: one plan by measurement, the same on all ranks, and the same gradients."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from test_reducer import (
    SMALL_BUCKETS,
    mean_loss,
    mlp,
    ragged_counts,
    relative_error,
    rows,
    single_device,
    train_ranks,
)
from torch import Tensor, nn

from lightning_dp.reduction import GradientReducer, ReducerConfig, tuning
from lightning_dp.reduction.buckets import plan_buckets, plan_segments
from lightning_dp.reduction.planner import Link
from lightning_dp.reduction.tuning import PlanTuner, measure_link
from lightning_dp.reduction.wire import Wire

MIB = 2**20
AUTO = ReducerConfig(bucket_cap_mb="auto")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2])
def test_weights_equal_one_device(pool: RankPool, world_size: int, k: int) -> None:
    counts = ragged_counts(12, world_size, k)
    results = pool.run(world_size, train_ranks, counts, "adamw", AUTO, timeout=120)
    assert relative_error(results[0][0], single_device(counts, "adamw")) < 1e-12
    for digests in zip(*(digests for _, digests in results), strict=True):
        assert all(digest == digests[0] for digest in digests)


# A link on which every message costs a millisecond and every byte a microsecond: small plans differ much.
LINK = Link(0.0, ((1.0, 1e-3), (1e6, 1.0)))


class SlowGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        time.sleep(0.03)
        return grad


class SlowLayers(nn.Module):
    """Layers whose gradients come 30 ms apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(SlowGrad.apply(x))
        return x


def tuned(rank: int, link: Link, config: ReducerConfig, idle: tuple[int, ...] = ()) -> tuple:
    torch.manual_seed(0)
    model = SlowLayers()
    reducer = GradientReducer(model.named_parameters(), config=config)
    plans, messages = [], []
    with mock.patch.object(tuning, "measure_link", lambda wire, device: link):
        for _ in range(8):
            model.zero_grad()
            nothing = torch.zeros((), requires_grad=True)
            reducer.backward(nothing if rank in idle else mean_loss(model, torch.ones(2, 8)), 0 if rank in idle else 2)
            plans.append([layout.indices for layout in reducer.plan.buckets])
            messages.append(reducer.last.messages)
    return plans, messages, reducer.forecast


def test_the_plan_is_made_once_and_is_the_same_on_all_ranks(pool: RankPool) -> None:
    results = pool.run(2, tuned, LINK, AUTO)
    plans, messages, forecast = results[0]
    assert results[1][0] == plans
    assert results[1][2] == forecast
    # Layers come 30 ms apart and take about 1 ms each: each its own message, the last alone at the tail.
    assert [len(plan) for plan in plans] == [1] * 4 + [len(forecast.segments)] * 4
    assert len(forecast.segments) > 1
    assert forecast.finish < forecast.capped_finish
    assert forecast.exposed == max(0.0, forecast.finish - forecast.backward_end)
    assert [len(bucket) for bucket in plans[-1]] == list(forecast.segments)
    # The messages of measuring are none of a step's, and the ballot is one.
    assert messages == [len(plan) + 1 for plan in plans]


def test_where_messages_are_dear_there_is_one(pool: RankPool) -> None:
    dear = Link(0.0, ((1.0, 10.0), (1e6, 11.0)))
    plans, _, forecast = pool.run(2, tuned, dear, AUTO)[0]
    assert forecast.segments == (8,)
    assert forecast.finish == pytest.approx(forecast.capped_finish)
    assert plans[-1] == plans[2]


def test_without_overlap_one_message_is_best(pool: RankPool) -> None:
    forecast = pool.run(2, tuned, LINK, ReducerConfig(bucket_cap_mb="auto", overlap=False))[0][2]
    assert forecast.segments == (8,)


@pytest.mark.parametrize("idle", [(0,), (1,)])
def test_a_rank_without_data_follows_the_others(pool: RankPool, idle: tuple[int, ...]) -> None:
    results = pool.run(2, tuned, LINK, AUTO, idle)
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    assert len(results[0][2].segments) > 1


def test_where_no_rank_has_data_nothing_is_planned(pool: RankPool) -> None:
    for plans, _, forecast in pool.run(2, tuned, LINK, AUTO, (0, 1)):
        assert forecast is None
        assert {len(plan) for plan in plans} == {1}


def test_caps_plan_nothing_by_measurement(pool: RankPool) -> None:
    _, _, forecast = pool.run(2, tuned, LINK, SMALL_BUCKETS)[0]
    assert forecast is None


def resumed(rank: int) -> tuple:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=AUTO)
    cheap = Link(0.0, ((1.0, 1e-9), (1e6, 1e-3)))
    states, plans = [], []
    with mock.patch.object(tuning, "measure_link", lambda wire, device: cheap):
        for step in range(6):
            model.zero_grad()
            reducer.backward(mean_loss(model, rows(step, rank, 0, 2)), count=2)
            states.append(reducer.state_dict())
            plans.append(reducer.plan)
    again = GradientReducer(mlp().named_parameters(), config=AUTO)
    again.load_state_dict(states[-1])
    capped = GradientReducer(mlp().named_parameters(), config=SMALL_BUCKETS)
    capped.load_state_dict(states[-1])
    older = {name: value for name, value in states[-1].items() if name != "segments"}
    before = GradientReducer(mlp().named_parameters(), config=AUTO)
    before.load_state_dict(older)
    return states, plans[-1] == again.plan, len(capped.plan.buckets), len(before.plan.buckets)


def test_a_resumed_run_has_the_measured_plan_at_once(pool: RankPool) -> None:
    parameters = list(mlp().parameters())
    small = len(plan_buckets(parameters, range(8)[::-1], 0.004 * MIB, 0.001 * MIB).buckets)
    for states, same, capped, before in pool.run(2, resumed):
        assert ["segments" in state for state in states] == [False] * 3 + [True] * 3
        assert same
        # Caps of this run's own hold; a checkpoint without a plan is one to measure from.
        assert capped == small
        assert before == 1


# ---------------------------------------------------------------------------------------------- the link


class SlowWire(Wire):
    """A wire on which a message takes its time, one after the other."""

    def all_reduce(self, tensor: Tensor) -> float:  # type: ignore[override]
        self.free = max(getattr(self, "free", 0.0), time.perf_counter()) + 2e-3 + tensor.numel() * 4 * 1e-8
        return self.free

    def wait(self, work: float, what: str) -> None:  # type: ignore[override]
        time.sleep(max(0.0, work - time.perf_counter()))


def test_the_link_is_measured() -> None:
    link = measure_link(SlowWire(), torch.device("cpu"))
    for nbytes in (100_000, 1_000_000, 4_000_000):
        assert link.busy(nbytes) == pytest.approx(2e-3 + nbytes * 1e-8, rel=0.5)
    assert link.latency == pytest.approx(2e-3, rel=1.0)
    seconds = [seconds for _, seconds in link.points]
    assert seconds == sorted(seconds)


def links(rank: int) -> Link:
    if rank:
        time.sleep(0.1)  # a late rank is no slow link
    return measure_link(Wire(), torch.device("cpu"))


def test_all_ranks_see_one_link(pool: RankPool) -> None:
    first, second = pool.run(2, links)
    assert first == second
    assert 0 < first.busy(16_384) < 0.1


# ---------------------------------------------------------------------------------------------- segments


def test_segments_are_cut_where_they_are_told_to() -> None:
    parameters = [torch.zeros(n) for n in (1, 2, 3, 4, 5)]
    plan = plan_segments(parameters, [4, 3, 2, 1, 0], [2, 1, 2])
    assert [layout.indices for layout in plan.buckets] == [(4, 3), (2,), (1, 0)]
    assert [layout.numel for layout in plan.buckets] == [9, 3, 3]


def test_a_segment_of_two_dtypes_is_two_buckets() -> None:
    parameters = [torch.zeros(1), torch.zeros(2, dtype=torch.float64), torch.zeros(3)]
    plan = plan_segments(parameters, [0, 1, 2], [3])
    assert [layout.indices for layout in plan.buckets] == [(0, 2), (1,)]
    assert sorted(i for layout in plan.buckets for i in layout.indices) == [0, 1, 2]


@pytest.mark.parametrize("cap", [100.0, 700.0, 1e9])
def test_a_plan_by_caps_is_told_in_segments(cap: float) -> None:
    parameters = list(mlp().parameters())
    order = list(range(len(parameters)))[::-1]
    plan = plan_buckets(parameters, order, cap, cap)
    segments = tuning._segments_of(plan, order)
    assert [tuple(order[a:b]) for a, b in pairwise([0, *accumulate(segments)])] == [b.indices for b in plan.buckets]


def test_the_slowest_rank_decides_when_a_gradient_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = mock.Mock(spec=Wire)
    theirs = ([0.1, 0.9], 0.5)
    wire.gather.side_effect = lambda mine: [mine, theirs]
    monkeypatch.setattr(tuning, "measure_link", lambda wire, device: LINK)
    tuner = PlanTuner(wire, torch.device("cpu"))
    seen = [tuner.observe({0: 0.2 + d, 1: 0.3 + d}, 0.4 + d) for d in (7.0, 0.0, 0.1, 5.0)]
    assert seen == [False, False, False, True]
    plan = plan_segments([torch.zeros(1), torch.zeros(1)], [0, 1], [1, 1])
    forecast = tuner.forecast(plan, [0, 1], [4, 4], overlap=True)
    assert forecast is not None
    # Medians 0.3 and 0.4 here, 0.1 and 0.9 there: the second is ready at 0.9, and takes a millisecond.
    assert forecast.finish == pytest.approx(0.9 + LINK.busy(4))
    assert forecast.backward_end == pytest.approx(0.5)
