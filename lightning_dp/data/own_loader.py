"""A rank's own loader: where an iteration begins, and how it goes on behind the batches that were seen before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp.data.joint import JointLoader, length_of
from lightning_dp.data.loader_state import LoaderState
from lightning_dp.data.samplers import UnpaddedSampler


class OwnLoader:
    """A rank's own loader, whose epochs can be taken up where an earlier run left them.

    What was seen is left out by an :class:`UnpaddedSampler`, or by a loader that has a state; else it is drawn once
    more, from the same random numbers, and dropped.

    Args:
        loader: A loader of any kind that can be iterated.

    Attributes:
        rng: State of torch's global generator when the epoch's iteration began.
        generators: The same of the generators that the loader and its samplers have of their own.
        epoch: Epoch of the order that an :class:`UnpaddedSampler` deals out; ``None`` if there is none.
        after_first: State of a stateful loader after the first batch of an epoch, by which one that begins anew is
            known.
        rewind_to: State of a stateful loader that the next iteration goes back to, as more was drawn than used.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Any = loader
        self._parts = loader.parts if isinstance(loader, JointLoader) else [loader]
        samplers = [getattr(part, "sampler", None) for part in self._parts]
        self._samplers = [sampler for sampler in samplers if isinstance(sampler, UnpaddedSampler)]
        self.after_first: Any = None
        self.rewind_to: Any = None
        self._go_on_from: Any = None
        self._rng_to_restore: Tensor | None = None

    @property
    def dealt_out(self) -> UnpaddedSampler | None:
        """The sampler, if it deals one order out to all ranks, so that any number of ranks can go on in it."""
        if not isinstance(self._loader, DataLoader) or self._loader.batch_size is None:
            return None
        return self._samplers[0] if self._samplers else None

    @property
    def seed(self) -> int | None:
        """Seed of the order that an :class:`UnpaddedSampler` deals out; ``None`` if there is none."""
        return self._samplers[0].seed if self._samplers else None

    @property
    def length(self) -> int:
        """Batches of the epoch, those seen before among them; 0 if it has no length."""
        left_out = self._start.position if self.dealt_out is not None else 0
        return left_out + (length_of(self._loader) or 0)

    @property
    def knows_length(self) -> bool:
        """Whether it has as many batches as it says; some have fewer."""
        return type(self._loader) in (list, tuple) or self.dealt_out is not None

    def samples_seen(self, position: int, ranks: int) -> int | None:
        """Samples of the epoch's order that all ranks together have seen at a lockstep position, if that is known."""
        sampler = self.dealt_out
        if sampler is None:
            return None
        steps = position - self._start.position
        batch_size: int = self._loader.batch_size
        return min(sampler.total_size, sampler.start + steps * batch_size * ranks)

    # ------------------------------------------------------------------------------------------- an epoch

    def resume(self, state: LoaderState, same_ranks: bool) -> None:
        """Takes over what an earlier run knew of its loader.

        Args:
            state: Of this rank; of any if there are other ranks now.
            same_ranks: Whether there are as many ranks as there were.
        """
        self.after_first = state.after_first
        self._rng_to_restore = state.rng_now if same_ranks else None
        if state.finished:
            self._go_on_from = state.inner if same_ranks else None

    def begin_epoch(self, resumed_from: LoaderState | None) -> LoaderState:
        """Sets the epoch's start; nothing is loaded.

        Args:
            resumed_from: Where an earlier run stood within the epoch; ``None`` begins at its beginning.

        Returns:
            Where it starts.
        """
        state = self._start = resumed_from or self._beginning()
        self.rng, self.generators, self.epoch = state.rng, state.generators, state.epoch
        if self.dealt_out is not None:
            self.dealt_out.start = state.samples or 0
        if state.seed is not None:
            for sampler in self._samplers:
                sampler.seed = state.seed
        return state

    def _beginning(self) -> LoaderState:
        rng, generators = self._random_states()
        return LoaderState(0, 0, 0, finished=False, exhausted=False, rng=rng, generators=generators)

    def batches(self) -> Iterator[Any]:
        """The epoch's batches, behind those that were seen before; iterates over the loader."""
        start = self._start
        for sampler in self._samplers:
            # As late as this: when a run is resumed, Lightning may count the epoch that goes on as the next one.
            sampler.set_epoch(sampler.epoch if self.epoch is None else self.epoch)
        self.epoch = self._samplers[0].epoch if self._samplers else None
        if not start.position:
            self._restore_rng()  # of a run that is resumed between epochs
            # As late as this: the loop may have drawn random numbers since the epoch was started.
            self.rng, self.generators = self._random_states()
        for generator, generator_state in zip(self._own_generators(), self.generators, strict=False):
            generator.set_state(generator_state)
        if start.inner is not None:
            self._loader.load_state_dict(start.inner)
        elif self._go_on_from is not None:
            # As late as this: Lightning gives every rank the state of rank 0's loader.
            self._go_on(self._go_on_from)
        self._go_on_from = None
        joint = isinstance(self._loader, JointLoader)
        if start.exhausted:
            source = iter(())  # a stateful loader that has come to its end would start its next epoch
        elif start.own and self.dealt_out is None and (start.inner is None or joint):
            source = self._drawn_again(start.own)
        else:
            source = self._iterator()
        if start.position:
            self._restore_rng()
        return source

    # ------------------------------------------------------------------------------------------- a loader's own state

    def _go_on(self, state: Any) -> None:
        """Brings the loader to where it stood when its last epoch had ended, for the next one."""
        if isinstance(self._loader, JointLoader):
            self._loader.go_on(state)
            return
        self._loader.load_state_dict(state)
        # A loader that resumes in the next iteration is not to do so in that of a new epoch: so there is one between.
        outside = torch.get_rng_state()
        next(iter(self._loader), None)
        torch.set_rng_state(outside)
        self.rewind_to = state

    def _iterator(self) -> Iterator[Any]:
        """Begins an iteration. A loader that goes on where it stood is to give once more what was drawn ahead.

        That is what an epoch that a limit cut short did not use. A loader that begins anew has another state then, or,
        if its ``__iter__`` is a generator, the state after the first batch that it had before.
        """
        rewind_to, self.rewind_to = self.rewind_to, None
        if rewind_to is None or isinstance(self._loader, JointLoader):
            return iter(self._loader)
        before = self._loader.state_dict()
        source: Iterator[Any] = iter(self._loader)
        if self._loader.state_dict() != before:
            return source
        rng = torch.get_rng_state()
        first = list(islice(source, 1))
        if first and self._loader.state_dict() == self.after_first:
            return chain(first, source)
        torch.set_rng_state(rng)
        self._loader.load_state_dict(rewind_to)
        return iter(self._loader)

    # ------------------------------------------------------------------------------------------- random numbers

    def _drawn_again(self, skip: int) -> Iterator[Any]:
        """Draws seen batches once more and drops them, from the same random numbers, so that the order is the same."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.rng)
        source: Iterator[Any] = iter(self._loader)
        for _ in range(skip):
            next(source, None)
        torch.set_rng_state(outside)
        return source

    def _restore_rng(self) -> None:
        if self._rng_to_restore is not None:
            torch.set_rng_state(self._rng_to_restore)
            self._rng_to_restore = None

    def _random_states(self) -> tuple[Tensor, list[Tensor]]:
        return torch.get_rng_state(), [generator.get_state() for generator in self._own_generators()]

    def _own_generators(self) -> list[torch.Generator]:
        """The generators that the loader and its samplers have of their own, each once."""
        owners = list(self._parts)
        for name in ("sampler", "batch_sampler", "source"):
            owners += [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
