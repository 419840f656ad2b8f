"""Where a rank stands in the epoch of a loader: for a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LoaderState:
    """Where a rank stands in an epoch; plain values, for a checkpoint.

    Attributes:
        position: Lockstep position, the same on every rank.
        own: Batches taken from the rank's own loader.
        samples: Samples of the epoch's order seen by all ranks together, if the loader's sampler knows; else ``None``.
        finished: Whether the epoch's data is used up on all ranks, so that the next epoch starts afresh.
        exhausted: Whether this rank's own data is used up.
        rng: State of torch's global generator when the epoch's iteration began, for loaders that shuffle by it.
        rng_now: State of torch's global generator now, for a model that draws from it (dropout).
        generators: The same as ``rng`` of the generators that the loader and its samplers have of their own.
        seed: Seed of the order that an :class:`~lightning_dp.data.samplers.UnpaddedSampler` deals out.
        epoch: Epoch of that order.
        inner: State of a stateful loader.
        after_first: Its state after the first batch of an epoch, by which one that begins anew is known.
    """

    position: int
    own: int
    samples: int | None
    finished: bool
    exhausted: bool
    rng: Tensor
    rng_now: Tensor | None = None
    generators: list[Tensor] = field(default_factory=list)
    seed: int | None = None
    epoch: int | None = None
    inner: Any = None
    after_first: Any = None

    as_dict = asdict
