"""Fingerprints: what changes them, what does not, and what they cost."""

import hashlib
import math
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.health.fingerprint import ROW, combine, duplicates, fingerprint, fingerprints, majority

K = 0x5851F42D4C957F2D
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 1, 4), (0,), (4, 0, 2), (33, 1001), (3, 5_001), (2, 70_001)]


def of(tensor: Tensor) -> int:
    return int(fingerprint(tensor))


def random_bytes(nbytes: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype is torch.bool else 256  # a byte of a bool is 0 or 1
    return torch.randint(0, highest, (nbytes,), dtype=torch.uint8, generator=generator)


def from_bytes(raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits at all, NaN payloads among them."""
    return (raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)).reshape(shape)


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return from_bytes(random_bytes(math.prod(shape) * dtype.itemsize, seed, dtype), dtype, shape)


# ----------------------------------------------------------------------------------------------- the formula


def by_the_formula(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The documented sums, in Python's own integers."""
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    round_number = 0
    while round_number == 0 or len(words) > 1:
        digits = hashlib.shake_256(f"round {round_number}".encode()).digest(ROW * 8)
        odd = [int.from_bytes(digits[at : at + 8], "little") | 1 for at in range(0, len(digits), 8)]
        mixed = [v ^ (v >> 32) for v in (K * word % 2**64 for word in words)]
        rows = [mixed[at : at + ROW] for at in range(0, len(mixed), ROW)] or [[]]
        words = [sum(m * w for m, w in zip(odd, row, strict=False)) % 2**64 for row in rows]
        round_number += 1
        if len(raw) > ROW * 8 and round_number == 1 and len(words) == 1:
            raise AssertionError("more than a row of bytes makes more than one number")
    constant = hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=8).digest()
    result = (words[0] + int.from_bytes(constant, "little")) % 2**64
    return result - 2**64 if result >= 2**63 else result


@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_the_formula_says(dtype, shape):
    raw = random_bytes(math.prod(shape) * dtype.itemsize, 5, dtype)
    found = fingerprint(from_bytes(raw, dtype, shape))
    assert (found.dtype, found.shape) == (torch.int64, ())
    assert int(found) == by_the_formula(bytes(raw.tolist()), dtype, shape)


# ----------------------------------------------------------------------------------------------- what changes it


def flip(raw: Tensor, bit: int) -> Tensor:
    flipped = raw.clone()
    flipped[bit // 8] ^= 1 << (bit % 8)
    return flipped


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]),
    shape=st.lists(st.integers(1, 40), max_size=3).map(tuple) | st.just((9, 4321)) | st.just((70_001,)),
    where=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_any_flipped_bit_changes_it(dtype, shape, where, seed):
    raw = random_bytes(math.prod(shape) * dtype.itemsize, seed, dtype)
    bit = int(where * raw.numel() * 8)
    assert of(from_bytes(raw, dtype, shape)) != of(from_bytes(flip(raw, bit), dtype, shape))


@pytest.mark.parametrize("value", [0, 255], ids=["zeros", "ones"])
def test_all_flips_of_few_bits_are_told_apart(value):
    """Of four bits, too, if they are the same two of two words."""
    raw = torch.full((24,), value, dtype=torch.uint8)
    once = [flip(raw, bit) for bit in range(192)]
    twice = [flip(once[a], b) for b in range(192) for a in range(b)]
    same_in_two_words = [flip(flip(twice[b * (b - 1) // 2 + a], 64 + a), 64 + b) for b in range(64) for a in range(b)]
    rows = [from_bytes(r, torch.float64, (3,)) for r in [raw, *once, *twice, *same_in_two_words]]
    assert len(set(fingerprints(rows).tolist())) == 1 + 192 + 192 * 191 // 2 + 64 * 63 // 2


def test_weaker_sums_would_miss_such_flips():
    """Negative control of the test above: without K and the shift, and without K."""
    odd = [0x1234567, 0x89ABCDF]

    def total(words: list[int], shifted: bool) -> int:
        return sum(m * (w ^ (w >> 32 if shifted else 0)) for m, w in zip(odd, words, strict=True)) % 2**64

    one, two = 1 << 63, 1 << 63 | 1 << 31  # the sign of a float64, the signs of two float32
    assert total([5, 9], False) == total([5 ^ one, 9 ^ one], False)
    assert total([5, 9], True) == total([5 ^ two, 9 ^ two], True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(4,), (300, 300)], ids=str)
def test_signs_payloads_and_places_count(dtype, shape):
    zero = torch.zeros(shape, dtype=dtype)
    tensor = torch.arange(zero.numel()).to(dtype).reshape(shape)
    nan = some(torch.int64, (zero.numel() * dtype.itemsize // 8,)) | 0x7FF87FF87FF87FF8
    payloads = [torch.full_like(nan, 0x7FF87FF97FF97FF9 + i).view(dtype).reshape(shape) for i in range(2)]
    assert all(bool(payload.isnan().all()) for payload in payloads)
    variants = {
        "0.0": zero,
        "-0.0": torch.view_as_complex(torch.full((*shape, 2), -0.0)) if dtype.is_complex else -zero,
        "numbers": tensor,
        "negative": -tensor,
        "doubled": tensor * 2,
        "rolled": tensor.roll(1, 0),
        "upside down": tensor.flip(0),
        "a NaN": payloads[0],
        "another NaN": payloads[1],
    }
    found = {name: of(variant) for name, variant in variants.items()}
    assert Counter(found.values()).most_common(1)[0][1] == 1, found


def test_dtype_and_shape_count():
    bits = some(torch.int64, (6,))
    same_bits = [bits, bits.view(torch.float64), bits.view(torch.int32), bits.view(2, 3), bits.view(3, 2), bits[:5]]
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(20)] + [torch.zeros(()), torch.zeros(1), torch.zeros(0)]
    assert len({of(tensor) for tensor in same_bits + zeros}) == len(same_bits + zeros)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.integers(2, 200), seed=st.integers(0, 2**32))
def test_swapping_two_different_elements_changes_it(data, size, seed):
    numbers = some(torch.float32, (size,), seed)
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    order = list(range(size))
    order[i], order[j] = j, i
    same = numbers[i : i + 1].view(torch.int32) == numbers[j : j + 1].view(torch.int32)
    assert (of(numbers) == of(numbers[order])) == bool(same)


# ----------------------------------------------------------------------------------------------- what does not


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(3, 5), (2, 700_001), (64, 1200), (700, 3, 211)], ids=str)
def test_strides_and_storage_do_not_count(dtype, shape):
    tensor = some(dtype, shape, seed=3)
    expected = of(tensor)
    last = tensor.ndim - 1
    transposed = tensor.transpose(0, last).contiguous().transpose(0, last)
    spread = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., 1::2]
    spread.copy_(tensor)
    inside = torch.zeros(tensor.numel() + 1, dtype=dtype)[1:].view(shape)
    inside.copy_(tensor)
    for other in (transposed, spread, inside):
        assert other.data_ptr() != tensor.data_ptr()
        assert of(other) == expected


@pytest.mark.parametrize("shape", [(4, 3), (400, 3, 99)], ids=str)
def test_an_expanded_tensor_is_its_elements(shape):
    one = torch.randn(1, *shape[1:])
    assert (
        of(one.expand(shape)) == of(one.expand(shape).contiguous()) == of(one.repeat(shape[0], *[1] * len(shape[1:])))
    )


@pytest.mark.parametrize("numel", [6, 60_000])
def test_lazy_conjugates_are_their_elements(numel):
    number = torch.randn(numel, dtype=torch.complex64)
    assert of(number.conj()) == of(number.conj().resolve_conj()) != of(number)
    assert of(number.conj().imag) == of(-number.imag)


def test_many_at_once_are_as_one_by_one():
    tensors = [some(dtype, shape, seed) for seed in (1, 2) for dtype in DTYPES for shape in SHAPES[:-1]]
    tensors += [torch.nn.Parameter(torch.randn(3, 2).t()), torch.randn(9)[2:5]]
    many = fingerprints(tensors)
    assert (many.dtype, many.requires_grad) == (torch.int64, False)
    assert many.tolist() == [of(tensor) for tensor in tensors]
    assert fingerprints([]).tolist() == []


def test_in_inference_mode_and_after_it():
    tensor = torch.randn(5000)
    with torch.inference_mode():
        inside = of(tensor)
    assert of(tensor.requires_grad_()) == inside


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that quantized tensors will go
def test_what_is_not_plain_memory_is_refused():
    with pytest.raises(TypeError, match=r"dense tensor of numbers, not of torch\.sparse_coo"):
        fingerprint(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"dense tensor of numbers, not of torch\.qint8"):
        fingerprint(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EVERY_DTYPE
def test_every_device_says_the_same(dtype):
    tensors = [some(dtype, shape, seed=4) for shape in SHAPES]
    on_gpu = [tensor.cuda() for tensor in tensors]
    assert fingerprints(on_gpu).device.type == "cuda"
    assert fingerprints(on_gpu).tolist() == fingerprints(tensors).tolist()


# ----------------------------------------------------------------------------------------------- lists


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60), data=st.data())
def test_one_changed_fingerprint_changes_their_combination(numbers, data):
    place = data.draw(st.integers(0, len(numbers) - 1))
    other = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda n: n != numbers[place]))
    changed = [*numbers[:place], other, *numbers[place + 1 :]]
    assert int(combine(torch.tensor(numbers))) != int(combine(torch.tensor(changed)))


def test_a_long_list_has_a_combination():
    numbers = some(torch.int64, (3 * ROW + 5,))
    changed = numbers.clone()
    changed[2 * ROW] += 1
    assert int(combine(numbers)) == int(combine(numbers.clone())) != int(combine(changed))
    assert int(combine(numbers[:0])) == 0


@pytest.mark.parametrize(
    ("held", "value", "odd"),
    [
        ([5], 5, ()),
        ([5, 5], 5, ()),
        ([5, 6], None, ()),
        ([7, 5, 5], 5, (0,)),
        ([5, 5, 7], 5, (2,)),
        ([5, 6, 7], None, ()),
        ([5, 5, 7, 7], None, ()),
        ([5, 7, 5, 5], 5, (1,)),
        ([5, 7, 5, 6, 5], 5, (1, 3)),
        ([5, 5, 6, 7], None, ()),  # the most frequent value, but not of more than half
        ([], None, ()),
    ],
)
def test_majority(held, value, odd):
    assert majority(held) == (value, odd)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=9))
def test_majority_is_more_than_half(held):
    value, odd = majority(held)
    winners = [v for v in set(held) if sum(h == v for h in held) > len(held) / 2]
    assert ([value] if value is not None else []) == winners
    assert odd == tuple(r for r, h in enumerate(held) if winners and h != winners[0])


@pytest.mark.parametrize(
    ("held", "groups"),
    [
        ([], ()),
        ([1, 2, 3], ()),
        ([1, 2, 1], ((0, 2),)),
        ([3, 3, 3], ((0, 1, 2),)),
        ([1, 2, 2, 1], ((0, 3), (1, 2))),
        ([None, 2, None, 2], ((1, 3),)),
        ([None, None], ()),
        ([0, 0, None], ((0, 1),)),
    ],
)
def test_duplicates(held, groups):
    assert duplicates(held) == groups


# ----------------------------------------------------------------------------------------------- what it costs


class Operations(TorchDispatchMode):
    """Notes each operation, and the largest piece of new memory one of them took."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in old:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda: torch.zeros(2**24, dtype=torch.uint8), id="contiguous"),
        pytest.param(lambda: torch.zeros(2**24 + 1, dtype=torch.uint8)[1:], id="not aligned"),
        pytest.param(lambda: torch.zeros(1, 2**21).expand(7, 2**21), id="expanded"),
        pytest.param(lambda: torch.zeros(2**22 + 1, 3).t(), id="transposed, of few rows"),
        pytest.param(lambda: torch.zeros(8, 64, 64, 129).to(memory_format=torch.channels_last), id="channels_last"),
    ],
)
def test_its_memory_is_bounded(form, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tensor = form()
    with Operations() as operations:
        fingerprint(tensor)
    assert 0 < operations.largest <= 2**20


def test_the_memory_of_a_plain_copy_would_be_seen():
    """Negative control."""
    tensor = torch.zeros(2**22 + 1, 3).t()
    with Operations() as operations:
        tensor.contiguous()
    assert operations.largest > 2**25


def test_thousands_of_small_tensors_take_few_operations():
    few, many = [torch.randn(64) for _ in range(20)], [torch.randn(64) for _ in range(2000)]
    with Operations() as for_few:
        fingerprints(few)
    with Operations() as for_many:
        fingerprints(many)
    assert len(for_many.names) < 2 * len(for_few.names) < 100


@pytest.mark.parametrize("shape", [(3, 2), (200_000,)], ids=str)
def test_no_value_is_read_by_the_host(shape):
    """A meta tensor has no values: reading one is an error."""
    tensors = [torch.empty(shape, device="meta"), torch.empty(shape, device="meta", dtype=torch.bool).t()]
    assert combine(fingerprints(tensors)).device.type == "meta"


def test_what_it_costs(capsys):
    tensor = torch.randn(2**23)
    small = [torch.randn(64) for _ in range(2000)]

    def seconds(work: Any, *args: Any) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            work(*args)
            times.append(time.perf_counter() - start)
        return min(times)

    ours, plain, many = seconds(fingerprint, tensor), seconds(torch.sum, tensor), seconds(fingerprints, small)
    gigabytes = tensor.nbytes / 1e9
    with capsys.disabled():
        print(
            f"\nfingerprint of 32 MiB: {gigabytes / ours:.1f} GB/s (plain sum: {gigabytes / plain:.1f} GB/s);"
            f" of 2,000 tensors of 64: {many * 1e3:.1f} ms"
        )
    assert ours < 100 * plain  # a pass in Python, or over temporaries in memory, is far slower
    assert many < 1
