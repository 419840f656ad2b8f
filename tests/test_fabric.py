"""Fabric(strategy="bucketed_ddp") on 2 and 3 ranks, against one process in float64 and against stock Fabric DDP."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning_runs import Counts, flat, loss_of, net, optimizer_of, relative_error, samples, single_device, whole_batch
from rank_pool import RankPool
from torch import Tensor, nn

from lightning_dp.errors import ConfigurationError, LightningDPError, NonFiniteGradientError
from lightning_dp.fabric import BucketedDDPStrategy

SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.001}
RAGGED: Counts = [(4, 1, 3), (1, 4, 2), (3, 3, 1), (2, 6, 4), (5, 1, 1), (4, 4, 4), (1, 2, 3)]
EPOCHS = 4
CLIP = 0.5


def fabric_of(strategy: Any, devices: int) -> Fabric:
    # Not precision="64-true": Fabric would cast a module's output to the default dtype.
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    return fabric


def first_ranks(counts: Counts, world_size: int) -> Counts:
    return [by_rank[:world_size] for by_rank in counts]


def batch_of(index: int, rank: int, count: int, bad: tuple | None) -> dict[str, Tensor]:
    batch = samples(index, rank, count)
    if (index, rank) == bad:
        batch["x"][0, 0] = float("nan")
    return batch


def train(rank: int, strategy: Any, counts: Counts, options: dict) -> dict:
    """The loop that a user of Fabric writes; ``options``: optimizer, k, clip, and (micro-batch, rank) of a NaN."""
    if isinstance(strategy, dict):
        strategy = BucketedDDPStrategy(**strategy)
    fabric = fabric_of(strategy, len(counts[0]))
    ours = isinstance(fabric.strategy, BucketedDDPStrategy)
    model = net()
    model, optimizer = fabric.setup(model, optimizer_of(options.get("optimizer", "sgd"), model.parameters()))
    k, skipped, digests = options.get("k", 1), [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(options.get("epochs", EPOCHS)):
            for start in range(0, len(counts), k):
                window = range(start, min(start + k, len(counts)))
                for index in window:
                    count = counts[index][rank]
                    if ours:
                        fabric.strategy.set_count(count)
                    with fabric.no_backward_sync(model, enabled=index != window[-1]):
                        loss = loss_of(model, batch_of(index, rank, count, options.get("bad")))
                        fabric.backward(loss / len(window))
                if "clip" in options:
                    fabric.clip_gradients(model, optimizer, max_norm=options["clip"])
                optimizer.step()
                optimizer.zero_grad()
                if ours:
                    skipped.append(fabric.strategy.last_step_skipped)
                digests.append(flat(model).numpy().tobytes())
    return {
        "weights": flat(model),
        "digests": digests,
        "skipped": [step for step, skip in enumerate(skipped) if skip],
        "warned": [str(w.message) for w in caught if "skipped" in str(w.message)],
        "total": getattr(fabric.strategy, "skipped_steps", 0),
    }


# ------------------------------------------------------------------------------------------- the single-device step


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_counts_equal_one_device(pool: RankPool, world_size: int, k: int, optimizer: str) -> None:
    counts = first_ranks(RAGGED, world_size)
    right = single_device(counts, "samples", optimizer, k, EPOCHS)
    results = pool.run(world_size, train, SMALL_BUCKETS, counts, {"optimizer": optimizer, "k": k})
    for result in results:
        assert relative_error(result["weights"], right) < 1e-12
        assert result["digests"] == results[0]["digests"], "replicas differ after some step"
        assert result["skipped"] == []


def test_stock_fabric_ddp_misses(pool: RankPool) -> None:
    """Negative control: the data tells a wrong weighting from a right one."""
    counts = first_ranks(RAGGED, 2)
    right = single_device(counts, "samples", "sgd", 1, EPOCHS)
    assert relative_error(pool.run(2, train, "ddp", counts, {})[0]["weights"], right) > 1e-3


def test_equal_counts_equal_stock_fabric_ddp(pool: RankPool) -> None:
    counts = [(4, 4)] * 7
    stock = pool.run(2, train, "ddp", counts, {"k": 2})[0]["weights"]
    mine = pool.run(2, train, "bucketed_ddp", counts, {"k": 2})[0]["weights"]
    assert relative_error(mine, stock) < 1e-12


@pytest.mark.parametrize(("reduce_dtype", "exact_sums"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_gradients_travel_rounded(pool: RankPool, reduce_dtype: str, exact_sums: bool) -> None:
    counts = first_ranks(RAGGED, 2)
    exact = single_device(counts, "samples", "sgd", 1, EPOCHS)
    rounded = pool.run(2, train, {**SMALL_BUCKETS, "reduce_dtype": reduce_dtype, "exact_sums": exact_sums}, counts, {})
    digits = {"bf16": 8, "fp16": 11}[reduce_dtype]
    for result in rounded:
        assert result["digests"] == rounded[0]["digests"]
        # Each step's gradient is off by a few roundings, which steps that shrink their differences do not pile up.
        assert 2.0**-30 < relative_error(result["weights"], exact) < 8 * 2.0**-digits


def test_clipping_sees_the_final_average(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)
    mine = pool.run(2, train, {}, counts, {"clip": CLIP, "k": 2})[0]["weights"]
    assert relative_error(mine, single_device(counts, "samples", "sgd", 2, EPOCHS, clip=CLIP)) < 1e-12
    assert relative_error(mine, single_device(counts, "samples", "sgd", 2, EPOCHS)) > 1e-3  # the clip does clip


# ------------------------------------------------------------------------------------------- skipped steps


def test_a_bad_gradient_skips_the_step_on_all_ranks(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)
    options = {"bad": (3, 1), "epochs": 1, "clip": CLIP}
    results = pool.run(2, train, {}, counts, options)
    right = single_device(counts, "samples", "sgd", 1, 1, skip={3}, clip=CLIP)
    for result in results:
        assert result["skipped"] == [3]
        assert result["total"] == 1
        assert relative_error(result["weights"], right) < 1e-12
    (warned,) = results[0]["warned"]
    assert warned.startswith("step 3: non-finite gradient: rank 1: 4.bias NaN (3 of 3 elements), 4.weight NaN")
    assert "backward 3" in warned
    assert results[1]["warned"] == []


def test_with_the_check_off_the_nan_reaches_the_weights(pool: RankPool) -> None:
    result = pool.run(2, train, {"nonfinite": "off"}, first_ranks(RAGGED, 2), {"bad": (3, 1), "epochs": 1})[0]
    assert not torch.isfinite(result["weights"]).any()
    assert result["skipped"] == []


def raise_at_nan(rank: int) -> str:
    try:
        train(rank, {"nonfinite": "raise"}, first_ranks(RAGGED, 2), {"bad": (3, 1)})
    except NonFiniteGradientError as error:
        return str(error)
    return ""


def test_policy_raise_raises_on_all_ranks(pool: RankPool) -> None:
    for message in pool.run(2, raise_at_nan):
        assert message.startswith("step 3: non-finite gradient: rank 1: 4.bias NaN (3 of 3 elements), 4.weight NaN")


# ------------------------------------------------------------------------------------------- traffic


def count_messages(rank: int) -> list[int]:
    fabric = fabric_of("bucketed_ddp", 2)
    model = fabric.setup(net())
    sent = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for index in range(6):
            before = all_reduce.call_count
            with fabric.no_backward_sync(model, enabled=index % 3 != 2):
                fabric.backward(loss_of(model, samples(index, rank, 2)))
            sent.append(all_reduce.call_count - before)
    return sent


def test_nothing_is_sent_without_sync_and_one_bucket_and_a_ballot_with_it(pool: RankPool) -> None:
    # The very first backward agrees on the usual count.
    assert pool.run(2, count_messages)[0] == [1, 0, 2, 0, 0, 2]


# ------------------------------------------------------------------------------------------- other loops


def two_modules(rank: int) -> Tensor:
    """A generator and its critic, set up apart; every backward of the generator runs through the critic."""
    fabric = fabric_of("bucketed_ddp", 2)
    model, critic = net(), critic_net()
    model, opt_g = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    critic, opt_c = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.05))
    for index, by_rank in enumerate(first_ranks(RAGGED, 2)):
        batch = samples(index, rank, by_rank[rank])
        fabric.strategy.set_count(by_rank[rank])
        adversarial(model, critic, opt_g, opt_c, batch, fabric.backward)
    return torch.cat([flat(model), flat(critic)])


def critic_net() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def adversarial(model: Any, critic: Any, opt_g: Any, opt_c: Any, batch: dict[str, Tensor], backward: Any) -> None:
    opt_c.zero_grad()
    backward((critic(model(batch["x"]).detach()) - critic(batch["y"])).mean())
    opt_c.step()
    opt_g.zero_grad()
    backward(-critic(model(batch["x"])).mean())
    opt_g.step()


def test_modules_that_were_set_up_apart_train_together(pool: RankPool) -> None:
    model, critic = net(), critic_net()
    opt_g, opt_c = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, critic))
    for index, by_rank in enumerate(first_ranks(RAGGED, 2)):
        adversarial(model, critic, opt_g, opt_c, whole_batch(index, by_rank), Tensor.backward)
    right = torch.cat([flat(model), flat(critic)])
    for weights in pool.run(2, two_modules):
        assert relative_error(weights, right) < 1e-12


def closure_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")


def with_closure(rank: int, name: str) -> Tensor:
    fabric = fabric_of("bucketed_ddp", 2)
    model = net()
    model, optimizer = fabric.setup(model, closure_optimizer(name, model))
    for index, by_rank in enumerate(first_ranks(RAGGED, 2)):
        fabric.strategy.set_count(by_rank[rank])

        def closure(index: int = index, count: int = by_rank[rank]) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, samples(index, rank, count))
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
    return flat(model)


@pytest.mark.parametrize(("name", "tolerance"), [("sgd", 1e-12), ("lbfgs", 1e-8)])  # a line search amplifies rounding
def test_closures_equal_one_device(pool: RankPool, name: str, tolerance: float) -> None:
    model = net()
    optimizer = closure_optimizer(name, model)
    for index, by_rank in enumerate(first_ranks(RAGGED, 2)):

        def closure(index: int = index, by_rank: tuple = by_rank) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, whole_batch(index, by_rank))
            loss.backward()
            return loss

        optimizer.step(closure)
    results = pool.run(2, with_closure, name)
    assert torch.equal(*results)
    assert relative_error(results[0], flat(model)) < tolerance


def save_and_go_on(rank: int, folder: str) -> bool:
    """Three steps, a checkpoint, three more; and the last three again from the checkpoint."""
    ended = []
    for resume in (False, True):
        fabric = fabric_of(BucketedDDPStrategy(**SMALL_BUCKETS), 2)
        model = net()
        model, optimizer = fabric.setup(model, optimizer_of("adamw", model.parameters()))
        state = {"model": model, "optimizer": optimizer, "strategy": fabric.strategy}
        if resume:
            fabric.load(f"{folder}/state.ckpt", state)
        for index in range(3 if resume else 0, 6):
            if index == 3 and not resume:
                fabric.save(f"{folder}/state.ckpt", state)
            fabric.strategy.set_count(RAGGED[index][rank])
            fabric.backward(loss_of(model, samples(index, rank, RAGGED[index][rank])))
            optimizer.step()
            optimizer.zero_grad()
        ended.append((flat(model), fabric.strategy.state_dict()))
    (weights, progress), (resumed, resumed_progress) = ended
    return torch.equal(weights, resumed) and progress == resumed_progress


def test_a_resumed_run_is_bit_identical(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, save_and_go_on, str(tmp_path)) == [True, True]


# ------------------------------------------------------------------------------------------- what is refused


def refuse(rank: int, what: str) -> str:
    fabric = fabric_of("bucketed_ddp", 2)
    model = net()
    if what == "models that differ" and rank == 1:
        model = nn.Sequential(*list(model)[:-1])
    extra = nn.Parameter(torch.ones(3))
    try:
        if what == "backward before setup":
            fabric.backward(torch.ones((), requires_grad=True))
        model, optimizer = fabric.setup(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))
        if what == "plain backward":
            loss_of(model, samples(0, rank, 2)).backward()
        elif what == "never averaged":
            optimizer.param_groups[0]["params"].pop()
            with fabric.no_backward_sync(model):
                fabric.backward(loss_of(model, samples(0, rank, 2)))
        elif what == "plain backward of another method":
            optimizer.param_groups[0]["params"].pop()
            model.module[0].weight.sum().backward()
        else:
            fabric.backward(loss_of(model, samples(0, rank, 2)))
        optimizer.step()
    except (LightningDPError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "plain backward",
            "RuntimeError: The current strategy and precision selection requires you to call `fabric.ba",
        ),
        (
            "plain backward of another method",
            "UnreducedGradientError: rank {rank}, step 0: gradients were made by loss.backward(), so each rank has its"
            " own; call fabric.backward(loss) instead",
        ),
        (
            "never averaged",
            "UnreducedGradientError: rank {rank}, step 0: gradients were accumulated without synchronisation and not"
            " averaged since; leave fabric.no_backward_sync()",
        ),
        (
            "a parameter of no module",
            "UnreducedGradientError: rank {rank}, step 0: 1 parameters of the optimizer's group 0 belong to no module",
        ),
        ("models that differ", "StructureMismatchError: the model differs between ranks: rank 1 has 'nothing more'"),
        ("backward before setup", "LightningDPError: fabric.backward before any module was set up: call fabric.setup"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(pool: RankPool, what: str, message: str) -> None:
    for rank, said in enumerate(pool.run(2, refuse, what)):
        assert said.startswith(message.format(rank=rank)), said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": "tokens"}, "bucketed_ddp has no argument 'count'; its own are bucket_cap_mb"),
        ({"precision_plugin": None}, "bucketed_ddp has no argument 'precision_plugin'"),
        ({"ddp_comm_hook": print}, "bucketed_ddp has no argument 'ddp_comm_hook'"),
        ({"timeout": 0}, "timeout must be a number above 0, got 0"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not known: use one of skip, raise, drop_rank, off"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        BucketedDDPStrategy(**arguments)
    assert str(caught.value).startswith(message)


# ------------------------------------------------------------------------------------------- names and processes


@pytest.mark.parametrize(
    ("name", "start_method"),
    [
        ("bucketed_ddp", "popen"),
        ("bucketed_ddp_spawn", "spawn"),
        ("bucketed_ddp_fork", "fork"),
        ("bucketed_ddp_notebook", "fork"),
    ],
)
def test_names_are_registered(name: str, start_method: str) -> None:
    strategy = STRATEGY_REGISTRY.get(name)
    assert type(strategy) is BucketedDDPStrategy
    assert strategy._start_method == start_method
    assert pickle.loads(pickle.dumps(strategy))._start_method == start_method


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from lightning.fabric import Fabric
from test_fabric import *


def run(fabric):
    model = net()
    model, optimizer = fabric.setup(model, optimizer_of("sgd", model.parameters()))
    for index in range(7):
        fabric.strategy.set_count(2 + fabric.global_rank)
        fabric.backward(loss_of(model, samples(index, fabric.global_rank, 2 + fabric.global_rank)))
        optimizer.step()
        optimizer.zero_grad()
    if fabric.global_rank == 0:
        print("weights", flat(model).sum().item(), fabric.world_size, flush=True)


if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy={name!r}).launch(run)
"""


@pytest.mark.parametrize("name", ["bucketed_ddp", "bucketed_ddp_spawn"])
def test_every_way_to_start_ranks_trains(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), name=name))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    _, total, world_size = line.split()
    assert world_size == "2"
    assert float(total) == pytest.approx(float(single_device([(2, 3)] * 7, "samples", "sgd", 1, 1).sum()), rel=1e-12)
