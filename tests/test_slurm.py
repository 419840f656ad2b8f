"""Trainings on a real SLURM of two nodes, submitted as a user submits them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from slurm_cluster import SlurmCluster
from test_train_program import Finished, run_program

from lightning_dp.cli import submit as submit_program

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[1]
PYTHON = Path(sys.executable)
SHAPE = ["trainer.num_nodes=2", "trainer.devices=2", "launcher.cpus_per_task=1"]
QUICK = ["callbacks=none", "logger=none", "test=false", "trainer.max_epochs=1"]
LIMIT = 120  # seconds that a job of four ranks gets


def submit(slurm: SlurmCluster, folder: Path, *overrides: str) -> str:
    """The job id that ``lightning-dp-submit`` tells; called in this process, which has imported what it needs."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["lightning-dp-submit", *overrides])
        patch.setattr(sys, "path", [*sys.path])
        for name, value in {**slurm.environment, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}.items():
            patch.setenv(name, value)
        submit_program.main()
    found = re.fullmatch(r"submitted job (\d+); output and runs: (.*)\n", told.getvalue())
    assert found, told.getvalue()
    assert found[2] == str(folder / "runs/slurm")
    return found[1]


def command(slurm: SlurmCluster, folder: Path, *words: str | Path, limit: float = 60) -> Finished:
    return run_program(["env", *(f"{k}={v}" for k, v in slurm.environment.items()), *words], folder, limit)


def output(folder: Path, job: str) -> str:
    return (folder / f"runs/slurm/{job}.out").read_text()


def table(text: str) -> dict[str, str]:
    lines = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in lines}


def test_the_set_up_looks_for_each_program(tmp_path: Path) -> None:
    """Without root it installs nothing, and says what is missing."""
    for name in ("munged", "slurmctld", "srun", "sbatch", "scontrol", "id"):
        (tmp_path / name).write_text("#!/bin/sh\necho 1000\n")
        (tmp_path / name).chmod(0o755)
    set_up = ["env", f"PATH={tmp_path}", "/bin/sh", ROOT / "tests/install_slurm.sh"]
    finished = run_program(set_up, tmp_path, 10)
    assert finished.code == 0
    assert "no SLURM, as slurmd cannot be installed" in finished.output


def test_a_training_of_two_nodes_with_two_ranks_each(slurm: SlurmCluster, tmp_path: Path) -> None:
    name = "digits $(touch broken) `x` \"q\" 'p' a\\b #c %j é"
    job = submit(slurm, tmp_path, *SHAPE, *QUICK, "launcher.job_name='" + name.replace("'", "\\'") + "'")
    ended = slurm.wait(job, LIMIT)
    text = output(tmp_path, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    told = table(text)
    # 1,296 images are 324 for each of four ranks: 20 batches of 16 and one of 4.
    assert (told["world size"], told["optimizer steps"], told["samples seen"]) == ("4", "21", "1,296")
    assert OmegaConf.load(tmp_path / f"runs/slurm/{job}/config.yaml").trainer.num_nodes == 2
    listed = slurm.client("squeue", "--states=all", "--noheader", "--format=%j", "--jobs", job).stdout
    assert listed.rstrip("\n") == name
    assert not (tmp_path / "broken").exists()


def test_the_example_without_hydra(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    file = ROOT / "examples/slurm/train.sbatch"
    text = file.read_text().replace(" python ", f" {PYTHON} ")
    (tmp_path / "train.sbatch").write_text(text)
    job = slurm.submit("train.sbatch", folder=tmp_path)
    ended = slurm.wait(job, LIMIT)
    output = (tmp_path / f"digits-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", output
    # 324 images a rank are 21 batches, in each of two epochs.
    assert "4 ranks took 42 steps" in output.splitlines()


def test_a_sweep_is_an_array_whose_tasks_run_one_point_each(slurm: SlurmCluster, tmp_path: Path) -> None:
    shape = ["trainer.num_nodes=1", "trainer.devices=1", "launcher.cpus_per_task=1"]
    few = ["+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1"]
    job = submit(slurm, tmp_path, "-m", "model.learning_rate=0.01,0.02", *shape, *QUICK, *few)
    for task, rate in enumerate((0.01, 0.02)):
        ended = slurm.wait(f"{job}_{task}", LIMIT)
        text = output(tmp_path, f"{job}_{task}")
        assert ended["JobState"] == "COMPLETED", text
        assert table(text)["optimizer steps"] == "2"
        saved = OmegaConf.load(tmp_path / f"runs/slurm/{job}_{task}/config.yaml")
        assert saved.model.learning_rate == rate


def script(folder: Path, *lines: str) -> Path:
    file = folder / "job.sbatch"
    file.write_text("\n".join(["#!/bin/bash", "set -e", *lines]) + "\n")
    return file


TRAIN = f"{PYTHON} -m lightning_dp.cli.train {' '.join(QUICK)} hydra.run.dir=run"


@pytest.mark.parametrize(
    ("tasks", "line", "words"),
    [
        pytest.param(
            ["--nodes=2", "--ntasks-per-node=2"],
            f"exec {TRAIN} trainer.num_nodes=2 trainer.devices=2",
            ["SLURM has 4 tasks for this job, but this process was not started by srun"],
            id="sbatch without srun",
        ),
        pytest.param(
            ["--nodes=2", "--ntasks-per-node=1"],
            f"exec srun --kill-on-bad-exit=1 {TRAIN} trainer.num_nodes=2 trainer.devices=2",
            ["2 (trainer.devices)", "1 (SLURM_NTASKS_PER_NODE)", "2 (SLURM_STEP_NUM_TASKS)"],
            id="fewer tasks than devices",
        ),
        pytest.param(
            ["--nodes=2", "--ntasks-per-node=1"],
            # The second rank is there, but never arrives.
            "exec srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && exec sleep 200; exec "
            f"{TRAIN} trainer.num_nodes=2 trainer.devices=1 strategy.preflight=3'",
            ["wrong start: 1 of 2 ranks did not arrive at node1", "missing rank 1 on node2; there rank 0 on node1"],
            id="a rank that never arrives",
        ),
    ],
)
def test_a_wrong_start_ends_the_job_with_its_reason(
    slurm: SlurmCluster, tmp_path: Path, tasks: list[str], line: str, words: list[str]
) -> None:
    job = slurm.submit(*tasks, "--output=out", script(tmp_path, line), folder=tmp_path)
    assert slurm.wait(job, 60)["JobState"] == "FAILED"
    text = (tmp_path / "out").read_text()
    assert [word for word in words if word not in text] == [], text


def test_the_preflight_command_tells_hosts_and_versions(slurm: SlurmCluster, tmp_path: Path) -> None:
    line = f"exec srun {PYTHON} -m lightning_dp.cli.preflight trainer.num_nodes=2 trainer.devices=1"
    file = script(tmp_path, "export COLUMNS=160", line)
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--output=out", file, folder=tmp_path)
    ended = slurm.wait(job, 60)
    text = (tmp_path / "out").read_text()
    assert ended["JobState"] == "COMPLETED", text
    rows = [line.strip("│").split("│")[:2] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["0", "node1"], ["1", "node2"]]
    assert torch.__version__.split("+")[0] in text
    assert "all right: met in" in text


def test_two_torchruns_train_together(slurm: SlurmCluster, tmp_path: Path) -> None:
    agent = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID"
    agent += " --master-addr=node1 --master-port=$((20000 + $SLURM_JOB_ID))"
    program = f"{TRAIN.removeprefix(str(PYTHON))} trainer.num_nodes=2 trainer.devices=2 +trainer.limit_train_batches=2"
    file = script(tmp_path, f"exec srun --kill-on-bad-exit=1 bash -c 'exec {agent} {program}'")
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--output=out", file, folder=tmp_path)
    ended = slurm.wait(job, LIMIT)
    text = (tmp_path / "out").read_text()
    assert ended["JobState"] == "COMPLETED", text
    assert (table(text)["world size"], table(text)["optimizer steps"]) == ("4", "2")


# Says that it trains, and leaves time for a signal.
SLOW = """
import os, time
from pathlib import Path
from lightning_dp.demo.convnet import DigitsNet

class Net(DigitsNet):
    def training_step(self, batch, batch_idx):
        Path(f"training.{os.environ['SLURM_JOB_ID']}.{self.global_rank}").touch()
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)
"""


def test_a_task_that_is_killed_ends_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    long = ["trainer.max_epochs=10000", "trainer.devices=1", "model._target_=slow.Net"]
    job = submit(slurm, tmp_path, *SHAPE, *QUICK, *long)
    ranks = wait_for_training(slurm, tmp_path, job)
    os.kill(ranks[1], signal.SIGKILL)
    start = time.monotonic()
    assert slurm.wait(job, 30)["JobState"] == "FAILED"
    assert time.monotonic() - start < 20
    assert slurm.pids(job, "lightning_dp.cli.train") == {}


def wait_for_training(slurm: SlurmCluster, folder: Path, job: str) -> dict[int, int]:
    """Process ids of the ranks, once all of them train."""
    number = slurm.job(job)["JobId"]  # of an array's task, its own
    deadline = time.monotonic() + LIMIT
    while not {path.name for path in folder.glob("training.*")} >= {f"training.{number}.{rank}" for rank in (0, 1)}:
        assert time.monotonic() < deadline, output(folder, job)
        number = slurm.job(job)["JobId"]
        time.sleep(0.2)
    return slurm.pids(number, "lightning_dp.cli.train")


def test_a_signal_to_one_task_requeues_the_job_which_ends_as_if_nothing_had_happened(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Two jobs of one array, which differ in nothing that training goes by; one is left alone."""
    long = [*QUICK, "callbacks=default", "trainer.max_epochs=3", "trainer.devices=1", "trainer.num_nodes=2"]
    long += ["launcher.cpus_per_task=1", "model._target_=slow.Net"]
    (tmp_path / "slow.py").write_text(SLOW)
    array = submit(slurm, tmp_path, "-m", "metric=val/loss,val/accuracy", *long)
    whole, job = f"{array}_0", f"{array}_1"
    ranks = wait_for_training(slurm, tmp_path, job)
    os.kill(ranks[1], signal.SIGUSR1)
    slurm.wait(job, 30, states=["PENDING", "REQUEUED"])
    assert (tmp_path / f"runs/slurm/{job}/stopped.ckpt").exists()
    ended = slurm.wait(job, LIMIT)
    text = output(tmp_path, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
    assert len(re.findall(r"stopped after step \d+ by SIGUSR1 on rank 1; job \S+ was requeued", text)) == 1
    assert f"job {job} was requeued" in text
    assert "Restoring states from the checkpoint path at" in text
    slurm.wait(whole, LIMIT)
    first, second = (last_checkpoint(tmp_path, one) for one in (whole, job))
    assert first["global_step"] == second["global_step"] == 3 * 41
    assert all(torch.equal(first["state_dict"][name], value) for name, value in second["state_dict"].items())
    assert not (tmp_path / f"runs/slurm/{job}/stopped.ckpt").exists()


def last_checkpoint(folder: Path, job: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"runs/slurm/{job}/checkpoints/last.ckpt", weights_only=True)
    return loaded


def test_a_job_of_submitits_goes_on_after_a_signal_to_one_task(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A sweep of one point; submitit's own handlers would end rank 0 and begin anew."""
    (tmp_path / "slow.py").write_text(SLOW)
    shape = ["trainer.num_nodes=2", "trainer.devices=1", "hydra.launcher.cpus_per_task=1"]
    shape += ["hydra.launcher.timeout_min=5", "hydra.sweep.dir=sweep", "+trainer.limit_val_batches=1"]
    model = ["model._target_=slow.Net", "model.learning_rate=0.01"]
    sweep = ["-m", "hydra/launcher=slurm", *QUICK, *shape, *model, "callbacks=requeue", "trainer.max_epochs=2"]
    program = [PYTHON, "-m", "lightning_dp.cli.train", *sweep]
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(command, slurm, tmp_path, *program, limit=LIMIT)
        deadline = time.monotonic() + LIMIT
        while len(found := sorted(tmp_path.glob("training.*"))) < 2 and not launched.done():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert len(found) == 2, launched.result().output
        job = found[0].name.split(".")[1]
        os.kill(slurm.pids(job, "submitit.core._submit")[1], signal.SIGUSR2)
        finished = launched.result()
    assert finished.code == 0, finished.output
    assert slurm.job(job)["Restarts"] == "1"
    [log] = (tmp_path / "sweep/.submitit").glob("*/*_0_log.out")
    text = log.read_text()
    assert len(re.findall(r"stopped after step \d+ by SIGUSR2 on rank 1; job \S+ was requeued", text)) == 1
    told = table(text)
    assert "Restoring states from the checkpoint path at" in log.with_suffix(".err").read_text()
    assert (told["world size"], told["optimizer steps"]) == ("2", "82")
    assert OmegaConf.load(tmp_path / "sweep/0/config.yaml").model.learning_rate == 0.01
