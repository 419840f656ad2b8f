"""reduce_dtype="fp32": gradients of bf16 and fp16 parameters, added up in float32 and rounded once, at the end."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_runs import trainer_of
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import BucketedDDPStrategy
from lightning_dp.errors import ConfigurationError
from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.ballot import Reason
from lightning_dp.reduction.buckets import Bucket, plan_buckets

SIZES = [(7,), (40, 5), (1, 3), (300, 100)]  # the last one is large enough to be moved as soon as it is there
SHAPES = dict(zip("abcd", SIZES, strict=True))
WIDE = ReducerConfig(reduce_dtype="fp32", bucket_cap_mb=0.001, first_bucket_cap_mb=0.0001)
NARROW = ReducerConfig(bucket_cap_mb=0.001, first_bucket_cap_mb=0.0001)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
Counts = list[list[int]]  # by micro-batch and rank


def even(k: int, ranks: int) -> Counts:
    return [[4] * ranks for _ in range(k)]


def ragged(k: int, ranks: int) -> Counts:
    pattern = [4, 1, 3, 2, 0, 5, 7]
    return [[pattern[(2 * j + 3 * r) % len(pattern)] for r in range(ranks)] for j in range(k)]


def parameters(dtype: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape, dtype=DTYPES[dtype]))) for name, shape in SHAPES.items()]


def gradient(name: str, rank: int, micro_batch: int, dtype: str) -> Tensor:
    """Float64, over six binades, of so few significant bits that up to 7 times it is exact in the dtype."""
    shortest = {"bf16": 8, "fp16": 64}[dtype]
    generator = torch.Generator().manual_seed(1000 * micro_batch + 10 * rank + ord(name))
    shape = SHAPES[name]
    digits = torch.randint(shortest, 2 * shortest, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (digits * signs).double() / shortest * 2.0 ** torch.randint(-6, 0, shape, generator=generator)


def averages(counts: Counts, dtype: str = "bf16") -> dict[str, tuple[Tensor, Tensor]]:
    """By name: the average over all micro-batches in float64, and that of absolute values."""
    result = {}
    for name in SHAPES:
        parts = [
            (c, gradient(name, r, j, dtype)) for j, by_rank in enumerate(counts) for r, c in enumerate(by_rank) if c
        ]
        total = sum(c for c, _ in parts)
        result[name] = (sum(c * g for c, g in parts) / total, sum(c * g.abs() for c, g in parts) / total)
    return result


def linear_loss(named: list[tuple[str, nn.Parameter]], rank: int, micro_batch: int, dtype: str = "bf16") -> Tensor:
    """A float32 loss whose gradient is exactly :func:`gradient`, so that all that is rounded is rounded by sums."""
    return sum((p.float() * gradient(name, rank, micro_batch, dtype).float()).sum() for name, p in named)


def window(reducer: GradientReducer, named: list, rank: int, counts: Counts, first: int = 0) -> list[torch.dtype]:
    """The micro-batches from ``first`` on, the last of which is reduced; gradients' dtypes within the window."""
    seen = []
    for j in range(first, len(counts)):
        with reducer.no_sync() if j < len(counts) - 1 else nullcontext():
            reducer.backward(linear_loss(named, rank, j), counts[j][rank])
        if j < len(counts) - 1:
            seen += [p.grad.dtype for _, p in named if p.grad is not None]
    return seen


def averaged(rank: int, counts: Counts, dtype: str, config: ReducerConfig) -> dict[str, Any]:
    named = parameters(dtype)
    reducer = GradientReducer(named, config=config)
    reducer.agree_reference(max(1, counts[0][rank]))
    reducer.wire.reset_counters()
    sent_within = []
    for _ in range(3):  # the first window teaches the order, the second brings another reference
        for _, p in named:
            p.grad = None
        for j in range(len(counts) - 1):
            with reducer.no_sync():
                reducer.backward(linear_loss(named, rank, j, dtype), counts[j][rank])
            sent_within.append(reducer.wire.messages)
        reducer.backward(linear_loss(named, rank, len(counts) - 1, dtype), counts[-1][rank])
    return {
        "grads": {name: p.grad.clone() for name, p in named},
        "sent within": sum(sent_within),
        "nbytes": reducer.last.nbytes,
        "messages": (reducer.last.messages, len(reducer.plan.buckets)),
        "step": reducer.last.verdict.step,
    }


def roundings(mine: dict[str, Tensor], right: dict[str, tuple[Tensor, Tensor]]) -> float:
    """The largest error in units of one rounding of what is right; what float32 sums err by is taken off."""
    worst = 0.0
    for name, (exact, magnitude) in right.items():
        info = torch.finfo(mine[name].dtype)
        one = (info.eps / 2) * exact.abs() + info.smallest_normal * info.eps / 2
        error = (mine[name].double() - exact).abs() - 2.0**-22 * magnitude
        worst = max(worst, float((error / one).max()))
    return worst


@EACH_DTYPE
@pytest.mark.parametrize("counts_of", [even, ragged])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_err_by_one_rounding(pool: RankPool, ranks: int, counts_of: Any, dtype: str) -> None:
    counts = counts_of(8, ranks)
    right = averages(counts, dtype)
    results = pool.run(ranks, averaged, counts, dtype, WIDE)
    for result in results:
        assert result["step"]
        assert roundings(result["grads"], right) <= 1
        for name, grad in result["grads"].items():
            assert grad.dtype is DTYPES[dtype]
            assert torch.equal(grad, results[0]["grads"][name])
    (narrow, *_) = pool.run(ranks, averaged, counts, dtype, NARROW)
    assert roundings(narrow["grads"], right) > 4, "negative control: in their own dtype sums round again and again"


def test_what_is_sent(pool: RankPool) -> None:
    elements = sum(math.prod(shape) for shape in SIZES)
    for result in pool.run(2, averaged, even(3, 2), "bf16", WIDE):
        messages, buckets = result["messages"]
        assert result["sent within"] == 0
        assert messages == buckets + 1
        assert 0 <= result["nbytes"] - 4 * elements <= 64, "and the ballot"
    for result in pool.run(2, averaged, even(3, 2), "bf16", NARROW):
        assert 0 <= result["nbytes"] - 2 * elements <= 64, "negative control"


# ---------------------------------------------------------------------------------------------- memory and life of grad


def lived(rank: int) -> dict[str, Any]:
    named = parameters("bf16")
    reducer = GradientReducer(named, config=WIDE)
    reducer.agree_reference(4)
    counts = even(2, 2)
    within = window(reducer, named, rank, counts)
    buffers = {bucket.flat.untyped_storage().data_ptr(): bucket.flat.nbytes for bucket in reducer._launcher.buckets}
    places = {p.grad.untyped_storage().data_ptr() for _, p in named}
    for _, p in named:
        p.grad.zero_()  # zero_grad(set_to_none=False)
    window(reducer, named, rank, counts)
    zeroed = {name: p.grad.clone() for name, p in named}
    window(reducer, named, rank, counts)  # nothing is zeroed: gradients add up, as on one device
    carried = {name: p.grad.clone() for name, p in named}
    for _, p in named:
        p.grad = None
    with reducer.no_sync():
        reducer.backward(linear_loss(named, rank, 5), 4)
    for _, p in named:
        p.grad = None  # what the window held so far is thrown away
    reducer.backward(linear_loss(named, rank, 0), 0)
    dropped = [p.grad is None for _, p in named]
    reducer.detach()
    for _, p in named:
        p.grad = None
    linear_loss(named, rank, 0).backward()
    return {
        "within": set(within),
        "nbytes": sum(buffers.values()),
        "in buffers": places <= set(buffers),
        "zeroed": zeroed,
        "carried": carried,
        "dropped": dropped,
        "plain": {name: (p.grad.dtype, p.grad_dtype) for name, p in named},
    }


def test_gradients_exist_once_in_float32_and_then_in_the_parameters_dtype(pool: RankPool) -> None:
    right = averages(even(2, 2))
    for result in pool.run(2, lived):
        assert result["within"] == {torch.float32}
        assert result["nbytes"] == 4 * sum(math.prod(shape) for shape in SIZES)
        assert result["in buffers"]
        assert roundings(result["zeroed"], right) <= 1
        twice = {name: (exact + result["zeroed"][name].double(), total) for name, (exact, total) in right.items()}
        assert roundings(result["carried"], twice) <= 1
        assert all(result["dropped"])
        assert set(result["plain"].values()) == {(torch.bfloat16, torch.bfloat16)}


def test_rounding_in_place_keeps_each_number_and_each_layout() -> None:
    torch.manual_seed(0)
    image = torch.zeros(4, 3, 5, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    held = [nn.Parameter(image), nn.Parameter(torch.zeros(1001, dtype=torch.bfloat16))]
    (layout,) = plan_buckets(held, [0, 1], math.inf, math.inf).buckets
    bucket = Bucket(layout, held, torch.float32)
    right = [torch.randn(p.shape) for p in held]
    for view, numbers in zip(bucket.views, right, strict=True):
        view.copy_(numbers)
    for view, numbers, p in zip(bucket.round(), right, held, strict=True):
        assert torch.equal(view, numbers.bfloat16())
        assert view.stride() == p.stride()


# ---------------------------------------------------------------------------------------------- votes


def voted(rank: int, sizes: tuple[float, ...], dtype: str, drops: bool) -> tuple:
    p = nn.Parameter(torch.zeros(4, dtype=DTYPES[dtype]))
    reducer = GradientReducer([("p", p)], config=ReducerConfig(reduce_dtype="fp32", drop_nonfinite=drops))
    reducer.agree_reference(1)
    with reducer.no_sync():
        reducer.backward((p.float() * sizes[rank]).sum(), 1)
    reducer.backward((p.float() * sizes[rank]).sum(), 1)
    return reducer.last.verdict, p.grad.tolist()


@EACH_DTYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_voted_on_and_can_be_left_out(pool: RankPool, dtype: str, bad: float) -> None:
    for verdict, _ in pool.run(3, voted, (1.0, bad, 3.0), dtype, False):
        assert (verdict.reason, verdict.ranks) == (Reason.NONFINITE, (1,))
        assert "rank 1: p " in verdict.detail
    for verdict, grad in pool.run(3, voted, (1.0, bad, 3.0), dtype, True):
        assert (verdict.step, verdict.dropped) == (True, (1,))
        assert grad == [2.0] * 4


def test_sums_may_leave_the_range_on_the_way_but_not_in_the_end(pool: RankPool) -> None:
    """Averages of 60,000 fit float16, though two of them do not; a sum over micro-batches of 120,000 does not."""
    for verdict, grad in pool.run(2, voted, (6e4, 6e4), "fp16", False):
        assert verdict.step
        assert grad == [6e4] * 4
    for verdict, _ in pool.run(2, summed_up, 6e4):
        assert verdict.reason is Reason.OVERFLOW
    for verdict, grad in pool.run(2, summed_up, 3e4):
        assert verdict.step
        assert grad == [6e4] * 4


def summed_up(rank: int, size: float) -> tuple:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    reducer = GradientReducer([("p", p)], config=ReducerConfig(reduce_dtype="fp32"))
    for last in (False, True):
        with nullcontext() if last else reducer.no_sync():
            reducer.backward((p.float() * size).sum(), 1, divided_by=None)
    return reducer.last.verdict, p.grad.tolist()


# ---------------------------------------------------------------------------------------------- window checkpoints


def saved_within(rank: int, counts: Counts, behind: int, config: ReducerConfig) -> tuple[dict, dict]:
    named = parameters("bf16")
    reducer = GradientReducer(named, config=config)
    reducer.agree_reference(4)
    with reducer.no_sync():
        for j in range(behind):
            reducer.backward(linear_loss(named, rank, j), counts[j][rank])
    return reducer.state_dict(), reducer.window_state()


def resumed_within(rank: int, counts: Counts, behind: int, config: ReducerConfig, saved: tuple) -> dict[str, Tensor]:
    named = parameters("bf16")
    reducer = GradientReducer(named, config=config)
    reducer.load_state_dict(saved[0])
    reducer.resume_window(saved[1])
    window(reducer, named, rank, counts, first=behind)
    return {name: p.grad.clone() for name, p in named}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 3), (2, 3), (4, 1)])
def test_a_window_checkpoint_holds_float32_sums(pool: RankPool, before: int, after: int) -> None:
    """Also with another number of ranks: micro-batches behind the checkpoint are then those of these ranks."""
    behind = 5
    counts = [row[:before] for row in ragged(8, 4)[:behind]] + [row[:after] for row in ragged(8, 4)[behind:]]
    right = averages(counts)
    saved = pool.run(before, saved_within, counts, behind, WIDE)[0]
    assert {grad.dtype for grad in saved[1]["gradients"].values()} == {torch.float32}
    for grads in pool.run(after, resumed_within, counts, behind, WIDE, saved):
        assert roundings(grads, right) <= 1
    narrow = pool.run(before, saved_within, counts, behind, NARROW)[0]
    assert roundings(pool.run(after, resumed_within, counts, behind, NARROW, narrow)[0], right) > 2, "negative control"


@pytest.mark.parametrize(("first", "then"), [(WIDE, NARROW), (NARROW, WIDE)])
def test_a_window_checkpoint_can_be_gone_on_from_without_or_with_float32_sums(
    pool: RankPool, first: ReducerConfig, then: ReducerConfig
) -> None:
    counts, behind = ragged(8, 2), 5
    saved = pool.run(2, saved_within, counts, behind, first)[0]
    for grads in pool.run(2, resumed_within, counts, behind, then, saved):
        for name, (exact, magnitude) in averages(counts).items():
            assert ((grads[name].double() - exact).abs() <= 16 * 2.0**-8 * magnitude).all()


# ---------------------------------------------------------------------------------------------- settings


def test_exact_sums_have_no_meaning_here() -> None:
    with pytest.raises(ConfigurationError, match="leave exact_sums out"):
        ReducerConfig(reduce_dtype="fp32", exact_sums=True)
    with pytest.raises(ConfigurationError, match="leave exact_sums out"):
        BucketedDDPStrategy(reduce_dtype="fp32", exact_sums=True)


# ---------------------------------------------------------------------------------------------- in a Trainer

K, STEPS, BATCH = 8, 6, 4


class Bf16Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
        self.parts: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.digests: list[bytes] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # What one device's autograd gives for this micro-batch, without Lightning or the reducer.
        loss = self.net(batch).float().square().mean()
        self.parts.append(flatten(torch.autograd.grad(loss, list(self.net.parameters()), retain_graph=True)))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.net.parameters()]
        assert {grad.dtype for grad in grads} == {torch.bfloat16}
        self.grads.append(flatten(grads))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.digests.append(b"".join(p.detach().float().numpy().tobytes() for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def flatten(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def fit(rank: int, reduce_dtype: str | None) -> tuple[Tensor, Tensor, list[bytes]]:
    torch.manual_seed(100 + rank)
    batches = torch.randn(STEPS * K, BATCH, 12)
    module = Bf16Module()
    strategy = BucketedDDPStrategy(reduce_dtype=reduce_dtype, same_data="off")
    trainer = trainer_of(strategy, 2, precision="bf16-true", max_epochs=1, accumulate_grad_batches=K)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return torch.stack(module.parts).view(STEPS, K, -1), torch.stack(module.grads), module.digests


def test_a_bf16_model_under_the_trainer(pool: RankPool) -> None:
    """Counts are powers of two, so that what backward itself rounds is the same for the weighted loss."""
    errors = {}
    for reduce_dtype in ("fp32", None):
        (parts, grads, digests), (other_parts, other_grads, other_digests) = pool.run(2, fit, reduce_dtype)
        assert torch.equal(grads, other_grads)
        assert digests == other_digests
        together = torch.cat([parts, other_parts], 1)
        right, magnitude = together.mean(1), together.abs().mean(1)
        error = (grads - right).abs() - 2.0**-22 * magnitude
        errors[reduce_dtype] = float((error / (2.0**-8 * right.abs() + 1e-38)).max())
    assert errors["fp32"] <= 1
    assert errors[None] > 4, "negative control"
