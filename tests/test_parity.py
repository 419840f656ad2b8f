"""One row per kind of module, training loop and callback: ranks with uneven batches against one device, in float64.

Both are Lightning runs of the same module; the one device sees all ranks' samples as one batch. Every row is trained
with the vote on and off, and replicas must hold the same bits after every micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import parity_modules as kinds
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.tuner import Tuner
from lightning_runs import CLASSES, Counts, relative_error, trainer_of
from parity_modules import Base, Batches, squares
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import ConfigurationError, UnreducedGradientError

# The same total in each micro-batch: only then does Lightning on one device weigh the samples of a window alike.
UNEVEN: Counts = [(4, 1, 3), (1, 4, 3), (3, 2, 3), (2, 3, 3), (4, 1, 3), (1, 4, 3)]
EQUAL: Counts = [(3, 3)] * 6


@dataclass(frozen=True)
class Row:
    """What is trained, and how.

    Attributes:
        module: Makes the module.
        trainer: Makes the Trainer's arguments.
        tolerance: Largest relative difference of the weights.
        wrap: What is handed to ``fit`` in the module's place.
    """

    module: Callable[[], Base]
    trainer: Callable[[], dict[str, Any]] = field(default=dict)
    tolerance: float = 1e-12
    wrap: Callable[[Base], Any] = lambda module: module


def with_callback(make: Callable[[], Any], **arguments: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()], **arguments}


def arguments(**arguments: Any) -> Callable[[], dict[str, Any]]:
    return lambda: arguments


def in_precision(precision: str) -> Callable[[], dict[str, Any]]:
    return arguments(precision=precision)


ROWS = {
    # Graphs that differ by step or rank
    "plain": Row(Base),
    "branches by rank and step": Row(kinds.Branches),
    "partly used backbone": Row(kinds.PartlyUsed),
    "a term of the loss missing on ranks": Row(kinds.MissingTerm),
    "used in the early micro-batch only": Row(kinds.EarlyOnly, arguments(accumulate_grad_batches=2)),
    "other order on a rank": Row(kinds.OtherOrder),
    "tied weights, a module called twice": Row(kinds.Tied),
    "used by nobody": Row(kinds.NobodyUses),
    "used in the first step only": Row(kinds.UsedAtFirst),
    "branches, accumulated": Row(kinds.Branches, arguments(accumulate_grad_batches=3)),
    # Manual optimization
    "manual": Row(kinds.Manual),
    "manual, two backwards before a step": Row(kinds.TwoBackwards),
    "manual, not zeroed": Row(kinds.NotZeroed),
    "manual, zeroed in place": Row(kinds.ZeroedInPlace),
    "manual, create_graph": Row(kinds.CreateGraph),
    "manual, closure": Row(kinds.ManualClosure),
    "manual, toggle_model(sync_grad=False)": Row(kinds.SyncGrad),
    "GAN, one optimizer accumulates": Row(kinds.Gan),
    # Freezing, thawing, other memory
    "BackboneFinetuning": Row(kinds.Finetuned, with_callback(lambda: BackboneFinetuning(1, verbose=False))),
    "frozen and thawed by epoch": Row(kinds.FreezesAndThaws),
    "storage replaced": Row(kinds.OtherStorage),
    # Backward of other kinds
    "reentrant checkpoints of one block": Row(kinds.Checkpointed),
    "reentrant checkpoints, accumulated": Row(kinds.Checkpointed, arguments(accumulate_grad_batches=2)),
    "other checkpoints of one block": Row(kinds.CheckpointedOtherwise),
    "backward overridden": Row(kinds.OwnBackward),
    "gradient penalty": Row(kinds.GradientPenalty),
    "detect_anomaly": Row(Base, arguments(detect_anomaly=True)),
    "LBFGS, strong Wolfe": Row(kinds.Lbfgs, tolerance=1e-8),  # a line search amplifies rounding
    # Parameters and precisions of other kinds
    "sparse embeddings": Row(kinds.SparseTable),
    "complex, empty, transposed, channels_last": Row(kinds.Kinds),
    "mixed dtypes": Row(kinds.Dtypes, in_precision("32-true"), tolerance=1e-6),
    "32-true": Row(kinds.LowPrecision, in_precision("32-true"), tolerance=1e-5),
    "bf16-mixed": Row(kinds.LowPrecision, in_precision("bf16-mixed"), tolerance=2e-2),
    "bf16-true": Row(kinds.LowPrecision, in_precision("bf16-true"), tolerance=5e-2),
    # torch.compile
    "compiled module": Row(Base, wrap=lambda module: torch.compile(module, backend="aot_eager")),
    "compiled blocks": Row(kinds.CompiledBlocks),
    # The Trainer's arguments and Lightning's callbacks
    "clipped by norm": Row(Base, arguments(gradient_clip_val=0.5)),
    "clipped by value": Row(Base, arguments(gradient_clip_val=0.05, gradient_clip_algorithm="value")),
    "SWA": Row(Base, with_callback(lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1))),
    "EMA": Row(Base, with_callback(lambda: EMAWeightAveraging(decay=0.9))),
    "pruning": Row(Base, with_callback(lambda: ModelPruning("l1_unstructured", amount=0.2))),
    "GradientAccumulationScheduler": Row(
        kinds.Branches, with_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}))
    ),
    "overfit_batches": Row(Base, arguments(overfit_batches=3)),
    "simple profiler": Row(Base, arguments(profiler="simple")),
    "advanced profiler": Row(Base, arguments(profiler="advanced")),
}

# Rows in which stock DDP, told that parameters may be unused, is right if all batches are equal.
STOCK_IS_RIGHT = [
    "plain",
    "branches by rank and step",
    "used by nobody",
    "manual, two backwards before a step",
    "gradient penalty",
    "other checkpoints of one block",
    "clipped by norm",
    "SWA",
]


def weights(module: LightningModule) -> Tensor:
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in module.parameters()]
    return torch.cat([part.detach().double().flatten() for part in parts])


def fit(row: Row, strategy: Any, counts: Counts, rank: int | None) -> Base:
    module = row.module()
    devices = 1 if rank is None else len(counts[0])
    trainer = trainer_of(strategy, devices, max_epochs=3, **row.trainer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="grad and param do not obey the gradient layout contract")
        trainer.fit(row.wrap(module), DataLoader(Batches(counts, rank), batch_size=None))
    return module


def on_ranks(rank: int, name: str, counts: Counts, *strategies: Any) -> list[tuple[Tensor, list[bytes]]]:
    """Weights and their history, for each strategy; a dictionary holds arguments of ours."""
    fitted = [fit(ROWS[name], BucketedDDPStrategy(**s) if isinstance(s, dict) else s, counts, rank) for s in strategies]
    return [(weights(module), module.history) for module in fitted]


@cache
def on_one_device(name: str, world_size: int) -> Tensor:
    return weights(fit(ROWS[name], "auto", [by_rank[:world_size] for by_rank in UNEVEN], None))


VOTE = ({"nonfinite": "skip", "bucket_cap_mb": 0.002}, {"nonfinite": "off", "bucket_cap_mb": 0.002})


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_what_one_device_computes(pool: RankPool, world_size: int, name: str) -> None:
    counts = [by_rank[:world_size] for by_rank in UNEVEN]
    right = on_one_device(name, world_size)
    results = pool.run(world_size, on_ranks, name, counts, *VOTE, timeout=100)
    assert relative_error(right, weights(ROWS[name].module())) > 1e-3, "nothing was trained"
    for rank, both in enumerate(results):
        for (mine, history), vote, (_, reference) in zip(both, VOTE, results[0], strict=True):
            assert relative_error(mine, right) < ROWS[name].tolerance, (rank, vote)
            assert history == reference, f"replicas differ after some micro-batch: {vote}"


@pytest.mark.parametrize("name", STOCK_IS_RIGHT)
def test_equal_batches_give_what_stock_ddp_gives(pool: RankPool, name: str) -> None:
    stock, ours = pool.run(2, on_ranks, name, EQUAL, "ddp_find_unused_parameters_true", "bucketed_ddp")[0]
    assert relative_error(ours[0], stock[0]) < 1e-12


@pytest.mark.parametrize("name", STOCK_IS_RIGHT)
def test_uneven_batches_do_not(pool: RankPool, name: str) -> None:
    """Negative control: a wrong weighting shows in these rows."""
    counts = [by_rank[:2] for by_rank in UNEVEN]
    ((stock, _),) = pool.run(2, on_ranks, name, counts, "ddp_find_unused_parameters_true")[0]
    assert relative_error(stock, on_one_device(name, 2)) > 1e-3


# ------------------------------------------------------------------------------------------- what is no row


class FindsRate(Base):
    """Its learning rate is looked for first."""

    learning_rate = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def find_rate(rank: int | None, strategy: str, folder: str) -> tuple[float, Tensor]:
    module = FindsRate()
    counts = [by_rank[:2] for by_rank in UNEVEN] * 4
    devices = 1 if rank is None else 2
    trainer = trainer_of(strategy, devices, max_epochs=1, default_root_dir=folder)
    data = DataLoader(Batches(counts, rank), batch_size=None)
    Tuner(trainer).lr_find(module, data, num_training=20, min_lr=1e-4)
    before = weights(module)
    assert torch.equal(before, weights(FindsRate())), "the search must leave no trace in the weights"
    trainer.fit(module, data)
    return module.learning_rate, weights(module)


def test_the_lr_finder_leaves_replicas_alike(pool: RankPool, tmp_path: Any) -> None:
    (rate, mine), (other_rate, other) = pool.run(2, find_rate, "bucketed_ddp", str(tmp_path), timeout=100)
    assert rate == other_rate != FindsRate.learning_rate
    assert torch.equal(mine, other)


class Lazy(Base):
    def build(self) -> None:
        self.lazy = nn.LazyLinear(CLASSES)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"]) + self.lazy(batch["x"])


def fit_lazy(rank: int) -> str:
    try:
        trainer_of("bucketed_ddp", 2, max_epochs=1).fit(Lazy(), DataLoader(Batches(EQUAL, rank), batch_size=None))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_lazy_modules_are_refused_by_name(pool: RankPool) -> None:
    for message in pool.run(2, fit_lazy):
        assert message.startswith("the shape of 'lazy.weight' is not known yet")
        assert "\n" not in message


class Frozen(Base):
    """Nothing to train: what is left is to look at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.automatic_optimization = False
        self.seen = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen += len(batch["x"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", squares(self.net(batch["x"]), batch), batch_size=len(batch["x"]), sync_dist=True)

    def configure_optimizers(self) -> None:
        return None


def watch(rank: int | None, counts: Counts) -> tuple[int, float]:
    module = Frozen()
    trainer = trainer_of("auto" if rank is None else "bucketed_ddp", 1 if rank is None else 2, max_epochs=1)
    data = DataLoader(Batches(counts, rank), batch_size=None)
    trainer.fit(module, data)
    (metrics,) = trainer.validate(module, data, verbose=False)
    return module.seen, metrics["loss"]


def test_a_module_with_nothing_to_train_runs_and_is_validated(pool: RankPool) -> None:
    counts = [by_rank[:2] for by_rank in UNEVEN]
    seen, loss = watch(None, counts)
    results = pool.run(2, watch, counts)
    assert sum(mine for mine, _ in results) == seen
    for _, mine in results:
        assert mine == pytest.approx(loss, rel=1e-12)


class NeverSynchronises(kinds.Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch, batch_idx))
        if batch_idx == 1:
            self.optimizers().step()


def fit_without_sync(rank: int) -> str:
    data = DataLoader(Batches(EQUAL, rank), batch_size=None)
    try:
        trainer_of("bucketed_ddp", 2, max_epochs=1).fit(NeverSynchronises(), data)
    except UnreducedGradientError as error:
        return str(error)
    return ""


def test_a_step_on_gradients_that_were_never_averaged_is_an_error_on_every_rank(pool: RankPool) -> None:
    for rank, message in enumerate(pool.run(2, fit_without_sync)):
        assert message.startswith(f"rank {rank}, step 0, batch 1: gradients were accumulated without synchronisation")


class Normalised(Base):
    """SWA recomputes BatchNorm's statistics in an epoch of its own, for which it changes the loop."""

    def build(self) -> None:
        self.net.append(nn.BatchNorm1d(CLASSES))


def average_with_batchnorm(rank: int | None) -> tuple[int, int, int]:
    module = Normalised()
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    devices = 1 if rank is None else 2
    trainer = trainer_of("auto" if rank is None else "bucketed_ddp", devices, max_epochs=3, callbacks=[swa])
    trainer.fit(module, DataLoader(Batches(EQUAL, rank), batch_size=None))
    return trainer.num_training_batches, trainer.global_step, int(module.net[-1].num_batches_tracked)


def test_swa_of_batchnorm_takes_the_steps_it_takes_on_one_device(pool: RankPool) -> None:
    assert pool.run(2, average_with_batchnorm) == [average_with_batchnorm(None)] * 2
