"""The order in which gradients become ready, and how often, learnt in one backward."""

from __future__ import annotations


class Arrivals:
    """Records which parameters fire in one backward, in which order and how many times.

    A parameter can fire more than once in one backward (two reentrant checkpoints share it), and its gradient is
    final only after the last time, so a bucket may leave only when each of its parameters has fired as often as in
    the backward that was recorded.

    Args:
        num_parameters: Parameters of the plan.
    """

    def __init__(self, num_parameters: int) -> None:
        self.fires = [0] * num_parameters
        self._order: list[int] = []

    def record(self, index: int) -> None:
        """Notes that the gradient of parameter ``index`` has just been accumulated."""
        if not self.fires[index]:
            self._order.append(index)
        self.fires[index] += 1

    def order(self, previous: list[int]) -> list[int]:
        """A full order: what fired, as it fired; then what did not, as it stood in ``previous``."""
        return self._order + [index for index in previous if not self.fires[index]]
