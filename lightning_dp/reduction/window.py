"""This rank's part of the accumulation window under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Window:
    """What a rank has done since the last reduction.

    Attributes:
        count: Its samples, tokens, ... in the window.
        micro_batches: Its micro-batches.
        labels: What each of them is called in messages, with its mean loss where there is one.
        veto: Why it wants the step skipped, if it does.
        resumed: Weighted gradients by name from before a checkpoint, that are to be added when backward begins.
    """

    count: int = 0
    micro_batches: int = 0
    labels: list[tuple[str, Tensor | None]] = field(default_factory=list)
    veto: str = ""
    resumed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def begins(self) -> bool:
        """Whether there was no backward in it."""
        return not self.labels

    def describe(self) -> str:
        """Its micro-batches and their losses, for a message."""
        first, last = self.labels[0][0], self.labels[-1][0]
        losses = [f"{float(loss):.4g}" for _, loss in self.labels if loss is not None]
        which = first if first == last else f"{first} to {last}"
        return f"{which}, loss{'es' * (len(losses) > 1)} {', '.join(losses)}" if losses else which
