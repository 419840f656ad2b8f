"""The threads that move messages, on the cores that compute: how often they may interrupt."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

# As gloo's and PyTorch's sources name them (checked on torch 2.13).
NAMES = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})
TASKS = Path("/proc/self/task")  # Linux; other systems have no such policies


class TransportThreads:
    """Gloo's threads in this process.

    Packets wake them all the time, and Linux lets a thread that wakes interrupt one that has run for a while. Beside
    compute each then finds little to do, and a step is slowed down by switching rather than by communication. A
    ``SCHED_BATCH`` thread does not interrupt (``man 7 sched``): it has its fair share of the core, in fewer and longer
    turns. No privilege is needed. With cores to spare it makes no difference.
    """

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Thread ids, of process groups that there are when this is first asked."""
        if not hasattr(os, "SCHED_BATCH"):
            return ()
        found = []
        for task in TASKS.glob("*"):
            try:
                if (task / "comm").read_text(encoding="utf-8").strip() in NAMES:
                    found.append(int(task.name))
            except OSError:  # it ended meanwhile
                continue
        return tuple(sorted(found))

    @property
    def can_change(self) -> bool:
        """Whether there is one whose policy can be changed here."""
        with self.in_batches() as changed:
            return bool(changed)

    @contextmanager
    def in_batches(self) -> Generator[list[int], None, None]:
        """While this process computes: they do not interrupt. Threads whose policy somebody has chosen keep it.

        Yields:
            Ids of the threads that were changed.
        """
        changed: list[int] = []
        try:
            changed += (thread for thread in self.ids if _change(thread, "SCHED_OTHER", "SCHED_BATCH"))
            yield changed
        finally:
            for thread in changed:
                _change(thread, "SCHED_BATCH", "SCHED_OTHER")


def _change(thread: int, before: str, after: str) -> bool:
    """Gives a thread another policy, if it has the one before; whether it did."""
    if not (TASKS / str(thread)).exists():  # the number may be that of another process's thread by now
        return False
    try:
        if os.sched_getscheduler(thread) != getattr(os, before):
            return False
        os.sched_setscheduler(thread, getattr(os, after), os.sched_param(0))
    except OSError:  # a sandbox forbids it: then it stays as it is
        return False
    return True
