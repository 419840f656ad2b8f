"""The Lightning strategy: with loaders.py the only file that touches Lightning's private parts (checked on 2.6.6)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _resolve_overfit_batches
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.optim import LBFGS, Optimizer

from lightning_dp.arrival import arrive
from lightning_dp.checkpoint import RunParts
from lightning_dp.data.counts import CountFunction, as_count
from lightning_dp.errors import ConfigurationError, CountWarning, LightningDPError
from lightning_dp.health.samplers import describe_sampler
from lightning_dp.insight.run_report import RunFigures, RunReport
from lightning_dp.last_saves import LastSaves
from lightning_dp.launch import ProgramLauncher
from lightning_dp.loaders import TrainerLoaders
from lightning_dp.progress import Progress
from lightning_dp.reduction.ballot import Flag
from lightning_dp.reduction.buckets import BucketPlan
from lightning_dp.reduction.reducer import GradientReducer
from lightning_dp.reduction.replication import ignored_names, make_replicas, replicated
from lightning_dp.reduction.wire import Wire
from lightning_dp.settings import (
    BASE_ARGUMENTS,
    HOOK_ARGUMENTS,
    INHERENT_ARGUMENTS,
    Settings,
    check_keywords,
    refuse_unsuitable,
    register,
)
from lightning_dp.step_guard import Advice, StepGuard
from lightning_dp.watch import Watch, grad_scale

ADVICE = Advice(
    unknown="are none of the module's parameters as fit found them, so their gradients are not averaged; register them"
    " in the module (in __init__ or configure_model) before fit",
    stray="call self.manual_backward(loss) instead",
    local="leave block_backward_sync() (or sync_grad=False)",
)


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
        bucket_cap_mb: Cap on a bucket in MiB, or ``"auto"``: plan buckets by measurement in the first steps. As ranks'
            gradients are added up in another order then, runs may differ in the last bits; with
            ``Trainer(deterministic=True)``, and with a communication hook, ``"auto"`` is a cap of 25.
        first_bucket_cap_mb: Cap on the first bucket launched, in MiB.
        count: What a micro-batch weighs: ``"samples"``, ``"tokens"``, ``"equal"`` or a function ``batch -> int``.
            :meth:`set_count` overrides it for one micro-batch.
        nonfinite: When a rank's gradient holds NaN or Inf, ``"skip"`` the step on all ranks, ``"raise"`` on all ranks,
            or do not look (``"off"``). ``"drop_rank"`` leaves that rank's part out and steps on the average over the
            others. What that costs: buckets leave at the end of backward instead of during it, so communication is not
            hidden; a GPU's host waits once more a step; and the samples of that part are never learnt from.
        max_consecutive_skips: After this many skipped steps in a row all ranks raise.
        spike_factor: Skip a step whose gradient norm is more than this many times the median of the last 100 taken
            steps' (from the 20th on); ``None`` does not look. It costs one pass over the gradients.
        check_replicas_every: After so many steps, and before each checkpoint, compare fingerprints of all ranks'
            parameters, buffers and optimizer states; 0 never does. It costs one read of them.
        on_replica_mismatch: ``"raise"`` on all ranks, ``"warn"``, or ``"resync"``: copy from the majority of ranks.
        same_data: When ranks read the same batches in the first steps of an epoch: ``"warn"``, ``"raise"`` on all
            ranks, or do not look (``"off"``).
        broadcast_buffers: Send rank 0's buffers to the others when training has changed them: before the next
            ``"step"``, as torch DDP does, before an evaluation only (``"eval"``), or never (``"off"``). Buffers that
            nobody changes are never sent; with BatchNorm, ``"eval"`` saves a message a step and changes no gradient.
        report_unused_after: After so many steps name the parameters that never had a gradient on any rank, once; 0
            does not look.
        overlap: Send buckets while backward runs. ``False`` sends them at its end.
        uneven: What a rank does when its data has run out before the others': see
            :class:`lightning_dp.data.padding.PaddingPolicy`; ``"error"`` raises on all ranks.
        reduce_dtype: ``"bf16"`` or ``"fp16"``: what wider gradients are rounded to on the wire, for half the bytes;
            weights, optimizer and the gradients it sees keep their precision; for fp16 gradients are scaled so that
            sums stay in range. ``"fp32"``: gradients of bf16 and fp16 parameters are accumulated and summed in float32
            and rounded once, before clipping and the optimizer, for 4 bytes an element on the wire and in memory;
            within an accumulation window ``grad`` is float32. ``None`` leaves gradients as they are.
        exact_sums: With bf16 or fp16 on the wire, add up in float32: the same bytes; the error does not grow with
            ranks.
        normalizers: For losses in parts: what parts are divided by, by name, each ``"samples"``, ``"tokens"`` or a
            function ``batch -> int``; see :meth:`normalize`. Micro-batches then weigh the same.
        pad_samples: Let Lightning's sampler repeat samples until all ranks have equally many, as it does elsewhere.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default what suits the device.
        timeout: How long a rank waits for another one; a timedelta or seconds.
        start_method: How Lightning starts the other local processes: ``"popen"``, ``"spawn"`` or ``"fork"``.
        preflight: Seconds within which all ranks must have started; before the process group is made they find out
            who is missing, differs or cannot be reached. ``None`` does not look.
        **kwargs: Lightning's own strategy arguments (``cluster_environment``, ``checkpoint_io``, ...); torch DDP's
            communication hooks in ``ddp_comm_hook``, ``ddp_comm_state``, ``ddp_comm_wrapper``, on any device. Of DDP's,
            ``find_unused_parameters``, ``static_graph`` and ``gradient_as_bucket_view`` are accepted and ignored, as
            what they are for is always so here.

    Raises:
        ConfigurationError: If an argument is unknown or has no meaning here, or a value is out of range.
    """

    def __init__(
        self,
        bucket_cap_mb: float | Literal["auto"] = "auto",
        first_bucket_cap_mb: float = 1.0,
        count: str | CountFunction = "samples",
        nonfinite: Literal["skip", "raise", "drop_rank", "off"] = "skip",
        max_consecutive_skips: int = 10,
        spike_factor: float | None = None,
        check_replicas_every: int = 1000,
        on_replica_mismatch: Literal["warn", "raise", "resync"] = "raise",
        same_data: Literal["off", "warn", "raise"] = "warn",
        broadcast_buffers: Literal["step", "eval", "off"] = "step",
        report_unused_after: int = 50,
        overlap: bool = True,
        uneven: Literal["auto", "skip", "replay", "error"] = "auto",
        pad_samples: bool = False,
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        exact_sums: bool = False,
        normalizers: Mapping[str, str | CountFunction] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        preflight: float | None = 120.0,
        **kwargs: Any,
    ) -> None:
        own = list(inspect.signature(BucketedDDPStrategy).parameters)[:-1]
        check_keywords(kwargs, own, (*BASE_ARGUMENTS, *HOOK_ARGUMENTS))
        hook, state, wrapper = (kwargs.get(f"ddp_comm_{name}") for name in ("hook", "state", "wrapper"))
        self._settings = Settings(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_cap_mb=first_bucket_cap_mb,
            overlap=overlap,
            count=count,
            normalizers=normalizers,
            nonfinite=nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            spike_factor=spike_factor,
            check_replicas_every=check_replicas_every,
            on_replica_mismatch=on_replica_mismatch,
            same_data=same_data,
            broadcast_buffers=broadcast_buffers,
            report_unused_after=report_unused_after,
            uneven=uneven,
            pad_samples=pad_samples,
            timeout=timeout,
            start_method=start_method,
            preflight=preflight,
            reduce_dtype=reduce_dtype,
            exact_sums=exact_sums,
            comm_hook=wrapper(hook) if wrapper is not None else hook,
            comm_state=state,
        )
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self._settings.seconds),
            start_method=start_method,
            **{name: kwargs[name] for name in BASE_ARGUMENTS if name in kwargs},
        )
        # Lightning's tests and callbacks read this; nothing here does.
        self._ddp_kwargs = {name: kwargs[name] for name in INHERENT_ARGUMENTS if name in kwargs}
        self._normalizers = self._settings.normalizer_functions
        self._count_function = self._settings.count_function
        self._progress = Progress(self._settings.nonfinite == "raise", self._settings.max_consecutive_skips)
        self._figures = RunFigures()
        self._plan = BucketPlan(())
        self._predicted_exposed: float | None = None
        self._guard: StepGuard | None = None
        self._reducer: GradientReducer | None = None
        self._former_reducer: dict[str, Any] | None = None
        self._loaders: TrainerLoaders | None = None
        self._watch: Watch | None = None
        self._steps_pending = False  # gradients are final and no optimizer has stepped on them
        self._stop: tuple[int, ...] = ()
        self._has_metrics = False  # of the part of the epoch before a run was resumed
        self._count = 1
        self._batch_idx = 0

    # ------------------------------------------------------------------------------------------- what users call

    def set_count(self, count: int | Tensor) -> None:
        """Sets the count of the micro-batch in hand; call it in ``training_step``, before any ``manual_backward``.

        Args:
            count: The number of samples, tokens, ... that this micro-batch's mean loss is over; 0 if there is none.

        Raises:
            CountError: If it is no integer of at least 0.
        """
        if not self.is_padding_batch:
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

    def veto(self, reason: str) -> None:
        """Makes all ranks skip the step under way; one rank's veto is enough.

        Call it before the step's last backward has ended, which is when the ranks agree: in ``training_step``,
        ``on_before_backward`` or a callback that runs by then. Rules on the averaged gradient, which is the same on
        all ranks, come later: see ``spike_factor``.

        Args:
            reason: For the message.

        Raises:
            LightningDPError: If the ranks have agreed on this step already, or no training batch is being worked on.
        """
        module = self.lightning_module
        if self._reducer is None or module is None or not module.trainer.training:
            raise LightningDPError("a veto is about a training step: cast it while a training batch is worked on")
        if self._steps_pending:
            raise LightningDPError(
                f"{self._where()}: a veto comes too late, the ranks have agreed on this step at the end of backward;"
                " cast it before"
            )
        self._reducer.veto(reason)

    def request_stop(self) -> None:
        """Asks all ranks to end the run; they learn of it together, with the next step's ballot."""
        if self._reducer is not None:
            self._reducer.flags |= Flag.STOP

    @property
    def stop_agreed(self) -> bool:
        """Whether all ranks know that some rank has called :meth:`request_stop`; the same on every rank."""
        return bool(self._stop)

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped, over the life of the run (resumes included)."""
        return self._progress.skipped

    @property
    def consecutive_skips(self) -> int:
        """Steps skipped in a row, up to now, for a non-finite gradient or by a veto."""
        return self._progress.consecutive_skips

    @property
    def dropped_parts(self) -> int:
        """Parts of steps, each of one rank, left out under ``nonfinite="drop_rank"``."""
        return self._progress.dropped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped on all ranks."""
        return self._progress.last_skipped

    @property
    def is_padding_batch(self) -> bool:
        """Whether the batch in hand only keeps this rank in step with others that have more data; it counts 0."""
        return self._loaders is not None and self._loaders.padding

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
            buckets=len(self._plan.buckets),
            gradient_bytes=self._plan.nbytes,
            predicted_exposed_seconds=self._predicted_exposed,
        )

    # ------------------------------------------------------------------------------------------- set-up, teardown

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this where it does not know a strategy's type."""
        return True

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Adds ``bucketed_ddp`` and its start-method variants to a registry of Lightning's."""
        register(strategy_registry, cls)

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = ProgramLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            super()._configure_launcher()

    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        # Hooks sit on the parameters, so nothing is wrapped and any method of the module may be called.
        return model

    def configure_ddp(self) -> None:
        """Makes replicas: the same structure is checked on all ranks, then rank 0's values are sent."""
        assert self.model is not None
        make_replicas(self.model, Wire())

    def setup(self, trainer: Trainer) -> None:
        """Sets the model up; when fitting, attaches the reducer."""
        module = self.lightning_module
        assert module is not None
        self._remove_loaders()
        self._loaders = TrainerLoaders(
            trainer,
            self._control,
            self._settings.uneven,
            self._settings.pad_samples,
            must_replay=self._must_replay(),
            normalizers=self._normalizers,
            prepare=_process_dataloader,
            stop_shuffling=_resolve_overfit_batches,
        )
        super().setup(trainer)
        if self.global_rank != 0:
            warnings.simplefilter("ignore", CountWarning)  # said once, by rank 0
        if trainer.state.fn != TrainerFn.FITTING:
            return
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        refuse_unsuitable(self._settings, module.training_step, self.optimizers, has_scaler)
        if self._ddp_kwargs:
            rank_zero_info(f"bucketed_ddp ignores {', '.join(self._ddp_kwargs)}: what it is for is always so here")
        assert self.model is not None
        named = replicated(self.model, self.model.named_parameters())
        self._last_saves = LastSaves(self.global_rank, self._settings.seconds)
        self._reducer = GradientReducer(named, config=self._settings.reducer)
        self._guard = StepGuard(self._reducer, ADVICE)
        self._stop, self._steps_pending = (), False
        self._watch = Watch(
            module,
            lambda: self.optimizers,
            self._reducer,
            Wire(),
            self._settings,
            ignored_names(self.model),
            expects_equal_data=bool(getattr(trainer, "overfit_batches", 0)),
        )
        self._loaders.on_training_loader = self._compare_samplers
        # Lightning moves step-wise schedulers even if the strategy did not step (training_epoch_loop.py:456).
        loop = trainer.fit_loop.epoch_loop
        loop.update_lr_schedulers = partial(self._update_lr_schedulers, loop.update_lr_schedulers)  # type: ignore[method-assign]

    def setup_distributed(self) -> None:
        """Meets the other ranks; makes the process group and, beside one for GPUs, one for small messages of hosts.

        Raises:
            ConfigurationError: If what started the ranks started another number of them.
            PreflightError: On all ranks that are there: if ranks are missing, differ or cannot be reached.
        """
        self.set_world_ranks()
        on_gpu = self.root_device.type == "cuda"
        arrive(self.cluster_environment, self.num_processes, self.num_nodes, self._settings.preflight, on_gpu)
        super().setup_distributed()
        on_host = not dist.is_initialized() or self._process_group_backend == "gloo"
        self._control = Wire(None if on_host else dist.new_group(backend="gloo", timeout=self._timeout))

    def teardown(self) -> None:
        """Removes the hooks and what was put into Lightning's loops."""
        self._remove_loaders()
        self._watch = self._guard = None
        self._control = Wire()  # beside GPUs it has a group of its own, which would outlive the process group
        if self._reducer is not None:
            self._reducer.detach()
            self._former_reducer = self._reducer.state_dict()  # for a checkpoint saved after fit
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
        if self._loaders is not None and self.lightning_module is not None:
            self._loaders.take(dataloader_idx)
            trainer = self.lightning_module.trainer
            if self._watch is not None and trainer.training:
                self._watch.receive(batch, self._loaders.padding, trainer.current_epoch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _compare_samplers(self, loader: object) -> None:
        if self._watch is not None and self._settings.same_data != "off":
            self._watch.loader_is_set_up(self._control.gather(describe_sampler(loader)))

    def on_validation_start(self) -> None:
        """All ranks evaluate with the same buffers."""
        super().on_validation_start()
        if self._watch is not None:
            self._watch.start_evaluation()

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
        if self._has_metrics:
            # Lightning leaves schedulers that go by metrics as they are at the end of a resumed epoch, as it does not
            # save metrics (fit_loop.py:488). Here they are there.
            assert self.lightning_module is not None
            self.lightning_module.trainer.fit_loop._restarting = self._has_metrics = False
        if self._loaders is not None:
            self._loaders.follow_lengths()
        if self._watch is not None:
            self._watch.start_batch(self._progress.attempted)
        if self._reducer is not None and self._reducer.reference is None:
            self._reducer.agree_reference(self._count_of(batch))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Counts the batch, then runs the module's ``training_step``.

        A step that returns ``None``, and a padding batch, contribute nothing: they count 0.
        """
        module = self.lightning_module
        assert module is not None
        self._count = 0 if self.is_padding_batch else self._count_of(args[0] if args else kwargs.get("batch"))
        output = self._run_step(super().training_step, *args, **kwargs)
        if output is not None or not module.automatic_optimization:
            return output
        # Lightning refuses None when there are several ranks (automatic.py:322), before it asks the strategy.
        if self._normalizers and not self.is_padding_batch:
            warnings.warn(
                f"rank {self.global_rank}: training_step returned None for a batch that the normalizers had counted"
                " before; let them count 0 in a batch that yields nothing",
                stacklevel=2,
            )
        self._count = 0
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``validation_step``; a padding batch leaves no trace."""
        return self._run_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``test_step``; a padding batch leaves no trace."""
        return self._run_step(super().test_step, *args, **kwargs)

    def _run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._loaders.run_step(step, *args, **kwargs) if self._loaders is not None else step(*args, **kwargs)

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
        loss = closure_loss.detach()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Lightning has divided the loss by the window's nominal length, also in a shorter last window.
        divided_by = module.trainer.accumulate_grad_batches if module.automatic_optimization else None
        loss = loss * divided_by if divided_by not in (None, 1) else loss
        before = self._reducer.last
        assert self._watch is not None
        if self._reducer.syncs:
            self._watch.cast()
        with self._reducer.backward_pass(self._count, f"batch {self._batch_idx}", divided_by, loss) as weight:
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
        if self._guard is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._guard.check_parameters(optimizer, self._where())
        if isinstance(optimizer, LBFGS):
            output = super().optimizer_step(optimizer, partial(self._global_loss, closure), model, **kwargs)
            self._steps_pending = False
            self._progress.attempted += 1
            return output
        result = closure()
        self._guard.check_gradients(optimizer, self._where())
        # With a GradScaler every rank holds the same Inf, and the scaler skips and lowers its scale by itself.
        scaler_skips = getattr(self.precision_plugin, "scaler", None) is not None
        self._steps_pending = False
        skips = self._progress.skips(self._where(rank=False), scaler_skips)
        if self._progress.last_skipped:
            self._announce_skip()
        if skips:
            # Tells torch's schedulers that an optimizer is in use, or the next one to move warns of a wrong order.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            output = result
        else:
            # The closure has run; the optimizer gets its result. One that asks again (SAM) has it run again.
            results = [result]
            output = super().optimizer_step(optimizer, lambda: results.pop() if results else closure(), model, **kwargs)
            if self._watch is not None:
                self._watch.stepped()
        self._progress.attempted += 1
        return output

    def _announce_skip(self) -> None:
        """Leaves nothing of the step behind, and tells callbacks and the module, if they have ``on_step_skipped``."""
        module = self.lightning_module
        assert self._watch is not None and module is not None
        self._watch.put_back()
        for listener in (*module.trainer.callbacks, module):  # type: ignore[attr-defined]
            hook = getattr(listener, "on_step_skipped", None)
            if callable(hook):
                hook(module.trainer, module, self._progress.verdict)

    def _global_loss(self, closure: Callable[[], Any]) -> Any:
        self._steps_pending = False
        loss = closure()
        assert self._guard is not None
        add_up = partial(super().reduce, reduce_op="sum")
        return self._guard.global_loss(loss, self._count, add_up, self._where(rank=False))

    def _update_lr_schedulers(
        self, update: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """A step-wise scheduler does not move for a skipped step, unless its period holds steps that were taken."""
        if interval != "step" or not self._progress.last_skipped:
            update(interval, update_plateau_schedulers=update_plateau_schedulers)
            return
        module = self.lightning_module
        assert module is not None
        batches = self._progress.skipped_in_a_row * module.trainer.accumulate_grad_batches
        every = self.lr_scheduler_configs
        self.lr_scheduler_configs = [config for config in every if config.frequency > batches]
        try:
            update(interval, update_plateau_schedulers=update_plateau_schedulers)
        finally:
            self.lr_scheduler_configs = every

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
        """Adds what a resumed run needs, the same on every rank, if there was any training."""
        learnt = self._reducer.state_dict() if self._reducer is not None else self._former_reducer
        if learnt is not None:
            self._parts.save(checkpoint, learnt, _metrics(self.lightning_module), self._is_failing)
        if self._is_failing:
            self._last_saves.begin()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizers and, as this is reached only when fitting goes on, this strategy's own state."""
        super().load_optimizer_state_dict(checkpoint)
        metrics = self._parts.load(checkpoint)
        if metrics is not None:
            assert self.lightning_module is not None
            self.lightning_module.trainer.callback_metrics.update(metrics)
            self._has_metrics = True

    @property
    def _is_failing(self) -> bool:
        """Whether an exception is ending this rank's fit: the others may be anywhere."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return interrupted and self._reducer is not None  # until teardown

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; while an exception ends this rank's fit only for a checkpoint that rank 0 is saving."""
        if self._is_failing:
            self._last_saves.end()
        else:
            super().barrier(*args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say yes; while an exception ends this rank's fit, what this one says."""
        return decision if self._is_failing else super().reduce_boolean_decision(decision, all)

    @property
    def _parts(self) -> RunParts:
        return RunParts(self._progress, self._reducer, self._loaders, self._watch)

    # ------------------------------------------------------------------------------------------- bookkeeping

    def _note_reduction(self) -> None:
        """Keeps the verdict for the optimizer step, and the figures for the report."""
        assert self._reducer is not None and self._reducer.last is not None
        assert self._watch is not None
        last = self._reducer.last
        verdict = self._watch.judge(last, grad_scale(self.precision_plugin))
        self._steps_pending = True
        self._stop = self._stop or last.tally.ranks_with(Flag.STOP)
        reduced = self._reducer.names_used(last.tally) if not verdict.step else ()
        self._progress.note(verdict, last.tally.count, last.carried, reduced)
        self._figures.add(last.nbytes, last.messages, last.times.exposed, last.times.backward_end)
        self._plan, self._predicted_exposed = self._reducer.plan, self._reducer.predicted_exposed

    def _count_of(self, batch: Any) -> int:
        return as_count(self._count_function(batch), self._where())

    def _where(self, rank: bool = True) -> str:
        step = f"step {self._progress.attempted}, batch {self._batch_idx}"
        return f"rank {self.global_rank}, {step}" if rank else step


def _metrics(module: LightningModule | None) -> dict[str, Tensor]:
    """What was logged, as callbacks and schedulers see it; a loop may be through with computing it, or not."""
    known = module.trainer._logger_connector._callback_metrics if module is not None else {}
    return {name: value.detach().cpu() for name, value in known.items()}


BucketedDDPStrategy.register_strategies(StrategyRegistry)
