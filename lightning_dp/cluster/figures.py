"""Do the figures of the trainer and of what started, or will start, its ranks agree? One check, one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dp.errors import ConfigurationError


@dataclass(frozen=True)
class Figure:
    """A number that is written down in two places.

    Attributes:
        name: What is counted.
        wanted: By the trainer.
        wanted_by: Name of the setting that wants it.
        found: At the launcher.
        found_in: Name of the setting or variable that it was found in.
    """

    name: str
    wanted: int
    wanted_by: str
    found: int
    found_in: str

    @property
    def agrees(self) -> bool:
        """Whether both places say the same."""
        return self.wanted == self.found


def require_agreement(figures: Iterable[Figure], hint: str) -> None:
    """Refuses figures that do not agree: ranks would wait for others that nobody starts, or train without them.

    Args:
        figures: All that are known; those that agree are shown too.
        hint: What to change.

    Raises:
        ConfigurationError: With a table of what is wanted and what was found.
    """
    figures = list(figures)
    if not all(figure.agrees for figure in figures):
        raise ConfigurationError(f"what the trainer wants is not what there is; {hint}\n{_table(figures)}")


def _table(figures: Sequence[Figure]) -> str:
    rows = [("", "wanted", "found", "")]
    for f in figures:
        mark = "" if f.agrees else "<-- differs"
        rows.append((f.name, f"{f.wanted} ({f.wanted_by})", f"{f.found} ({f.found_in})", mark))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def slurm_figures(environment: Mapping[str, str], devices: int, nodes: int) -> list[Figure]:
    """What SLURM started against what a trainer with ``devices`` per node on ``nodes`` nodes wants.

    Args:
        environment: The environment variables of a task that ``srun`` started.
        devices: ``trainer.devices``, as a number.
        nodes: ``trainer.num_nodes``.
    """
    by_nodes, by_devices = "trainer.num_nodes", "trainer.devices"
    figures = []
    found_nodes = _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if found_nodes is not None:
        figures.append(Figure("nodes", nodes, by_nodes, *found_nodes))
    per_node = _first(environment, "SLURM_NTASKS_PER_NODE")
    if per_node is not None:
        figures.append(Figure("tasks per node", devices, by_devices, *per_node))
    tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks is not None:
        figures.append(Figure("tasks", devices * nodes, f"{by_devices} x {by_nodes}", *tasks))
    return figures


def _first(environment: Mapping[str, str], *names: str) -> tuple[int, str] | None:
    return next(((int(environment[name]), name) for name in names if environment.get(name, "").isdigit()), None)


def device_count(devices: Any) -> int | None:
    """How many devices Lightning's ``devices`` means: ``2``, ``"2"``, ``[0, 3]`` or ``"0,3"``; ``None`` for all."""
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return len(devices)
    try:
        count = int(devices)
    except (TypeError, ValueError):
        return None
    return count if count > 0 else None
