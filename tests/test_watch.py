"""What the strategy looks after beside the gradients: vetoes, spikes, bad ranks, buffers, replicas, data."""

from __future__ import annotations

import os
import pkgutil
import random
import statistics
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning_runs import (
    Module,
    flat,
    loader,
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
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_dp import BucketedDDPStrategy, GradientReducer, ReducerConfig
from lightning_dp.errors import LightningDPError
from lightning_dp.health.replicas import ReplicaCheck
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.reduction.ballot import Flag, Reason

RAGGED = [[4, 1, 3, 2], [2, 5, 1, 4], [3, 3, 2, 1], [1, 2, 4, 3], [5, 1, 1, 2], [2, 2, 3, 4]]


def first_ranks(world_size: int) -> list[list[int]]:
    return [by_rank[:world_size] for by_rank in RAGGED]


def said(mocked: mock.Mock) -> list[str]:
    return [str(call.args[0]) for call in mocked.call_args_list]


class Collects:
    """Keeps what is said once for all ranks, and by this rank alone."""

    def __enter__(self) -> Collects:
        self._patches = [
            mock.patch("lightning_dp.progress.rank_zero_warn"),
            mock.patch("lightning_dp.watch.rank_zero_warn"),
        ]
        self._mocks = [patch.start() for patch in self._patches]
        return self

    def __exit__(self, *args: Any) -> None:
        for patch in self._patches:
            patch.stop()

    @property
    def lines(self) -> list[str]:
        return [line for mocked in self._mocks for line in said(mocked)]


# ------------------------------------------------------------------------------------------- the vote's words


class Poisoned(Module):
    """Multiplies the loss of some ranks and batches by NaN or Inf."""

    def __init__(self, batches: dict[int, tuple[int, ...]], value: float = float("nan")) -> None:
        super().__init__("adamw")
        self.batches, self.value = batches, value

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.global_rank in self.batches.get(batch_idx, ()) else loss


def fit(rank: int, world_size: int, module: Module, k: int = 1, epochs: int = 1, **options: Any) -> dict[str, Any]:
    callbacks = options.pop("callbacks", [])
    trainer = trainer_of(
        BucketedDDPStrategy(bucket_cap_mb=0.002, first_bucket_cap_mb=0.001, **options),
        world_size,
        max_epochs=epochs,
        accumulate_grad_batches=k,
        callbacks=callbacks,
    )
    with Collects() as collected:
        trainer.fit(module, loader(first_ranks(world_size), rank))
    strategy = trainer.strategy
    return {
        "weights": flat(module.net),
        "digest": module.digests[-1],
        "skipped": strategy.skipped_steps,
        "dropped": strategy.dropped_parts,
        "said": collected.lines,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def fit_poisoned(rank: int, world_size: int, batches: dict[int, tuple[int, ...]], k: int, options: dict) -> dict:
    return fit(rank, world_size, Poisoned(batches), k, **options)


def test_every_bad_rank_is_named_with_parameter_batch_and_loss(pool: RankPool) -> None:
    results = pool.run(4, fit_poisoned, 4, {2: (1, 3)}, 1, {})
    (line,) = results[0]["said"]
    first_loss = {r: loss_of(net(), samples(2, r, 1)).item() for r in (1, 3)}
    assert first_loss[1] != first_loss[3]
    assert line.startswith("step 2, batch 2: non-finite gradient: rank 1: ")
    for rank in (1, 3):
        part = line.split(f"rank {rank}: ")[1].split(";")[0]
        assert "NaN (" in part
        assert "elements)" in part
        assert "0.weight" in part or "4.weight" in part
        assert "batch 2, loss nan" in part
    assert "rank 0:" not in line
    assert "rank 2:" not in line


def test_the_losses_of_a_window_tell_which_micro_batch_was_bad(pool: RankPool) -> None:
    (line,) = pool.run(2, fit_poisoned, 2, {4: (1,)}, 3, {})[0]["said"]
    losses = line.split("batch 3 to batch 5, losses ")[1].split(" (")[0].split(";")[0].split(", ")
    assert losses[1] == "nan"
    assert all(float(loss) > 0 for loss in (losses[0], losses[2]))


class InEveryPrecision(Poisoned):
    """Keeps what each step started from and ended at."""

    def __init__(self, batches: dict[int, tuple[int, ...]]) -> None:
        super().__init__(batches)
        self.net = self.net.float()
        self.optimizer = "sgd"  # Adam's epsilon is 0 in float16
        self.states: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.states.append(flat(self.net))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        dtype = self.net[0].weight.dtype
        return super().training_step({key: value.to(dtype) for key, value in batch.items()}, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.states.append(flat(self.net))


def fit_in_precision(rank: int, precision: str) -> tuple:
    module = InEveryPrecision({3: (1,)})
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1, precision=precision)
    with Collects() as collected:
        trainer.fit(module, loader(first_ranks(2), rank))
    return module.states, collected.lines, trainer.strategy.skipped_steps


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_the_vote_works_in_every_precision(pool: RankPool, precision: str) -> None:
    results = pool.run(2, fit_in_precision, precision)
    (line,) = results[0][1]
    assert line.startswith("step 3, batch 3: non-finite gradient: rank 1: ")
    for states, _, skipped in results:
        assert skipped == 1
        for batch in range(6):
            assert torch.equal(states[2 * batch], states[2 * batch + 1]) == (batch == 3)
        assert torch.equal(states[-1], results[0][0][-1])
        assert torch.isfinite(states[-1]).all()


# ------------------------------------------------------------------------------------------- drop_rank


def without(world_size: int, k: int, window: int, ranks: tuple[int, ...]) -> list[list[int]]:
    """The counts with some ranks' part of one window taken out."""
    counts = [list(by_rank) for by_rank in first_ranks(world_size)]
    for index in range(window * k, (window + 1) * k):
        for rank in ranks:
            counts[index][rank] = 0
    return counts


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("world_size", "ranks"), [(2, (1,)), (3, (0,)), (4, (1, 3))])
def test_a_dropped_rank_leaves_a_step_exact_over_the_others(
    pool: RankPool, world_size: int, ranks: tuple[int, ...], k: int
) -> None:
    results = pool.run(world_size, fit_poisoned, world_size, {2 * k: ranks}, k, {"nonfinite": "drop_rank"})
    right = single_device(without(world_size, k, 2, ranks), "samples", "adamw", k, 1)
    skipping = single_device(first_ranks(world_size), "samples", "adamw", k, 1, skip={2})
    for result in results:
        assert relative_error(result["weights"], right) < 1e-12
        assert relative_error(result["weights"], skipping) > 1e-6, "negative control: a skipped step is another one"
        assert result["digest"] == results[0]["digest"]
        assert (result["skipped"], result["dropped"]) == (0, len(ranks))
    (line,) = results[0]["said"]
    assert f"rank {ranks[0]}:" in line
    assert "left out of the step" in line


def test_a_step_in_which_all_ranks_are_bad_is_skipped(pool: RankPool) -> None:
    results = pool.run(2, fit_poisoned, 2, {1: (0, 1)}, 1, {"nonfinite": "drop_rank"})
    right = single_device(first_ranks(2), "samples", "adamw", 1, 1, skip={1})
    for result in results:
        assert relative_error(result["weights"], right) < 1e-12
        assert (result["skipped"], result["dropped"]) == (1, 0)


# ------------------------------------------------------------------------------------------- vetoes and spikes


class Vetoes(Module):
    def __init__(self, rank: int, batch: int) -> None:
        super().__init__("adamw")
        self.at = (rank, batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if (self.global_rank, batch_idx) == self.at:
            self.trainer.strategy.veto("the labels of shard 7 are shifted")
        return super().training_step(batch, batch_idx)


def fit_vetoing(rank: int, k: int) -> dict:
    return fit(rank, 2, Vetoes(1, 2), k)


@pytest.mark.parametrize("k", [1, 2])
def test_one_ranks_veto_skips_the_step_on_all(pool: RankPool, k: int) -> None:
    results = pool.run(2, fit_vetoing, k)
    right = single_device(first_ranks(2), "samples", "adamw", k, 1, skip={2 // k})
    for result in results:
        assert relative_error(result["weights"], right) < 1e-12
        assert result["skipped"] == 1
    (line,) = results[0]["said"]
    assert f"step {2 // k}" in line
    assert "vetoed: rank 1: the labels of shard 7 are shifted, batch" in line


class VetoesLate(Module):
    def on_after_backward(self) -> None:
        try:
            self.trainer.strategy.veto("too big")
        except LightningDPError as error:
            self.error = str(error)


def fit_vetoing_late(rank: int) -> tuple[str, int]:
    module = VetoesLate()
    result = fit(rank, 2, module)
    return module.error, result["skipped"]


def test_a_late_veto_is_refused(pool: RankPool) -> None:
    for error, skipped in pool.run(2, fit_vetoing_late):
        assert "a veto comes too late" in error
        assert skipped == 0


class Spikes(Module):
    """Once the loss is a thousand times as steep, on rank 1 only."""

    def __init__(self, at: int) -> None:
        super().__init__("sgd")
        self.at = at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        steep = self.global_rank == 1 and self.trainer.global_step == self.at
        return loss * 1000 if steep else loss


def fit_with_spike(rank: int, at: int, options: dict) -> tuple[dict, dict]:
    module = Spikes(at)
    result = fit(rank, 2, module, epochs=6, **options)
    return result


def test_a_spike_of_the_norm_is_skipped_on_all_ranks(pool: RankPool) -> None:
    """36 steps; the spike is in step 27, within the fifth epoch."""
    results = pool.run(2, fit_with_spike, 27, {"spike_factor": 20.0})
    right = single_device(first_ranks(2), "samples", "sgd", 1, 6, skip={27})
    for result in results:
        assert relative_error(result["weights"], right) < 1e-12
        assert result["skipped"] == 1
    (line,) = results[0]["said"]
    assert line.startswith("step 27, batch 3: vetoed: the gradient's norm")
    assert "more than 20 times the median" in line
    # Negative control: without the rule the step is taken.
    unruled = pool.run(2, fit_with_spike, 27, {})
    assert relative_error(unruled[0]["weights"], right) > 1e-3


def test_the_first_steps_are_no_spikes(pool: RankPool) -> None:
    assert pool.run(2, fit_with_spike, 5, {"spike_factor": 20.0})[0]["skipped"] == 0


# ------------------------------------------------------------------------------------------- hooks, metrics, counters


class Listens(Callback):
    def __init__(self) -> None:
        self.heard: list[tuple[int, Any, tuple[int, ...]]] = []

    def on_step_skipped(self, trainer: Trainer, pl_module: Any, verdict: Any) -> None:
        self.heard.append((trainer.global_step, verdict.reason, verdict.ranks))


class PoisonedAndListening(Poisoned):
    def on_step_skipped(self, trainer: Trainer, pl_module: Any, verdict: Any) -> None:
        self.told = pl_module is self and verdict.detail


def fit_listening(rank: int) -> tuple:
    callback = Listens()
    module = PoisonedAndListening({4: (1,), 5: (0,)})
    result = fit(rank, 2, module, callbacks=[callback, DataParallelMonitor()])
    return callback.heard, module.told, result["metrics"]


def test_callbacks_and_metrics_tell_of_skipped_steps_on_every_rank(pool: RankPool) -> None:
    for heard, told, metrics in pool.run(2, fit_listening):
        assert heard == [(4, Reason.NONFINITE, (1,)), (5, Reason.NONFINITE, (0,))]
        assert "rank 0: " in told
        assert metrics["dp/skipped_steps"] == 2
        assert metrics["dp/consecutive_skips"] == 2
        assert metrics["dp/dropped_parts"] == 0
        assert metrics["dp/exposed_seconds"] >= 0


def fit_and_predict(rank: int, cap: float | str) -> tuple[float | None, float | None]:
    strategy = BucketedDDPStrategy(bucket_cap_mb=cap)
    trainer = trainer_of(strategy, 2, max_epochs=3, callbacks=[DataParallelMonitor()])
    trainer.fit(Module(), loader(first_ranks(2), rank))
    logged = trainer.callback_metrics.get("dp/predicted_exposed_seconds")
    return None if logged is None else float(logged), strategy.report().predicted_exposed_seconds


def test_what_the_plan_was_predicted_to_leave_is_logged_and_reported(pool: RankPool) -> None:
    by_rank = pool.run(2, fit_and_predict, "auto")
    assert by_rank[0] == by_rank[1]
    logged, reported = by_rank[0]
    assert reported is not None
    assert logged == pytest.approx(reported, rel=1e-6)
    assert pool.run(2, fit_and_predict, 25.0) == [(None, None)] * 2  # nothing was predicted


class Save(Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit_and_resume(rank: int, path: str) -> tuple:
    options = {"spike_factor": 20.0}
    first = fit(rank, 2, Poisoned({2: (1,)}), callbacks=[Save(path, 4)], **options)
    trainer = trainer_of(BucketedDDPStrategy(**options), 2, max_epochs=1)
    trainer.fit(Poisoned({}), loader(first_ranks(2), rank), ckpt_path=path)
    norms = torch.load(path, weights_only=True)["lightning_dp"]["watch"]["spikes"]["0"]["norms"]
    return first["skipped"], trainer.strategy.skipped_steps, len(norms)


def test_counters_and_norms_survive_a_resume(pool: RankPool, tmp_path: Path) -> None:
    for first, resumed, norms in pool.run(2, fit_and_resume, str(tmp_path / "at.ckpt")):
        assert first == resumed == 1
        assert norms == 3, "of four steps one was skipped"


class Scheduled(Poisoned):
    """A scheduler that halves the rate every ``frequency`` batches."""

    def __init__(self, batches: dict[int, tuple[int, ...]], frequency: int) -> None:
        super().__init__(batches)
        self.frequency = frequency
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def fit_scheduled(rank: int, batches: dict, frequency: int) -> list[float]:
    module = Scheduled(batches, frequency)
    fit(rank, 2, module)
    return module.rates


@pytest.mark.parametrize(
    ("batches", "frequency", "rates"),
    [
        ({1: (0,)}, 1, [0.5, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        ({1: (0,)}, 2, [1, 0.5, 0.5, 0.25, 0.25, 0.125]),  # the first of its two steps was taken
        ({2: (0,), 3: (0,)}, 2, [1, 0.5, 0.5, 0.5, 0.5, 0.25]),  # none of its two steps was
    ],
)
def test_schedulers_do_not_move_for_skipped_steps(
    pool: RankPool, batches: dict, frequency: int, rates: list[float]
) -> None:
    assert pool.run(2, fit_scheduled, batches, frequency) == [rates, rates]


# ------------------------------------------------------------------------------------------- buffers


class WithBuffers(Poisoned):
    """BatchNorm, a codebook that is replaced by assignment, and a constant; keeps them by batch."""

    def __init__(self, batches: dict[int, tuple[int, ...]] | None = None) -> None:
        super().__init__(batches or {})
        self.net = nn.Sequential(nn.BatchNorm1d(10), net()).double()
        self.register_buffer("codebook", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("constant", torch.arange(4.0))
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.before.append(self.snapshot())
        bad = self.global_rank in self.batches.get(batch_idx, ())
        if bad:
            batch = {**batch, "x": batch["x"] * self.value}
        loss = Module.training_step(self, batch, batch_idx)
        self.codebook = 0.9 * self.codebook + batch["x"].detach().mean(0)[:3]
        return loss

    def snapshot(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.after.append(self.snapshot())


def wide(world_size: int) -> list[list[int]]:
    return [[3 + (i + r) % 3 for r in range(world_size)] for i in range(6)]


def fit_with_buffers(rank: int, batches: dict, k: int, options: dict, keeps_nothing: bool = False) -> tuple:
    module = WithBuffers(batches)
    trainer = trainer_of(
        BucketedDDPStrategy(**options), 3, max_epochs=1, accumulate_grad_batches=k, limit_val_batches=0
    )
    patch = mock.patch("lightning_dp.health.buffers.ModuleBuffers.put_back", return_value=[])
    with patch if keeps_nothing else Collects():
        trainer.fit(module, loader(wide(3), rank))
    return module.before, module.after


@pytest.mark.parametrize("mode", ["step", "off"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_skipped_step_leaves_nothing_in_the_buffers(pool: RankPool, k: int, mode: str) -> None:
    """Batch 3 is bad on rank 0, in the window that begins with batch 3 (k = 1) or 2 (k = 2)."""
    start = 3 if k == 1 else 2
    for before, after in pool.run(3, fit_with_buffers, {3: (0,)}, k, {"broadcast_buffers": mode}):
        for name in ("net.0.running_mean", "net.0.running_var", "codebook", "constant"):
            assert torch.equal(after[3][name], before[start][name]), name
            assert torch.isfinite(after[-1][name]).all()
        assert not torch.equal(after[2]["net.0.running_mean"], before[2]["net.0.running_mean"])
    poisoned = pool.run(3, fit_with_buffers, {3: (0,)}, k, {"broadcast_buffers": mode}, True)[0][1]
    assert not torch.isfinite(poisoned[-1]["net.0.running_mean"]).all(), "negative control"


def equal_on_ranks(snapshots: list[dict[str, Tensor]], name: str) -> bool:
    return all(torch.equal(snapshot[name], snapshots[0][name]) for snapshot in snapshots)


@pytest.mark.parametrize(("mode", "equal"), [("step", True), ("eval", False), ("off", False)])
def test_buffers_are_rank_zeros_at_the_start_of_every_step(pool: RankPool, mode: str, equal: bool) -> None:
    results = pool.run(3, fit_with_buffers, {}, 1, {"broadcast_buffers": mode})
    for batch in range(1, 6):
        starts = [before[batch] for before, _ in results]
        assert equal_on_ranks(starts, "net.0.running_mean") == equal
        assert equal_on_ranks(starts, "codebook") == equal, "replaced by assignment"
        assert torch.equal(starts[0]["codebook"], results[0][1][batch - 1]["codebook"]), "rank 0 keeps its own"
        assert not equal_on_ranks([after[batch] for _, after in results], "net.0.running_mean")


class EvaluatesBuffers(WithBuffers):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.at_evaluation = self.snapshot()


def fit_and_evaluate(rank: int, mode: str) -> dict[str, Tensor]:
    module = EvaluatesBuffers()
    trainer = trainer_of(BucketedDDPStrategy(broadcast_buffers=mode), 2, max_epochs=1)
    trainer.fit(module, loader(wide(2), rank), loader(wide(2)[:2], rank))
    return module.at_evaluation


@pytest.mark.parametrize(("mode", "equal"), [("step", True), ("eval", True), ("off", False)])
def test_all_ranks_evaluate_with_the_same_buffers(pool: RankPool, mode: str, equal: bool) -> None:
    snapshots = pool.run(2, fit_and_evaluate, mode)
    for name in ("net.0.running_mean", "codebook"):
        assert equal_on_ranks(snapshots, name) == equal


def count_broadcasts(rank: int, cls: type) -> int:
    module = cls()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=1)
    with mock.patch("lightning_dp.health.buffers.ModuleBuffers.broadcast") as broadcast:
        trainer.fit(module, loader(wide(2), rank))
    return broadcast.call_count


class WithConstant(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.arange(4.0))


def test_buffers_that_nobody_changes_are_not_sent(pool: RankPool) -> None:
    assert pool.run(2, count_broadcasts, WithConstant) == [0, 0]
    assert pool.run(2, count_broadcasts, WithBuffers) == [5, 5], "before each step but the first"


# ------------------------------------------------------------------------------------------- replicas


class FlipsABit(Callback):
    """One bit of one weight on one rank, after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            with torch.no_grad():
                pl_module.net[2].weight.view(torch.int64)[3, 5] ^= 1


def fit_flipping(rank: int, culprit: int, path: str, options: dict) -> tuple[bytes, list[str]]:
    module = Module("adamw")
    callbacks = [FlipsABit(culprit, 3), *([Save(path, 4)] if path else [])]
    trainer = trainer_of(BucketedDDPStrategy(**options), 3, max_epochs=1, callbacks=callbacks)
    with mock.patch("lightning_dp.health.replicas.warnings.warn") as warn:
        trainer.fit(module, loader(first_ranks(3), rank))
    return module.digests[-1], said(warn)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_flipped_bit_ends_the_run_and_names_the_rank(pool: RankPool, culprit: int) -> None:
    with pytest.raises(RankFailureError, match=f"rank {culprit} of 3 differs from the rest in parameter net.2.weight"):
        pool.run(3, fit_flipping, culprit, "", {"check_replicas_every": 2})


def test_a_resync_mends_it(pool: RankPool) -> None:
    options = {"check_replicas_every": 2, "on_replica_mismatch": "resync"}
    results = pool.run(3, fit_flipping, 1, "", options)
    assert len({digest for digest, _ in results}) == 1
    assert any("rank 1 of 3 differs" in line and "copied" in line for line in results[0][1])
    unchecked = pool.run(3, fit_flipping, 1, "", {"check_replicas_every": 0})
    assert len({digest for digest, _ in unchecked}) == 2, "negative control"


def test_no_checkpoint_is_written_of_replicas_that_differ(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "at.ckpt")
    with pytest.raises(RankFailureError, match="rank 1 of 3 differs from the rest"):
        pool.run(3, fit_flipping, 1, path, {"check_replicas_every": 1000})
    assert not Path(path).exists()


def fit_checking_always(rank: int, cls: type, mode: str) -> int:
    strategy = BucketedDDPStrategy(check_replicas_every=1, broadcast_buffers=mode)
    trainer = trainer_of(strategy, 3, max_epochs=3, callbacks=[Save(os.devnull, 99)])
    check = ReplicaCheck.check
    with mock.patch.object(ReplicaCheck, "check", autospec=True, side_effect=check) as checked:
        trainer.fit(cls(), loader(wide(3), rank))
    return checked.call_count


@pytest.mark.parametrize("mode", ["step", "eval", "off"])
def test_sound_runs_raise_no_alarm(pool: RankPool, mode: str) -> None:
    for checks in pool.run(3, fit_checking_always, WithBuffers, mode):
        assert checks == 17, "before each of 18 steps but the first"


# ------------------------------------------------------------------------------------------- the same data


class Rows(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return samples(index, 0, 1)


class RowStream(IterableDataset):
    """Every rank's stream is the whole, unless it is told to take a share."""

    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def __iter__(self) -> Any:
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.shares else (0, 1)
        assert get_worker_info() is None
        return (samples(index, 0, 1) for index in range(rank, 24, size))


def fit_data(rank: int, kind: str, options: dict, trainer_options: dict) -> list[str]:
    dataset: Any = Rows() if kind == "map" else RowStream(kind == "shared stream")
    data = DataLoader(dataset, batch_size=2, collate_fn=join)
    trainer = trainer_of(BucketedDDPStrategy(**options), 3, max_epochs=1, limit_val_batches=0, **trainer_options)
    with Collects() as collected:
        trainer.fit(Module(), data)
    return collected.lines


def join(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.parametrize(
    ("kind", "trainer_options", "cause"),
    [
        ("map", {"use_distributed_sampler": False}, "DistributedSampler"),
        ("whole stream", {}, "every rank"),
    ],
)
def test_ranks_that_read_the_same_are_named_with_the_cause(
    pool: RankPool, kind: str, trainer_options: dict, cause: str
) -> None:
    lines = pool.run(3, fit_data, kind, {}, trainer_options)[0]
    (line,) = [line for line in lines if "identical batches" in line]
    assert "ranks 0, 1, 2 read identical batches" in line
    print(line)
    assert cause in line
    with pytest.raises(RankFailureError, match="ranks 0, 1, 2 read identical batches"):
        pool.run(3, fit_data, kind, {"same_data": "raise"}, trainer_options)
    assert pool.run(3, fit_data, kind, {"same_data": "off"}, trainer_options)[0] == []


@pytest.mark.parametrize(
    ("kind", "trainer_options"),
    [
        ("map", {"use_distributed_sampler": True}),
        ("shared stream", {}),
        ("map", {"use_distributed_sampler": False, "overfit_batches": 4}),
    ],
)
def test_sound_data_and_data_that_are_meant_to_be_equal_raise_no_alarm(
    pool: RankPool, kind: str, trainer_options: dict
) -> None:
    assert pool.run(3, fit_data, kind, {"same_data": "raise"}, trainer_options) == [[], [], []]


# ------------------------------------------------------------------------------------------- unused parameters


class Unused(Module):
    """``spare`` never gets a gradient, ``rare`` gets one on one rank now and then, ``frozen`` is not to get any."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.rare, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rarely = self.global_rank == 1 and batch_idx == 3
        return loss + self.rare(torch.ones(2, dtype=torch.float64)).sum() if rarely else loss


def fit_unused(rank: int, options: dict) -> list[str]:
    return fit(rank, 2, Unused(), epochs=2, **options)["said"]


def test_parameters_that_nobody_uses_are_named_once(pool: RankPool) -> None:
    (line,) = pool.run(2, fit_unused, {"report_unused_after": 5})[0]
    assert line.startswith("in 5 steps no rank had a gradient for spare.weight, spare.bias: ")
    assert pool.run(2, fit_unused, {"report_unused_after": 0})[0] == []
    assert pool.run(2, fit_unused, {})[0] == [], "12 steps are fewer than 50"


# ------------------------------------------------------------------------------------------- many injections


def small_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def train(rank: int, k: int, steps: list[int], bad: tuple[int, int, str, int, float] | None) -> tuple:
    """A loop over ``steps``; ``bad`` puts a value into one element of one gradient on one rank in one step."""
    model = small_net()
    optimizer = optimizer_of("adamw", model.parameters())
    config = ReducerConfig(bucket_cap_mb=0.0004, first_bucket_cap_mb=0.0001)
    reducer = GradientReducer(model.named_parameters(), config=config)
    verdicts = {}
    for step in steps:
        optimizer.zero_grad()
        for micro in range(k):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            loss = model(x).square().mean()
            if bad is not None and (step, rank, micro) == (bad[0], bad[1], k - 1):
                spoil(model, loss, bad)
                loss = model(x).square().mean()
            if micro < k - 1:
                with reducer.no_sync():
                    reducer.backward(loss, count=4)
            else:
                reducer.backward(loss, count=4)
        verdicts[step] = reducer.last.verdict
        if reducer.last.verdict.step:
            optimizer.step()
    reducer.detach()
    return flat(model), verdicts


def spoil(model: nn.Module, loss: Tensor, bad: tuple[int, int, str, int, float]) -> None:
    """The next gradient of one parameter has a bad element."""
    _, _, name, element, value = bad
    parameter = dict(model.named_parameters())[name]

    def replace(grad: Tensor) -> Tensor:
        handle.remove()
        grad = grad.clone()
        grad.view(-1)[element % grad.numel()] = value
        return grad

    handle = parameter.register_hook(replace)


def inject(rank: int, seed: int, number: int) -> tuple[int, int, int]:
    """Random injections, all ranks drawing the same; counts skips on the right step, right culprits, right weights."""
    draw = random.Random(seed)
    world_size = dist.get_world_size()
    names = [name for name, _ in small_net().named_parameters()]
    skipped = named = same = 0
    for _ in range(number):
        k, culprit, step = draw.randint(1, 3), draw.randrange(world_size), draw.randrange(1, 5)
        value = draw.choice([float("nan"), float("inf"), float("-inf")])
        bad = (step, culprit, draw.choice(names), draw.randrange(30), value)
        weights, verdicts = train(rank, k, list(range(5)), bad)
        right, _ = train(rank, k, [other for other in range(5) if other != step], None)
        skipped += [s for s, verdict in verdicts.items() if not verdict.step] == [step]
        verdict = verdicts[step]
        kind = "NaN" if value != value else "Inf"
        named += verdict.ranks == (culprit,) and f"rank {culprit}: {bad[2]} {kind} (1 of" in verdict.detail
        same += torch.equal(weights, right)
    return skipped, named, same


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_hundred_injections_are_skipped_and_named(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, inject, 11 * world_size, 100, timeout=240)
    print(f"\n{world_size} ranks, 100 injections: (skipped on the right step, culprit named, same bits) {results}")
    assert results == [(100, 100, 100)] * world_size


# ------------------------------------------------------------------------------------------- stop


def stop_flags(rank: int) -> list[tuple[int, ...]]:
    model = small_net()
    reducer = GradientReducer(model.named_parameters())
    seen = []
    for step in range(3):
        model.zero_grad()
        if step == 1 and rank == 2:
            reducer.flags |= Flag.STOP
        reducer.backward(model(torch.ones(2, 6, dtype=torch.float64)).sum(), count=2)
        seen.append(reducer.last.tally.ranks_with(Flag.STOP))
        assert reducer.last.verdict.step
    return seen


def test_all_ranks_learn_in_the_same_step_who_wants_to_stop(pool: RankPool) -> None:
    assert pool.run(3, stop_flags) == [[(), (2,), ()]] * 3


# ------------------------------------------------------------------------------------------- what it costs


class Stopwatch:
    """Processor time of this thread spent within some functions."""

    def __init__(self, *targets: str) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._patches = [self._patch(target) for target in targets]

    def _patch(self, target: str) -> Any:
        module, _, name = target.rpartition(".")
        owner: Any = pkgutil.resolve_name(module)
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return mock.patch.object(owner, name, timed)

    def __enter__(self) -> Stopwatch:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *args: Any) -> None:
        for patch in self._patches:
            patch.stop()


class Wide(Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def measure_cost(rank: int) -> tuple[float, float]:
    """Shares of a step's processor time: the vote (check, scale, ballot) and the same-data check."""
    data = DataLoader(torch.randn(40 * 512, 1024), batch_size=512)
    trainer = trainer_of(BucketedDDPStrategy(), 2, max_epochs=1, precision="32-true", use_distributed_sampler=True)
    vote = Stopwatch(
        "lightning_dp.reduction.nonfinite.LocalCheck.take",
        "lightning_dp.reduction.nonfinite.LocalCheck.look",
        "lightning_dp.reduction.sums.scale_and_check_",
        "lightning_dp.reduction.ballot.encode",
        "lightning_dp.reduction.ballot.decode",
    )
    moving = Stopwatch("lightning_dp.reduction.buckets.Bucket.take")  # is done without a vote, too
    same_data = Stopwatch("lightning_dp.watch.Watch.receive", "lightning_dp.watch.Watch._judge_data")
    start = time.thread_time()
    with vote, moving, same_data, warnings.catch_warnings():
        trainer.fit(Wide(), data)
    whole = time.thread_time() - start
    return (vote.seconds - moving.seconds) / whole, same_data.seconds / whole


def test_the_vote_and_the_same_data_check_cost_little(pool: RankPool) -> None:
    """20 steps, in the first 8 of which batches are looked at; the gradient is 25 MB, the batch 512."""
    shares = pool.run(2, measure_cost, timeout=240)
    vote, same_data = (statistics.mean(column) for column in zip(*shares, strict=True))
    print(f"\nshare of a step's processor time: vote {vote:.2%}, same-data check {same_data:.2%}")
    assert vote + same_data < 0.02
