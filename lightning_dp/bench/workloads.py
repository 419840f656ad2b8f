"""What is trained in a benchmark: modules whose ``forward(batch)`` is the loss, and a batch for each rank."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_dp.data.counts import as_count, resolve_count


class Workload(nn.Module):
    """A model together with its loss and its batches."""

    def make_batch(self, seed: int) -> Any:
        """A batch; another seed, another batch of the same size."""
        raise NotImplementedError

    def count(self, batch: Any) -> int:
        """What the batch weighs: its samples."""
        return as_count(resolve_count("samples")(batch), "bench")


class GPT(Workload):
    """A causal transformer over bytes.

    Args:
        depth: Number of blocks.
        width: Width of the residual stream; a block holds ``12 * width**2`` weights.
        heads: Attention heads.
        length: Tokens in a sequence.
        batch_size: Sequences in a batch.
        vocabulary: Different tokens.
    """

    def __init__(
        self,
        depth: int = 8,
        width: int = 384,
        heads: int = 6,
        length: int = 128,
        batch_size: int = 4,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self._size = (batch_size, length + 1)
        self._vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def make_batch(self, seed: int) -> Tensor:
        """Token indices of shape (batch size, length + 1)."""
        return torch.randint(self._vocabulary, self._size, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of each next token."""
        x = self.tokens(batch[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        heads = self.attention_in(self.before_attention(x)).view(n, length, 3, self._heads, width // self._heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.mlp(x)
        return out


class MLP(Workload):
    """Linear layers of equal width, with ReLUs between.

    Args:
        depth: Number of layers.
        width: Their width.
        batch_size: Samples in a batch.
    """

    def __init__(self, depth: int = 10, width: int = 1024, batch_size: int = 512) -> None:
        super().__init__()
        self._size = (batch_size, width)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def make_batch(self, seed: int) -> Tensor:
        """Normal numbers of shape (batch size, width)."""
        return torch.randn(self._size, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: Tensor) -> Tensor:
        """Mean square of the outputs."""
        out: Tensor = self.layers(batch)
        return out.square().mean()


class ConvNet(Workload):
    """A residual convolutional classifier of small images, with batch norm.

    Args:
        widths: Channels of each stage; a stage after the first halves the image.
        blocks: Residual blocks in a stage.
        side: Height and width of an image.
        batch_size: Images in a batch.
        classes: Classes.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        blocks: int = 2,
        side: int = 32,
        batch_size: int = 8,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self._size, self._classes = (batch_size, 3, side, side), classes
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False)]
        channels = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(_Residual(channels, width, stride=2 if stage and not block else 1))
                channels = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def make_batch(self, seed: int) -> list[Tensor]:
        """Images and labels."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self._size, generator=generator)
        return [images, torch.randint(self._classes, self._size[:1], generator=generator)]

    def forward(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(self.head(self.features(images).mean((2, 3))), labels)


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ManySmall(Workload):
    """Nothing but small parameters: what a reduction costs on the host for each of them.

    Args:
        parameters: How many.
        numel: Elements of each.
    """

    def __init__(self, parameters: int = 2000, numel: int = 64) -> None:
        super().__init__()
        self._numel = numel
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(numel)) for _ in range(parameters)])

    def make_batch(self, seed: int) -> Tensor:
        """One sample per batch."""
        return torch.randn(1, self._numel, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: Tensor) -> Tensor:
        """The batch scaled by every parameter in turn."""
        for scale in self.scales:
            batch = batch * scale
        return batch.square().mean()


class YourModule(Workload):
    """A LightningModule of your own: its ``training_step`` on the first batch of its training loader.

    ``self.log`` does nothing here, as no Trainer is at work, and the optimizer is the benchmark's.

    Args:
        module: The module.
        data: What has its ``train_dataloader``; a rank takes the first batch that its seed shuffles to the front.
        count: What a batch weighs: ``"samples"``, ``"tokens"``, ``"equal"``.
    """

    def __init__(self, module: LightningModule, data: LightningDataModule, count: str = "samples") -> None:
        super().__init__()
        self.module = module
        self._batch_count = resolve_count(count)
        data.prepare_data()
        data.setup("fit")
        # A list hides the data from torch, which would copy it with the module.
        self._loader = [data.train_dataloader()]

    def make_batch(self, seed: int) -> Any:
        """The first batch of an epoch."""
        torch.manual_seed(seed)
        return next(iter(self._loader[0]))

    def count(self, batch: Any) -> int:
        """As ``count`` says."""
        return as_count(self._batch_count(batch), "bench")

    def forward(self, batch: Any) -> Tensor:
        """The loss of ``training_step``."""
        output = self.module.training_step(batch, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        assert isinstance(loss, Tensor), "training_step returned no loss"
        return loss
