"""A small convolutional classifier of digits."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class DigitsNet(LightningModule):
    """Two convolutions and two linear layers: (n, 1, 8, 8) images to (n, 10) logits.

    Args:
        channels: Channels of the first convolution; the second has twice as many.
        hidden: Width of the hidden linear layer.
        dropout: Share of features dropped before each linear layer in training.
        learning_rate: Peak learning rate of AdamW; it follows one cosine to zero over the run.
        weight_decay: Weight decay of AdamW.
    """

    def __init__(
        self,
        channels: int = 32,
        hidden: int = 128,
        dropout: float = 0.4,
        learning_rate: float = 5e-3,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 16, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )
        self.loss = nn.CrossEntropyLoss()
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (n, 10)."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        loss: Tensor = self.loss(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accumulates the accuracy over all ranks' images."""
        self._evaluate(batch, self.val_accuracy, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accumulates the accuracy over all ranks' images."""
        self._evaluate(batch, self.test_accuracy, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], accuracy: MulticlassAccuracy, stage: str) -> None:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/loss", self.loss(logits, labels), on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]
        """AdamW under a cosine schedule that moves with every optimizer step."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
