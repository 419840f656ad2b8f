"""A callback that logs what the ranks agreed on and what communication cost."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dp.errors import ConfigurationError
from lightning_dp.strategy import BucketedDDPStrategy


class DataParallelMonitor(Callback):
    """Logs ``dp/skipped_steps``, ``dp/consecutive_skips``, ``dp/dropped_parts`` and ``dp/exposed_seconds`` of a step.

    With a bucket plan made by measurement ``dp/predicted_exposed_seconds``, too. They are the same on all ranks but for
    ``dp/exposed_seconds``, which is rank 0's, so logging them costs no message.
    Callbacks and modules that want to know of each skipped step itself define
    ``on_step_skipped(trainer, pl_module, verdict)``, which the strategy calls on every rank.

    Raises:
        ConfigurationError: If the Trainer has another strategy.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a strategy that has nothing to tell."""
        if not isinstance(trainer.strategy, BucketedDDPStrategy):
            raise ConfigurationError("DataParallelMonitor needs Trainer(strategy='bucketed_ddp')")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Logs after each batch, as often as the Trainer's ``log_every_n_steps`` says."""
        strategy: Any = trainer.strategy
        last = strategy.reducer.last
        values = {
            "skipped_steps": strategy.skipped_steps,
            "consecutive_skips": strategy.consecutive_skips,
            "dropped_parts": strategy.dropped_parts,
            "exposed_seconds": last.times.exposed if last is not None else 0.0,
        }
        if strategy.reducer.predicted_exposed is not None:
            values["predicted_exposed_seconds"] = strategy.reducer.predicted_exposed
        pl_module.log_dict({f"dp/{name}": float(value) for name, value in values.items()}, batch_size=1)
