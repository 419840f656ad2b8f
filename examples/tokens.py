"""Sequences of different lengths: a micro-batch weighs as much as it has tokens, not sequences.

With count="tokens" every token of a step has the same weight, whichever rank and micro-batch it is in. The plain mean
of the ranks' gradients would favour the tokens of short sequences.

python examples/tokens.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_dp import BucketedDDPStrategy

SYMBOLS, NO_LABEL = 8, -100  # cross_entropy ignores labels of -100
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def collate(sequences: list[Tensor]) -> dict[str, Tensor]:
    """The label of a token is the symbol before it. "tokens" counts the entries of `labels` that are not -100."""
    labels = [nn.functional.pad(sequence[:-1], (1, 0), value=NO_LABEL) for sequence in sequences]
    return {
        "inputs": pad_sequence(sequences, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=NO_LABEL),
    }


class Echo(LightningModule):
    """Says what it heard one token ago."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(SYMBOLS, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, SYMBOLS)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the tokens that have a label."""
        logits = self.head(self.gru(self.embed(batch["inputs"]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=NO_LABEL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(0, verbose=False)
    sequences = [torch.randint(SYMBOLS, (int(length),)) for length in torch.randint(2, 40, (512,))]
    loader = DataLoader(sequences, batch_size=16, shuffle=True, collate_fn=collate)
    model, strategy = Echo(), BucketedDDPStrategy(count="tokens")
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=6, accumulate_grad_batches=2, **QUIET)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        everything = collate(sequences)
        print(f"loss {model.training_step(everything, 0):.4f}", f"tokens {(everything['labels'] != NO_LABEL).sum()}")
        print(strategy.report())
