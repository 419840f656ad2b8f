"""Starts that would hang or make a smaller world are refused, from environment variables alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from slurm_cluster import free_port

from lightning_dp import BucketedDDPStrategy
from lightning_dp.cluster.start import expand_nodes, refuse_wrong_start, slurm_hosts
from lightning_dp.errors import ConfigurationError, PreflightError
from lightning_dp.fabric import BucketedDDPStrategy as FabricStrategy
from lightning_dp.launch import ProgramLauncher

# As SLURM 22.05 sets them for `sbatch --nodes=2 --ntasks-per-node=2`: in the batch script, and in a task of srun.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
BATCH |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_NODELIST": "node[1-2]"}
BATCH |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
# One torchrun per node, two ranks each.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
}
AGENTS = {**TASK, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
ALONE = {**BATCH, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
HALF = {**TASK, "SLURM_STEP_NUM_TASKS": "2"}  # a silently smaller world
CROWD = {**AGENTS, "SLURM_STEP_NUM_TASKS": "4"}
NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "2"}  # sbatch --nodes=2, and no more
BASH = {**TASK, "SLURM_JOB_NAME": "bash"}


@pytest.mark.parametrize(
    ("environment", "devices", "nodes"),
    [
        pytest.param({}, 2, 1, id="no cluster"),
        pytest.param(TASK, 2, 2, id="srun"),
        pytest.param(TORCHRUN, 2, 2, id="torchrun"),
        pytest.param(AGENTS, 2, 2, id="one torchrun per node of SLURM"),
        pytest.param(ALONE, 1, 1, id="one task needs no srun"),
        pytest.param({**BATCH, "SLURM_JOB_NAME": "interactive"}, 2, 1, id="local ranks in an interactive job"),
        pytest.param({**BASH, "SLURM_PTY_PORT": "1"}, 2, 1, id="local ranks in srun --pty bash"),
        pytest.param({**NODES, "NODE_RANK": "0"}, 2, 2, id="nodes started one by one"),
    ],
)
def test_right_starts_pass(environment: dict[str, str], devices: int, nodes: int) -> None:
    refuse_wrong_start(environment, devices, nodes)


@pytest.mark.parametrize(
    ("environment", "devices", "nodes", "words"),
    [
        pytest.param(BATCH, 2, 2, ["4 tasks", "not started by srun", "srun python train.py"], id="sbatch alone"),
        pytest.param(BASH, 2, 2, ["the job's name is 'bash'", "--job-name=train"], id="interactive name"),
        pytest.param(TASK, 4, 2, ["4 (trainer.devices)", "2 (SLURM_NTASKS_PER_NODE)", "<-- differs"], id="fewer tasks"),
        pytest.param(TASK, 2, 1, ["1 (trainer.num_nodes)", "2 (SLURM_STEP_NUM_NODES)"], id="more nodes"),
        pytest.param(HALF, 2, 2, ["4 (trainer.devices x trainer.num_nodes)", "2 (SLURM_STEP_NUM_TASKS)"], id="half"),
        pytest.param(ALONE, 2, 1, ["2 (trainer.devices)", "1 (SLURM_NTASKS_PER_NODE)"], id="one task for two devices"),
        pytest.param(
            {**BASH, "SLURM_PTY_PORT": "1"}, 2, 2, ["not started by srun", "srun --job-name=train"], id="pty, two nodes"
        ),
        pytest.param(NODES, 1, 2, ["trainer.num_nodes is 2", "not started by srun"], id="two nodes without tasks"),
        pytest.param(TORCHRUN, 4, 1, ["4 (trainer.devices)", "2 (LOCAL_WORLD_SIZE)", "--nproc"], id="torchrun"),
        pytest.param(CROWD, 2, 2, ["2 (torchrun --nnodes)", "4 (SLURM_STEP_NUM_TASKS)"], id="a torchrun per task"),
    ],
)
def test_wrong_starts_are_refused(environment: dict[str, str], devices: int, nodes: int, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        refuse_wrong_start(environment, devices, nodes)
    assert [word for word in words if word not in str(raised.value)] == []


class Lonely(LightningEnvironment):
    """Knows of no other rank, whatever it is told."""

    def set_world_size(self, size: int) -> None:
        pass


@pytest.fixture(params=[BucketedDDPStrategy, FabricStrategy], ids=["Trainer", "Fabric"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the process group of two local ranks, under the Trainer and under Fabric."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    def start(environment: ClusterEnvironment, preflight: float | None) -> None:
        strategy = request.param(preflight=preflight, cluster_environment=environment)
        strategy.parallel_devices = [torch.device("cpu")] * 2
        if request.param is FabricStrategy:
            strategy.accelerator = CPUAccelerator()
            strategy.setup_environment()
        else:
            strategy.setup_distributed()

    return start


@pytest.mark.parametrize("preflight", [None, 1.0])
def test_another_number_of_ranks_than_wanted_is_refused_whatever_started_them(
    start: Callable[..., None], preflight: float | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"2 \(trainer.devices x trainer.num_nodes\)  1 \(Lonely\)"):
        start(Lonely(), preflight)


@pytest.mark.timeout(20)
def test_a_rank_that_does_not_come_is_named(start: Callable[..., None]) -> None:
    with pytest.raises(PreflightError, match=r"1 of 2 ranks did not arrive at 127\.0\.0\.1 .*: missing rank 1; there"):
        start(LightningEnvironment(), 0.3)


@pytest.mark.timeout(20)
def test_ranks_that_nobody_starts_are_refused_at_once(
    start: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="not started by srun"):
        start(SLURMEnvironment(), 120)


def test_an_environment_of_the_users_choice_is_not_measured_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun`` of four runs of their own, each with two local ranks."""
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    outside = LightningEnvironment()
    monkeypatch.setenv("LOCAL_RANK", "0")  # the other local rank is there
    assert ProgramLauncher(outside, 2, 1).launch(lambda: "launched") == "launched"
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NUM_TASKS"):
        ProgramLauncher(SLURMEnvironment(), 2, 1).launch(lambda: "launched")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-10,2]x,m", ["n08x", "n09x", "n10x", "n2x", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


def test_the_host_of_each_rank() -> None:
    step = {"SLURM_STEP_NODELIST": "a[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert slurm_hosts({**TASK, **step}) == ["a1", "a1", "a2", "a2", "a3"]
    assert slurm_hosts({}) == []
