"""Reduce dtypes: half the bytes, an error within its bound, master gradients in their own precision."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.ballot import Reason
from lightning_dp.reduction.transport import REDUCE_DTYPES, Transport
from lightning_dp.reduction.wire import Wire

SIZES = [1, 7, 64, 1001, 3, 5000]  # more buckets than lag behind, most of no multiple of the ranks
WAYS = pytest.mark.parametrize("exact", [False, True], ids=["all-reduce", "exact sums"])
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return (torch.randn(size, generator=generator) * torch.logspace(-2, 2, size)).to(dtype)


def summed(rank: int, dtype: str | None, exact: bool, of: torch.dtype) -> tuple[list[Tensor], int, int]:
    wire = Wire()
    transport = Transport(wire, dtype, exact)
    flats = [numbers(rank, size, of) for size in SIZES]
    sum_up(transport, flats)
    return flats, wire.messages, wire.nbytes


def sum_up(transport: Transport, flats: list[Tensor]) -> None:
    buckets = [SimpleNamespace(flat=flat) for flat in flats]
    for number, bucket in enumerate(buckets):
        transport.reserve(bucket, number)
    transfers = [transport.start(bucket, number, len(buckets)) for number, bucket in enumerate(buckets)]
    for transfer in transfers:
        transport.finish(transfer)


def rounding(dtype: str) -> float:
    return torch.finfo(REDUCE_DTYPES[dtype]).eps / 2


def bounds(world_size: int, size: int, dtype: str, exact: bool) -> Tensor:
    """Rounding to nearest errs by at most u |x|: once for each addend, then once for each sum that is rounded.

    Two ranks with exact sums round none.
    """
    u = rounding(dtype)
    parts = torch.stack([numbers(rank, size).double() for rank in range(world_size)])
    total, magnitude = parts.sum(0).abs(), parts.abs().sum(0)
    tiny = 1e-7 * magnitude  # float32 sums
    if dtype == "fp16":  # The largest part of a rank comes to at least 65504 / (4 ranks), and half of 2^-24 may be lost
        tiny = tiny + (world_size + 1) * 2.0**-25 * 4 * world_size * parts.abs().max() / 65504
    if exact:
        return u * magnitude + (u * (total + u * magnitude) if world_size > 2 else 0) + tiny
    return ((1 + u) ** world_size - 1) * magnitude + tiny


@WAYS
@DTYPES
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_error_is_within_its_bound(pool: RankPool, world_size: int, dtype: str, exact: bool) -> None:
    results = pool.run(world_size, summed, dtype, exact, torch.float32)
    for number, size in enumerate(SIZES):
        right = sum(numbers(rank, size).double() for rank in range(world_size))
        mine = results[0][0][number]
        assert mine.dtype is torch.float32
        assert ((mine.double() - right).abs() <= bounds(world_size, size, dtype, exact)).all()
        # All ranks hold the same bits, what a rank has summed itself included.
        assert all(torch.equal(flats[number], mine) for flats, _, _ in results)


def hard(rank: int, exact: bool) -> Tensor:
    """One large number, and of each other rank one that vanishes beside it; three of them would not."""
    flat = torch.full((64,), 256.0 if rank == 0 else 0.9)
    transport = Transport(Wire(), "bf16", exact)
    sum_up(transport, [flat])
    return flat


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_on_the_wire_lose_what_exact_sums_keep(pool: RankPool, world_size: int) -> None:
    right = 256.0 + (world_size - 1) * 0.9
    # The addends are rounded too; between two ranks their sum is not.
    bound = (rounding("bf16") * right if world_size > 2 else 0) + 0.01
    assert ((pool.run(world_size, hard, True)[0] - right).abs() <= bound).all()
    assert (pool.run(world_size, hard, False)[0] - right).abs().max() > bound


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_halved_either_way(pool: RankPool, world_size: int) -> None:
    elements = sum(SIZES)
    for _, messages, nbytes in pool.run(world_size, summed, None, False, torch.float32):
        assert (messages, nbytes) == (len(SIZES), 4 * elements)
    for _, messages, nbytes in pool.run(world_size, summed, "bf16", False, torch.float32):
        assert (messages, nbytes) == (len(SIZES), 2 * elements)
    for _, messages, nbytes in pool.run(world_size, summed, "bf16", True, torch.float32):
        assert messages == (1 if world_size == 2 else 2) * len(SIZES)
        assert 2 * elements <= nbytes <= 2 * (elements + len(SIZES) * (world_size if world_size > 2 else 0))


def memory_of_steps(rank: int, dtype: str, exact: bool) -> list[tuple[int, set[int], set[int]]]:
    """For each step the number of buckets, and where the memory lies in which they travel, before and after it."""
    model = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))
    config = ReducerConfig(bucket_cap_mb=1e-4, first_bucket_cap_mb=1e-4, reduce_dtype=dtype, exact_sums=exact)
    reducer = GradientReducer(model.named_parameters(), config=config)
    steps = []
    for _ in range(4):
        model.zero_grad()
        with reducer.backward_pass(count=3) as weight:
            before = narrow_memory(reducer)
            (model(torch.ones(3, 9)).mean() * weight).backward()
        steps.append((len(reducer.plan.buckets), before, narrow_memory(reducer)))
    return steps


def narrow_memory(reducer: GradientReducer) -> set[int]:
    return {narrow.mine.data_ptr() for narrow in reducer._transport._narrow.values()}


@WAYS
@DTYPES
def test_the_memory_in_which_buckets_travel_is_there_before_a_step(pool: RankPool, dtype: str, exact: bool) -> None:
    for steps in pool.run(2, memory_of_steps, dtype, exact):
        assert all(len(before) == buckets > 1 and after == before for buckets, before, after in steps)
        assert steps[-1] == steps[-2]  # the plan stays, and so does the memory


def summed_after_others(rank: int, dtype: str, exact: bool) -> list[Tensor]:
    """The second of two steps in the same memory."""
    transport = Transport(Wire(), dtype, exact)
    sum_up(transport, [1e4 * numbers(rank, size) for size in SIZES])
    flats = [numbers(rank, size) for size in SIZES]
    with mock.patch.object(transport, "reserve"):
        sum_up(transport, flats)
    return flats


@WAYS
@DTYPES
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_takes_nothing_of_the_numbers_of_the_one_before(
    pool: RankPool, world_size: int, dtype: str, exact: bool
) -> None:
    fresh = pool.run(world_size, summed, dtype, exact, torch.float32)[0][0]
    for flats in pool.run(world_size, summed_after_others, dtype, exact):
        assert all(torch.equal(a, b) for a, b in zip(flats, fresh, strict=True))


@WAYS
def test_what_is_narrow_already_travels_as_it_is(pool: RankPool, exact: bool) -> None:
    right = summed_alone(torch.bfloat16)
    for flats, messages, nbytes in pool.run(2, summed, "fp16", exact, torch.bfloat16):
        assert (messages, nbytes) == (len(SIZES), 2 * sum(SIZES))
        assert all(torch.equal(a, b) for a, b in zip(flats, right, strict=True))


def summed_alone(dtype: torch.dtype) -> list[Tensor]:
    return [numbers(0, size, dtype) + numbers(1, size, dtype) for size in SIZES]


def test_one_rank_rounds_nothing(pool: RankPool) -> None:
    [(flats, messages, _)] = pool.run(1, summed, "bf16", True, torch.float32)
    assert messages == 0
    assert all(torch.equal(flat, numbers(0, size)) for flat, size in zip(flats, SIZES, strict=True))


# ---------------------------------------------------------------------------------------------- in the reducer


def regression(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(512, 16)
    return model, x, torch.sin(x @ torch.randn(16, 1))


def trained(rank: int, config: ReducerConfig) -> tuple[float, bytes, int]:
    model, x, y = regression(0)
    reducer = GradientReducer(model.named_parameters(), config=config)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    mine = slice(rank * 256, (rank + 1) * 256)
    for _ in range(200):
        optimizer.zero_grad()
        reducer.backward((model(x[mine]) - y[mine]).square().mean(), 256)
        optimizer.step()
    loss = float((model(x) - y).square().mean().detach())
    return loss, b"".join(p.detach().numpy().tobytes() for p in model.parameters()), reducer.last.nbytes


@WAYS
@DTYPES
def test_training_comes_as_far_with_replicas_equal(pool: RankPool, dtype: str, exact: bool) -> None:
    full = pool.run(2, trained, ReducerConfig())[0]
    narrow = pool.run(2, trained, ReducerConfig(reduce_dtype=dtype, exact_sums=exact, bucket_cap_mb=0.001))
    assert narrow[0][1] == narrow[1][1]
    assert narrow[0][1] != full[1]  # it did round
    assert narrow[0][0] == pytest.approx(full[0], rel=0.1)
    assert narrow[0][2] < 0.6 * full[2]


# ---------------------------------------------------------------------------------------------- range

ELEMENTS = 1000


def of_one_size(rank: int, size: float, of: torch.dtype, spread: float = 1.0) -> Tensor:
    """Numbers of one sign, which add up at every step: the largest sums there can be; rank r's are spread^r larger."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(ELEMENTS, generator=generator, dtype=torch.float64) * 0.5 + 0.5).to(of) * (size * spread**rank)


def of_one_size_summed(rank: int, size: float, of: torch.dtype, spread: float, dtype: str, exact: bool) -> Tensor:
    flat = of_one_size(rank, size, of, spread)
    transport = Transport(Wire(), dtype, exact)
    sum_up(transport, [flat])
    return flat


def of_one_size_summed_unscaled(rank: int, *args: object) -> Tensor:
    with mock.patch.object(Transport, "_scales", lambda self, dtype: False):
        return of_one_size_summed(rank, *args)


SIZED = pytest.mark.parametrize(
    ("size", "of", "dtype"),
    [
        (1e-12, torch.float32, "fp16"),
        (1e-7, torch.float32, "fp16"),
        (6e4, torch.float32, "fp16"),
        (1e6, torch.float32, "fp16"),
        (1e30, torch.float32, "fp16"),
        (1e-200, torch.float64, "fp16"),
        (1e300, torch.float64, "bf16"),
        (1e-300, torch.float64, "bf16"),
        (1e300, torch.float64, "fp32"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)


@SIZED
@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_any_size_keep_the_digits_of_the_wire(
    pool: RankPool, ranks: int, size: float, of: torch.dtype, dtype: str, spread: float
) -> None:
    """No overflow of a sum, no underflow of an addend: only roundings, one for each addend and one for each sum."""
    u = rounding(dtype)
    right = sum(of_one_size(rank, size, of, spread).double() for rank in range(ranks))
    for exact in (False, True) if dtype != "fp32" else (False,):
        results = pool.run(ranks, of_one_size_summed, size, of, spread, dtype, exact)
        bound = ((1 + u) ** (ranks + 1) - 1) * right
        for flat in results:
            assert torch.equal(flat, results[0])
            assert ((flat.double() - right).abs() <= bound).all()


@WAYS
@pytest.mark.parametrize(("ranks", "size"), [(2, 1e6), (4, 6e4)])
def test_unscaled_they_would_not(pool: RankPool, ranks: int, size: float, exact: bool) -> None:
    """Negative control. A quarter of 65504 on each of four ranks is where float16 ends; addends alone reach it, too."""
    too_large = pool.run(ranks, of_one_size_summed_unscaled, size, torch.float32, 1.0, "fp16", exact)[0]
    assert torch.isinf(too_large).all()
    too_small = pool.run(ranks, of_one_size_summed_unscaled, 1e-12, torch.float32, 1.0, "fp16", exact)[0]
    assert not too_small.any()


@WAYS
def test_beside_a_large_number_small_ones_keep_their_digits(pool: RankPool, exact: bool) -> None:
    """Within a bucket float16 spans 2^27 from the largest number of all ranks down to where digits are lost."""
    for flat in pool.run(2, mixed, exact):
        assert flat[0] == 2.0**20
        assert ((flat[1:] - 2 * SMALL[1:]).abs() <= 2 * SMALL[1:] * rounding("fp16") * 1.01).all()


SMALL = torch.tensor([0.0, 1.2345e-2, 0.98765, 17.17, 1234.5])


def mixed(rank: int, exact: bool) -> Tensor:
    flat = SMALL.clone()
    flat[0] = rank * 2.0**20
    transport = Transport(Wire(), "fp16", exact)
    sum_up(transport, [flat])
    return flat


@WAYS
def test_a_scaled_bucket_takes_one_number_more(pool: RankPool, exact: bool) -> None:
    (_, halves, narrow), (_, scaled, with_peaks) = (
        pool.run(2, summed, dtype, exact, torch.float32)[0] for dtype in ("bf16", "fp16")
    )
    assert scaled == halves + len(SIZES)
    assert with_peaks == narrow + 4 * len(SIZES)


def of_size(rank: int, config: ReducerConfig, sizes: tuple[float, ...], of: torch.dtype = torch.float32) -> tuple:
    p = nn.Parameter(torch.zeros(4, dtype=of))
    reducer = GradientReducer([("p", p)], config=config)
    reducer.agree_reference(1)
    reducer.backward((p * sizes[rank]).sum(), 1)
    return reducer.last.verdict, p.grad.tolist()


@pytest.mark.parametrize(
    ("dtype", "size", "of"),
    [("fp16", 1e6, torch.float32), ("fp16", 1e-9, torch.float32), ("bf16", 1e300, torch.float64)],
)
def test_a_gradient_that_would_not_fit_the_wire_makes_a_step(
    pool: RankPool, dtype: str, size: float, of: torch.dtype
) -> None:
    for verdict, grad in pool.run(2, of_size, ReducerConfig(reduce_dtype=dtype), (size, size), of):
        assert verdict.step
        assert grad == pytest.approx([size] * 4, rel=rounding(dtype) * 2)


@WAYS
@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_voted_on_and_can_be_left_out(pool: RankPool, dtype: str, exact: bool, bad: float) -> None:
    """On a scaled wire, too, where it takes part in the agreement on the scale."""
    config = ReducerConfig(reduce_dtype=dtype, exact_sums=exact)
    for sizes, average in (((1.0, bad, 3.0), 2.0), ((3.0, bad), 3.0)):
        for verdict, _ in pool.run(len(sizes), of_size, config, sizes):
            assert (verdict.reason, verdict.ranks) == (Reason.NONFINITE, (1,))
        for verdict, grad in pool.run(len(sizes), of_size, replace(config, drop_nonfinite=True), sizes):
            assert verdict.step
            assert verdict.dropped == (1,)
            assert grad == pytest.approx([average] * 4, rel=rounding(dtype) * 3)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@NEEDS_GPU
@WAYS
def test_on_a_gpu(pool: RankPool, exact: bool) -> None:
    for flat in pool.run(2, on_a_gpu, exact):
        assert flat.tolist() == pytest.approx([3.0] * 1001, rel=1e-2)


def on_a_gpu(rank: int, exact: bool) -> Tensor:
    flat = torch.full((1001,), rank + 1.0, device="cuda")
    transport = Transport(Wire(), "bf16", exact)
    sum_up(transport, [flat])
    return flat.cpu()
