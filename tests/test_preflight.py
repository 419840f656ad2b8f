"""Each wrong start is refused within seconds, by all ranks that are there; ranks are threads here."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from slurm_cluster import free_port

from lightning_dp import arrival
from lightning_dp.cli import preflight as program
from lightning_dp.errors import PreflightError
from lightning_dp.health import network
from lightning_dp.health import preflight as module
from lightning_dp.health.preflight import Card, Meeting, Place, compare, preflight, versions

pytestmark = pytest.mark.timeout(60)

HERE = "127.0.0.1"
FACTS = {"torch": "1"}
LO = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def place() -> Place:
    """Rank 0 of three, with a port whose neighbours are free."""
    while True:
        port = free_port()
        with ExitStack() as stack, contextlib.suppress(OSError):
            for neighbour in range(port + 1, port + 1 + module.PORTS):
                stack.enter_context(network.listen("", neighbour))
            return Place(0, 3, HERE, port, "this run", hosts=("a", "a", "b"))


def meet(places: Sequence[Place], limit: float = 10, **others: Any) -> tuple[list[Meeting | str], float]:
    """What each rank found, or the message of its error, and seconds; ``facts`` and ``environment`` by index."""

    def one(index: int) -> Meeting | str:
        facts = others.get("facts", {}).get(index, FACTS)
        environment = others.get("environment", {}).get(index, LO)
        try:
            return preflight(places[index], limit, facts, environment)
        except PreflightError as error:
            return str(error)

    start = time.monotonic()
    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(one, range(len(places))))
    return found, time.monotonic() - start


def ranks(place: Place, *numbers: int) -> list[Place]:
    return [replace(place, rank=rank) for rank in numbers or range(place.world_size)]


# ---------------------------------------------------------------------------------------------- right starts


def test_all_ranks_meet_in_well_under_a_second_and_agree_on_a_free_port(place: Place) -> None:
    found, seconds = meet(ranks(place))
    meetings = [meeting for meeting in found if isinstance(meeting, Meeting)]
    assert len(meetings) == 3, found
    assert [card.rank for card in meetings[0].cards] == [0, 1, 2]
    assert all(meeting.cards == meetings[0].cards and meeting.port == meetings[0].port for meeting in meetings)
    socket.create_server((HERE, meetings[0].port)).close()
    assert seconds < 1


def test_a_rank_may_be_late(place: Place) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, ranks(place, 1, 2))
        time.sleep(0.5)
        late, _ = meet(ranks(place, 0))
        assert all(isinstance(meeting, Meeting) for meeting in (*late, *early.result()[0]))


def test_two_runs_that_want_the_same_port_do_not_meet_each_other(place: Place) -> None:
    other = replace(place, run="another run", world_size=2)
    found, seconds = meet([*ranks(place), *ranks(other)], facts={3: {"torch": "2"}, 4: {"torch": "2"}})
    assert all(isinstance(meeting, Meeting) for meeting in found), found
    assert [len(meeting.cards) for meeting in found if isinstance(meeting, Meeting)] == [3, 3, 3, 2, 2]
    assert len({meeting.port for meeting in found if isinstance(meeting, Meeting)}) == 2
    assert seconds < 5


@pytest.fixture
def stranger(place: Place) -> Iterator[None]:
    """Somebody else's service on the first port that would be used; it answers what no rank understands."""
    server = socket.create_server((HERE, place.port + 1))
    server.settimeout(0.1)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            connection.sendall(b"220 mail\n[]\n")
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    stop.set()
    thread.join()
    server.close()


@pytest.mark.usefixtures("stranger")
def test_a_port_that_is_taken_is_left_alone(place: Place) -> None:
    found, seconds = meet(ranks(place))
    assert all(isinstance(meeting, Meeting) for meeting in found), found
    assert seconds < 5


def test_ranks_that_are_kept_waiting_by_strangers_call_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.4)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        first = pool.submit(meet, ranks(place, 0))
        deadline = time.monotonic() + 5
        for _ in range(3):  # each is heard out for as long as a rank waits for an answer
            while time.monotonic() < deadline:
                with contextlib.suppress(ConnectionRefusedError):
                    stack.enter_context(socket.create_connection((HERE, place.port + 1)))
                    break
        others, seconds = meet(ranks(place, 1, 2))
        found = [*first.result()[0], *others]
    assert all(isinstance(meeting, Meeting) for meeting in found), found
    assert seconds < 5


def test_ranks_of_torchruns_that_count_restarts_unequally_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun whose ranks end since those of another one failed counts no restart."""
    variables = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    runs = []
    for rank, restarts in ((0, 0), (1, 1)):
        for name, value in {**variables, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restarts)}.items():
            monkeypatch.setenv(name, value)
        runs.append(arrival._place(TorchElasticEnvironment()).run)
    assert runs[0] == runs[1]


def test_nccls_interface_matters_where_nccl_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NCCL_SOCKET_IFNAME": "ib9", "MASTER_ADDR": HERE, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    environment = LightningEnvironment()
    environment.set_world_size(2)
    with pytest.raises(PreflightError, match="NCCL_SOCKET_IFNAME=ib9 is no network interface here"):
        arrival.meet(environment, 0.2, on_gpu=True)
    with pytest.raises(PreflightError, match="1 of 2 ranks did not arrive"):
        arrival.meet(environment, 0.2, on_gpu=False)


# ---------------------------------------------------------------------------------------------- wrong starts


def refused(place: Place, numbers: Sequence[int] = (), seconds: float = 5, **others: Any) -> str:
    """The one message that all ranks get within ``seconds``."""
    found, took = meet(ranks(place, *numbers), **others)
    assert all(isinstance(message, str) for message in found), found
    assert took < seconds
    assert len(set(map(str, found))) == 1, found
    return str(found[0])


def test_a_rank_that_never_arrives_is_named_with_its_host(place: Place) -> None:
    message = refused(place, (0, 1), limit=1)
    assert message.startswith("1 of 3 ranks did not arrive at 127.0.0.1 port ")
    assert "missing rank 2 on b; there rank 0 on" in message


def test_without_rank_0_the_others_say_where_they_looked(place: Place) -> None:
    found, seconds = meet(ranks(place, 1, 2), limit=1)
    assert seconds < 3
    for rank, message in zip((1, 2), found, strict=True):
        assert f"rank {rank} on {socket.gethostname()} did not find rank 0 at 127.0.0.1" in str(message)
        assert "Connection refused" in str(message)


def test_without_rank_0_a_silent_stranger_does_not_keep_the_others_beyond_their_limit(place: Place) -> None:
    with socket.create_server((HERE, place.port + 1)):
        found, seconds = meet(ranks(place, 1, 2), limit=1)
    assert seconds < 3
    assert all("did not find rank 0" in str(message) for message in found), found
    assert all("what listens there is not of this run" in str(message) for message in found), found


def test_other_versions_are_named_with_their_ranks(place: Place) -> None:
    message = refused(place, facts={2: {"torch": "2"}})
    host = socket.gethostname()
    assert message.startswith(
        f"torch differs between ranks: 1 (rank 0 on {host}, 1 on {host}) and 2 (rank 2 on {host}): use the same"
    )


def test_a_rank_that_expects_another_number_of_ranks_is_named(place: Place) -> None:
    places = [replace(p, world_size=4) if p.rank == 1 else p for p in ranks(place)]
    found, seconds = meet(places)
    assert seconds < 5
    assert all("the number of ranks differs between ranks: 3 (rank 0" in str(message) for message in found), found


def test_a_rank_that_was_started_twice_is_named(place: Place) -> None:
    found, seconds = meet(ranks(place, 0, 1, 1), limit=3)
    assert seconds < 10
    assert "rank 1 is there twice" in str(found[0])
    assert all(isinstance(message, str) for message in found)


def test_a_master_address_that_is_unknown(place: Place) -> None:
    found, seconds = meet(ranks(replace(place, address="no-such-host.invalid")))
    assert seconds < 10
    for rank, message in enumerate(found):
        assert str(message).startswith(
            f"rank {rank} on {socket.gethostname()}: MASTER_ADDR 'no-such-host.invalid' has no"
        )


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait(10))
    start = time.monotonic()
    with pytest.raises(network.AddressError, match=r"'slow' has no address here \(no answer within 0\.2 s\)"):
        network.resolve("slow", limit=0.2)
    assert time.monotonic() - start < 2
    asked.set()


SLOW_NAMES = """
import socket, time
from lightning_dp.health import network
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
try:
    network.resolve("slow", limit=0.2)
except network.AddressError as error:
    print(error)
"""


def test_a_program_does_not_wait_for_a_name_server_at_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW_NAMES], capture_output=True, text=True, timeout=40)
    assert done.stdout.startswith("MASTER_ADDR 'slow' has no address here (no answer")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib9"}, "GLOO_SOCKET_IFNAME=ib9 is no network interface here; there are"),
        ({"GLOO_SOCKET_IFNAME": "lo,ib9"}, "GLOO_SOCKET_IFNAME=ib9 is no network interface here; there are"),
        ({"NCCL_SOCKET_IFNAME": "ib,mlx"}, "NCCL_SOCKET_IFNAME=ib,mlx is no network interface here; there are"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME==l is no network interface here; there are"),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "l"}, None),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}, None),
    ],
)
def test_network_interfaces(variables: Mapping[str, str], message: str | None) -> None:
    if message is None:
        assert network.own_address(variables) == HERE
        return
    with pytest.raises(network.AddressError) as raised:
        network.own_address(variables)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("answer", [lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("192.0.2.1", 0))], None])
def test_a_host_name_with_no_address_or_one_of_another_host(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo goes on with the loopback address then, which is right for local ranks; others cannot be called on."""

    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    real = socket.getaddrinfo
    ask = answer or unknown
    name = socket.gethostname()
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: (ask if host == name else real)(host, *a, **k))
    assert network.own_address({}) == HERE


def test_a_neighbour_that_cannot_be_called_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 2's door is where another process listens, as a loopback address is on every host.
    with socket.create_server((HERE, 0)) as other:
        real = module.Card

        def card(rank: int, *values: Any, **named: Any) -> Card:
            made = real(rank, *values, **named)
            return replace(made, port=other.getsockname()[1]) if rank == 2 else made

        monkeypatch.setattr(module, "Card", card)
        monkeypatch.setattr(module, "PATIENCE", 1.0)
        message = refused(place, seconds=20)
    host = socket.gethostname()
    assert message.startswith(f"rank 1 on {host} cannot reach rank 2 on {host} at 127.0.0.1 (another process answers")
    assert "set GLOO_SOCKET_IFNAME" in message


def test_what_must_agree() -> None:
    alike = [Card(rank, 2, "a", HERE, 1, versions()) for rank in (0, 1)]
    assert compare(alike) == []
    assert len(compare([alike[0], replace(alike[1], facts={**versions(), "python": "2"})])) == 1
    assert len(compare([alike[0], replace(alike[1], facts={}, world_size=3)])) == 1 + len(versions())


def test_the_command_takes_all_devices_of_a_cpu_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    variables |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODELIST": "a"}
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["lightning-dp-preflight", "trainer.devices=auto"])
    program.main()
    assert capsys.readouterr().out.startswith("one rank alone")


# ---------------------------------------------------------------------------------------------- other hosts

RANK = """
import os, socket, sys
from lightning_dp.errors import PreflightError
from lightning_dp.health.preflight import Place, preflight
try:
    meeting = preflight(Place(int(sys.argv[1]), 2, "10.77.31.1", 20000, "run"), 100)
    print([card.address for card in meeting.cards])
except PreflightError as error:
    print(error)
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a link between them: hosts with addresses of their own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"dp{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
                pytest.skip("network namespaces cannot be made here")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        first, second = names
        link = ["ip", "-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(link, check=True)
        for number, name in enumerate(names, start=1):
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.77.31.{number}/24", "dev", "eth0"], check=True)
            for device in ("lo", "eth0"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield names


@pytest.mark.timeout(150)
@pytest.mark.parametrize("interface", ["eth0", "lo"])
def test_an_interface_that_other_hosts_do_not_reach(hosts: list[str], interface: str) -> None:
    processes = []
    for rank, host in enumerate(hosts):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface if rank == 1 else "eth0"}
        command = ["ip", "netns", "exec", host, sys.executable, "-c", RANK, str(rank)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
    try:
        said = [process.communicate(timeout=110)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if interface == "eth0":
        assert said == ["['10.77.31.1', '10.77.31.2']\n"] * 2
    else:
        assert said[0] == said[1]
        assert "cannot reach rank 1 on" in said[0]
        assert "at 127.0.0.1 (Connection refused): set GLOO_SOCKET_IFNAME" in said[0]
