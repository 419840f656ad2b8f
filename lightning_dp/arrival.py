"""All ranks of a run meet before Lightning makes the process group, and leave it before their programs end."""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_dp.cluster.start import is_torchrun, slurm_hosts
from lightning_dp.health.preflight import Meeting, Place, preflight, versions
from lightning_dp.hydra_job import configuration_fingerprint
from lightning_dp.launch import leave_group, refuse_other_world


def arrive(environment: ClusterEnvironment | None, devices: int, nodes: int, limit: float | None, on_gpu: bool) -> None:
    """What a strategy does before its process group is made: refuses a wrong start, and meets the other ranks.

    When the program ends, the group that is made then is taken down.

    Args:
        environment: Lightning's view of the ranks, which knows this process's by now.
        devices: Ranks that the trainer wants on each node.
        nodes: Nodes that the trainer wants.
        limit: Seconds that rank 0 waits for the last rank; ``None`` meets nobody.
        on_gpu: Whether NCCL will be used.

    Raises:
        ConfigurationError: If the ranks were started in another way, or number, than is wanted.
        PreflightError: On all ranks that are there: if ranks are missing, differ or cannot be reached.
    """
    assert environment is not None
    refuse_other_world(environment, devices, nodes)
    if limit is not None:
        meet(environment, limit, on_gpu)
    if not dist.is_initialized():  # else somebody else has made the group, or a setup before this one
        atexit.unregister(leave_group)
        atexit.register(leave_group, os.getpid())


def meet(environment: ClusterEnvironment, limit: float, on_gpu: bool) -> Meeting | None:
    """Waits until all ranks are there, alike and within reach; under SLURM, settles on a free port of rank 0's host.

    Args:
        environment: Lightning's view of the ranks; it knows this process's.
        limit: Seconds that rank 0 waits for the last rank.
        on_gpu: Whether NCCL will be used, so that the network interface that it is told of matters.

    Returns:
        What was found; ``None`` for a single rank, and if the process group is there already.

    Raises:
        PreflightError: On all ranks that are there: if ranks are missing, differ or cannot be reached.
    """
    if environment.world_size() == 1 or dist.is_initialized():
        return None
    facts = versions() | {"configuration": configuration_fingerprint() or "none of Hydra's"}
    variables = {name: value for name, value in os.environ.items() if on_gpu or name != "NCCL_SOCKET_IFNAME"}
    meeting = preflight(_place(environment), limit, facts, variables)
    if isinstance(environment, SLURMEnvironment):
        # Its own port follows from the job's number, so that another job on the host may have the same one.
        os.environ["MASTER_PORT"] = str(meeting.port)
    return meeting


def _place(environment: ClusterEnvironment) -> Place:
    address, port = environment.main_address, environment.main_port
    if is_torchrun(os.environ):
        # Not by the count of restarts: of those that another torchrun begins, each torchrun counts its own alone.
        parts = [os.environ["TORCHELASTIC_RUN_ID"], address, port]
    elif isinstance(environment, SLURMEnvironment):
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        parts = [os.environ.get(name, "0") for name in names]
    else:
        parts = [address, port]
    hosts = slurm_hosts(os.environ) if isinstance(environment, SLURMEnvironment) else []
    run = " ".join(map(str, parts))
    return Place(environment.global_rank(), environment.world_size(), address, port, run, hosts)
