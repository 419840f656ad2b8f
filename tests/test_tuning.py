"""``bucket_cap_mb="auto"``: one plan by measurement, the same on all ranks, and the same gradients."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
from test_transport_threads import policies
from torch import Tensor, nn

from lightning_dp.reduction import GradientReducer, ReducerConfig, tuning
from lightning_dp.reduction import reducer as reducers
from lightning_dp.reduction.buckets import plan_buckets, plan_segments
from lightning_dp.reduction.planner import Link
from lightning_dp.reduction.transport_threads import TransportThreads
from lightning_dp.reduction.trial import Trial
from lightning_dp.reduction.tuning import Candidate, Forecast, PlanTuner, measure_link, segments_of
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


# A link on which every message costs a millisecond, and a layer's 288 bytes 29 ms: plans differ much.
LINK = Link(0.0, ((1.0, 1e-3), (1e6, 100.0)))
# One on which every message costs a lot, whatever its size.
DEAR = Link(0.0, ((1.0, 0.1), (1e6, 0.2)))
# One on which nothing is worth a second message.
ONE_MESSAGE = Link(0.0, ((1.0, 10.0), (1e6, 11.0)))


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


class SimulatedWire(Wire):
    """A wire on which messages of a plan take as long as on a link, one after the other."""

    link = LINK
    factor = 1
    free = 0.0

    def shares_cores(self, device: torch.device) -> bool:
        return False  # so only plans are tried

    def all_reduce(self, tensor: Tensor) -> tuple:  # type: ignore[override]
        work = super().all_reduce(tensor)
        now = time.perf_counter()
        if tensor.is_floating_point():  # the ballot rides along for nothing
            self.free = max(self.free, now) + self.factor * self.link.busy(tensor.numel() * 4)
        return work, self.free

    def wait(self, work: tuple, what: str) -> None:  # type: ignore[override]
        super().wait(work[0], what)
        time.sleep(max(0.0, work[1] - time.perf_counter()))


STEPS = 15  # four are watched, two plans are tried four times, and then there are three


def tuned(
    rank: int,
    measured: Link,
    config: ReducerConfig,
    idle: tuple[int, ...] = (),
    real: Link = LINK,
    wire: type[SimulatedWire] = SimulatedWire,
) -> tuple:
    torch.manual_seed(0)
    model = SlowLayers()
    wire = type("ThisWire", (wire,), {"link": real})
    plans, messages = [], []
    with (
        mock.patch.object(tuning, "measure_link", lambda wire, device, beside_compute=None: measured),
        mock.patch.object(reducers, "Wire", wire),
    ):
        reducer = GradientReducer(model.named_parameters(), config=config)
        for _ in range(STEPS):
            model.zero_grad()
            nothing = torch.zeros((), requires_grad=True)
            reducer.backward(nothing if rank in idle else mean_loss(model, torch.ones(2, 8)), 0 if rank in idle else 2)
            plans.append([layout.indices for layout in reducer.plan.buckets])
            messages.append(reducer.last.messages)
    return plans, messages, reducer.forecast, reducer.state_dict()


def test_the_plan_is_made_once_and_is_the_same_on_all_ranks(pool: RankPool) -> None:
    results = pool.run(2, tuned, LINK, AUTO)
    plans, messages, forecast, state = results[0]
    assert results[1][0] == plans
    assert results[1][2] == forecast
    # Layers come 30 ms apart and take about as long: each its own message, the last alone at the tail.
    planned, capped = forecast.candidates
    many = len(planned.segments)
    assert many > 1
    assert [len(plan) for plan in plans] == [1] * 4 + [many, 1, 1, many] * 2 + [many] * 3
    assert forecast.best is planned
    assert planned.predicted < capped.predicted
    assert forecast.exposed == max(0.0, planned.predicted - forecast.backward_end)
    assert [len(bucket) for bucket in plans[-1]] == list(planned.segments) == state["segments"]
    # The messages of measuring are none of a step's, and the ballot is one.
    assert messages == [len(plan) + 1 for plan in plans]
    # What was predicted came.
    assert planned.measured == pytest.approx(planned.predicted, rel=0.2)
    assert capped.measured == pytest.approx(capped.predicted, rel=0.2)
    assert forecast.describe().startswith(f"bucket plan 'planned' stays, with {many} buckets; ")


def test_a_plan_that_is_worse_than_it_was_predicted_to_be_is_given_up(pool: RankPool) -> None:
    for plans, _, forecast, state in pool.run(2, tuned, LINK, AUTO, (), DEAR):
        planned, capped = forecast.candidates
        assert planned.predicted < capped.predicted
        assert planned.measured > 1.2 * capped.measured
        assert forecast.best is capped
        assert len(plans[4]) > 1
        assert [len(plan) for plan in plans[-3:]] == [1] * 3
        assert state["segments"] == [8]


class WireThatIsSlowInBatches(SimulatedWire):
    """One that shares cores, and takes four times as long if its threads do not interrupt."""

    slow = True

    def shares_cores(self, device: torch.device) -> bool:
        return True

    def beside_compute(self, device: torch.device, in_batches: bool = True) -> AbstractContextManager[None]:
        self.factor = 4 if in_batches == self.slow else 1
        return super().beside_compute(device, in_batches)


class WireThatIsSlowWithInterruptions(WireThatIsSlowInBatches):
    """The other way round."""

    slow = False


@pytest.mark.parametrize("wire", [WireThatIsSlowInBatches, WireThatIsSlowWithInterruptions])
def test_whether_threads_interrupt_is_tried_as_well(pool: RankPool, wire: type[WireThatIsSlowInBatches]) -> None:
    # One plan for all caps: four steps are watched, then it is tried four times with and without, and then it stays.
    results = pool.run(2, tuned, ONE_MESSAGE, AUTO, (), LINK, wire)
    for _, _, forecast, state in results:
        assert [(c.name, c.in_batches) for c in forecast.candidates] == [("planned", True), ("planned", False)]
        assert forecast.best.in_batches is (not wire.slow)
        assert forecast.best.measured < min(c.measured for c in forecast.candidates if c is not forecast.best)
        assert state["in_batches"] is (not wire.slow)
        assert ("'planned, in batches' stays" in forecast.describe()) is (not wire.slow)


def policies_by_step(rank: int) -> tuple[list[set[int]], bool]:
    model, threads, seen = SlowLayers(), TransportThreads(), []

    def step(reducer: GradientReducer) -> None:
        model.zero_grad()
        with reducer.backward_pass(count=2) as weight:
            (mean_loss(model, torch.ones(2, 8)) * weight).backward()
            seen.append(set(policies(threads)))

    with mock.patch.object(tuning, "measure_link", lambda wire, device, beside_compute=None: ONE_MESSAGE):
        reducer = GradientReducer(model.named_parameters(), config=AUTO)
        for _ in range(STEPS):
            step(reducer)
    state = reducer.state_dict()
    reducer.detach()
    resumed = GradientReducer(model.named_parameters(), config=AUTO)
    resumed.load_state_dict(state | {"in_batches": False})
    step(resumed)
    return seen, state["in_batches"]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has such policies")
def test_the_transports_threads_follow_the_trial_and_its_outcome(pool: RankPool) -> None:
    batch, other = {os.SCHED_BATCH}, {os.SCHED_OTHER}
    for seen, in_batches in pool.run(2, policies_by_step):
        stays = batch if in_batches else other
        assert seen == [batch] * 4 + [batch, other, other, batch] * 2 + [stays] * 3 + [other]


def test_on_a_link_where_messages_are_dear_there_is_one(pool: RankPool) -> None:
    plans, _, forecast, _ = pool.run(2, tuned, ONE_MESSAGE, AUTO)[0]
    assert [candidate.segments for candidate in forecast.candidates] == [(8,)]
    assert plans[-1] == plans[2]


def test_without_overlap_one_message_is_best(pool: RankPool) -> None:
    for config in (replace(AUTO, overlap=False), replace(AUTO, drop_nonfinite=True)):
        forecast = pool.run(2, tuned, LINK, config)[0][2]
        assert forecast.candidates[0].segments == (8,)


def under_deterministic_algorithms(rank: int) -> tuple:
    torch.use_deterministic_algorithms(True)
    try:
        return tuned(rank, LINK, AUTO)
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_overlap_it_makes_no_difference_whether_threads_interrupt(pool: RankPool) -> None:
    for config in (replace(AUTO, overlap=False), replace(AUTO, drop_nonfinite=True)):
        results = pool.run(2, tuned, LINK, config, (), LINK, WireThatIsSlowInBatches)
        assert {candidate.in_batches for *_, forecast, _ in results for candidate in forecast.candidates} == {None}
        assert all(state["in_batches"] for *_, state in results)


def test_where_runs_are_to_be_repeated_to_the_last_bit_nothing_is_measured(pool: RankPool) -> None:
    for plans, _, forecast, state in pool.run(2, under_deterministic_algorithms):
        assert forecast is None
        assert {len(plan) for plan in plans} == {1}
        assert "segments" not in state


@pytest.mark.parametrize("idle", [(0,), (1,)])
def test_a_rank_without_data_follows_the_others(pool: RankPool, idle: tuple[int, ...]) -> None:
    results = pool.run(2, tuned, LINK, AUTO, idle)
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    assert len(results[0][2].candidates[0].segments) > 1


def test_where_no_rank_has_data_nothing_is_planned(pool: RankPool) -> None:
    for plans, _, forecast, _ in pool.run(2, tuned, LINK, AUTO, (0, 1)):
        assert forecast is None
        assert {len(plan) for plan in plans} == {1}


def test_caps_plan_nothing_by_measurement(pool: RankPool) -> None:
    _, _, forecast, state = pool.run(2, tuned, LINK, SMALL_BUCKETS)[0]
    assert forecast is None
    assert "segments" not in state


def resumed(rank: int) -> tuple:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=AUTO)
    cheap = Link(0.0, ((1.0, 1e-9), (1e6, 1e-3)))
    states, plans = [], []
    with (
        mock.patch.object(tuning, "measure_link", lambda wire, device, beside_compute=None: cheap),
        mock.patch.object(Wire, "shares_cores", lambda wire, device: False),
    ):
        for step in range(STEPS):
            model.zero_grad()
            reducer.backward(mean_loss(model, rows(step % 4, rank, 0, 2)), count=2)
            states.append(reducer.state_dict())
            plans.append(reducer.plan)
    again = GradientReducer(mlp().named_parameters(), config=AUTO)
    again.load_state_dict(states[-1])
    fine = states[-1] | {"segments": [1] * 8}
    planned = GradientReducer(mlp().named_parameters(), config=AUTO)
    planned.load_state_dict(fine)
    capped = GradientReducer(mlp().named_parameters(), config=SMALL_BUCKETS)
    capped.load_state_dict(fine)
    others = GradientReducer(mlp().named_parameters(), config=AUTO)
    others.load_state_dict(fine | {"world_size": 8})
    return states, plans[-1] == again.plan, *(len(r.plan.buckets) for r in (planned, capped, others))


def test_a_resumed_run_has_the_measured_plan_at_once(pool: RankPool) -> None:
    parameters = list(mlp().parameters())
    small = len(plan_buckets(parameters, range(8)[::-1], 0.004 * MIB, 0.001 * MIB).buckets)
    for states, same, planned, capped, others in pool.run(2, resumed):
        assert ["segments" in state for state in states] == [False] * 11 + [True] * 4
        assert same
        assert planned == 8
        # Caps of this run's own hold; a plan of other ranks, with other links, does not.
        assert capped == small
        assert others == 1


# ---------------------------------------------------------------------------------------------- the trial


@pytest.mark.parametrize(
    ("theirs", "typical"),
    [
        pytest.param([1, 2, 2, 1] * 2, (1.0, 2.0), id="the first on both ranks"),
        pytest.param([9, 2, 2, 9] * 2, (1.5, 2.0), id="a rank that began early decides nothing"),
        pytest.param([1, 1, 1, 1] * 2, (1.0, 1.0), id="the rank that began last decides"),
        pytest.param([1.5, 0.5, 2, 0.1, 1.5, 2, 2, 1.5], (1.5, 2.0), id="one fast step decides nothing"),
        pytest.param([1.5, 1.8, 2, 1.3, 1.5, 2, 2, 1.5], (4.3 / 3, 5.8 / 3), id="the slowest of four is left out"),
        pytest.param([0.5, 0.4, 1.2, 1] * 2, (1.0, 1.2), id="of two kinds of steps the longer decides"),
        pytest.param([None] * 8, (1.5, 2.0), id="a rank without data"),
    ],
)
def test_plans_are_tried_in_turn(theirs: list, typical: tuple) -> None:
    wire = mock.Mock(spec=Wire)
    wire.gather.side_effect = lambda mine: [mine, theirs]
    ways = ((3,), (1, 2))
    trial = Trial(wire, ways)
    turns, done = [], []
    for end in (1.5, 2.0, 2.0, 1.5) * 2:
        turns.append(trial.turn)
        done.append(trial.observe(end))
    assert turns == [(3,), (1, 2), (1, 2), (3,)] * 2
    assert done == [False] * 7 + [True]
    assert trial.typical == pytest.approx(list(typical))
    assert trial.best == min((0, 1), key=typical.__getitem__)
    assert trial.turn == ways[trial.best]


def test_a_plan_that_met_no_data_has_no_figure() -> None:
    wire = mock.Mock(spec=Wire)
    wire.gather.side_effect = lambda mine: [mine]
    trial = Trial(wire, ((3,), (1, 2)))
    for end in (None, 1.0, 1.0, None) * 2:
        trial.observe(end)
    assert trial.typical == [None, 1.0]
    assert trial.best == 1  # one that met no data cannot win


def alone() -> mock.Mock:
    """A wire with one rank on it."""
    return mock.Mock(spec=Wire, **{"gather.side_effect": lambda mine: [mine]})


def ways_met(trial: Trial[int], seconds: Callable[[int], float | None]) -> list[int]:
    """Which ways a trial asks for until it is over."""
    met = [trial.turn]
    while not trial.observe(seconds(met[-1])):
        met.append(trial.turn)
    return met


@pytest.mark.parametrize("best", range(8))
def test_the_better_half_of_the_ways_goes_on_for_twice_as_long(best: int) -> None:
    trial = Trial(alone(), range(8))
    met = Counter(ways_met(trial, lambda way: abs(way - best - 0.1)))  # the ways beside the best are the next best
    assert trial.best == trial.turn == best
    assert sorted(met.values()) == [4] * 4 + [12] * 2 + [28] * 2
    near = sorted(range(8), key=lambda way: abs(way - best - 0.1))
    assert [met[way] for way in near] == sorted(met.values(), reverse=True)


def tried_by_ranks(rank: int) -> tuple[list[int], int, list]:
    trial, noise = Trial(Wire(), range(7)), random.Random(rank)
    met = ways_met(trial, lambda way: 1.0 + 0.01 * way + noise.random())
    return met, trial.best, trial.typical


def test_ranks_that_see_different_times_go_through_the_same_heats(pool: RankPool) -> None:
    first, *others = pool.run(3, tried_by_ranks)
    assert len(first[0]) == 28 + 4 * 8 + 2 * 14
    assert all(other == first for other in others)


def test_of_equal_ways_the_first_stays() -> None:
    trial = Trial(alone(), range(5))
    ways_met(trial, lambda way: 1.0)
    assert trial.best == 0
    nothing = Trial(alone(), range(5))
    ways_met(nothing, lambda way: None)
    assert nothing.best == 0
    assert nothing.typical == [None] * 5


def chosen_under_noise(kind: type[Trial[int]], seed: int) -> int:
    noise = random.Random(seed)
    trial = kind(alone(), range(8))
    ways_met(trial, lambda way: (1.0 + 0.01 * way) * (1 + noise.expovariate(1 / 0.03)))
    return trial.best


def test_heats_find_a_better_way_under_noise_than_one_heat_of_four_rounds() -> None:
    class OneHeat(Trial[int]):
        def _end_heat(self) -> None:
            super()._end_heat()
            self._left = [min(range(8), key=lambda way: self.typical[way])]

    loss = [statistics.mean(chosen_under_noise(kind, seed) for seed in range(300)) for kind in (Trial, OneHeat)]
    assert loss[1] > 0.3, loss  # in per cent of a step, where noise is three
    assert loss[0] < loss[1] / 2, loss


def burst(noise: random.Random) -> float:
    """What else runs on the machine makes three steps in ten slower, by a tenth on average."""
    return 1 + (noise.expovariate(1 / 0.1) if noise.random() < 0.3 else 0.0)


def short_batch(noise: random.Random) -> float:
    """One step in ten has half as much to do."""
    return 0.5 if noise.random() < 0.1 else 1.0


class ByMedian(Trial[int]):
    _typical = staticmethod(statistics.median)


class ByMean(Trial[int]):
    _typical = staticmethod(statistics.mean)


class ByAllOfTheFaster(Trial[int]):
    SHORT = 0.0


@pytest.mark.parametrize(("other", "worse"), [(burst, (ByMedian, ByMean)), (short_batch, (ByMean, ByAllOfTheFaster))])
def test_steps_that_were_held_up_or_had_little_to_do_do_not_hide_the_best_way(other: Callable, worse: tuple) -> None:
    def chosen(kind: type[Trial[int]], seed: int) -> int:
        noise, trial = random.Random(seed), kind(alone(), range(8))
        ways_met(trial, lambda way: (1.0 + 0.01 * way) * other(noise) * noise.gauss(1, 0.015))
        return trial.best

    lost, *others = (statistics.mean(chosen(kind, seed) for seed in range(500)) for kind in (Trial, *worse))
    assert all(lost < 0.8 * theirs for theirs in others), (lost, others)


def chosen_by_uneven_ranks(seed: int, told: Callable[[list[float]], list[float]]) -> int:
    """Two ranks begin up to a fifth of a step apart and are through at about the same time.

    Args:
        seed: When they begin.
        told: What they make known of the seconds that each has seen.
    """
    noise = random.Random(seed)

    def gather(heat: list[float]) -> list[list[float]]:
        ranks: list[list[float]] = [[], []]
        for seconds in heat:
            began = [noise.uniform(0, 0.2) for _ in ranks]
            ends = [max(began) + seconds - mine + noise.uniform(0, 0.004) for mine in began]
            for rank, end in zip(ranks, told(ends), strict=True):
                rank.append(end)
        return ranks

    trial = Trial(mock.Mock(spec=Wire, **{"gather.side_effect": gather}), range(8))
    ways_met(trial, lambda way: 1.0 + 0.01 * way)
    return trial.best


def test_ranks_that_begin_at_different_times_do_not_hide_the_best_way() -> None:
    assert {chosen_by_uneven_ranks(seed, lambda ends: ends) for seed in range(50)} == {0}
    # If the longest time decided, how early a rank began would.
    assert {chosen_by_uneven_ranks(seed, lambda ends: [max(ends)] * 2) for seed in range(50)} != {0}


@pytest.mark.parametrize("number", range(1, 9))
def test_with_two_optimizers_in_turn_every_way_meets_both_equally_often(number: int) -> None:
    trial = Trial(alone(), range(number))
    met = Counter((way, reduction % 2) for reduction, way in enumerate(ways_met(trial, lambda way: 1.0 + way)))
    assert {way for way, _ in met} == set(range(number))
    assert all(met[way, 0] == met[way, 1] for way in range(number))


def test_the_winner_of_the_trial_is_what_is_told() -> None:
    forecast = Forecast(tuple(Candidate(name, (1,), 1.0) for name in ("planned", "4 MiB", "25 MiB")), 0.5)
    assert forecast.best.name == "planned"
    assert "'planned' stays" in forecast.describe()
    tried = forecast.with_trial([3.0, 2.0, None], 1)
    assert [candidate.measured for candidate in tried.candidates] == [3.0, 2.0, None]
    assert tried.best.name == "4 MiB"
    assert "'4 MiB' stays" in tried.describe()


# ---------------------------------------------------------------------------------------------- the link


@dataclass(frozen=True)
class Until:
    end: float

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.end


class SlowWire(Wire):
    """A wire on which a message takes its time, one after the other."""

    def all_reduce(self, tensor: Tensor) -> Until:  # type: ignore[override]
        self.free = max(getattr(self, "free", 0.0), time.perf_counter()) + self.seconds(tensor.numel() * 4)
        return Until(self.free)

    def seconds(self, nbytes: int) -> float:
        return 2e-3 + nbytes * 1e-8

    def wait(self, work: Until, what: str) -> None:  # type: ignore[override]
        time.sleep(max(0.0, work.end - time.perf_counter()))


def test_the_link_is_measured() -> None:
    link = measure_link(SlowWire(), torch.device("cpu"), "interrupting")
    for nbytes in (100_000, 1_000_000, 4_000_000):
        assert link.busy(nbytes) == pytest.approx(2e-3 + nbytes * 1e-8, rel=0.5)
    assert link.latency == pytest.approx(2e-3, rel=1.0)
    seconds = [seconds for _, seconds in link.points]
    assert seconds == sorted(seconds)


class DearWire(SlowWire):
    """One on which each message takes 40 ms, whatever its size up to a MiB."""

    def seconds(self, nbytes: int) -> float:
        return 0.04 * max(1.0, nbytes / MIB)


def test_the_price_of_a_message_is_not_taken_for_one_of_its_bytes() -> None:
    start = time.perf_counter()
    link = measure_link(DearWire(), torch.device("cpu"), "interrupting")
    assert link.busy(MIB) == pytest.approx(0.04, rel=0.2)
    assert link.busy(4 * MIB) == pytest.approx(0.16, rel=0.2)
    assert time.perf_counter() - start < 10


class NarrowWire(SlowWire):
    """One of 8 MiB a second."""

    def seconds(self, nbytes: int) -> float:
        return nbytes / (8 * MIB)


def test_what_a_slow_links_largest_messages_take_is_not_waited_for() -> None:
    start = time.perf_counter()
    link = measure_link(NarrowWire(), torch.device("cpu"), "interrupting")
    assert link.points[-1][0] < 4 * MIB
    assert link.busy(4 * MIB) == pytest.approx(0.5, rel=0.2)
    assert time.perf_counter() - start < 5


def test_a_message_that_never_ends_does_not_keep_the_cores_busy_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_BURST_SECONDS", 0.2)
    start = time.perf_counter()
    tuning._compute_during([None, Until(start + 60)])  # type: ignore[list-item]
    assert 0.2 <= time.perf_counter() - start < 10


def links(rank: int) -> Link:
    if rank:
        time.sleep(0.1)  # a late rank is no slow link
    return measure_link(Wire(), torch.device("cpu"), "interrupting")


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
    segments = segments_of(plan, order)
    assert [tuple(order[a:b]) for a, b in pairwise([0, *accumulate(segments)])] == [b.indices for b in plan.buckets]


def test_the_slowest_rank_decides_when_a_gradient_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = mock.Mock(spec=Wire)
    theirs = (([0.1, 0.9], 0.5), False)
    wire.gather.side_effect = lambda mine: [mine, theirs]
    monkeypatch.setattr(tuning, "measure_link", lambda wire, device, beside_compute=None: LINK)
    wire.shares_cores.return_value = False
    tuner = PlanTuner(wire, torch.device("cpu"))
    seen = [tuner.observe({0: 0.2 + d, 1: 0.3 + d}, 0.4 + d) for d in (7.0, 0.0, 0.1, 5.0)]
    assert seen == [False, False, False, True]
    forecast = tuner.forecast({"one": (2,), "two": (1, 1)}, [0, 1], [400, 400], overlap=True)
    assert forecast is not None
    # Medians 0.3 and 0.4 here, 0.1 and 0.9 there: the second is ready at 0.9.
    assert forecast.best.predicted == pytest.approx(0.9 + LINK.busy(400))
    assert forecast.backward_end == pytest.approx(0.5)
    # None is tried twice.
    assert [candidate.name for candidate in forecast.candidates] == ["planned", "one"]
    assert [candidate.segments for candidate in forecast.candidates] == [(1, 1), (2,)]


@pytest.mark.parametrize(
    ("overlap", "finish"),
    [
        # Both gradients leave beside compute, where 100 bytes take 0.3 s: the first is through when compute ends.
        pytest.param(True, 0.5 + 0.1, id="the last one is sent while ranks wait"),
        pytest.param(False, 0.5 + 0.1 + 0.1, id="both are"),
    ],
)
def test_after_backward_messages_cost_what_they_cost_when_ranks_wait(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, finish: float
) -> None:
    links = {None: Link(0.0, ((100.0, 0.1), (200.0, 0.25))), "interrupting": Link(9.0, ((100.0, 0.3), (200.0, 0.6)))}
    forecast = forecast_with(monkeypatch, links, overlap, has_choice=False)
    assert forecast.best.predicted == pytest.approx(finish)


def forecast_with(monkeypatch: pytest.MonkeyPatch, links: dict, overlap: bool, has_choice: bool) -> Forecast:
    """For two gradients of 100 bytes, ready after 0.2 and 0.5 s."""
    monkeypatch.setattr(tuning, "measure_link", lambda wire, device, beside_compute=None: links[beside_compute])
    wire = mock.Mock(spec=Wire, **{"gather.side_effect": lambda mine: [mine], "shares_cores.return_value": has_choice})
    tuner = PlanTuner(wire, torch.device("cpu"))
    for _ in range(tuner.BACKWARDS):
        tuner.observe({0: 0.2, 1: 0.5}, 0.5)
    forecast = tuner.forecast({}, [0, 1], [100, 100], overlap=overlap)
    assert forecast is not None
    return forecast


def test_each_behaviour_of_the_threads_has_its_own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        None: Link(0.0, ((100.0, 0.1),)),
        "in batches": Link(9.0, ((100.0, 0.6),)),  # half of the first is left when compute ends
        "interrupting": Link(9.0, ((100.0, 0.3),)),
    }
    forecast = forecast_with(monkeypatch, links, overlap=True, has_choice=True)
    predicted = {candidate.in_batches: candidate.predicted for candidate in forecast.candidates}
    assert predicted == {True: pytest.approx(0.5 + 0.05 + 0.1), False: pytest.approx(0.5 + 0.1)}
