"""Which samples a rank sees: every n-th of one order that all ranks share, none twice and none left out."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler


class UnpaddedSampler(DistributedSampler[Any]):
    """A DistributedSampler that repeats no sample: ranks differ by at most one sample instead.

    Rank r of n takes samples r, r + n, r + 2n, ... of the epoch's order. So the t-th batches of all ranks, of size B
    each, are together the t-th batch of size n * B that one device takes under the same seed.

    Args:
        source: A map-style dataset, or a sampler of the user's whose order is dealt out to the ranks.
        num_replicas: Number of ranks.
        rank: This rank.
        shuffle: Shuffle a dataset's order anew in every epoch; a sampler's order is its own.
        seed: Seed of the order; the same on all ranks.
        drop_last: Batch size of a loader that drops an incomplete batch; what then exceeds whole batches of all ranks
            together is left out, as one device would. 0 leaves nothing out.

    Attributes:
        start: Samples of the epoch's order that were seen before; a resumed epoch starts behind them.
    """

    def __init__(
        self, source: Sized, num_replicas: int, rank: int, shuffle: bool, seed: int = 0, drop_last: int = 0
    ) -> None:
        size = len(source)
        # The base class wants a dataset; only its attributes are used, and they are set below.
        super().__init__(range(max(size, 1)), num_replicas, rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.source = source
        self.start = 0
        self.total_size = size - size % (num_replicas * drop_last) if drop_last else size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the order depends on; a sampler of the user's is told, too."""
        super().set_epoch(epoch)
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this rank that are left in the epoch."""
        return len(range(self.start + self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """This rank's samples, in order."""
        order = self._order()
        return iter(order[self.start + self.rank : self.total_size : self.num_replicas])

    def _order(self) -> list[Any]:
        if isinstance(self.source, Sampler):
            # A sampler that draws from torch's global generator must draw the same on every rank.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed + self.epoch)
                return list(self.source)
        if not self.shuffle:
            return list(range(self.total_size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.source), generator=generator).tolist()


def is_plain(sampler: object, dataset: object) -> bool:
    """Whether a loader's sampler is just "the dataset, shuffled or not", which can be drawn anew on every rank."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and isinstance(dataset, Sized) and sampler.num_samples == len(dataset)
    return isinstance(sampler, SequentialSampler)
