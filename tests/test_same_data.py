"""The same-data check: ranks fed the same batches are found, whatever feeds them, and nobody else is."""

import random
import time
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from lightning_dp.health.same_data import SAMPLE, SameData, SameDataCheck, batch_fingerprint
from lightning_dp.health.samplers import describe_sampler

# ------------------------------------------------------------------------------------------- fingerprints of batches

Point = namedtuple("Point", "x y")


@dataclass
class Labelled:
    x: Any
    label: Any = None


@dataclass(slots=True)
class Slotted:
    x: Any


class Graph:
    """As graph libraries have them: tensors among the attributes."""

    def __init__(self, **attributes: Any) -> None:
        self._store = SimpleNamespace(**attributes)


def rows(number: float = 0.0, n: int = 4) -> Tensor:
    return torch.arange(n * 3.0).reshape(n, 3) + number


# Each makes a batch anew; no two of the batches are equal.
BATCHES = {
    "a tensor": lambda: rows(),
    "other numbers": lambda: rows(1),
    "one bit": lambda: rows() * (1 + torch.tensor([[0, 0, 0]] * 3 + [[0, 0, 2.0**-23]])),
    "fewer rows": lambda: rows(n=3),
    "another dtype": lambda: rows().double(),
    "another shape": lambda: rows().reshape(3, 4),
    "transposed": lambda: rows().t(),
    "-0.0": lambda: rows() * -0.0,
    "0.0": lambda: rows() * 0.0,
    "bfloat16": lambda: rows().bfloat16(),
    "float8": lambda: rows().to(torch.float8_e5m2),
    "complex": lambda: rows() + 1j,
    "bool": lambda: rows() > 3,
    "0-dim": lambda: torch.tensor(1.0),
    "expanded": lambda: torch.ones(1).expand(7),
    "list": lambda: [rows(), rows(1)],
    "list, the other way round": lambda: [rows(1), rows()],
    "list of one": lambda: [rows()],
    "tuple": lambda: (rows(), rows(1)),
    "nested": lambda: [[rows()], rows(1)],
    "dict": lambda: {"x": rows(), "y": torch.tensor([1, 2])},
    "dict, other names": lambda: {"x": rows(), "z": torch.tensor([1, 2])},
    "dict, other labels": lambda: {"x": rows(), "y": torch.tensor([1, 3])},
    "UserDict": lambda: UserDict(x=rows()),
    "namedtuple": lambda: Point(rows(), 1),
    "namedtuple, another number": lambda: Point(rows(), 2),
    "dataclass": lambda: Labelled(rows(), "cat"),
    "dataclass, another string": lambda: Labelled(rows(), "dog"),
    "dataclass with slots": lambda: Slotted(rows()),
    "dataclass with slots, other numbers": lambda: Slotted(rows(1)),
    "object": lambda: Graph(x=rows(), edges=torch.tensor([[0, 1]])),
    "object, other edges": lambda: Graph(x=rows(), edges=torch.tensor([[1, 0]])),
    "packed": lambda: pack_padded_sequence(rows()[..., None], [3, 2, 1, 1], batch_first=True),
    "strings": lambda: ["a", "b"],
    "strings, otherwise cut": lambda: ["ab", ""],
    "bytes": lambda: [b"a", b"b"],
    "integers": lambda: [1, 2],
    "floats": lambda: [1.0, 2.0],
    "set": lambda: {"a", "b", "c"},
    "numpy": lambda: rows().numpy(),
    "numpy, other numbers": lambda: rows(1).numpy(),
    "numpy scalars": lambda: [np.float32(1), np.bool_(True)],
    "large numpy": lambda: np.arange(100_000.0),
    "large numpy, other numbers": lambda: np.arange(100_000.0) + 1,
    "sparse": lambda: rows().to_sparse(),
    "sparse rows": lambda: rows(2).to_sparse_csr(),
    "nested tensor": lambda: torch.nested.nested_tensor([rows(), rows(n=2)]),
    "jagged tensor": lambda: torch.nested.nested_tensor([rows(5), rows(n=2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(rows(), 0.1, 0, torch.qint8),
    "large": lambda: torch.arange(100_000.0),
    "large, other numbers": lambda: torch.arange(100_000.0) + 1,
    "long text": lambda: "x" * 5000,
    "longer text": lambda: "x" * 5001,
    "long list": lambda: list(range(5000)),
    "long list, other numbers": lambda: list(range(1, 5001)),
    "None and a tensor": lambda: [None, rows()],
}


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of prototypes, and of what will go
def test_equal_batches_and_only_they_have_equal_fingerprints():
    found = {name: batch_fingerprint(make()) for name, make in BATCHES.items()}
    assert all(1 <= value < 2**63 for value in found.values())
    assert found == {name: batch_fingerprint(make()) for name, make in BATCHES.items()}
    by_value: dict[int, list[str]] = {}
    for name, value in found.items():
        by_value.setdefault(value, []).append(name)
    assert [names for names in by_value.values() if len(names) > 1] == []


@pytest.mark.parametrize(
    "batch",
    [None, [], {}, {"x": []}, [None], torch.empty(0, 3), np.empty(0), object(), [object()], SimpleNamespace(size=7)],
    ids=str,
)
def test_what_cannot_tell_batches_apart_has_none(batch):
    assert batch_fingerprint(batch) is None


def test_it_does_not_depend_on_strides():
    batch = torch.randn(50, 60, 70)
    other = batch.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not other.is_contiguous()
    assert batch_fingerprint(batch) == batch_fingerprint(other)


@settings(max_examples=50, deadline=None)
@given(columns=st.integers(2, 50), changed=st.integers(0, 49), seed=st.integers(0, 1000))
def test_a_change_in_one_column_of_a_large_tensor_is_seen(columns, changed, seed):
    """Were the sample taken at equal distances, it could lie in the columns of padding only."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.zeros(SAMPLE * 64 // columns * 4, columns)
    other = batch.clone()
    other[:, changed % columns] = torch.rand(len(batch), generator=generator) + 0.1
    assert batch_fingerprint(batch) != batch_fingerprint(other)


def test_a_cyclic_or_endless_batch_is_cut_short():
    batch: dict[str, Any] = {"x": rows()}
    batch["again"] = batch
    wide: list[Any] = [1] * 64
    for _ in range(10):
        wide = [wide] * 64
    assert batch_fingerprint(batch) is not None
    assert batch_fingerprint(wide) is not None


class LargestResult(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.reads += "_local_scalar_dense" in str(func)
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in old:
            self.numel = max(self.numel, result.numel())
        return result


def test_a_huge_batch_costs_no_more(capsys):
    batch = {"image": torch.rand(64, 3, 224, 224).permute(0, 2, 3, 1), "label": torch.arange(64)}
    batch_fingerprint(batch)  # makes constants
    with LargestResult() as result:
        batch_fingerprint(batch)
    assert result.numel <= 4 * SAMPLE
    assert result.reads == 1  # the host reads one number from the device
    start = time.perf_counter()
    for _ in range(20):
        batch_fingerprint(batch)
    seconds = (time.perf_counter() - start) / 20
    with capsys.disabled():
        print(f"\nbatch fingerprint of {batch['image'].nbytes / 1e6:.0f} MB: {seconds * 1e3:.2f} ms")
    assert seconds < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_same():
    batch = [torch.randn(100, 1000), torch.arange(7)]
    assert batch_fingerprint([tensor.cuda() for tensor in batch]) == batch_fingerprint(batch)


# ----------------------------------------------------------------------------------------------- the decision

A, B, C, D, E, F = range(1, 7)
PAD = None


def observe(epochs: list[list[list[int | None]]], **settings: Any) -> list[tuple[int, int, SameData]]:
    """(epoch, step, what was found) of a check that is fed epochs of steps of fingerprints by rank."""
    check = SameDataCheck(**settings)
    found = []
    for epoch, steps in enumerate(epochs):
        check.start_epoch(epoch)
        for step, prints in enumerate(steps):
            result = check.observe(prints)
            if result is not None:
                found.append((epoch, step, result))
    return found


@pytest.mark.parametrize(
    ("epochs", "settings", "expected"),  # expected: (epoch, step, groups)
    [
        pytest.param([[[A, A], [B, B], [C, C], [D, D]]], {}, [(0, 2, ((0, 1),))], id="two ranks, told once"),
        pytest.param([[[A, B], [C, D], [E, F]]], {}, [], id="different data"),
        pytest.param([[[A, A], [B, B]]], {}, [], id="two steps are too few"),
        pytest.param([[[A, A], [B, B]]], {"patience": 2}, [(0, 1, ((0, 1),))], id="unless two are asked for"),
        pytest.param([[[A, B, A], [C, D, C], [E, F, E]]], {}, [(0, 2, ((0, 2),))], id="two of three"),
        pytest.param(
            [[[A, B, B, A], [C, D, D, C], [E, F, F, E]]], {}, [(0, 2, ((0, 3), (1, 2)))], id="two groups of two"
        ),
        pytest.param([[[A, A], [B, C], [D, D], [E, E], [F, F]]], {}, [], id="one step of the epoch differs"),
        pytest.param([[[A, A], [B, B], [C, D]]], {}, [], id="they part in the third"),
        pytest.param(
            [[[A, A, A], [B, B, B], [C, C, C], [D, D, E]]], {}, [(0, 2, ((0, 1, 2),))], id="part of a group is known"
        ),
        pytest.param([[[A, A], [A, A], [A, A]]], {}, [], id="a constant dataset"),
        pytest.param([[[A, A], [B, B], [B, B], [C, C]]], {}, [], id="a batch that is repeated"),
        pytest.param([[[A, A], [B, B]], [[A, A], [B, B]]], {}, [(1, 0, ((0, 1),))], id="epochs of two batches"),
        pytest.param([[[A, A]]] * 5, {}, [], id="epochs of the same one batch"),
        pytest.param([[[A, A], [B, PAD], [C, C]]], {}, [], id="padding between"),
        pytest.param([[[PAD, PAD]] * 6], {}, [], id="padding only"),
        pytest.param([[[A, A, PAD], [B, B, PAD], [C, C, PAD]]], {}, [(0, 2, ((0, 1),))], id="padding elsewhere"),
        pytest.param([[[A, A], [B, B], [C, C]]], {"legitimate": True}, [], id="overfit_batches"),
        pytest.param([[[A], [B], [C]]], {}, [], id="one rank"),
        pytest.param([[[A, B]] + [[x, x] for x in range(10, 20)]], {}, [], id="not from the first step on"),
        pytest.param(
            [[[A, B], [C, D]] + [[x, x] for x in range(10, 20)], [[x, x] for x in range(20, 23)]],
            {"first_steps": 2},
            [],
            id="only the first steps are looked at",
        ),
        pytest.param(
            [[[A, B], [C, D], [E, F]], [[A, A], [B, B], [C, C]]], {}, [(1, 2, ((0, 1),))], id="from the second epoch on"
        ),
    ],
)
def test_what_is_found_and_when(epochs, settings, expected):
    found = observe(epochs, **settings)
    assert [(epoch, step, result.groups) for epoch, step, result in found] == expected
    for epoch, _, result in found:
        assert result.epoch == epoch
        assert result.steps >= settings.get("patience", 3)


def test_only_the_first_steps_need_fingerprints():
    check = SameDataCheck(first_steps=3)
    wanted = []
    for epoch in range(2):
        check.start_epoch(epoch)
        for step in range(5):
            wanted.append(check.wants_more)
            check.observe([epoch * 10 + step, 100 + step])
    assert wanted == [True, True, True, False, False] * 2
    assert not SameDataCheck(legitimate=True).wants_more


@settings(max_examples=100, deadline=None)
@given(world=st.integers(2, 8), data=st.data())
def test_any_group_is_found_and_no_other_rank(world, data):
    owner = [data.draw(st.integers(0, rank)) for rank in range(world)]  # whose data a rank reads
    steps = [[10 * step + owner[rank] for rank in range(world)] for step in range(3)]
    groups = {tuple(r for r in range(world) if owner[r] == o) for o in set(owner)}
    expected = {group for group in groups if len(group) > 1}
    found = observe([steps])
    assert {group for _, _, result in found for group in result.groups} == expected


# ----------------------------------------------------------------------------------------------- real loaders


class Stream(IterableDataset):
    def __init__(self, share: tuple[int, int] = (0, 1)) -> None:
        self.share = share

    def __iter__(self):
        rank, world = self.share
        return iter(torch.arange(40.0)[rank::world])


class Drawn(Dataset):
    """Draws its samples, whatever the index."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(3, generator=self.generator)


DATA = TensorDataset(torch.arange(40.0)[:, None].expand(40, 3), torch.arange(40) % 10)


def dealt(rank: int, dataset: Any = DATA, world: int = 2, **settings: Any) -> DataLoader:
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, world, rank, **settings))


# Loaders of ranks 0 and 1; what the message must say, or None if there must be none.
LOADERS: dict[str, tuple[Any, Any, str | None]] = {
    "no sampler": (
        lambda: DataLoader(DATA, 4),
        lambda: DataLoader(DATA, 4),
        "nothing deals the samples of TensorDataset out to the ranks (the loader has SequentialSampler); use Distr",
    ),
    "own shuffling, equal seeds": (
        lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "(the loader has RandomSampler)",
    ),
    "a whole stream each": (
        lambda: DataLoader(Stream(), 4),
        lambda: DataLoader(Stream(), 4),
        "Stream is a stream, which every rank reads whole unless it takes its own share of items; if it draws at"
        " random: these ranks have the same seed; take items by rank",
    ),
    "the same rank given twice": (
        lambda: dealt(1),
        lambda: dealt(1),
        "DistributedSampler was given rank=1 on several ranks",
    ),
    "equal seeds of the dataset": (
        lambda: dealt(0, Drawn(5)),
        lambda: dealt(1, Drawn(5)),
        "DistributedSampler deals out different samples, but Drawn makes the same of them",
    ),
    "DistributedSampler": (lambda: dealt(0), lambda: dealt(1), None),
    "own shuffling, other seeds": (
        lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(4)),
        None,
    ),
    "a share of the stream each": (
        lambda: DataLoader(Stream((0, 2)), 4),
        lambda: DataLoader(Stream((1, 2)), 4),
        None,
    ),
    "other seeds of the dataset": (lambda: dealt(0, Drawn(5)), lambda: dealt(1, Drawn(6)), None),
    "one sample over and over": (
        lambda: dealt(0, TensorDataset(torch.ones(40, 3))),
        lambda: dealt(1, TensorDataset(torch.ones(40, 3))),
        None,
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_real_loaders(name):
    first, second, expected = LOADERS[name]
    loaders = [first(), second()]
    check = SameDataCheck([describe_sampler(loader) for loader in loaders])
    check.start_epoch(0)
    found = [check.observe([batch_fingerprint(b) for b in batches]) for batches in zip(*loaders, strict=True)]
    said = [result.describe() for result in found if result is not None]
    if expected is None:
        assert said == []
    else:
        assert len(said) == 1
        assert said[0].startswith("in 3 consecutive steps of epoch 0 ranks 0, 1 read identical batches: ")
        assert expected in said[0]


def test_a_check_of_types_would_miss_it():
    """Negative control: the right sampler is no proof, only the content tells."""
    loaders = [dealt(0, Drawn(5)), dealt(1, Drawn(5))]
    assert all(isinstance(loader.sampler, DistributedSampler) for loader in loaders)
    assert [loader.sampler.rank for loader in loaders] == [0, 1]
    first, second = (next(iter(loader)) for loader in loaders)
    assert torch.equal(first, second)


def test_100_random_runs_raise_no_alarm_and_100_with_shared_data_do(capsys):
    rng = random.Random(7)
    alarms = found = 0
    for trial in range(200):
        world = rng.randint(2, 4)
        shared = trial % 2 == 1
        odd, like = rng.sample(range(world), 2)
        data = TensorDataset(torch.rand(world * 24, 3, generator=torch.Generator().manual_seed(trial)))
        samplers = [DistributedSampler(data, world, rank, seed=trial) for rank in range(world)]
        if shared:
            samplers[odd] = DistributedSampler(data, world, like, seed=trial)
        loaders = [DataLoader(data, 4, sampler=sampler) for sampler in samplers]
        check = SameDataCheck()
        check.start_epoch(0)
        results = [check.observe([batch_fingerprint(b) for b in batches]) for batches in zip(*loaders, strict=True)]
        groups = [group for result in results if result for group in result.groups]
        if shared:
            found += groups == [tuple(sorted((odd, like)))]
        else:
            alarms += len(groups)
    with capsys.disabled():
        print(f"\nsame data: {found} of 100 found with the right ranks, {alarms} alarms in 100 clean runs")
    assert (found, alarms) == (100, 0)
