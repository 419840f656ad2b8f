"""A pool of rank processes that tests share, because importing torch and Lightning costs seconds per process.

``pool.run(3, function, *args)`` calls ``function(rank, *args)`` in three processes that form a gloo group and returns
the three results. Lightning finds the same ranks through torchrun's environment variables, so ``Trainer(devices=3)``
works inside. Functions are module-level functions of test modules.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent)
GROUP_TIMEOUT = 30  # seconds that a collective waits inside a test
GRACE = 10  # seconds that the other ranks get once one has failed


class RankFailureError(AssertionError):
    """A rank raised; the message holds the traceback of each that did."""

    def __init__(self, failures: dict[int, str], errors: dict[int, BaseException]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())))
        self.errors = errors


class RankPool:
    """Up to ``size`` processes, started when first needed and replaced when they hang or fail."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        # The server imports torch and Lightning once; ranks are forked from it.
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "lightning.pytorch", "torchmetrics"])
        self._workers: dict[int, tuple[Any, Connection]] = {}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        group_timeout: float = GROUP_TIMEOUT,
    ) -> list[Any]:
        """Results of ``function(rank, *args)`` by rank; :class:`RankFailureError` if a rank raised or hung."""
        with tempfile.TemporaryDirectory() as folder:
            job = pickle.dumps(
                (function.__module__, function.__qualname__, args, world_size, f"{folder}/store", group_timeout)
            )
            for rank in range(world_size):
                self._connection(rank).send_bytes(job)
            replies = self._collect(world_size, timeout)
        failed = {rank: reply for rank, reply in replies.items() if not reply[0]}
        if failed or len(replies) < world_size:
            texts = {rank: reply[1] for rank, reply in failed.items()}
            texts |= {rank: f"no answer within {timeout} s" for rank in range(world_size) if rank not in replies}
            for rank in range(world_size):  # a rank that failed may have left others inside a collective
                self._stop(rank)
            raise RankFailureError(texts, {rank: reply[2] for rank, reply in failed.items()})
        return [replies[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes of this pool, by process id."""
        for rank in list(self._workers):
            self._stop(rank)

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple]:
        replies: dict[int, tuple] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < world_size and time.monotonic() < deadline:
            waiting = {self._workers[rank][1]: rank for rank in range(world_size) if rank not in replies}
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting[connection]
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    replies[rank] = (False, "the process ended", None)
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies

    def _connection(self, rank: int) -> Connection:
        if rank not in self._workers:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs))
            process.start()
            theirs.close()
            self._workers[rank] = (process, ours)
        return self._workers[rank][1]

    def _stop(self, rank: int) -> None:
        if rank in self._workers:
            process, connection = self._workers.pop(rank)
            process.kill()
            process.join(10)
            connection.close()


def _serve(rank: int, connection: Connection) -> None:
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = (True, _call(rank, *job))
        except BaseException as error:
            reply = (False, traceback.format_exc(), error)
        try:
            connection.send_bytes(pickle.dumps(reply))
        except Exception:  # the error itself cannot be pickled
            connection.send_bytes(pickle.dumps((False, reply[1], None)))


def _call(rank: int, module: str, name: str, args: tuple, world_size: int, store: str, group_timeout: float) -> Any:
    import importlib

    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # never used: the group is initialised below
        TORCHELASTIC_RUN_ID="tests",
        TORCH_FR_BUFFER_SIZE="0",  # else PyTorch's memory of collectives grows while a test counts what is allocated
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    try:
        return getattr(importlib.import_module(module), name)(rank, *args)
    finally:
        dist.destroy_process_group()
