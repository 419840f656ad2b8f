"""A module's buffers: which ones training changes, sent from rank 0 when they did, put back when a step is skipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_dp.reduction.wire import Wire


class ModuleBuffers:
    """The buffers of a module, looked up by name each time, so that one replaced by assignment is followed.

    Args:
        module: The module. Its buffers' names are those that it has now.
        ignored: Names that are each rank's own business.

    Attributes:
        names: Names of the buffers, in the same order on every rank.
    """

    # A larger buffer is copied at the start of a window only if it is known to change: most large ones are constants.
    ALWAYS_COPIED_NBYTES = 2**20

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()) -> None:
        ignored = frozenset(ignored)
        self._module = module
        self.names = [name for name, _ in module.named_buffers() if name not in ignored]
        self._marks: dict[str, tuple[int, int]] = {}
        self._copies: dict[str, Tensor] = {}
        self._known_to_change: set[str] = set()

    def begin(self) -> None:
        """Remembers the buffers as they are at the start of an accumulation window."""
        buffers = self._lookup()
        self._marks = {name: _mark(buffer) for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            if buffer.nbytes > self.ALWAYS_COPIED_NBYTES and name not in self._known_to_change:
                continue
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape and copy.dtype == buffer.dtype:
                copy.copy_(buffer.detach())
            else:
                self._copies[name] = buffer.detach().clone()

    def changed(self) -> list[bool]:
        """For each name whether the buffer was written to, or replaced, since :meth:`begin`."""
        buffers = self._lookup()
        changed = [name in buffers and _mark(buffers[name]) != self._marks.get(name) for name in self.names]
        self._known_to_change.update(name for name, has in zip(self.names, changed, strict=True) if has)
        return changed

    def put_back(self) -> list[str]:
        """Gives floating-point buffers the values that they had at :meth:`begin`.

        Returns:
            Names of those that have changed and of which there was no copy.
        """
        buffers = self._lookup()
        lost = []
        for name, has_changed in zip(self.names, self.changed(), strict=True):
            buffer = buffers.get(name)
            if not has_changed or buffer is None or not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            copy = self._copies.get(name)
            if copy is None:
                lost.append(name)
            elif copy.shape == buffer.shape:
                # Through `data`: the graph of a loss that is still alive must not find its saved tensors changed.
                buffer.data.copy_(copy)
            else:
                owner, _, last = name.rpartition(".")
                setattr(self._module.get_submodule(owner), last, copy.clone())
        return lost

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


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Changes when a buffer is written to or replaced; autograd counts the writes."""
    return id(buffer), -1 if buffer.is_inference() else buffer._version
