"""Addresses of this host and of others, within seconds."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from queue import Empty, Queue
from threading import Thread
from typing import Any

RESOLVE_LIMIT = 5.0  # seconds that a name server gets
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


class AddressError(ValueError):
    """A name or interface has no address; the message says what to change."""


def resolve(name: str, limit: float = RESOLVE_LIMIT) -> str:
    """The address of a host; the IPv4 one if it has both kinds.

    Raises:
        AddressError: If the name is not known here, or no name server answers within ``limit`` seconds.
    """
    answers: Queue[Any] = Queue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # A daemon, as a program does not wait for these at its end.
    Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=limit)
    except Empty:
        reason = f"no answer within {limit:g} s"
    else:
        if not isinstance(found, Exception):
            return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        reason = getattr(found, "strerror", None) or str(found)
    raise AddressError(
        f"MASTER_ADDR {name!r} has no address here ({reason}): set it to a name or address of rank 0's host that all"
        " hosts know"
    )


def own_address(environment: Mapping[str, str]) -> str:
    """The address at which gloo tells other ranks to reach this one.

    Raises:
        AddressError: If an interface that the environment names is not there, or has no address.
    """
    known = [name for _, name in socket.if_nameindex()]
    _check_nccl(environment.get("NCCL_SOCKET_IFNAME", ""), known)
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    if not wanted:
        try:
            address = resolve(socket.gethostname())
            listen(address, 0).close()
        except (AddressError, OSError):
            return "127.0.0.1"  # what gloo falls back to if the host name has no address, or one of another host
        return address
    addresses = [_interface_address("GLOO_SOCKET_IFNAME", name, known) for name in wanted.split(",")]
    return addresses[0]


def _check_nccl(text: str, known: list[str]) -> None:
    """NCCL takes prefixes; ``=`` before them makes them whole names, and ``^`` excludes."""
    if not text or text.startswith("^"):
        return
    exact, names = text.startswith("="), text.lstrip("=").split(",")
    if not any(name == own if exact else own.startswith(name) for name in names for own in known):
        raise AddressError(f"NCCL_SOCKET_IFNAME={text} is no network interface here; there are {', '.join(known)}")


def _interface_address(variable: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise AddressError(f"{variable}={name} is no network interface here; there are {', '.join(known)}")
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        return socket.inet_ntoa(packed[20:24])
    except OSError as error:
        raise AddressError(f"{variable}={name} has no IPv4 address ({error.strerror})") from None


def listen(address: str, port: int, backlog: int = 16) -> socket.socket:
    """A socket that listens; on all interfaces if ``address`` is empty, on any free port if ``port`` is 0."""
    everywhere = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=max(1, backlog), dualstack_ipv6=everywhere)


def free_port() -> int:
    """A port of this host that nobody listens on at the moment."""
    with listen("", 0) as probe:
        return int(probe.getsockname()[1])
