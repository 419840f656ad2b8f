"""Ranks with different amounts of data: every sample once, no hang, the single-device result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from lightning_runs import (
    WIDTH,
    Batches,
    Counts,
    Module,
    flat,
    loss_of,
    net,
    optimizer_of,
    relative_error,
    samples,
    single_device,
    trainer_of,
)
from rank_pool import RankFailureError, RankPool
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import UnevenDataError

SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.001}
TIME_LIMIT = 40  # a hang breaks it

# Batches by rank. The sizes of batches differ, too.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # name: (batches by rank, values of k)
    "4,3": ((4, 3), (1, 2, 3)),
    "7,3,5": ((7, 3, 5), (1, 2, 3)),
    "5,6": ((5, 6), (1, 2, 3, 4)),
    "0,3": ((0, 3), (1, 2, 3)),
    "1,0,0,0": ((1, 0, 0, 0), (1, 2, 3)),
}
CASES = [(name, k) for name, (_, ks) in LENGTHS.items() for k in ks]
EPOCHS = 3


def counts_of(lengths: tuple[int, ...]) -> Counts:
    """Samples by position and rank: 0 where a rank has no batch any more."""
    return [[1 + (3 * i + r) % 4 if i < length else 0 for r, length in enumerate(lengths)] for i in range(max(lengths))]


class RankBatches(Batches):
    """One rank's batches, and no empty ones in the place of those that it has not."""

    def __init__(self, counts: Counts, rank: int) -> None:
        super().__init__(counts, rank, "samples")
        self.batches = [batch for batch in self.batches if len(batch["x"])]


class Stream(IterableDataset):
    """The same without a length, or with one that lies."""

    def __init__(self, counts: Counts, rank: int) -> None:
        self.batches = RankBatches(counts, rank).batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class LyingStream(Stream):
    def __len__(self) -> int:
        return len(self.batches) + 2


def loader_of(kind: str, counts: Counts, rank: int) -> DataLoader:
    dataset = {"map": RankBatches, "iterable": Stream, "liar": LyingStream}[kind](counts, rank)
    return DataLoader(dataset, batch_size=None)


class Manual(Module):
    """Accumulates k micro-batches by hand; the last window is as long as the data leaves it."""

    def __init__(self, k: int, total: int) -> None:
        super().__init__()
        self.k, self.total = k, total
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        start = batch_idx - batch_idx % self.k
        window = min(self.k, self.total - start)
        loss = loss_of(self.net, batch) / window
        if batch_idx - start < window - 1:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(loss)
            return
        self.manual_backward(loss)
        opt = self.optimizers()
        opt.step()
        opt.zero_grad()


def fit(rank: int, strategy: Any, kind: str, counts: Counts, k: int, manual: bool) -> tuple:
    if isinstance(strategy, dict):
        strategy = BucketedDDPStrategy(**SMALL_BUCKETS, **strategy)
    module = Manual(k, len(counts)) if manual else Module()
    accumulate = {} if manual else {"accumulate_grad_batches": k}
    trainer = trainer_of(strategy, len(counts[0]), max_epochs=EPOCHS, **accumulate)
    trainer.fit(module, loader_of(kind, counts, rank))
    seen = trainer.strategy.report().count if isinstance(trainer.strategy, BucketedDDPStrategy) else None
    return flat(module.net), module.digests, trainer.global_step, seen


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(("name", "k"), CASES)
def test_uneven_lengths_equal_one_device(pool: RankPool, name: str, k: int, kind: str, manual: bool) -> None:
    lengths = LENGTHS[name][0]
    counts = counts_of(lengths)
    results = pool.run(len(lengths), fit, {}, kind, counts, k, manual, timeout=TIME_LIMIT)
    right = single_device(counts, "samples", "sgd", k, EPOCHS)
    for weights, digests, steps, seen in results:
        assert relative_error(weights, right) < 1e-12
        assert digests == results[0][1], "replicas differ after some step"
        assert steps == EPOCHS * -(-len(counts) // k)
        assert seen == EPOCHS * sum(map(sum, counts))


@pytest.mark.parametrize("uneven", ["skip", "replay"])
@pytest.mark.parametrize("kind", ["map", "iterable", "liar"])
def test_skipping_and_replaying_give_the_same(pool: RankPool, kind: str, uneven: str) -> None:
    counts = counts_of((7, 3, 5))
    results = pool.run(3, fit, {"uneven": uneven}, kind, counts, 2, False, timeout=TIME_LIMIT)
    for weights, _, _, seen in results:
        assert relative_error(weights, single_device(counts, "samples", "sgd", 2, EPOCHS)) < 1e-12
        assert seen == EPOCHS * sum(map(sum, counts))


@pytest.mark.parametrize("name", LENGTHS)
def test_stock_ddp_errs_or_hangs(pool: RankPool, name: str) -> None:
    """Negative control: what these lengths do without the lockstep."""
    lengths = LENGTHS[name][0]
    with pytest.raises(RankFailureError, match=r"onnection|zero length|imed out|no answer"):
        pool.run(len(lengths), fit, "ddp", "map", counts_of(lengths), 1, False, timeout=12, group_timeout=2)


def fit_error(rank: int, kind: str) -> str:
    try:
        fit(rank, {"uneven": "error"}, kind, counts_of((4, 2, 4)), 1, False)
    except UnevenDataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("map", "ranks have different numbers of batches (rank 0 has 4, rank 1 has 2, rank 2 has 4); uneven='auto'"),
        ("iterable", "the data of rank 1 has run out before the others'; uneven='auto' allows it"),
    ],
)
def test_policy_error_raises_on_all_ranks_and_names_the_short_one(pool: RankPool, kind: str, message: str) -> None:
    for said in pool.run(3, fit_error, kind, timeout=TIME_LIMIT):
        assert said.startswith(message)


# ------------------------------------------------------------------------------------------- map-style, dealt out


class Rows(Dataset):
    """``size`` samples; sample i is what one-device runs get, too."""

    def __init__(self, size: int) -> None:
        batch = samples(0, 0, size)
        self.x, self.y = batch["x"], torch.linspace(-1, 1, size, dtype=torch.float64)[:, None].expand(-1, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "index": torch.tensor(index)}


class Watching(Module):
    """Keeps which samples each real step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not self.trainer.strategy.is_padding_batch:
            self.seen.append(batch["index"].tolist())
        return super().training_step(batch, batch_idx)


def fit_rows(rank: int, world_size: int, strategy: Any, size: int, batch_size: int, options: dict) -> tuple:
    if isinstance(strategy, dict):
        strategy = BucketedDDPStrategy(**SMALL_BUCKETS, **strategy)
    module = Watching() if isinstance(strategy, BucketedDDPStrategy) else Module()
    trainer = trainer_of(strategy, world_size, max_epochs=2, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Rows(size), batch_size=batch_size, shuffle=True, **options))
    return flat(module.net), getattr(module, "seen", None), trainer.global_step


def one_device_rows(size: int, global_batch: int, drop_last: bool) -> tuple[Tensor, list[list[int]]]:
    """Plain PyTorch on the orders that torch's DistributedSampler documents: seed + epoch."""
    model, rows = net(), Rows(size)
    opt = optimizer_of("sgd", model.parameters())
    batches = []
    for epoch in range(2):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0 + epoch)).tolist()
        for indices in BatchSampler(order, global_batch, drop_last):
            batches.append(indices)
            batch = torch.utils.data.default_collate([rows[i] for i in indices])
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
    return flat(model), batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "batch_size", "world_size"), [(9, 2, 4), (13, 2, 3), (7, 4, 2), (3, 2, 4), (8, 1, 1)])
def test_global_batches_are_those_of_one_device(
    pool: RankPool, size: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    right, batches = one_device_rows(size, world_size * batch_size, drop_last)
    if not batches:
        pytest.skip("one device would drop everything")
    results = pool.run(
        world_size, fit_rows, world_size, {}, size, batch_size, {"drop_last": drop_last}, timeout=TIME_LIMIT
    )
    for weights, _, steps in results:
        assert steps == len(batches)
        assert relative_error(weights, right) < 1e-12
    seen = sorted(index for _, by_step, _ in results for step in by_step for index in step)
    assert seen == sorted(index for batch in batches for index in batch)


def test_nine_samples_on_four_ranks_under_stock_ddp_are_twelve(pool: RankPool) -> None:
    """Negative control: the stock sampler repeats samples; ours does when told to."""
    right, _ = one_device_rows(9, 8, False)
    stock = pool.run(4, fit_rows, 4, "ddp", 9, 2, {})[0]
    assert relative_error(stock[0], right) > 1e-3
    padded = pool.run(4, fit_rows, 4, {"pad_samples": True}, 9, 2, {})
    assert sum(len(step) for _, by_step, _ in padded for step in by_step) == 2 * 12
    assert relative_error(padded[0][0], stock[0]) > 0  # stock divides by ranks, ours by samples


class NeedsArguments(BatchSampler):
    """A batch sampler with an argument that Lightning cannot know."""

    def __init__(self, batches: list[list[int]], tag: str) -> None:
        self.batches, self.tag = batches, tag

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def fit_own_batch_sampler(rank: int) -> tuple:
    module = Watching()
    own = [[0, 1, 2], [3]] if rank == 0 else [[4]]
    loader = DataLoader(Rows(5), batch_sampler=NeedsArguments(own, tag="mine"))
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1, use_distributed_sampler=True)
    trainer.fit(module, loader)
    return module.seen, trainer.train_dataloader.batch_sampler is loader.batch_sampler


def test_a_batch_sampler_of_the_users_is_left_as_it_is(pool: RankPool) -> None:
    (seen0, same0), (seen1, same1) = pool.run(2, fit_own_batch_sampler, timeout=TIME_LIMIT)
    assert (seen0, seen1) == ([[0, 1, 2], [3]], [[4]])
    assert same0
    assert same1


def fit_own_sampler(rank: int) -> list[list[int]]:
    module = Watching()
    torch.manual_seed(rank)  # ranks whose generators stand differently must still draw one order
    sampler = WeightedRandomSampler([1.0] * 4 + [0.0] * 4, num_samples=11, replacement=True)
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=2, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Rows(8), batch_size=3, sampler=sampler))
    return module.seen


def test_a_sampler_of_the_users_is_dealt_out(pool: RankPool) -> None:
    by_rank = pool.run(2, fit_own_sampler, timeout=TIME_LIMIT)
    for epoch in range(2):
        drawn = []
        with torch.random.fork_rng():
            torch.manual_seed(0 + epoch)
            order = list(WeightedRandomSampler([1.0] * 4 + [0.0] * 4, num_samples=11, replacement=True))
        for rank, seen in enumerate(by_rank):
            half = seen[epoch * 2 : epoch * 2 + 2]
            assert [i for batch in half for i in batch] == order[rank::2]
            drawn += [i for batch in half for i in batch]
        assert sorted(drawn) == sorted(order)


# ------------------------------------------------------------------------------------------- steps that yield nothing


class YieldsNothing(Module):
    """Some ranks' steps return None, or a constant zero, or run on an empty batch, at batch 1."""

    def __init__(self, how: str, ranks: tuple[int, ...]) -> None:
        super().__init__("adamw")
        self.how, self.ranks = how, ranks

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 1 and self.global_rank in self.ranks:
            if self.how == "none":
                return None
            if self.how == "zero":
                return torch.zeros(1, dtype=torch.float64, requires_grad=True).sum()
            if self.how == "out of memory":
                try:
                    raise torch.OutOfMemoryError("pretended")
                except torch.OutOfMemoryError:
                    return None
            batch = {key: value[:0] for key, value in batch.items()}
            self.trainer.strategy.set_count(0)
        return loss_of(self.net, batch)


def fit_yielding_nothing(rank: int, how: str, ranks: tuple, k: int) -> tuple:
    module = YieldsNothing(how, ranks)
    counts = [[3, 2, 4], [1, 5, 2], [2, 2, 2], [4, 1, 3]]
    trainer = trainer_of("bucketed_ddp", 3, max_epochs=2, accumulate_grad_batches=k)
    trainer.fit(module, DataLoader(Batches(counts, rank, "samples"), batch_size=None))
    return flat(module.net), module.digests, trainer.strategy.skipped_steps


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("how", ["none", "zero", "empty", "out of memory"])
def test_a_step_that_yields_nothing_counts_nothing(pool: RankPool, how: str, ranks: tuple, k: int) -> None:
    counts = [[3, 2, 4], [0 if r in ranks else n for r, n in enumerate([1, 5, 2])], [2, 2, 2], [4, 1, 3]]
    all_empty = len(ranks) == 3 and k == 1
    skip = {1, 5} if all_empty else set()
    right = single_device(counts, "samples", "adamw", k, 2, skip=skip)
    results = pool.run(3, fit_yielding_nothing, how, ranks, k, timeout=TIME_LIMIT)
    for weights, digests, skipped in results:
        assert relative_error(weights, right) < 1e-12
        assert digests == results[0][1]
        assert skipped == len(skip)


# ------------------------------------------------------------------------------------------- collectives in a step


class Communicating(Module):
    """A training step with collectives of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        if self.how == "all_gather":
            self.all_gather(loss.detach())
        else:
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def fit_communicating(rank: int, how: str, kind: str, lengths: tuple) -> tuple:
    module = Communicating(how)
    counts = counts_of(lengths)
    trainer = trainer_of("bucketed_ddp", len(lengths), max_epochs=EPOCHS)
    trainer.fit(module, loader_of(kind, counts, rank))
    return flat(module.net), trainer.callback_metrics


@pytest.mark.parametrize("how", ["all_gather", "log"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("lengths", [(4, 2), (0, 3, 1)], ids=str)
def test_collectives_in_the_step_do_not_hang(pool: RankPool, how: str, kind: str, lengths: tuple) -> None:
    results = pool.run(len(lengths), fit_communicating, how, kind, lengths, timeout=TIME_LIMIT)
    for weights, _ in results:
        assert relative_error(weights, single_device(counts_of(lengths), "samples", "sgd", 1, EPOCHS)) < 1e-12


class LogsLoss(Module):
    """Logs epoch means with and without explicit weights, a sum and a maximum, and a torchmetric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        n = len(batch["x"])
        self.log("constant", 2.0, on_epoch=True, on_step=False, sync_dist=True)
        self.log("size", float(n), on_epoch=True, on_step=False, sync_dist=True, batch_size=n)
        self.log("total", float(n), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
        self.log("largest", float(n), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max")
        self.metric.update(batch["x"].sum() / n, weight=n)
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        return loss_of(self.net, batch)


def fit_logging(rank: int, lengths: tuple, kind: str, uneven: str) -> dict:
    module = LogsLoss()
    trainer = trainer_of(BucketedDDPStrategy(uneven=uneven), len(lengths), max_epochs=2)
    trainer.fit(module, loader_of(kind, counts_of(lengths), rank))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("uneven", ["auto", "replay"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("lengths", [(4, 3), (0, 3), (1, 0, 0, 0)], ids=str)
def test_logged_epoch_values_are_exact(pool: RankPool, lengths: tuple, kind: str, uneven: str) -> None:
    counts = counts_of(lengths)
    sizes = [n for by_rank in counts for n in by_rank if n]
    total = sum(float(samples(i, r, n)["x"].sum()) for i, by_rank in enumerate(counts) for r, n in enumerate(by_rank))
    for metrics in pool.run(len(lengths), fit_logging, lengths, kind, uneven, timeout=TIME_LIMIT):
        assert metrics["constant"] == pytest.approx(2.0)
        assert metrics["size"] == pytest.approx(sum(n * n for n in sizes) / sum(sizes))
        assert metrics["total"] == pytest.approx(sum(sizes))
        assert metrics["largest"] == max(sizes)
        assert metrics["metric"] == pytest.approx(total / sum(sizes), rel=1e-6)


class WithBatchNorm(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def fit_batchnorm(rank: int) -> list[Tensor]:
    counts = [[4, 4], [4, 0], [4, 0]]
    statistics = []

    class Keep(WithBatchNorm):
        def on_train_batch_end(self, *args: Any) -> None:
            statistics.append(self.net[1].running_mean.clone())

    module = Keep()
    strategy = BucketedDDPStrategy(uneven="replay", broadcast_buffers="off")
    trainer_of(strategy, 2, max_epochs=1).fit(module, loader_of("map", counts, rank))
    return statistics


def test_replayed_batches_leave_batchnorm_statistics_alone(pool: RankPool) -> None:
    full, short = pool.run(2, fit_batchnorm, timeout=TIME_LIMIT)
    assert torch.equal(short[0], short[1])
    assert torch.equal(short[1], short[2])
    assert not torch.equal(full[1], full[2])  # real ones do not


# ------------------------------------------------------------------------------------------- evaluation


class Evaluates(LogsLoss):
    """Counts how often each sample is seen in evaluation, and logs as LogsLoss does."""

    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.gathers = gathers
        self.seen: list[int] = []
        self.mean = MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        n = len(batch["x"])
        if self.gathers:
            self.all_gather(torch.tensor(1))
        if not self.trainer.strategy.is_padding_batch:
            self.seen += batch["index"].tolist()
        self.log("constant", 2.0, sync_dist=True)
        self.log("index", batch["index"].double().mean(), sync_dist=True)
        self.mean.update(batch["index"].double().mean(), weight=n)
        self.log("metric", self.mean)

    test_step = validation_step


def evaluate(rank: int, world_size: int, size: int, how: str, gathers: bool) -> tuple:
    module = Evaluates(gathers)
    trainer = trainer_of("bucketed_ddp", world_size, use_distributed_sampler=True)
    loader = DataLoader(Rows(size), batch_size=2)
    run = trainer.validate if how == "validate" else trainer.test
    metrics = run(module, loader, verbose=False)[0]
    return module.seen, metrics


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("how", ["validate", "test"])
@pytest.mark.parametrize(("size", "world_size"), [(5, 2), (10, 3), (7, 4), (3, 4), (1, 2)])
def test_evaluation_sees_each_sample_once_and_is_exact(
    pool: RankPool, size: int, world_size: int, how: str, gathers: bool
) -> None:
    results = pool.run(world_size, evaluate, world_size, size, how, gathers, timeout=TIME_LIMIT)
    assert sorted(i for seen, _ in results for i in seen) == list(range(size))
    for _, metrics in results:
        assert metrics["constant"] == pytest.approx(2.0)
        assert metrics["index"] == pytest.approx((size - 1) / 2)
        assert metrics["metric"] == pytest.approx((size - 1) / 2)


def evaluate_stock(rank: int) -> dict:
    class Stock(Module):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("constant", 2.0, sync_dist=True)

    counts = [[2, 2], [2, 1]]
    trainer = trainer_of("ddp", 2)
    return trainer.validate(Stock(), DataLoader(Batches(counts, rank, "samples"), batch_size=None), verbose=False)[0]


def test_stock_ddp_logs_a_constant_two_as_something_else(pool: RankPool) -> None:
    """Negative control: its mean of integer batch sizes is cut to an integer."""
    assert pool.run(2, evaluate_stock)[0]["constant"] != pytest.approx(2.0)


class Predicts(LightningModule):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["index"] * 10


class Writer(BasePredictionWriter):
    """Restores the dataset's order from the indices that Lightning hands to a writer."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.pairs: list[tuple[int, int]] = []

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        indices = [i for batch in batch_indices[0] for i in batch] if batch_indices else []
        values = [int(v) for batch in predictions for v in batch]
        self.pairs = list(zip(indices, values, strict=True))


def predict(rank: int, world_size: int, size: int) -> list[tuple[int, int]]:
    writer = Writer()
    trainer = trainer_of("bucketed_ddp", world_size, use_distributed_sampler=True, callbacks=[writer], precision=None)
    trainer.predict(Predicts(), DataLoader(Rows(size), batch_size=2))
    return writer.pairs


@pytest.mark.parametrize(("size", "world_size"), [(7, 2), (10, 3), (9, 4), (3, 4)])
def test_predict_delivers_each_sample_once(pool: RankPool, size: int, world_size: int) -> None:
    pairs = [
        pair for by_rank in pool.run(world_size, predict, world_size, size, timeout=TIME_LIMIT) for pair in by_rank
    ]
    assert sorted(pairs) == [(i, 10 * i) for i in range(size)]


# ------------------------------------------------------------------------------------------- what Lightning counts


class Counting(Module):
    """Notes what must agree on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def on_train_start(self) -> None:
        self.notes.append(("batches", self.trainer.num_training_batches))

    def on_validation_start(self) -> None:
        self.notes.append(("validation at", self.trainer.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_end(self) -> None:
        self.notes.append(
            ("steps", self.trainer.global_step, self.trainer.current_epoch, self.lr_schedulers().last_epoch)
        )

    def configure_optimizers(self) -> Any:
        self.notes.append(("estimate", self.trainer.estimated_stepping_batches))
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit_counting(rank: int, kind: str, options: dict) -> list:
    module = Counting()
    trainer = trainer_of("bucketed_ddp", 2, **{"max_epochs": 2, **options})
    validation = DataLoader(Batches([[2, 2], [2, 2]], rank, "samples"), batch_size=None)
    trainer.fit(module, loader_of(kind, counts_of((6, 3)), rank), validation)
    return module.notes


@pytest.mark.parametrize(
    ("kind", "options", "steps", "validations"),
    [
        ("map", {}, 12, [6, 12]),
        ("map", {"accumulate_grad_batches": 4}, 4, [2, 4]),
        ("map", {"max_steps": 5, "max_epochs": -1}, 5, []),
        ("map", {"limit_train_batches": 4}, 8, [4, 8]),
        ("map", {"limit_train_batches": 0.5}, 6, [3, 6]),
        ("map", {"val_check_interval": 2}, 12, [2, 4, 6, 8, 10, 12]),
        ("map", {"val_check_interval": 0.5}, 12, [3, 6, 9, 12]),
        ("iterable", {"max_steps": 7}, 7, [6]),
        ("iterable", {"max_steps": 12, "val_check_interval": 2}, 12, [2, 4, 6, 8, 10, 12]),
        ("iterable", {"max_steps": 12, "limit_train_batches": 4}, 8, [4, 8]),
    ],
)
def test_lightnings_counters_agree_on_all_ranks(
    pool: RankPool, kind: str, options: dict, steps: int, validations: list[int]
) -> None:
    notes = pool.run(2, fit_counting, kind, options, timeout=TIME_LIMIT)
    assert notes[0] == notes[1]
    end = next(note for note in notes[0] if note[0] == "steps")
    assert end[1] == steps
    assert end[3] == steps
    seen = [note[1] for note in notes[0] if note[0] == "validation at"]
    assert [at for at in seen if at <= steps][: len(validations)] == validations
    if kind == "map" and "max_steps" not in options:
        assert ("estimate", steps) in notes[0]


class TwoLoaders(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return sum(loss_of(self.net, part) for part in (batch["a"], batch["b"]) if part is not None)


def fit_two_loaders(rank: int, mode: str, kind: str) -> tuple:
    loaders = {"a": loader_of(kind, counts_of((4, 2)), rank), "b": loader_of(kind, counts_of((1, 3)), rank)}
    module = TwoLoaders()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=2)
    trainer.fit(module, CombinedLoader(loaders, mode))
    return trainer.global_step, module.digests


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(("mode", "steps"), [("max_size_cycle", 8), ("min_size", 4), ("max_size", 8)])
def test_several_loaders_stay_in_step(pool: RankPool, mode: str, steps: int, kind: str) -> None:
    (steps0, digests0), (steps1, digests1) = pool.run(2, fit_two_loaders, mode, kind, timeout=TIME_LIMIT)
    assert steps0 == steps1 == steps
    assert digests0 == digests1


# ------------------------------------------------------------------------------------------- the even case is free


def count_even(rank: int, lengths: tuple) -> int:
    """Collectives of the default group in an epoch of equal lengths."""
    import torch.distributed as dist

    start = dist.group.WORLD._get_sequence_number_for_group()
    trainer_of("bucketed_ddp", 2, max_epochs=1).fit(Module(), loader_of("map", counts_of(lengths), rank))
    return dist.group.WORLD._get_sequence_number_for_group() - start


def test_sized_loaders_cost_no_message_per_batch(pool: RankPool) -> None:
    # Long enough for both to have measured how to send, which takes a message or two, and twelve steps.
    short = pool.run(2, count_even, (20, 20))[0]
    long = pool.run(2, count_even, (40, 40))[0]
    # A batch costs Lightning's own broadcast, one bucket and the ballot; nothing else grows with the number of batches.
    assert long - short == 20 * 3


# ------------------------------------------------------------------------------------------- losses in parts


class Sequences(Dataset):
    """Batches of sequences: some tokens have a label, each sequence has an auxiliary target."""

    def __init__(self, plan: list[list[tuple[int, int]]], rank: int) -> None:
        self.batches = [sequences(i, rank, *by_rank[rank]) for i, by_rank in enumerate(plan) if by_rank[rank] != (0, 0)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batches[index]


def sequences(index: int, rank: int, num_sequences: int, num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.randn(num_sequences, 5, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.full((num_sequences * 5,), -100)
    labels[:num_tokens] = (index + rank) % 3
    return {"x": x, "labels": labels.view(num_sequences, 5), "target": torch.full((num_sequences,), 1.0 + rank)}


def part_sums(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over labelled tokens, sum over sequences, and a term that counts once."""
    logits = model(batch["x"].flatten(0, 1))
    tokens = nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    auxiliary = (model(batch["x"].mean(1)).sum(1) - batch["target"]).square().sum()
    return tokens, auxiliary, 0.1 * sum(p.square().sum() for p in model.parameters())


class InParts(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens, auxiliary, regulariser = part_sums(self.net, batch)
        normalize = self.trainer.strategy.normalize
        return normalize(tokens, by="tokens") + normalize(auxiliary, by="sequences") + regulariser


class MeanOfMeans(Module):
    """What people write without it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens, auxiliary, regulariser = part_sums(self.net, batch)
        labelled = int((batch["labels"] != -100).sum())
        return tokens / max(1, labelled) + auxiliary / len(batch["x"]) + regulariser


def count_sequences(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])


# (sequences, labelled tokens) by position and rank; (0, 0) is no batch at all. Rank 1 once has no labelled token.
PLAN = [[(2, 7), (1, 1)], [(1, 3), (3, 0)], [(2, 10), (2, 2)], [(3, 12), (1, 5)], [(1, 2), (0, 0)]]


def fit_parts(rank: int, kind: str, k: int, cls: type, limit: int | None) -> Tensor:
    strategy = BucketedDDPStrategy(**SMALL_BUCKETS, normalizers={"tokens": "tokens", "sequences": count_sequences})
    module = cls()
    options = {} if limit is None else {"limit_train_batches": limit}
    trainer = trainer_of(strategy, 2, max_epochs=3, accumulate_grad_batches=k, **options)
    dataset = Sequences(PLAN, rank)
    if kind == "iterable":
        stream = Stream.__new__(Stream)
        stream.batches = dataset.batches
        dataset = stream
    trainer.fit(module, DataLoader(dataset, batch_size=None))
    return flat(module.net)


def one_device_parts(k: int, limit: int | None) -> Tensor:
    model = net()
    opt = optimizer_of("sgd", model.parameters())
    plan = PLAN[:limit]
    for _ in range(3):
        for start in range(0, len(plan), k):
            parts = [
                sequences(i, r, *sizes)
                for i in range(start, min(start + k, len(plan)))
                for r, sizes in enumerate(plan[i])
                if sizes != (0, 0)
            ]
            batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            tokens, auxiliary, regulariser = part_sums(model, batch)
            opt.zero_grad()
            (tokens / (batch["labels"] != -100).sum() + auxiliary / len(batch["x"]) + regulariser).backward()
            opt.step()
    return flat(model)


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_losses_in_parts_come_out_as_on_one_device(pool: RankPool, kind: str, k: int, limit: int | None) -> None:
    right = one_device_parts(k, limit)
    for weights in pool.run(2, fit_parts, kind, k, InParts, limit, timeout=TIME_LIMIT):
        assert relative_error(weights, right) < 1e-12


@pytest.mark.parametrize("k", [1, 2])
def test_a_mean_of_means_misses_them(pool: RankPool, k: int) -> None:
    """Negative control."""
    weights = pool.run(2, fit_parts, "map", k, MeanOfMeans, None)[0]
    assert relative_error(weights, one_device_parts(k, None)) > 1e-3


class YieldsNothingInParts(InParts):
    """Leaves out a batch on rank 1."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 2 else loss


def warnings_of_nothing(rank: int) -> list[str]:
    with mock.patch("warnings.warn") as warn:
        fit_parts(rank, "map", 2, YieldsNothingInParts, None)
    return [str(call.args[0]) for call in warn.call_args_list if "returned None" in str(call.args[0])]


def test_a_step_that_yields_nothing_is_known_to_be_counted(pool: RankPool) -> None:
    """Normalizers count before the step; nobody can take it back then."""
    quiet, warned = pool.run(2, warnings_of_nothing, timeout=TIME_LIMIT)
    assert quiet == []
    assert warned
    assert all(text.startswith("rank 1: training_step returned None") for text in warned)


# ------------------------------------------------------------------------------------------- odd loaders and loops


class Validates(Module):
    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated += not self.trainer.strategy.is_padding_batch
        self.log("val", float(len(batch["x"])), batch_size=1)


def validate_unsized(rank: int, lengths: tuple, limit: int) -> int:
    module = Validates()
    trainer = trainer_of("bucketed_ddp", 2, limit_val_batches=limit)
    trainer.validate(module, loader_of("iterable", counts_of(lengths), rank), verbose=False)
    return module.validated


@pytest.mark.parametrize("lengths", [(5, 1), (4, 0), (1, 5)], ids=str)
def test_unsized_validation_with_a_limit_does_not_hang(pool: RankPool, lengths: tuple) -> None:
    done = pool.run(2, validate_unsized, lengths, 2, timeout=TIME_LIMIT)
    assert done == [min(2, length) for length in lengths]


def stop_early(rank: int) -> int:
    from lightning.pytorch.callbacks import EarlyStopping

    module = Validates()
    callback = EarlyStopping("val", patience=10)
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=3, callbacks=[callback])
    validation = loader_of("map", counts_of((1, 0)), rank)
    trainer.fit(module, loader_of("map", counts_of((2, 2)), rank), validation)
    return trainer.current_epoch


def test_a_rank_without_validation_data_does_not_stop_the_run(pool: RankPool) -> None:
    assert pool.run(2, stop_early, timeout=TIME_LIMIT) == [3, 3]


class Liar(BatchSampler):
    """Says that it has more, or fewer, batches than it has."""

    def __init__(self, batches: list[list[int]], says: int) -> None:
        self.batches, self.says = batches, says

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.says


def fit_liar(rank: int, nobody: bool) -> tuple:
    batches = [] if rank == 1 or nobody else [[0, 1], [2]]
    module = Watching()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=2)
    trainer.fit(module, DataLoader(Rows(3), batch_sampler=Liar(batches, says=2)))
    return module.seen, module.digests


def test_a_loader_that_promises_batches_and_has_none(pool: RankPool) -> None:
    (seen0, digests0), (seen1, digests1) = pool.run(2, fit_liar, False, timeout=TIME_LIMIT)
    assert (seen0, seen1) == ([[0, 1], [2]] * 2, [])
    assert digests0 == digests1
    assert [seen for seen, _ in pool.run(2, fit_liar, True, timeout=TIME_LIMIT)] == [[], []]


def fit_in_order(rank: int, shuffle: bool) -> list[list[int]]:
    module = Watching()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Rows(8), batch_size=2, shuffle=shuffle))
    return module.seen


def test_a_loader_that_does_not_shuffle_is_not_shuffled(pool: RankPool) -> None:
    assert pool.run(2, fit_in_order, False) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert pool.run(2, fit_in_order, True) != [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


@pytest.mark.parametrize("k", [1, 2])
def test_skip_with_manual_optimization_replays_all_the_same(pool: RankPool, k: int) -> None:
    counts = counts_of((4, 2))
    for weights, *_ in pool.run(2, fit, {"uneven": "skip"}, "map", counts, k, True, timeout=TIME_LIMIT):
        assert relative_error(weights, single_device(counts, "samples", "sgd", k, EPOCHS)) < 1e-12


class Shard(IterableDataset):
    """Every n-th sample, as a sharded file reader delivers them."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.rows, self.indices = Rows(size), range(rank, size, world_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[i] for i in self.indices)


def fit_nine(rank: int, kind: str, k: int, manual: bool) -> tuple:
    module = Manual(k, 2) if manual else Module()
    accumulate = {} if manual else {"accumulate_grad_batches": k}
    trainer = trainer_of("bucketed_ddp", 4, max_epochs=2, use_distributed_sampler=True, **accumulate)
    dataset = Rows(9) if kind == "map" else Shard(9, rank, 4)
    trainer.fit(module, DataLoader(dataset, batch_size=2))
    return flat(module.net), trainer.strategy.report().count


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_nine_samples_on_four_ranks_in_batches_of_two(pool: RankPool, k: int, kind: str, manual: bool) -> None:
    model, rows = net(), Rows(9)
    opt = optimizer_of("sgd", model.parameters())
    for _ in range(2):
        for window in [[range(8)], [range(8, 9)]] if k == 1 else [[range(8), range(8, 9)]]:
            batch = torch.utils.data.default_collate([rows[i] for part in window for i in part])
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
    for weights, count in pool.run(4, fit_nine, kind, k, manual, timeout=TIME_LIMIT):
        assert count == 18
        assert relative_error(weights, flat(model)) < 1e-12


@pytest.mark.parametrize("name", ["4,3", "7,3,5"])
def test_stock_ddp_errs_or_hangs_on_iterables_too(pool: RankPool, name: str) -> None:
    """Negative control."""
    lengths = LENGTHS[name][0]
    with pytest.raises(RankFailureError, match=r"onnection|imed out|no answer"):
        pool.run(len(lengths), fit, "ddp", "iterable", counts_of(lengths), 1, False, timeout=12, group_timeout=2)
