"""The loaders of one Trainer: dealt out without repeats, kept in step, and resumed where they were."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchmetrics import Metric

from lightning_dp.data.counts import CountFunction
from lightning_dp.data.lockstep import LoaderState, LockstepLoader, lockstep
from lightning_dp.data.padding import PaddingPolicy, sequence_number, without_trace
from lightning_dp.data.samplers import UnpaddedSampler, is_plain
from lightning_dp.data.window import WindowCounter, WindowTotals
from lightning_dp.errors import ConfigurationError
from lightning_dp.reduction.wire import Wire


class TrainerLoaders:
    """What the strategy does with a Trainer's loaders.

    Args:
        trainer: The Trainer; two methods of its data connector are replaced until :meth:`remove`.
        wire: The ranks, over a group that works on CPU tensors.
        uneven: One of :data:`lightning_dp.data.padding.UNEVEN_POLICIES`.
        pad_samples: Leave Lightning's padding DistributedSampler as it is.
        must_replay: Whether a training step communicates for certain (SyncBatchNorm, manual optimization).
        normalizers: What is counted of an accumulation window before it begins, by name.

    Attributes:
        padding: Whether the batch in hand is padding on this rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        wire: Wire,
        uneven: str,
        pad_samples: bool = False,
        must_replay: bool = False,
        normalizers: Mapping[str, CountFunction] | None = None,
    ) -> None:
        self._trainer = trainer
        self._wire = wire
        self._uneven = uneven
        self._must_replay = must_replay
        self._seed: int = wire.broadcast_object(int(os.environ.get("PL_GLOBAL_SEED", 0)), 0)
        self._normalizers = normalizers or {}
        self._warned = False
        self.padding = False
        self._policy: PaddingPolicy | None = None
        self._restored: list[list[LoaderState]] = []
        connector = trainer._data_connector
        # Lightning would take a batch sampler apart and build it anew with arguments that it guesses.
        self._patch("_requires_distributed_sampler", connector._requires_distributed_sampler)
        if not pad_samples:
            self._patch("_resolve_sampler", connector._resolve_sampler)

    def _patch(self, name: str, original: Any) -> None:
        setattr(self._trainer._data_connector, name, partial(getattr(self, name), original))

    def remove(self) -> None:
        """Gives the data connector its own methods back."""
        for name in ("_requires_distributed_sampler", "_resolve_sampler"):
            vars(self._trainer._data_connector).pop(name, None)

    # ------------------------------------------------------------------------------------------- samplers

    def _requires_distributed_sampler(self, original: Any, dataloader: DataLoader[Any]) -> bool:
        own_batch_sampler = dataloader.batch_sampler is not None and type(dataloader.batch_sampler) is not BatchSampler
        return bool(original(dataloader)) and not own_batch_sampler

    def _resolve_sampler(
        self, original: Any, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None
    ) -> Any:
        connector = self._trainer._data_connector
        if not connector._requires_distributed_sampler(dataloader):
            return original(dataloader, shuffle, mode)
        plain = is_plain(dataloader.sampler, dataloader.dataset)
        overfits = bool(getattr(self._trainer, "overfit_batches", 0))
        batch_size = dataloader.batch_size if mode == RunningStage.TRAINING and dataloader.drop_last else None
        return UnpaddedSampler(
            dataloader.dataset if plain else dataloader.sampler,  # type: ignore[arg-type]
            num_replicas=self._wire.world_size,
            rank=self._wire.rank,
            # As one device would: Lightning asks for shuffling in training also where the loader does not shuffle.
            shuffle=shuffle and isinstance(dataloader.sampler, RandomSampler) and not overfits,
            seed=self._seed,
            drop_last=batch_size or 0,
        )

    # ------------------------------------------------------------------------------------------- loaders

    def process(self, dataloader: Any) -> Any:
        """Wraps a loader of the stage under way; called on all ranks together, for one loader after the other."""
        state = self._trainer.state
        if state.stage == RunningStage.PREDICTING:
            return dataloader
        training = state.fn == TrainerFn.FITTING and state.stage in (None, RunningStage.TRAINING)
        policy = PaddingPolicy(self._uneven, self._must_replay and training)
        loader = lockstep(
            dataloader,
            self._wire,
            policy,
            ends_early=not training,
            strict=self._uneven == "error",
            counter=self._counter() if training else None,
        )
        if training and self._restored:
            loader.resume(self._restored.pop(0))
        return loader

    def _counter(self) -> WindowCounter:
        trainer = self._trainer

        def length() -> int:
            return trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1

        return WindowCounter(self._normalizers, length, lambda: trainer.fit_loop.max_batches)

    @property
    def window(self) -> WindowTotals | None:
        """What the accumulation window under way holds on all ranks, where that is counted.

        Raises:
            ConfigurationError: If there are several training loaders.
        """
        training = self._training()
        if len(training) > 1:
            raise ConfigurationError("normalizers are counted for one training loader, and there are several")
        return training[0].window if training else None

    def take(self, dataloader_idx: int) -> None:
        """Takes note of whether the batch that goes to the device now is padding on this rank."""
        self.padding, self._policy = False, None
        if self._trainer.predicting:
            return
        training = self._trainer.training
        loop = self._trainer.fit_loop if training else self._trainer._evaluation_loop
        combined = loop._combined_loader
        loaders = list(combined.flattened) if combined is not None else []
        if not training and combined is not None and combined._mode == "sequential":
            loaders = loaders[dataloader_idx : dataloader_idx + 1]
        ours = [loader for loader in loaders if isinstance(loader, LockstepLoader)]
        if ours:
            # With several loaders a batch is real if any of them delivered a real one.
            taken = [padding for padding in [loader.take() for loader in ours] if padding is not None]
            self.padding = bool(taken) and all(taken)
            self._policy = ours[0].policy
            if len(set(taken)) > 1:
                self._warn_of_mixture()

    def _warn_of_mixture(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {self._wire.rank}: of several training loaders one has run out before the other ranks' did; its"
                " last batch is repeated beside the other loaders' until they end",
                stacklevel=2,
            )

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step on the batch in hand; of a padding batch it is skipped, or leaves no trace, by the policy."""
        policy = self._policy
        if policy is None:
            return step(*args, **kwargs)
        if self.padding and not policy.replays:
            return None
        module = self._trainer.lightning_module
        trace = without_trace(module, self._logged, _is_local) if self.padding else nullcontext()
        before = sequence_number()
        with trace:
            output = step(*args, **kwargs)
        after = sequence_number()
        policy.ran_step(communicated=before is None or before != after)
        return output

    def _logged(self) -> list[Metric]:
        """The values that ``self.log`` has collected in the loop under way."""
        results = self._trainer._results
        return list(results.values()) if results is not None else []

    def follow_lengths(self) -> None:
        """Makes Lightning follow loaders whose length changes: from epoch to epoch, or in a resumed epoch."""
        loop = self._trainer.fit_loop
        fetcher = loop._data_fetcher
        if fetcher is None or fetcher.length is None:
            return
        self._lift_limits()
        if loop.max_batches != fetcher.length:
            loop.max_batches = fetcher.length

    def _lift_limits(self) -> None:
        # A limit of 100 % was turned into the length that the loaders had at first.
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and self._trainer.limit_train_batches == 1.0 and combined.limits is not None:
            combined.limits = [float("inf")] * len(combined.flattened)

    # ------------------------------------------------------------------------------------------- state

    def state(self, alone: bool) -> list[list[dict[str, Any]]]:
        """States of all training loaders: for each loader those of all ranks.

        Args:
            alone: The other ranks do not take part. Then only loaders whose position is the same on every rank have a
                state.
        """
        loop = self._trainer.fit_loop
        # Lightning's epoch may end before the data does: limit_train_batches. (max_steps does not end it: a resumed
        # run goes on within the epoch.)
        ended = loop.epoch_loop._num_ready_batches_reached()
        if not ended and loop._should_accumulate():
            rank_zero_warn(
                "this checkpoint is written within an accumulation window, whose gradients so far are not saved: a"
                " run resumed from it trains on without them"
            )
        batches: Any = loop.epoch_loop.batch_progress.current
        states = [loader.state(batch_in_hand=batches.processed < batches.ready) for loader in self._training()]
        states = [replace(state, finished=state.finished or ended) for state in states]
        if not alone:
            return [self._wire.gather(state.as_dict()) for state in states]
        if any(state.samples is None for state in states):
            return []
        return [[state.as_dict()] * self._wire.world_size for state in states]

    def restore(self, states: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Takes over :meth:`state`'s result; loaders that exist already start their epoch again behind it."""
        self._restored = [[LoaderState(**state) for state in by_rank] for by_rank in states]
        for loader in self._training():
            if self._restored:
                loader.resume(self._restored.pop(0))
        fetcher = self._trainer.fit_loop._data_fetcher
        if not states and self._trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
            rank_zero_warn(
                "the checkpoint does not say which data of its epoch had been seen (it was not written by bucketed_ddp,"
                " or after an error with loaders of your own): if it is from within an epoch, data is repeated"
            )
        if fetcher is not None:
            self._lift_limits()
            iter(fetcher)

    def _training(self) -> list[LockstepLoader]:
        combined = self._trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        return [loader for loader in loaders if isinstance(loader, LockstepLoader)]


def _is_local(metric: Metric) -> bool:
    """Whether a logged value is this rank's own: then it may be that of a padding batch, rather than none at all."""
    meta = getattr(metric, "meta", None)
    return meta is not None and not meta.sync.should
