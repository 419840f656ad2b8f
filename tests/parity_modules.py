"""Lightning modules of every kind, each of which computes on ranks what it computes on one device.

A sample knows which rank it is on (``batch["from"]``), so that one device, which sees all samples, can treat each one
as its rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_runs import CLASSES, WIDTH, Counts, samples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


class Batches(Dataset):
    """One rank's micro-batches, or with ``rank=None`` those of one device: all ranks' samples."""

    def __init__(self, counts: Counts, rank: int | None) -> None:
        self.counts, self.rank = counts, rank

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        by_rank = self.counts[index]
        ranks = range(len(by_rank)) if self.rank is None else [self.rank]
        parts = [{**samples(index, rank, by_rank[rank]), "from": torch.full((by_rank[rank],), rank)} for rank in ranks]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def linear(*sizes: int) -> nn.Sequential:
    """Linear layers with Tanh between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def squares(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out - batch["y"]).square().mean()


def bits(parameter: Tensor) -> bytes:
    return parameter.detach().flatten().view(torch.uint8).numpy().tobytes()


class Base(LightningModule):
    """A small net under SGD with momentum; keeps its weights after each micro-batch."""

    adam = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = linear(WIDTH, 16, 16, CLASSES)
        self.history: list[bytes] = []
        self.build()
        self.double()

    def build(self) -> None:
        """Makes what a subclass has beside the net."""

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        return squares(self.output(batch, batch_idx), batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(b"".join(bits(p) for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


# ------------------------------------------------------------------------------------------- graphs that differ


def by_group(group: Tensor, branches: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Sends each sample through the branch that its group names; a branch without samples is not run."""
    out = x.new_zeros(len(x), CLASSES)
    for number, branch in enumerate(branches):
        rows = (group % len(branches) == number).nonzero().flatten()
        if len(rows):
            out = out.index_copy(0, rows, branch(x[rows]))
    return out


class Branches(Base):
    """Which branch a sample takes depends on rank and step; AdamW moves what has a gradient, and nothing else."""

    adam = True

    def build(self) -> None:
        self.branches = nn.ModuleList(linear(WIDTH, 8, CLASSES) for _ in range(2))

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"]) + by_group(batch["from"] + batch_idx, list(self.branches), batch["x"])


class PartlyUsed(Base):
    """How deep a sample goes depends on rank and step."""

    adam = True

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def deep(self, depth: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for layer in self.layers[:depth]:
                x = torch.tanh(layer(x))
            return self.net(x)

        return run

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return by_group(batch["from"] + batch_idx, [self.deep(depth) for depth in range(4)], batch["x"])


class MissingTerm(Base):
    """Only samples of rank 0 have the second term of the loss."""

    def build(self) -> None:
        self.head = linear(WIDTH, 4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        x = batch["x"][batch["from"] == 0]
        return loss + self.head(x).square().mean(1).sum() / len(batch["x"]) if len(x) else loss


class EarlyOnly(Base):
    """A layer is used in the first micro-batch of a window of two, and not in the one that synchronises."""

    adam = True

    def build(self) -> None:
        self.early = linear(WIDTH, 8, CLASSES)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch["x"])
        return out if batch_idx % 2 else out + self.early(batch["x"])


class OtherOrder(Base):
    """Rank 0 computes its towers in the other order, so their gradients come in the other order."""

    def build(self) -> None:
        self.towers = nn.ModuleList(linear(WIDTH, 16, CLASSES) for _ in range(2))

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first = int(batch["from"][0] == 0)
        outs = {number: self.towers[number](batch["x"]) for number in (first, 1 - first)}
        return self.net(batch["x"]) + outs[0] + outs[1]


class Tied(Base):
    """Two layers share a weight, and one is called twice."""

    def build(self) -> None:
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(torch.tanh(self.a(torch.tanh(self.b(torch.tanh(self.a(batch["x"])))))))


class NobodyUses(Base):
    """Weight decay would move a parameter whose gradient is 0 and not None."""

    adam = True

    def build(self) -> None:
        self.idle = nn.Linear(3, 3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.idle.weight.grad is None
        assert self.idle.bias.grad is None


class UsedAtFirst(Base):
    """A layer that takes part in the first step only keeps still afterwards."""

    adam = True

    def build(self) -> None:
        self.first = linear(WIDTH, CLASSES)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch["x"])
        return out if self.global_step else out + self.first(batch["x"])


# ------------------------------------------------------------------------------------------- manual optimization


class Manual(Base):
    """One ``manual_backward`` and one step for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()

    def loss(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return squares(self.output(batch, batch_idx), batch)


class TwoBackwards(Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        self.manual_backward(self.net(batch["x"]).square().mean())
        optimizer.step()


class NotZeroed(Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx) / 8)
        self.optimizers().step()


class ZeroedInPlace(Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class CreateGraph(Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx), create_graph=True)
        optimizer.step()


class ManualClosure(Manual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class SyncGrad(Manual):
    """``toggle_model(sync_grad=False)`` in the first of two micro-batches."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = bool(batch_idx % 2)
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch, batch_idx) / 2)
            if last:
                optimizer.step()
                optimizer.zero_grad()


class Gan(Manual):
    """A critic that accumulates over two batches, and a generator that steps on each, both toggled."""

    def build(self) -> None:
        self.critic = linear(CLASSES, 8, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.02), torch.optim.AdamW(self.critic.parameters(), lr=0.01)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        self.toggle_optimizer(critic)
        with self.accumulating(bool(batch_idx % 2 == 0)):
            fake = self.critic(self.net(batch["x"]).detach())
            self.manual_backward((fake - self.critic(batch["y"])).mean() / 2)
        if batch_idx % 2:
            critic.step()
            critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        self.manual_backward(-self.critic(self.net(batch["x"])).mean() + self.loss(batch, batch_idx))
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

    def accumulating(self, on: bool) -> AbstractContextManager:
        block = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)  # one device has none
        return block() if on else nullcontext()


# ------------------------------------------------------------------------------------------- freezing and thawing


class Finetuned(Base):
    """What the BackboneFinetuning callback expects."""

    def build(self) -> None:
        self.backbone = linear(WIDTH, 12, WIDTH)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(self.backbone(batch["x"]))

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


class FreezesAndThaws(Base):
    """Parameters are frozen in the odd epochs."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch % 2 == 0)


class OtherStorage(Base):
    """Parameters are given other memory in mid-training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for p in self.parameters():
                p.data = p.data.clone()


# ------------------------------------------------------------------------------------------- backward of other kinds


class Checkpointed(Base):
    """Two reentrant checkpoints share a block."""

    reentrant = True

    def build(self) -> None:
        self.block = linear(WIDTH, 12, WIDTH)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].requires_grad_()
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.net(x)


class CheckpointedOtherwise(Checkpointed):
    reentrant = False


class OwnBackward(Base):
    """``backward`` is overridden and calls ``.backward()`` twice."""

    def backward(self, loss: Tensor) -> None:
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()


class GradientPenalty(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return squares(out, batch) + 0.1 * slope.square().sum(1).mean()


class Lbfgs(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")


# ------------------------------------------------------------------------------------------- parameters of other kinds


class SparseTable(Base):
    """A sparse embedding that only rank 0 looks into, from the second step on, and one that nobody does."""

    def build(self) -> None:
        self.table = nn.Embedding(9, CLASSES, sparse=True)
        self.unread = nn.Embedding(9, CLASSES, sparse=True)

    def look_up(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].abs().mul(3).long().clamp(max=8))

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out, at = self.net(batch["x"]), (batch["from"] == 0).nonzero().flatten()
        return out.index_add(0, at, self.look_up(batch["x"][at])) if self.global_step and len(at) else out

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02)


class Kinds(Base):
    """Complex, zero-size, scalar and transposed parameters; channels_last and 1x1 convolutions."""

    def build(self) -> None:
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(CLASSES, WIDTH).t())
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(4, 2, 1).to(memory_format=torch.channels_last)

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        image = x[:, :8].reshape(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        seen = self.pointwise(torch.tanh(self.conv(image))).mean((1, 2, 3)) * self.scale
        turned = torch.tanh((self.phase * x).real) @ self.turned
        return self.net(x) + turned + seen[:, None] + self.empty.sum()


class Dtypes(Base):
    """A float32 layer in a float64 net."""

    def build(self) -> None:
        self.single = nn.Linear(WIDTH, CLASSES)

    def double(self) -> Any:
        self.net.double()
        return self

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"]) + self.single(batch["x"].float()).double()


class LowPrecision(Base):
    """Float32, unless the Trainer says otherwise."""

    def double(self) -> Any:
        return self

    def output(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"].to(self.net[0].weight.dtype)).double()


class CompiledBlocks(Base):
    def build(self) -> None:
        for layer in self.net:
            layer.compile(backend="aot_eager")
