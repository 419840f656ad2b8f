"""A SLURM batch script, rendered so that no name, path or argument can be taken for anything else. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dp.errors import ConfigurationError

# Where a job finds its folder, the same each time that it is started: Hydra reads it with ${oc.env:...}.
FOLDER_VARIABLE = "LIGHTNING_DP_JOB_FOLDER"
FOLDER_OVERRIDE = f"hydra.run.dir=${{oc.env:{FOLDER_VARIABLE}}}"
LONGEST_DIRECTIVE = 1000  # bytes; sbatch reads directives into a buffer of fixed size


@dataclass(frozen=True)
class BatchScript:
    """What a batch job asks for and runs.

    Attributes:
        name: Of the job.
        nodes: Number of nodes.
        tasks_per_node: Ranks on each.
        folder: Absolute; holds the output files and one folder per job, named by job id.
        working_directory: Absolute; where the command runs.
        command: Program and first arguments of each rank.
        variants: Further arguments: one sequence, or one for each task of a job array.
        options: Further options of sbatch by name, without ``None``; ``{"time": "01:00:00"}``.
        max_parallel: Tasks of an array that run at once; ``None`` for all.
        srun_arguments: Further options of srun.
        environment: Variables to export, by name.
        setup: Lines of shell that run first; they are the author's own shell code, and stand as they are.
    """

    name: str
    nodes: int
    tasks_per_node: int
    folder: str
    working_directory: str
    command: Sequence[str]
    variants: Sequence[Sequence[str]] = ((),)
    options: Mapping[str, str | int] = field(default_factory=dict)
    max_parallel: int | None = None
    srun_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()

    @property
    def is_array(self) -> bool:
        """Whether the job is an array of tasks."""
        return len(self.variants) > 1

    def render(self) -> str:
        """The script as text.

        Raises:
            ConfigurationError: If a value cannot stand in a script, such as a job name of two lines.
        """
        return "\n".join(["#!/bin/bash", *self._directives(), "set -e -o pipefail", *self._body()]) + "\n"

    def _directives(self) -> list[str]:
        if "\\" in self.folder:
            raise ConfigurationError(f"the folder {self.folder!r} holds a backslash, which SLURM takes for its own")
        output = f"{self.folder.replace('%', '%%')}/{'%A_%a' if self.is_array else '%j'}.out"
        options: dict[str, str | int] = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "chdir": self.working_directory,
            "output": output,
            "open-mode": "append",  # a requeued job adds to its output
            **self.options,
        }
        if self.is_array:
            limit = f"%{self.max_parallel}" if self.max_parallel is not None else ""
            options["array"] = f"0-{len(self.variants) - 1}{limit}"
        return ["#SBATCH --requeue", *(f"#SBATCH {_directive(name, value)}" for name, value in options.items())]

    def _body(self) -> list[str]:
        lines = [*self.setup]
        lines += [f"export {_variable_name(name)}={quoted(value)}" for name, value in self.environment.items()]
        job = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        lines.append(f'export {FOLDER_VARIABLE}={quoted(self.folder)}/"{job}"')
        if self.is_array:
            lines.append('case "$SLURM_ARRAY_TASK_ID" in')
            lines += [f"  {n}) arguments=({_words(variant)}) ;;" for n, variant in enumerate(self.variants)]
            lines.append("esac")
        else:
            lines.append(f"arguments=({_words(self.variants[0])})")
        # One task that fails ends the others, which would wait for it.
        srun = _words(["srun", "--kill-on-bad-exit=1", *self.srun_arguments])
        lines.append(f'exec {srun} {_words(self.command)} "${{arguments[@]}}" {quoted(FOLDER_OVERRIDE)}')
        return lines


def quoted(word: str) -> str:
    """``word`` as one word of a shell.

    Raises:
        ConfigurationError: If it holds a NUL, which no argument can.
    """
    if "\0" in word:
        raise ConfigurationError(f"{word!r} holds a NUL character, which no argument of a program can")
    return shlex.quote(word)


def _words(words: Sequence[str]) -> str:
    return " ".join(quoted(word) for word in words)


def _directive(name: str, value: str | int) -> str:
    """An option as sbatch reads it from a script: in double quotes, a backslash before what would end them."""
    text = str(value)
    if not text.isprintable():
        raise ConfigurationError(f"{name} {text!r} holds a line break or another control character; SLURM knows none")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if len(escaped.encode()) > LONGEST_DIRECTIVE:
        raise ConfigurationError(f"{name} is longer than {LONGEST_DIRECTIVE} bytes: {text[:50]!r}...")
    if not re.fullmatch(r"[a-z][a-z-]*", name):
        raise ConfigurationError(f"{name!r} is no option of sbatch; give its long name without dashes, as in 'time'")
    return f'--{name}="{escaped}"'


def _variable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigurationError(f"{name!r} is no name of an environment variable")
    return name
