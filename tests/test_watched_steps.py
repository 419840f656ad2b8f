"""Verdicts where a batch is not one step of one optimizer: LBFGS, several optimizers, evaluation."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_runs import Counts, Module, flat, loader, loss_of, net, relative_error, trainer_of, whole_batch
from rank_pool import RankPool
from test_watch import Collects
from torch import Tensor, nn

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import ConfigurationError, LightningDPError, NonFiniteGradientError

COUNTS: Counts = [[4, 3], [3, 4], [2, 5], [4, 4], [3, 3], [5, 2]]


# ------------------------------------------------------------------------------------------- LBFGS


def lbfgs(parameters: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


class LineSearch(Module):
    """LBFGS; a batch can be bad or vetoed on some ranks."""

    def __init__(self, bad: tuple[int, int] | None = None, vetoed: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.bad, self.vetoed = bad, vetoed

    def configure_optimizers(self) -> Any:
        return lbfgs(self.parameters())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.vetoed == (self.global_rank, batch_idx):
            self.trainer.strategy.veto("not this one")
        return loss * float("nan") if self.bad == (self.global_rank, batch_idx) else loss


def fit(module: Any, rank: int, counts: Counts = COUNTS, **options: Any) -> tuple[Any, list[str]]:
    trainer = trainer_of(BucketedDDPStrategy(**options), 2, max_epochs=1)
    with Collects() as collected:
        trainer.fit(module, loader(counts, rank))
    return trainer.strategy, collected.lines


def fit_dropping(rank: int, bad: tuple[int, int]) -> tuple[Tensor, bytes, list[str]]:
    module = LineSearch(bad=bad)
    _, lines = fit(module, rank, nonfinite="drop_rank")
    return flat(module.net), module.digests[-1], lines


def one_device(counts: Counts) -> Tensor:
    """LBFGS in one process, on all ranks' samples of a micro-batch as one batch."""
    model = net()
    optimizer = lbfgs(model.parameters())
    for index, by_rank in enumerate(counts):
        batch = whole_batch(index, by_rank)

        def closure(batch: dict[str, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return flat(model)


@pytest.mark.parametrize("bad", [(0, 2), (1, 2), (1, 5)])
def test_lbfgs_goes_on_without_a_dropped_rank(pool: RankPool, bad: tuple[int, int]) -> None:
    """To 1e-8: it decides by differences of losses, which enlarges rounding."""
    results = pool.run(2, fit_dropping, bad)
    culprit, batch = bad
    counts = [[0 if (r, i) == (culprit, batch) else n for r, n in enumerate(row)] for i, row in enumerate(COUNTS)]
    right, undropped = one_device(counts), one_device(COUNTS)
    for weights, digest, _ in results:
        assert torch.isfinite(weights).all()
        assert digest == results[0][1]
        assert relative_error(weights, right) < 1e-8
        assert relative_error(weights, undropped) > 1e-4, "negative control"


def error_of_veto(rank: int, vetoed: tuple[int, int]) -> tuple[type, str, float]:
    start = time.monotonic()
    try:
        fit(LineSearch(vetoed=vetoed), rank)
    except Exception as error:
        return type(error), str(error), time.monotonic() - start
    return type(None), "", 0.0


@pytest.mark.parametrize("vetoed", [(0, 0), (1, 3)])
def test_a_veto_under_lbfgs_ends_the_run_on_all_ranks(pool: RankPool, vetoed: tuple[int, int]) -> None:
    culprit, batch = vetoed
    for kind, line, seconds in pool.run(2, error_of_veto, vetoed):
        assert kind is NonFiniteGradientError
        assert line.startswith(f"step {batch}, batch {batch}: vetoed: rank {culprit}: not this one")
        assert line.endswith("LBFGS cannot skip an evaluation")
        assert "\n" not in line
        assert seconds < 15, "no rank waits for the other until the group's timeout of 30 s"


def error_of_spikes(rank: int) -> tuple[type, str]:
    try:
        fit(LineSearch(), rank, spike_factor=20.0)
    except Exception as error:
        return type(error), str(error)
    return type(None), ""


def test_a_spike_rule_for_lbfgs_is_refused(pool: RankPool) -> None:
    for kind, line in pool.run(2, error_of_spikes):
        assert kind is ConfigurationError
        assert line.startswith("spike_factor cannot be used with LBFGS")
        assert "\n" not in line


# ------------------------------------------------------------------------------------------- several optimizers

LONG = [[4, 3]] * 60
EVERY = 5  # batches between steps of the rare optimizer
STEEP = 1000  # the rare loss is so many times as steep


class TwoOptimizers(LightningModule):
    """One optimizer steps in every batch, the other one rarely and with gradients that are much larger.

    Args:
        zeroes: ``"before"`` backward, so that the other's gradients are still there, ``"after"`` the step.
        odd: A batch in which the frequent loss is another one.
        factor: By so much.
    """

    def __init__(self, zeroes: str, odd: int | None, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.rare, self.frequent = nn.Linear(10, 1).double(), nn.Linear(10, 1).double()
        self.zeroes, self.odd, self.factor = zeroes, odd, factor
        self.moved: dict[str, list[int]] = {"rare": [], "frequent": []}

    def configure_optimizers(self) -> Any:
        # So slow that gradients stay what they are, but for the samples.
        return [torch.optim.SGD(layer.parameters(), lr=1e-7) for layer in (self.rare, self.frequent)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rare, frequent = self.optimizers()
        steepness = self.factor if batch_idx == self.odd else 1.0
        self.take_step("frequent", frequent, steepness, batch, batch_idx)
        if batch_idx % EVERY == EVERY - 1:
            self.take_step("rare", rare, STEEP, batch, batch_idx)

    def take_step(self, name: str, optimizer: Any, steepness: float, batch: dict[str, Tensor], batch_idx: int) -> None:
        layer = getattr(self, name)
        before = layer.weight.detach().clone()
        if self.zeroes == "before":
            optimizer.zero_grad()
        self.manual_backward(steepness * layer(batch["x"]).square().mean())
        optimizer.step()
        if self.zeroes == "after":
            optimizer.zero_grad()
        if not torch.equal(layer.weight, before):
            self.moved[name].append(batch_idx)


def fit_two(rank: int, zeroes: str, odd: int | None, factor: float) -> tuple[dict[str, list[int]], int, list[str]]:
    module = TwoOptimizers(zeroes, odd, factor)
    strategy, lines = fit(module, rank, LONG, spike_factor=10.0)
    return module.moved, strategy.skipped_steps, lines


@pytest.mark.parametrize("zeroes", ["before", "after"])
def test_what_is_usual_for_one_optimizer_is_no_spike_of_another(pool: RankPool, zeroes: str) -> None:
    for moved, skipped, lines in pool.run(2, fit_two, zeroes, None, 1.0):
        assert moved == {"frequent": list(range(60)), "rare": list(range(EVERY - 1, 60, EVERY))}
        assert (skipped, lines) == (0, [])


@pytest.mark.parametrize(
    ("zeroes", "odd", "factor", "reason"),
    [
        ("before", 41, 100.0, "vetoed: the gradient's norm"),
        ("after", 41, 100.0, "vetoed: the gradient's norm"),
        ("after", 44, 100.0, "vetoed: the gradient's norm"),  # the rare one steps in that batch, too
        ("before", 41, float("nan"), "non-finite gradient: rank 0: frequent."),
        ("after", 44, float("nan"), "non-finite gradient: rank 0: frequent."),
    ],
)
def test_one_step_of_one_optimizer_is_skipped(
    pool: RankPool, zeroes: str, odd: int, factor: float, reason: str
) -> None:
    """A spike of the frequent one is smaller than what is usual for the rare one.

    What the rare one's last step has left, which is not zeroed before its next, does not keep the verdict alive.
    """
    results = pool.run(2, fit_two, zeroes, odd, factor)
    for moved, skipped, _ in results:
        assert moved["frequent"] == [batch for batch in range(60) if batch != odd]
        assert moved["rare"] == list(range(EVERY - 1, 60, EVERY))
        assert skipped == 1
    (line,) = results[0][2]
    assert f"batch {odd}: {reason}" in line


class PilesUp(LightningModule):
    """From some batch on gradients are not zeroed, so that a step is taken on the sum of all since then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.layer = nn.Linear(10, 1).double()
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-7)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx < 30:
            optimizer.zero_grad()
        self.manual_backward(self.layer(batch["x"]).square().mean())
        self.norms.append(float(torch.cat([p.grad.flatten() for p in self.layer.parameters()]).norm()))
        optimizer.step()


def fit_piling_up(rank: int) -> tuple[list[float], int]:
    module = PilesUp()
    strategy, _ = fit(module, rank, LONG, spike_factor=10.0)
    return module.norms, strategy.skipped_steps


def test_gradients_of_earlier_steps_are_not_counted(pool: RankPool) -> None:
    for norms, skipped in pool.run(2, fit_piling_up):
        median = sorted(norms[:30])[15]
        assert max(norms[:30]) < 10 * median < max(norms[30:]), "with them there would be spikes"
        assert skipped == 0


# ------------------------------------------------------------------------------------------- not in a training step


class VetoesElsewhere(Module):
    """Tries to veto in an evaluation, and takes note of what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.global_rank == 0:
            self.told.append(error_of(self.trainer.strategy))


def error_of(strategy: Any) -> str:
    try:
        strategy.veto("bad")
    except LightningDPError as error:
        return str(error)
    return "no error"


def veto_elsewhere(rank: int) -> tuple[list[str], int, bytes]:
    module = VetoesElsewhere()
    strategy = BucketedDDPStrategy()
    trainer = trainer_of(strategy, 2, max_epochs=2, num_sanity_val_steps=1)
    told = [error_of(strategy)]
    trainer.fit(module, loader(COUNTS, rank), loader(COUNTS[:2], rank))
    told += [*module.told, error_of(strategy)]
    trainer.validate(module, loader(COUNTS[:1], rank), verbose=False)
    told += module.told[5:]
    return told, strategy.skipped_steps, module.digests[-1]


def test_a_veto_outside_of_a_training_step_is_refused(pool: RankPool) -> None:
    """Before and after fit, in the sanity check, in two validations of two batches, and in ``validate``."""
    results = pool.run(2, veto_elsewhere)
    assert [len(told) for told, _, _ in results] == [1 + 5 + 1 + 1, 2]
    for told, skipped, digest in results:
        assert set(told) == {"a veto is about a training step: cast it while a training batch is worked on"}
        assert skipped == 0
        assert digest == results[0][2]
