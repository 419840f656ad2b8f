"""Checkpoints that are saved when an exception ends the run: rank 0 writes, and nobody waits for who does not come."""

from __future__ import annotations

import time
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

GRACE = 5.0  # seconds that ranks which fail together may fail apart from each other


class LastSaves:
    """Saves after an exception, of which no rank knows whether it has come to the others, too.

    Lightning lets all ranks wait for each other after a save. After an exception that wait would be for ever if only
    this rank failed; and if all did, a rank that does not wait at all ends, and with it, as a launcher then ends the
    others, rank 0 before it has written. So the others wait for rank 0 if it has begun, or begins soon. Only for a run
    that is about to end: what rank 0 has said stays said.

    Args:
        rank: This process's rank in the default group.
        timeout: Seconds to wait for a save that has begun.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._begun = self._ended = 0
        self._is_alone = False

    def begin(self) -> None:
        """This rank is about to save; rank 0 is the one that writes."""
        self._begun += 1
        self._say(f"{self._begun} begun")

    def end(self) -> None:
        """Waits for rank 0's save if this rank has begun one; on rank 0 it has been written."""
        if self._ended == self._begun:
            return
        self._ended = self._begun
        self._say(f"{self._ended} ended")
        if self._rank == 0 or self._is_alone:
            return
        self._is_alone = not self._comes(f"{self._ended} begun", GRACE)
        if not self._is_alone:
            self._comes(f"{self._ended} ended", self._timeout)

    def _say(self, word: str) -> None:
        if self._rank == 0:
            with suppress(RuntimeError, ValueError):  # there is no group, or whoever keeps its store is gone
                self._store().set(word, "yes")

    def _comes(self, word: str, seconds: float) -> bool:
        """Whether rank 0 says it in time."""
        deadline = time.monotonic() + seconds
        try:
            while not self._store().check([word]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return False
        return True

    def _store(self) -> PrefixStore:
        return PrefixStore("lightning_dp/last_saves", _get_default_store())
