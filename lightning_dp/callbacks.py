"""Callbacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_dp.after_batch import AfterBatch, more_follows
from lightning_dp.cluster.requeue import Requeued, requeue
from lightning_dp.errors import ConfigurationError
from lightning_dp.stop_signals import StopSignals
from lightning_dp.strategy import BucketedDDPStrategy

FILE = "stopped.ckpt"
MOST_PASSED = 2  # steps that are not stopped at, as more than the next step follows: a validation, the epoch's end


class StoppedBySignal(SystemExit):
    """Ends the program after all ranks have stopped at the same step; as a ``SystemExit``, without a stack trace."""


class SafeRequeue(Callback):
    """Stops all ranks after the same optimizer step when any of them gets a signal, saves, and requeues the job once.

    The signal's handler only takes note of it. All ranks agree in the ballot of an optimizer step (under strategies
    without one, in a message of its own), write one checkpoint, rank 0 asks SLURM to start the job again, and the
    program ends. Started again in the same folder, the run goes on from there::

        requeue = SafeRequeue("runs/my-run")
        trainer = Trainer(strategy="bucketed_ddp", callbacks=[requeue], ...)
        trainer.fit(model, data, ckpt_path=requeue.checkpoint)

    Let SLURM signal every task in time: ``#SBATCH --signal=USR1@120``. A job that was cancelled is not requeued.

    A step that a validation or the end of an epoch follows is not stopped at, as these would be left out when the run
    goes on: the next one is, or the run is complete. Where each step is such a one, the third is stopped at all the
    same, without its validation.

    Args:
        folder: Where the checkpoint is written; the same each time that the run is started, and seen by all ranks.
        signals: Names of the signals that stop the run. SIGUSR1 is Lightning's by custom, SIGUSR2 submitit's, and
            SIGTERM is what SLURM sends before it ends a job.
        requeue: Ask SLURM to start the job again.
    """

    def __init__(
        self,
        folder: str | Path,
        signals: Sequence[str] = ("SIGUSR1", "SIGUSR2", "SIGTERM"),
        requeue: bool = True,
    ) -> None:
        self._file = Path(folder).absolute() / FILE
        self._signals = StopSignals(signals)
        self._requeue = requeue
        self._after_batch = AfterBatch(self._stop_if_agreed)
        self._step = 0
        self._passed = 0

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint of a run that was stopped in this folder and is not complete; for ``fit(ckpt_path=...)``."""
        return str(self._file) if self._file.exists() else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the signals over."""
        if stage == "fit":
            self._signals.install(trainer)
            self._after_batch.install(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes sure that all ranks go on from the checkpoint, or none.

        Raises:
            ConfigurationError: On all ranks, if some found the checkpoint and others did not.
        """
        found = trainer.ckpt_path == str(self._file)
        decide = trainer.strategy.reduce_boolean_decision
        if decide(found, all=False) and not decide(found, all=True):
            raise ConfigurationError(
                f"rank {trainer.global_rank} {'found' if found else 'did not find'} {self._file}, unlike other ranks:"
                " the folder of SafeRequeue must be one that all ranks see"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes where the run starts."""
        self._step, self._passed = trainer.global_step, 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Lets a wish to stop ride on the ballot that this backward ends with, where the strategy has one."""
        if self._signals.received is not None and isinstance(trainer.strategy, BucketedDDPStrategy):
            trainer.strategy.request_stop()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the checkpoint: the run is complete."""
        if trainer.is_global_zero:
            self._file.unlink(missing_ok=True)
        trainer.strategy.barrier("complete")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives the signals back."""
        self._signals.remove()
        self._after_batch.remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the signals back."""
        self._signals.remove()
        self._after_batch.remove()

    def _stop_if_agreed(self, trainer: Trainer) -> None:
        """Stops all ranks, once a batch that ended with an optimizer step is through.

        Raises:
            StoppedBySignal: On all ranks.
        """
        if trainer.global_step == self._step:
            return  # within an accumulation window
        self._step = trainer.global_step
        if not self._agreed(trainer):
            return
        # Decided together, as validations may go by a rank's own clock.
        if self._passed < MOST_PASSED and trainer.strategy.reduce_boolean_decision(more_follows(trainer), all=False):
            self._passed += 1
            return
        self._stop(trainer)

    def _agreed(self, trainer: Trainer) -> bool:
        if isinstance(trainer.strategy, BucketedDDPStrategy):
            return trainer.strategy.stop_agreed
        return bool(trainer.strategy.reduce_boolean_decision(self._signals.received is not None, all=False))

    def _stop(self, trainer: Trainer) -> None:
        received = self._received_by_rank(trainer)
        trainer.save_checkpoint(self._file)
        code = 0
        if trainer.is_global_zero:
            told = ", ".join(f"{name} on rank {rank}" for rank, name in received.items())
            result = requeue(os.environ) if self._requeue else Requeued(False, "it is not to be requeued")
            print(
                f"stopped after step {trainer.global_step} by {told}; {result.message}; the next start in this folder"
                f" goes on from {self._file}",
                flush=True,
            )
            # As a shell tells it. Other ranks end without an error, for which a launcher would end rank 0 too.
            code = 0 if result.done else 128 + signal.Signals[next(iter(received.values()), "SIGTERM")]
        trainer.strategy.barrier("stopped")
        raise StoppedBySignal(code)

    def _received_by_rank(self, trainer: Trainer) -> dict[int, str]:
        """Names of the signals, by the rank that got one."""
        mine = self._signals.received.name if self._signals.received is not None else ""
        names = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(names, mine)
        return {rank: name for rank, name in enumerate(names) if name}
