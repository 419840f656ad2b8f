"""The same-data check in a run: accumulation windows, and epochs that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning_runs import Module, samples, trainer_of
from rank_pool import RankPool
from test_watch import Collects
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Micro(Dataset):
    """16 micro-batches; of every two the chosen ones are the same on all ranks."""

    def __init__(self, rank: int, same: tuple[int, ...]) -> None:
        self.rank, self.same = rank, same

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return samples(index, 0 if index % 2 in self.same else self.rank, 3)


def fit(rank: int, same: tuple[int, ...], k: int, resume_from: str | None = None, **options: Any) -> list[str]:
    settings = {"max_epochs": 1, "limit_val_batches": 0, **options}
    trainer = trainer_of("bucketed_ddp", 2, accumulate_grad_batches=k, **settings)
    with Collects() as collected:
        trainer.fit(Module(), DataLoader(Micro(rank, same), batch_size=None), ckpt_path=resume_from)
    return collected.lines


@pytest.mark.parametrize(
    ("same", "k", "alarm"),
    [
        ((), 2, False),
        ((0,), 2, False),  # a step is the same if all of it is
        ((1,), 2, False),
        ((0, 1), 2, True),
        ((0,), 1, False),
        ((0, 1), 1, True),
    ],
)
def test_a_step_is_compared_whole(pool: RankPool, same: tuple[int, ...], k: int, alarm: bool) -> None:
    lines = pool.run(2, fit, same, k)[0]
    assert ["ranks 0, 1 read identical batches" in line for line in lines] == ([True] if alarm else [])


class SaveInEpoch(Callback):
    def __init__(self, path: str, epoch: int, batch: int) -> None:
        self.path, self.at = path, (epoch, batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.save_checkpoint(self.path)


def fit_and_resume(rank: int, path: str) -> tuple[list[str], list[str]]:
    """The whole run's data are sound up to the checkpoint; those of the resumed one are not."""
    whole = fit(rank, (), 1, max_epochs=3, callbacks=[SaveInEpoch(path, 2, 2)])
    return whole, fit(rank, (0, 1), 1, path, max_epochs=3)


def test_after_a_resume_within_an_epoch_the_right_epoch_is_named(pool: RankPool, tmp_path: Path) -> None:
    for whole, resumed in pool.run(2, fit_and_resume, str(tmp_path / "in.ckpt"))[:1]:
        assert whole == []
        (line,) = resumed
        assert line.startswith("in 3 consecutive steps of epoch 2 ranks 0, 1 read identical batches")
