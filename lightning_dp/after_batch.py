"""What is to happen when a training batch is through: after the last hook that Lightning calls for it."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer


class AfterBatch:
    """Calls a function after each training batch while :meth:`installed <install>`.

    A callback's ``on_train_batch_end`` is too early to save what a run goes on from: callbacks behind it and the
    module, in their own, may still average weights or count steps.

    Args:
        function: Gets the Trainer.
    """

    def __init__(self, function: Callable[[Trainer], None]) -> None:
        self._function = function
        self._trainer: Trainer | None = None

    def install(self, trainer: Trainer) -> None:
        """Starts the calls."""
        # Lightning calls this behind the last hook, of evaluation batches too (training_epoch_loop.py:377).
        original = trainer._logger_connector.on_batch_end

        def on_batch_end() -> None:
            original()
            if trainer.training:
                self._function(trainer)

        trainer._logger_connector.on_batch_end = on_batch_end  # type: ignore[method-assign]
        self._trainer = trainer

    def remove(self) -> None:
        """Ends the calls."""
        if self._trainer is not None:
            vars(self._trainer._logger_connector).pop("on_batch_end", None)
            self._trainer = None


def more_follows(trainer: Trainer) -> bool:
    """Whether the batch in hand is followed by more than the next one: a validation, or the end of the epoch."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop._is_training_done or loop._should_check_val_fx(fetcher)
