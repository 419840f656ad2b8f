"""Who iterates how often, when to pad, and what state says: ranks as threads, over any lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp.data.lockstep import LockstepLoader, lockstep
from lightning_dp.data.padding import PaddingPolicy
from lightning_dp.data.window import WindowCounter
from lightning_dp.errors import UnevenDataError

settings.register_profile("lockstep", deadline=None, max_examples=60)
settings.load_profile("lockstep")
TIMEOUT = 10  # seconds until a hang is an error


class Ranks:
    """The collectives of a Wire among threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.box: list[Any] = [None] * world_size
        self.messages = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.box[rank] = value
        if self.barrier.wait(TIMEOUT) == 0:
            self.messages += 1
        everyone = list(self.box)
        self.barrier.wait(TIMEOUT)
        return everyone


class ThreadWire:
    """Stands in for :class:`lightning_dp.reduction.wire.Wire`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self.ranks.exchange(self.rank, value)[source]

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.ranks.exchange(self.rank, tensor.clone())).sum(0))

    def wait(self, work: None, what: str) -> None:
        pass


class Unsized:
    def __init__(self, batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        return iter(self.batches)


class Stateful(Unsized):
    def __init__(self, batches: list[int]) -> None:
        super().__init__(batches)
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


MAKE: dict[str, Callable[[list[int]], Any]] = {"sized": list, "unsized": Unsized, "stateful": Stateful}


def on_ranks(lengths: list[int], kind: str, job: Callable[[LockstepLoader, int], Any], **kwargs: Any) -> list[Any]:
    """Results of ``job(loader, rank)`` on one thread a rank. Batch j of rank r is 100 r + j."""
    ranks = Ranks(len(lengths))

    def run(rank: int) -> Any:
        batches = [100 * rank + j for j in range(lengths[rank])]
        wire = ThreadWire(ranks, rank)
        policy = PaddingPolicy(kwargs.get("mode", "skip"))
        options = {name: value for name, value in kwargs.items() if name != "mode"}
        try:
            return job(lockstep(MAKE[kind](batches), wire, policy, **options), rank)
        except UnevenDataError:
            raise  # on all ranks together
        except BaseException:
            ranks.barrier.abort()  # the others must not wait for this one
            raise

    with ThreadPoolExecutor(len(lengths)) as pool:
        return [future.result(timeout=4 * TIMEOUT) for future in [pool.submit(run, r) for r in range(len(lengths))]]


def epoch(loader: LockstepLoader, stop: int | None = None) -> list[tuple[int, bool]]:
    """(batch, padding) of one pass, or of its first ``stop`` batches."""
    seen = []
    for batch in loader:
        seen.append((batch, loader.take()))
        if len(seen) == stop:
            break
    return seen


def real(seen: list[tuple[int, bool]]) -> list[int]:
    return [batch for batch, padding in seen if not padding]


lengths_of_ranks = st.lists(st.integers(0, 6), min_size=1, max_size=5)
kinds = st.sampled_from(["sized", "unsized", "stateful"])


@given(lengths_of_ranks, kinds)
def test_all_ranks_iterate_as_often_as_the_longest_and_deliver_their_own_once(lengths: list[int], kind: str) -> None:
    for _ in range(2):
        results = on_ranks(lengths, kind, lambda loader, rank: [epoch(loader), epoch(loader)])
        for rank, passes in enumerate(results):
            for seen in passes:
                assert len(seen) == max(lengths)
                assert [batch for batch, padding in seen if not padding] == [
                    100 * rank + j for j in range(lengths[rank])
                ]
                assert [padding for _, padding in seen] == [j >= lengths[rank] for j in range(max(lengths))]
                # Padding is a real batch: the rank's last one, or one borrowed from a rank that has some.
                for batch, padding in seen:
                    assert not padding or batch % 100 < lengths[batch // 100]


@given(lengths_of_ranks)
def test_a_loop_that_may_end_early_sees_its_own_batches_only(lengths: list[int]) -> None:
    def ran(loader: LockstepLoader, rank: int) -> list[tuple[int, bool]]:
        seen = []
        for batch in loader:
            seen.append((batch, loader.take()))
            loader.policy.ran_step(communicated=False)
        return seen

    for rank, seen in enumerate(on_ranks(lengths, "sized", ran, ends_early=True)):
        # A rank without any batch runs one that it has borrowed, so that its metrics exist.
        padding = [entry for entry in seen if entry[1]]
        assert len(padding) == (1 if not lengths[rank] and max(lengths) else 0)
        assert real(seen) == [100 * rank + j for j in range(lengths[rank])]


@given(lengths_of_ranks, kinds)
def test_an_early_end_waits_where_the_step_communicates(lengths: list[int], kind: str) -> None:
    for seen in on_ranks(lengths, kind, lambda loader, rank: epoch(loader), ends_early=True, mode="replay"):
        assert len(seen) == max(lengths)


@given(lengths_of_ranks, kinds, st.integers(0, 7))
def test_a_resumed_epoch_delivers_the_rest(lengths: list[int], kind: str, stop: int) -> None:
    def interrupted(loader: LockstepLoader, rank: int) -> Any:
        first = epoch(loader, stop) if stop else []
        return first, loader.state()

    firsts = on_ranks(lengths, kind, interrupted)
    states = [state for _, state in firsts]

    def goes_on(loader: LockstepLoader, rank: int) -> Any:
        loader.resume(states)
        return epoch(loader), epoch(loader)

    whole = on_ranks(lengths, kind, lambda loader, rank: epoch(loader))
    for rank, (second, next_epoch) in enumerate(on_ranks(lengths, kind, goes_on)):
        finished = states[rank].finished
        # Without lengths the end is known only to who has asked beyond it.
        assert finished == (stop >= max(lengths) if kind == "sized" else stop > max(lengths))
        together = firsts[rank][0] + ([] if finished else second)
        assert real(together) == real(whole[rank])
        assert [padding for _, padding in together] == [padding for _, padding in whole[rank]]
        assert real(next_epoch) == real(whole[rank])


@given(lengths_of_ranks, kinds)
def test_strict_is_an_error_on_all_ranks_or_on_none(lengths: list[int], kind: str) -> None:
    def tries(loader: LockstepLoader, rank: int) -> str:
        try:
            epoch(loader)
        except UnevenDataError as error:
            return str(error)
        return ""

    even = len(set(lengths)) == 1
    if kind == "sized" and not even:
        with pytest.raises(UnevenDataError):  # as early as the loader is made
            on_ranks(lengths, kind, tries, strict=True)
        return
    messages = on_ranks(lengths, kind, tries, strict=True)
    assert len(set(messages)) == 1
    assert (messages[0] == "") == even


@given(lengths_of_ranks, st.integers(1, 4), kinds)
def test_windows_are_counted_before_they_begin(lengths: list[int], k: int, kind: str) -> None:
    counter = WindowCounter({"value": lambda batch: batch}, lambda: k)

    def totals(loader: LockstepLoader, rank: int) -> list[tuple[int, int]]:
        seen = []
        for _ in loader:
            loader.take()
            seen.append((loader.window.micro_batches, loader.window["value"]))
        return seen

    def right(position: int) -> tuple[int, int]:
        start = position - position % k
        window = [100 * r + j for r, n in enumerate(lengths) for j in range(start, min(start + k, n))]
        return len(window), sum(window)

    for seen in on_ranks(lengths, kind, totals, counter=counter):
        assert seen == [right(position) for position in range(max(lengths))]


@pytest.mark.parametrize(("length", "messages"), [(5, 2), (50, 2)])
def test_a_sized_epoch_costs_one_message_however_long(length: int, messages: int) -> None:
    """One to learn at the start that all are sized, one for the lengths at the start; then one an epoch."""

    def count(loader: LockstepLoader, rank: int) -> int:
        before = loader._wire.ranks.messages
        epoch(loader)
        return loader._wire.ranks.messages - before

    assert set(on_ranks([length, length], "sized", count)) == {1}


def test_attributes_of_the_loader_are_reached_and_lightnings_are_set_through() -> None:
    class Loader(list):
        sampler = "mine"
        worker_init_fn = None

    inner = Loader([1, 2])
    loader = LockstepLoader(inner, ThreadWire(Ranks(1), 0), PaddingPolicy("auto"))
    assert loader.sampler == "mine"
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert not hasattr(loader, "state_dict")
    with pytest.raises(AttributeError):
        loader.nothing  # noqa: B018


# ------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("mode", "must_replay", "history", "replays"),
    [
        ("skip", False, [], True),  # none of its log keys exist yet
        ("skip", False, [True], False),
        ("skip", True, [True], True),  # or the others wait for ever
        ("replay", False, [False], True),
        ("auto", False, [], True),  # nothing is known yet in this epoch
        ("auto", False, [False], False),
        ("auto", False, [True], True),
        ("auto", False, [True, False], True),  # seen once is enough
        ("auto", False, [False, "epoch"], True),
        ("auto", False, [True, "epoch", False], True),
        ("auto", True, [False], True),
    ],
)
def test_when_a_padding_step_is_replayed(mode: str, must_replay: bool, history: list, replays: bool) -> None:
    policy = PaddingPolicy(mode, must_replay)
    for event in history:
        if event == "epoch":
            policy.start_epoch()
        else:
            policy.ran_step(communicated=event)
    assert policy.replays is replays
