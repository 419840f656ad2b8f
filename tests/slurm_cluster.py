"""A real SLURM of several nodes on this machine: munged, slurmctld and one slurmd per node, each with a host name.

Every daemon runs in host-name and mount namespaces of its own, where ``hostname`` is ``node1``, ``node2``, ... and a
hosts file of the cluster's resolves these names to 127.0.0.1. There are neither cgroups nor a database. Needs root and
the programs that ``make slurm`` installs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare")
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=5
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str | None:
    """Why no cluster can be started here; ``None`` if one can."""
    if os.geteuid() != 0:
        return "a SLURM cluster of the tests' own needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(missing)} not installed; run: make slurm" if missing else None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SlurmCluster:
    """``nodes`` nodes with ``cpus`` (pretended) processors each.

    Use it as a context manager; leaving it ends the daemons and what their jobs left running, each by process id.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4) -> None:
        self.hosts = [f"node{number + 1}" for number in range(nodes)]
        self._cpus = cpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        # Munge wants a folder that everybody may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm_of_tests."))
        self._folder.chmod(0o755)
        self._configuration = self._folder / "slurm.conf"
        self.environment: dict[str, str] = {"SLURM_CONF": str(self._configuration)}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            _end(daemon)
        for pid in self._left_running():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- jobs

    def submit(self, *arguments: str | Path, folder: Path) -> str:
        """Job id of ``sbatch ARGUMENTS`` run in ``folder``."""
        done = self.client("sbatch", "--parsable", *arguments, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job; of an array's task, with ``job`` as ``ARRAY_TASK``."""
        for _ in range(3):  # a controller on a busy machine may not answer at once
            done = self.client("scontrol", "-o", "show", "job", job)
            if done.returncode == 0:
                break
        assert done.returncode == 0, f"scontrol ended with {done.returncode}: {done.stdout}{done.stderr}"
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait(self, job: str, limit: float, states: Sequence[str] = ENDED) -> dict[str, str]:
        """Polls until the job is in one of ``states``; an error after ``limit`` seconds, and the job is cancelled."""
        deadline = time.monotonic() + limit
        while (known := self.job(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                output = Path(known.get("StdOut", ""))
                self.client("scancel", job)
                text = output.read_text() if output.is_file() else "none"
                raise AssertionError(f"job {job} is {known['JobState']} after {limit} s; its output:\n{text}")
            time.sleep(0.2)
        return known

    def client(self, *command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command that talks to the controller."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=30)

    def pids(self, job: str, marker: str) -> dict[int, int]:
        """Process ids of a job's tasks by rank: processes whose command line holds ``marker``."""
        found = {}
        for pid, environment in _environments().items():
            if environment.get("SLURM_JOB_ID") == job and "SLURM_STEP_ID" in environment:
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_text()
                except OSError:
                    continue
                if marker in command and "srun" not in command.split("\0")[0]:
                    found[int(environment["SLURM_PROCID"])] = pid
        return found

    # ------------------------------------------------------------------------------------------- daemons

    def _start(self) -> None:
        hosts = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", "controller", *self.hosts))
        (self._folder / "hosts").write_text(hosts)
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        shape = f"CPUs={self._cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self._cpus} ThreadsPerCore=1"
        nodes = [
            f"NodeName={host} NodeAddr=127.0.0.1 Port={free_port()} {shape} RealMemory=8000 State=UNKNOWN"
            for host in self.hosts
        ]
        settings = {"folder": self._folder, "controller_port": free_port(), "nodes": "\n".join(nodes)}
        self._configuration.write_text(CONFIGURATION.format(**settings))
        munge = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        munge["seed-file"] = "munge.seed"
        options = [f"--{name}={self._folder / str(value)}" for name, value in munge.items()]
        self._daemon("controller", "munged", "-F", *options)
        self._wait_for(lambda: (self._folder / "munge.socket").exists(), "munged")
        self._daemon("controller", "slurmctld", "-D", "-c", "-f", str(self._configuration))
        for host in self.hosts:
            (self._folder / f"spool.{host}").mkdir()
            self._daemon(host, "slurmd", "-D", "-f", str(self._configuration), "-N", host)
        self._wait_for(self._all_idle, "the nodes")

    def _daemon(self, host: str, *command: str) -> None:
        # unshare and bash become the daemon, so that the process id is the daemon's.
        enter = ["unshare", "--uts", "--mount", "--propagation", "slave", "bash", "-c", ENTER, "enter", host]
        with (self._folder / f"{command[0]}.{host}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*enter, str(self._folder / "hosts"), *command],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _all_idle(self) -> bool:
        listed = self.client("sinfo", "-h", "-N", "-o", "%t")
        return listed.stdout.split() == ["idle"] * len(self.hosts)

    def _wait_for(self, ready: object, what: str, limit: float = 30) -> None:
        deadline = time.monotonic() + limit
        while not ready():  # type: ignore[operator]
            if time.monotonic() > deadline:
                logs = [path.read_text(errors="replace")[-1000:] for path in sorted(self._folder.glob("*.[lo]*"))]
                raise RuntimeError(f"{what} did not come up within {limit} s:\n" + "\n".join(logs))
            time.sleep(0.1)

    def _left_running(self) -> list[int]:
        """What jobs started and nobody ended: it knows this cluster's configuration and the node it ran on."""
        ours = str(self._configuration)
        return [
            pid
            for pid, environment in _environments().items()
            if environment.get("SLURM_CONF") == ours and "SLURMD_NODENAME" in environment
        ]


def _environments() -> dict[int, Mapping[str, str]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "environ").read_text(errors="replace")
            except OSError:
                continue
            found[int(entry.name)] = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
    return found


def _end(process: subprocess.Popen[bytes], grace: float = 5) -> None:
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(grace)
