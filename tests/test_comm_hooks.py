"""torch DDP's communication hooks, unmodified, over our buckets; compared with the same hook under torch DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_runs import Module, flat, loader, loss_of, net, optimizer_of, relative_error, single_device, trainer_of
from rank_pool import RankFailureError, RankPool
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_dp import BucketedDDPStrategy, GradientReducer, ReducerConfig

SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.001}
EQUAL = [[3, 3, 3]] * 8
RAGGED = [[4, 1, 3], [2, 5, 1], [3, 3, 2], [1, 2, 4], [5, 1, 1], [2, 2, 3], [1, 4, 2]]


class Counts:
    """A hook of a user's own: sums by itself, keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, int, int]] = []

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        assert state == "mine"
        numel = sum(gradient.numel() for gradient in bucket.gradients())
        assert numel == bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        self.seen.append((bucket.index(), bucket.is_last(), numel, len(bucket.parameters())))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


def fit(rank: int, counts: list, k: int, options: dict[str, Any]) -> tuple[Tensor, bytes]:
    module = Module("sgd")
    strategy = BucketedDDPStrategy(**SMALL_BUCKETS, **options)
    trainer = trainer_of(strategy, len(counts[0]), max_epochs=2, accumulate_grad_batches=k)
    trainer.fit(module, loader(counts, rank))
    return flat(module.net), module.digests[-1]


def fit_with(rank: int, counts: list, k: int, which: str) -> tuple[Tensor, bytes, Any]:
    hook = Counts()
    options: dict[str, dict[str, Any]] = {
        "all-reduce": {"ddp_comm_hook": default_hooks.allreduce_hook},
        "own": {"ddp_comm_hook": hook, "ddp_comm_state": "mine"},
        "bf16": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
        "fp16": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        "wrapped": {
            "ddp_comm_hook": default_hooks.allreduce_hook,
            "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
        },
    }
    return *fit(rank, counts, k, options[which]), hook.seen


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("which", ["all-reduce", "own"])
def test_a_hook_that_averages_gives_the_single_device_step(pool: RankPool, which: str, k: int) -> None:
    """Counts stay exact, as gradients are weighted before the hook sees them."""
    results = pool.run(3, fit_with, RAGGED, k, which)
    right = single_device(RAGGED, "samples", "sgd", k, 2)
    for weights, digest, seen in results:
        assert relative_error(weights, right) < 1e-12
        assert digest == results[0][1]
        if which == "own":
            buckets = 1 + max(index for index, _, _, _ in seen)
            assert buckets > 1
            steps = 2 * -(-len(RAGGED) // k)
            assert [(i, last) for i, last, _, _ in seen] == [(i, i == buckets - 1) for i in range(buckets)] * steps


@pytest.mark.parametrize(
    ("which", "low", "high"), [("bf16", 1e-6, 2e-2), ("fp16", 1e-7, 4e-3), ("wrapped", 1e-6, 2e-2)]
)
def test_compression_costs_the_digits_of_its_dtype_and_no_more(
    pool: RankPool, which: str, low: float, high: float
) -> None:
    results = pool.run(3, fit_with, RAGGED, 1, which)
    right = single_device(RAGGED, "samples", "sgd", 1, 2)
    for weights, digest, _ in results:
        assert low < relative_error(weights, right) < high
        assert digest == results[0][1]


def power_sgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, random_seed=5)


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {key: torch.randn(6, width, generator=generator) for key, width in (("x", 10), ("y", 3))}


def train_beside_ddp(rank: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """One bucket for all, so that both have the same matrices in the same order: ours, DDP's, and DDP's without."""
    finals = []
    for kind in ("ours", "ddp", "plain"):
        model = net().float()
        optimizer = optimizer_of("sgd", model.parameters())
        if kind == "ours":
            config = ReducerConfig(100, 100, comm_hook=powerSGD_hook.powerSGD_hook, comm_state=power_sgd_state())
            reducer = GradientReducer(model.named_parameters(), config=config)
        else:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=100)
            if kind == "ddp":
                wrapped.register_comm_hook(power_sgd_state(), powerSGD_hook.powerSGD_hook)
        for step in range(steps):
            optimizer.zero_grad()
            batch = batch_of(step, rank)
            if kind == "ours":
                reducer.backward(loss_of(model, batch), count=6)
            else:
                loss_of(wrapped, batch).backward()
            optimizer.step()
        if kind == "ours":
            reducer.detach()
        finals.append(flat(model))
    return tuple(finals)


def test_power_sgd_does_what_it_does_under_torch_ddp(pool: RankPool) -> None:
    results = pool.run(2, train_beside_ddp, 12)
    for ours, ddp, plain in results:
        assert relative_error(ours, ddp) < 1e-5, "float32"
        assert relative_error(plain, ddp) > 1e-3, "negative control: the compression is felt"
        assert torch.equal(ours, results[0][0])


class Poisoned(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 2 else loss


def fit_poisoned(rank: int) -> tuple[Tensor, int]:
    module = Poisoned("sgd")
    strategy = BucketedDDPStrategy(ddp_comm_hook=default_hooks.allreduce_hook)
    trainer = trainer_of(strategy, 2, max_epochs=1)
    trainer.fit(module, loader([by_rank[:2] for by_rank in RAGGED], rank))
    return flat(module.net), strategy.skipped_steps


def test_the_vote_works_with_a_hook(pool: RankPool) -> None:
    right = single_device([by_rank[:2] for by_rank in RAGGED], "samples", "sgd", 1, 1, skip={2})
    for weights, skipped in pool.run(2, fit_poisoned):
        assert skipped == 1
        assert relative_error(weights, right) < 1e-12


def fit_failing(rank: int) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        raise ArithmeticError("the hook cannot go on")

    fit(rank, EQUAL, 1, {"ddp_comm_hook": hook})


def test_an_error_of_the_hook_is_seen(pool: RankPool) -> None:
    with pytest.raises(RankFailureError, match="the hook cannot go on"):
        pool.run(3, fit_failing)
