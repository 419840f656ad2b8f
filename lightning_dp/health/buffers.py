"""A module's buffers: which ones training changes, sent from rank 0 when they did, put back when a step is skipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_dp.health.fingerprint import fingerprints
from lightning_dp.reduction.wire import Wire


class ModuleBuffers:
    """The buffers of a module, looked up by name each time, so that one replaced by assignment is followed.

    Whether a buffer changes is seen by its version, which autograd counts up, in every window. Not all writes are
    counted: those of ``F.batch_norm`` and through ``.data`` are not. So in the first windows, and now and then later,
    values are compared, too. A buffer that has changed once is taken to change always.

    Args:
        module: The module. Its buffers' names are those that it has now.
        ignored: Names that are each rank's own business.

    Attributes:
        names: Names of the buffers, in the same order on every rank.
    """

    # A larger buffer is copied at the start of a window only if it is known to change: most large ones are constants.
    ALWAYS_COPIED_NBYTES = 2**20
    FIRST_COMPARED = 4
    COMPARED_EVERY = 64

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()) -> None:
        ignored = frozenset(ignored)
        self._module = module
        self.names = [name for name, _ in module.named_buffers() if name not in ignored]
        self._windows = 0
        self._marks: dict[str, tuple[int, int]] = {}
        self._compared: list[str] = []
        self._prints: Tensor | None = None
        self._copies: dict[str, Tensor] = {}
        self._known: set[str] = set()

    def begin(self) -> None:
        """Remembers the buffers as they are at the start of an accumulation window."""
        buffers = self._lookup()
        self._marks = {name: _mark(buffer) for name, buffer in buffers.items() if name not in self._known}
        compares = self._windows < self.FIRST_COMPARED or self._windows % self.COMPARED_EVERY == 0
        self._windows += 1
        self._compared = list(self._marks) if compares else []
        self._prints = fingerprints([buffers[name] for name in self._compared]) if self._compared else None
        for name, buffer in buffers.items():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            if buffer.nbytes > self.ALWAYS_COPIED_NBYTES and name not in self._known:
                continue
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape and copy.dtype == buffer.dtype:
                copy.copy_(buffer.detach())
            else:
                self._copies[name] = buffer.detach().clone()

    def changed(self) -> list[bool]:
        """For each name whether the buffer was written to, or replaced, since :meth:`begin`."""
        buffers = self._lookup()
        self._known.update(name for name, mark in self._marks.items() if _mark(buffers.get(name)) != mark)
        if self._prints is not None and all(name in buffers for name in self._compared):
            differs = fingerprints([buffers[name] for name in self._compared]) != self._prints
            self._known.update(name for name, does in zip(self._compared, differs.tolist(), strict=True) if does)
            self._prints = None
        return [name in self._known for name in self.names]

    def put_back(self) -> list[str]:
        """Gives floating-point buffers the values that they had at :meth:`begin`.

        Returns:
            Names of those that have changed and of which there was no copy.
        """
        self.changed()
        buffers = self._lookup()
        for name, copy in self._copies.items():
            buffer = buffers.get(name)
            if buffer is not None and copy.shape == buffer.shape:
                # Through `data`: the graph of a loss that is still alive must not find its saved tensors changed.
                buffer.data.copy_(copy)
            else:
                owner, _, last = name.rpartition(".")
                setattr(self._module.get_submodule(owner), last, copy.clone())
        floating = {n for n, b in buffers.items() if b.is_floating_point() or b.is_complex()}
        return [name for name in self.names if name in self._known & floating and name not in self._copies]

    def broadcast(self, wire: Wire, names: Iterable[str] | None = None) -> None:
        """Overwrites every rank's buffers with rank 0's, bit for bit, in one message; all ranks together.

        Args:
            wire: The ranks.
            names: Which ones; by default all.
        """
        buffers = self._lookup()
        chosen = [buffers[name] for name in (self.names if names is None else names) if name in buffers]
        if wire.world_size == 1 or not chosen:
            return
        # As bytes: backends differ in the dtypes that they accept.
        as_bytes = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in chosen]
        message = torch.cat(as_bytes)
        wire.broadcast(message)
        for buffer, part in zip(chosen, torch.split(message, [len(part) for part in as_bytes]), strict=True):
            # Cloned, as a view of another dtype needs memory that is aligned for it.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _lookup(self) -> dict[str, Tensor]:
        known = set(self.names)
        return {name: buffer for name, buffer in self._module.named_buffers() if name in known}


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    """Changes when a buffer is replaced, or written to in a way that autograd counts."""
    return id(buffer), -1 if buffer is None or buffer.is_inference() else buffer._version
