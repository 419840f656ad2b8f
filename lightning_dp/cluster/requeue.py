"""Puts this SLURM job back into the queue, once, and says what came of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

LIMIT = 30.0  # seconds that scontrol gets to answer


@dataclass(frozen=True)
class Requeued:
    """What came of it.

    Attributes:
        done: Whether the job will start again.
        message: One line for the user.
    """

    done: bool
    message: str


def job_id(environment: Mapping[str, str]) -> str | None:
    """The job as ``scontrol`` names it; a task of an array is ``ARRAY_TASK``. ``None`` outside of SLURM."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def requeue(environment: Mapping[str, str]) -> Requeued:
    """Requeues the job that this process belongs to, unless it is ending anyway, as when it was cancelled.

    Args:
        environment: The environment variables of a process of the job.
    """
    job = job_id(environment)
    if job is None:
        return Requeued(False, "this is no SLURM job, so nobody starts it again")
    state = _scontrol(environment, "--oneliner", "show", "job", job)
    if isinstance(state, str):
        return Requeued(False, f"job {job} was not requeued: {state}")
    found = re.search(r"\bJobState=(\S+)", state.stdout)
    if state.returncode == 0 and found and found[1] != "RUNNING":
        return Requeued(False, f"job {job} was not requeued: SLURM is ending it, its state is {found[1]}")
    done = _scontrol(environment, "requeue", job)
    if isinstance(done, str):
        return Requeued(False, f"job {job} was not requeued: {done}")
    if done.returncode != 0:
        return Requeued(False, f"job {job} was not requeued: scontrol says {' '.join(done.stderr.split())}")
    return Requeued(True, f"job {job} was requeued")


def _scontrol(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str] | str:
    """What scontrol answered, or why it could not be asked."""
    try:
        return subprocess.run(
            ["scontrol", *arguments], env=dict(environment), capture_output=True, text=True, timeout=LIMIT
        )
    except FileNotFoundError:
        return "scontrol is not on the PATH here, as within many containers; submit it again, or make scontrol known"
    except subprocess.TimeoutExpired:
        return f"scontrol did not answer within {LIMIT:g} s"
