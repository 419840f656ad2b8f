"""One rank of a benchmark: ``python -m lightning_dp.bench.rank config.yaml`` in torchrun's environment."""

from __future__ import annotations

import gc
import os
import platform
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf

from lightning_dp.bench.launch import Place, cores_of
from lightning_dp.bench.measure import Anatomy, Rounds, Series
from lightning_dp.bench.results import Results, results_of, save_results
from lightning_dp.errors import ConfigurationError


def run_rank(cfg: DictConfig, place: Place) -> Results:
    """Takes part in a benchmark.

    Args:
        cfg: Composed from ``conf/bench/bench.yaml``.
        place: Where this rank stands.

    Returns:
        The results, the same on every rank.

    Raises:
        ConfigurationError: If the baseline is none of the contenders.
    """
    if cfg.baseline not in cfg.contenders:
        raise ConfigurationError(f"baseline={cfg.baseline} is no contender; there are {', '.join(cfg.contenders)}")
    threads = _pin(place, cfg.pin)
    device = torch.device(cfg.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "MASTER_ADDR" not in os.environ:
        slurm = SLURMEnvironment()
        os.environ.update(MASTER_ADDR=slurm.main_address, MASTER_PORT=str(slurm.main_port))
    # PyTorch would keep its last 2,000 collectives, with the lines of Python they came from: no contender's memory.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    dist.init_process_group(
        cfg.backend, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=cfg.step_timeout)
    )
    try:
        series, anatomy = _measure(cfg, place, device)
    except Exception as error:
        _let_go(error)
        raise
    finally:
        # Torch DDP holds the process group: were it the last to do so, it would end the group's threads while it holds
        # Python's lock, which they may be waiting for.
        gc.collect()
        dist.destroy_process_group()
    machine = {"world_size": place.world_size, "threads": threads, "device": _name_of(device), **_versions()}
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    return results_of(series, anatomy, place.world_size, cfg.baseline, list(cfg.tuned), machine, settings)


def _measure(cfg: DictConfig, place: Place, device: torch.device) -> tuple[dict[str, Series], Anatomy]:
    torch.manual_seed(cfg.seed)
    rounds = Rounds(
        instantiate(cfg.workload),
        instantiate(cfg.optimizer),
        {str(name): instantiate(contender) for name, contender in cfg.contenders.items() if contender},
        device,
        cfg.interface or os.environ.get("GLOO_SOCKET_IFNAME"),
        place.local_world_size,
        cfg.micro_batches,
    )
    return rounds.run(cfg.rounds)


def _let_go(error: BaseException | None) -> None:
    """Frees what the traceback of an error keeps, and of those behind it: contenders, too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _pin(place: Place, pin: bool) -> int:
    """Keeps this process, the transport's threads included, on its own cores; the number of compute threads."""
    if pin and hasattr(os, "sched_setaffinity"):
        given = os.environ.get("DP_BENCH_CORES")
        mine = (
            [int(core) for core in given.split(",")]
            if given
            else cores_of(place.local_rank, place.local_world_size, sorted(os.sched_getaffinity(0)))
        )
        os.sched_setaffinity(0, mine)
        torch.set_num_threads(len(mine))
    return torch.get_num_threads()


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}


def main() -> None:
    """Entry point of a rank that :func:`lightning_dp.bench.launch.run_ranks` started."""
    config = Path(sys.argv[1])
    cfg = OmegaConf.load(config)
    assert isinstance(cfg, DictConfig)
    place = Place.from_environment(os.environ)
    assert place is not None, "a rank of the bench is started by lightning-dp-bench"
    results = run_rank(cfg, place)
    if place.rank == 0:
        save_results(results, config.parent)


if __name__ == "__main__":
    main()
