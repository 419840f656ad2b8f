"""Are all ranks there, alike, and within reach of each other? Asked before the process group is made.

Process groups answer a wrong start by waiting. Here every wait has a limit, and who is missing is named. Rank 0 listens
beside the group's port; every other rank tells it who and where it is. Once all are there they are compared, each rank
calls on its neighbour at the address that gloo would give it, and rank 0 tells all what was found, with a port of its
node that is free for the process group.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from typing import Any

from lightning_dp.errors import PreflightError
from lightning_dp.health.network import AddressError, free_port, listen, own_address, resolve
from lightning_dp.health.talk import Talk, connect

Reply = dict[str, Any]
PACKAGES = ("torch", "lightning", "lightning-dp")
PORTS = 16  # that rank 0 tries, behind the group's
PATIENCE = 5.0  # seconds for an answer of a process that is there
CALL = 5  # such times that all calls on neighbours get together; one takes at most four
PAUSE = 0.05  # seconds before all ports are tried again
MARGIN = 5.0  # seconds beyond rank 0's own limits for which others wait for what it says


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: Of this process.
        world_size: Number of ranks.
        address: Name or address of rank 0's host, as other ranks are to use it.
        port: The process group's; rank 0 listens on one of those behind it.
        run: Tells this run from others on the same hosts.
        hosts: Host of each rank, if known beforehand.
    """

    rank: int
    world_size: int
    address: str
    port: int
    run: str
    hosts: Sequence[str] = ()


@dataclass(frozen=True)
class Card:
    """What a rank says of itself.

    Attributes:
        rank: Its rank.
        world_size: The number of ranks it expects.
        host: Its host name.
        address: At which other ranks are to reach it.
        port: On which it waits for its neighbour's call.
        facts: What must be the same on all ranks, such as versions, by name.
    """

    rank: int
    world_size: int
    host: str
    address: str
    port: int
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """What all ranks found.

    Attributes:
        cards: By rank.
        port: Free on rank 0's host at the time; the same on all ranks.
        seconds: That it took this rank.
    """

    cards: tuple[Card, ...]
    port: int
    seconds: float


def versions() -> dict[str, str]:
    """Versions of what must not differ between ranks."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def preflight(
    place: Place,
    limit: float,
    facts: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Meeting:
    """Meets all other ranks.

    Args:
        place: Where this rank stands.
        limit: Seconds that rank 0 waits for the last rank.
        facts: What must be the same on all ranks; by default :func:`versions`.
        environment: Environment variables, for the network interface; by default this process's.

    Returns:
        Cards of all ranks, and a free port.

    Raises:
        PreflightError: On all ranks that are there: if ranks are missing, differ or cannot be reached.
    """
    start = time.monotonic()
    environment = os.environ if environment is None else environment
    facts = versions() if facts is None else facts
    try:
        address = resolve(place.address)
        mine = own_address(environment)
        door = listen(mine, 0)
    except AddressError as error:
        raise PreflightError(f"rank {place.rank} on {socket.gethostname()}: {error}") from None
    with ExitStack() as stack:
        stack.enter_context(door)
        port = int(door.getsockname()[1])
        card = Card(place.rank, place.world_size, socket.gethostname(), mine, port, facts)
        ask = _host if place.rank == 0 else _guest
        reply = ask(place, address, card, door, start + limit, stack)
    if reply["problems"]:
        raise PreflightError("; ".join(reply["problems"]))
    cards = tuple(Card(**card) for card in reply["cards"])
    return Meeting(cards, int(reply["port"]), time.monotonic() - start)


# ----------------------------------------------------------------------------------------------- the two sides


def _host(place: Place, address: str, card: Card, door: socket.socket, deadline: float, stack: ExitStack) -> Reply:
    """Rank 0: collects cards, compares them, lets neighbours call on each other and tells what was found."""
    server = stack.enter_context(_open_house(place, address))
    cards = {0: card}
    talks: dict[int, Talk] = {}
    problems: list[str] = []
    while len(cards) < place.world_size and not problems:
        talk = Talk.accept(server, deadline)
        if talk is None:
            problems.append(_missing(place, cards, server))
            break
        stack.callback(talk.close)
        hello = talk.receive(time.monotonic() + PATIENCE)
        waits = deadline - time.monotonic()
        ours = hello is not None and hello.get("run") == place.run and talk.send({"run": place.run, "waits": waits})
        if not ours or talk.receive(time.monotonic() + PATIENCE) is None:
            talk.close()  # of another run, or gone, to call again, as it was kept waiting
            continue
        guest = Card(**hello["card"])
        if guest.rank in cards:
            hosts = f"{cards[guest.rank].host} and {guest.host}"
            problems.append(f"rank {guest.rank} is there twice, on {hosts}: the ranks were started more than once")
        cards[guest.rank] = guest
        talks[guest.rank] = talk
    problems = problems or compare(list(cards.values()))
    everybody = [asdict(cards[rank]) for rank in sorted(cards)]
    if not problems:
        for talk in talks.values():
            talk.send({"cards": everybody})
        answers_by = time.monotonic() + CALL * PATIENCE
        problems = [_call_on_neighbour(cards, place, door)]
        for rank, talk in talks.items():
            answer = talk.receive(answers_by)
            problems.append(answer["problem"] if answer else f"rank {rank} on {cards[rank].host} left")
        problems = [problem for problem in problems if problem]
    reply = {"problems": problems, "cards": everybody, "port": free_port()}
    for talk in talks.values():
        talk.send(reply)
    return reply


def _guest(place: Place, address: str, card: Card, door: socket.socket, deadline: float, stack: ExitStack) -> Reply:
    """Any other rank: finds rank 0, hands in its card, calls on its neighbour and waits for what was found."""
    me = f"rank {card.rank} on {card.host}"
    talk, waits, failure = _find_rank_zero(place, address, card, deadline)
    if talk is None:
        raise PreflightError(
            f"{me} did not find rank 0 at {place.address} ({address}), ports {place.port + 1} to {place.port + PORTS}:"
            f" {failure or 'what listens there is not of this run'}; is rank 0 running, is MASTER_ADDR the name of its"
            " host, and does no firewall stand between?"
        )
    stack.callback(talk.close)
    reply: Reply | None = talk.receive(time.monotonic() + waits + MARGIN)
    if reply is not None and "problems" not in reply:
        cards = {entry["rank"]: Card(**entry) for entry in reply["cards"]}
        talk.send({"problem": _call_on_neighbour(cards, place, door)})
        reply = talk.receive(time.monotonic() + CALL * PATIENCE + MARGIN)
    if reply is None:
        raise PreflightError(f"{me}: rank 0 at {place.address} left before all ranks were there; see its message")
    return reply


def _find_rank_zero(place: Place, address: str, card: Card, deadline: float) -> tuple[Talk | None, float, str]:
    """A connection to this run's rank 0 and the seconds that it waits, or ``None`` and why there is none."""
    ports = range(place.port + 1, place.port + 1 + PORTS)
    failure = ""
    for port in cycle(ports):
        if time.monotonic() > deadline:
            break
        patience = min(PATIENCE, max(PAUSE, deadline - time.monotonic()))
        until = time.monotonic() + patience
        talk, failure = connect(address, port, patience)
        if talk is not None:
            talk.send({"run": place.run, "card": asdict(card)})
            welcome = talk.receive(until) or {}
            if welcome.get("run") == place.run and talk.send({"run": place.run}):
                return talk, welcome["waits"], ""
            talk.close()
        time.sleep(PAUSE if port == ports[-1] else 0)
    return None, 0.0, failure


def _open_house(place: Place, address: str) -> socket.socket:
    """Rank 0's socket, on the first port behind the group's that no other run has."""
    last: OSError | None = None
    # On all interfaces, as other hosts may know this one by another address, unless it is for this host alone.
    here = address if address.startswith("127.") else ""
    for port in range(place.port + 1, place.port + 1 + PORTS):
        try:
            return listen(here, port, backlog=place.world_size)
        except OSError as error:
            last = error
    raise PreflightError(
        f"rank 0 on {socket.gethostname()} cannot listen on any port from {place.port + 1} to {place.port + PORTS}"
        f" ({last}): set MASTER_PORT to another number"
    )


def _call_on_neighbour(cards: Mapping[int, Card], place: Place, door: socket.socket) -> str:
    """Calls on the next rank, and answers the one before; what is wrong, or an empty string."""
    me, neighbour = cards[place.rank], cards[(place.rank + 1) % place.world_size]
    talk, failure = connect(neighbour.address, neighbour.port, PATIENCE)
    caller = Talk.accept(door, time.monotonic() + PATIENCE)
    if caller is not None:
        caller.send({"run": place.run, "rank": place.rank})
        caller.close()
    heard = talk.receive(time.monotonic() + 2 * PATIENCE) if talk is not None else None
    if talk is not None:
        talk.close()
    if heard == {"run": place.run, "rank": neighbour.rank}:
        return ""
    return (
        f"rank {me.rank} on {me.host} cannot reach rank {neighbour.rank} on {neighbour.host} at {neighbour.address}"
        f" ({failure or 'another process answers there'}): set GLOO_SOCKET_IFNAME on {neighbour.host} to the network"
        " interface that other hosts reach"
    )


# ----------------------------------------------------------------------------------------------- what is wrong


def compare(cards: Sequence[Card]) -> list[str]:
    """What differs between ranks that must not; empty if nothing does."""
    problems = []
    if len({card.world_size for card in cards}) > 1:
        problems.append(_differs("the number of ranks", {c.rank: (str(c.world_size), c.host) for c in cards}))
    names = {name for card in cards for name in card.facts}
    for name in sorted(names):
        values = {card.rank: (card.facts.get(name, "unknown"), card.host) for card in cards}
        if len({value for value, _ in values.values()}) > 1:
            problems.append(f"{_differs(name, values)}: use the same environment and configuration on all ranks")
    return problems


def _differs(name: str, values: Mapping[int, tuple[str, str]]) -> str:
    by_value: dict[str, list[str]] = {}
    for rank, (value, host) in sorted(values.items()):
        by_value.setdefault(value, []).append(f"{rank} on {host}")
    parts = [f"{value} (rank {', '.join(ranks)})" for value, ranks in by_value.items()]
    return f"{name} differs between ranks: {' and '.join(parts)}"


def _missing(place: Place, cards: Mapping[int, Card], server: socket.socket) -> str:
    missing = [rank for rank in range(place.world_size) if rank not in cards]
    named = [f"{rank} on {place.hosts[rank]}" if rank < len(place.hosts) else str(rank) for rank in missing]
    there = [f"{rank} on {cards[rank].host}" for rank in sorted(cards)]
    return (
        f"{len(missing)} of {place.world_size} ranks did not arrive at {place.address} port {server.getsockname()[1]}:"
        f" missing rank {', '.join(named)}; there rank {', '.join(there)}: see the output of the missing ones, and"
        " whether their hosts reach this address"
    )
