"""Scikit-learn's handwritten digits: 1,797 real 8 x 8 images in ten classes, no download."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

TRAIN, VALIDATION, TEST = 1296, 201, 300


class DigitsDataModule(LightningDataModule):
    """The digits, split by class into 1,296 images to train, 201 to validate and 300 to test on.

    Args:
        batch_size: Images per micro-batch and rank.
        num_workers: Loader processes per rank.
        split_seed: Seed of the split; the same on all ranks.
    """

    def __init__(self, batch_size: int = 16, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self._sets: dict[str, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        """Loads and splits the images; pixels are scaled to [0, 1], shape (1, 8, 8)."""
        if self._sets:
            return
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError("the digits come with scikit-learn: pip install 'lightning-dp[examples]'") from error
        images, labels = load_digits(return_X_y=True)
        seed = self.hparams["split_seed"]
        rest, test, rest_labels, test_labels = train_test_split(
            images, labels, test_size=TEST, stratify=labels, random_state=seed
        )
        train, validation, train_labels, validation_labels = train_test_split(
            rest, rest_labels, test_size=VALIDATION, stratify=rest_labels, random_state=seed
        )
        for name, x, y in (
            ("train", train, train_labels),
            ("validation", validation, validation_labels),
            ("test", test, test_labels),
        ):
            pixels = torch.tensor(x, dtype=torch.float32).div_(16).view(-1, 1, 8, 8)
            self._sets[name] = TensorDataset(pixels, torch.tensor(y, dtype=torch.long))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches ``(images, labels)`` of shapes (n, 1, 8, 8) and (n,), shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """As :meth:`train_dataloader`, in order."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """As :meth:`train_dataloader`, in order."""
        return self._loader("test")

    def _loader(self, name: str, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self._sets[name],
            batch_size=self.hparams["batch_size"],
            num_workers=self.hparams["num_workers"],
            shuffle=shuffle,
        )
