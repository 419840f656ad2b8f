"""Hosts that are Linux network namespaces: several machines on one, joined by links of limited speed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_dp.errors import ConfigurationError

INTERFACE = "eth0"
COMMAND_SECONDS = 20


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
        name: Its name.
        address: Its IPv4 address on the link.
    """

    name: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, to be run inside."""
        return ["ip", "netns", "exec", self.name, *command]


@contextmanager
def namespace_hosts(count: int, rate: str | None) -> Generator[list[Host], None, None]:
    """Makes hosts, each with an interface ``eth0`` on one switch, and removes them at the end.

    What a host sends is limited by a token bucket, as a network card limits it; what it receives is not.

    Args:
        count: How many.
        rate: Speed of each link as ``tc`` writes it, like ``"1gbit"``; ``None`` does not limit.

    Raises:
        ConfigurationError: If this is not Linux, not root, or ``ip`` or ``tc`` is missing or fails.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise ConfigurationError("network=hosts needs Linux, root, and the commands ip and tc; use network=loopback")
    if not 1 <= count <= 200:
        raise ConfigurationError(f"network=hosts takes 1 to 200 hosts, got {count}")
    prefix = f"dpbench{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"{prefix}-{n}", f"10.91.7.{n + 1}") for n in range(count)]
    made: list[str] = []
    try:
        made.append(_add(switch))
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            made.append(_add(host.name))
            _plug_in(host, switch, f"port{number}", rate)
        yield hosts
    finally:
        for name in reversed(made):
            _run("ip", "netns", "del", name, check=False)


def _add(name: str) -> str:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _plug_in(host: Host, switch: str, port: str, rate: str | None) -> None:
    _run("ip", "-n", host.name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", host.name, "link", "set", INTERFACE, "up")
    if rate is not None:
        # A burst above the largest packet that the kernel hands down whole (64 KiB), or it is cut up first.
        limit = ("rate", rate, "burst", "256kb", "latency", "200ms")
        _run("ip", "netns", "exec", host.name, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if check and done.returncode != 0:
        raise ConfigurationError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split()) or 'no message'}")
