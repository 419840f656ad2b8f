"""Several training or evaluation loaders at once, of different lengths on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_runs import Module, flat, net, optimizer_of, relative_error, samples, trainer_of
from rank_pool import RankFailureError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from lightning_dp import BucketedDDPStrategy

EPOCHS = 2
TIME_LIMIT = 40


class Rows(Dataset):
    """Row i is named i (plus an offset) and holds values that only its name decides."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size, self.offset = size, offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        name = index + self.offset
        row = samples(name, 0, 1)
        return {"name": name, "x": row["x"][0], "y": row["y"][0]}


class RowStream(IterableDataset):
    """The same rows without a length: every n-th one from this rank's on."""

    def __init__(self, rows: Rows, rank: int, world_size: int) -> None:
        self.rows = [rows[i] for i in range(rank, len(rows), world_size)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def part_sum(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return (model(part["x"]) - part["y"]).square().sum()


class TwoParts(Module):
    """A loss for each loader, each a mean over that loader's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, dict[str, list[int]]] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = 0.0 * sum(p.sum() for p in self.net.parameters())
        for key, part in batch.items():
            if part is None:
                continue
            loss = loss + strategy.normalize(part_sum(self.net, part), by=key)
            if not strategy.is_padding_batch:
                epoch = self.seen.setdefault(self.current_epoch, {"a": [], "b": []})
                epoch[key] += part["name"].tolist()
        return loss


def samples_of(key: str) -> Any:
    return lambda batch: 0 if batch[key] is None else len(batch[key]["name"])


def loaders_of(kind: str, sizes: dict[str, int], rank: int, world_size: int) -> dict[str, DataLoader]:
    rows = {key: Rows(size, offset) for (key, size), offset in zip(sizes.items(), (0, 1000), strict=True)}
    if kind == "map":
        return {key: DataLoader(part, batch_size=2) for key, part in rows.items()}
    return {key: DataLoader(RowStream(part, rank, world_size), batch_size=2) for key, part in rows.items()}


def fit_parts(rank: int, world_size: int, kind: str, sizes: dict[str, int], mode: str, **options: Any) -> tuple:
    module = TwoParts()
    strategy = BucketedDDPStrategy(normalizers={"a": samples_of("a"), "b": samples_of("b")})
    trainer = trainer_of(strategy, world_size, max_epochs=EPOCHS, **{"use_distributed_sampler": True, **options})
    loaders = loaders_of(kind, sizes, rank, world_size)
    trainer.fit(module, CombinedLoader(loaders, mode))
    return flat(module.net), module.seen, module.digests, sorted(trainer.train_dataloader)


def one_device(sizes: dict[str, int], world_size: int) -> Tensor:
    """``max_size`` on one device with the ranks' batches as one: loaders that have ended contribute nothing."""
    model, model_rows = net(), {"a": Rows(sizes["a"]), "b": Rows(sizes["b"], 1000)}
    opt = optimizer_of("sgd", model.parameters())
    width = 2 * world_size
    for _ in range(EPOCHS):
        for start in range(0, max(sizes.values()), width):
            loss = torch.zeros((), dtype=torch.float64)
            for rows in model_rows.values():
                chosen = [rows[i] for i in range(start, min(start + width, len(rows)))]
                if chosen:
                    batch = {key: torch.stack([row[key] for row in chosen]) for key in ("x", "y")}
                    loss = loss + part_sum(model, batch) / len(chosen)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return flat(model)


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, {"a": 13, "b": 6}), (3, {"a": 5, "b": 19}), (2, {"a": 1, "b": 5})]
)
def test_max_size_equals_one_device(pool: RankPool, world_size: int, sizes: dict[str, int], kind: str) -> None:
    results = pool.run(world_size, fit_parts, world_size, kind, sizes, "max_size", timeout=TIME_LIMIT)
    right = one_device(sizes, world_size)
    for weights, _, digests, keys in results:
        assert relative_error(weights, right) < 1e-12
        assert digests == results[0][2]
        assert keys == ["a", "b"], "the user's own collection is what the Trainer shows"
    for epoch in range(EPOCHS):
        for key, offset in (("a", 0), ("b", 1000)):
            together = sorted(name for _, seen, _, _ in results for name in seen.get(epoch, {key: []})[key])
            assert together == [offset + i for i in range(sizes[key])]


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_cycle_sees_the_longest_loader_once(pool: RankPool, kind: str) -> None:
    """13 and 5 samples: rank 0 has 4 and 2 batches, rank 1 has 3 and 1; the short one is begun anew."""
    results = pool.run(2, fit_parts, 2, kind, {"a": 13, "b": 5}, "max_size_cycle", timeout=TIME_LIMIT)
    assert results[0][2] == results[1][2]
    assert len(results[0][2]) == EPOCHS * 4
    for epoch in range(EPOCHS):
        assert sorted(name for _, seen, _, _ in results for name in seen[epoch]["a"]) == list(range(13))
        assert {name for _, seen, _, _ in results for name in seen[epoch]["b"]} == {1000 + i for i in range(5)}


def test_a_loader_too_short_to_cycle_is_refused_on_all_ranks(pool: RankPool) -> None:
    with pytest.raises(RankFailureError, match="loader 1 of several has no batch on rank 1") as failure:
        pool.run(2, fit_parts, 2, "map", {"a": 9, "b": 1}, "max_size_cycle", timeout=TIME_LIMIT)
    assert str(failure.value).count("UnevenDataError") >= 2


def error_of_sequence(rank: int) -> list[tuple[type, str]]:
    errors = []
    for strategy in ("ddp", "bucketed_ddp"):
        trainer = trainer_of(strategy, 2, max_epochs=1)
        try:
            trainer.fit(TwoParts(), CombinedLoader(loaders_of("map", {"a": 4, "b": 4}, rank, 2), "sequential"))
        except Exception as error:
            errors.append((type(error), str(error)))
    return errors


def test_loaders_one_after_the_other_are_refused_for_training_as_lightning_does(pool: RankPool) -> None:
    for stock, ours in pool.run(2, error_of_sequence, timeout=TIME_LIMIT):
        assert ours == stock
        assert 'CombinedLoader(mode="sequential")' in ours[1]


def test_overfitting_turns_shuffling_off_in_every_loader(pool: RankPool) -> None:
    seen = pool.run(2, fit_shuffled, 2, timeout=TIME_LIMIT)
    for by_epoch in seen:
        assert by_epoch[0] == by_epoch[1], "the same batches in every epoch"


def fit_shuffled(rank: int, world_size: int) -> dict:
    module = TwoParts()
    strategy = BucketedDDPStrategy(normalizers={"a": samples_of("a"), "b": samples_of("b")})
    trainer = trainer_of(
        strategy, world_size, max_epochs=2, overfit_batches=2, limit_val_batches=0, use_distributed_sampler=True
    )
    rows = {"a": Rows(12), "b": Rows(12, 1000)}
    trainer.fit(module, {key: DataLoader(part, batch_size=2, shuffle=True) for key, part in rows.items()})
    return module.seen


# ------------------------------------------------------------------------------------------- evaluation


class Evaluates(Module):
    """A mean over the samples of the longer loader and one over both."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.names: list[int] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        names = batch["a"]["name"]
        self.mean.update(names.double())
        self.log("mean", names.double().mean(), batch_size=len(names), sync_dist=True)
        if not self.trainer.strategy.is_padding_batch:
            self.names += names.tolist()

    def on_validation_epoch_end(self) -> None:
        self.log("metric", self.mean)


def validate(rank: int, world_size: int, kind: str, mode: str, sizes: dict[str, int]) -> tuple:
    module = Evaluates()
    trainer = trainer_of("bucketed_ddp", world_size, use_distributed_sampler=True)
    loaders = CombinedLoader(loaders_of(kind, sizes, rank, world_size), mode)
    (values,) = trainer.validate(module, loaders, verbose=False)
    return float(values["mean"]), float(values["metric"]), module.names


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
@pytest.mark.parametrize(("world_size", "sizes"), [(2, {"a": 13, "b": 5}), (3, {"a": 14, "b": 4})])
def test_evaluation_over_several_loaders_is_exact(
    pool: RankPool, world_size: int, sizes: dict[str, int], mode: str, kind: str
) -> None:
    results = pool.run(world_size, validate, world_size, kind, mode, sizes, timeout=TIME_LIMIT)
    assert sorted(name for _, _, names in results for name in names) == list(range(sizes["a"]))
    for logged, metric, _ in results:
        assert logged == pytest.approx((sizes["a"] - 1) / 2, rel=1e-12)
        assert metric == pytest.approx((sizes["a"] - 1) / 2, rel=1e-6)
