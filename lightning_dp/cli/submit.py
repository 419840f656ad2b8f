"""``lightning-dp-submit``: submits a training, or a sweep as a job array, to SLURM; ``dry_run=true`` only prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import DictConfig

from lightning_dp.cli.one_line_errors import one_line_errors
from lightning_dp.cluster.figures import Figure, device_count, require_agreement
from lightning_dp.cluster.sbatch import BatchScript
from lightning_dp.config import config_directory, register_configs
from lightning_dp.errors import ConfigurationError

register_configs()

SUBMISSION_LIMIT = 60  # seconds that sbatch gets to answer
OWN_KEYS = ("launcher", "dry_run")  # overrides of these are for the submission, all others for the training
COMMAND = ("-m", "lightning_dp.cli.train")
# Options of sbatch that are keys of a launcher.
OPTIONS = {"time": "time", "partition": "partition", "account": "account", "qos": "qos", "memory": "mem"}
OPTIONS |= {"cpus_per_task": "cpus-per-task"}
SCHEDULERS = ("slurm", "none")


def batch_script(cfg: DictConfig, variants: Sequence[Sequence[str]]) -> BatchScript:
    """The batch script for a composed configuration.

    Args:
        cfg: Composed from ``conf/submit.yaml``.
        variants: The overrides of each training; more than one make a job array.

    Raises:
        ConfigurationError: If figures of trainer and launcher do not agree.
    """
    launcher = cfg.launcher
    nodes, tasks = _figures(cfg)
    options: dict[str, Any] = {option: launcher[key] for key, option in OPTIONS.items() if launcher[key] is not None}
    if launcher.signal_seconds:
        # To every task; with "B:" before it only the script's own shell would get it.
        options["signal"] = f"USR1@{launcher.signal_seconds}"
    if launcher.gpus_per_node is not None:
        options["gpus-per-node"] = _gpus(launcher.gpus_per_node)
    options |= {str(name): value for name, value in launcher.options.items()}
    srun = list(launcher.srun_arguments)
    if launcher.cpus_per_task is not None:
        srun.insert(0, f"--cpus-per-task={launcher.cpus_per_task}")  # since 22.05 srun does not take it from sbatch
    return BatchScript(
        name=launcher.job_name,
        nodes=nodes,
        tasks_per_node=tasks,
        folder=str(Path(get_original_cwd(), launcher.folder)),
        working_directory=get_original_cwd(),
        command=[*(launcher.command or (sys.executable, *COMMAND)), *_config_directories()],
        variants=variants,
        options=options,
        max_parallel=launcher.max_parallel,
        srun_arguments=srun,
        environment={str(name): str(value) for name, value in launcher.environment.items()},
        setup=list(launcher.setup),
    )


def _figures(cfg: DictConfig) -> tuple[int, int]:
    """Nodes and tasks per node, once trainer and launcher agree on them."""
    trainer, launcher = cfg.trainer, cfg.launcher
    devices = device_count(trainer.devices)
    tasks = device_count(launcher.tasks_per_node)
    if devices is None or tasks is None:
        raise ConfigurationError(
            f"trainer.devices={trainer.devices} says no number of tasks to ask SLURM for; set trainer.devices=N"
        )
    if launcher.scheduler not in SCHEDULERS:
        raise ConfigurationError(f"launcher.scheduler={launcher.scheduler} is not known: use one of slurm, none")
    nodes = (1, "this machine") if launcher.scheduler == "none" else (int(launcher.nodes), "launcher.nodes")
    figures = [
        Figure("nodes", int(trainer.num_nodes), "trainer.num_nodes", *nodes),
        Figure("tasks per node", devices, "trainer.devices", tasks, "launcher.tasks_per_node"),
    ]
    if trainer.accelerator in ("gpu", "cuda"):
        gpus = _count(_gpus(launcher.gpus_per_node))
        figures.append(Figure("GPUs per node", devices, "trainer.devices", gpus, "launcher.gpus_per_node"))
    require_agreement(figures, "set them alike")
    return int(launcher.nodes), tasks


def _gpus(asked: Any) -> Any:
    """GPUs of a node as sbatch takes them: their number, also that of a list; a type as in ``a100:4`` stands."""
    count = device_count(asked)
    return asked if count is None else count


def _count(gpus: Any) -> int:
    """How many ``4``, ``a100:4`` and ``a100`` are."""
    return 0 if gpus is None else device_count(str(gpus).rpartition(":")[2]) or 1


def _config_directories() -> list[str]:
    """The ``--config-dir`` of this command line, for that of the training."""
    sources = HydraConfig.get().runtime.config_sources
    found = [source.path for source in sources if source.provider == "command-line"]
    return [word for path in found for word in ("--config-dir", path)]


def _is_for_training(override: str) -> bool:
    key = re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0]
    return re.split(r"[./]", key)[0] not in OWN_KEYS


def submit(script: BatchScript, sbatch: Sequence[str]) -> str:
    """Hands a script to ``sbatch`` and keeps a copy beside the job's output.

    Returns:
        The job id.

    Raises:
        ConfigurationError: If there is no ``sbatch``, or it refuses; with its own words.
    """
    text = script.render()
    folder = Path(script.folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [*sbatch, "--parsable"], input=text, capture_output=True, text=True, timeout=SUBMISSION_LIMIT
        )
    except FileNotFoundError:
        raise ConfigurationError(
            f"{sbatch[0]} is not on the PATH of this machine: submit from a login node, or print the script with"
            " dry_run=true"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"{sbatch[0]} did not answer within {SUBMISSION_LIMIT} s; see `scontrol ping`"
        ) from None
    if done.returncode != 0:
        raise ConfigurationError(f"{sbatch[0]} refused the job: {' '.join(done.stderr.split())}")
    job = done.stdout.strip().split(";")[0]
    (folder / f"{job}.sbatch").write_text(text)
    return job


def as_array(scripts: Sequence[BatchScript]) -> BatchScript:
    """One script for all points of a sweep: a job array, if there are several.

    Raises:
        ConfigurationError: If the points do not ask for the same nodes, tasks and limits.
    """
    first = scripts[0]
    if any(replace(script, variants=first.variants) != first for script in scripts):
        raise ConfigurationError(
            "all tasks of a job array ask for the same, and these points of the sweep do not: sweep over settings that"
            " change neither trainer.devices, trainer.num_nodes nor launcher.*, or submit the points one by one"
        )
    return replace(first, variants=[script.variants[0] for script in scripts])


def _run_here(script: BatchScript) -> None:
    """Runs each training in turn on this machine, where Lightning starts the ranks; the first that fails ends it."""
    for arguments in script.variants:
        done = subprocess.run([*script.command, *arguments], env={**os.environ, **script.environment})
        if done.returncode != 0:
            # It has said why. One that a signal ended counts as a shell counts it.
            sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())
    points: list[tuple[BatchScript, DictConfig]] = []

    @hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="submit")
    def collect(cfg: DictConfig) -> None:
        # Called once, or for each point of a sweep.
        with one_line_errors():
            arguments = [override for override in HydraConfig.get().overrides.task if _is_for_training(override)]
            points.append((batch_script(cfg, [arguments]), cfg))

    with one_line_errors():
        collect()
        script, cfg = as_array([script for script, _ in points]), points[0][1]
        on_cluster = cfg.launcher.scheduler == "slurm"
        if cfg.dry_run:
            lines = [shlex.join([*script.command, *arguments]) for arguments in script.variants]
            print(script.render() if on_cluster else "\n".join(lines), end="" if on_cluster else "\n")
        elif on_cluster:
            print(f"submitted job {submit(script, cfg.launcher.sbatch)}; output and runs: {script.folder}")
        else:
            _run_here(script)


if __name__ == "__main__":
    main()
