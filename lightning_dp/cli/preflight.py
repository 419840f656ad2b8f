"""``lightning-dp-preflight``: started as a training would be, says whether its ranks would find each other, in seconds.

``srun lightning-dp-preflight trainer.num_nodes=2 trainer.devices=4``, or under torchrun.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import hydra
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_dp.arrival import meet
from lightning_dp.cli.one_line_errors import one_line_errors
from lightning_dp.cluster.figures import device_count
from lightning_dp.cluster.start import is_slurm_task, is_torchrun, refuse_wrong_start
from lightning_dp.config import config_directory, register_configs
from lightning_dp.health.preflight import Meeting

register_configs()


def check(cfg: DictConfig) -> None:
    """Meets all other ranks, then adds up one number over them.

    Args:
        cfg: Composed from ``conf/preflight.yaml``.

    Raises:
        ConfigurationError: If the ranks were not started as the trainer wants them.
        PreflightError: If ranks are missing, differ or cannot be reached.
    """
    gpu = cfg.trainer.accelerator in ("gpu", "cuda")
    devices = device_count(cfg.trainer.devices) or (torch.cuda.device_count() if gpu else 1)
    refuse_wrong_start(os.environ, devices, int(cfg.trainer.num_nodes))
    environment = _environment()
    meeting = meet(environment, cfg.limit, on_gpu=gpu)
    if meeting is None:
        print("one rank alone: nothing to meet; start it with srun or torchrun, as the training")
        return
    device = torch.device("cuda", environment.local_rank()) if gpu else torch.device("cpu")
    seconds = _all_reduce(environment, device, cfg.limit)
    if environment.global_rank() == 0:
        console = Console()
        console.print(_table(meeting))
        console.print(
            f"all right: met in {meeting.seconds:.2f} s, first all-reduce on {device.type} in {seconds:.2f} s"
        )


def _environment() -> ClusterEnvironment:
    if is_torchrun(os.environ):
        return TorchElasticEnvironment()
    return SLURMEnvironment() if is_slurm_task(os.environ) else LightningEnvironment()


def _all_reduce(environment: ClusterEnvironment, device: torch.device, limit: float) -> float:
    """Seconds that the process group and one all-reduce take."""
    start = time.monotonic()
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    rank, world_size = environment.global_rank(), environment.world_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=limit))
    try:
        ones = torch.ones((), device=device)
        dist.all_reduce(ones)
        assert ones.item() == world_size, f"ones of {world_size} ranks sum up to {ones.item()}"
    finally:
        dist.destroy_process_group()
    return time.monotonic() - start


def _table(meeting: Meeting) -> Table:
    names = sorted(meeting.cards[0].facts)
    table = Table("rank", "host", "address", *names)
    for card in meeting.cards:
        table.add_row(str(card.rank), card.host, card.address, *(card.facts[name] for name in names))
    return table


@hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="preflight")
def _program(cfg: DictConfig) -> None:
    with one_line_errors():
        check(cfg)


def main() -> None:
    """Entry point of the command."""
    with one_line_errors():
        _program()


if __name__ == "__main__":
    main()
