"""Loaders with a state whose iterations begin anew, as torchdata's do, unless a state was loaded just before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning_runs import Module, loader, samples, trainer_of
from rank_pool import RankPool
from torch import Tensor

SIZE = 5
EPOCHS = 2


class Unsized:
    """Gives the batches 0 to ``SIZE - 1``; its iterations are objects that know at once where they begin."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0
        self.begins_at: int | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.position, self.begins_at = self.begins_at or 0, None
        return self.batches()

    def batches(self) -> Iterator[dict[str, Tensor]]:
        while self.position < SIZE:
            self.position += 1
            index = self.position - 1
            yield {**samples(index, self.rank, 2), "index": torch.tensor(index)}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["position"]


class Sized(Unsized):
    def __len__(self) -> int:
        return SIZE


class UnsizedGenerator(Unsized):
    """As a user writes it: ``__iter__`` is a generator, and where it begins shows when it is asked for a batch."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from super().__iter__()


class SizedGenerator(UnsizedGenerator):
    def __len__(self) -> int:
        return SIZE


LOADERS = {cls.__name__: cls for cls in (Sized, Unsized, SizedGenerator, UnsizedGenerator)}


class Watching(Module):
    """Keeps the batches of each epoch and of each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[int]] = []
        self.evaluations: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def on_validation_epoch_start(self) -> None:
        self.evaluations.append([])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.epochs[-1].append(int(batch["index"]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluations[-1].append(int(batch["index"]))


def fit(rank: int, strategy: str, kind: str, options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    module = Watching()
    trainer = trainer_of(strategy, 2, max_epochs=EPOCHS, **options)
    trainer.fit(module, LOADERS[kind](rank), LOADERS[kind](rank))
    return module.epochs, module.evaluations


# Options, batches of a training epoch, numbers of evaluations and of batches in each.
CASES: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, SIZE, [SIZE] * 2),
    ({"num_sanity_val_steps": 2}, SIZE, [2, SIZE, SIZE]),
    ({"num_sanity_val_steps": 2, "limit_val_batches": 2}, SIZE, [2, 2, 2]),
    ({"num_sanity_val_steps": 2, "limit_val_batches": 3, "val_check_interval": 2}, SIZE, [2, 3, 3, 3, 3]),
    ({"limit_train_batches": 3, "limit_val_batches": 2}, 3, [2, 2]),
]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("options", "trained", "evaluated"), CASES)
def test_every_iteration_begins_with_the_first_batch(
    pool: RankPool, kind: str, options: dict[str, Any], trained: int, evaluated: list[int]
) -> None:
    for epochs, evaluations in pool.run(2, fit, "bucketed_ddp", kind, options):
        assert epochs == [list(range(trained))] * EPOCHS
        assert evaluations == [list(range(size)) for size in evaluated]


class GoesOn(Unsized):
    """The other kind: an endless stream, whose iterations go on where the one before stood."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.position += 1
            yield {**samples(self.position, self.rank, 2), "index": torch.tensor(self.position - 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit_stream(rank: int) -> list[list[int]]:
    module = Watching()
    trainer = trainer_of("bucketed_ddp", 2, max_epochs=3, limit_train_batches=3, limit_val_batches=0)
    trainer.fit(module, GoesOn(rank), loader([[1, 1]], rank))
    return module.epochs


def test_a_stream_goes_on_and_nothing_that_was_drawn_ahead_is_lost(pool: RankPool) -> None:
    """The negative control: what tells the two kinds apart does not make the one out of the other."""
    assert pool.run(2, fit_stream) == [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]] * 2


class SaveBehind(Callback):
    def __init__(self, path: str, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fit_and_resume(rank: int, kind: str, options: dict[str, Any], path: str) -> list[list[int]]:
    """Batches of the two epochs behind a checkpoint."""
    for callbacks, resume_from in ([SaveBehind(path, 0)], None), ([], path):
        module = Watching()
        trainer = trainer_of("bucketed_ddp", 2, max_epochs=3, limit_val_batches=0, callbacks=callbacks, **options)
        trainer.fit(module, LOADERS[kind](rank), ckpt_path=resume_from)
    return module.epochs


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("options", "trained"), [({}, SIZE), ({"limit_train_batches": 3}, 3)])
def test_so_do_those_of_a_run_that_is_resumed_between_epochs(
    pool: RankPool, kind: str, options: dict[str, Any], trained: int, tmp_path: Path
) -> None:
    for epochs in pool.run(2, fit_and_resume, kind, options, str(tmp_path / "between.ckpt")):
        assert epochs == [list(range(trained))] * 2
