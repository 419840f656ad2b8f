"""Counts: how much a micro-batch weighs in the average over ranks and micro-batches.

A loss that is the mean over n things (samples, tokens) has count n. Then the count-weighted average of gradients is
the gradient of the mean over all things on all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_dp.errors import ConfigurationError, CountError, CountWarning

CountFunction = Callable[[Any], int]
IGNORE_INDEX = -100  # what torch.nn.functional.cross_entropy ignores by default


def samples(batch: Any) -> int:
    """Number of samples: the size of the first dimension of the first tensor found in the batch.

    Looks into mappings, sequences and dataclasses, depth first. Warns where that is a guess: tensors of different
    first dimensions, or no tensor at all (counted 1).
    """
    sizes = list(_first_dimensions(batch))
    if not sizes:
        warnings.warn(
            f"the batch, a {type(batch).__name__}, holds no tensor to count samples by, so it counts 1; pass"
            " count=<function of the batch>",
            CountWarning,
            stacklevel=2,
        )
        return 1
    if len(set(sizes)) > 1:
        warnings.warn(
            f"the batch holds tensors of different first dimensions {sorted(set(sizes))}; the first, {sizes[0]}, is"
            " taken for the number of samples; pass count=<function of the batch> if it is not",
            CountWarning,
            stacklevel=2,
        )
    return sizes[0]


def tokens(batch: Any) -> int:
    """Number of tokens that have a loss: the entries of ``batch["labels"]`` other than -100.

    A model that shifts labels itself has no loss for the first column; pass
    ``count=lambda batch: int((batch["labels"][:, 1:] != -100).sum())`` for it.

    Raises:
        CountError: If the batch is no mapping with a tensor ``labels``.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise CountError(
            "count='tokens' needs a batch that is a mapping with a tensor 'labels' (-100 where there is no loss), got"
            f" a {type(batch).__name__}; pass count=<function of the batch> for another form"
        )
    return int((labels != IGNORE_INDEX).sum())


def equal(batch: Any) -> int:
    """1, whatever the batch: each micro-batch weighs the same, as under torch DDP."""
    return 1


COUNT_FUNCTIONS: dict[str, CountFunction] = {"samples": samples, "tokens": tokens, "equal": equal}


def resolve_count(count: str | CountFunction) -> CountFunction:
    """The function that a user's ``count`` setting stands for.

    Raises:
        ConfigurationError: If it is neither a known name nor callable.
    """
    if callable(count):
        return count
    if count in COUNT_FUNCTIONS:
        return COUNT_FUNCTIONS[count]
    raise ConfigurationError(
        f"count={count!r} is not known: use one of {', '.join(COUNT_FUNCTIONS)}, or a function batch -> int"
    )


def as_count(value: Any, where: str) -> int:
    """Turns what a count function returned into a count: an integer of at least 0, also as a 0-dim tensor.

    Args:
        value: The returned value.
        where: Rank and batch, for the message.

    Raises:
        CountError: If it is anything else, a fraction or NaN among them.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    whole = isinstance(number, numbers.Real) and not isinstance(number, bool) and math.isfinite(number)
    count = int(number) if whole and number == int(number) else -1
    if count < 0:
        raise CountError(f"{where}: a count must be an integer of at least 0, got {value!r}")
    return count


def _first_dimensions(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.ndim else 1
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _first_dimensions(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _first_dimensions(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _first_dimensions(getattr(batch, field.name))
