"""What stands between a backward and an optimizer's step: no step on gradients that are not averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.errors import NonFiniteGradientError, UnreducedGradientError
from lightning_dp.reduction.reducer import GradientReducer


@dataclass(frozen=True)
class Advice:
    """What to do about gradients that are not averaged, in the words of the loop that they were made in.

    Attributes:
        unknown: About parameters that the reducer was not given.
        stray: About gradients made by a plain ``loss.backward()``.
        local: About gradients that were accumulated and not averaged since.
    """

    unknown: str
    stray: str
    local: str


class StepGuard:
    """Looks at an optimizer's gradients before it steps.

    Args:
        reducer: What averages them.
        advice: What to do about those that are not.
    """

    def __init__(self, reducer: GradientReducer, advice: Advice) -> None:
        self._reducer = reducer
        self._advice = advice
        self._known: dict[int, tuple[int, ...]] = {}  # sizes of groups looked at, by id of the optimizer

    def check_parameters(self, optimizer: Optimizer, where: str) -> None:
        """Looks for parameters that the reducer does not know: each rank would step by its own gradient.

        Args:
            optimizer: The optimizer that is about to step.
            where: Rank and step, for messages.

        Raises:
            UnreducedGradientError: If there are some.
        """
        groups = tuple(len(group["params"]) for group in optimizer.param_groups)
        if self._known.get(id(optimizer)) == groups:
            return
        for number, group in enumerate(optimizer.param_groups):
            unknown = sum(p.requires_grad and not self._reducer.knows(p) for p in group["params"])
            if unknown:
                raise UnreducedGradientError(
                    f"{where}: {unknown} parameters of the optimizer's group {number} {self._advice.unknown}"
                )
        self._known[id(optimizer)] = groups

    def check_gradients(self, optimizer: Optimizer, where: str) -> None:
        """Looks for gradients that are each rank's own; same arguments.

        Raises:
            UnreducedGradientError: If there are some.
        """
        if self._reducer.has_unreduced:
            raise UnreducedGradientError(
                f"{where}: gradients were made by loss.backward(), so each rank has its own; {self._advice.stray}"
            )
        if self._reducer.is_local(p for group in optimizer.param_groups for p in group["params"]):
            raise UnreducedGradientError(
                f"{where}: gradients were accumulated without synchronisation and not averaged since;"
                f" {self._advice.local} before the last backward that precedes optimizer.step()"
            )

    def global_loss(self, loss: Any, count: int, add_up: Callable[[Tensor], Tensor], where: str) -> Any:
        """The loss over all ranks, for an optimizer that decides by it: by their own losses ranks would part ways.

        Args:
            loss: This rank's mean loss, whose backward has just been averaged; what is no tensor is handed back.
            count: What it weighs.
            add_up: Adds a tensor up over the ranks.
            where: The step, for messages.

        Raises:
            NonFiniteGradientError: If the ranks' verdict is not to step.
        """
        last = self._reducer.last
        if last is None or not isinstance(loss, Tensor):
            return loss
        if not last.verdict.step and self._reducer.config.check_nonfinite:
            raise NonFiniteGradientError(f"{where}: {last.verdict.describe()}; LBFGS cannot skip an evaluation")
        counts = bool(count) and self._reducer.wire.rank not in last.verdict.dropped
        mine = loss.detach() * count if counts else torch.zeros_like(loss.detach())
        return add_up(mine) / max(1, last.tally.count)
