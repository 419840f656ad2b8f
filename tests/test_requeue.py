"""A signal to any rank stops all after the same step; the next start goes on with the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning_runs import Module, flat, loader, loss_of, trainer_of
from rank_pool import RankFailureError, RankPool
from test_resume import DrawsRandomNumbers, make_loader

from lightning_dp import SafeRequeue
from lightning_dp.callbacks import StoppedBySignal
from lightning_dp.cluster.requeue import job_id, requeue
from lightning_dp.errors import ConfigurationError
from lightning_dp.stop_signals import StopSignals

EPOCHS = 2
# What each rank sends itself, by the number of the batch that it is in: (rank, batch) -> signals.
Signals = dict[tuple[int, int], list[str]]
USR1, TERM, USR2 = "SIGUSR1", "SIGTERM", "SIGUSR2"
SCONTROL = """#!/bin/sh
echo "$@" >>{calls}
[ "$2" != show ] || echo "JobId=7 JobName=x JobState={state} Reason=None"
exit {code}
"""


class Signalled(DrawsRandomNumbers):
    """A module whose training step sends signals to its own process, within forward: between two collectives."""

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self.signals = signals
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in self.signals.get((self.global_rank, self.batches), ()):
            signal.raise_signal(signal.Signals[name])
        self.batches += 1
        return super().training_step(batch, batch_idx)


class CountSaves(Callback):
    def __init__(self) -> None:
        self.saves = 0

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saves += 1


def fit(rank: int, folder: str, signals: Signals, accumulate: int = 2, safe: bool = True, slurm: bool = False) -> dict:
    """Weights, steps, whether and how the run was stopped, checkpoints written, and handlers left behind."""
    torch.manual_seed(3)
    before = [signal.getsignal(signal.Signals[name]) for name in (USR1, USR2, TERM)]
    module, count = Signalled(signals), CountSaves()
    stop = SafeRequeue(folder)
    plugins = [SLURMEnvironment()] if slurm else []
    callbacks: list[Callback] = [stop, count] if safe else [count]
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, "use_distributed_sampler": True}
    trainer: Trainer = trainer_of("bucketed_ddp", 2, callbacks=callbacks, plugins=plugins, **settings)
    code: Any = None
    try:
        trainer.fit(module, make_loader("dealt out", rank, ()), ckpt_path=stop.checkpoint)
    except StoppedBySignal as stopped:
        code = stopped.code
    left = [signal.getsignal(signal.Signals[name]) for name in (USR1, USR2, TERM)]
    for name, handler in zip((USR1, USR2, TERM), before, strict=True):
        signal.signal(signal.Signals[name], handler)
    found = {"weights": flat(module), "step": trainer.global_step, "code": code, "saves": count.saves}
    return found | {"left": [str(h) for h in left], "before": [str(h) for h in before], "next": stop.checkpoint}


def in_slurm_job(rank: int, folder: str, bin_: str, signals: Signals, **options: Any) -> dict:
    """:func:`fit` as a task of an array's job, with ``scontrol`` of the folder ``bin_``."""
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_NTASKS": "2"}
    variables |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    variables |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2"}
    before = dict(os.environ)
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        os.environ.pop(name, None)
    os.environ |= {**variables, "PATH": f"{bin_}:{before['PATH']}"}
    try:
        return fit(rank, folder, signals, slurm=True, **options)
    finally:
        os.environ.clear()
        os.environ.update(before)


def scontrol(folder: Path, state: str = "RUNNING", code: int = 0) -> Path:
    """A stand-in that writes its arguments to ``calls``."""
    file = folder / "scontrol"
    file.write_text(SCONTROL.format(calls=folder / "calls", state=state, code=code))
    file.chmod(0o755)
    return folder / "calls"


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The run that nobody stops."""
    return pool.run(2, fit, str(tmp_path_factory.mktemp("whole")), {}, timeout=100)[0]


# 23 rows in batches of two are six batches a rank: three steps an epoch.
@pytest.mark.parametrize(
    ("signals", "step"),
    [
        pytest.param({(1, 0): [USR1]}, 1, id="one rank"),
        pytest.param({(0, 3): [TERM]}, 2, id="rank 0, by SIGTERM"),
        pytest.param({(0, 2): [USR1], (1, 3): [USR1]}, 2, id="both, one batch apart"),
        pytest.param({(0, 8): [USR1, TERM], (1, 8): [TERM, USR2]}, 5, id="both, with several, in the second epoch"),
    ],
)
def test_all_ranks_stop_after_the_same_step_and_go_on_with_the_same_bits(
    pool: RankPool, whole: dict, signals: Signals, step: int, tmp_path: Path
) -> None:
    calls = scontrol(tmp_path)
    folder = str(tmp_path / "run")
    stopped = pool.run(2, in_slurm_job, folder, str(tmp_path), signals, timeout=100)
    assert [found["step"] for found in stopped] == [step, step]
    assert [found["saves"] for found in stopped] == [1, 1]
    assert [found["code"] for found in stopped] == [0, 0]
    assert calls.read_text().splitlines() == ["--oneliner show job 7_1", "requeue 7_1"]
    assert all(found["left"] == found["before"] for found in stopped)
    resumed = pool.run(2, in_slurm_job, folder, str(tmp_path), {}, timeout=100)
    assert all(torch.equal(found["weights"], whole["weights"]) for found in resumed)
    assert not torch.equal(stopped[0]["weights"], whole["weights"])
    # The run is complete: a later start in the folder begins anew.
    assert [found["next"] for found in resumed] == [None, None]


class Averaging(Signalled):
    """Keeps a running mean of its weights in the last hook of a step, and learns by the loss of each validation."""

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self.register_buffer("mean", flat(self.net).clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.mean.lerp_(flat(self.net), 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        # No loss is low enough: each epoch halves the learning rate.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=1e9, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


def fit_and_validate(rank: int, folder: str, signals: Signals, every: float) -> dict:
    torch.manual_seed(3)
    module, stop = Averaging(signals), SafeRequeue(folder, requeue=False)
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": every}
    trainer = trainer_of("bucketed_ddp", 2, callbacks=[stop], use_distributed_sampler=True, **settings)
    stopped = False
    try:
        trainer.fit(module, make_loader("dealt out", rank, ()), loader([[2, 2]], rank), ckpt_path=stop.checkpoint)
    except StoppedBySignal:
        stopped = True
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"weights": flat(module), "mean": module.mean, "rate": rate, "step": trainer.global_step, "stopped": stopped}


@pytest.mark.parametrize("every", [1.0, 4])
def test_nothing_that_belongs_to_the_last_step_is_left_out(pool: RankPool, every: float, tmp_path: Path) -> None:
    """Hooks that run after this callback's, validations, and what learns by them."""
    [whole, _] = pool.run(2, fit_and_validate, str(tmp_path / "whole"), {}, every, timeout=100)
    assert (whole["step"], whole["rate"]) == (9, 0.5 / 8)
    # Six batches, three steps an epoch: signals in each step of the first one, and in the last of all.
    for batch in (0, 2, 4, 17):
        folder = str(tmp_path / str(batch))
        stopped = pool.run(2, fit_and_validate, folder, {(1, batch): [USR1]}, every, timeout=100)
        assert stopped[0]["step"] == stopped[1]["step"]
        assert [found["stopped"] for found in stopped] == [batch < 17] * 2
        resumed = pool.run(2, fit_and_validate, folder, {}, every, timeout=100) if batch < 17 else stopped
        for name in ("weights", "mean"):
            assert all(torch.equal(found[name], whole[name]) for found in resumed), (batch, name)
        assert [(found["step"], found["rate"]) for found in resumed] == [(9, whole["rate"])] * 2, batch


def fit_with_a_validation_after_each_step(rank: int, folder: str) -> int:
    stop = SafeRequeue(folder, requeue=False)
    trainer = trainer_of("bucketed_ddp", 2, callbacks=[stop], max_epochs=1, val_check_interval=1)
    with contextlib.suppress(StoppedBySignal):
        trainer.fit(Averaging({(1, 1): [USR1]}), loader([[2, 2]] * 9, rank), loader([[2, 2]], rank))
    return trainer.global_step


def test_a_run_with_a_validation_after_each_step_stops_too(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, fit_with_a_validation_after_each_step, str(tmp_path), timeout=100) == [4, 4]


def test_without_a_cluster_the_program_ends_as_by_the_signal(pool: RankPool, tmp_path: Path) -> None:
    stopped = pool.run(2, fit, str(tmp_path), {(1, 1): [TERM]}, timeout=100)
    # Rank 0 tells the shell; the others' end is no failure.
    assert [found["code"] for found in stopped] == [128 + signal.SIGTERM, 0]
    assert [found["step"] for found in stopped] == [1, 1]
    assert stopped[0]["next"] == str(tmp_path / "stopped.ckpt")


def fit_under_submitit(rank: int, folder: str, signals: Signals) -> dict:
    """:func:`fit` where submitit has installed handlers: one that ends rank 0, and one that does nothing."""
    mine = {USR2: lambda *_: sys.exit(-1), TERM: lambda *_: None}
    before = {name: signal.signal(signal.Signals[name], handler) for name, handler in mine.items()}
    try:
        found = fit(rank, folder, signals)
        return {"step": found["step"], "code": found["code"], "same": found["left"] == found["before"]}
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@pytest.mark.parametrize("name", [USR2, TERM])
def test_submitits_handlers_are_taken_over_and_put_back(pool: RankPool, tmp_path: Path, name: str) -> None:
    first, second = pool.run(2, fit_under_submitit, str(tmp_path), {(0, 1): [name], (1, 2): [name]}, timeout=100)
    assert first == {"step": 1, "code": 128 + signal.Signals[name], "same": True}
    assert second == {"step": 1, "code": 0, "same": True}


def test_a_signal_that_is_not_asked_for_stays_lightnings() -> None:
    trainer = trainer_of("auto", 1)
    for names, taken in ((["SIGUSR1"], False), (["SIGUSR1", "SIGTERM"], True)):
        signals = StopSignals(names)
        signals.install(trainer)
        assert ("_sigterm_notifier_fn" in vars(trainer._signal_connector)) is taken
        signals.remove()
        assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)


def fit_with_stock_ddp(rank: int, folder: str) -> tuple[int, Any]:
    """Rank 1 gets a signal in its second of five batches."""
    stop = SafeRequeue(folder, requeue=False)
    module = Stock()
    trainer = trainer_of("ddp", 2, callbacks=[stop], max_epochs=1)
    try:
        trainer.fit(module, loader([[2, 2]] * 5, rank))
    except StoppedBySignal as stopped:
        return trainer.global_step, stopped.code
    return trainer.global_step, None


class Stock(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 1:
            signal.raise_signal(signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def test_a_strategy_without_a_ballot_agrees_by_a_message_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, fit_with_stock_ddp, str(tmp_path), timeout=100) == [(2, 128 + signal.SIGUSR1), (2, 0)]


def fit_alone(rank: int, folder: str) -> str:
    """Rank 1 has another folder."""
    try:
        fit(rank, f"{folder}/{rank}", {})
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_see_the_same_checkpoint_refuse(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, fit, str(tmp_path / "0"), {(1, 1): [TERM]}, timeout=100)
    said = pool.run(2, fit_alone, str(tmp_path), timeout=100)
    assert said[0].startswith(f"rank 0 found {tmp_path}/0/stopped.ckpt, unlike other ranks")
    assert said[1].startswith(f"rank 1 did not find {tmp_path}/1/stopped.ckpt, unlike other ranks")


def test_lightnings_own_handler_hangs(pool: RankPool, tmp_path: Path) -> None:
    """The control: without the callback a signal to one rank ends in a time-out."""
    with pytest.raises(RankFailureError):
        pool.run(2, fit, str(tmp_path), {(1, 1): [TERM]}, 2, False, timeout=25, group_timeout=5)


# ---------------------------------------------------------------------------------------------- requeueing

TASK = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "job"), [({}, None), ({"SLURM_JOB_ID": "9"}, "9"), (TASK, "7_1")], ids=["none", "job", "array"]
)
def test_how_scontrol_names_the_job(environment: dict[str, str], job: str | None) -> None:
    assert job_id(environment) == job


@pytest.mark.parametrize(
    ("state", "code", "message", "called"),
    [
        ("RUNNING", 0, "job 7_1 was requeued", True),
        ("CANCELLED", 0, "job 7_1 was not requeued: SLURM is ending it, its state is CANCELLED", False),
        ("COMPLETING", 0, "job 7_1 was not requeued: SLURM is ending it, its state is COMPLETING", False),
        ("RUNNING", 1, "job 7_1 was not requeued: scontrol says ", True),
    ],
)
def test_a_job_is_requeued_unless_it_is_ending(
    tmp_path: Path, state: str, code: int, message: str, called: bool
) -> None:
    calls = scontrol(tmp_path, state, code)
    result = requeue({**TASK, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (result.done, result.message) == (code == 0 and called, message)
    assert ("requeue 7_1" in calls.read_text().splitlines()) is called


def test_without_scontrol_or_slurm_it_says_what_to_do(tmp_path: Path) -> None:
    result = requeue({**TASK, "PATH": str(tmp_path)})
    assert not result.done
    assert result.message.startswith("job 7_1 was not requeued: scontrol is not on the PATH here")
    assert requeue({}).message == "this is no SLURM job, so nobody starts it again"
