"""A run that is stopped within an epoch and goes on: no sample repeated, none missed, the same bits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning_runs import Batches, Counts, Module, flat, loss_of, optimizer_of, relative_error, samples, trainer_of
from rank_pool import RankFailureError, RankPool
from test_uneven import Rows, counts_of, loader_of
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp import BucketedDDPStrategy
from lightning_dp.last_saves import GRACE, LastSaves

SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.001}
EPOCHS = 3


class Watching(Module):
    """Keeps what each real step saw, by epoch."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.seen: dict[int, list[Any]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        parts = list(batch.values()) if "beside" in batch else [batch]  # of several loaders
        if not self.trainer.strategy.is_padding_batch:
            for part in parts:
                what = part["index"].tolist() if "index" in part else [round(float(part["x"].sum()), 9)]
                self.seen.setdefault(self.trainer.current_epoch, []).extend(what)
        return sum(loss_of(self.net, part) for part in parts)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.optimizer, self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DrawsRandomNumbers(Watching):
    """With dropout, whose masks come from torch's global generator."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = {**batch, "x": torch.nn.functional.dropout(batch["x"], 0.5)}
        return super().training_step(batch, batch_idx)


class AsksForSteps(Watching):
    """Asks for the number of steps while optimizers are made, which loads the loaders before the checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class SaveAndStop(Callback):
    """Saves after a number of optimizer steps, and stops there if told to."""

    def __init__(self, path: str, step: int, stop: bool) -> None:
        self.path, self.step, self.stop = path, step, stop

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)
            if self.stop:
                raise KeyboardInterrupt


class Stateful:
    """A loader with a state of its own, in an order that only it knows."""

    def __init__(self, counts: Counts, rank: int) -> None:
        self.batches = [b for b in Batches(counts, rank, "samples").batches if len(b["x"])]
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[-self.next]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class SizedStateful(Stateful):
    def __len__(self) -> int:
        return len(self.batches)


def make_loader(kind: str, rank: int, lengths: tuple[int, ...]) -> Any:
    if kind == "dealt out":
        return DataLoader(Rows(23), batch_size=2, shuffle=True)
    if kind == "dealt out by workers":
        # Not forked: a rank has threads of its own, and a fork of a process with threads can hang.
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
        return DataLoader(Rows(23), batch_size=2, shuffle=True, **workers)
    if kind == "shuffled by itself":  # by the global generator, which stands elsewhere in the resumed process
        return DataLoader(Batches(counts_of(lengths), rank, "samples").batches[: lengths[rank]], None, shuffle=True)
    if kind == "shuffled by its own generator":
        generator = torch.Generator().manual_seed(5 + rank)
        batches = Batches(counts_of(lengths), rank, "samples").batches[: lengths[rank]]
        return DataLoader(batches, None, shuffle=True, generator=generator)
    if kind == "stateful":
        return Stateful(counts_of(lengths), rank)
    if kind in ("joint", "joint, stateful"):  # the second one ends early and is begun anew
        first: Any = DataLoader(Rows(23), batch_size=2, shuffle=True)
        if kind == "joint, stateful":
            first = SizedStateful(counts_of(lengths), rank)
        return {"first": first, "beside": DataLoader(Rows(7), batch_size=1, shuffle=True)}
    if kind == "stateful, sized":
        return SizedStateful(counts_of(lengths), rank)
    return loader_of(kind, counts_of(lengths), rank)


def run(
    rank: int, world_size: int, kind: str, k: int, callbacks: list[Callback], resume_from: str | None, cls: type
) -> tuple[Watching, Trainer]:
    torch.manual_seed(17 + rank + (100 if resume_from else 0))
    module = cls()
    strategy = BucketedDDPStrategy(**SMALL_BUCKETS)
    trainer = trainer_of(
        strategy,
        world_size,
        max_epochs=EPOCHS,
        accumulate_grad_batches=k,
        callbacks=callbacks,
        use_distributed_sampler=True,
    )
    loader = make_loader(kind, rank, (7, 3, 5)[:world_size])
    trainer.fit(module, loader, ckpt_path=resume_from)
    return module, trainer


def stop_and_resume(rank: int, world_size: int, kind: str, k: int, step: int, folder: str, cls: type) -> dict:
    path = f"{folder}/at.ckpt"
    whole, whole_trainer = run(rank, world_size, kind, k, [], None, cls)
    first: Watching
    try:
        first, _ = run(rank, world_size, kind, k, [KeepModule(), SaveAndStop(path, step, stop=True)], None, cls)
    except (KeyboardInterrupt, SystemExit):
        first = KeepModule.module
    resumed, trainer = run(rank, world_size, kind, k, [], path, cls)
    return {
        "same bits": torch.equal(flat(whole.net), flat(resumed.net)),
        "steps": (whole_trainer.global_step, trainer.global_step),
        "epochs": (whole_trainer.current_epoch, trainer.current_epoch),
        "whole": whole.seen,
        "first": first.seen,
        "resumed": resumed.seen,
        "loads": sorted(torch.load(path, weights_only=True)["lightning_dp"]),
        "counts": (whole_trainer.strategy.report().count, trainer.strategy.report().count),
    }


class KeepModule(Callback):
    """Lets the test look at a module whose fit ended early."""

    module: Watching

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        KeepModule.module = pl_module


KINDS = ["dealt out", "map", "iterable", "shuffled by itself", "shuffled by its own generator"]
KINDS += ["stateful", "stateful, sized", "joint", "joint, stateful"]
CASES = [(kind, k, step) for kind in KINDS for k, step in ((1, 1), (1, 5), (2, 3))]


@pytest.mark.parametrize(("kind", "k", "step"), [*CASES, ("dealt out by workers", 1, 4)])
def test_a_resumed_epoch_is_the_uninterrupted_one(pool: RankPool, kind: str, k: int, step: int, tmp_path: Path) -> None:
    world_size = 2 if kind == "dealt out by workers" else 3  # workers take seconds to start
    arguments = (world_size, kind, k, step, str(tmp_path), Watching)
    results = pool.run(world_size, stop_and_resume, *arguments, timeout=150)
    for result in results:
        assert result["same bits"]
        assert result["steps"][0] == result["steps"][1]
        assert result["epochs"][0] == result["epochs"][1]
        assert result["counts"][0] == result["counts"][1]
        together = {epoch: result["first"].get(epoch, []) + result["resumed"].get(epoch, []) for epoch in range(EPOCHS)}
        assert together == {epoch: result["whole"].get(epoch, []) for epoch in range(EPOCHS)}
        assert "loaders" in result["loads"]
        sizes = {epoch: len(result["whole"].get(epoch, [])) for epoch in range(EPOCHS)}
        assert len(set(sizes.values())) == 1, "every epoch is whole"
    assert any(result["first"] and result["resumed"] for result in results)


@pytest.mark.parametrize("step", [3, 4, 5, 8])
def test_a_checkpoint_at_or_beside_the_end_of_an_epoch(pool: RankPool, step: int, tmp_path: Path) -> None:
    """23 samples on 3 ranks in batches of 2 are 4 steps an epoch."""
    for result in pool.run(3, stop_and_resume, 3, "dealt out", 1, step, str(tmp_path), Watching):
        assert result["same bits"]
        assert result["steps"] == (12, 12)


def test_loaders_that_were_there_before_the_checkpoint_go_on_too(pool: RankPool, tmp_path: Path) -> None:
    for result in pool.run(3, stop_and_resume, 3, "dealt out", 1, 2, str(tmp_path), AsksForSteps):
        assert result["same bits"]
        assert result["steps"] == (12, 12)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("kind", ["dealt out", "map", "shuffled by itself", "stateful, sized"])
def test_a_model_that_draws_random_numbers_draws_the_same(pool: RankPool, kind: str, step: int, tmp_path: Path) -> None:
    for result in pool.run(3, stop_and_resume, 3, kind, 1, step, str(tmp_path), DrawsRandomNumbers):
        assert result["same bits"]


class SaveWithinWindow(Callback):
    """Saves after a number of micro-batches, and stops there if told to."""

    def __init__(self, path: str, after: int) -> None:
        self.path, self.after, self.batches = path, after, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.batches += 1
        if self.batches == self.after:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def stop_within_window(rank: int, kind: str, after: int, folder: str) -> tuple:
    path = f"{folder}/at.ckpt"
    whole, whole_trainer = run(rank, 3, kind, 3, [], None, Watching)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        run(rank, 3, kind, 3, [SaveWithinWindow(path, after)], None, Watching)
    resumed, trainer = run(rank, 3, kind, 3, [], path, Watching)
    saved = torch.load(path, weights_only=True)
    if rank == 0:
        saved["lightning_dp"]["window"] = None
        torch.save(saved, f"{folder}/without.ckpt")
    torch.distributed.barrier()
    without, _ = run(rank, 3, kind, 3, [], f"{folder}/without.ckpt", Watching)
    right = flat(whole.net)
    errors = relative_error(flat(resumed.net), right), relative_error(flat(without.net), right)
    counts = whole_trainer.strategy.report().count, trainer.strategy.report().count
    return *errors, resumed.digests[-1], counts


@pytest.mark.parametrize(("kind", "after"), [("dealt out", 2), ("iterable", 4), ("map", 5)])
def test_a_checkpoint_within_an_accumulation_window_holds_its_gradients(
    pool: RankPool, kind: str, after: int, tmp_path: Path
) -> None:
    """To rounding, not to the bit: the ranks' parts have been added up before the rest of the window came."""
    results = pool.run(3, stop_within_window, kind, after, str(tmp_path))
    for error, without, digest, counts in results:
        assert error < 1e-12
        assert without > 1e-6, "negative control: the gradients of the window are missed"
        assert digest == results[0][2]
        assert counts[0] == counts[1]


# ------------------------------------------------------------------------------------------- another world size


def save_within_epoch(rank: int, world_size: int, kind: str, step: int, path: str) -> dict[int, list[int]]:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        run(rank, world_size, kind, 1, [KeepModule(), SaveAndStop(path, step, stop=True)], None, Watching)
    return KeepModule.module.seen


def go_on(rank: int, world_size: int, kind: str, path: str, cls: type) -> tuple[dict[int, list[int]], int, list[bytes]]:
    module, trainer = run(rank, world_size, kind, 1, [], path, cls)
    return module.seen, trainer.global_step, module.digests


@pytest.mark.parametrize("cls", [Watching, AsksForSteps])
@pytest.mark.parametrize(
    ("before", "after", "step"), [(3, 2, 2), (2, 3, 2), (3, 1, 1), (1, 3, 9), (2, 4, 8), (4, 2, 4)]
)
def test_at_another_world_size_the_rest_of_the_epoch_is_what_was_not_seen(
    pool: RankPool, before: int, after: int, step: int, cls: type, tmp_path: Path
) -> None:
    path = str(tmp_path / "at.ckpt")
    first = pool.run(before, save_within_epoch, before, "dealt out", step, path)
    second = pool.run(after, go_on, after, "dealt out", path, cls)
    per_epoch = -(-23 // (2 * before))
    epoch, within = divmod(step, per_epoch)
    assert within, "the test is of checkpoints within an epoch"
    seen = sorted(i for by_rank in first for i in by_rank.get(epoch, []))
    rest = sorted(i for by_rank, _, _ in second for i in by_rank[epoch])
    assert len(seen) == within * 2 * before
    assert sorted(seen + rest) == list(range(23))
    for later in range(epoch + 1, EPOCHS):
        assert sorted(i for by_rank, _, _ in second for i in by_rank[later]) == list(range(23))
    left = -(-(23 - len(seen)) // (2 * after))
    for _, steps, digests in second:
        assert steps == step + left + (EPOCHS - epoch - 1) * -(-23 // (2 * after))
        assert digests == second[0][2]


def test_loaders_of_the_users_own_refuse_another_world_size_within_an_epoch(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "at.ckpt")
    pool.run(3, save_within_epoch, 3, "map", 2, path)
    with pytest.raises(RankFailureError, match="was written within an epoch by 3 ranks and there are 2 now"):
        pool.run(2, go_on, 2, "map", path, Watching)


# ------------------------------------------------------------------------------------------- where an epoch ends


class SaveAtEpochEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def resume_after_shortened_epoch(rank: int, kind: str, options: dict, path: str) -> tuple:
    def once(epochs: int, callbacks: list[Callback], resume_from: str | None, **more: Any) -> tuple[Watching, Trainer]:
        module = Watching()
        settings = {"max_epochs": epochs, **options, **more, "use_distributed_sampler": True}
        trainer = trainer_of(BucketedDDPStrategy(), 2, callbacks=callbacks, **settings)
        trainer.fit(module, make_loader(kind, rank, (7, 3)), ckpt_path=resume_from)
        return module, trainer

    whole, _ = once(2, [], None)
    once(1, [SaveAtEpochEnd(path)], None)
    resumed, trainer = once(2, [], path)
    return whole.seen.get(1), resumed.seen.get(1), torch.equal(flat(whole.net), flat(resumed.net)), trainer.global_step


@pytest.mark.parametrize("kind", ["dealt out", "map", "iterable"])
def test_an_epoch_that_a_limit_ended_is_followed_by_a_whole_one(pool: RankPool, kind: str, tmp_path: Path) -> None:
    options = {"limit_train_batches": 2}
    for whole, resumed, same, steps in pool.run(
        2, resume_after_shortened_epoch, kind, options, str(tmp_path / "at.ckpt")
    ):
        assert resumed == whole
        assert same
        assert steps == 4


class EndlessStream:
    """Goes on where it stood; ranks stand elsewhere."""

    def __init__(self, rank: int) -> None:
        self.next = 100 * rank

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.next += 1
            yield {**samples(self.next, 0, 2), "index": torch.tensor([self.next])}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def resume_a_stream(rank: int, path: str) -> tuple:
    def once(epochs: int, callbacks: list[Callback], resume_from: str | None) -> Watching:
        module = Watching()
        trainer = trainer_of(BucketedDDPStrategy(), 2, max_epochs=epochs, limit_train_batches=3, callbacks=callbacks)
        trainer.fit(module, EndlessStream(rank if resume_from is None else 7), ckpt_path=resume_from)
        return module

    whole = once(2, [], None)
    once(1, [SaveAtEpochEnd(path)], None)
    resumed = once(2, [], path)
    return whole.seen.get(1), resumed.seen.get(1), torch.equal(flat(whole.net), flat(resumed.net))


def test_a_stream_goes_on_where_it_stood_on_each_rank(pool: RankPool, tmp_path: Path) -> None:
    for rank, (whole, resumed, same) in enumerate(pool.run(2, resume_a_stream, str(tmp_path / "at.ckpt"))):
        assert resumed == whole
        assert {index // 100 for index in whole} == {rank}
        assert same


def resume_after_max_steps(rank: int, path: str) -> tuple:
    first = Watching()
    trainer = trainer_of(
        BucketedDDPStrategy(),
        2,
        max_steps=4,
        max_epochs=-1,
        use_distributed_sampler=True,
        callbacks=[SaveAtEpochEnd(path)],
    )
    trainer.fit(first, make_loader("dealt out", rank, (7, 3)))
    second = Watching()
    trainer = trainer_of(BucketedDDPStrategy(), 2, max_steps=10, max_epochs=-1, use_distributed_sampler=True)
    trainer.fit(second, make_loader("dealt out", rank, (7, 3)), ckpt_path=path)
    return first.seen, second.seen


def test_an_epoch_that_max_steps_cut_is_finished_first(pool: RankPool, tmp_path: Path) -> None:
    """4 of 6 steps, then to step 10: the 2 that are left, as Lightning counts, and 4 of the next epoch."""
    results = pool.run(2, resume_after_max_steps, str(tmp_path / "at.ckpt"))
    assert sorted(i for first, second in results for i in first[0] + second[0]) == list(range(23))
    next_epoch = [i for _, seen in results for i in seen[1]]
    assert len(next_epoch) == len(set(next_epoch)) == 4 * 2 * 2


class Fails(Watching):
    """Ends with an error on both ranks at step 3, as a crash does."""

    at = 3

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.at:
            raise ArithmeticError("enough")
        return super().training_step(batch, batch_idx)


def resume_after_error(rank: int, folder: str, seeds: tuple[int, int]) -> tuple:
    import os

    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    def once(cls: type, callbacks: list[Callback], resume_from: str | None) -> Watching:
        module = KeepModule.module = cls()
        trainer = trainer_of(
            BucketedDDPStrategy(),
            2,
            max_epochs=2,
            use_distributed_sampler=True,
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
        )
        trainer.fit(module, make_loader("dealt out", rank, (7, 3)), ckpt_path=resume_from)
        return module

    whole = once(Watching, [], None)
    os.environ["PL_GLOBAL_SEED"] = str(seeds[0])
    try:
        with contextlib.suppress(ArithmeticError):
            once(Fails, [OnExceptionCheckpoint(folder, "last")], None)
        first = KeepModule.module
        # Another seed of the process, and on each rank another one: what the checkpoint says holds.
        os.environ["PL_GLOBAL_SEED"] = str(seeds[1] + rank)
        resumed = once(Watching, [], f"{folder}/last.ckpt")
    finally:
        del os.environ["PL_GLOBAL_SEED"]
    return first.seen, resumed.seen, whole.seen, torch.equal(flat(whole.net), flat(resumed.net))


def test_a_checkpoint_written_after_an_error_knows_its_place(pool: RankPool, tmp_path: Path) -> None:
    for first, resumed, whole, same in pool.run(2, resume_after_error, str(tmp_path), (0, 0)):
        assert first[0] + resumed[0] == whole[0]
        assert same


def test_a_resumed_epoch_keeps_its_seed_whatever_the_processes_have(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(2, resume_after_error, str(tmp_path), (0, 41))
    seen = sorted(i for first, resumed, _, _ in results for i in first[0] + resumed[0])
    assert seen == list(range(23))


# ------------------------------------------------------------------------------------------- after an exception

PATIENCE = 12  # seconds that a rank waits in a collective
SAVING = 2.0  # seconds that a checkpoint takes to be written


class FailsOnSome(Module):
    """Raises in its third batch on some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks
        self.failed_at = float("nan")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank in self.ranks and batch_idx == 2:
            self.failed_at = time.monotonic()
            raise ZeroDivisionError("the rank's own error")
        return super().training_step(batch, batch_idx)


class SlowWriter(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SAVING)
        super().save_checkpoint(*args, **kwargs)


def fail(rank: int, ranks: tuple[int, ...], strategy: str, folder: Path, waits: bool = True) -> tuple[str, float, bool]:
    """How the fit ends, how long after the rank's own failure, and whether the checkpoint is there by then."""
    saving = ModelCheckpoint(folder, save_on_exception=True, save_last="link", every_n_train_steps=100)
    settings = dict(max_epochs=1, callbacks=[saving], enable_checkpointing=True, plugins=[SlowWriter()])
    trainer, module = trainer_of(strategy, 2, **settings), FailsOnSome(ranks)
    data = DataLoader(Batches([[2, 2]] * 4, rank, "samples"), batch_size=None)
    with contextlib.nullcontext() if waits else mock.patch.object(LastSaves, "end", lambda saves: None):
        try:
            trainer.fit(module, data)
        except Exception as error:
            return type(error).__name__, time.monotonic() - module.failed_at, (folder / "last.ckpt").exists()
    return "", 0.0, False


def test_a_rank_that_saves_when_it_fails_does_not_wait_for_ranks_that_have_not(pool: RankPool, tmp_path: Path) -> None:
    (others, *_), (own, took, _) = pool.run(2, fail, (1,), "bucketed_ddp", tmp_path, group_timeout=PATIENCE)
    assert own == "ZeroDivisionError"
    assert took < PATIENCE - 2
    assert others == "CommunicationError"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_with_stock_ddp_its_error_is_lost_while_it_waits(pool: RankPool, tmp_path: Path) -> None:
    """Negative control."""
    _, (own, took, _) = pool.run(2, fail, (1,), "ddp", tmp_path, group_timeout=PATIENCE)
    assert own != "ZeroDivisionError"
    assert took >= PATIENCE - 2


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_fail_together_stay_until_rank_0_has_written(pool: RankPool, tmp_path: Path, waits: bool) -> None:
    for rank, (own, took, is_there) in enumerate(pool.run(2, fail, (0, 1), "bucketed_ddp", tmp_path, waits)):
        assert own == "ZeroDivisionError"
        assert is_there is (waits or rank == 0)  # without waiting rank 1 is gone before: the control
        assert took < SAVING + GRACE
