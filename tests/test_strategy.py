"""Trainer(strategy="bucketed_ddp") on 1 to 4 ranks, against one process in float64 and against torch DDP."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning_runs import (
    Counts,
    Module,
    flat,
    loader,
    loss_of,
    optimizer_of,
    relative_error,
    samples,
    single_device,
    trainer_of,
    whole_batch,
)
from rank_pool import RankFailureError, RankPool
from torch import Tensor, nn

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import ConfigurationError, NonFiniteGradientError, UnreducedGradientError

SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.001}

# Seven micro-batches an epoch: with k = 2 and 3 the last window is short.
RAGGED: Counts = [(4, 1, 3, 2), (1, 4, 2, 2), (3, 3, 1, 5), (2, 6, 4, 1), (5, 1, 1, 1), (4, 4, 4, 4), (1, 2, 3, 4)]
EQUAL: Counts = [(4, 4, 4, 4)] * 7
TOKENS: Counts = [(7, 1, 5, 2), (0, 12, 3, 9), (7, 1, 0, 12), (1, 1, 9, 4), (12, 2, 2, 6), (3, 0, 7, 7), (2, 11, 1, 1)]


def first_ranks(counts: Counts, world_size: int) -> Counts:
    return [by_rank[:world_size] for by_rank in counts]


def steps_of(k: int) -> int:
    return -(-len(RAGGED) // k)


def fit(rank: int, strategy: Any, counts: Counts, kind: str, optimizer: str, k: int, epochs: int, **kwargs: Any) -> Any:
    if isinstance(strategy, dict):
        strategy = BucketedDDPStrategy(**strategy)
    module = Module(optimizer)
    trainer = trainer_of(strategy, len(counts[0]), max_epochs=epochs, accumulate_grad_batches=k, **kwargs)
    trainer.fit(module, loader(counts, rank, kind))
    return flat(module.net), module.digests, trainer.global_step


def fit_clipped(rank: int, counts: Counts, clip: float) -> Any:
    return fit(rank, SMALL_BUCKETS, counts, "samples", "sgd", 2, 5, gradient_clip_val=clip)


# ------------------------------------------------------------------------------------------- the single-device step


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ragged_batches_and_short_windows_equal_one_device(
    pool: RankPool, world_size: int, k: int, optimizer: str
) -> None:
    counts = first_ranks(RAGGED, world_size)
    epochs = -(-20 // steps_of(k))
    results = pool.run(world_size, fit, SMALL_BUCKETS, counts, "samples", optimizer, k, epochs)
    right = single_device(counts, "samples", optimizer, k, epochs)
    for mine, digests, steps in results:
        assert steps >= 20
        assert relative_error(mine, right) < 1e-12
        assert digests == results[0][1], "replicas differ after some step"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_token_counts_equal_one_device(pool: RankPool, k: int, optimizer: str) -> None:
    epochs = -(-20 // steps_of(k))
    results = pool.run(4, fit, {"count": "tokens", **SMALL_BUCKETS}, TOKENS, "tokens", optimizer, k, epochs)
    right = single_device(TOKENS, "tokens", optimizer, k, epochs)
    for mine, digests, _ in results:
        assert relative_error(mine, right) < 1e-12
        assert digests == results[0][1]


def test_token_counts_7_1_0_12_over_two_ranks_and_two_micro_batches(pool: RankPool) -> None:
    counts = [(7, 1), (0, 12)]
    results = pool.run(2, fit, {"count": "tokens"}, counts, "tokens", "sgd", 2, 20)
    assert relative_error(results[0][0], single_device(counts, "tokens", "sgd", 2, 20)) < 1e-12


def without_zeros(counts: Counts) -> Counts:
    """Stock DDP takes the NaN loss of a batch without tokens into all weights; this shows the weighting alone."""
    return [[max(1, n) for n in by_rank] for by_rank in counts]


NEGATIVE = {
    "ragged": ("samples", RAGGED, 1),
    "ragged window": ("samples", RAGGED, 3),
    "equal batches, short window": ("samples", EQUAL, 3),
    "tokens": ("tokens", without_zeros(TOKENS), 1),
    "tokens, window": ("tokens", without_zeros(TOKENS), 2),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", NEGATIVE)
@pytest.mark.parametrize("world_size", [2, 4])
def test_stock_ddp_misses_by_more_than_a_thousandth(pool: RankPool, world_size: int, case: str, optimizer: str) -> None:
    """Negative control: the data of these tests does tell a wrong weighting from a right one."""
    kind, counts, k = NEGATIVE[case]
    counts = first_ranks(counts, world_size)
    epochs = -(-20 // steps_of(k))
    right = single_device(counts, kind, optimizer, k, epochs)
    stock = pool.run(world_size, fit, "ddp", counts, kind, optimizer, k, epochs)[0][0]
    assert relative_error(stock, right) > 1e-3
    count = {"count": kind}
    mine = pool.run(world_size, fit, {**count, **SMALL_BUCKETS}, counts, kind, optimizer, k, epochs)[0][0]
    assert relative_error(mine, right) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("world_size", "k"), [(2, 1), (3, 1), (4, 1), (2, 7)])
def test_equal_counts_equal_torch_ddp(pool: RankPool, world_size: int, k: int, optimizer: str) -> None:
    counts = first_ranks(EQUAL, world_size)
    stock = pool.run(world_size, fit, "ddp", counts, "samples", optimizer, k, 3)[0][0]
    mine = pool.run(world_size, fit, "bucketed_ddp", counts, "samples", optimizer, k, 3)[0][0]
    assert relative_error(mine, stock) < 1e-12


def test_count_equal_is_torch_ddp_on_ragged_batches_too(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)
    stock = pool.run(2, fit, "ddp", counts, "samples", "sgd", 1, 3)[0][0]
    mine = pool.run(2, fit, {"count": "equal"}, counts, "samples", "sgd", 1, 3)[0][0]
    assert relative_error(mine, stock) < 1e-12


def test_clipping_sees_the_final_average(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)
    mine = pool.run(2, fit_clipped, counts, 0.01)[0][0]
    assert relative_error(mine, single_device(counts, "samples", "sgd", 2, 5, clip=0.01)) < 1e-12
    assert relative_error(mine, single_device(counts, "samples", "sgd", 2, 5)) > 1e-3  # the clip does clip


class OwnCount(Module):
    """Trains on the first half of each batch only, and says so."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        half = {key: value[: len(value) // 2] for key, value in batch.items()}
        self.trainer.strategy.set_count(len(half["x"]))
        return loss_of(self.net, half)


def fit_own_count(rank: int, counts: Counts) -> Tensor:
    module = OwnCount()
    trainer_of("bucketed_ddp", 2, max_epochs=4).fit(module, loader(counts, rank))
    return flat(module.net)


def test_training_step_can_say_its_own_count(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)  # some halves are empty
    from lightning_runs import net

    model = net()
    opt = optimizer_of("sgd", model.parameters())
    for _ in range(4):
        for i, by_rank in enumerate(counts):
            parts = [samples(i, r, n) for r, n in enumerate(by_rank)]
            batch = {key: torch.cat([part[key][: len(part[key]) // 2] for part in parts]) for key in parts[0]}
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
    assert relative_error(pool.run(2, fit_own_count, counts)[0], flat(model)) < 1e-12


# ------------------------------------------------------------------------------------------- what is sent


def count_messages(rank: int, counts: Counts, k: int) -> tuple:
    """Collectives that reach torch.distributed, by phase: within an accumulating micro-batch, or with a step."""
    kinds = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")
    accumulating: list[str] = []
    stepping: list[tuple[str, int]] = []
    strategy = BucketedDDPStrategy(**SMALL_BUCKETS)
    inside = {"training_step": False}

    class Watched(Module):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            inside["training_step"] = True
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            inside["training_step"] = False

    def spy(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside["training_step"]:
                if strategy.reducer._sync:
                    nbytes = args[0].numel() * args[0].element_size() if isinstance(args[0], Tensor) else 0
                    stepping.append((name, nbytes))
                else:
                    accumulating.append(name)
            return real(*args, **kwargs)

        return call

    trainer = trainer_of(strategy, len(counts[0]), max_epochs=2, accumulate_grad_batches=k)
    with mock.patch.multiple(dist, **{name: spy(name) for name in kinds}):
        trainer.fit(Watched(), loader(counts, rank))
    report = strategy.report()
    return accumulating, stepping, report


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_message_a_bucket_and_one_ballot_a_step_and_none_between(pool: RankPool, world_size: int, k: int) -> None:
    steps = 2 * steps_of(k)
    for accumulating, stepping, report in pool.run(world_size, count_messages, first_ranks(RAGGED, world_size), k):
        assert accumulating == []
        assert report.buckets > 1
        reduced = [nbytes for name, nbytes in stepping if name == "all_reduce"]
        # The observed orders are exchanged in the first step.
        assert [name for name, _ in stepping if name != "all_reduce"] == ["all_gather_object"]
        assert len(reduced) == steps * (report.buckets + 1)
        assert report.messages_per_step == report.buckets + 1
        gradient = sum(p.numel() * 8 for p in Module().parameters())
        words = 8 * world_size  # each rank's fingerprint of its batch, in the first 8 steps of an epoch: here in all
        ballot = 16 + words + 8 * -(-(world_size + len(list(Module().parameters()))) // 4)
        assert sum(reduced) == steps * (gradient + ballot)
        ring = 2 * (world_size - 1) / world_size
        assert report.formula_bytes_per_step == pytest.approx(ring * gradient)
        assert report.bytes_per_step == pytest.approx(ring * (gradient + ballot))
        assert report.steps == steps
        assert report.skipped_steps == 0
        assert report.count == 2 * sum(sum(by_rank) for by_rank in first_ranks(RAGGED, world_size))
        assert report.exposed_seconds > 0


# ------------------------------------------------------------------------------------------- the vote


class Poisoned(Module):
    """One rank's loss is not finite at some batches; a scheduler moves with every step."""

    def __init__(self, culprit: int, batches: tuple[int, ...], value: float = float("nan")) -> None:
        super().__init__("adamw")
        self.culprit, self.batches, self.value = culprit, batches, value
        self.scheduler_epochs: list[int] = []
        self.states: list[list[Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == self.culprit and batch_idx in self.batches:
            loss = loss * self.value
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # moves, and changes nothing
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.scheduler_epochs.append(self.lr_schedulers().last_epoch)
        state = self.optimizers().optimizer.state_dict()["state"]
        self.states.append([v.clone() for entry in state.values() for v in entry.values()])


def fit_poisoned(rank: int, counts: Counts, k: int, culprit: int, batches: tuple, value: float, **options: Any) -> dict:
    strategy = BucketedDDPStrategy(**SMALL_BUCKETS, **options)
    module = Poisoned(culprit, batches, value)
    trainer = trainer_of(strategy, len(counts[0]), max_epochs=1, accumulate_grad_batches=k)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(counts, rank))
        except NonFiniteGradientError as raised:
            error = str(raised)
    return {
        "weights": flat(module.net),
        "digests": module.digests,
        "scheduler": module.scheduler_epochs,
        "states": module.states,
        "warnings": [str(w.message) for w in caught if "skipped" in str(w.message)],
        "order warnings": [str(w.message) for w in caught if "lr_scheduler.step()" in str(w.message)],
        "error": error,
        "skipped": strategy.skipped_steps,
        "global_step": trainer.global_step,
    }


def fit_poisoned_with(rank: int, options: dict, *args: Any) -> dict:
    return fit_poisoned(rank, *args, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (3, 2), (4, 1)])
def test_all_ranks_skip_the_step_and_leave_everything_as_it_was(
    pool: RankPool, world_size: int, culprit: int, value: float
) -> None:
    counts = first_ranks(RAGGED, world_size)
    results = pool.run(world_size, fit_poisoned, counts, 1, culprit, (2,), value)
    right = single_device(counts, "samples", "adamw", 1, 1, skip={2})
    for rank, result in enumerate(results):
        assert result["skipped"] == 1
        assert result["global_step"] == len(counts)
        assert result["digests"][2] == result["digests"][1], "weights moved in the skipped step"
        assert result["digests"] == results[0]["digests"]
        for before, after in zip(result["states"][1], result["states"][2], strict=True):
            assert torch.equal(before, after), "optimizer state moved in the skipped step"
        assert result["scheduler"] == [1, 2, 2, 3, 4, 5, 6]
        assert relative_error(result["weights"], right) < 1e-12
        assert len(result["warnings"]) == (1 if rank == 0 else 0)
    message = results[0]["warnings"][0]
    assert message.startswith("step 2, batch 2: non-finite gradient: rank")
    assert f"rank {culprit}: net.4." in message
    # An infinite loss makes infinite gradients, and inf * 0 = NaN further down.
    assert "NaN" in message or "Inf" in message
    assert "batch 2" in message
    assert "skipped on all ranks (1 in a row" in message


def test_a_bad_micro_batch_spoils_its_window_and_no_other(pool: RankPool) -> None:
    counts = first_ranks(RAGGED, 2)
    results = pool.run(2, fit_poisoned, counts, 3, 1, (3,), float("nan"))  # windows 0-2, 3-5, 6
    for result in results:
        assert result["skipped"] == 1
        assert relative_error(result["weights"], single_device(counts, "samples", "adamw", 3, 1, skip={1})) < 1e-12
    assert "batch 3 to batch 5" in results[0]["warnings"][0]


def test_a_skip_in_the_first_step_warns_of_nothing_else(pool: RankPool) -> None:
    results = pool.run(2, fit_poisoned, first_ranks(RAGGED, 2), 1, 1, (0,), float("nan"))
    assert [result["order warnings"] for result in results] == [[], []]
    assert results[0]["scheduler"] == [0, 1, 2, 3, 4, 5, 6]


def test_stock_ddp_takes_the_nan_into_every_weight(pool: RankPool) -> None:
    """Negative control."""
    for weights in pool.run(2, fit_poisoned_stock):
        assert not torch.isfinite(weights).any()


def fit_poisoned_stock(rank: int) -> Tensor:
    module = Poisoned(1, (2,))
    trainer_of("ddp", 2, max_epochs=1).fit(module, loader(first_ranks(RAGGED, 2), rank))
    return flat(module.net)


def test_too_many_skips_in_a_row_raise_on_all_ranks(pool: RankPool) -> None:
    args = ({"max_consecutive_skips": 3}, first_ranks(RAGGED, 3), 1, 2, (1, 3, 4, 5), float("nan"))
    results = pool.run(3, fit_poisoned_with, *args)
    for result in results:  # batch 1 is followed by a good one, so the third in a row is batch 5
        assert result["error"].startswith("step 5, batch 5: non-finite gradient: rank 2: net.4.")
        assert "3 steps in a row were skipped (max_consecutive_skips=3)" in result["error"]
        assert result["skipped"] == 4
    assert len({result["error"] for result in results}) == 1


def test_policy_raise_raises_at_the_first_one_on_all_ranks(pool: RankPool) -> None:
    results = pool.run(2, fit_poisoned_with, {"nonfinite": "raise"}, first_ranks(RAGGED, 2), 1, 0, (2,), float("inf"))
    right = single_device(first_ranks(RAGGED, 2)[:2], "samples", "adamw", 1, 1)
    for result in results:
        assert result["error"].startswith("step 2, batch 2: non-finite gradient: rank 0: net.4.")
        assert relative_error(result["weights"], right) < 1e-12


def test_policy_off_does_not_look(pool: RankPool) -> None:
    results = pool.run(2, fit_poisoned_with, {"nonfinite": "off"}, first_ranks(RAGGED, 2), 1, 0, (2,), float("nan"))
    for result in results:
        assert result["skipped"] == 0
        assert not torch.isfinite(result["weights"]).any()


class CountsNothing(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.strategy.set_count(0)
        return super().training_step(batch, batch_idx)


def fit_counting_nothing(rank: int) -> tuple:
    module = CountsNothing("adamw")
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1)
    trainer.fit(module, loader(first_ranks(RAGGED, 2), rank))
    return flat(module.net), trainer.strategy.skipped_steps


def test_a_step_without_any_count_is_skipped(pool: RankPool) -> None:
    right = single_device(first_ranks(RAGGED, 2), "samples", "adamw", 1, 1, skip={1})
    for weights, skipped in pool.run(2, fit_counting_nothing):
        assert skipped == 1
        assert relative_error(weights, right) < 1e-12


class Scaled(Module):
    """float32 under a GradScaler; rank 1's first loss overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()
        self.scales: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.net, {key: value.float() for key, value in batch.items()})
        return loss * float("inf") if self.global_rank == 1 and batch_idx == 0 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def fit_scaled(rank: int) -> tuple:
    from lightning.pytorch.plugins import MixedPrecision

    class Float32WithScaler(MixedPrecision):
        """The scaler's part of 16-mixed; the CPU's float16 arithmetic is not the subject."""

        def forward_context(self) -> Any:
            import contextlib

            return contextlib.nullcontext()

    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    plugin = Float32WithScaler("16-mixed", "cpu", scaler)
    module = Scaled()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1, precision=None, plugins=[plugin])
    trainer.fit(module, loader(first_ranks(RAGGED, 2), rank))
    return flat(module.net), module.scales, trainer.strategy.skipped_steps


def test_with_a_grad_scaler_the_scaler_skips_alike_on_all_ranks(pool: RankPool) -> None:
    results = pool.run(2, fit_scaled)
    for weights, scales, skipped in results:
        assert scales == results[0][1]
        assert set(scales) == {512.0}  # halved in the first step, by every rank's scaler
        assert skipped == 1
        assert torch.equal(weights, results[0][0])
    right = single_device(first_ranks(RAGGED, 2), "samples", "sgd", 1, 1, skip={0})
    assert relative_error(results[0][0], right) < 1e-5  # float32


# ------------------------------------------------------------------------------------------- manual optimization


class Manual(Module):
    """Two micro-batches a step by hand, or two losses a step, or a forgotten ``manual_backward``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        opt = self.optimizers()
        if self.how == "accumulate":
            if batch_idx % 2 == 0:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss_of(self.net, batch) / 2)
                return
            self.manual_backward(loss_of(self.net, batch) / 2)
        elif self.how == "two backwards":
            self.manual_backward(loss_of(self.net, batch))
            self.manual_backward(0.1 * self.net(batch["x"]).square().mean())
        elif self.how == "plain backward":
            loss_of(self.net, batch).backward()
        opt.step()
        opt.zero_grad()


def fit_manual(rank: int, how: str) -> Tensor:
    module = Manual(how)
    trainer_of("bucketed_ddp", 2, max_epochs=2).fit(module, loader(first_ranks(RAGGED, 2)[:6], rank))
    return flat(module.net)


def test_manual_accumulation_equals_one_device(pool: RankPool) -> None:
    right = single_device(first_ranks(RAGGED, 2)[:6], "samples", "sgd", 2, 2)
    for mine in pool.run(2, fit_manual, "accumulate"):
        assert relative_error(mine, right) < 1e-12


def test_two_backwards_before_one_step_equal_one_device(pool: RankPool) -> None:
    from lightning_runs import net

    model = net()
    opt = optimizer_of("sgd", model.parameters())
    for _ in range(2):
        for i, by_rank in enumerate(first_ranks(RAGGED, 2)[:6]):
            batch = whole_batch(i, by_rank)
            opt.zero_grad()
            (loss_of(model, batch) + 0.1 * model(batch["x"]).square().mean()).backward()
            opt.step()
    for mine in pool.run(2, fit_manual, "two backwards"):
        assert relative_error(mine, flat(model)) < 1e-12


def fit_plain_backward(rank: int) -> str:
    try:
        fit_manual(rank, "plain backward")
    except UnreducedGradientError as error:
        return str(error)
    return ""


def test_a_plain_backward_is_an_error_on_every_rank_not_silent_divergence(pool: RankPool) -> None:
    for rank, message in enumerate(pool.run(2, fit_plain_backward)):
        assert message.startswith(f"rank {rank}, step 0, batch 0: gradients were made by loss.backward()")


# ------------------------------------------------------------------------------------------- life of a trainer


def collectives_and_hooks(rank: int) -> dict:
    """fit, fit again, test: what each leaves behind."""
    counts = first_ranks(RAGGED, 2)
    module = Module()
    module.test_step = lambda batch, batch_idx: None
    sizes = []
    calls = {"n": 0}
    real = dist.all_reduce

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        return real(*args, **kwargs)

    states = []
    with mock.patch.object(dist, "all_reduce", spy):
        for _ in range(2):
            calls["n"] = 0
            trainer = trainer_of("bucketed_ddp", 2, max_epochs=2)
            trainer.fit(module, loader(counts, rank))
            sizes.append(calls["n"])
            states.append(flat(module.net))
        same_trainer_before = flat(module.net)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(counts, rank))
        trainer.test(module, loader(counts, rank), verbose=False)
    return {
        "all_reduces": sizes,
        "weights": states,
        "moved": not torch.equal(same_trainer_before, flat(module.net)),
        "last": flat(module.net),
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()),
        "patched": "update_lr_schedulers" in vars(trainer.fit_loop.epoch_loop),
        "reducer": trainer.strategy.reducer,
        "attributes": sorted(set(vars(module)) - set(vars(Module()))),
    }


def test_a_second_fit_and_a_test_double_nothing_and_leave_nothing(pool: RankPool) -> None:
    from lightning_runs import net

    counts = first_ranks(RAGGED, 2)
    model = net()
    right = []
    for _ in range(3):  # a fresh optimizer for each fit, as Lightning makes
        opt = optimizer_of("sgd", model.parameters())
        for _ in range(2):
            for i, by_rank in enumerate(counts):
                opt.zero_grad()
                loss_of(model, whole_batch(i, by_rank)).backward()
                opt.step()
        right.append(flat(model))
    for result in pool.run(2, collectives_and_hooks):
        assert result["all_reduces"][0] == result["all_reduces"][1]
        assert relative_error(result["weights"][0], right[0]) < 1e-12
        assert relative_error(result["weights"][1], right[1]) < 1e-12
        assert result["moved"]
        assert relative_error(result["last"], right[2]) < 1e-12
        assert result["hooks"] == 0
        assert not result["patched"]
        assert result["reducer"] is None
        assert result["attributes"] == ["_hparams", "test_step"]  # Lightning's, and this test's


class CopiesItself(Module):
    """Copies and pickles itself within fit, when hooks and gradients are in place."""

    copies: list[nn.Module]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        trainer, self._trainer = self._trainer, None  # a LightningModule itself refuses to be copied with its trainer
        if batch_idx == 1:
            self.copies = [copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net)), copy.deepcopy(self)]
            self.at_copy = flat(self.net)
        self._trainer = trainer


def fit_copying(rank: int) -> tuple:
    module = CopiesItself()
    module.copies = []
    trainer_of("bucketed_ddp", 2, max_epochs=1).fit(module, loader(first_ranks(RAGGED, 2), rank))
    copies = [getattr(copied, "net", copied) for copied in module.copies]
    equal = [torch.equal(flat(copied), module.at_copy) for copied in copies]
    hooks = [sum(len(p._post_accumulate_grad_hooks or ()) for p in copied.parameters()) for copied in copies]
    apart = [not torch.equal(flat(copied), flat(module.net)) for copied in copies]
    again = pickle.loads(pickle.dumps(module))
    return equal, hooks, apart, torch.equal(flat(again.net), flat(module.net))


def test_the_module_can_be_pickled_and_copied_in_fit_and_after(pool: RankPool) -> None:
    for equal, hooks, apart, after in pool.run(2, fit_copying):
        assert equal == [True] * 3
        assert hooks == [0] * 3
        assert apart == [True] * 3
        assert after


def fit_and_resume(rank: int, folder: str) -> dict:
    """Four epochs in one go; two, a checkpoint, and two more from it. Rank 1's gradient is NaN at batch 1."""
    counts = first_ranks(RAGGED, 3)
    kwargs = {"accumulate_grad_batches": 2}

    def run(epochs: int, resume_from: str | None, save: bool) -> tuple:
        strategy = BucketedDDPStrategy(**SMALL_BUCKETS)
        module = Poisoned(1, (1,))
        callbacks = [ModelCheckpoint(folder, filename="at", save_on_train_epoch_end=True)] if save else []
        trainer = trainer_of(strategy, 3, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=save, **kwargs)
        trainer.fit(module, loader(counts, rank), ckpt_path=resume_from)
        return module, trainer

    whole, whole_trainer = run(4, None, False)
    run(2, None, True)
    resumed, trainer = run(4, f"{folder}/at.ckpt", False)
    checkpoint = torch.load(f"{folder}/at.ckpt", weights_only=True)
    return {
        "same": torch.equal(flat(whole.net), flat(resumed.net)),
        "moved": not torch.equal(flat(Module().net), flat(resumed.net)),
        "scheduler": (whole.scheduler_epochs[-1], resumed.scheduler_epochs[-1]),
        "skipped": (whole_trainer.strategy.skipped_steps, trainer.strategy.skipped_steps),
        "steps": (whole_trainer.strategy.report().steps, trainer.strategy.report().steps),
        "count": (whole_trainer.strategy.report().count, trainer.strategy.report().count),
        "saved": checkpoint["lightning_dp"],
    }


def test_a_resumed_run_is_bit_identical_and_keeps_its_counters(pool: RankPool, tmp_path: Path) -> None:
    for result in pool.run(3, fit_and_resume, str(tmp_path)):
        assert result["same"]
        assert result["moved"]
        assert result["skipped"] == (4, 4)  # one window an epoch
        assert result["steps"] == (12, 12)
        assert result["scheduler"] == (12, 12)
        samples_seen = 4 * sum(sum(by_rank) for by_rank in first_ranks(RAGGED, 3))
        assert result["count"] == (samples_seen, samples_seen)
        assert result["saved"]["progress"]["skipped"] == 2
        assert result["saved"]["progress"]["attempted"] == 8


def fit_from_stock_checkpoint(rank: int, folder: str) -> bool:
    """A checkpoint of stock DDP goes on under bucketed_ddp and the other way round."""
    counts = first_ranks(EQUAL, 2)

    def run(strategy: str, epochs: int, resume_from: str | None, name: str) -> Tensor:
        module = Module()
        callback = ModelCheckpoint(folder, filename=name, save_on_train_epoch_end=True)
        trainer = trainer_of(strategy, 2, max_epochs=epochs, callbacks=[callback], enable_checkpointing=True)
        trainer.fit(module, loader(counts, rank), ckpt_path=resume_from)
        return flat(module.net)

    whole = run("ddp", 4, None, "whole")
    run("ddp", 2, None, "stock")
    mixed = run("bucketed_ddp", 3, f"{folder}/stock.ckpt", "ours")
    mixed = run("ddp", 4, f"{folder}/ours.ckpt", "last")
    return relative_error(mixed, whole) < 1e-12


def test_checkpoints_are_exchangeable_with_stock_ddp(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, fit_from_stock_checkpoint, str(tmp_path)) == [True, True]


def start_from_different_weights(rank: int) -> tuple:
    module = Module()
    seed_everything(rank, verbose=False)
    module.net = nn.Sequential(nn.Linear(10, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    module.net[1].running_mean += rank
    at_start = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            at_start["state"] = {name: value.clone() for name, value in pl_module.state_dict().items()}

    before = flat(module.net)
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1, callbacks=[Look()])
    trainer.fit(module, loader(first_ranks(EQUAL, 2), rank))
    return before, at_start["state"]


def test_rank_zeros_weights_and_buffers_are_everyones_at_the_start(pool: RankPool) -> None:
    (before0, start0), (before1, start1) = pool.run(2, start_from_different_weights)
    assert not torch.equal(before0, before1)
    for name, value in start0.items():
        assert torch.equal(value, start1[name]), name
    assert torch.equal(start1["net.1.running_mean"], torch.zeros(3, dtype=torch.float64))


def fit_with_different_models(rank: int) -> str:
    module = Module()
    module.net = nn.Linear(10, 3 + rank).double()
    try:
        trainer_of("bucketed_ddp", 2, max_epochs=1).fit(module, loader(first_ranks(EQUAL, 2), rank))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_different_models_on_ranks_are_refused(pool: RankPool) -> None:
    for message in pool.run(2, fit_with_different_models):
        assert message.startswith("StructureMismatchError: the model differs between ranks: rank 1 has 'net.weight:")


# ------------------------------------------------------------------------------------------- how it is selected


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
    assert name in StrategyRegistry
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, BucketedDDPStrategy)
    assert strategy._start_method == start_method


def test_the_name_and_the_object_give_the_same_trainer() -> None:
    def described(strategy: Any) -> tuple:
        trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        connector = trainer._accelerator_connector
        return (
            type(trainer.strategy),
            type(trainer.strategy.launcher),
            type(trainer.strategy.cluster_environment),
            type(trainer.accelerator),
            trainer.world_size,
            connector.is_distributed,
            connector.use_distributed_sampler,
            trainer.strategy._timeout,
            trainer.strategy._settings,
        )

    assert described("bucketed_ddp") == described(BucketedDDPStrategy())
    assert issubclass(BucketedDDPStrategy, DDPStrategy)  # Lightning tests the type before it injects samplers


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from lightning_runs import *


class OfThisRank(Batches):
    def __init__(self):
        pass

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return samples(index, dist.get_rank(), 2 + dist.get_rank())


if __name__ == "__main__":
    module = Module()
    trainer = trainer_of({name!r}, 2, max_epochs=2)
    trainer.fit(module, DataLoader(OfThisRank(), batch_size=None))
    if trainer.global_rank == 0:
        print("weights", flat(module.net).sum().item(), trainer.world_size)
"""


@pytest.mark.parametrize("name", ["bucketed_ddp", "bucketed_ddp_spawn", "bucketed_ddp_fork"])
def test_every_way_to_start_ranks_trains(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), name=name))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert len(lines) == 1
    _, total, world_size = lines[0].split()
    assert world_size == "2"
    right = single_device([(2, 3)] * 7, "samples", "sgd", 1, 2)
    assert float(total) == pytest.approx(float(right.sum()), rel=1e-12)


@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_flags_for_what_is_always_so_are_accepted(flag: str) -> None:
    assert BucketedDDPStrategy(**{flag: True})._ddp_kwargs == {flag: True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bucket_cap": 1},
            "bucketed_ddp has no argument 'bucket_cap'; its own are bucket_cap_mb",
        ),
        ({"ddp_comm_hook": print, "reduce_dtype": "bf16"}, "ddp_comm_hook decides what travels"),
        ({"model_averaging_period": 2}, "model_averaging_period cannot be used with bucketed_ddp: replicas are"),
        ({"broadcast_buffers": "always"}, "broadcast_buffers='always' is not known: use one of step, eval, off"),
        ({"same_data": "ignore"}, "same_data='ignore' is not known: use one of off, warn, raise"),
        ({"on_replica_mismatch": "skip"}, "on_replica_mismatch='skip' is not known: use one of warn, raise, resync"),
        ({"check_replicas_every": -1}, "check_replicas_every must be an integer of at least 0 (0: never), got -1"),
        ({"report_unused_after": 0.5}, "report_unused_after must be an integer of at least 0 (0: never), got 0.5"),
        ({"spike_factor": 0}, "spike_factor must be a number above 0, got 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a number above 0 or 'auto', got 0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be a number above 0 or 'auto', got '25'"),
        ({"first_bucket_cap_mb": float("nan")}, "first_bucket_cap_mb must be a number above 0, got nan"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be a number above 0, got 0"),
        ({"timeout": -5}, "timeout must be a number above 0, got -5"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not known: use one of skip, raise, drop_rank, off"),
        ({"count": "words"}, "count='words' is not known: use one of samples, tokens, equal, or a function"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        BucketedDDPStrategy(**arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def bad_count(rank: int) -> str:
    strategy = BucketedDDPStrategy(count=lambda batch: 0.5)
    try:
        trainer_of(strategy, 2, max_epochs=1).fit(Module(), loader(first_ranks(EQUAL, 2), rank))
    except ValueError as error:
        return str(error)
    return ""


def test_a_count_function_that_returns_no_count_is_named_with_rank_and_batch(pool: RankPool) -> None:
    for rank, message in enumerate(pool.run(2, bad_count)):
        assert message == f"rank {rank}, step 0, batch 0: a count must be an integer of at least 0, got 0.5"


def guessed_counts(rank: int) -> str:
    def step(self: Module, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, samples(batch_idx, rank, 2))

    module = Module()
    module.training_step = step.__get__(module)
    text = StringIO()
    with redirect_stderr(text):
        trainer = trainer_of("bucketed_ddp", 2, max_epochs=2)
        warnings.simplefilter("default")
        trainer.fit(module, torch.utils.data.DataLoader(["a", "b", "c"], batch_size=None))
    return text.getvalue()


def test_a_guessed_count_is_said_once_by_rank_zero(pool: RankPool) -> None:
    first, second = pool.run(2, guessed_counts)
    assert first.count("holds no tensor to count samples by") == 1
    assert "holds no tensor" not in second


def test_a_failing_rank_is_reported_by_the_pool(pool: RankPool) -> None:
    """Negative control for all tests above: an error on one rank fails the test."""
    with pytest.raises(RankFailureError, match=r"--- rank 1\n(.|\n)*ZeroDivisionError"):
        pool.run(2, fails_on_rank_one)


def fails_on_rank_one(rank: int) -> float:
    return 1 / (1 - rank)


# ------------------------------------------------------------------------------------------- optimizers of other kinds


class AsksTwice(torch.optim.SGD):
    """Evaluates its closure again at a point nearby and steps from there, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        if loss is None:  # under Lightning's manual optimization
            return super().step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=0.1)
        closure()
        with torch.no_grad():
            for p, before in zip(parameters, saved, strict=True):
                p.copy_(before)
        return super().step()


class WithOptimizer(Module):
    def __init__(self, make: str) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return optimizer_named(self.make, self.parameters())


def optimizer_named(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sam":
        return AsksTwice(parameters, lr=0.02)
    if name == "sparse":
        return torch.optim.SparseAdam(list(parameters))
    return torch.optim.LBFGS(parameters, lr=0.3, max_iter=4, line_search_fn="strong_wolfe")


def fit_with_optimizer(rank: int, name: str) -> tuple:
    module = WithOptimizer(name)
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=2)
    trainer.fit(module, loader(first_ranks(RAGGED, 2), rank))
    return flat(module.net), module.digests, trainer.strategy.report().steps


@pytest.mark.parametrize("name", ["sam", "lbfgs"])
def test_an_optimizer_that_evaluates_its_closure_again_equals_one_device(pool: RankPool, name: str) -> None:
    from lightning_runs import net

    counts = first_ranks(RAGGED, 2)
    model = net()
    opt = optimizer_named(name, model.parameters())
    for _ in range(2):
        for i, by_rank in enumerate(counts):
            batch = whole_batch(i, by_rank)

            def closure(batch: dict[str, Tensor] = batch) -> Tensor:
                opt.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            opt.step(closure)
    results = pool.run(2, fit_with_optimizer, name)
    for weights, digests, steps in results:
        # A line search amplifies rounding; its decisions must be one device's all the same.
        assert relative_error(weights, flat(model)) < (1e-12 if name == "sam" else 1e-8)
        assert digests == results[0][1]
        assert steps == 2 * len(counts)


def refuse(rank: int, what: str) -> str:
    class TakesIterator(Module):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            raise AssertionError

    class AddsLate(Module):
        def on_train_start(self) -> None:
            self.late = nn.Parameter(torch.zeros(2, dtype=torch.float64))
            self.optimizers().optimizer.add_param_group({"params": [self.late]})

    module = {"sparse": lambda: WithOptimizer("sparse"), "iterator": TakesIterator, "late": AddsLate}[what]()
    try:
        trainer_of("bucketed_ddp", 2, max_epochs=1).fit(module, loader(first_ranks(RAGGED, 2), rank))
    except (ConfigurationError, UnreducedGradientError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "SparseAdam needs sparse gradients"),
        ("iterator", "training_step(dataloader_iter) fetches its batches itself"),
        ("late", "1 parameters of the optimizer's group 1 are none of the module's parameters as fit found them"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(pool: RankPool, what: str, message: str) -> None:
    for said in pool.run(2, refuse, what):
        assert message in said


class TwoOptimizers(Module):
    """Two nets and losses, one step each; the second loss is NaN on rank 1 at batch 2, or counts nothing there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net)
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        loss = loss_of(self.other, batch)
        if batch_idx == 2 and self.how == "nan" and self.global_rank == 1:
            loss = loss * float("nan")
        if batch_idx == 2 and self.how == "empty":
            self.trainer.strategy.set_count(0)
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return [optimizer_of("sgd", self.net.parameters()), optimizer_of("sgd", self.other.parameters())]


def fit_two_optimizers(rank: int, how: str) -> tuple:
    module = TwoOptimizers(how)
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1)
    trainer.fit(module, loader(first_ranks(RAGGED, 2), rank))
    return flat(module.net), flat(module.other), trainer.strategy.skipped_steps


def test_a_bad_gradient_holds_back_every_optimizer_until_it_is_zeroed(pool: RankPool) -> None:
    right = single_device(first_ranks(RAGGED, 2), "samples", "sgd", 1, 1, skip={2})
    for first, second, skipped in pool.run(2, fit_two_optimizers, "nan"):
        assert skipped == 2
        assert relative_error(first, right) < 1e-12
        assert relative_error(second, right) < 1e-12


def test_a_backward_without_data_does_not_discard_the_one_before(pool: RankPool) -> None:
    right = single_device(first_ranks(RAGGED, 2), "samples", "sgd", 1, 1)
    for first, _, skipped in pool.run(2, fit_two_optimizers, "empty"):
        assert skipped == 0
        assert relative_error(first, right) < 1e-12


def save_after_fit(rank: int, folder: str) -> tuple:
    counts = first_ranks(RAGGED, 3)
    whole = Poisoned(1, (1,))
    trainer_of(BucketedDDPStrategy(**SMALL_BUCKETS), 3, max_epochs=4).fit(whole, loader(counts, rank))
    trainer = trainer_of(BucketedDDPStrategy(**SMALL_BUCKETS), 3, max_epochs=2)
    trainer.fit(Poisoned(1, (1,)), loader(counts, rank))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    resumed = Poisoned(1, (1,))
    second = trainer_of(BucketedDDPStrategy(**SMALL_BUCKETS), 3, max_epochs=4)
    second.fit(resumed, loader(counts, rank), ckpt_path=f"{folder}/after.ckpt")
    return torch.equal(flat(whole.net), flat(resumed.net)), second.strategy.skipped_steps


def test_a_checkpoint_saved_after_fit_is_as_good_as_one_from_within(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(3, save_after_fit, str(tmp_path)) == [(True, 4)] * 3


def test_the_strategy_can_be_pickled_before_it_is_set_up() -> None:
    """Spawned ranks get it that way."""
    assert pickle.loads(pickle.dumps(BucketedDDPStrategy(bucket_cap_mb=3)))._settings.bucket_cap_mb == 3
