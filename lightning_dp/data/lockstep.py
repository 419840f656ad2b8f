"""Loaders that keep ranks in step: all ranks iterate equally often, whatever their loaders hold.

Lightning communicates in every iteration of its training loop, so no rank may leave the loop before the others. A rank
whose data has run out goes on with *padding batches*, which count 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.data.joint import JointLoader, has_state, length_of
from lightning_dp.data.loader_state import LoaderState
from lightning_dp.data.own_loader import OwnLoader
from lightning_dp.data.padding import PaddingPolicy
from lightning_dp.data.window import END, LookAhead, WindowCounter, WindowTotals
from lightning_dp.errors import UnevenDataError
from lightning_dp.reduction.wire import Wire


@dataclass(frozen=True)
class Delivery:
    """What is known of one batch that was handed out.

    Attributes:
        padding: Whether it only keeps the rank in step.
        position: Lockstep position in the epoch after it: how many batches each rank has been handed.
        own: How many of them came from the rank's own loader.
        inner: State of a stateful loader after it.
        window: What its accumulation window holds on all ranks, where that is counted.
    """

    padding: bool
    position: int
    own: int
    inner: Any = None
    window: WindowTotals | None = None


class LockstepLoader:
    """Wraps a rank's loader so that all ranks iterate equally often.

    Sized loaders agree on the largest length with one message an epoch. Loaders without a length ask, one batch ahead,
    whether any rank has another batch; the answer is on its way while the current batch is trained on.

    Args:
        loader: The rank's own loader, of any kind that can be iterated.
        wire: The ranks, over a group that works on CPU tensors.
        policy: What becomes of padding batches.
        ends_early: End here, instead of padding, where ``policy`` would skip the step: for loops that do not
            communicate by themselves. Loaders without a length are padded all the same: their ranks ask each other.
        strict: Raise on all ranks where ranks have different numbers of batches.
        counter: Counts each accumulation window before it is handed out; by default nothing is counted.

    Attributes:
        sized: Whether all ranks' loaders have a length.

    Raises:
        UnevenDataError: While iterating, if ``strict``.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        wire: Wire,
        policy: PaddingPolicy,
        ends_early: bool = False,
        strict: bool = False,
        counter: WindowCounter | None = None,
    ) -> None:
        self.loader = loader
        self._counter = counter or WindowCounter()
        self.policy = policy
        self._wire = wire
        self._ends_early = ends_early
        self._strict = strict
        self._handed_out: deque[Delivery] = deque()
        self._used = Delivery(False, 0, 0)
        self._resumed_from: LoaderState | None = None
        self._spare = END
        self._source = LookAhead(iter(()), lambda: None)
        self._own = OwnLoader(loader)
        self.sized = None not in wire.gather(length_of(loader))
        self._begin_epoch()

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)  # with the latter two Lightning would save rank 0's state for all ranks
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets these on what it takes for the loader.
        target = self.loader if name in ("worker_init_fn", "_iterator") else self
        object.__setattr__(target, name, value)

    def __len__(self) -> int:
        """Batches that every rank iterates over in this epoch."""
        if not self.sized:
            raise TypeError("a rank's loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Starts an epoch; nothing is loaded before the first batch is asked for."""
        ahead = bool(self._handed_out) or self._source.ahead
        self._own.rewind_to = self._used.inner if ahead and not self._ends_early else None
        self._begin_epoch()
        self._resumed_from = None
        self.policy.start_epoch()
        return self._iterate_sized() if self.sized else self._iterate_unsized()

    def take(self) -> bool | None:
        """Takes note that the batch handed out first goes into a step now.

        The loop may fetch ahead, so what was handed out and what was used are two things; state is of what was used.

        Returns:
            Whether it is padding; ``None`` if there is no batch of this loader in the step.
        """
        if not self._handed_out:
            return None
        self._before = self._used
        self._used = self._handed_out.popleft()
        if self._own.after_first is None and self._used.own == 1:
            self._own.after_first = self._used.inner
        return self._used.padding

    @property
    def window(self) -> WindowTotals | None:
        """What the accumulation window of the batch last taken holds on all ranks, where that is counted."""
        return self._used.window

    # ------------------------------------------------------------------------------------------- state

    def state(self, batch_in_hand: bool = False) -> LoaderState:
        """Where this rank stands, as of the batches used.

        Args:
            batch_in_hand: The batch last taken is still being worked on, and is to come again.
        """
        used = self._before if batch_in_hand else self._used
        finished = used.position >= self._length if self.sized else self._ended and not self._handed_out
        return LoaderState(
            position=used.position,
            own=used.own,
            samples=self._own.samples_seen(used.position, self._wire.world_size),
            finished=finished,
            exhausted=used.padding,
            rng=self._own.rng,
            rng_now=torch.get_rng_state(),
            generators=self._own.generators,
            seed=self._own.seed,
            epoch=self._own.epoch,
            inner=self._source.end if finished and self._source.ended else used.inner,
            after_first=self._own.after_first,
        )

    def resume(self, states: Sequence[LoaderState]) -> None:
        """Makes the next epoch that is started go on behind where all ranks stood, unless that one was finished.

        Args:
            states: The states of all ranks that there were then.

        Raises:
            UnevenDataError: If there is another number of ranks now and the loader's data is not dealt out by an
                :class:`~lightning_dp.data.samplers.UnpaddedSampler`, so that nobody knows who has seen what.
        """
        same_ranks = len(states) == self._wire.world_size
        state = states[self._wire.rank if same_ranks else 0]
        self._own.resume(state, same_ranks)
        if state.finished:
            return
        if not same_ranks and (self._own.dealt_out is None or state.samples is None):
            raise UnevenDataError(
                f"the checkpoint was written within an epoch by {len(states)} ranks and there are"
                f" {self._wire.world_size} now, which works for map-style datasets under Lightning's own sampler only;"
                " resume with as many ranks, or from a checkpoint written at the end of an epoch"
            )
        self._resumed_from = state
        self._begin_epoch()

    # ------------------------------------------------------------------------------------------- an epoch

    def _begin_epoch(self) -> None:
        """Sets the epoch's start: its beginning, or behind what a resumed run has seen."""
        state = self._own.begin_epoch(self._resumed_from)
        self._handed_out.clear()
        self._ended = False
        self._first_position = state.position
        self._used = self._before = Delivery(state.exhausted, state.position, state.own, state.inner)
        if self.sized:
            self._agree_on_length()

    def _agree_on_length(self) -> None:
        told = self._wire.gather((self._own.length, self._own.knows_length))
        lengths = [length for length, _ in told]
        if self._strict and len(set(lengths)) > 1:
            by_rank = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            raise UnevenDataError(f"ranks have different numbers of batches ({by_rank}); uneven='auto' allows it")
        self._length = max(lengths)
        self._someone_may_have_none = min(lengths) <= self._first_position or not all(known for _, known in told)

    def _iterate_sized(self) -> Iterator[Any]:
        source = self._source = self._look_ahead()
        own, window = self._used.own, None
        for position in range(self._first_position, self._length):
            if length := self._counter.starts(position, self._first_position):
                window = self._counter.count(source.peek(length), self._wire)
            batch, inner = source.take()
            if position == self._first_position and self._someone_may_have_none:
                self._find_spare(batch)
            if batch is END and (self._spare is END or (self._ends_early and not self.policy.replays)):
                return
            own += batch is not END
            if position + 1 == self._length and inner is not None:
                source.peek(1)  # a loader with a state is to know that it has come to its end
            yield self._hand_out(batch, Delivery(batch is END, position + 1, own, inner, window))

    def _iterate_unsized(self) -> Iterator[Any]:
        source = self._source = self._look_ahead()
        own, position, window = self._used.own, self._first_position, None
        self._find_spare(*source.peek(1))
        question = self._ask(source.peek(1) != [])
        while self._answer(question):
            if length := self._counter.starts(position, self._first_position):
                window = self._counter.count(source.peek(length), self._wire)
            batch, inner = source.take()
            position += 1
            own += batch is not END
            question = self._ask(source.peek(1) != [])
            yield self._hand_out(batch, Delivery(batch is END, position, own, inner, window))
        self._ended = True

    def _look_ahead(self) -> LookAhead:
        snapshot = getattr(self.loader, "state_dict", lambda: None)
        return LookAhead(self._own.batches(), snapshot)

    def _hand_out(self, batch: Any, delivery: Delivery) -> Any:
        self._handed_out.append(delivery)
        if batch is not END:
            self._spare = batch
        return self._spare

    def _find_spare(self, batch: Any = END) -> None:
        """A rank without any batch borrows one, to pad with, from the first rank that has one."""
        if batch is not END:
            self._spare = batch
        has = self._wire.gather(self._spare is not END)
        if all(has) or not any(has):
            return
        lender = has.index(True)
        lent = self._wire.broadcast_object(self._spare if self._wire.rank == lender else None, lender)
        if not has[self._wire.rank]:
            self._spare = lent

    def _ask(self, has_batch: bool) -> tuple[Tensor, dist.Work | None]:
        """Asks all ranks whether they have another batch; the answer is awaited a batch later."""
        ranks = torch.zeros(self._wire.world_size, dtype=torch.int32)
        ranks[self._wire.rank] = int(has_batch)
        return ranks, self._wire.all_reduce(ranks)

    def _answer(self, question: tuple[Tensor, dist.Work | None]) -> bool:
        ranks, work = question
        self._wire.wait(work, "the question whether any rank has another batch")
        has = ranks.tolist()
        if self._strict and len(set(has)) > 1:
            out = ", ".join(f"rank {rank}" for rank, more in enumerate(has) if not more)
            raise UnevenDataError(f"the data of {out} has run out before the others'; uneven='auto' allows it")
        return any(has)


class StatefulLockstepLoader(LockstepLoader):
    """A LockstepLoader over a loader that has a state; Lightning sees one, too."""

    def state_dict(self) -> Any:
        """The inner loader's state as of the batches used."""
        return self.loader.state_dict() if self._used.inner is None else self._used.inner  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Hands a state on to the inner loader."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]


def lockstep(loader: Iterable[Any], *args: Any, **kwargs: Any) -> LockstepLoader:
    """A :class:`LockstepLoader` of the kind that suits ``loader``; see there for the arguments."""
    stateful = has_state(loader) and not isinstance(loader, JointLoader)
    return (StatefulLockstepLoader if stateful else LockstepLoader)(loader, *args, **kwargs)
