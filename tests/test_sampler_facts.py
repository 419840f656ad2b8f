"""What is told of a rank's sampler, and what is said where ranks' samplers do not fit together."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_dp.data.samplers import UnpaddedSampler
from lightning_dp.health.samplers import SamplerFacts, compare_samplers, describe_sampler, likely_cause


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


class Buckets(BatchSampler):
    """A batch sampler of a user's that deals batches out itself."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        super().__init__(RandomSampler(range(20)), 4, True)
        self.num_replicas, self.rank, self.seed = num_replicas, rank, 9


DATA = Numbers()


def sampler_at_epoch(epoch: int) -> DistributedSampler:
    sampler = DistributedSampler(DATA, 3, 1, shuffle=True, seed=7, drop_last=True)
    sampler.set_epoch(epoch)
    return sampler


FACTS = {
    "plain": (
        lambda: DataLoader(DATA, 4),
        SamplerFacts("Numbers", False, "SequentialSampler", size=20),
    ),
    "shuffled": (
        lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
        SamplerFacts("Numbers", False, "RandomSampler", size=20, shuffle=True, num_workers=2),
    ),
    "shuffled by its own generator": (
        lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(11)),
        SamplerFacts("Numbers", False, "RandomSampler", size=20, shuffle=True, seed=11),
    ),
    "dealt out": (
        lambda: DataLoader(DATA, 4, sampler=sampler_at_epoch(5)),
        SamplerFacts("Numbers", False, "DistributedSampler", 3, 1, 20, 7, True, True, 5),
    ),
    "dealt out, without padding": (
        lambda: DataLoader(DATA, 4, sampler=UnpaddedSampler(DATA, 3, 2, shuffle=False, seed=4)),
        SamplerFacts("Numbers", False, "UnpaddedSampler", 3, 2, 20, 4, False, False, 0),
    ),
    "inside a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(sampler_at_epoch(0), 4, False)),
        SamplerFacts("Numbers", False, "DistributedSampler", 3, 1, 20, 7, True, True, 0),
    ),
    "a batch sampler that deals out": (
        lambda: DataLoader(DATA, batch_sampler=Buckets(3, 2)),
        SamplerFacts("Numbers", False, "Buckets", 3, 2, 20, 9, None, True),
    ),
    "stream": (
        lambda: DataLoader(Stream(), 4, num_workers=1),
        SamplerFacts("Stream", True, "no sampler", num_workers=1),
    ),
    "wrapped": (
        lambda: SimpleNamespace(loader=DataLoader(DATA, 4)),
        SamplerFacts("Numbers", False, "SequentialSampler", size=20),
    ),
    "a generator": (lambda: (i for i in range(3)), SamplerFacts("generator", True, "no sampler")),
    "a list": (lambda: [1, 2, 3], SamplerFacts("list", False, "no sampler", size=3)),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_is_told_of_a_loader(name):
    make, expected = FACTS[name]
    torch.manual_seed(123)
    facts = describe_sampler(make())
    assert facts.torch_seed == 123
    assert replace(facts, torch_seed=0) == expected


# ----------------------------------------------------------------------------------------------- between ranks

GOOD = [SamplerFacts("Numbers", False, "DistributedSampler", 3, rank, 20, 7, True, False, 0) for rank in range(3)]
PLAIN = [SamplerFacts("Numbers", False, "RandomSampler", size=20, shuffle=True, seed=rank) for rank in range(3)]


def change(odd: int, **settings) -> list[SamplerFacts]:
    return [replace(fact, **settings) if fact.rank == odd else fact for fact in GOOD]


@pytest.mark.parametrize(
    ("facts", "problems"),
    [
        pytest.param(GOOD, (), id="all is well"),
        pytest.param(GOOD[:1], ("samples are dealt out to 3 ranks, but there are 1",), id="one rank"),
        pytest.param(PLAIN, (), id="ranks that each draw their own"),
        pytest.param([], (), id="none"),
        pytest.param(change(2, seed=8), ("seed: rank 2 has 8, the others 7",), id="seed"),
        pytest.param(change(0, seed=8), ("seed: rank 0 has 8, the others 7",), id="seed of rank 0"),
        pytest.param(change(1, shuffle=False), ("shuffle: rank 1 has False, the others True",), id="shuffle"),
        pytest.param(change(1, drop_last=True), ("drop last: rank 1 has True, the others False",), id="drop_last"),
        pytest.param(change(1, epoch=4), ("epoch: rank 1 has 4, the others 0",), id="epoch"),
        pytest.param(change(1, size=21), ("size: rank 1 has 21, the others 20",), id="size"),
        pytest.param(change(2, rank=0), ("ranks 0, 2 all take the samples of rank 0",), id="rank"),
        pytest.param(
            change(1, num_replicas=2),
            ("num replicas: rank 1 has 2, the others 3", "samples are dealt out to 2 ranks, but there are 3"),
            id="num_replicas",
        ),
        pytest.param(
            [replace(fact, seed=10 + fact.rank) for fact in GOOD],
            ("seed: rank 0 has 10, rank 1 has 11, rank 2 has 12",),
            id="three seeds",
        ),
        pytest.param(
            [GOOD[0], replace(PLAIN[1], shuffle=True, seed=7, drop_last=False, epoch=0), GOOD[2]],
            ("sampler: rank 1 has RandomSampler, the others DistributedSampler", "num replicas: rank 1 has None,"),
            id="one deals nothing out",
        ),
        pytest.param(
            [replace(fact, num_replicas=1, rank=0) for fact in GOOD],
            ("ranks 0, 1, 2 all take the samples of rank 0", "samples are dealt out to 1 ranks, but there are 3"),
            id="each for itself",
        ),
    ],
)
def test_what_does_not_fit_together(facts, problems):
    found = compare_samplers(facts)
    assert len(found) == len(problems)
    for line, expected in zip(found, problems, strict=True):
        assert line.startswith(expected)


def test_real_samplers_of_equal_and_other_seeds():
    def loader(rank: int, seed: int) -> DataLoader:
        return DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, rank, seed=seed))

    assert compare_samplers([describe_sampler(loader(rank, 3)) for rank in range(2)]) == ()
    different = [loader(0, 3), loader(1, 4)]
    assert compare_samplers([describe_sampler(each) for each in different]) == ("seed: rank 0 has 3, rank 1 has 4",)
    # What it is for: these ranks read some samples twice and others never.
    assert len({int(i) for each in different for batch in each for i in batch}) < len(DATA)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ([], "look for a sampler"),
        (PLAIN, "nothing deals the samples of Numbers out to the ranks (the loader has RandomSampler)"),
        (change(2, rank=0), "DistributedSampler was given rank=0 on several ranks"),
        ([replace(fact, iterable=True) for fact in GOOD], "Numbers is a stream"),
        (
            [replace(fact, iterable=True, num_workers=4) for fact in GOOD],
            "these ranks have the same seed and so have those of its 4 workers; take items by rank",
        ),
    ],
)
def test_the_likely_cause(facts, says):
    assert says in likely_cause(facts, [0, 2])


def test_other_seeds_of_a_stream_are_no_cause():
    facts = [SamplerFacts("Stream", True, "no sampler", torch_seed=rank) for rank in range(2)]
    assert "seed" not in likely_cause(facts, [0, 1])
