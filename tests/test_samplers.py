"""Who gets which sample, as properties: for any size, number of ranks, batch size and seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_dp.data.samplers import UnpaddedSampler, is_plain

sizes = st.integers(0, 60)
worlds = st.integers(1, 9)
batch_sizes = st.integers(1, 7)
settings.register_profile("samplers", deadline=None)
settings.load_profile("samplers")


def samplers(size: int, world_size: int, shuffle: bool = True, **kwargs: int) -> list[UnpaddedSampler]:
    return [UnpaddedSampler(range(size), world_size, rank, shuffle, **kwargs) for rank in range(world_size)]


def order_of(size: int, seed: int, epoch: int) -> list[int]:
    """The order that torch's own DistributedSampler documents for one replica."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


@given(sizes, worlds, st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_every_sample_is_someones_and_nobody_elses(
    size: int, world_size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    ranks = samplers(size, world_size, shuffle, seed=seed)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    by_rank = [list(sampler) for sampler in ranks]
    assert sorted(i for mine in by_rank for i in mine) == list(range(size))
    assert [len(mine) for mine in by_rank] == [len(sampler) for sampler in ranks]
    assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1


@given(sizes, worlds, batch_sizes, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_global_batches_are_those_of_one_device(
    size: int, world_size: int, batch_size: int, seed: int, epoch: int, drop_last: bool
) -> None:
    ranks = samplers(size, world_size, seed=seed, drop_last=batch_size if drop_last else 0)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    steps = [list(BatchSampler(sampler, batch_size, drop_last)) for sampler in ranks]
    together = [
        sorted(i for batches in steps if t < len(batches) for i in batches[t]) for t in range(max(map(len, steps)))
    ]
    one_device = BatchSampler(order_of(size, seed, epoch), world_size * batch_size, drop_last)
    assert together == [sorted(batch) for batch in one_device]


@given(sizes, worlds, worlds, batch_sizes, st.integers(0, 20))
def test_an_epoch_goes_on_at_any_number_of_ranks(
    size: int, before: int, after: int, batch_size: int, steps: int
) -> None:
    order = order_of(size, 0, 0)
    seen = min(size, steps * before * batch_size)
    first = [i for sampler in samplers(size, before) for i in list(sampler)[: steps * batch_size]]
    assert sorted(first) == sorted(order[:seen])
    rest = samplers(size, after)
    for sampler in rest:
        sampler.start = seen
    second = [list(sampler) for sampler in rest]
    assert sorted(first + [i for mine in second for i in mine]) == list(range(size))
    assert [len(mine) for mine in second] == [len(sampler) for sampler in rest]


@given(st.integers(2, 60), worlds)
def test_epochs_have_different_orders(size: int, world_size: int) -> None:
    orders = set()
    for epoch in range(8):
        ranks = samplers(size, world_size)
        for sampler in ranks:
            sampler.set_epoch(epoch)
        orders.add(tuple(tuple(sampler) for sampler in ranks))
    assert len(orders) > 1


@given(st.integers(1, 30), worlds)
def test_it_is_the_stock_sampler_where_that_pads_nothing(multiple: int, world_size: int) -> None:
    size = multiple * world_size
    for rank, sampler in enumerate(samplers(size, world_size, seed=3)):
        stock = DistributedSampler(range(size), world_size, rank, shuffle=True, seed=3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            stock.set_epoch(epoch)
            assert list(sampler) == list(stock)
    if world_size > 1:  # negative control: one more sample, and the stock one repeats some
        stock = [DistributedSampler(range(size + 1), world_size, rank) for rank in range(world_size)]
        assert sum(len(list(sampler)) for sampler in stock) > size + 1


@given(st.integers(1, 40), worlds, st.integers(0, 9))
def test_a_users_random_sampler_is_drawn_alike_on_all_ranks(num_samples: int, world_size: int, epoch: int) -> None:
    by_rank = []
    for rank in range(world_size):
        torch.manual_seed(1000 + rank)  # the ranks' own generators stand differently, and stay as they are
        before = torch.get_rng_state()
        source = WeightedRandomSampler([1.0, 2.0, 3.0], num_samples, replacement=True)
        sampler = UnpaddedSampler(source, world_size, rank, shuffle=True, seed=4)
        sampler.set_epoch(epoch)
        by_rank.append(list(sampler))
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4 + epoch)
    right = list(WeightedRandomSampler([1.0, 2.0, 3.0], num_samples, replacement=True))
    assert by_rank == [right[rank::world_size] for rank in range(world_size)]


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda data: SequentialSampler(data), True),
        (lambda data: RandomSampler(data), True),
        (lambda data: RandomSampler(data, replacement=True), False),
        (lambda data: RandomSampler(data, num_samples=3), False),
        (lambda data: WeightedRandomSampler([1.0] * 5, 5), False),
        (lambda data: [4, 3, 2], False),
    ],
)
def test_only_the_dataset_shuffled_or_not_is_drawn_anew(make, plain: bool) -> None:
    data = list(range(5))
    assert is_plain(make(data), data) is plain
