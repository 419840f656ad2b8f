"""What a rank's loader is set to, and what differs between the ranks' loaders that should not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from lightning_dp.health.fingerprint import duplicates, majority

_SETTINGS = ("sampler", "num_replicas", "size", "seed", "shuffle", "drop_last", "epoch")


@dataclass(frozen=True)
class SamplerFacts:
    """What is known of one rank's loader; plain values, to be sent to the other ranks.

    Attributes:
        dataset: Class of the dataset.
        iterable: Whether it is a stream, without indices that a sampler could choose.
        sampler: Class of what chooses the samples.
        num_replicas: Number of ranks that it deals samples out to; ``None`` if it deals none out.
        rank: The rank whose samples it takes.
        size: Number of samples in the dataset.
        seed: Seed of its order, if it has one of its own.
        shuffle: Whether it shuffles.
        drop_last: Whether it leaves out what does not go up.
        epoch: Epoch that its order depends on.
        num_workers: Worker processes of the loader.
        torch_seed: Seed of torch's global generator, from which the seeds of workers come.
    """

    dataset: str
    iterable: bool
    sampler: str
    num_replicas: int | None = None
    rank: int | None = None
    size: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    epoch: int | None = None
    num_workers: int = 0
    torch_seed: int = 0


def describe_sampler(loader: Any) -> SamplerFacts:
    """What a loader is set to, as far as it can be seen from outside.

    Args:
        loader: A DataLoader, one wrapped by an object with an attribute ``loader``, or anything that can be iterated.
    """
    while not hasattr(loader, "sampler") and hasattr(loader, "loader"):
        loader = loader.loader
    dataset = getattr(loader, "dataset", loader)
    iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    deals = [s for s in _samplers(loader) if _integer(s, "num_replicas") is not None and hasattr(s, "rank")]
    sampler = deals[0] if deals else next(_samplers(loader), None)
    shuffle = getattr(sampler, "shuffle", isinstance(sampler, RandomSampler) or None)
    drop_last = getattr(sampler, "drop_last", None)
    return SamplerFacts(
        dataset=type(dataset).__name__,
        iterable=iterable,
        sampler="no sampler" if iterable or sampler is None else type(sampler).__name__,
        num_replicas=_integer(sampler, "num_replicas"),
        rank=_integer(sampler, "rank"),
        size=len(dataset) if not iterable and hasattr(dataset, "__len__") else None,
        seed=_seed(sampler),
        shuffle=None if shuffle is None else bool(shuffle),
        drop_last=None if drop_last is None else bool(drop_last),
        epoch=_integer(sampler, "epoch"),
        num_workers=getattr(loader, "num_workers", 0),
        torch_seed=torch.initial_seed(),
    )


def compare_samplers(facts: Sequence[SamplerFacts]) -> tuple[str, ...]:
    """What is wrong with samplers that deal samples out to the ranks: some samples are read twice, others never.

    Args:
        facts: Those of each rank, by rank.

    Returns:
        One line for each thing that is wrong, naming ranks; none if all is well, or if no sampler deals samples out.
    """
    if all(fact.num_replicas is None for fact in facts):
        return ()
    problems = [
        f"{name.replace('_', ' ')}: {_who_has_what([getattr(fact, name) for fact in facts])}"
        for name in _SETTINGS
        if len({getattr(fact, name) for fact in facts}) > 1
    ]
    problems += [
        f"{_ranks(ranks)} all take the samples of rank {facts[ranks[0]].rank}"
        for ranks in duplicates([fact.rank if fact.num_replicas is not None else None for fact in facts])
    ]
    counts = {fact.num_replicas for fact in facts if fact.num_replicas != len(facts)}
    problems += [f"samples are dealt out to {n} ranks, but there are {len(facts)}" for n in counts if n is not None]
    return tuple(problems)


def likely_cause(facts: Sequence[SamplerFacts], ranks: Sequence[int]) -> str:
    """Why ranks read the same batches, in a few words, and what to do.

    Args:
        facts: Those of each rank, by rank; empty if nothing is known.
        ranks: The ranks that read the same.
    """
    if not facts:
        return "look for a sampler that does not deal samples out to the ranks, or for equal seeds"
    among = [facts[rank] for rank in ranks]
    first = among[0]
    if any(fact.iterable for fact in among):
        cause = f"{first.dataset} is a stream, which every rank reads whole unless it takes its own share of items"
        if len({fact.torch_seed for fact in among}) == 1:
            workers = f" and so have those of its {first.num_workers} workers" if first.num_workers else ""
            cause += f"; if it draws at random: these ranks have the same seed{workers}"
        return f"{cause}; take items by rank and world size in its __iter__"
    if any(fact.num_replicas is None for fact in among):
        return (
            f"nothing deals the samples of {first.dataset} out to the ranks (the loader has {first.sampler}); use"
            " DistributedSampler, or let use_distributed_sampler=True put one in"
        )
    if len({fact.rank for fact in among}) < len(among):
        return f"{first.sampler} was given rank={first.rank} on several ranks; give it the rank of its process"
    return (
        f"{first.sampler} deals out different samples, but {first.dataset} makes the same of them: it holds copies, or"
        " draws from generators that have the same seed on these ranks"
    )


def _samplers(loader: Any) -> Iterator[Any]:
    """What may choose the samples, from the outside in; a plain BatchSampler only cuts into batches."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [] if type(batch_sampler) is torch.utils.data.BatchSampler else [batch_sampler]
    found += [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]
    for sampler in found:
        for inner in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
            if inner is not None:
                yield inner


def _integer(owner: Any, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) else None


def _seed(sampler: Any) -> int | None:
    generator = getattr(sampler, "generator", None)
    return generator.initial_seed() if isinstance(generator, torch.Generator) else _integer(sampler, "seed")


def _who_has_what(values: Sequence[Any]) -> str:
    usual, odd = majority(values)
    named = odd or range(len(values))
    said = ", ".join(f"rank {rank} has {values[rank]}" for rank in named)
    return f"{said}, the others {usual}" if odd else said


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"
