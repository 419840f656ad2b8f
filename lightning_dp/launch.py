"""How the other ranks of a node are started from the program of its first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_dp.cluster.figures import Figure, require_agreement
from lightning_dp.cluster.start import is_torchrun, refuse_wrong_start
from lightning_dp.hydra_job import job_name, save_job

# Set for the ranks that were started, and looked at by Lightning to tell whether there are any.
PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
OWNER = "LIGHTNING_DP_JOB"  # which job they were set for, and what they were before
RERUN_WARNING = "ignore:Experimental rerun CLI option"


class ProgramLauncher(_SubprocessScriptLauncher):
    """Starts the other local ranks by running the program again; under Hydra, each runs rank 0's job and no other.

    In a sweep every job starts ranks of its own, and the group of the job before it is taken down.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        leave_earlier_job()
        super().__init__(cluster_environment, num_processes, num_nodes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Refuses a wrong start, then starts the other local ranks, if nobody else did, and calls ``function``."""
        _refuse(self.cluster_environment, self.num_processes, self.num_nodes)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        before = {name: os.environ.get(name) for name in PLACE}
        environment = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK=str(environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        os.environ[OWNER] = json.dumps({"job": job_name(), "before": before})
        for local_rank in range(1, self.num_processes):
            rank = environment.node_rank() * self.num_processes + local_rank
            command, folder = _command(rank)
            self.procs.append(subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=folder))


def refuse_other_world(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Refuses to train with another number of ranks than the trainer wants, whatever started them.

    Args:
        environment: Lightning's view of the ranks.
        devices: Ranks that the trainer wants on each node.
        nodes: Nodes that the trainer wants.

    Raises:
        ConfigurationError: With what is wanted and what was found.
    """
    _refuse(environment, devices, nodes)  # not yet done where ranks are spawned
    wanted_by, found_in = "trainer.devices x trainer.num_nodes", type(environment).__name__
    figure = Figure("ranks", devices * nodes, wanted_by, environment.world_size(), found_in)
    require_agreement([figure], "start as many ranks as the trainer wants")


def _refuse(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Refuses a wrong start, unless the user passed an environment to the Trainer where it would have taken SLURM's."""
    slurm = SLURMEnvironment.detect() and not is_torchrun(os.environ)
    if not slurm or isinstance(environment, SLURMEnvironment):
        refuse_wrong_start(os.environ, devices, nodes)


def leave_earlier_job() -> None:
    """Forgets the ranks that an earlier Hydra job of this process started, as they ended with it."""
    owner = json.loads(os.environ.get(OWNER, "{}"))
    if not owner or owner["job"] == job_name() or os.environ.get("LOCAL_RANK") != "0":
        return
    leave_group()
    for name, value in {**owner["before"], OWNER: None}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def leave_group(process: int | None = None) -> None:
    """Takes the process group down, if there is one.

    Done before the interpreter shuts down: gloo's threads let go of a message's tensors only after whoever waits for it
    is told, and need the interpreter for it. A thread that is late would end the program with SIGABRT.

    Args:
        process: Whose group it is, by id: one that was forked from it has none of its threads.
    """
    if dist.is_initialized() and process in (None, os.getpid()):
        dist.destroy_process_group()


def _command(rank: int) -> tuple[Sequence[str], str | None]:
    """What runs this program once more as ``rank``, and in which folder."""
    if job_name() is None:
        return _basic_subprocess_cmd(), None
    from hydra.utils import get_original_cwd

    import __main__

    folder = get_original_cwd()
    spec = __main__.__spec__
    program = ["-m", spec.name] if spec is not None else [str(Path(folder, sys.argv[0]))]
    return [sys.executable, "-W", RERUN_WARNING, *program, "--experimental-rerun", str(save_job(rank))], folder
