"""Lightning modules, data with given counts, and fits that the strategy tests share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_dp  # noqa: F401 - makes "bucketed_ddp" known

WIDTH = 10
CLASSES = 3
IGNORED = -100

# counts[i][r]: samples (or tokens) of micro-batch i on rank r.
Counts = Sequence[Sequence[int]]


def net() -> nn.Module:
    """A float64 net, the same on every call."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def samples(index: int, rank: int, count: int) -> dict[str, Tensor]:
    """A batch of ``count`` samples; which ones depends on micro-batch and rank only."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    # Targets that differ by rank and size make gradients differ enough for a wrong weight to show.
    return {"x": x, "y": torch.full((count, CLASSES), 0.3 * count - rank, dtype=torch.float64)}


def tokens(index: int, rank: int, count: int) -> dict[str, Tensor]:
    """A batch of 3 sequences of 4 tokens, of which ``count`` have a label."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.randn(12, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.full((12,), IGNORED)
    labels[torch.randperm(12, generator=generator)[:count]] = (count + rank) % CLASSES
    return {"x": x.view(3, 4, WIDTH), "labels": labels.view(3, 4)}


def whole_batch(index: int, by_rank: Sequence[int]) -> dict[str, Tensor]:
    """All ranks' samples of one micro-batch, as one device has them."""
    parts = [samples(index, rank, count) for rank, count in enumerate(by_rank)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over samples, or over the tokens that have a label (NaN if there are none)."""
    if "labels" in batch:
        logits = model(batch["x"].flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)
    return (model(batch["x"]) - batch["y"]).square().mean()


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class Batches(Dataset):
    """One rank's micro-batches."""

    def __init__(self, counts: Counts, rank: int, kind: str) -> None:
        make = {"samples": samples, "tokens": tokens}[kind]
        self.batches = [make(index, rank, by_rank[rank]) for index, by_rank in enumerate(counts)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batches[index]


class Module(LightningModule):
    """The net under automatic optimization; keeps a digest of the weights after each optimizer step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = net()
        self.optimizer = optimizer
        self.digests: list[bytes] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.digests.append(b"".join(p.detach().numpy().tobytes() for p in self.net.parameters()))

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.optimizer, self.parameters())


def trainer_of(strategy: Any, devices: int, **kwargs: Any) -> Trainer:
    """A quiet float64 trainer on CPU ranks."""
    warnings.simplefilter("ignore")
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    return Trainer(strategy=strategy, **{**settings, **kwargs})


def loader(counts: Counts, rank: int, kind: str = "samples") -> DataLoader:
    """This rank's micro-batches, in order."""
    return DataLoader(Batches(counts, rank, kind), batch_size=None)


def flat(model: nn.Module) -> Tensor:
    """All weights as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def relative_error(mine: Tensor, right: Tensor) -> float:
    """Norm of the difference over norm of what is right; infinite if ``mine`` is not finite."""
    error = float((mine - right).norm() / right.norm())
    return error if error == error else float("inf")


def single_device(counts: Counts, kind: str, optimizer: str, k: int, epochs: int, **options: Any) -> Tensor:
    """Weights of one process that sees, in each step, all ranks' micro-batches of the window as one batch.

    Plain PyTorch: no Lightning, no weighting, no reducer.

    Args:
        counts: Samples or tokens by micro-batch and rank.
        kind: ``"samples"`` or ``"tokens"``.
        optimizer: ``"sgd"`` or ``"adamw"``.
        k: Micro-batches per window; the last one of an epoch may be shorter.
        epochs: Passes over the micro-batches.
        **options: ``skip``, a set of step numbers that are left out; ``clip``, the largest gradient norm.
    """
    make = {"samples": samples, "tokens": tokens}[kind]
    model = net()
    opt = optimizer_of(optimizer, model.parameters())
    step = 0
    for _ in range(epochs):
        for start in range(0, len(counts), k):
            window = range(start, min(start + k, len(counts)))
            parts = [make(i, r, n) for i in window for r, n in enumerate(counts[i])]
            batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            if step not in options.get("skip", ()):
                opt.zero_grad()
                loss_of(model, batch).backward()
                if "clip" in options:
                    nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
                opt.step()
            step += 1
    return flat(model)
