"""The sum over ranks of an accumulation window under way: for a checkpoint, and for the run that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dp.reduction.transport import Transport
from lightning_dp.reduction.window import Window
from lightning_dp.reduction.wire import Wire


@dataclass(frozen=True)
class WindowSum:
    """An accumulation window so far, summed over the ranks; what a checkpoint holds of it.

    Attributes:
        gradients: Weighted gradients by name, without those of ranks where some are not finite.
        count: Samples, tokens, ... of the same ranks.
        micro_batches: Micro-batches of all ranks.
        vetoes: Why each rank wants the step skipped; empty if it does not.
        bad: What is bad about each rank's gradients; empty if nothing is.
        weight: What a micro-batch of count 1 was weighted by; ``None`` as is usual where it is resumed.
    """

    gradients: dict[str, Tensor]
    count: int
    micro_batches: int
    vetoes: list[str]
    bad: list[str]
    weight: float | None = None

    @classmethod
    def over_ranks(
        cls,
        window: Window,
        named: Sequence[tuple[str, Parameter]],
        weight: float,
        transport: Transport,
        wire: Wire,
        device: torch.device,
    ) -> WindowSum:
        """Adds up all ranks' parts; the ranks take part together.

        Args:
            window: This rank's part.
            named: Names and parameters, whose gradients are read.
            weight: What a micro-batch of count 1 is weighted by.
            transport: Knows the dtype of sums.
            wire: The ranks.
            device: Where messages are made.
        """
        grads = [p.grad for _, p in named if p.grad is not None]
        bad = "" if all(bool(torch.isfinite(grad).all()) for grad in grads) else "a gradient made before the checkpoint"
        said = wire.gather((window.veto, bad))
        # What is bad is told, and not added: it would spoil the sum, and nobody would know whose it was.
        mine = [None if bad else p.grad for _, p in named]
        used = [int(grad is not None) for grad in mine]
        counts = torch.tensor([*used, 0 if bad else window.count, window.micro_batches], device=device)
        sums = [
            (torch.zeros_like(p) if grad is None else grad.detach().clone()).to(transport.sums_in(p.dtype)).contiguous()
            for (_, p), grad in zip(named, mine, strict=True)
        ]
        for tensor in (counts, *(torch.view_as_real(grad) if grad.is_complex() else grad for grad in sums)):
            wire.wait(wire.all_reduce(tensor), "the sum of an accumulation window")
        wire.reset_counters()
        *users, count, micro_batches = counts.tolist()
        by_name = {name: grad.cpu() for (name, _), grad, n in zip(named, sums, users, strict=True) if n}
        return cls(by_name, count, micro_batches, [veto for veto, _ in said], [bad for _, bad in said], weight)

    def as_dict(self) -> dict[str, Any]:
        """Its attributes; ``WindowSum(**...)`` makes it again."""
        return dict(vars(self))

    def part_of(self, rank: int, ranks: int, weight: float) -> Window:
        """The part that a rank goes on with: one rank has the sum, the others nothing.

        Args:
            rank: The rank.
            ranks: How many there are now.
            weight: What a micro-batch of count 1 is weighted by now.
        """
        vetoes = [veto for veto in self._said_by(self.vetoes, rank, ranks) if veto]
        part = Window(labels=[("the batches before the checkpoint", None)], veto=vetoes[-1] if vetoes else "")
        if rank == (self.bad.index("") if len(self.bad) == ranks and "" in self.bad else 0):
            part.count, part.micro_batches = self.count, self.micro_batches
            # The ranks may have been others in number.
            ratio = weight / self.weight if self.weight is not None else 1.0
            part.resumed = {name: grad * ratio for name, grad in self.gradients.items()}
        return part

    def bad_of(self, rank: int, ranks: int) -> list[str]:
        """What was bad about gradients that a rank is to be blamed for."""
        return [bad for bad in self._said_by(self.bad, rank, ranks) if bad]

    @staticmethod
    def _said_by(by_rank: list[str], rank: int, ranks: int) -> list[str]:
        """Its own words; if there is another number of ranks now, rank 0 speaks for all that there were."""
        if len(by_rank) == ranks:
            return [by_rank[rank]]
        return by_rank if rank == 0 else []
