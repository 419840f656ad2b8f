"""A rule that finds spikes of the gradient's norm, against a running median."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any


class SpikeRule:
    """Calls a norm a spike if it is more than ``factor`` times the median of the norms before it.

    Norms that are spikes are not counted in the median.

    Args:
        factor: How many medians are too many.
        window: How many of the latest norms the median is over.
        warmup: How many norms must be known before any can be a spike.
    """

    def __init__(self, factor: float, window: int = 100, warmup: int = 20) -> None:
        self._factor = factor
        self._warmup = warmup
        self._norms: deque[float] = deque(maxlen=window)

    def judge(self, norm: float) -> str:
        """Looks at one norm.

        Args:
            norm: The same on every rank, so that all come to the same.

        Returns:
            What is wrong with it, for a message; empty if it is no spike.
        """
        if not math.isfinite(norm):
            return ""  # which others look for
        if len(self._norms) >= self._warmup:
            median = statistics.median(self._norms)
            # A median of 0 tells of a loss that is mostly satisfied, and nothing of how steep it is otherwise.
            if median and norm > self._factor * median:
                return (
                    f"the gradient's norm {norm:.4g} is more than {self._factor:g} times the median {median:.4g} of the"
                    f" last {len(self._norms)} steps (spike_factor)"
                )
        self._norms.append(norm)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The norms that the next median is over."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result."""
        self._norms.clear()
        self._norms.extend(state["norms"])
