"""Signals that ask a run to stop: taken note of, and nothing else, until the run looks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer


class StopSignals:
    """Notes the first of the given signals that this process gets while :meth:`installed <install>`.

    A handler that communicates, as Lightning's own do, waits for ever if another rank is elsewhere at the time.

    Args:
        names: Of signals: ``["SIGUSR1", "SIGTERM"]``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._before: dict[int, Any] = {}
        self._connector: Any = None
        self.received: signal.Signals | None = None

    def install(self, trainer: Trainer) -> None:
        """Takes the signals over, also from Lightning, which installs its own handlers only later.

        Must be called in the main thread, where Python handles signals; elsewhere it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.received = None
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._note)
        # Lightning calls this before whatever handler it finds for SIGTERM (signal_connector.py:58).
        self._connector = trainer._signal_connector
        if signal.SIGTERM in self._numbers:
            self._connector._sigterm_notifier_fn = self._note

    def remove(self) -> None:
        """Gives the signals back to who had them."""
        if self._connector is None:
            return
        before = {number: signal.SIG_DFL if handler is None else handler for number, handler in self._before.items()}
        for number, handler in before.items():
            signal.signal(number, handler)
        vars(self._connector).pop("_sigterm_notifier_fn", None)
        if self._connector._original_handlers:
            self._connector._original_handlers.update(before)  # which Lightning puts back when it is through
        self._connector = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
