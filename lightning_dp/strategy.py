"""The Lightning strategy: the only file that touches Lightning's private parts (each checked on Lightning 2.6.6)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_dp.data.counts import CountFunction, as_count, resolve_count
from lightning_dp.data.padding import UNEVEN_POLICIES, PaddingPolicy, sequence_number, without_trace
from lightning_dp.errors import ConfigurationError, CountWarning, NonFiniteGradientError, UnreducedGradientError
from lightning_dp.insight.run_report import RunFigures, RunReport
from lightning_dp.loaders import TrainerLoaders
from lightning_dp.reduction.ballot import Reason, Verdict
from lightning_dp.reduction.reducer import GradientReducer, ReducerConfig
from lightning_dp.reduction.replication import broadcast_from_rank_zero, verify_same_structure
from lightning_dp.reduction.wire import Wire

NONFINITE_POLICIES = ("skip", "raise", "off")
CHECKPOINT_KEY = "lightning_dp"
CHECKPOINT_VERSION = 1

_BASE_ARGUMENTS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
# What torch DDP must be told and this strategy does anyway, or what has nothing to act on here.
_INHERENT_ARGUMENTS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_REFUSED_ARGUMENTS = {
    "ddp_comm_state": "torch DDP's communication hooks act on its own buckets, which do not exist here",
    "ddp_comm_hook": "torch DDP's communication hooks act on its own buckets, which do not exist here",
    "ddp_comm_wrapper": "torch DDP's communication hooks act on its own buckets, which do not exist here",
    "model_averaging_period": "replicas are identical after every step, so there is nothing to average now and then",
    "broadcast_buffers": "buffers are sent from rank 0 once, at the start",
    "delay_all_reduce_named_params": "every gradient is reduced with its bucket",
    "param_to_hook_all_reduce": "every gradient is reduced with its bucket",
    "mixed_precision": "precision is the Trainer's: Trainer(precision=...)",
    "device_mesh": "there is one group of replicas: all ranks",
    "process_group": "there is one group of replicas: all ranks",
    "init_sync": "replicas must be equal at the start, so rank 0's weights are always sent",
}


@dataclass
class _Progress:
    """Where the run stands; equal on all ranks."""

    verdict: Verdict = field(default_factory=Verdict)  # on the reductions since the last optimizer step
    last_skipped: bool = False
    attempted: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    total_count: int = 0


class BucketedDDPStrategy(DDPStrategy):
    """Synchronous data parallelism that takes the step one device with the whole batch would take.

    Every rank holds the whole model. Gradients are averaged over all samples of all ranks, weighted by count, in
    buckets that travel while backward still runs; nothing is sent while gradients accumulate. If any rank's gradient
    is not finite, all ranks skip that step. Select it with ``import lightning_dp; Trainer(strategy="bucketed_ddp")``.

    Note:
        A skipped step leaves weights, optimizer and step-wise learning-rate schedulers as they were; in manual
        optimization the schedulers are the module's own, which can ask :attr:`last_step_skipped`. Lightning's
        ``global_step`` counts it all the same, on every rank, as it counts one that a GradScaler skips. With
        ``precision="16-mixed"`` the GradScaler does the skipping.

    Args:
        bucket_cap_mb: Cap on a bucket in MiB.
        first_bucket_cap_mb: Cap on the first bucket launched, in MiB.
        count: What a micro-batch weighs: ``"samples"``, ``"tokens"``, ``"equal"`` or a function ``batch -> int``.
            :meth:`set_count` overrides it for one micro-batch.
        nonfinite: ``"skip"`` the step on all ranks, ``"raise"`` on all ranks, or do not look (``"off"``).
        max_consecutive_skips: After this many skipped steps in a row all ranks raise.
        overlap: Send buckets while backward runs. ``False`` sends them at its end.
        uneven: What a rank does when its data has run out before the others': see
            :class:`lightning_dp.data.padding.PaddingPolicy`; ``"error"`` raises on all ranks.
        normalizers: For losses in parts: what parts are divided by, by name, each ``"samples"``, ``"tokens"`` or a
            function ``batch -> int``; see :meth:`normalize`. Micro-batches then weigh the same.
        pad_samples: Let Lightning's sampler repeat samples until all ranks have equally many, as it does elsewhere.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default what suits the device.
        timeout: How long a rank waits for another one; a timedelta or seconds.
        start_method: How Lightning starts the other local processes: ``"popen"``, ``"spawn"`` or ``"fork"``.
        **kwargs: Lightning's own strategy arguments (``cluster_environment``, ``checkpoint_io``, ...). Of torch DDP's,
            ``find_unused_parameters``, ``static_graph`` and ``gradient_as_bucket_view`` are accepted and ignored, as
            what they are for is always so here.

    Raises:
        ConfigurationError: If an argument is unknown or has no meaning here, or a value is out of range.
    """

    def __init__(
        self,
        bucket_cap_mb: float = 25.0,
        first_bucket_cap_mb: float = 1.0,
        count: str | CountFunction = "samples",
        nonfinite: Literal["skip", "raise", "off"] = "skip",
        max_consecutive_skips: int = 10,
        overlap: bool = True,
        uneven: Literal["auto", "skip", "replay", "error"] = "auto",
        pad_samples: bool = False,
        normalizers: Mapping[str, str | CountFunction] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        _check_keywords(kwargs)
        for name, value in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_cap_mb", first_bucket_cap_mb)):
            _check_positive(name, value)
        _check_positive("max_consecutive_skips", max_consecutive_skips)
        if str(nonfinite) == "False":  # YAML reads a bare `off` as false
            nonfinite = "off"
        if nonfinite not in NONFINITE_POLICIES:
            raise ConfigurationError(
                f"nonfinite={nonfinite!r} is not known: use one of {', '.join(NONFINITE_POLICIES)}"
            )
        if uneven not in UNEVEN_POLICIES:
            raise ConfigurationError(f"uneven={uneven!r} is not known: use one of {', '.join(UNEVEN_POLICIES)}")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        _check_positive("timeout", seconds)
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=seconds),
            start_method=start_method,
            **{name: kwargs[name] for name in _BASE_ARGUMENTS if name in kwargs},
        )
        # Lightning's tests and callbacks read this; nothing here does.
        self._ddp_kwargs = {name: kwargs[name] for name in _INHERENT_ARGUMENTS if name in kwargs}
        if normalizers and count not in ("samples", "equal"):
            raise ConfigurationError(
                f"count={count!r} and normalizers exclude each other: each part of the loss has a normalizer of its own"
            )
        self._normalizers = {name: resolve_count(function) for name, function in (normalizers or {}).items()}
        self._count_function = resolve_count("equal" if normalizers else count)
        self._nonfinite = nonfinite
        self._uneven = uneven
        self._pad_samples = bool(pad_samples)
        self._max_consecutive_skips = int(max_consecutive_skips)
        self._reducer_config = ReducerConfig(
            float(bucket_cap_mb), float(first_bucket_cap_mb), bool(overlap), check_nonfinite=nonfinite != "off"
        )
        self._reducer: GradientReducer | None = None
        self._loaders: TrainerLoaders | None = None
        self._policy: PaddingPolicy | None = None
        self._reset_progress()

    # ------------------------------------------------------------------------------------------- what users call

    def set_count(self, count: int | Tensor) -> None:
        """Sets the count of the micro-batch in hand; call it in ``training_step``, before any ``manual_backward``.

        Args:
            count: The number of samples, tokens, ... that this micro-batch's mean loss is over; 0 if there is none.

        Raises:
            CountError: If it is no integer of at least 0.
        """
        if not self._padding:
            self._count = as_count(count, self._where())

    def normalize(self, loss_sum: Tensor, by: str) -> Tensor:
        """Makes one part of a loss out of its sum, so that all parts come out as on one device.

        ``strategy.normalize(token_losses.sum(), by="tokens") + strategy.normalize(aux.sum(), by="samples") + l2``
        trains on the sum over all tokens of the accumulation window on all ranks divided by their number, plus the
        same for samples, plus a term that counts once. The window is counted, with one more small message, when its
        first micro-batch is fetched; for that a rank holds the batches of a window at once. In manual optimization a
        window is one micro-batch.

        Args:
            loss_sum: Sum, not mean, of this part over the micro-batch; 0-dimensional.
            by: Which of ``normalizers`` divides it.

        Raises:
            ConfigurationError: If ``by`` is none of the strategy's ``normalizers``.
        """
        if by not in self._normalizers:
            known = ", ".join(self._normalizers) or "none; pass normalizers={...} to the strategy"
            raise ConfigurationError(f"normalizer {by!r} is not known: there are {known}")
        window = self._loaders.window if self._loaders is not None else None
        assert window is not None, "normalize outside of fit"
        # The average over micro-batches, which all weigh the same, undoes the number of them.
        return loss_sum * (window.micro_batches / max(1, window[by]))

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped, over the life of the run (resumes included)."""
        return self._progress.skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped on all ranks."""
        return self._progress.last_skipped

    @property
    def reducer(self) -> GradientReducer | None:
        """The gradient reducer; there is one while fitting."""
        return self._reducer

    def report(self) -> RunReport:
        """Figures of the training so far; they stay readable after ``fit``."""
        return self._figures.report(
            world_size=self.world_size,
            steps=self._progress.attempted - self._progress.skipped,
            skipped_steps=self._progress.skipped,
            count=self._progress.total_count,
            buckets=self._buckets,
            gradient_bytes=self._gradient_bytes,
        )

    # ------------------------------------------------------------------------------------------- set-up, teardown

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this where it does not know a strategy's type."""
        return True

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Adds ``bucketed_ddp`` and its start-method variants to a registry of Lightning's."""
        for name, start_method in (
            ("bucketed_ddp", "popen"),
            ("bucketed_ddp_spawn", "spawn"),
            ("bucketed_ddp_fork", "fork"),
            ("bucketed_ddp_notebook", "fork"),
        ):
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"Count-weighted bucketed data parallelism with `start_method` '{start_method}'",
                    start_method=start_method,
                )

    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        # Hooks sit on the parameters, so nothing is wrapped and any method of the module may be called.
        return model

    def configure_ddp(self) -> None:
        """Makes replicas: the same structure is checked on all ranks, then rank 0's values are sent."""
        model = self.model
        assert model is not None
        wire = Wire()
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        named = [
            (name, tensor)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if name not in ignored
        ]
        verify_same_structure(named, wire)
        broadcast_from_rank_zero((tensor for _, tensor in named), wire)

    def setup(self, trainer: Trainer) -> None:
        """Sets the model up; when fitting, attaches the reducer."""
        module = self.lightning_module
        assert module is not None
        self._remove_loaders()
        self._loaders = TrainerLoaders(
            trainer,
            self._control,
            self._uneven,
            self._pad_samples,
            must_replay=self._must_replay(),
            normalizers=self._normalizers,
        )
        if trainer.predicting:
            # A rank may have nothing to predict; Lightning would refuse that, on this rank alone.
            module.allow_zero_length_dataloader_with_multiple_devices = True
        super().setup(trainer)
        if self.global_rank != 0:
            warnings.simplefilter("ignore", CountWarning)  # said once, by rank 0
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._reset_progress()
        if self._ddp_kwargs:
            rank_zero_info(f"bucketed_ddp ignores {', '.join(self._ddp_kwargs)}: what it is for is always so here")
        assert self.model is not None
        self._reducer = GradientReducer(self.model.named_parameters(), config=self._reducer_config)
        self._note_plan()
        # Lightning moves step-wise schedulers even if the strategy did not step (training_epoch_loop.py:456).
        loop = trainer.fit_loop.epoch_loop
        loop.update_lr_schedulers = partial(self._update_lr_schedulers, loop.update_lr_schedulers)  # type: ignore[method-assign]

    def setup_distributed(self) -> None:
        """Makes the process group and, beside one that works on GPUs, one for small messages between hosts."""
        super().setup_distributed()
        on_host = not dist.is_initialized() or self._process_group_backend == "gloo"
        self._control = Wire(None if on_host else dist.new_group(backend="gloo", timeout=self._timeout))

    def teardown(self) -> None:
        """Removes the hooks and what was put into Lightning's loops."""
        self._remove_loaders()
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            module._trainer.fit_loop.epoch_loop.__dict__.pop("update_lr_schedulers", None)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add: errors name their own cause (the base class explains torch DDP's flags here)."""

    # ------------------------------------------------------------------------------------------- loaders

    def process_dataloader(self, dataloader: object) -> object:
        """Wraps a loader so that all ranks iterate equally often."""
        return self._loaders.process(dataloader) if self._loaders is not None else dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Takes note of whether the batch is padding, then moves it."""
        self._padding = False
        self._policy = None
        if self._loaders is not None and self.lightning_module is not None:
            self._padding, self._policy = self._loaders.take(dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _must_replay(self) -> bool:
        module = self.lightning_module
        assert module is not None
        sync_batchnorm = self._layer_sync is not None or any(isinstance(m, SyncBatchNorm) for m in module.modules())
        return sync_batchnorm or not module.automatic_optimization

    def _remove_loaders(self) -> None:
        if self._loaders is not None:
            self._loaders.remove()
            self._loaders = None

    # ------------------------------------------------------------------------------------------- one micro-batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the very first micro-batch of a run all ranks agree on what a micro-batch usually counts."""
        super().on_train_batch_start(batch, batch_idx)
        self._batch_idx = batch_idx
        if self._loaders is not None:
            self._loaders.follow_lengths()
        if self._reducer is not None and self._reducer.reference is None:
            self._reducer.agree_reference(self._count_of(batch))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Counts the batch, then runs the module's ``training_step``.

        A step that returns ``None``, and a padding batch, contribute nothing: they count 0.
        """
        module = self.lightning_module
        assert module is not None
        self._count = 0 if self._padding else self._count_of(args[0] if args else kwargs.get("batch"))
        output = self._run_step(super().training_step, *args, **kwargs)
        if output is not None or not module.automatic_optimization:
            return output
        # Lightning refuses None when there are several ranks (automatic.py:322), before it asks the strategy.
        self._count = 0
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``validation_step``; a padding batch leaves no trace."""
        return self._run_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``test_step``; a padding batch leaves no trace."""
        return self._run_step(super().test_step, *args, **kwargs)

    def _run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        policy = self._policy
        assert module is not None
        if policy is None:
            return step(*args, **kwargs)
        if self._padding and not policy.replays:
            return None
        before = sequence_number(self._world())
        if self._padding:
            with without_trace(module, self._logged):
                output = step(*args, **kwargs)
        else:
            output = step(*args, **kwargs)
        after = sequence_number(self._world())
        policy.ran_step(communicated=before is None or before != after)
        return output

    def _world(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.is_initialized() else None

    def _logged(self) -> list[Metric]:
        """The values that ``self.log`` has collected in the loop under way."""
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        return list(results.values()) if results is not None else []

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside it gradients accumulate and nothing is sent; Lightning enters it within an accumulation window."""
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward over the weighted loss; outside ``block_backward_sync`` gradients are final at its end.

        They are final before ``on_after_backward``, so that clipping, unscaling and every hook see the average.
        """
        module = self.lightning_module
        assert module is not None
        assert self._reducer is not None, "backward without fit"
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Lightning has divided the loss by the window's nominal length, also in a shorter last window.
        divided_by = module.trainer.accumulate_grad_batches if module.automatic_optimization else None
        before = self._reducer.last
        with self._reducer.backward_pass(self._count, f"batch {self._batch_idx}", divided_by) as weight:
            self.precision_plugin.backward(closure_loss * weight, module, optimizer, *args, **kwargs)
        if self._reducer.last is not before:
            self._note_reduction()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    # ------------------------------------------------------------------------------------------- one optimizer step

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure, then steps or, if the ranks' verdict is to skip, leaves everything as it is.

        Raises:
            UnreducedGradientError: In manual optimization, if gradients come from a plain ``loss.backward()``.
            NonFiniteGradientError: On all ranks, by policy ``"raise"`` or after too many skips in a row.
        """
        if isinstance(optimizer, LBFGS) or self._reducer is None:
            # LBFGS evaluates its closure as often as it likes, so there is no one verdict to step on.
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = closure()
        if self._reducer.has_unreduced:
            raise UnreducedGradientError(
                f"{self._where()}: gradients were made by loss.backward(), so each rank has its own; call"
                " self.manual_backward(loss) instead"
            )
        progress = self._progress
        verdict, progress.verdict = progress.verdict, Verdict()
        progress.last_skipped = self._skips(verdict)
        if progress.last_skipped:
            self._skip(verdict)
            # Tells torch's schedulers that an optimizer is in use, or the next one to move warns of a wrong order.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            output = result
        else:
            progress.consecutive_skips = 0
            # The closure has run; torch's optimizer gets its result, since Lightning clips after calling it.
            output = super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        progress.attempted += 1
        return output

    def _skips(self, verdict: Verdict) -> bool:
        """With a GradScaler every rank holds the same Inf, and the scaler skips and lowers its scale by itself."""
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        return verdict.reason is Reason.EMPTY if has_scaler else not verdict.step

    def _skip(self, verdict: Verdict) -> None:
        self._progress.skipped += 1
        if verdict.reason is Reason.EMPTY:
            rank_zero_warn(f"{self._where(rank=False)}: no rank had data, the step is skipped on all ranks")
            return
        self._progress.consecutive_skips += 1
        assert verdict.reason is not None
        cause = f"{verdict.reason.value}{': ' + verdict.detail if verdict.detail else ''}"
        if self._nonfinite == "raise":
            raise NonFiniteGradientError(f"{self._where(rank=False)}: {cause}; weights are as before this step")
        if self._progress.consecutive_skips >= self._max_consecutive_skips:
            raise NonFiniteGradientError(
                f"{self._where(rank=False)}: {cause}; {self._progress.consecutive_skips} steps in a row were skipped"
                f" (max_consecutive_skips={self._max_consecutive_skips}); look at the data and the learning rate"
            )
        rank_zero_warn(
            f"{self._where(rank=False)}: {cause}; the step is skipped on all ranks"
            f" ({self._progress.consecutive_skips} in a row, at most {self._max_consecutive_skips - 1} are let pass)"
        )

    def _update_lr_schedulers(
        self, update: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        if interval == "step" and self._progress.last_skipped:
            return
        update(interval, update_plateau_schedulers=update_plateau_schedulers)

    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """As the base class; a mean of integers is not cut to an integer, so that ``self.log`` can weigh by batch."""
        averages = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if averages and isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    # ------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Adds what a resumed run needs; plain numbers and strings, the same on every rank."""
        if self._reducer is not None:
            module = self.lightning_module
            # After an exception this rank may be alone, and states of loaders are gathered.
            together = module is not None and module.trainer.state.status != TrainerStatus.INTERRUPTED
            checkpoint[CHECKPOINT_KEY] = {
                "version": CHECKPOINT_VERSION,
                "attempted_steps": self._progress.attempted,
                "skipped_steps": self._progress.skipped,
                "consecutive_skips": self._progress.consecutive_skips,
                "total_count": self._progress.total_count,
                "reducer": self._reducer.state_dict(),
                "loaders": self._loaders.state() if self._loaders is not None and together else [],
            }
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizers and, as this is reached only when fitting goes on, this strategy's own state."""
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is None or self._reducer is None:
            return
        self._progress.attempted, self._progress.skipped = state["attempted_steps"], state["skipped_steps"]
        self._progress.consecutive_skips, self._progress.total_count = state["consecutive_skips"], state["total_count"]
        self._reducer.load_state_dict(state["reducer"])
        if self._loaders is not None:
            self._loaders.restore(state["loaders"])

    # ------------------------------------------------------------------------------------------- bookkeeping

    def _reset_progress(self) -> None:
        self._progress = _Progress()
        self._figures = RunFigures()
        self._count = 1
        self._padding = False
        self._policy = None
        self._batch_idx = 0
        self._buckets = 0
        self._gradient_bytes = 0

    def _note_plan(self) -> None:
        assert self._reducer is not None and self.model is not None
        self._buckets = len(self._reducer.plan.buckets)
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def _note_reduction(self) -> None:
        """Keeps the verdict for the optimizer step: one bad reduction since the last step spoils the step."""
        assert self._reducer is not None and self._reducer.last is not None
        last = self._reducer.last
        if self._progress.verdict.step or self._progress.verdict.reason is Reason.EMPTY:
            self._progress.verdict = last.verdict
        self._progress.total_count += last.tally.count
        self._figures.add(last.nbytes, last.messages, last.times.exposed, last.times.backward_end)
        self._note_plan()

    def _count_of(self, batch: Any) -> int:
        return as_count(self._count_function(batch), self._where())

    def _where(self, rank: bool = True) -> str:
        step = f"step {self._progress.attempted}, batch {self._batch_idx}"
        return f"rank {self.global_rank}, {step}" if rank else step


def _check_keywords(kwargs: Mapping[str, Any]) -> None:
    known = (*_BASE_ARGUMENTS, *_INHERENT_ARGUMENTS)
    for name in kwargs:
        if name in _REFUSED_ARGUMENTS:
            raise ConfigurationError(f"{name} cannot be used with bucketed_ddp: {_REFUSED_ARGUMENTS[name]}")
        if name not in known:
            own = list(inspect.signature(BucketedDDPStrategy).parameters)[:-1]
            raise ConfigurationError(f"bucketed_ddp has no argument {name!r}; its own are {', '.join(own)}")
    if kwargs.get("gradient_as_bucket_view") is False:
        rank_zero_warn("gradient_as_bucket_view=False is ignored: gradients are always views of their buckets here")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")


BucketedDDPStrategy.register_strategies(StrategyRegistry)
