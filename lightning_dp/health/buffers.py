"""A module's buffers: which ones training changes, sent from rank 0 when they did, put back when a step is skipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_dp.health.fingerprint import fingerprints
from lightning_dp.reduction.wire import Wire


class ModuleBuffers:
    """The buffers of a module, looked up by name each time, so that one replaced by assignment is followed.

    A buffer *changes* if training ever writes to it or replaces it; else it is a constant. That is seen by its version,
    which autograd counts up, or by that of another buffer of the same layer: ``F.batch_norm`` writes its statistics
    uncounted, but BatchNorm counts its batches. Writes through ``.data`` are not counted at all, so values are
    compared, too, in the first windows and when :meth:`compare` is called.

    Args:
        module: The module. Its buffers' names are those that it has now; later ones are each rank's own.
        ignored: Names that are each rank's own business.

    Attributes:
        names: Names of the buffers, in the same order on every rank.
        changing: Names of those known to change.
    """

    # A larger buffer is copied at the start of a window only if it is known to change: most large ones are constants.
    ALWAYS_COPIED_NBYTES = 2**20
    WINDOWS_COMPARED = 4

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()) -> None:
        ignored = frozenset(ignored)
        self._module = module
        self.names = [name for name, _ in module.named_buffers() if name not in ignored]
        self.changing: set[str] = set()
        buffers = self._lookup()
        self._first = {name: torch.empty_like(buffer, device="meta") for name, buffer in buffers.items()}
        self._device = next((buffer.device for buffer in buffers.values()), None)  # should they all be gone
        self._marks = {name: _mark(buffer) for name, buffer in buffers.items()}
        self._prints = self._fingerprints(buffers)
        self._copies: dict[str, Tensor] = {}
        self._windows = 0

    def begin(self) -> None:
        """Keeps copies of the buffers as they are at the start of an accumulation window."""
        self._windows += 1
        buffers = self._lookup()
        self._copies = {name: copy for name, copy in self._copies.items() if name in buffers}
        for name, buffer in buffers.items():
            if not _is_floating(buffer):
                continue
            if buffer.nbytes > self.ALWAYS_COPIED_NBYTES and name not in self.changing:
                continue
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape and copy.dtype == buffer.dtype:
                copy.copy_(buffer.detach())
            else:
                self._copies[name] = buffer.detach().clone()

    @property
    def has_begun(self) -> bool:
        """Whether there is a start of a window to go back to."""
        return self._windows > 0

    def changed(self) -> list[bool]:
        """For each name whether the buffer is known to change, as of now."""
        buffers = self._lookup()
        written = {name for name in self._constants(buffers) if _mark(buffers[name]) != self._marks[name]}
        layers = {name.rpartition(".")[0] for name in written}
        self.changing |= {n for n in self._constants(buffers) if n in written or n.rpartition(".")[0] in layers - {""}}
        if self._windows <= self.WINDOWS_COMPARED:
            self.changing |= self.compare()
        return [name in self.changing for name in self.names]

    def compare(self) -> set[str]:
        """Names of the buffers not known to change whose values are not those that they had at first."""
        prints = self._fingerprints(self._lookup())
        return {name for name, value in prints.items() if value != self._prints.get(name)}

    def resized(self) -> list[bool]:
        """For each name whether the buffer has another shape or dtype than at first, or is gone."""
        buffers = self._lookup()
        return [not self._is_alike(name, buffers.get(name)) for name in self.names]

    def put_back(self) -> list[str]:
        """Gives floating-point buffers the values that they had at :meth:`begin`.

        Returns:
            Names of those that have changed and of which there was no copy.
        """
        self.changed()
        buffers = self._lookup()
        for name, copy in self._copies.items():
            buffer = buffers.get(name)
            if buffer is None:
                continue  # its layer is another one now
            if copy.shape == buffer.shape and not _is_expanded(buffer):
                # Through `data`: the graph of a loss that is still alive must not find its saved tensors changed.
                buffer.data.copy_(copy)
            elif name in self.changing:
                owner, _, last = name.rpartition(".")
                setattr(self._module.get_submodule(owner), last, copy.clone())
        lost = self.changing - self._copies.keys()
        return [name for name in self.names if name in lost and name in buffers and _is_floating(buffers[name])]

    def copies(self) -> dict[str, Tensor]:
        """The values that :meth:`put_back` gives."""
        return {name: copy.cpu() for name, copy in self._copies.items()}

    def begin_from(self, copies: dict[str, Tensor]) -> None:
        """Goes on in a window that began with these values."""
        self.begin()
        for name, buffer in self._lookup().items():
            if name in copies and copies[name].shape == buffer.shape:
                self._copies[name] = copies[name].to(buffer, copy=True)

    def broadcast(self, wire: Wire, names: Iterable[str] | None = None) -> None:
        """Overwrites every rank's buffers with rank 0's, bit for bit, in one message; all ranks together.

        One that has another shape or dtype than at first on rank 0 or on this rank, or is gone, stays as it is.

        Args:
            wire: The ranks.
            names: Which ones; by default all.
        """
        buffers = self._lookup()
        chosen = list(self.names if names is None else names)
        if wire.world_size == 1 or not chosen:
            return
        device = next((buffer.device for buffer in buffers.values()), self._device)
        alike = [self._is_alike(name, buffers.get(name)) for name in chosen]
        # As bytes: backends differ in the dtypes that they accept. As at first: no rank knows what others hold by now.
        parts = [torch.tensor(alike, device=device).view(torch.uint8)]
        for name, is_alike in zip(chosen, alike, strict=True):
            value = buffers[name].detach() if is_alike else torch.zeros_like(self._first[name], device=device)
            parts.append(value.contiguous().reshape(-1).view(torch.uint8))
        message = torch.cat(parts)
        wire.broadcast(message)
        valid, *sent = torch.split(message, [len(part) for part in parts])
        for name, is_alike, is_valid, part in zip(chosen, alike, valid.bool(), sent, strict=True):
            if is_alike:
                buffer = buffers[name]
                # Cloned, as a view of another dtype needs memory that is aligned for it.
                theirs = part.clone().view(buffer.dtype).view(buffer.shape)
                buffer.data.copy_(torch.where(is_valid, theirs, buffer))

    def _lookup(self) -> dict[str, Tensor]:
        if not self.names:
            return {}  # a walk through all layers, several times a step, for nothing
        known = set(self.names)
        return {name: buffer for name, buffer in self._module.named_buffers() if name in known}

    def _is_alike(self, name: str, buffer: Tensor | None) -> bool:
        first = self._first[name]
        return buffer is not None and buffer.shape == first.shape and buffer.dtype == first.dtype

    def _constants(self, buffers: dict[str, Tensor]) -> list[str]:
        return [name for name in buffers if name not in self.changing]

    def _fingerprints(self, buffers: dict[str, Tensor]) -> dict[str, int]:
        names = self._constants(buffers)
        return dict(zip(names, fingerprints([buffers[name] for name in names]).tolist(), strict=True)) if names else {}


def _is_floating(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _is_expanded(buffer: Tensor) -> bool:
    """Whether elements share memory, so that nobody can write to them in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Changes when a buffer is replaced, or written to in a way that autograd counts."""
    return id(buffer), -1 if buffer.is_inference() else buffer._version
