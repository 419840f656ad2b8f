"""How a reducer works: what its user chose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import torch

from lightning_dp.errors import ConfigurationError
from lightning_dp.reduction.comm_hooks import Hook

MIB = 1024 * 1024
AUTO: Final = "auto"  # for bucket_cap_mb
FIXED_CAP_MB = 25.0  # until it has measured, and where it does not
TRIED_MB = (1.0, 4.0)  # what it tries, too: on a slow link as good as any search, where a measurement has gone wrong


@dataclass(frozen=True)
class ReducerConfig:
    """How a reducer works.

    Attributes:
        bucket_cap_mb: Cap on a bucket in MiB; a larger parameter has a bucket to itself. ``"auto"`` starts with 25,
            measures a few steps and the link, plans buckets that finish as early as can be, and tries that plan against
            buckets of 1, 4 and 25 in some more steps; on a CPU each with and without transport threads that interrupt
            backward. The plan decides in which order ranks' gradients are added up, so runs may differ in the last
            bits; under ``torch.use_deterministic_algorithms`` 25 stays. So it does with a communication hook, which may
            remember things by bucket.
        first_bucket_cap_mb: Cap on the first bucket launched in MiB; small, so that communication starts early.
        overlap: Launch buckets during backward. If not, all are launched at its end: slower, but right for a model
            whose gradients fire a different number of times from step to step.
        check_nonfinite: Look for NaN and Inf and name whose they are.
        drop_nonfinite: Leave a rank whose gradients are not finite out of the step, which is then exact over the other
            ranks. What it costs: buckets leave at the end of backward only, as nothing can be taken back from a sum;
            and on a GPU the host waits for the device once more.
        reduce_dtype: ``"bf16"`` or ``"fp16"``: what wider gradients are rounded to on the wire. ``"fp32"``: gradients
            of narrower dtypes are accumulated and summed in float32 and rounded once, at the end. Until then ``grad``
            is float32; it costs 4 bytes an element, on the wire and in memory.
        exact_sums: With ``"bf16"`` or ``"fp16"``, add up in float32: the same bytes, and an error that does not grow
            with ranks.
        comm_hook: A communication hook as torch DDP takes them; it averages the buckets in the place of an all-reduce.
        comm_state: What the hook is handed.
        measure_norm: Measure the norm of the averaged gradients; one pass over them, and a GPU's host waits for it.

    Raises:
        ConfigurationError: If two choices contradict each other.
    """

    bucket_cap_mb: float | Literal["auto"] = AUTO
    first_bucket_cap_mb: float = 1.0
    overlap: bool = True
    check_nonfinite: bool = True
    drop_nonfinite: bool = False
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    exact_sums: bool = False
    comm_hook: Hook | None = None
    comm_state: Any = None
    measure_norm: bool = False

    def __post_init__(self) -> None:
        if self.exact_sums and self.reduce_dtype == "fp32":
            raise ConfigurationError(
                "exact_sums adds up in float32 what travels in fewer bytes, which reduce_dtype='fp32' does by itself:"
                " leave exact_sums out"
            )

    @property
    def to_agree_on(self) -> dict[str, object]:
        """What must be the same on all ranks, by name."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("comm_")}
        return {
            **plain,
            "ddp_comm_hook": getattr(self.comm_hook, "__qualname__", self.comm_hook is not None),
            "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        }

    @property
    def sends_during_backward(self) -> bool:
        """Whether buckets leave while backward runs."""
        return self.overlap and not self.drop_nonfinite

    @property
    def cap_mb(self) -> float:
        """Cap on a bucket in MiB where nothing has been planned by measurement."""
        return FIXED_CAP_MB if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb

    @property
    def plans_by_measurement(self) -> bool:
        """Whether ``"auto"`` measures; the same on all ranks."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self.bucket_cap_mb == AUTO and self.comm_hook is None and not deterministic
