"""The same-data check: do several ranks read the same batches, and so waste their share of every step in silence.

Nothing here communicates: each rank makes a fingerprint of its batch, the ranks exchange these by the way, and all of
them come to the same conclusion.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, pairwise
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_dp.health.fingerprint import as_bits, combine, duplicates, fingerprints
from lightning_dp.health.samplers import SamplerFacts, likely_cause

SAMPLE = 1024  # elements looked at in a tensor or array, characters at either end of a string
_ITEMS = 64  # items looked at in a list or mapping
_LEAVES = 1024  # things looked at in a batch
_DEPTH = 16


@dataclass(frozen=True)
class SameData:
    """Ranks that read the same batches.

    Attributes:
        groups: The ranks of each group, whose batches were identical.
        steps: In how many consecutive steps.
        epoch: The epoch in which that was seen.
        causes: The likely cause for each group.
    """

    groups: tuple[tuple[int, ...], ...]
    steps: int
    epoch: int
    causes: tuple[str, ...]

    def describe(self) -> str:
        """Which ranks, for how long, why, and what to do, in one line."""
        who = "; ".join(
            f"ranks {', '.join(map(str, ranks))} read identical batches: {cause}"
            for ranks, cause in zip(self.groups, self.causes, strict=True)
        )
        return f"in {self.steps} consecutive steps of epoch {self.epoch} {who}"


class SameDataCheck:
    """Decides from each rank's :func:`batch_fingerprint` whether some ranks are fed the same data.

    Ranks are, if their batches were identical in every step looked at in an epoch, and in at least ``patience`` steps.
    It is no fault if data are legitimately equal: batches that do not change from one step to the next, padding
    batches, and whatever ``legitimate`` stands for.

    Args:
        facts: What each rank's loader is set to, by rank, to tell the likely cause.
        patience: Steps with identical batches that it takes.
        first_steps: Steps looked at in each epoch; in shorter epochs the steps of several are put together.
        legitimate: The user wants equal batches, as ``overfit_batches`` does.
    """

    def __init__(
        self,
        facts: Sequence[SamplerFacts] = (),
        patience: int = 3,
        first_steps: int = 8,
        legitimate: bool = False,
    ) -> None:
        self._facts = facts
        self._patience = patience
        self._first_steps = first_steps
        self._legitimate = legitimate
        self._epoch = -1
        self._steps = 0  # looked at in this epoch
        self._seen: list[Sequence[int | None]] = []
        self._reported: set[tuple[int, ...]] = set()

    def start_epoch(self, epoch: int) -> None:
        """A new epoch begins."""
        self._epoch = epoch
        self._steps = 0

    @property
    def wants_more(self) -> bool:
        """Whether this step is looked at; if not, no rank needs to make a fingerprint."""
        return not self._legitimate and self._steps < self._first_steps

    def observe(self, fingerprints: Sequence[int | None]) -> SameData | None:
        """Looks at one step.

        Args:
            fingerprints: Of each rank's batch, by rank, so the same list on every rank; ``None`` for a rank whose
                batch is padding, empty or unknown.

        Returns:
            The groups of ranks that are found to read the same and were not reported before; ``None`` if none are.
        """
        if not self.wants_more:
            return None
        self._steps += 1
        window = max(self._patience, self._steps)
        self._seen = [*self._seen, tuple(fingerprints)][-window:]
        if len(self._seen) < window:
            return None
        found = duplicates([_history(batches) for batches in zip(*self._seen, strict=True)])
        groups = tuple(ranks for ranks in found if not any({*ranks} <= {*old} for old in self._reported))
        self._reported.update(groups)
        causes = tuple(likely_cause(self._facts, ranks) for ranks in groups)
        return SameData(groups, window, self._epoch, causes) if groups else None


def _history(batches: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """A rank's batches, if they can tell it from another one."""
    constant = any(before == after for before, after in pairwise(batches))
    return None if constant or None in batches else batches


def batch_fingerprint(batch: Any) -> int | None:
    """A fingerprint of a batch by its content; of what is large, by a sample of it.

    Looks into mappings, lists, tuples, sets, dataclasses and the attributes of other objects, for tensors, numpy
    arrays, strings and numbers. Of a tensor at most :data:`SAMPLE` elements are read, spread all over it. If tensors
    are on a GPU, the host waits for it once: make the fingerprint before the batch is moved to spare that.

    Args:
        batch: What a loader yields.

    Returns:
        An integer from 1 to 2^63 - 1; ``None`` if nothing in the batch could tell it from another one.
    """
    leaves = list(islice(_leaves(batch, _DEPTH), _LEAVES))
    if not any(leaf.numel() if isinstance(leaf, Tensor) else leaf.startswith(_CONTENT) for leaf in leaves):
        return None
    digest = hashlib.blake2b(digest_size=8)
    samples: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        said = leaf
        if isinstance(leaf, Tensor):
            said = f"{leaf.dtype} {tuple(leaf.shape)}".encode()
            samples.setdefault(leaf.device, []).append(_sample(leaf))
        digest.update(len(said).to_bytes(8, "little") + said)
    for some in samples.values():
        digest.update(int(combine(fingerprints(some))).to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


_CONTENT = b"="  # begins what is content, other than names of keys and classes


def _leaves(value: Any, depth: int, inside_object: bool = False) -> Iterator[Any]:
    """Tensors, and bytes that stand for all else, in order."""
    if isinstance(value, Tensor):
        yield _numbers(value)
    elif _is_numpy(value, "ndarray"):
        picked = value if value.size <= SAMPLE else value.flat[_places(value.size).numpy()]
        yield _CONTENT * bool(value.size) + f"{value.dtype} {value.shape}".encode() + picked.tobytes()
    elif _is_numpy(value, "generic") and not isinstance(value, Number):
        yield _CONTENT + repr(value.item()).encode()
    elif isinstance(value, (str, bytes, Number)):
        # The attributes of an object may be its settings rather than its content.
        text = value if isinstance(value, (str, bytes)) else repr(value)
        yield _CONTENT * (not inside_object) + repr((len(text), text[:SAMPLE], text[-SAMPLE:])).encode()
    elif isinstance(value, Set):
        yield _CONTENT + repr(sorted(map(repr, islice(value, SAMPLE)))).encode()
    elif depth:
        yield type(value).__name__.encode()
        for name, inner in _items(value):
            yield repr(name).encode()
            is_content = isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value)
            yield from _leaves(inner, depth - 1, inside_object or not is_content)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What is in a container or object, by name; of a long list, some spread over it."""
    if isinstance(value, Mapping):
        return list(islice(value.items(), _ITEMS))
    if isinstance(value, (list, tuple)):
        step = max(1, -(-len(value) // _ITEMS))
        return [(len(value), inner) for inner in value[::step]]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).items())[:_ITEMS]


def _numbers(tensor: Tensor) -> Tensor:
    """A tensor of any layout as a dense one, without what a sparse one says of places."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.values()
    return tensor.int_repr() if tensor.is_quantized else tensor


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """Some elements of a tensor of any strides, as integers; no more than these are copied."""
    bits = as_bits(tensor)
    if bits.numel() <= SAMPLE:
        return bits
    places = _places(bits.numel()).to(bits.device, non_blocking=True)
    return bits[torch.unravel_index(places, bits.shape)]


@functools.lru_cache(maxsize=64)
def _places(numel: int) -> Tensor:
    """One place in each of :data:`SAMPLE` equal parts, not always the same one, lest all lie in one column."""
    with torch.inference_mode(False):
        scattered = (torch.arange(1, SAMPLE + 1) * 0x5851F42D4C957F2D >> 32) & 0x7FFFFFFF
        return torch.arange(SAMPLE) * numel // SAMPLE + scattered % (numel // SAMPLE)


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")  # if nobody has imported it, nothing is of its kind
    return numpy is not None and isinstance(value, getattr(numpy, kind))
