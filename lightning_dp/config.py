"""Typed Hydra configuration: what ``strategy=bucketed_ddp`` may hold, and where the config files are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf


@dataclass
class BucketedDDPConfig:
    """Schema of the config group ``strategy``; see :class:`lightning_dp.BucketedDDPStrategy` for the meanings.

    Attributes:
        bucket_cap_mb: A number, or ``auto``.
        timeout: Seconds.
        normalizers: As ``count``, by name.
        count: A name, or a config with ``_target_`` (and ``_partial_: true``) for a function ``batch -> int``.
        nonfinite: A string, but YAML reads a bare ``off`` as a boolean; so ``same_data`` and ``broadcast_buffers``.
    """

    _target_: str = "lightning_dp.BucketedDDPStrategy"
    bucket_cap_mb: Any = "auto"
    first_bucket_cap_mb: float = 1.0
    count: Any = "samples"
    nonfinite: Any = "skip"
    max_consecutive_skips: int = 10
    spike_factor: Optional[float] = None  # noqa: UP045
    check_replicas_every: int = 1000
    on_replica_mismatch: str = "raise"
    same_data: Any = "warn"
    broadcast_buffers: Any = "step"
    report_unused_after: int = 50
    overlap: bool = True
    uneven: str = "auto"
    pad_samples: bool = False
    reduce_dtype: Optional[str] = None  # noqa: UP045
    exact_sums: bool = False
    normalizers: Optional[dict[str, Any]] = None  # noqa: UP045
    process_group_backend: Optional[str] = None  # noqa: UP045 - omegaconf 2.3 knows no `str | None`
    timeout: float = 1800.0
    start_method: str = "popen"
    preflight: Optional[float] = 120.0  # noqa: UP045


@dataclass
class LauncherConfig:
    """Schema of the config group ``launcher`` of ``lightning-dp-submit``; ``conf/launcher`` says what is what.

    Attributes:
        tasks_per_node: A number; any type, as ``trainer.devices`` may be a list.
    """

    scheduler: str = "slurm"
    sbatch: list[str] = field(default_factory=lambda: ["sbatch"])
    job_name: str = "lightning-dp"
    nodes: int = 1
    tasks_per_node: Any = 1
    cpus_per_task: Optional[int] = None  # noqa: UP045
    gpus_per_node: Any = None
    memory: Optional[str] = None  # noqa: UP045
    time: Optional[str] = None  # noqa: UP045
    partition: Optional[str] = None  # noqa: UP045
    account: Optional[str] = None  # noqa: UP045
    qos: Optional[str] = None  # noqa: UP045
    options: dict[str, Any] = field(default_factory=dict)
    srun_arguments: list[str] = field(default_factory=list)
    max_parallel: Optional[int] = None  # noqa: UP045
    signal_seconds: Optional[int] = 120  # noqa: UP045
    folder: str = "runs/slurm"
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    command: Optional[list[str]] = None  # noqa: UP045


def register_configs() -> None:
    """Makes the schemas known to Hydra; they stand outside their groups so as not to be offered as choices there."""
    ConfigStore.instance().store(group="schema/strategy", name="bucketed_ddp", node=BucketedDDPConfig)
    ConfigStore.instance().store(group="schema/launcher", name="launcher", node=LauncherConfig)


def config_directory() -> Path:
    """The directory of the config files: within the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def save_config(cfg: DictConfig, folder: Path) -> Path:
    """Writes ``config.yaml``, with every reference resolved, into a folder that is made if there is none.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    return folder / "config.yaml"


def drop_unused_arguments(cfg: DictConfig, group: str, overrides: Sequence[str]) -> DictConfig:
    """The config of ``group`` for a class that was named on the command line.

    ``model._target_=my.Net`` replaces the class, and the arguments that the configuration files hold are those of the
    class it replaces. So with an override of ``_target_`` only the arguments that were overridden too are kept.

    Args:
        cfg: The whole configuration.
        group: ``"model"``, ``"data"``, ...
        overrides: The overrides of the command line.

    Returns:
        ``cfg[group]``, or a copy of it without the arguments of the replaced class.
    """
    keys = [override.lstrip("+").split("=", 1)[0] for override in overrides]
    named = {key.split(".")[1] for key in keys if key.startswith(f"{group}.")}
    config: DictConfig = cfg[group]
    if "_target_" not in named:
        return config
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return OmegaConf.create({key: value for key, value in resolved.items() if key in named})
