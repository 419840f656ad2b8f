"""The loaders of one Trainer: dealt out without repeats, kept in step, and resumed where they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchmetrics import Metric

from lightning_dp.data.counts import CountFunction
from lightning_dp.data.joint import JointLoader, length_of
from lightning_dp.data.loader_state import LoaderState
from lightning_dp.data.lockstep import LockstepLoader, lockstep
from lightning_dp.data.padding import PaddingPolicy, sequence_number, without_trace
from lightning_dp.data.samplers import UnpaddedSampler, is_plain
from lightning_dp.data.window import WindowCounter, WindowTotals
from lightning_dp.errors import UnevenDataError
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
        prepare: What Lightning does to a loader of its own: ``(trainer, function, stage, loader) -> loader``.
        stop_shuffling: What it does to a CombinedLoader when overfitting: ``(combined_loader, stage)``.

    Attributes:
        on_training_loader: Called on all ranks together with a loader that is to be trained on.
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
        *,
        prepare: Callable[..., Any],
        stop_shuffling: Callable[..., None],
    ) -> None:
        self._trainer = trainer
        self._wire = wire
        self._uneven = uneven
        self._must_replay = must_replay
        self._seed: int = wire.broadcast_object(int(os.environ.get("PL_GLOBAL_SEED", 0)), 0)
        self._normalizers = normalizers or {}
        self._allowed_zero_length = trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices
        self._prepare, self._stop_shuffling = prepare, stop_shuffling
        self._preparing_parts = False
        self.on_training_loader: Callable[[object], None] = lambda loader: None
        self._length: int | None = None  # of an epoch, as last followed
        self.padding = False
        self._policy: PaddingPolicy | None = None
        self._restored: list[LoaderState] = []
        connector = trainer._data_connector
        # Lightning would take a batch sampler apart and build it anew with arguments that it guesses.
        if trainer.predicting:
            # A rank may have nothing to predict; Lightning would refuse that, on this rank alone.
            trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices = True
        self._patch("_requires_distributed_sampler", connector._requires_distributed_sampler)
        if not pad_samples:
            self._patch("_resolve_sampler", connector._resolve_sampler)
        for loop in self._loops():
            join = partial(_join, loop._data_source.dataloader, training=loop is trainer.fit_loop)
            loop._data_source.dataloader = join

    def _patch(self, name: str, original: Any) -> None:
        setattr(self._trainer._data_connector, name, partial(getattr(self, name), original))

    def _loops(self) -> list[Any]:
        """The loops whose loaders are kept in step."""
        trainer = self._trainer
        fit = trainer.fit_loop
        return [fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def remove(self) -> None:
        """Gives the data connector and the loops their own methods back."""
        for name in ("_requires_distributed_sampler", "_resolve_sampler"):
            vars(self._trainer._data_connector).pop(name, None)
        for loop in self._loops():
            vars(loop._data_source).pop("dataloader", None)
        self._trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices = self._allowed_zero_length

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
        if state.stage == RunningStage.PREDICTING or self._preparing_parts:
            return dataloader
        training = state.fn == TrainerFn.FITTING and state.stage in (None, RunningStage.TRAINING)
        if isinstance(dataloader, _LightningJointLoader):
            self._prepare_parts(dataloader, RunningStage.TRAINING if training else state.stage)
        policy = PaddingPolicy(self._uneven, self._must_replay and training)
        loader = lockstep(
            dataloader,
            self._wire,
            policy,
            ends_early=not training,
            strict=self._uneven == "error",
            counter=self._counter() if training else None,
        )
        if training:
            self.on_training_loader(dataloader.parts[0] if isinstance(dataloader, JointLoader) else dataloader)
        if training and self._restored:
            loader.resume(self._restored)
            self._restored = []
        return loader

    def _prepare_parts(self, joint: _LightningJointLoader, stage: Any) -> None:
        """Does to each of several loaders what Lightning does to one, but for keeping it in step by itself."""
        trainer: Any = self._trainer
        combined = joint.combined
        if trainer.state.fn == TrainerFn.FITTING and trainer.overfit_batches > 0:
            self._stop_shuffling(combined, stage)
        self._preparing_parts = True
        try:
            fn = trainer.state.fn
            combined.flattened = [self._prepare(trainer, fn, stage, part) for part in combined.flattened]
        finally:
            self._preparing_parts = False
        joint.parts = combined.flattened
        if combined._mode != "max_size_cycle":
            return
        lengths = self._wire.gather([length_of(part) for part in joint.parts])
        for number, by_rank in enumerate(zip(*lengths, strict=True)):
            if 0 in by_rank and any(by_rank):
                raise UnevenDataError(
                    f"loader {number} of several has no batch on rank {by_rank.index(0)} and is to be cycled through"
                    " there; give it at least as many samples as there are ranks, or use"
                    " CombinedLoader(mode='max_size')"
                )

    def _counter(self) -> WindowCounter:
        trainer = self._trainer

        def length() -> int:
            return trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1

        return WindowCounter(self._normalizers, length, lambda: trainer.fit_loop.max_batches)

    @property
    def window(self) -> WindowTotals | None:
        """What the accumulation window under way holds on all ranks, where that is counted."""
        return self._training.window if self._training is not None else None

    def take(self, dataloader_idx: int) -> None:
        """Takes note of whether the batch that goes to the device now is padding on this rank."""
        self.padding, self._policy = False, None
        if self._trainer.predicting:
            return
        trainer = self._trainer
        loader: Any = self._training
        if not trainer.training:
            combined = trainer._evaluation_loop._combined_loader
            # Loaders that are iterated at the same time are one; else one follows the other.
            loader = combined.flattened[dataloader_idx] if combined is not None else None
        if isinstance(loader, LockstepLoader) and (padding := loader.take()) is not None:
            self.padding, self._policy = padding, loader.policy

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
        # Only a change is followed: the callback for weight averaging moves max_batches for an epoch of its own.
        if self._length != fetcher.length:
            self._length = loop.max_batches = fetcher.length

    def _lift_limits(self) -> None:
        # A limit of 100 % was turned into the length that the loaders had at first.
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and self._trainer.limit_train_batches == 1.0 and combined.limits is not None:
            combined.limits = [float("inf")]

    # ------------------------------------------------------------------------------------------- state

    def state(self, alone: bool) -> list[dict[str, Any]]:
        """The training loader's states on all ranks; none if they are not known.

        Args:
            alone: The other ranks do not take part. Then a loader has a state only if its position is the same on
                every rank.
        """
        loop = self._trainer.fit_loop
        # Lightning's epoch may end before the data does: limit_train_batches. (max_steps does not end it: a resumed
        # run goes on within the epoch.)
        ended = loop.epoch_loop._num_ready_batches_reached()
        if alone and not ended and loop._should_accumulate():
            rank_zero_warn(
                "this checkpoint is written after an error within an accumulation window, whose gradients so far are"
                " not saved: a run resumed from it trains on without them"
            )
        if self._training is None:
            return []
        batches: Any = loop.epoch_loop.batch_progress.current
        state = self._training.state(batch_in_hand=batches.processed < batches.ready)
        state = replace(state, finished=state.finished or ended)
        if not alone:
            return self._wire.gather(state.as_dict())
        return [state.as_dict()] * self._wire.world_size if state.samples is not None else []

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes over :meth:`state`'s result; a loader that exists already starts its epoch again behind it."""
        self._restored = [LoaderState(**state) for state in states]
        if self._training is not None and self._restored:
            self._training.resume(self._restored)
            self._restored = []
        fetcher = self._trainer.fit_loop._data_fetcher
        if not states and self._trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
            rank_zero_warn(
                "the checkpoint does not say which data of its epoch had been seen (it was not written by bucketed_ddp,"
                " or after an error with loaders of your own): if it is from within an epoch, data is repeated"
            )
        if fetcher is not None:
            self._lift_limits()
            iter(fetcher)

    @property
    def _training(self) -> LockstepLoader | None:
        """The loader that is trained on; several that the user passed are one."""
        combined = self._trainer.fit_loop._combined_loader
        loader = combined.flattened[0] if combined is not None and combined.flattened else None
        return loader if isinstance(loader, LockstepLoader) else None


def _is_local(metric: Metric) -> bool:
    """Whether a logged value is this rank's own: then it may be that of a padding batch, rather than none at all."""
    meta = getattr(metric, "meta", None)
    return meta is not None and not meta.sync.should


class _LightningJointLoader(JointLoader):
    """Several loaders in the place of one, combined as Lightning does."""

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined
        super().__init__(combined.flattened, self._batches, self._number)

    def _batches(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:
            yield batch

    def _number(self, lengths: list[int | None]) -> int | None:
        known = [length for length in lengths if length is not None]
        if self.combined._mode == "min_size":
            return min(known, default=None)
        return max(known) if len(known) == len(lengths) else None


class _JointCombinedLoader(CombinedLoader):
    """A CombinedLoader whose loaders are kept in step together; the loop sees one loader, the user those passed."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined
        super().__init__(_LightningJointLoader(combined), "max_size_cycle")

    @property
    def iterables(self) -> Any:
        """The user's collection of loaders."""
        return self._combined.iterables

    def reset(self) -> None:
        """Shuts down workers of all loaders."""
        super().reset()
        self._combined.reset()


def _join(original: Callable[[], Any], training: bool) -> Any:
    """What a data source gives, with several loaders that are iterated together made one."""
    given = original()
    default: Any = "max_size_cycle" if training else "sequential"
    combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, default)
    return given if len(combined.flattened) < 2 or combined._mode == "sequential" else _JointCombinedLoader(combined)
