"""The strategy's settings, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_dp.data.counts import CountFunction, resolve_count
from lightning_dp.data.padding import UNEVEN_POLICIES
from lightning_dp.errors import ConfigurationError
from lightning_dp.reduction.comm_hooks import Hook
from lightning_dp.reduction.config import AUTO, ReducerConfig
from lightning_dp.reduction.transport import REDUCE_DTYPES

NONFINITE_POLICIES = ("skip", "raise", "drop_rank", "off")
REPLICA_ACTIONS = ("warn", "raise", "resync")
SAME_DATA_POLICIES = ("off", "warn", "raise")
BUFFER_POLICIES = ("step", "eval", "off")
# The strategy's names in Lightning's registries, and how each starts the other local processes.
NAMES = {
    "bucketed_ddp": "popen",
    "bucketed_ddp_spawn": "spawn",
    "bucketed_ddp_fork": "fork",
    "bucketed_ddp_notebook": "fork",
}
START_METHODS = ("popen", "spawn", "fork", "forkserver")

# Lightning's own arguments of a strategy, handed on as they are.
BASE_ARGUMENTS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
# Communication hooks as torch DDP takes them, under Lightning's names.
HOOK_ARGUMENTS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")
# What torch DDP must be told and this strategy does anyway.
INHERENT_ARGUMENTS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_ONE_GROUP = "there is one group of replicas: all ranks"
_WHOLE_BUCKETS = "every gradient is reduced with its bucket"
REFUSED_ARGUMENTS = {
    "model_averaging_period": "replicas are identical after every step, so there is nothing to average now and then",
    "delay_all_reduce_named_params": _WHOLE_BUCKETS,
    "param_to_hook_all_reduce": _WHOLE_BUCKETS,
    "mixed_precision": "precision is the Trainer's: Trainer(precision=...)",
    "device_mesh": _ONE_GROUP,
    "process_group": _ONE_GROUP,
    "init_sync": "replicas must be equal at the start, so rank 0's weights are always sent",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user chose; see :class:`lightning_dp.BucketedDDPStrategy` for the meanings.

    Raises:
        ConfigurationError: If a value is out of range; one line that says what is allowed.
    """

    bucket_cap_mb: float | str
    first_bucket_cap_mb: float
    overlap: bool
    count: str | CountFunction
    normalizers: Mapping[str, str | CountFunction] | None
    nonfinite: str
    max_consecutive_skips: int
    uneven: str
    pad_samples: bool
    spike_factor: float | None = None
    check_replicas_every: int = 0
    on_replica_mismatch: str = "raise"
    same_data: str = "off"
    broadcast_buffers: str | bool = "off"
    report_unused_after: int = 0
    timeout: timedelta | float
    start_method: str
    preflight: float | None = None
    reduce_dtype: str | None = None
    exact_sums: bool = False
    comm_hook: Hook | None = None
    comm_state: Any = None

    def __post_init__(self) -> None:
        if self.bucket_cap_mb != AUTO:
            _check_positive("bucket_cap_mb", self.bucket_cap_mb, or_else=f" or {AUTO!r}")
        for name in ("first_bucket_cap_mb", "max_consecutive_skips"):
            _check_positive(name, getattr(self, name))
        _check_positive("timeout", self.seconds)
        for name in ("nonfinite", "same_data", "broadcast_buffers"):
            if getattr(self, name) is False or getattr(self, name) == "False":  # YAML reads a bare `off` as false
                object.__setattr__(self, name, "off")
        if self.broadcast_buffers is True:  # as torch DDP spells it
            object.__setattr__(self, "broadcast_buffers", "step")
        for name in ("spike_factor", "preflight"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("check_replicas_every", "report_unused_after"):
            _check_not_negative(name, getattr(self, name))
        _check_choice("on_replica_mismatch", self.on_replica_mismatch, REPLICA_ACTIONS)
        _check_choice("same_data", self.same_data, SAME_DATA_POLICIES)
        _check_choice("broadcast_buffers", self.broadcast_buffers, BUFFER_POLICIES)
        _check_choice("nonfinite", self.nonfinite, NONFINITE_POLICIES)
        _check_choice("uneven", self.uneven, UNEVEN_POLICIES)
        _check_choice("start_method", self.start_method, START_METHODS)
        if self.reduce_dtype is not None:
            _check_choice("reduce_dtype", self.reduce_dtype, tuple(REDUCE_DTYPES))
        if self.comm_hook is not None and self.reduce_dtype is not None:
            raise ConfigurationError("ddp_comm_hook decides what travels: use it without reduce_dtype")
        _ = self.reducer  # refuses what contradicts itself
        resolve_count(self.count)
        if self.normalizers and self.count not in ("samples", "equal"):
            raise ConfigurationError(
                f"count={self.count!r} and normalizers exclude each other: each part of the loss has its own normalizer"
            )

    @property
    def seconds(self) -> float:
        """How long a rank waits for another one."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    @property
    def count_function(self) -> CountFunction:
        """What a micro-batch weighs; with normalizers all weigh the same."""
        return resolve_count("equal" if self.normalizers else self.count)

    @property
    def normalizer_functions(self) -> dict[str, CountFunction]:
        """What parts of a loss are divided by."""
        return {name: resolve_count(function) for name, function in (self.normalizers or {}).items()}

    @property
    def reducer(self) -> ReducerConfig:
        """The reducer's part."""
        return ReducerConfig(
            "auto" if self.bucket_cap_mb == AUTO else float(self.bucket_cap_mb),
            float(self.first_bucket_cap_mb),
            bool(self.overlap),
            check_nonfinite=self.nonfinite != "off",
            drop_nonfinite=self.nonfinite == "drop_rank",
            reduce_dtype=cast("Literal['bf16', 'fp16', 'fp32'] | None", self.reduce_dtype),
            exact_sums=bool(self.exact_sums),
            comm_hook=self.comm_hook,
            comm_state=self.comm_state,
            measure_norm=self.spike_factor is not None,
        )


def refuse_unsuitable(
    settings: Settings, training_step: Callable[..., Any], optimizers: Sequence[Optimizer], has_scaler: bool
) -> None:
    """Refuses what cannot be trained, or not with these settings.

    Args:
        settings: What the user chose.
        training_step: The module's.
        optimizers: The module's.
        has_scaler: Whether a GradScaler scales its loss.

    Raises:
        ConfigurationError: For the first such thing.
    """
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise ConfigurationError(
            "training_step(dataloader_iter) fetches its batches itself, so nobody can count them or keep ranks in"
            " step; take a batch instead: training_step(batch, batch_idx)"
        )
    if settings.nonfinite == "drop_rank" and has_scaler:
        raise ConfigurationError(
            "nonfinite='drop_rank' cannot be used with a GradScaler, to which an overflow on any rank says that its"
            " scale is too high; use nonfinite='skip', or precision='bf16-mixed'"
        )
    if settings.spike_factor is not None and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigurationError(
            "spike_factor cannot be used with LBFGS, whose line search tries points at which gradients are large"
        )
    if any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise ConfigurationError("SparseAdam needs sparse gradients, which are made dense here; use Adam")


def register(registry: Any, strategy: type) -> None:
    """Adds a strategy under each of :data:`NAMES` to a registry of Lightning's or Fabric's."""
    for name, start_method in NAMES.items():
        if name not in registry:
            registry.register(
                name,
                strategy,
                description=f"Count-weighted bucketed data parallelism with `start_method` '{start_method}'",
                start_method=start_method,
            )


def check_keywords(keywords: Mapping[str, Any], own: list[str], base: tuple[str, ...] = BASE_ARGUMENTS) -> None:
    """Refuses what has no meaning here, with the reason, and what nobody knows, with what there is.

    Args:
        keywords: Arguments other than the strategy's own.
        own: Names of the strategy's own.
        base: Names of those that Lightning's strategy takes.

    Raises:
        ConfigurationError: For the first such argument.
    """
    for name in keywords:
        if name in REFUSED_ARGUMENTS:
            raise ConfigurationError(f"{name} cannot be used with bucketed_ddp: {REFUSED_ARGUMENTS[name]}")
        if name not in (*base, *INHERENT_ARGUMENTS):
            raise ConfigurationError(f"bucketed_ddp has no argument {name!r}; its own are {', '.join(own)}")


def _check_positive(name: str, value: Any, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ConfigurationError(f"{name} must be a number above 0{or_else}, got {value!r}")


def _check_not_negative(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name} must be an integer of at least 0 (0: never), got {value!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not known: use one of {', '.join(choices)}")
