"""64-bit fingerprints of tensors, made where the tensors are; and what a list of them says of the ranks.

A tensor is read as little words of 8 bytes, in the order of its indices, the last one padded with zeros. Rows of
:data:`ROW` words become one number each, the numbers of all rows become rows again, until one number is left. A row
w[0], w[1], ... becomes

    sum over i of  m[i] * mix(w[i])   modulo 2^64,      mix(w) = v xor (v >> 32, zeros shifted in)  with  v = K * w,

where K and every m[i] are odd, and m differs by place in the row and by round.

One changed word always changes the fingerprint, hence one flipped bit does. An odd number has an inverse modulo 2^64,
and v can be told from mix(w), whose upper half is that of v, and whose lower half is that of v xor the upper one: so
different words have different ``mix``. Then m * (mix(w) - mix(w')) is not 0 either, and that is the change of the
row's sum. In the next round that sum is the one word that changed. What is added for dtype and shape in the end is a
constant.

Several changed words go unseen only if their changes cancel modulo 2^64, which for changes that know nothing of the
pseudo-random m has a probability of about 2^-32 or less: that of two words whose highest bit is flipped. (Without
``mix`` these two would cancel for certain, and without K two words in which the same two bits are flipped.)

The cost is one read of the tensor from memory, and a few passes over a block that fits into a cache.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

ROW = 4096  # words
_WORD = 8  # bytes
_K = 0x5851F42D4C957F2D  # odd, with its bits well mixed; any such number would do
_BLOCK_ROWS_PER_THREAD = 8  # rows mixed at once on a CPU: what a core's cache holds
_BLOCK_ROWS_ELSEWHERE = 512  # where launches are what costs
_ROUND_OF_LISTS = 8  # no tensor has so many rounds
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

V = TypeVar("V", bound=Hashable)


def fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of one tensor: of its bits, their places, its dtype and its shape, but not of its strides.

    Bits are what counts: 0.0 differs from -0.0, and so do NaNs of different payloads. The tensor is read in blocks of
    16 MiB (on a CPU: 0.25 MiB per thread), so that only a few times that much memory is needed beside it, and the host
    waits for nothing.

    Args:
        tensor: Dense, of any dtype, shape and strides.

    Returns:
        Zero-dimensional int64 tensor on the device of ``tensor``.

    Raises:
        TypeError: If the tensor is not dense, or quantized.
    """
    return fingerprints([tensor])[0]


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """The :func:`fingerprint` of each of many tensors; small ones of equal dtype and shape are done together.

    Args:
        tensors: Dense, each on a device of its own choice.
        device: Where the result goes; by default to the first tensor's device that is no CPU, if there is one.

    Returns:
        One-dimensional int64 tensor, as long as ``tensors``.

    Raises:
        TypeError: If one of them is not dense, or quantized.
    """
    device = device or home(tensors)
    alike: dict[tuple[torch.dtype, torch.Size, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = tensor.dtype if tensor.is_quantized else tensor.layout
            raise TypeError(f"a fingerprint is made of a dense tensor of numbers, not of {kind}")
        alike.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(place)
    found = [torch.empty(0, dtype=torch.int64, device=device)]
    for (dtype, shape, _), places in alike.items():
        sums = _sums([tensors[place] for place in places], shape.numel() * dtype.itemsize)
        found.append((sums + _constant(dtype, shape)).to(device, non_blocking=device.type != "cpu"))
    order = torch.tensor([place for places in alike.values() for place in places], dtype=torch.int64)
    result = torch.empty(len(tensors), dtype=torch.int64, device=device)
    return result.index_copy_(0, order.to(device, non_blocking=True), torch.cat(found))


def home(tensors: Sequence[Tensor]) -> torch.device:
    """The first device of the tensors that is no CPU; the CPU if there is none."""
    devices = (tensor.device for tensor in tensors)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def combine(fingerprints: Tensor) -> Tensor:
    """One fingerprint of a list of them, by the same rule: if one of them changes, it changes for certain.

    Args:
        fingerprints: One-dimensional int64 tensor.

    Returns:
        Zero-dimensional int64 tensor on the same device.
    """
    return _fold(fingerprints, _ROUND_OF_LISTS)


def as_bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers of its element size (a complex number as two), without a copy.

    Only a tensor that is lazily conjugated or negated is copied.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGERS[plain.element_size()])


def majority(fingerprints: Sequence[V]) -> tuple[V | None, tuple[int, ...]]:
    """What more than half of the ranks hold.

    Args:
        fingerprints: What each rank holds, by rank; ``None`` does not stand for a value.

    Returns:
        The value and the ranks that hold another; ``(None, ())`` if no value is held by more than half of the ranks.
    """
    for value, holders in Counter(fingerprints).most_common(1):
        if 2 * holders > len(fingerprints):
            return value, tuple(rank for rank, other in enumerate(fingerprints) if other != value)
    return None, ()


def duplicates(fingerprints: Sequence[V | None]) -> tuple[tuple[int, ...], ...]:
    """The groups of two or more ranks that hold the same value, in the order of their first ranks.

    Args:
        fingerprints: What each rank holds, by rank; ``None`` is nothing, and no duplicate of another ``None``.
    """
    groups: dict[V, list[int]] = {}
    for rank, value in enumerate(fingerprints):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


def _sums(tensors: list[Tensor], nbytes: int) -> Tensor:
    """One number for each of some tensors that have dtype, shape, device and so ``nbytes`` in common."""
    if nbytes > ROW * _WORD:
        return torch.stack([_fold(torch.cat([_row_sums(rows, 0) for rows in _blocks(t)]), 1) for t in tensors])
    together = max(1, _block_rows(tensors[0].device) * ROW * _WORD // max(1, nbytes))
    batches = [as_bits(torch.stack(tensors[i : i + together])) for i in range(0, len(tensors), together)]
    return torch.cat([_row_sums(_words(b.reshape(len(b), b[0].numel())), 0) for b in batches])


def _row_sums(words: Tensor, round_number: int) -> Tensor:
    """The sum of each row, of at most :data:`ROW` words."""
    spread = words * _K
    mixed = spread >> 32
    mixed &= 0xFFFFFFFF  # the shift of a negative integer shifts ones in
    mixed ^= spread
    mixed *= _odd_numbers(round_number, words.device)[: words.shape[1]]
    return mixed.sum(1)


def _fold(words: Tensor, round_number: int) -> Tensor:
    """One number of a one-dimensional tensor of words, which counts as many rounds as it needs from the given one."""
    while True:
        words = _row_sums(_words(words[None], ROW).view(-1, ROW), round_number)
        if len(words) <= 1:
            return words.sum()  # of no word at all: 0
        round_number += 1


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as rows of words, some rows at a time; copies a block at most."""
    bits = as_bits(tensor)
    flat = bits.view(-1) if bits.is_contiguous() else None
    block = _block_rows(bits.device) * ROW * _WORD // bits.element_size()
    for start in range(0, bits.numel(), block):
        stop = min(start + block, bits.numel())
        piece = flat[start:stop] if flat is not None else _elements(bits, start, stop)
        yield _words(piece[None], ROW).view(-1, ROW)


def _block_rows(device: torch.device) -> int:
    return _BLOCK_ROWS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else _BLOCK_ROWS_ELSEWHERE


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` in the order of their indices, copied, of a tensor of any strides."""
    if tensor.ndim == 1:
        return tensor[start:stop].contiguous()
    row = tensor[0].numel()
    first, last = start // row, stop // row
    if first == last:
        return _elements(tensor[first], start % row, stop % row)
    parts = [_elements(tensor[first], start % row, row)] if start % row else []
    parts.append(tensor[first + len(parts) : last].reshape(-1))
    if stop % row:
        parts.append(_elements(tensor[last], 0, stop % row))
    return torch.cat(parts)


def _words(bits: Tensor, multiple: int = 1) -> Tensor:
    """Rows of integers of any size as rows of words, padded with zeros to a multiple, not 0, of ``multiple`` words."""
    rows, length = bits.shape
    size = bits.element_size()
    unit = multiple * _WORD // size
    # A view as words must start at a multiple of 8 bytes: in memory for the device, in the storage for PyTorch.
    aligned = bits.data_ptr() % _WORD == 0 and bits.storage_offset() * size % _WORD == 0
    needed = max(1, -(-length // unit)) * unit
    if length != needed or not aligned:
        padded = bits.new_zeros(rows, needed)
        padded[:, :length] = bits
        bits = padded
    return bits.view(torch.int64)


@functools.lru_cache(maxsize=64)
def _odd_numbers(round_number: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers, the same ones everywhere."""
    with torch.inference_mode(False):
        digits = hashlib.shake_256(f"round {round_number}".encode()).digest(ROW * _WORD)
        return (torch.frombuffer(bytearray(digits), dtype=torch.int64) | 1).to(device)


def _constant(dtype: torch.dtype, shape: torch.Size) -> int:
    digest = hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=_WORD).digest()
    return int.from_bytes(digest, "little", signed=True)
