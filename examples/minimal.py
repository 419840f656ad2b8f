"""Any LightningModule on two processes: the strategy is one word of the Trainer.

python examples/minimal.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp  # noqa: F401 - makes strategy="bucketed_ddp" known to Lightning


class Line(LightningModule):
    """Fits y = slope * x + offset."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss of the batch, as on one device."""
        x, y = batch
        return nn.functional.mse_loss(self.linear(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Nothing here is about data parallelism either."""
        return torch.optim.SGD(self.parameters(), lr=0.2)


if __name__ == "__main__":  # Lightning starts the second process by running this file once more
    seed_everything(0, verbose=False)
    x = torch.linspace(-1, 1, 1000).unsqueeze(1)
    model = Line()
    trainer = Trainer(
        strategy="bucketed_ddp",
        devices=2,
        accelerator="cpu",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # 500 samples for each rank make 15 batches of 32 and one of 20, which weighs as much as its 20 samples.
    trainer.fit(model, DataLoader(TensorDataset(x, 3 * x - 1), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"learnt y = {model.linear.weight.item():.3f} x {model.linear.bias.item():+.3f}")
