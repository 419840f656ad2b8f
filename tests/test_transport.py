"""Reduce dtypes: half the bytes, an error within its bound, master gradients in their own precision."""

from __future__ import annotations

from types import SimpleNamespace

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
    transfers = [transport.start(SimpleNamespace(flat=flat), n, len(flats)) for n, flat in enumerate(flats)]
    for transfer in transfers:
        transport.finish(transfer)
    return flats, wire.messages, wire.nbytes


def rounding(dtype: str) -> float:
    return torch.finfo(REDUCE_DTYPES[dtype]).eps / 2


def bounds(world_size: int, size: int, dtype: str, exact: bool) -> Tensor:
    """Rounding to nearest errs by at most u |x|: once for each addend, then once for each sum that is rounded."""
    u = rounding(dtype)
    parts = torch.stack([numbers(rank, size).double() for rank in range(world_size)])
    total, magnitude = parts.sum(0).abs(), parts.abs().sum(0)
    tiny = 1e-7 * magnitude + 2.0**-24 * world_size  # float32 sums, and fp16's smallest number
    if exact:
        return u * magnitude + u * (total + u * magnitude) + tiny
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
    """One large number and three that vanish beside it one at a time, but not together."""
    flat = torch.full((64,), 256.0 if rank == 0 else 0.9)
    transport = Transport(Wire(), "bf16", exact)
    transport.finish(transport.start(SimpleNamespace(flat=flat), 0, 1))
    return flat


def test_sums_on_the_wire_lose_what_exact_sums_keep(pool: RankPool) -> None:
    right = 256.0 + 3 * 0.9
    bound = rounding("bf16") * right + 0.01  # the addends are rounded too
    assert ((pool.run(4, hard, True)[0] - right).abs() <= bound).all()
    assert (pool.run(4, hard, False)[0] - right).abs().max() > bound


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_halved_either_way(pool: RankPool, world_size: int) -> None:
    elements = sum(SIZES)
    for _, messages, nbytes in pool.run(world_size, summed, None, False, torch.float32):
        assert (messages, nbytes) == (len(SIZES), 4 * elements)
    for _, messages, nbytes in pool.run(world_size, summed, "bf16", False, torch.float32):
        assert (messages, nbytes) == (len(SIZES), 2 * elements)
    for _, messages, nbytes in pool.run(world_size, summed, "bf16", True, torch.float32):
        assert messages == 2 * len(SIZES)
        assert 2 * elements <= nbytes <= 2 * (elements + len(SIZES) * world_size)


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


def overflow(rank: int, dtype: str, size: float = 1e6, of: torch.dtype = torch.float32) -> tuple:
    p = nn.Parameter(torch.zeros(4, dtype=of))
    reducer = GradientReducer([("p", p)], config=ReducerConfig(reduce_dtype=dtype))
    reducer.agree_reference(1)
    reducer.backward((p * size).sum(), 1)
    return reducer.last.verdict, p.grad.tolist()


def test_what_does_not_fit_the_wire_is_an_overflow_not_a_step(pool: RankPool) -> None:
    for verdict, _ in pool.run(2, overflow, "fp16"):
        assert verdict.reason is Reason.OVERFLOW
    for verdict, _ in pool.run(2, overflow, "bf16", 1e300, torch.float64):
        assert verdict.reason is Reason.OVERFLOW
    for verdict, grad in pool.run(2, overflow, "bf16"):
        assert verdict.step
        assert grad == pytest.approx([1e6] * 4, rel=rounding("bf16") * 2)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@NEEDS_GPU
@WAYS
def test_on_a_gpu(pool: RankPool, exact: bool) -> None:
    for flat in pool.run(2, on_a_gpu, exact):
        assert flat.tolist() == pytest.approx([3.0] * 1001, rel=1e-2)


def on_a_gpu(rank: int, exact: bool) -> Tensor:
    flat = torch.full((1001,), rank + 1.0, device="cuda")
    transport = Transport(Wire(), "bf16", exact)
    transport.finish(transport.start(SimpleNamespace(flat=flat), 0, 1))
    return flat.cpu()
