"""How was this process started, as which rank, and is that what the trainer wants? From environment variables alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from lightning_dp.cluster.figures import Figure, require_agreement, slurm_figures
from lightning_dp.errors import ConfigurationError

Environment = Mapping[str, str]
# Job names by which Lightning takes a SLURM job for an interactive one and each of its processes for a run of its own.
INTERACTIVE = ("bash", "interactive")


def refuse_wrong_start(environment: Environment, devices: int, nodes: int) -> None:
    """Refuses ranks that would wait for others that nobody starts, or make a smaller world than is wanted.

    Args:
        environment: The environment variables of this process.
        devices: Ranks that the trainer wants on each node.
        nodes: Nodes that the trainer wants.

    Raises:
        ConfigurationError: With what is wrong and what to change.
    """
    if is_torchrun(environment):
        _refuse_torchrun(environment, devices, nodes)
    elif "SLURM_JOB_ID" in environment:
        _refuse_slurm(environment, devices, nodes)


def is_torchrun(environment: Environment) -> bool:
    """Whether torchrun started this process; its ranks count then, also within SLURM."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment


def is_slurm_task(environment: Environment) -> bool:
    """Whether srun started this process as one of a step's tasks, and not as somebody's shell."""
    return "SLURM_STEP_ID" in environment and "SLURM_PTY_PORT" not in environment


def slurm_hosts(environment: Environment) -> list[str]:
    """The host of each rank of a SLURM step, as far as it can be told: ranks fill one node after the other."""
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    # "2(x3),1": two tasks on each of three nodes, then one.
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = list(chain.from_iterable([int(count)] * int(times or 1) for count, times in parts))
    return [node for node, count in zip(nodes, counts, strict=False) for _ in range(count)]


def expand_nodes(text: str) -> list[str]:
    """The names in a list of nodes as SLURM writes it: ``"a[1-2,07]-x,b"`` is a1-x, a2-x, a07-x and b."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            middles = [plain] if plain else list(chain.from_iterable(map(_numbers, ranges.split(","))))
            expanded = [start + middle for start in expanded for middle in middles]
        names += expanded
    return names


def _numbers(text: str) -> list[str]:
    first, _, last = text.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]


def _refuse_torchrun(environment: Environment, devices: int, nodes: int) -> None:
    figures = [
        Figure("ranks per node", devices, "trainer.devices", int(environment["LOCAL_WORLD_SIZE"]), "LOCAL_WORLD_SIZE"),
        Figure(
            "ranks",
            devices * nodes,
            "trainer.devices x trainer.num_nodes",
            int(environment["WORLD_SIZE"]),
            "WORLD_SIZE",
        ),
    ]
    if is_slurm_task(environment) and "SLURM_STEP_NUM_TASKS" in environment:
        agents, tasks = int(environment.get("GROUP_WORLD_SIZE", nodes)), int(environment["SLURM_STEP_NUM_TASKS"])
        figures.append(Figure("torchruns", agents, "torchrun --nnodes", tasks, "SLURM_STEP_NUM_TASKS"))
    require_agreement(
        figures, "start one torchrun per node with --nnodes=trainer.num_nodes and --nproc-per-node=trainer.devices"
    )


def _refuse_slurm(environment: Environment, devices: int, nodes: int) -> None:
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1"))
    interactive = environment.get("SLURM_JOB_NAME") in INTERACTIVE
    if is_slurm_task(environment):
        if interactive and tasks > 1:
            raise ConfigurationError(
                f"srun started {tasks} tasks, but the job's name is {environment['SLURM_JOB_NAME']!r}, by which"
                " Lightning takes each for a run of its own: give the step another name, srun --job-name=train ..."
            )
    elif tasks > 1 and not interactive:
        raise ConfigurationError(
            f"SLURM has {tasks} tasks for this job, but this process was not started by srun, so nobody starts the"
            " others: put srun before the command, as in: srun python train.py"
        )
    if not interactive:
        hint = "ask SLURM for --nodes=trainer.num_nodes and --ntasks-per-node=trainer.devices, and start with srun"
        require_agreement(slurm_figures(environment, devices, nodes), hint)
    if nodes > 1 and not is_slurm_task(environment) and "NODE_RANK" not in environment:
        name = " --job-name=train" if interactive else ""
        raise ConfigurationError(
            f"trainer.num_nodes is {nodes}, but this process was not started by srun, so nobody starts ranks on the"
            f" other nodes: put srun before the command, as in: srun{name} --ntasks-per-node={devices} python train.py"
        )
