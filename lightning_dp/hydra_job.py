"""A Hydra job handed to another process: same composed configuration, same folder, run exactly once."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_dp.errors import ConfigurationError

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def job_name() -> str | None:
    """What tells the Hydra job that runs here from the others of its process; ``None`` outside of Hydra."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    number = None if hydra.mode != RunMode.MULTIRUN else hydra.job.num
    return f"{hydra.runtime.output_dir}#{number}"


def configuration_fingerprint() -> str | None:
    """A hash of the configuration that Hydra composed, without Hydra's own part; ``None`` outside of Hydra."""
    if not HydraConfig.initialized():
        return None
    config = _composed()
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return sha256(OmegaConf.to_yaml(own, sort_keys=True).encode()).hexdigest()[:12]


def save_job(rank: int) -> Path:
    """Writes the job that runs here into its folder, for ``program --experimental-rerun FILE`` as ``rank``.

    That flag is Hydra's own: the program's task function is called once, with the configuration in the file and
    without a look at other arguments, so neither a sweep nor a launcher's settings are gone through again.

    Args:
        rank: Rank of the process that will run it; its log file is named after it.

    Returns:
        The file.

    Raises:
        ConfigurationError: If the job runs in a process of a Hydra launcher, whose command is not the program's.
    """
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and hydra.launcher["_target_"] != BASIC_LAUNCHER:
        raise ConfigurationError(
            f"{hydra.launcher['_target_']} runs jobs in processes of its own, from which other ranks cannot be started"
            " as the program was: let the launcher start one task per device (submitit: tasks_per_node), or use"
            " strategy bucketed_ddp_spawn"
        )
    config = _composed().copy()
    _name_log_files(config, rank)
    file = Path(hydra.runtime.output_dir, hydra.output_subdir or "", f"rank_{rank}.pickle")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(_Restored(pickle.dumps(config), os.getcwd())))
    return file


class _Restored:
    """Pickles as the call that makes the configuration again where the job starts."""

    def __init__(self, config: bytes, folder: str) -> None:
        self._arguments = (config, folder)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes, str]]:
        return _restore, self._arguments


def _restore(config: bytes, folder: str) -> DictConfig:
    """Does what a re-run leaves out: registers Hydra's resolvers and goes to the job's working directory."""
    setup_globals()
    os.chdir(folder)
    restored: DictConfig = pickle.loads(config)
    return restored


def _composed() -> DictConfig:
    """The configuration as Hydra composed it, with its ``hydra`` node, whatever the program did to its own copy."""
    config = HydraConfig.get()._get_parent()  # type: ignore[attr-defined]
    assert isinstance(config, DictConfig)
    return config


def _name_log_files(config: DictConfig, rank: int) -> None:
    handlers = (config.hydra.job_logging or {}).get("handlers", {})
    for handler in handlers.values():
        if handler.get("filename"):
            file = Path(handler.filename)
            with read_write(handler), open_dict(handler):
                handler.filename = str(file.with_name(f"{file.stem}.rank_{rank}{file.suffix}"))
