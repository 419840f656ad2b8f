"""Checkpoints within an accumulation window: what had been found or asked for by then still holds after the resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import Counts, Module, flat, loader, net, relative_error, samples, single_device, trainer_of
from rank_pool import RankPool
from test_watch import Collects
from test_watched_buffers import SaveAt
from torch import Tensor, nn

from lightning_dp import BucketedDDPStrategy

# Two micro-batches a step; the checkpoint is written behind batch 4, the first one of the third step.
COUNTS: Counts = [[4, 3, 2], [3, 4, 5], [2, 5, 3], [4, 4, 2], [3, 3, 4], [5, 2, 3], [4, 3, 3], [3, 2, 5]]
SAVED_BEHIND, STEP = 4, 2
K = 2


def of(world_size: int) -> Counts:
    return [by_rank[:world_size] for by_rank in COUNTS]


class Troubled(Module):
    """On some ranks a batch is bad, or vetoed."""

    def __init__(self, bad: tuple[tuple[int, int], ...] = (), vetoed: tuple[int, int] | None = None) -> None:
        super().__init__("sgd")
        self.bad, self.vetoed = bad, vetoed

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        here = (self.global_rank, batch_idx)
        if here == self.vetoed:
            self.trainer.strategy.veto("the labels of shard 7 are shifted")
        x = batch["x"] * float("nan") if here in self.bad else batch["x"]
        return super().training_step({**batch, "x": x}, batch_idx)


class TroubledAndNormalised(Troubled):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(nn.BatchNorm1d(10), net()).double()


def fit(module: Module, rank: int, world_size: int, options: dict, path: str, resumes: bool) -> dict[str, Any]:
    callbacks = [] if resumes else [SaveAt(path, SAVED_BEHIND)]
    strategy = BucketedDDPStrategy(**options)
    trainer = trainer_of(strategy, world_size, max_epochs=1, accumulate_grad_batches=K, callbacks=callbacks)
    with Collects() as collected:
        trainer.fit(module, loader(of(world_size), rank), ckpt_path=path if resumes else None)
    return {
        "weights": flat(module.net),
        "digest": module.digests[-1],
        "skipped": strategy.skipped_steps,
        "dropped": strategy.dropped_parts,
        "said": collected.lines,
        "statistics": {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name},
    }


def fit_and_resume(rank: int, world_size: int, cls: type, trouble: tuple, options: dict, folder: str) -> list[dict]:
    """The uninterrupted run, and one that goes on from the checkpoint that it has written."""
    path = f"{folder}/within.ckpt"
    return [fit(cls(*trouble), rank, world_size, options, path, resumes) for resumes in (False, True)]


@pytest.mark.parametrize("vetoed", [(1, 4), (0, 4), (1, 5)])
def test_a_veto_cast_before_the_checkpoint_skips_the_step(
    pool: RankPool, vetoed: tuple[int, int], tmp_path: Path
) -> None:
    """Batch 4 is before it, batch 5 behind."""
    right = single_device(of(2), "samples", "sgd", K, 1, skip={STEP})
    for rank, runs in enumerate(pool.run(2, fit_and_resume, 2, Troubled, ((), vetoed), {}, str(tmp_path))):
        for result in runs:
            assert relative_error(result["weights"], right) < 1e-12
            assert result["skipped"] == 1
            (line,) = result["said"]
            assert f"vetoed: rank {vetoed[0]}: the labels of shard 7 are shifted" in line, rank
    taken = single_device(of(2), "samples", "sgd", K, 1)
    assert relative_error(taken, right) > 1e-3, "negative control"


# Of three ranks: who has a bad batch before the checkpoint, and behind it.
BAD = {
    "one before": ((1, 4),),
    "rank 0 before": ((0, 4),),
    "one before and one behind": ((2, 4), (0, 5)),
    "two before": ((0, 4), (2, 4)),
    "one behind": ((1, 5),),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_gradients_from_before_the_checkpoint_are_blamed_on_who_made_them(
    pool: RankPool, bad: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    right = single_device(of(3), "samples", "sgd", K, 1, skip={STEP})
    culprits = {rank for rank, _ in bad}
    for runs in pool.run(3, fit_and_resume, 3, Troubled, (bad,), {}, str(tmp_path)):
        for result in runs:
            assert relative_error(result["weights"], right) < 1e-12
            assert result["skipped"] == 1
            (line,) = result["said"]
            assert "non-finite gradient" in line
            assert {rank for rank in range(3) if f"rank {rank}: " in line} == culprits


def without(ranks: set[int]) -> Counts:
    """The counts with these ranks' part of the troubled step taken out."""
    counts = [list(by_rank) for by_rank in of(3)]
    for index in range(STEP * K, (STEP + 1) * K):
        for rank in ranks:
            counts[index][rank] = 0
    return counts


@pytest.mark.parametrize("name", ["one before", "rank 0 before", "two before"])
def test_such_a_rank_is_left_out_of_the_resumed_step_as_it_was_of_the_whole_one(
    pool: RankPool, name: str, tmp_path: Path
) -> None:
    bad = BAD[name]
    right = single_device(without({rank for rank, _ in bad}), "samples", "sgd", K, 1)
    results = pool.run(3, fit_and_resume, 3, Troubled, (bad,), {"nonfinite": "drop_rank"}, str(tmp_path))
    for runs in results:
        for result in runs:
            assert relative_error(result["weights"], right) < 1e-12
            assert (result["skipped"], result["dropped"]) == (0, len(bad))
            assert result["digest"] in [digest["digest"] for digest in results[0]]
    for other in (without(set()), without({0, 1, 2} - {rank for rank, _ in bad})):
        assert relative_error(single_device(other, "samples", "sgd", K, 1), right) > 1e-4, "negative control"


def statistics_after(seen: list[tuple[int, int]]) -> dict[str, Tensor]:
    """BatchNorm's after these micro-batches, by rank and number, of one process."""
    norm = nn.BatchNorm1d(10).double()
    for rank, index in seen:
        norm(samples(index, rank, COUNTS[index][rank])["x"])
    return {"net.0.running_mean": norm.running_mean, "net.0.running_var": norm.running_var}


@pytest.mark.parametrize("bad", [((0, 5),), ((1, 5),), ((1, 4),)])
def test_a_step_skipped_after_the_resume_leaves_the_statistics_of_the_windows_start(
    pool: RankPool, bad: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """A rank begins each step with rank 0's statistics; those of batches 4 and 5 are to be gone."""
    runs_of_ranks = pool.run(2, fit_and_resume, 2, TroubledAndNormalised, (bad,), {}, str(tmp_path))
    for rank, runs in enumerate(runs_of_ranks):
        right = statistics_after([(0, index) for index in range(4)] + [(rank, 6), (rank, 7)])
        for result in runs:
            assert result["skipped"] == 1
            for name, value in right.items():
                assert torch.equal(result["statistics"][name], value)
    stays = statistics_after([(0, index) for index in range(5)] + [(0, 6), (0, 7)])
    assert not torch.equal(stays["net.0.running_mean"], runs_of_ranks[0][0]["statistics"]["net.0.running_mean"])
