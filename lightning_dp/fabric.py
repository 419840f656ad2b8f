"""The strategy for Lightning Fabric, where the training loop is the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import LBFGS, Optimizer

from lightning_dp.arrival import arrive
from lightning_dp.data.counts import as_count
from lightning_dp.errors import LightningDPError
from lightning_dp.progress import Progress
from lightning_dp.reduction.reducer import GradientReducer
from lightning_dp.reduction.replication import make_replicas, replicated
from lightning_dp.reduction.wire import Wire
from lightning_dp.settings import Settings, check_keywords, register
from lightning_dp.step_guard import Advice, StepGuard

_ADVICE = Advice(
    unknown="belong to no module that was set up, so their gradients are not averaged; pass their module to"
    " fabric.setup",
    stray="call fabric.backward(loss) instead",
    local="leave fabric.no_backward_sync()",
)
_BASE_ARGUMENTS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision")


class BucketedDDPStrategy(DDPStrategy):
    """:class:`lightning_dp.BucketedDDPStrategy` for Fabric: the step that one device with the whole batch would take.

    ``fabric.backward`` averages gradients over all samples of all ranks, within ``fabric.no_backward_sync`` it only
    accumulates them, and if any rank's gradient is not finite, ``optimizer.step()`` does nothing on any rank: rank 0
    warns and says whose it was, and :attr:`last_step_skipped` tells, for a scheduler of one's own. ::

        import lightning_dp

        fabric = Fabric(strategy="bucketed_ddp", devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            fabric.strategy.set_count(len(batch))
            fabric.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

    Fabric has no loop, so all ranks must call ``fabric.backward`` equally often; one whose data has run out can go on
    with any batch and ``set_count(0)``. Micro-batches of an accumulation window add up, as on one device; divide the
    loss by their number for the mean.

    Args:
        bucket_cap_mb: Cap on a bucket in MiB, or ``"auto"``: plan buckets by measurement in the first steps.
        first_bucket_cap_mb: Cap on the first bucket launched, in MiB.
        nonfinite: ``"skip"`` the step on all ranks, ``"raise"`` on all ranks, ``"drop_rank"`` (leave a bad rank out of
            the step, at the price that communication is not hidden), or do not look (``"off"``).
        max_consecutive_skips: After this many skipped steps in a row all ranks raise.
        overlap: Send buckets while backward runs. ``False`` sends them at its end.
        reduce_dtype: Dtype in which gradients travel and are summed: ``"bf16"`` or ``"fp16"`` for half the bytes,
            ``"fp32"`` for sums of low-precision gradients that are rounded once; ``None`` is their own.
        exact_sums: With ``"bf16"`` or ``"fp16"``, add up in float32: the same bytes.
        preflight: Seconds within which all ranks must have started, or the missing ones are named; ``None`` does not
            look.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default what suits the device.
        timeout: How long a rank waits for another one; a timedelta or seconds.
        start_method: How Fabric starts the other local processes: ``"popen"``, ``"spawn"`` or ``"fork"``.
        **kwargs: Fabric's own strategy arguments (``cluster_environment``, ``checkpoint_io``, ...).

    Raises:
        ConfigurationError: If an argument is unknown or has no meaning here, or a value is out of range.
    """

    def __init__(
        self,
        bucket_cap_mb: float | Literal["auto"] = "auto",
        first_bucket_cap_mb: float = 1.0,
        nonfinite: Literal["skip", "raise", "drop_rank", "off"] = "skip",
        max_consecutive_skips: int = 10,
        overlap: bool = True,
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        exact_sums: bool = False,
        preflight: float | None = 120.0,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        check_keywords(kwargs, list(inspect.signature(BucketedDDPStrategy).parameters)[:-1], _BASE_ARGUMENTS)
        self._settings = Settings(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_cap_mb=first_bucket_cap_mb,
            overlap=overlap,
            reduce_dtype=reduce_dtype,
            exact_sums=exact_sums,
            count="equal",
            normalizers=None,
            nonfinite=nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            uneven="auto",
            pad_samples=False,
            timeout=timeout,
            start_method=start_method,
            preflight=preflight,
        )
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self._settings.seconds),
            start_method=start_method,
            **{name: kwargs[name] for name in _BASE_ARGUMENTS if name in kwargs},
        )
        self._backward_sync_control = _SyncControl(self)  # type: ignore[assignment]
        self._progress = Progress(self._settings.nonfinite == "raise", self._settings.max_consecutive_skips)
        self._modules: list[Module] = []
        self._reducer: GradientReducer | None = None
        self._guard: StepGuard | None = None
        self._count = 1
        self._backwards = 0

    # ------------------------------------------------------------------------------------------- what users call

    def set_count(self, count: int | Tensor) -> None:
        """Says what micro-batches weigh from now on; 1 until it is called.

        Args:
            count: The number of samples, tokens, ... that the mean loss is over; 0 if there is none.

        Raises:
            CountError: If it is no integer of at least 0.
        """
        self._count = as_count(count, self._where())

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped."""
        return self._progress.skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last ``optimizer.step()`` did nothing, on all ranks."""
        return self._progress.last_skipped

    @property
    def reducer(self) -> GradientReducer | None:
        """The gradient reducer; there is one once a module has been set up."""
        return self._reducer

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside model and optimizer: ``fabric.save(path, {"strategy": fabric.strategy})``."""
        reducer = self._reducer
        return {"progress": self._progress.state_dict(), "reducer": reducer.state_dict() if reducer else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`'s result, on every rank, after the modules have been set up."""
        self._progress.load_state_dict(state["progress"])
        if self._reducer is not None and state["reducer"] is not None:
            self._reducer.load_state_dict(state["reducer"])

    # ------------------------------------------------------------------------------------------- set-up

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds ``bucketed_ddp`` and its start-method variants to a registry of Fabric's."""
        register(strategy_registry, cls)

    def _setup_distributed(self) -> None:
        """Meets the other ranks, and makes the process group.

        Raises:
            ConfigurationError: If the ranks were started in another way, or number, than is wanted.
            PreflightError: On all ranks that are there: if ranks are missing, differ or cannot be reached.
        """
        self._set_world_ranks()
        on_gpu = self.root_device.type == "cuda"
        arrive(self.cluster_environment, self.num_processes, self.num_nodes, self._settings.preflight, on_gpu)
        super()._setup_distributed()

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Makes replicas of rank 0's module; it is not wrapped, so any of its methods may be called.

        Raises:
            StructureMismatchError: If ranks pass different modules.
        """
        make_replicas(module, Wire())
        if module not in self._modules:
            self._modules.append(module)
        if self._reducer is not None:
            self._reducer.detach()
        # One reducer for all modules, as one backward may run through several of them.
        self._reducer = GradientReducer(self._named_parameters(), config=self._settings.reducer)
        self._guard = StepGuard(self._reducer, _ADVICE)
        return module

    def _named_parameters(self) -> list[tuple[str, Parameter]]:
        several = len(self._modules) > 1
        return [
            (f"module {number}: {name}" if several else name, parameter)
            for number, module in enumerate(self._modules)
            for name, parameter in replicated(module, module.named_parameters())
        ]

    # ------------------------------------------------------------------------------------------- one step

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward over the weighted loss; outside ``no_backward_sync`` gradients are final at its end.

        Raises:
            LightningDPError: If no module has been set up.
        """
        reducer = self._reducer
        if reducer is None:
            raise LightningDPError("fabric.backward before any module was set up: call fabric.setup(module) first")
        self.precision.pre_backward(tensor, module)
        reducer.agree_reference(self._count)
        before = reducer.last
        label = f"backward {self._backwards}"
        with reducer.backward_pass(self._count, label, divided_by=None, loss=tensor) as weight:
            self.precision.backward(tensor * weight, module, *args, **kwargs)
        self._backwards += 1
        if reducer.last is not None and reducer.last is not before:
            verdict, tally = reducer.last.verdict, reducer.last.tally
            reduced = reducer.names_used(tally) if not verdict.step else ()
            self._progress.note(verdict, tally.count, reducer.last.carried, reduced)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps or, if the ranks' verdict is to skip, leaves weights and optimizer as they are, on every rank.

        Raises:
            UnreducedGradientError: If gradients come from a plain ``loss.backward()``, or belong to no known module.
            NonFiniteGradientError: On all ranks, by policy ``"raise"`` or after too many skips in a row.
        """
        if self._guard is None:
            raise LightningDPError("optimizer.step before any module was set up: call fabric.setup(module) first")
        self._guard.check_parameters(optimizer, self._where())
        decides_by_loss = isinstance(optimizer, LBFGS)
        if decides_by_loss and closure is not None:
            output = super().optimizer_step(optimizer, closure=partial(self._global_loss, closure), **kwargs)
            self._progress.attempted += 1
            return output
        results = [] if closure is None else [closure()]
        self._guard.check_gradients(optimizer, self._where())
        # With a GradScaler every rank holds the same Inf, and the scaler skips and lowers its scale by itself.
        if self._progress.skips(self._where(rank=False), getattr(self.precision, "scaler", None) is not None):
            output = results[0] if results else None
        elif closure is None:
            output = super().optimizer_step(optimizer, **kwargs)
        else:
            # The closure has run; the optimizer gets its result. One that asks again (SAM) has it run again.
            output = super().optimizer_step(
                optimizer, closure=lambda: results.pop() if results else closure(), **kwargs
            )
        self._progress.attempted += 1
        return output

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """As the base class; gradients on which no step will be taken are no error."""
        error_if_nonfinite = error_if_nonfinite and self._progress.verdict.step
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

    def _global_loss(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        assert self._guard is not None
        add_up = partial(self.all_reduce, reduce_op="sum")
        return self._guard.global_loss(loss, self._count, add_up, self._where(rank=False))

    def _where(self, rank: bool = True) -> str:
        step = f"step {self._progress.attempted}"
        return f"rank {self.global_rank}, {step}" if rank else step


class _SyncControl:
    """What Fabric asks for ``fabric.no_backward_sync``."""

    def __init__(self, strategy: BucketedDDPStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Inside it gradients accumulate and nothing is sent."""
        reducer = self._strategy.reducer
        return reducer.no_sync() if enabled and reducer is not None else nullcontext()


BucketedDDPStrategy.register_strategies(STRATEGY_REGISTRY)
