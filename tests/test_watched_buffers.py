"""What becomes of a module's buffers in a run: dropped ranks, checks of the replicas, what is sent and what is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning_runs import Counts, Module, loader, loss_of, net, samples, trainer_of
from rank_pool import RankPool
from test_watch import Collects, said
from torch import Tensor, nn

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import ReplicaMismatchError
from lightning_dp.health.buffers import ModuleBuffers
from lightning_dp.health.replicas import ReplicaCheck
from lightning_dp.reduction.wire import Wire

COUNTS = [[4, 3, 2], [3, 4, 5], [2, 5, 3], [4, 4, 2], [3, 3, 4], [5, 2, 3], [4, 3, 3], [3, 2, 5]]
BATCHES = len(COUNTS)
MODES = ["step", "eval", "off"]


def of(world_size: int) -> Counts:
    return [by_rank[:world_size] for by_rank in COUNTS]


class SaveAt(Callback):
    """Writes a checkpoint behind a batch, or behind the first validation."""

    def __init__(self, path: str, batch: int | None) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        if self.batch is None:
            trainer.save_checkpoint(self.path)


def fit(module: Any, rank: int, world_size: int, k: int = 1, options: dict | None = None, **more: Any) -> Trainer:
    strategy = BucketedDDPStrategy(**(options or {}))
    settings = {"max_epochs": 1, "accumulate_grad_batches": k, **more}
    trainer = trainer_of(strategy, world_size, **settings)
    trainer.fit(module, loader(of(world_size), rank), loader(of(world_size)[:2], rank))
    return trainer


# ------------------------------------------------------------------------------------------- drop_rank


class Normalised(Module):
    """BatchNorm on the samples as they are, so that its statistics follow from them alone."""

    def __init__(self, bad: tuple[int, int] | None = None) -> None:
        super().__init__("sgd")
        self.net = nn.Sequential(nn.BatchNorm1d(10), net()).double()
        self.bad = bad

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.bad == (self.global_rank, batch_idx):
            batch = {**batch, "x": batch["x"] * float("nan")}
        return super().training_step(batch, batch_idx)


def statistics_after(seen: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """BatchNorm's statistics after these micro-batches, by rank and number, of one process."""
    norm = nn.BatchNorm1d(10).double()
    for rank, index in seen:
        norm(samples(index, rank, COUNTS[index][rank])["x"])
    return norm.running_mean, norm.running_var


def fit_dropping(rank: int, mode: str, bad: tuple[int, int], keeps_nothing: bool = False) -> tuple:
    module = Normalised(bad)
    options = {"nonfinite": "drop_rank", "broadcast_buffers": mode}
    patch = mock.patch.object(ModuleBuffers, "put_back", return_value=[]) if keeps_nothing else Collects()
    with patch:
        trainer = fit(module, rank, 2, options=options, limit_val_batches=0)
    norm = module.net[0]
    return norm.running_mean, norm.running_var, trainer.strategy.dropped_parts, trainer.strategy.skipped_steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [(0, 2), (1, 2), (1, 7)])
def test_a_dropped_batch_leaves_nothing_in_the_statistics(pool: RankPool, bad: tuple[int, int], mode: str) -> None:
    """Under ``"step"`` a rank begins each step with rank 0's, else it goes on with its own."""
    for rank, (mean, var, dropped, skipped) in enumerate(pool.run(2, fit_dropping, mode, bad)):
        before_last = [(0 if mode == "step" else rank, i) for i in range(BATCHES - 1)]
        seen = [part for part in [*before_last, (rank, BATCHES - 1)] if part != bad]
        right_mean, right_var = statistics_after(seen)
        assert torch.equal(mean, right_mean)
        assert torch.equal(var, right_var)
        assert (dropped, skipped) == (1, 0)


def test_without_copies_it_would(pool: RankPool) -> None:
    """The negative control."""
    for mean, *_ in pool.run(2, fit_dropping, "step", (0, 2), True):
        assert not torch.isfinite(mean).any()


# ------------------------------------------------------------------------------------------- no false alarm


class FrozenFirst(Normalised):
    """BatchNorm as in evaluation, for longer than values are compared by themselves; then in training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].train(batch_idx > ModuleBuffers.WINDOWS_COMPARED)


class AveragesInputs(Module):
    """Keeps a moving average that it moves when a batch has ended, which is after the ranks have agreed on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2, dtype=torch.float64))
        self.at_start: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.at_start.append(self.average.clone())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.mul_(0.9).add_(batch["x"].mean(0)[:2])


class LooksTwice(Normalised):
    """Manual optimization; every second batch is only looked at, and that moves the statistics, too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = loss_of(self.net, batch)
        if batch_idx % 2 == 0:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class CountsInValidation(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.sum.add_(batch["x"].sum())


class RegistersLate(Module):
    """A buffer that is made of the first batch, so that each rank has its own, as under torch DDP."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.register_buffer("first", batch["x"].mean(0), persistent=False)
        return super().training_step(batch, batch_idx)


# The module, micro-batches a step, and the batch behind which a checkpoint is written (None: a validation).
SOUND: dict[str, tuple[Callable[[], Any], int, int | None]] = {
    "BatchNorm, checkpoint within a window": (Normalised, 2, 4),
    "BatchNorm, checkpoint behind a step": (Normalised, 1, 4),
    "BatchNorm that begins to train late": (FrozenFirst, 1, 6),
    "written when a batch has ended": (AveragesInputs, 1, 5),
    "a forward pass without backward": (LooksTwice, 1, 5),
    "written in validation": (CountsInValidation, 1, None),
    "registered late": (RegistersLate, 1, 4),
}


def fit_sound(rank: int, name: str, mode: str, every: int, folder: str) -> tuple[int, list[str], bool]:
    make, k, batch = SOUND[name]
    path = Path(folder) / f"{mode}-{every}.ckpt"
    options = {"broadcast_buffers": mode, "check_replicas_every": every}
    check = mock.patch.object(ReplicaCheck, "check", autospec=True, side_effect=ReplicaCheck.check)
    with Collects() as collected, check as checked:
        fit(make(), rank, 3, k, options, callbacks=[SaveAt(str(path), batch)])
    return checked.call_count, collected.lines, path.exists()


def fit_sound_in_all_modes(rank: int, name: str, folder: str) -> list[tuple[int, list[str], bool]]:
    return [fit_sound(rank, name, mode, every, folder) for mode in MODES for every in (1000, 1)]


@pytest.mark.parametrize("name", SOUND)
def test_buffers_that_change_raise_no_alarm(pool: RankPool, name: str, tmp_path: Path) -> None:
    for results in pool.run(3, fit_sound_in_all_modes, name, str(tmp_path)):
        for checks, lines, saved in results:
            assert checks >= 1, "one before the checkpoint"
            assert lines == []
            assert saved


def averages(rank: int, mode: str) -> list[Tensor]:
    module = AveragesInputs()
    fit(module, rank, 3, options={"broadcast_buffers": mode}, limit_val_batches=0)
    return module.at_start


def test_what_a_batchs_end_writes_is_sent_before_the_next_step_but_one(pool: RankPool) -> None:
    """The ranks learn of the first write from the ballot of the step after it, and then it is known to change."""
    of_rank = []
    for rank in range(3):
        average = torch.zeros(2, dtype=torch.float64)
        of_rank.append([average.clone()])
        for index in range(BATCHES - 1):
            average.mul_(0.9).add_(samples(index, rank, COUNTS[index][rank])["x"].mean(0)[:2])
            of_rank[rank].append(average.clone())
    for rank, (sent, kept) in enumerate(zip(*(pool.run(3, averages, mode) for mode in ("step", "eval")), strict=True)):
        assert torch.equal(torch.stack(sent), torch.stack([*of_rank[rank][:2], *of_rank[0][2:]]))
        assert torch.equal(torch.stack(kept), torch.stack(of_rank[rank])), "negative control"


# ------------------------------------------------------------------------------------------- a flipped bit


class WithTable(Normalised):
    """A constant beside statistics that change."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, size))


class FlipsTableBit(Callback):
    """As a fault of the memory does: by no write that anybody counts."""

    def __init__(self, rank: int, batch: int) -> None:
        self.at = (rank, batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at == (trainer.global_rank, batch_idx):
            pl_module.table.data.view(torch.int32)[3] ^= 1


def fit_with_flipped_table(rank: int, culprit: int, options: dict) -> tuple[Tensor, list[str]]:
    """The table, and what was warned of or raised."""
    module = WithTable()
    with mock.patch("lightning_dp.health.replicas.warnings.warn") as warn:
        try:
            fit(module, rank, 3, options=options, callbacks=[FlipsTableBit(culprit, 5)])
        except ReplicaMismatchError as error:
            return module.table, [str(error)]
    return module.table, [line for line in said(warn) if "differs" in line]


@pytest.mark.parametrize("mode", ["step", "eval"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_flipped_bit_of_a_constant_is_found_and_named(pool: RankPool, culprit: int, mode: str) -> None:
    options = {"check_replicas_every": 1, "broadcast_buffers": mode}
    for _, (line,) in pool.run(3, fit_with_flipped_table, culprit, options):
        assert f"rank {culprit} of 3 differs from the rest in buffer table" in line
        assert "before step 6" in line


def test_it_is_mended_from_the_majority(pool: RankPool) -> None:
    options = {"check_replicas_every": 1, "on_replica_mismatch": "resync"}
    right = WithTable().table
    results = pool.run(3, fit_with_flipped_table, 0, options)
    assert all(torch.equal(table, right) for table, _ in results), "and not from rank 0"
    assert ["rank 0 of 3 differs" in line for _, lines in results for line in lines] == [True]
    unchecked = pool.run(3, fit_with_flipped_table, 0, {"check_replicas_every": 0})
    assert [torch.equal(table, right) for table, _ in unchecked] == [False, True, True], "negative control"


# ------------------------------------------------------------------------------------------- replaced, gone, resized


class TakesApart(Module):
    """In mid-run a cache is emptied and a layer exchanged; then comes a bad batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))
        self.head = nn.Sequential(nn.BatchNorm1d(10)).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.cache = None
        if batch_idx == 3:
            self.head = nn.Identity()
        loss = loss_of(self.net, {**batch, "x": self.head(batch["x"])})
        return loss * float("nan") if (self.global_rank, batch_idx) == (0, 5) else loss


def fit_taking_apart(rank: int, mode: str) -> tuple[bool, int, list[str], bytes]:
    module = TakesApart()
    with Collects() as collected:
        trainer = fit(module, rank, 2, options={"broadcast_buffers": mode, "check_replicas_every": 2})
    return module.cache is None, trainer.strategy.skipped_steps, collected.lines, module.digests[-1]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_are_gone_do_not_come_back_when_a_step_is_skipped(pool: RankPool, mode: str) -> None:
    results = pool.run(2, fit_taking_apart, mode)
    for gone, skipped, lines, digest in results:
        assert gone
        assert skipped == 1
        assert sum("non-finite gradient: rank 0" in line for line in lines) == 1
        assert digest == results[0][3]


class KeepsLastInput(Normalised):
    """A buffer of the size of the rank's batch, beside statistics that can be sent."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 10, dtype=torch.float64), persistent=False)
        self.at_end = at_end
        self.means: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.means.append(self.net[0].running_mean.clone())
        if not self.at_end:
            self.last = batch["x"].clone()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.at_end:
            self.last = batch["x"].clone()


# The last batch alone is ragged, so that it comes as a surprise.
LAST_RAGGED = [[4, 4], [4, 4], [4, 4], [4, 4], [4, 2]]


def fit_resizing(rank: int, at_end: bool) -> tuple[Tensor, list[Tensor], list[str], bytes, int]:
    module = KeepsLastInput(at_end)
    trainer = trainer_of(BucketedDDPStrategy(check_replicas_every=1), 2, max_epochs=2)
    with Collects() as collected:
        trainer.fit(module, loader(LAST_RAGGED, rank))
    return module.last, module.means, collected.lines, module.digests[-1], len(module.digests)


@pytest.mark.parametrize("at_end", [False, True])
def test_a_buffer_that_follows_the_batch_size_stays_each_ranks_own(pool: RankPool, at_end: bool) -> None:
    results = pool.run(2, fit_resizing, at_end)
    for rank, (last, means, lines, digest, steps) in enumerate(results):
        assert torch.equal(last, samples(4, rank, LAST_RAGGED[4][rank])["x"])
        (line,) = lines
        assert "rank 0's last cannot be sent to the other ranks" in line
        assert digest == results[0][3]
        assert steps == 10
        assert torch.equal(torch.stack(means), torch.stack(results[0][1])), "the others are still sent"
    assert not torch.equal(results[0][0][:2], results[1][0][:2])


# ------------------------------------------------------------------------------------------- what evaluation sends


class Evaluates(WithTable):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass


def bytes_sent(rank: int, constant_only: bool) -> list[int]:
    """By each broadcast after the first weights have been sent."""
    module = Evaluates(300_000)
    if constant_only:
        module.net = net()
    inner, sent = Wire.broadcast, []

    def spy(self: Wire, tensor: Tensor, source: int = 0) -> None:
        if module.digests:
            sent.append(tensor.nbytes)
        inner(self, tensor, source)

    with mock.patch.object(Wire, "broadcast", spy):
        fit(module, rank, 2, options={"broadcast_buffers": "eval"}, max_epochs=3)
    return sent


def test_constants_are_not_sent_before_an_evaluation(pool: RankPool) -> None:
    statistics = (10 + 10) * 8 + 8 + 3  # and a byte for each of the three
    assert pool.run(2, bytes_sent, False) == [[statistics] * 3] * 2, "before each of three evaluations"
    assert pool.run(2, bytes_sent, True) == [[]] * 2
