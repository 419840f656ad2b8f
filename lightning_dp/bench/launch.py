"""Starting the ranks of a benchmark on this machine, each on cores of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lightning_dp.bench.hosts import INTERFACE, namespace_hosts

GRACE_SECONDS = 10
SHOWN_LINES = 15


class BenchError(RuntimeError):
    """A rank of a benchmark failed or took too long."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as torchrun's environment variables tell it.

    Attributes:
        rank: Its rank.
        world_size: All ranks.
        local_rank: Its rank among those of its host.
        local_world_size: Ranks of its host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place | None:
        """The place that torchrun, or srun with one task per rank, gave this process; ``None`` if neither did."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if all(name in environment for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
            return cls(*(int(environment[name]) for name in names))
        slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        if all(name in environment for name in slurm) and "SLURM_STEP_ID" in environment:
            return cls(*(int(environment[name]) for name in slurm))
        return None

    def environment(self, address: str, port: int) -> dict[str, str]:
        """The variables of torchrun for this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def cores_of(local_rank: int, local_world_size: int, cores: Sequence[int]) -> list[int]:
    """The cores of one rank: an equal part of all, or one that it shares where there are fewer than ranks."""
    each = len(cores) // local_world_size
    if each == 0:
        return [cores[local_rank % len(cores)]]
    return list(cores[local_rank * each : (local_rank + 1) * each])


def run_ranks(config: Path, ranks: int, hosts: int | None, rate: str | None, timeout: float) -> None:
    """Runs ``python -m lightning_dp.bench.rank config`` on all ranks and waits for them.

    Args:
        config: The resolved configuration.
        ranks: Number of ranks.
        hosts: Between how many namespaces they are dealt out; ``None`` keeps them all on this host's loopback.
        rate: Speed of a host's link.
        timeout: Seconds after which the ranks are ended.

    Raises:
        BenchError: If a rank failed, or not all ended in time; with the last lines of what it said.
    """
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "lightning_dp.bench.rank", str(config)]
    with ExitStack() as stack:
        places = [(Place(rank, ranks, rank, ranks), command) for rank in range(ranks)]
        address, interface = "127.0.0.1", "lo"
        if hosts is not None:
            made = stack.enter_context(namespace_hosts(hosts, rate))
            per_host = -(-ranks // hosts)
            places = [
                (Place(rank, ranks, rank % per_host, per_host), made[rank // per_host].command(command))
                for rank in range(ranks)
            ]
            address, interface = made[0].address, INTERFACE
        port = _free_port()
        processes = []
        for place, line in places:
            environment = {
                **os.environ,
                **place.environment(address, port),
                "GLOO_SOCKET_IFNAME": interface,
                "DP_BENCH_CORES": ",".join(map(str, cores_of(place.rank, ranks, cores))),
            }
            log = stack.enter_context(open(config.parent / f"rank{place.rank}.log", "w+", encoding="utf-8"))
            process = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes.append((process, Path(log.name)))
        _wait(processes, timeout)


def _wait(processes: Sequence[tuple[subprocess.Popen[bytes], Path]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process, _ in processes):
            failed = [rank for rank, (process, _) in enumerate(processes) if process.poll() not in (None, 0)]
            if failed:
                # The others may be about to tell what they saw.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        bad = [rank for rank, (process, _) in enumerate(processes) if process.poll() not in (None, 0)]
        late = [rank for rank, (process, _) in enumerate(processes) if process.poll() is None]
        if bad or late:
            rank = (bad or late)[0]
            what = f"ended with code {processes[rank][0].returncode}" if bad else f"did not end within {timeout:.0f} s"
            tail = "\n".join(processes[rank][1].read_text(encoding="utf-8").splitlines()[-SHOWN_LINES:])
            raise BenchError(f"rank {rank} of the bench {what}; see {processes[rank][1]}:\n{tail}")
    finally:
        for process, _ in processes:
            if process.poll() is None:
                process.kill()
            process.wait(GRACE_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
