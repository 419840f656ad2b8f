"""Training with reduced dtypes on the wire ends where training with float32 does, within the noise of seeds.

``pytest tests/test_convergence.py -s`` prints the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from lightning_dp.demo.convnet import DigitsNet
from lightning_dp.demo.digits import DigitsDataModule
from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.transport import Transport

RANKS = 2
SEEDS = range(4)
WIRES = {
    "float32": ReducerConfig(),
    "bf16": ReducerConfig(reduce_dtype="bf16"),
    "bf16, exact sums": ReducerConfig(reduce_dtype="bf16", exact_sums=True),
    "fp16": ReducerConfig(reduce_dtype="fp16"),
}
Batch = tuple[Tensor, Tensor]
Ends = list[tuple[float, float]]  # by seed: loss and accuracy on data not trained on

# ---------------------------------------------------------------------------------------------- what is trained


@cache
def digits() -> dict[str, Batch]:
    data = DigitsDataModule()
    data.setup("fit")
    return {name: data._sets[name].tensors for name in ("train", "test")}


def digit_batches(rank: int, steps: int, generator: torch.Generator) -> Iterator[Batch]:
    images, labels = digits()["train"]
    for _ in range(steps):
        mine = torch.randint(len(images), (RANKS, 32), generator=generator)[rank]
        yield images[mine], labels[mine]


@cache
def text() -> dict[str, Tensor]:
    """Python's own help texts as bytes: the first ones to train on, the last ones to test on."""
    everything = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.long)
    return {"train": everything[:400_000], "test": everything[-20_000:]}


CONTEXT = 32


def text_windows(starts: Tensor, part: str) -> Batch:
    pieces = text()[part][starts[:, None] + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def text_batches(rank: int, steps: int, generator: torch.Generator) -> Iterator[Batch]:
    last = len(text()["train"]) - CONTEXT - 1
    for _ in range(steps):
        yield text_windows(torch.randint(last, (RANKS, 16), generator=generator)[rank], "train")


class ByteGPT(nn.Module):
    """A small GPT over bytes: (n, t) integers to (n, 256, t) logits."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.bytes(x) + self.places(torch.arange(CONTEXT))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True)).transpose(1, 2)


def digits_of_test() -> Batch:
    return digits()["test"]


def text_of_test() -> Batch:
    return text_windows(torch.arange(0, 19_000, 60), "test")


# Model, batches, what to test on, steps, learning rate.
TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Iterator[Batch]], Callable[[], Batch], int, float]] = {
    "digits": (DigitsNet, digit_batches, digits_of_test, 100, 5e-3),
    "bytes": (ByteGPT, text_batches, text_of_test, 120, 3e-3),
}


def train(rank: int, task: str, seed: int, config: ReducerConfig) -> tuple[float, float]:
    """Loss and accuracy in the end. What a seed draws is the same whatever travels."""
    make, batches, test, steps, learning_rate = TASKS[task]
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    reducer = GradientReducer(model.named_parameters(), config=config)
    torch.manual_seed(1000 * seed + rank)  # dropout
    for x, y in batches(rank, steps, torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        reducer.backward(nn.functional.cross_entropy(model(x), y), len(x))
        assert reducer.last is not None
        assert reducer.last.verdict.step
        optimizer.step()
        schedule.step()
    model.eval()
    x, y = test()
    with torch.no_grad():
        logits = model(x)
    return float(nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


# ---------------------------------------------------------------------------------------------- what travels


def all_seeds(rank: int, task: str, wire: str) -> Ends:
    with mock.patch.object(Transport, "start", BAD_WIRES[wire]) if wire in BAD_WIRES else nullcontext():
        return [train(rank, task, seed, WIRES.get(wire, ReducerConfig())) for seed in SEEDS]


send = Transport.start


def six_bits(transport: Transport, bucket: Any, number: int, total: int) -> Any:
    """Too coarse: integers up to 31 times one step for a whole bucket, so that small gradients are lost."""
    step = bucket.flat.abs().max() / 31
    if step > 0:
        bucket.flat.div_(step).round_().mul_(step)
    return send(transport, bucket, number, total)


def one_rank_flipped(transport: Transport, bucket: Any, number: int, total: int) -> Any:
    """A wire with a fault: a part of one rank's gradients arrives with the wrong sign."""
    if torch.distributed.get_rank() == 1:
        bucket.flat[: bucket.flat.numel() // 2].neg_()
    return send(transport, bucket, number, total)


BAD_WIRES = {"six-bit integers": six_bits, "one rank flipped": one_rank_flipped}


class Ended:
    """What training came to, by task and wire; each is trained once."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._ends: dict[tuple[str, str], Ends] = {}

    def of(self, task: str, wire: str) -> Ends:
        if (task, wire) not in self._ends:
            here, there = self._pool.run(RANKS, all_seeds, task, wire)
            assert here == there, "replicas"
            self._ends[task, wire] = here
            losses, accuracies = zip(*here, strict=True)
            print(
                f"| {task} | {wire} | {mean(losses):.4f} ± {stdev(losses):.4f}"
                f" | {mean(accuracies):.4f} ± {stdev(accuracies):.4f} |"
            )
        return self._ends[task, wire]


@pytest.fixture(scope="module")
def ended(pool: RankPool) -> Ended:
    return Ended(pool)


def differs(mine: Ends, right: Ends) -> bool:
    """Whether means over seeds are further apart than twice the standard error that float32's seeds give its mean."""
    for ours, theirs, grain in zip(zip(*mine, strict=True), zip(*right, strict=True), (0.0, 1 / 300), strict=True):
        # An accuracy comes in whole test samples.
        if abs(mean(ours) - mean(theirs)) > max(2 * stdev(theirs) / math.sqrt(len(theirs)), grain):
            return True
    return False


@pytest.mark.parametrize("wire", [name for name in WIRES if name != "float32"])
@pytest.mark.parametrize("task", TASKS)
def test_reduced_dtypes_train_as_far_as_float32(ended: Ended, task: str, wire: str) -> None:
    right, mine = ended.of(task, "float32"), ended.of(task, wire)
    assert mine != right, "nothing was rounded"
    assert not differs(mine, right)


@pytest.mark.parametrize("wire", BAD_WIRES)
@pytest.mark.parametrize("task", TASKS)
def test_worse_wires_are_told_apart(ended: Ended, task: str, wire: str) -> None:
    """Negative control: the same criterion."""
    assert differs(ended.of(task, wire), ended.of(task, "float32"))


@pytest.mark.parametrize(("task", "chance"), [("digits", 0.1), ("bytes", 0.2)])
def test_it_was_training(ended: Ended, task: str, chance: float) -> None:
    """A net that has learnt nothing would end alike whatever travels. Bytes' commonest is the space, in under 0.2."""
    assert min(accuracy for _, accuracy in ended.of(task, "float32")) > 1.5 * chance
