"""GradientReducer on 1 to 4 gloo ranks, against one process with all the data in float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailureError, RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.errors import (
    CommunicationError,
    CountError,
    LateGradientError,
    LightningDPError,
    StructureMismatchError,
    UnreducedGradientError,
)
from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.ballot import Reason

SMALL_BUCKETS = ReducerConfig(bucket_cap_mb=0.004, first_bucket_cap_mb=0.001)
WIDTH = 10


def mlp(seed: int = 0) -> nn.Module:
    """About 1,100 float64 parameters; several buckets under SMALL_BUCKETS."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 3)).double()


def rows(step: int, rank: int, micro_batch: int, count: int) -> Tensor:
    """The ``count`` samples of one micro-batch, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + micro_batch)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def relative_error(mine: list[Tensor], right: list[Tensor]) -> float:
    a, b = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (mine, right))
    return float((a - b).norm() / b.norm())


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# Counts by step, micro-batch, rank. Rank r of a smaller world uses the first entries. Windows have 1, 2, or 3
# micro-batches and the last is cut short, as at the end of an epoch.
def ragged_counts(steps: int, world_size: int, k: int) -> list[list[list[int]]]:
    pattern = [4, 1, 3, 2, 0, 5, 7]
    table = [
        [[pattern[(3 * s + 2 * j + r) % len(pattern)] for r in range(world_size)] for j in range(k)]
        for s in range(steps)
    ]
    table[-1] = table[-1][: max(1, k - 1)]
    return table


def single_device(counts: list[list[list[int]]], optimizer: str) -> list[Tensor]:
    model = mlp()
    opt = optimizer_of(optimizer, model)
    for step, window in enumerate(counts):
        x = torch.cat([rows(step, r, j, n) for j, by_rank in enumerate(window) for r, n in enumerate(by_rank)])
        opt.zero_grad()
        if len(x):
            mean_loss(model, x).backward()
            opt.step()
    return weights(model)


def train_ranks(rank: int, counts: list[list[list[int]]], optimizer: str, config: ReducerConfig) -> tuple:
    model = mlp(seed=0)
    reducer = GradientReducer(model.named_parameters(), config=config)
    opt = optimizer_of(optimizer, model)
    digests = []
    for step, window in enumerate(counts):
        opt.zero_grad()
        for j, by_rank in enumerate(window):
            count = by_rank[rank]
            x = rows(step, rank, j, count)
            with reducer.no_sync() if j < len(window) - 1 else nullcontext():
                reducer.backward(mean_loss(model, x), count=count)  # an empty micro-batch's mean is NaN
        if reducer.last.verdict.step:
            opt.step()
        digests.append([p.detach().numpy().tobytes() for p in model.parameters()])
    return weights(model), digests


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_equal_one_device(pool: RankPool, world_size: int, k: int, optimizer: str) -> None:
    counts = ragged_counts(20, world_size, k)
    results = pool.run(world_size, train_ranks, counts, optimizer, SMALL_BUCKETS)
    assert relative_error(results[0][0], single_device(counts, optimizer)) < 1e-12
    for step, digests in enumerate(zip(*(digests for _, digests in results), strict=True)):
        assert all(digest == digests[0] for digest in digests), f"replicas differ after step {step}"


def test_counts_are_what_makes_them_equal(pool: RankPool) -> None:
    """Negative control: the same data with every micro-batch counted 1 misses the single-device weights."""
    counts = ragged_counts(20, 2, 2)
    counts = [[[n or 1 for n in by_rank] for by_rank in window] for window in counts]
    equal = pool.run(2, train_with_equal_counts, counts)[0]
    assert relative_error(equal, single_device(counts, "sgd")) > 1e-3


def train_with_equal_counts(rank: int, counts: list[list[list[int]]]) -> list[Tensor]:
    original = GradientReducer.backward
    with mock.patch.object(GradientReducer, "backward", lambda self, loss, count: original(self, loss, count=1)):
        return train_ranks(rank, counts, "sgd", SMALL_BUCKETS)[0]


@pytest.mark.parametrize("cap", [1e-6, 0.002, 25.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_do_not_change_the_result(pool: RankPool, cap: float, overlap: bool) -> None:
    counts = ragged_counts(5, 3, 2)
    config = ReducerConfig(bucket_cap_mb=cap, first_bucket_cap_mb=cap, overlap=overlap)
    mine = pool.run(3, train_ranks, counts, "adamw", config)[0][0]
    assert relative_error(mine, single_device(counts, "adamw")) < 1e-12


# ------------------------------------------------------------------------------------------- what is sent, and when


def record_traffic(rank: int, k: int) -> dict:
    """Counts real collectives: those that reach torch.distributed, by kind, bytes and moment."""
    model = mlp()
    events: list[tuple[str, int]] = []
    for name, p in model.named_parameters():  # before the reducer's own, so that a gradient is noted before it leaves
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append((f"grad {name}", 0)))
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    real = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather_object", "all_gather")}

    def spy(name: str) -> Callable:
        def call(tensor: object, *args: object, **kwargs: object) -> object:
            nbytes = tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
            events.append((name, nbytes))
            return real[name](tensor, *args, **kwargs)

        return call

    steps = []
    with ExitStack() as patches:
        for name in real:
            patches.enter_context(mock.patch.object(dist, name, spy(name)))
        for step in range(3):
            model.zero_grad()
            inside = 0
            for j in range(k):
                events.clear()
                last = j == k - 1
                with nullcontext() if last else reducer.no_sync():
                    reducer.backward(mean_loss(model, rows(step, rank, j, 4)), count=4)
                inside += 0 if last else sum(not name.startswith("grad") for name, _ in events)
            steps.append((inside, list(events)))
    layouts = [[reducer._named[i][0] for i in layout.indices] for layout in reducer.plan.buckets]
    return {
        "steps": steps,
        "plan": [layout.nbytes for layout in reducer.plan.buckets],
        "layouts": layouts,
        "reported": (reducer.last.messages, reducer.last.nbytes),
        "parameters": len(list(model.parameters())),
        "gradient": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_and_bytes_equal_the_formula(pool: RankPool, world_size: int, k: int) -> None:
    for result in pool.run(world_size, record_traffic, k):
        assert len(result["plan"]) > 2
        for step, (inside_no_sync, events) in enumerate(result["steps"]):
            assert inside_no_sync == 0
            sent = [(name, nbytes) for name, nbytes in events if not name.startswith("grad")]
            if step == 0:  # the observed orders are exchanged once
                assert [name for name, _ in sent].count("all_gather_object") == 1
                sent = [entry for entry in sent if entry[0] != "all_gather_object"]
            assert {name for name, _ in sent} == {"all_reduce"}
            *buckets, ballot = [nbytes for _, nbytes in sent]
            if step > 0:
                assert buckets == result["plan"]
            assert sum(buckets) == result["gradient"]
            # Two 8-byte counts, then a 2-byte lane per rank and parameter, to whole words.
            assert ballot == 16 + 8 * -(-(world_size + result["parameters"]) // 4)
        assert result["reported"] == (len(buckets) + 1, result["gradient"] + ballot)


def test_first_bucket_leaves_before_the_last_gradient_is_ready(pool: RankPool) -> None:
    for result in pool.run(2, record_traffic, 1):
        for step, (_, events) in enumerate(result["steps"]):
            names = [name for name, _ in events]
            last_gradient = max(at for at, name in enumerate(names) if name.startswith("grad"))
            launches = [at for at, name in enumerate(names) if name == "all_reduce"]
            if step == 0:  # the first backward is watched, to learn how often each gradient fires
                assert launches[0] > last_gradient
            else:
                assert launches[0] < last_gradient
                # Each bucket leaves as soon as its own last gradient is there: before the next one arrives.
                for number, layout in enumerate(result["layouts"]):
                    own_last = max(names.index(f"grad {name}") for name in layout)
                    assert own_last < launches[number]
                    following = [at for at, name in enumerate(names) if name.startswith("grad") and at > own_last]
                    assert not following or launches[number] < following[0]


def swapped_branches(rank: int) -> tuple:
    """Two branches; on rank 1 their gradients become ready in the other order."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, 40), "b": nn.Linear(WIDTH, 40)}).double()
    config = ReducerConfig(bucket_cap_mb=0.001, first_bucket_cap_mb=0.001)
    reducer = GradientReducer(model.named_parameters(), config=config)
    launched: list[int] = []
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: object, **kwargs: object) -> object:
        launched.append(tensor.data_ptr())
        return real(tensor, *args, **kwargs)

    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    with mock.patch.object(dist, "all_reduce", spy):
        for step in range(3):
            model.zero_grad()
            fired.clear()
            launched.clear()
            x = rows(step, rank, 0, 4)
            order = ("a", "b") if rank == 0 else ("b", "a")
            h = x
            for name in order:  # a chain, so that the order of gradients is the reverse of `order`
                h = model[name](h)[:, :WIDTH]
            reducer.backward(h.square().mean(), count=4)
    pointers = {bucket.flat.data_ptr(): number for number, bucket in enumerate(reducer._launcher.buckets)}
    order = [pointers[pointer] for pointer in launched if pointer in pointers]
    return fired, order, [p.grad.clone() for p in model.parameters()]


def test_launch_order_is_one_on_all_ranks_whatever_order_gradients_come_in(pool: RankPool) -> None:
    (fired0, order0, grads0), (fired1, order1, grads1) = pool.run(2, swapped_branches)
    assert fired0 != fired1, "the test must make the orders differ"
    assert order0 == order1 == sorted(order0)
    assert len(order0) > 1
    for a, b in zip(grads0, grads1, strict=True):
        assert torch.equal(a, b)


def gradient_storage(rank: int) -> tuple[bool, int, int]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    within = True
    for step in range(3):
        model.zero_grad()
        for j, context in enumerate((reducer.no_sync(), nullcontext())):
            with context:
                reducer.backward(mean_loss(model, rows(step, rank, j, 4)), count=4)
            storages = {bucket.flat.untyped_storage().data_ptr() for bucket in reducer._launcher.buckets}
            within &= all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters())
    held = sum(bucket.flat.untyped_storage().nbytes() for bucket in reducer._launcher.buckets)
    return within, held, sum(p.numel() * p.element_size() for p in model.parameters())


def test_gradients_exist_once_and_live_in_the_buckets(pool: RankPool) -> None:
    for within, held, parameters in pool.run(2, gradient_storage):
        assert within
        assert held == parameters


# ------------------------------------------------------------------------------------------- non-finite gradients


def poison(rank: int, culprit: int, where: str, value: float, config: ReducerConfig) -> tuple:
    """Three steps; in the second one ``culprit``'s gradient of a parameter of one bucket gets a bad element."""
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=config)
    opt = optimizer_of("adamw", model)
    bad_names = []
    for step in range(3):
        opt.zero_grad()
        before = [t.clone() for t in (*model.parameters(), *(v for s in opt.state.values() for v in s.values()))]
        handles = []
        if step == 1:
            number = {"first": 0, "middle": len(reducer.plan.buckets) // 2, "last": -1}[where]
            index = reducer.plan.buckets[number].indices[-1]
            name, parameter = reducer._named[index]
            bad_names.append(name)
            if rank == culprit:
                # A tensor hook changes the gradient before it is accumulated, as a bad backward would.
                def spoil(grad: Tensor) -> Tensor:
                    grad = grad.clone()
                    grad.view(-1)[-1] = value
                    return grad

                handles.append(parameter.register_hook(spoil))
        reducer.backward(mean_loss(model, rows(step, rank, 0, 3)), count=3, label=f"batch {step}")
        for handle in handles:
            handle.remove()
        verdict = reducer.last.verdict
        if verdict.step:
            opt.step()
        elif step == 1:
            skipped = verdict
            after = [*model.parameters(), *(v for s in opt.state.values() for v in s.values())]
            untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return skipped, untouched, bad_names[0], weights(model)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_gradient_skips_the_step_on_all_ranks_and_is_named(
    pool: RankPool, world_size: int, value: float
) -> None:
    good = [[[3] * world_size] for _ in range(3)]
    for where in ("first", "middle", "last"):
        for culprit in range(world_size):
            results = pool.run(world_size, poison, culprit, where, value, SMALL_BUCKETS)
            for verdict, untouched, name, mine in results:
                assert verdict.reason is Reason.NONFINITE
                assert verdict.ranks == (culprit,)
                kind = "NaN" if value != value else "Inf"
                assert f"rank {culprit}: {name} {kind} (1 of " in verdict.detail
                assert ", batch 1, loss " in verdict.detail
                assert untouched
                assert relative_error(mine, without_step(good, 1)) < 1e-12


def without_step(counts: list[list[list[int]]], skipped: int) -> list[Tensor]:
    model = mlp()
    opt = optimizer_of("adamw", model)
    for step, window in enumerate(counts):
        if step != skipped:
            x = torch.cat([rows(step, r, 0, n) for r, n in enumerate(window[0])])
            opt.zero_grad()
            mean_loss(model, x).backward()
            opt.step()
    return weights(model)


def test_without_the_check_the_nan_reaches_the_weights(pool: RankPool) -> None:
    """Negative control: what the vote prevents."""
    config = ReducerConfig(check_nonfinite=False)
    with pytest.raises(RankFailureError, match="skipped"):  # `skipped` is never set: every step was taken
        pool.run(2, poison, 1, "first", float("nan"), config)


def overflow(rank: int) -> tuple:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    reducer = GradientReducer([("p", p)])
    # 2 x 40,000 is beyond float16's 65,504. With no reference yet a count of 2 makes each rank's weight 1.
    reducer.backward((p * 40_000).sum(), count=2)
    return reducer.last.verdict, bool(torch.isfinite(p.grad).all())


def test_finite_gradients_whose_sum_overflows_are_told_apart(pool: RankPool) -> None:
    for verdict, finite in pool.run(2, overflow):
        assert verdict.reason is Reason.OVERFLOW
        assert verdict.ranks == ()
        assert not finite


def zero_count_with_nan(rank: int) -> tuple:
    """Rank 1's second micro-batch counts 0 and has NaN gradients; its first one counts."""
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    for step in range(2):
        model.zero_grad()
        with reducer.no_sync():
            reducer.backward(mean_loss(model, rows(step, rank, 0, 3)), count=3)
        loss = mean_loss(model, rows(step, rank, 1, 2))
        if rank == 1:
            loss = loss * float("nan")
        reducer.backward(loss, count=0 if rank == 1 else 2)
    return reducer.last.verdict, [p.grad.clone() for p in model.parameters()]


def test_a_zero_count_gradient_is_dropped_not_multiplied_by_zero(pool: RankPool) -> None:
    model = mlp()
    x = torch.cat([rows(1, 0, 0, 3), rows(1, 1, 0, 3), rows(1, 0, 1, 2)])
    mean_loss(model, x).backward()
    for verdict, grads in pool.run(2, zero_count_with_nan):
        assert verdict.step
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def nobody_has_data(rank: int) -> tuple:
    model = mlp()
    reducer = GradientReducer(model.named_parameters())
    reducer.backward(mean_loss(model, rows(0, rank, 0, 0)), count=0)
    return reducer.last.verdict.reason, [p.grad for p in model.parameters()]


def test_a_window_without_any_data_is_skipped(pool: RankPool) -> None:
    for reason, grads in pool.run(2, nobody_has_data):
        assert reason is Reason.EMPTY
        assert all(grad is None for grad in grads)


# ------------------------------------------------------------------------------------------- graphs


class Branches(nn.Module):
    """A shared stem, two heads, and one layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(torch.tanh(self.stem(x)))


def different_heads(rank: int) -> dict[str, Tensor | None]:
    model = Branches()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad()
        head = ("left", "right")[(rank + step) % 2]  # other parameters fire on every step and rank
        reducer.backward(model(rows(step, rank, 0, 2 + rank), head).square().mean(), count=2 + rank)
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_a_parameter_used_on_some_ranks_is_averaged_and_one_used_nowhere_stays_none(pool: RankPool) -> None:
    model = Branches()
    step = 2
    losses = [
        (2 + rank) * model(rows(step, rank, 0, 2 + rank), ("left", "right")[(rank + step) % 2]).square().mean()
        for rank in range(2)
    ]
    (sum(losses) / 5).backward()
    for grads in pool.run(2, different_heads):
        for name, p in model.named_parameters():
            if name.startswith("unused"):
                assert grads[name] is None
            else:
                assert torch.allclose(grads[name], p.grad, rtol=1e-12, atol=1e-15), name


def used_in_first_micro_batch_only(rank: int) -> list[Tensor]:
    model = Branches()
    reducer = GradientReducer([(n, p) for n, p in model.named_parameters() if "unused" not in n])
    for step in range(3):
        model.zero_grad()
        with reducer.no_sync():
            reducer.backward(model(rows(step, rank, 0, 2), "left").square().mean(), count=2)
        reducer.backward(model(rows(step, rank, 1, 2), "right").square().mean(), count=2)
    return [p.grad.clone() for n, p in model.named_parameters() if "unused" not in n]


def test_a_parameter_used_only_in_an_earlier_micro_batch_is_averaged(pool: RankPool) -> None:
    model = Branches()
    losses = [model(rows(2, r, j, 2), head).square().mean() for r in (0, 1) for j, head in enumerate(("left", "right"))]
    (sum(losses) / 4).backward()
    right = [p.grad for n, p in model.named_parameters() if "unused" not in n]
    for grads in pool.run(2, used_in_first_micro_batch_only):
        assert relative_error(grads, right) < 1e-12


class SharedBlock(nn.Module):
    """One block applied twice, each time under a checkpoint; its weights fire twice if that is reentrant."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.reentrant = reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(rank: int, reentrant: bool) -> tuple:
    model = SharedBlock(reentrant)
    config = ReducerConfig(bucket_cap_mb=1e-6, first_bucket_cap_mb=1e-6)  # a bucket for each parameter
    reducer = GradientReducer(model.named_parameters(), config=config)
    fires = {name: 0 for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():

        def count(_: Tensor, name: str = name) -> None:
            fires[name] += 1

        p.register_post_accumulate_grad_hook(count)
    for step in range(3):
        model.zero_grad()
        with reducer.no_sync():
            reducer.backward(model(rows(step, rank, 0, 3)).square().mean(), count=3)
        fires = dict.fromkeys(fires, 0)
        reducer.backward(model(rows(step, rank, 1, 1)).square().mean(), count=1)
    return [p.grad.clone() for p in model.parameters()], fires["block.0.weight"]


@pytest.mark.parametrize(("reentrant", "fires"), [(True, 2), (False, 1)])
def test_a_block_shared_by_two_checkpoints_is_exact(pool: RankPool, reentrant: bool, fires: int) -> None:
    model = SharedBlock(reentrant=False)
    x = torch.cat([rows(2, r, j, n) for r in range(2) for j, n in ((0, 3), (1, 1))])
    model(x).square().mean().backward()
    for grads, fired in pool.run(2, checkpointed, reentrant):
        assert fired == fires  # so that the test is known to exercise what it says
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def late_gradient(rank: int, overlap: bool) -> object:
    """The first backward uses the shared block once, the second one twice: its gradient changes after it was sent."""
    model = SharedBlock(reentrant=True)
    config = ReducerConfig(bucket_cap_mb=1e-6, first_bucket_cap_mb=1e-6, overlap=overlap)
    reducer = GradientReducer(model.named_parameters(), config=config)
    x = rows(0, rank, 0, 3)
    reducer.backward(checkpoint(model.block, model.first(x), use_reentrant=True).square().mean(), count=3)
    model.zero_grad()
    try:
        reducer.backward(model(x).square().mean(), count=3)
    except LateGradientError as error:
        return str(error)
    return [p.grad.clone() for p in model.parameters()]


def test_a_gradient_that_changes_after_it_was_sent_is_an_error_that_names_it(pool: RankPool) -> None:
    for rank, message in enumerate(pool.run(2, late_gradient, True)):
        assert isinstance(message, str), "a wrong gradient passed silently"
        assert f"rank {rank}" in message
        assert "'block.0." in message
        assert "overlap=False" in message


def test_without_overlap_the_same_model_is_exact(pool: RankPool) -> None:
    model = SharedBlock(reentrant=False)
    model(torch.cat([rows(0, r, 0, 3) for r in range(2)])).square().mean().backward()
    for grads in pool.run(2, late_gradient, False):
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def tied_and_reused(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first).double()
    reducer = GradientReducer(model.named_parameters(remove_duplicate=False), config=SMALL_BUCKETS)
    for step in range(2):
        model.zero_grad()
        if rank < 0:  # the reference: all ranks' rows in one process
            x = torch.cat([rows(step, r, 0, 2 + r) for r in range(2)])
            model(x).square().mean().backward()
        else:
            reducer.backward(model(rows(step, rank, 0, 2 + rank)).square().mean(), count=2 + rank)
    return [p.grad.clone() for p in model.parameters()]


def test_tied_weights_and_a_module_used_twice(pool: RankPool) -> None:
    for grads in pool.run(2, tied_and_reused):
        assert relative_error(grads, tied_and_reused(-1)) < 1e-12


def thawing(rank: int) -> tuple[list[Tensor], bool]:
    model = mlp()
    model[0].requires_grad_(False)
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    opt = optimizer_of("sgd", model)
    frozen_stays_out = True
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        opt.zero_grad()
        reducer.backward(mean_loss(model, rows(step, rank, 0, 2 + rank)), count=2 + rank)
        frozen_stays_out &= step >= 3 or reducer.plan.nbytes < sum(p.nbytes for p in model.parameters())
        opt.step()
    return weights(model), frozen_stays_out


def test_a_layer_thawed_in_mid_training_is_reduced_from_then_on(pool: RankPool) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = optimizer_of("sgd", model)
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        opt.zero_grad()
        mean_loss(model, torch.cat([rows(step, r, 0, 2 + r) for r in range(3)])).backward()
        opt.step()
    for mine, frozen_stays_out in pool.run(3, thawing):
        assert frozen_stays_out
        assert relative_error(mine, weights(model)) < 1e-12


# ------------------------------------------------------------------------------------------- gradients not zeroed


def not_zeroed(rank: int, zero: str) -> list[list[Tensor]]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    history = []
    for step in range(3):
        if zero == "zero" or (zero == "every second" and step % 2 == 0):
            model.zero_grad(set_to_none=False)
        reducer.backward(mean_loss(model, rows(step, rank, 0, 2 + rank)), count=2 + rank)
        history.append([p.grad.clone() for p in model.parameters()])
    return history


@pytest.mark.parametrize("zero", ["zero", "never", "every second"])
def test_averaged_gradients_that_were_kept_are_added_to_not_summed_again(pool: RankPool, zero: str) -> None:
    model = mlp()
    right = []
    for step in range(3):
        if zero == "zero" or (zero == "every second" and step % 2 == 0):
            model.zero_grad(set_to_none=False)
        mean_loss(model, torch.cat([rows(step, r, 0, 2 + r) for r in range(3)])).backward()
        right.append([p.grad.clone() for p in model.parameters()])
    for history in pool.run(3, not_zeroed, zero):
        for mine, expected in zip(history, right, strict=True):
            assert relative_error(mine, expected) < 1e-12


# ------------------------------------------------------------------------------------------- kinds of parameters


class Kinds(nn.Module):
    """channels_last, a transposed and a zero-size weight, float32 beside float64, complex, and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3).double().to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(4, 2, 1).double().to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(4))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.table = nn.Embedding(7, 3, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        image = x[:, :8].reshape(n, 2, 2, 2).repeat(1, 1, 2, 2)
        convolved = self.pointwise(self.conv(image)).mean((1, 2, 3)) * self.scalar
        looked_up = self.table(x[:, 0].abs().long().clamp(max=6)).sum(1)
        phase = (self.complex * x[:, :3]).abs().sum(1)
        return (
            convolved + (x[:, :5] @ self.transposed).sum(1) + looked_up + phase + self.single.sum() + self.empty.sum()
        )


def kinds(rank: int) -> tuple[list[Tensor], bool]:
    model = Kinds()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad()
        with reducer.no_sync():
            reducer.backward(model(rows(step, rank, 0, 3)).square().mean(), count=3)
        reducer.backward(model(rows(step, rank, 1, 1 + rank)).square().mean(), count=1 + rank)
    strides = all(p.grad.stride() == p.stride() for p in model.parameters() if p.numel())
    return [p.grad.clone() for p in model.parameters()], strides


@pytest.mark.filterwarnings("error:grad and param do not obey the gradient layout contract")
def test_every_kind_of_parameter_is_averaged_in_its_own_layout(pool: RankPool) -> None:
    model = Kinds()
    model(torch.cat([rows(2, r, j, n) for r in range(2) for j, n in ((0, 3), (1, 1 + r))])).square().mean().backward()
    for grads, strides in pool.run(2, kinds):
        assert strides
        for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
            right = p.grad.to_dense() if p.grad.is_sparse else p.grad
            tolerance = 1e-6 if p.dtype is torch.float32 else 1e-12
            assert torch.allclose(grad, right, rtol=tolerance, atol=tolerance), name


# ------------------------------------------------------------------------------------------- life and death


def resume(rank: int) -> tuple[bool, bool, list]:
    """Six steps in one go, and three, a new reducer from the state, and three more."""
    whole, first = mlp(), mlp()

    def steps(model: nn.Module, reducer: GradientReducer, opt: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            opt.zero_grad()
            reducer.backward(mean_loss(model, rows(step, rank, 0, 1 + (step + rank) % 4)), count=1 + (step + rank) % 4)
            opt.step()

    reducer = GradientReducer(whole.named_parameters(), config=SMALL_BUCKETS)
    steps(whole, reducer, optimizer_of("adamw", whole), range(6))
    before = GradientReducer(first.named_parameters(), config=SMALL_BUCKETS)
    opt = optimizer_of("adamw", first)
    steps(first, before, opt, range(3))
    state = copy.deepcopy(before.state_dict())
    before.detach()
    after = GradientReducer(first.named_parameters(), config=SMALL_BUCKETS)
    after.load_state_dict(state)
    steps(first, after, opt, range(3, 6))
    same_plan = after.plan == reducer.plan
    same_bits = all(torch.equal(a, b) for a, b in zip(whole.parameters(), first.parameters(), strict=True))
    return same_plan, same_bits, [type(value) for value in state.values()]


def test_a_resumed_reducer_repeats_the_uninterrupted_run_to_the_bit(pool: RankPool) -> None:
    for same_plan, same_bits, types in pool.run(3, resume):
        assert same_plan
        assert same_bits
        assert set(types) <= {list, dict}


def after_detach(rank: int) -> tuple[int, list[Tensor]]:
    model = mlp()
    GradientReducer(model.named_parameters()).detach()
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    second = GradientReducer(model.named_parameters())
    second.backward(mean_loss(model, rows(0, rank, 0, 2)), count=2)
    return hooks, [p.grad.clone() for p in model.parameters()]


def test_hooks_are_gone_after_detach_and_a_second_reducer_works(pool: RankPool) -> None:
    model = mlp()
    mean_loss(model, torch.cat([rows(0, r, 0, 2) for r in range(2)])).backward()
    for hooks, grads in pool.run(2, after_detach):
        assert hooks == 0
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def other_shape(rank: int) -> str:
    model = nn.Linear(3, 4 if rank != 1 else 5)
    try:
        GradientReducer(model.named_parameters())
    except StructureMismatchError as error:
        return str(error)
    return ""


def test_models_of_different_shape_are_refused_on_every_rank(pool: RankPool) -> None:
    messages = pool.run(3, other_shape)
    assert len(set(messages)) == 1
    assert "rank 1 has 'weight: float32 (5, 3) trainable' where rank 0 has 'weight: float32 (4, 3)" in messages[0]


def lone_rank(rank: int) -> tuple[str, float]:
    """Rank 1 leaves; rank 0 goes on, in a group whose collectives wait 3 seconds."""
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), dist.new_group(timeout=timedelta(seconds=3)))
    reducer.backward(mean_loss(model, rows(0, rank, 0, 2)), count=2)
    if rank == 1:
        return "", 0.0
    start = time.monotonic()
    try:
        reducer.backward(mean_loss(model, rows(1, rank, 0, 2)), count=2)
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_rank_that_leaves_ends_the_others_with_a_clear_error(pool: RankPool) -> None:
    message, seconds = pool.run(2, lone_rank)[0]
    assert message.startswith("rank 0 of 2: the all-reduce of bucket 0")
    assert "because rank 1 stopped" in message
    assert seconds < 10


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", None])
def test_a_count_that_is_no_count_is_refused(count: object) -> None:
    reducer = GradientReducer(mlp().named_parameters())
    with pytest.raises(CountError, match=r"rank 0, batch 7: the count .* must be an integer of at least 0"):
        reducer.backward(torch.zeros(()), count=count, label="batch 7")


def test_after_an_error_in_backward_the_next_one_is_refused() -> None:
    reducer = GradientReducer(mlp().named_parameters())
    with pytest.raises(KeyError), reducer.backward_pass(count=1):
        raise KeyError
    with pytest.raises(LightningDPError, match="a backward pass is still open"), reducer.backward_pass(count=1):
        pass


def test_gradients_made_outside_are_noticed() -> None:
    model = mlp()
    reducer = GradientReducer(model.named_parameters())
    reducer.backward(mean_loss(model, rows(0, 0, 0, 2)), count=2)
    assert not reducer.has_unreduced
    mean_loss(model, rows(0, 0, 0, 2)).backward()
    assert reducer.has_unreduced


def test_a_model_with_nothing_to_train_is_allowed() -> None:
    model = mlp().requires_grad_(False)
    reducer = GradientReducer(model.named_parameters())
    assert reducer.plan.buckets == ()


def summing_micro_batches(rank: int) -> list[Tensor]:
    """``divided_by=None``: micro-batches add up, as repeated backward calls on one device do."""
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    for step in range(2):
        model.zero_grad()
        for j, context in enumerate((reducer.no_sync(), nullcontext())):
            with context:
                reducer.backward(mean_loss(model, rows(step, rank, j, 2 + rank)), count=2 + rank, divided_by=None)
    return [p.grad.clone() for p in model.parameters()]


def test_losses_can_add_up_over_micro_batches(pool: RankPool) -> None:
    model = mlp()
    for j in range(2):
        mean_loss(model, torch.cat([rows(1, r, j, 2 + r) for r in range(2)])).backward()
    for grads in pool.run(2, summing_micro_batches):
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def times(rank: int) -> list:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    reductions = []
    for step in range(3):
        reducer.backward(mean_loss(model, rows(step, rank, 0, 2)), count=2)
        reductions.append(reducer.last)
        model.zero_grad()
    return [(r.times, len(r.times.buckets)) for r in reductions]


def test_times_are_ordered(pool: RankPool) -> None:
    for reductions in pool.run(2, times):
        for step, (step_times, buckets) in enumerate(reductions):
            assert buckets > 2
            assert 0 < step_times.backward_end <= step_times.end
            assert step_times.exposed == step_times.end - step_times.backward_end
            for bucket in step_times.buckets:
                assert 0 <= bucket.ready <= bucket.launch <= bucket.done <= step_times.end
            for earlier, later in pairwise(step_times.buckets):
                assert earlier.launch <= later.launch
            if step:
                assert step_times.buckets[0].launch < step_times.backward_end


# ------------------------------------------------------------------------------------------- what users do to gradients


def replaces_gradient_memory(rank: int, how: str) -> list[Tensor]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    opt = optimizer_of("sgd", model)
    for step in range(4):
        opt.zero_grad(set_to_none=step % 2 == 0)
        reducer.backward(mean_loss(model, rows(step, rank, 0, 2 + rank)), count=2 + rank)
        if how == "data":
            for p in model.parameters():
                p.grad.data = p.grad.data * 0.5
        elif how == "convert":
            model.float().double()
        elif how == "replace":
            for p in model.parameters():
                p.grad = p.grad * 0.5
        opt.step()
    return weights(model)


@pytest.mark.parametrize("how", ["data", "convert", "replace"])
def test_a_gradient_may_be_given_other_memory(pool: RankPool, how: str) -> None:
    model = mlp()
    opt = optimizer_of("sgd", model)
    for step in range(4):
        opt.zero_grad(set_to_none=step % 2 == 0)
        mean_loss(model, torch.cat([rows(step, r, 0, 2 + r) for r in range(2)])).backward()
        if how == "convert":
            model.float().double()
        else:
            for p in model.parameters():
                p.grad = p.grad * 0.5
        opt.step()
    first, second = pool.run(2, replaces_gradient_memory, how)
    # Rounding to float32 in between leaves float32's digits.
    assert relative_error(first, weights(model)) < (1e-6 if how == "convert" else 1e-12)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def stray_then_pass(rank: int, before: str) -> list[str]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters())
    said = []
    for zeroed in (False, True):
        if before:
            model.zero_grad()
            reducer.backward(mean_loss(model, rows(0, rank, 0, 2)), count=2)
        if before == "a reduction, zeroed":
            model.zero_grad()
        mean_loss(model, rows(0, rank, 0, 2)).backward()
        if zeroed:
            model.zero_grad()
        try:
            reducer.backward(mean_loss(model, rows(0, rank, 1, 2)), count=2, label="batch 3")
            said.append("")
        except UnreducedGradientError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("before", ["", "a reduction, zeroed", "a reduction"])
def test_gradients_made_outside_are_refused_unless_they_were_zeroed(pool: RankPool, before: str) -> None:
    for rank, (kept, zeroed) in enumerate(pool.run(2, stray_then_pass, before)):
        assert kept.startswith(f"rank {rank}, batch 3: there are gradients that were made by loss.backward() outside")
        assert zeroed == ""


def thaw_with_carry(rank: int) -> list[Tensor]:
    model = mlp()
    model[2].requires_grad_(False)
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    for j in range(3):  # nothing is zeroed: one device adds three gradients up
        if j == 2:
            model[2].requires_grad_(True)
        with reducer.no_sync() if j == 1 else nullcontext():
            reducer.backward(mean_loss(model, rows(0, rank, j, 3)), count=3, divided_by=None)
    return [p.grad.clone() for p in model.parameters()]


def test_thawing_while_gradients_are_carried_mixes_nothing_up(pool: RankPool) -> None:
    model = mlp()
    model[2].requires_grad_(False)
    for j in range(3):
        if j == 2:
            model[2].requires_grad_(True)
        mean_loss(model, torch.cat([rows(0, r, j, 3) for r in range(2)])).backward()
    for grads in pool.run(2, thaw_with_carry):
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def first_backward_without_data(rank: int) -> list[Tensor]:
    """Rank 1 has no backward to learn from in the first step; the shared block fires twice in all later ones."""
    model = SharedBlock(reentrant=True)
    config = ReducerConfig(bucket_cap_mb=1e-6, first_bucket_cap_mb=1e-6)
    reducer = GradientReducer(model.named_parameters(), config=config)
    for step in range(3):
        model.zero_grad()
        if rank == 1 and step == 0:
            with reducer.backward_pass(count=0):
                pass
        else:
            reducer.backward(model(rows(step, rank, 0, 3)).square().mean(), count=3)
    return [p.grad.clone() for p in model.parameters()]


def test_a_rank_that_had_no_first_backward_learns_from_the_others(pool: RankPool) -> None:
    model = SharedBlock(reentrant=False)
    model(torch.cat([rows(2, r, 0, 3) for r in range(2)])).square().mean().backward()
    for grads in pool.run(2, first_backward_without_data):
        assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12


def toggling(rank: int) -> tuple[int, bool]:
    """Two nets of which one is frozen in turn, as a GAN's are; a third part is thawed once."""
    model = Branches()
    model.stem.requires_grad_(False)
    plans = {"n": 0}
    real = GradientReducer._set_up

    def counting(self: GradientReducer) -> None:
        plans["n"] += 1
        real(self)

    with mock.patch.object(GradientReducer, "_set_up", counting):
        reducer = GradientReducer([(n, p) for n, p in model.named_parameters() if "unused" not in n])
        for step in range(10):
            if step == 4:
                model.stem.requires_grad_(True)
            on, off = ("left", "right") if step % 2 else ("right", "left")
            getattr(model, on).requires_grad_(True)
            getattr(model, off).requires_grad_(False)
            model.zero_grad()
            reducer.backward(model(rows(step, rank, 0, 2), on).square().mean(), count=2)
    return plans["n"], model.stem.weight.grad is not None


def test_toggling_does_not_plan_anew(pool: RankPool) -> None:
    for plans, thawed in pool.run(2, toggling):
        assert plans == 2  # at the start, and at the thaw
        assert thawed


def test_a_count_beyond_what_the_ballot_carries_is_refused() -> None:
    reducer = GradientReducer(mlp().named_parameters())
    with pytest.raises(CountError, match="at most 1,099,511,627,776"):
        reducer.backward(torch.zeros(()), count=2**41)


def begin_window(rank: int, counts: list[int]) -> tuple[dict, dict]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    reducer.agree_reference(counts[rank])
    with reducer.no_sync():
        reducer.backward(mean_loss(model, rows(0, rank, 0, counts[rank])), counts[rank])
    return reducer.state_dict(), reducer.window_state()


def end_window(rank: int, counts: list[int], state: dict, window: dict) -> list[Tensor]:
    model = mlp()
    reducer = GradientReducer(model.named_parameters(), config=SMALL_BUCKETS)
    reducer.load_state_dict(state)
    reducer.resume_window(window)
    reducer.backward(mean_loss(model, rows(0, rank, 1, counts[rank])), counts[rank])
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (4, 2)])
def test_a_window_goes_on_with_another_number_of_ranks(pool: RankPool, before: int, after: int) -> None:
    counts = [4, 1, 3, 2]
    state, window = pool.run(before, begin_window, counts)[0]
    grads = pool.run(after, end_window, counts, state, window)[0]
    model = mlp()
    seen = [rows(0, r, j, counts[r]) for j, ranks in enumerate((before, after)) for r in range(ranks)]
    mean_loss(model, torch.cat(seen)).backward()
    assert relative_error(grads, [p.grad for p in model.parameters()]) < 1e-12
