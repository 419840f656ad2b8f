"""Short messages over a connection: one JSON object a line, each wait with a deadline."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

LONGEST = 64 * 2**20  # bytes of a message; whoever sends more is none of ours


class Talk:
    """One connection. Deadlines are values of ``time.monotonic``; what fails is told by ``None`` or ``False``."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = b""

    @classmethod
    def accept(cls, server: socket.socket, deadline: float) -> Talk | None:
        """The next caller; ``None`` if nobody calls in time."""
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return cls(server.accept()[0])
        except OSError:
            return None

    def send(self, message: Any) -> bool:
        """Whether the message could be handed over."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, deadline: float) -> Any:
        """The next message; ``None`` if there is none in time, or it is no JSON object."""
        while b"\n" not in self._read:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._socket.recv(65536)
            except OSError:
                return None
            self._read += part
            if not part or len(self._read) > LONGEST:
                return None
        line, _, self._read = self._read.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def connect(address: str, port: int, limit: float) -> tuple[Talk | None, str]:
    """A connection, or ``None`` and why there is none within ``limit`` seconds."""
    try:
        connection = socket.create_connection((address, port), timeout=limit)
    except OSError as error:
        return None, error.strerror or str(error)
    if connection.getsockname() == connection.getpeername():
        # A port of this host that is free may be given to the very call that tries it.
        connection.close()
        return None, "nobody listens"
    connection.settimeout(limit)
    return Talk(connection), ""
