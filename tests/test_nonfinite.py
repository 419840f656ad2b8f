"""Non-finite gradients: found, and described."""

import math
import struct
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.reduction import GradientReducer, ReducerConfig, nonfinite
from lightning_dp.reduction.ballot import Flag
from lightning_dp.reduction.buckets import Bucket, plan_buckets
from lightning_dp.reduction.nonfinite import LocalCheck, scale_and_check_

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BAD = pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
FACTORS = pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3, 7 / 9, 0.1, 3.0, 1e-3])


def some_numbers(dtype: torch.dtype) -> Tensor:
    """Of many sizes and both signs, all normal numbers of every dtype also after scaling."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.rand(1000, generator=generator, dtype=torch.float64) * 0.9 + 0.1
    signs = torch.randint(0, 2, (1000,), generator=generator) * 2 - 1
    powers = torch.randint(0, 10, (1000,), generator=generator)
    return (sizes * signs * 2.0**powers).to(dtype)


# ----------------------------------------------------------------------------------------------- scale_and_check_


@FACTORS
def test_float64_is_scaled_exactly(factor):
    """To the last bit what Python's own multiplication gives, and not what a factor in float32 would."""
    numbers = some_numbers(torch.float64)
    scaled = numbers.clone()
    assert scale_and_check_(scaled, factor) == 0
    assert scaled.tolist() == [number * factor for number in numbers.tolist()]


@FACTORS
def test_float32_is_scaled_exactly(factor):
    """The product of two float32 has at most 48 digits: float64 holds it exactly, and one rounding follows."""
    (rounded,) = struct.unpack("f", struct.pack("f", factor))
    numbers = some_numbers(torch.float32)
    scaled = numbers.clone()
    assert scale_and_check_(scaled, factor) == 0
    assert torch.equal(scaled, (numbers.double() * rounded).float())


@FACTORS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_scaled_within_half_a_digit(dtype, factor):
    numbers = some_numbers(dtype)
    scaled = numbers.clone()
    assert scale_and_check_(scaled, factor) == 0
    exact = numbers.double() * factor
    half_a_digit = torch.finfo(dtype).eps / 2
    assert torch.all((scaled.double() - exact).abs() <= exact.abs() * half_a_digit * 1.001)


@EVERY_DTYPE
@BAD
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_bad_numbers_are_found_wherever_they_are(dtype, bad, factor):
    # 67 is odd, so that vectorized kernels and their remainders are both met.
    for place in range(67):
        flat = torch.ones(67, dtype=dtype)
        flat[place] = bad
        found = scale_and_check_(flat, factor)
        assert found == 1, f"{bad} at {place}"
        assert (found.dtype, found.ndim) == (torch.float32, 0)
        others = torch.cat([flat[:place], flat[place + 1 :]])
        assert torch.all(others == factor)


@EVERY_DTYPE
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_huge_and_tiny_numbers_are_finite(dtype, factor):
    limits = torch.finfo(dtype)
    flat = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0], dtype=dtype)
    expected = (flat.double() * factor).to(dtype)
    assert scale_and_check_(flat, factor) == 0
    assert torch.equal(flat, expected)


@EVERY_DTYPE
def test_an_overflow_by_the_factor_itself_is_found(dtype):
    flat = torch.tensor([1.0, torch.finfo(dtype).max], dtype=dtype)
    assert scale_and_check_(flat, 2.0) == 1
    assert torch.isinf(flat[1])


@EVERY_DTYPE
def test_factor_1_changes_no_bit(dtype):
    numbers = some_numbers(dtype)
    numbers[5] = torch.finfo(dtype).smallest_normal / 2
    scaled = numbers.clone()
    scale_and_check_(scaled)
    assert torch.equal(scaled, numbers)


# ----------------------------------------------------------------------------------------------- LocalCheck


def on_cpu(*parameters: nn.Parameter) -> Bucket:
    plan = plan_buckets(parameters, range(len(parameters)), INF, INF)
    (layout,) = plan.buckets
    bucket = Bucket(layout, parameters)
    bucket.fill()
    return bucket


def as_on_a_gpu(*parameters: nn.Parameter) -> SimpleNamespace:
    """The same bucket, saying that it lives on a GPU; all operators used there work on either device."""
    bucket = on_cpu(*parameters)
    flat = SimpleNamespace(device=torch.device("cuda"), numel=bucket.flat.numel)
    return SimpleNamespace(flat=flat, views=bucket.views, layout=bucket.layout)


BRANCHES = pytest.mark.parametrize("place", [on_cpu, as_on_a_gpu], ids=["CPU", "GPU"])


def parameter(grad: list, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    grad = torch.tensor(grad, dtype=dtype)
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def check_of(bucket, names: list[str]) -> LocalCheck:
    check = LocalCheck(names, CPU)
    check.look(bucket)
    return check


@pytest.mark.parametrize(
    ("gradients", "on_the_cpu", "on_a_gpu"),
    [
        # The GPU keeps one number a gradient, so it cannot tell how many elements are bad.
        pytest.param([[1, 2], [3]], "", "", id="nothing bad"),
        pytest.param([[1, NAN], [3]], "a NaN (1 of 2 elements)", "a NaN", id="NaN"),
        pytest.param([[1, 2], [INF]], "b Inf (1 of 1 elements)", "b Inf", id="Inf"),
        pytest.param([[-INF, 2, -INF], [3]], "a Inf (2 of 3 elements)", "a Inf", id="minus Inf"),
        pytest.param([[INF, NAN, 0], [3]], "a NaN (2 of 3 elements)", "a NaN", id="NaN says more than Inf"),
        pytest.param([[NAN, INF, 0], [3]], "a NaN (2 of 3 elements)", "a NaN", id="in any order"),
        pytest.param([[NAN], [-INF, 0]], "a NaN (1 of 1 elements), b Inf (1 of 2 elements)", "a NaN, b Inf", id="both"),
        pytest.param([[], [NAN]], "b NaN (1 of 1 elements)", "b NaN", id="beside an empty one"),
        pytest.param([[], []], "", "", id="all empty"),
    ],
)
@BRANCHES
def test_the_culprits_are_named(place, gradients, on_the_cpu, on_a_gpu):
    expected = on_the_cpu if place is on_cpu else on_a_gpu
    check = check_of(place(*(parameter(grad) for grad in gradients)), ["a", "b"])
    assert check.description() == expected
    flag = check.flag()
    assert flag == (Flag.NONFINITE if expected else Flag.NONE)
    assert (flag.dtype, flag.ndim, flag.device) == (torch.int64, 0, CPU)


@BRANCHES
@BAD
@EVERY_DTYPE
def test_every_position_and_dtype_is_looked_at(place, bad, dtype):
    kind = "NaN" if bad != bad else "Inf"
    for at in range(6):
        grads = [1.0] * 6
        grads[at] = bad
        check = check_of(place(parameter(grads[:2], dtype), parameter(grads[2:], dtype)), ["a", "b"])
        assert check.flag() == 1
        assert check.description().startswith(f"{'a' if at < 2 else 'b'} {kind}")


@BRANCHES
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_huge_numbers_are_no_culprits(place, dtype):
    limits = torch.finfo(dtype)
    check = check_of(place(parameter([limits.max, limits.min], dtype)), ["a"])
    assert check.flag() == Flag.LARGE
    assert check.description() == ""


@BRANCHES
@EVERY_DTYPE
@pytest.mark.parametrize("ranks", [1, 4, 300])
def test_what_is_not_called_large_stays_in_range_as_a_sum(place, dtype, ranks):
    """If all ranks have it, and their sum is multiplied by as much as goes unchecked, it is still finite."""
    limit = torch.finfo(dtype).max
    called = set()
    for size in (limit, limit / 2, limit / 64, limit / 65 / ranks, limit / 1000 / ranks, 1e-3):
        check = LocalCheck(["a"], CPU, ranks)
        check.look(place(parameter([size, -size], dtype)))
        large = bool(int(check.flag()) & Flag.LARGE)
        called.add(large)
        held = torch.tensor(size, dtype=dtype)
        assert large or torch.isfinite((held.double() * ranks * LocalCheck.MAX_FACTOR).to(dtype))
    assert called == {False, True}


@BRANCHES
def test_huge_float64_numbers_are_no_culprits(place):
    assert check_of(place(parameter([1e150, -1e150], torch.float64)), ["a"]).flag() == Flag.NONE
    # The square of a larger one leaves the range, so it takes a second look.
    assert check_of(place(parameter([1e307, -1e307], torch.float64)), ["a"]).flag() == Flag.LARGE


@BRANCHES
@pytest.mark.parametrize(
    ("bad", "kind"),
    [(complex(NAN, 0), "NaN"), (complex(0, NAN), "NaN"), (complex(0, INF), "Inf"), (complex(-INF, 0), "Inf")],
)
def test_complex_gradients(place, bad, kind):
    assert check_of(place(parameter([1 + 1j, 2j], torch.complex64)), ["a"]).flag() == 0
    check = check_of(place(parameter([1 + 1j, bad], torch.complex64)), ["a"])
    assert check.flag() == 1
    assert check.description().startswith(f"a {kind}")


@BRANCHES
@pytest.mark.parametrize(("num_bad", "more"), [(3, ""), (4, " and 1 more"), (9, " and 6 more")])
def test_a_long_list_is_cut(place, num_bad, more):
    bucket = place(*(parameter([NAN]) for _ in range(num_bad)))
    text = check_of(bucket, [f"p{i}" for i in range(num_bad)]).description()
    assert text.count(" NaN") == LocalCheck.MAX_NAMED == 3
    assert text.startswith("p0 NaN") and "p2 NaN" in text and "p3" not in text
    assert text.endswith(more) and ("more" in text) == bool(more)


@BRANCHES
def test_names_follow_the_bucket_and_not_the_order_of_slots(place):
    bucket = place(parameter([1.0]), parameter([INF]))
    # The slots of a bucket of a larger model hold any of its parameters.
    bucket.layout = SimpleNamespace(indices=(7, 4), dtype=torch.float32)
    assert check_of(bucket, [f"p{i}" for i in range(9)]).description().startswith("p4 Inf")


@BRANCHES
def test_a_window_of_several_buckets(place):
    names = ["a", "b", "c"]
    check = LocalCheck(names, CPU)
    assert check.flag() == 0  # nothing looked at yet
    for index, grad in enumerate([[1.0], [NAN], [2.0]]):
        bucket = place(parameter(grad))
        bucket.layout = SimpleNamespace(indices=(index,), dtype=torch.float32)
        check.look(bucket)
    assert check.flag() == 1
    assert check.description().startswith("b NaN") and "c" not in check.description()

    check.reset()
    assert check.flag() == 0
    assert check.description() == ""


@BRANCHES
def test_looking_changes_no_gradient(place):
    grads = [1.5, NAN, -INF, 2.5]
    bucket = place(parameter(grads))
    check_of(bucket, ["a"])
    assert str(bucket.views[0].tolist()) == str(grads)


def test_what_was_bad_is_remembered_when_the_sum_has_overwritten_it():
    """The host asks for names after the all-reduce, when every rank's buffer holds the sum."""
    for place in (on_cpu, as_on_a_gpu):
        bucket = place(parameter([1.0]), parameter([NAN]))
        check = check_of(bucket, ["a", "b"])
        for view in bucket.views:
            view.fill_(INF)
        assert check.flag() == 1
        assert check.description().startswith("b NaN") and "a " not in check.description()


# ----------------------------------------------------------------------------------------------- on a device

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@EVERY_DTYPE
@BAD
def test_a_gpu_finds_the_same(dtype, bad):
    bad_one = nn.Parameter(torch.zeros(5, dtype=dtype, device="cuda"))
    bad_one.grad = torch.tensor([1, 2, bad, 3, 4], dtype=dtype, device="cuda")
    fine = nn.Parameter(torch.zeros(3, dtype=dtype, device="cuda"))
    fine.grad = torch.ones_like(fine)
    bucket = on_cpu(fine, bad_one)
    check = LocalCheck(["a", "b"], bucket.flat.device)
    check.look(bucket)
    assert check.flag() == 1
    assert check.flag().is_cuda
    assert check.description() == f"b {'NaN' if bad != bad else 'Inf'}"
    assert scale_and_check_(bucket.flat, 0.5) == 1
    assert fine.grad.tolist() == [0.5] * 3


@pytest.mark.gpu
@NEEDS_GPU
@FACTORS
def test_a_gpu_scales_float64_exactly(factor):
    numbers = some_numbers(torch.float64)
    scaled = numbers.cuda()
    assert scale_and_check_(scaled, factor) == 0
    assert scaled.tolist() == [number * factor for number in numbers.tolist()]


# ----------------------------------------------------------------------------------------------- in a backward


WIDTH = 160  # a weight is looked at when it arrives, a bias with its bucket


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def backwards(model: nn.Module, micro_batches: int = 1, spoil=None, monkeypatch=None) -> tuple:
    """Two windows, the second with whatever ``spoil`` does to it; its verdict and how many numbers were read."""
    reducer = GradientReducer(model.named_parameters(), config=ReducerConfig(bucket_cap_mb=0.3))
    read = []
    if monkeypatch is not None:
        real = nonfinite._square
        monkeypatch.setattr(nonfinite, "_square", lambda flat: read.append(flat.numel()) or real(flat))
    for window in range(2):
        read.clear()
        model.zero_grad()
        if window and spoil is not None:
            spoil(model)
        for micro_batch in range(micro_batches):
            loss = model(torch.ones(2, WIDTH)).square().mean()
            with reducer.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                reducer.backward(loss, count=2)
    return reducer.last.verdict, sum(read), sum(p.numel() for p in model.parameters())


def set_nan(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[5] = NAN


def in_the_gradient(name: str):
    def spoil(model: nn.Module) -> None:
        model.get_parameter(name).register_hook(lambda grad: grad * NAN)

    return spoil


def behind_the_reducer(name: str, when: str):
    """A hook of the user's writes into a gradient when another one has arrived, which is behind the reducer's hook."""

    def spoil(model: nn.Module) -> None:
        model.get_parameter(when).register_post_accumulate_grad_hook(lambda _: set_nan(model.get_parameter(name).grad))

    return spoil


NAMES = [f"layers.{k}.{kind}" for k in (0, 1, 3) for kind in ("weight", "bias")]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        *((in_the_gradient(name), name) for name in NAMES),
        # Layers arrive from the last to the first, two in a bucket.
        (behind_the_reducer("layers.3.weight", "layers.3.weight"), "layers.3.weight"),
        (behind_the_reducer("layers.3.weight", "layers.2.bias"), "layers.3.weight"),
        (behind_the_reducer("layers.3.bias", "layers.3.weight"), "layers.3.bias"),
        (behind_the_reducer("layers.1.weight", "layers.0.bias"), "layers.1.weight"),
    ],
)
def test_a_gradient_is_looked_at_as_it_is_sent(micro_batches, spoil, culprit):
    verdict, _, _ = backwards(Chain(), micro_batches, spoil)
    assert not verdict.step
    assert culprit in verdict.detail
    assert backwards(Chain(), micro_batches)[0].step


def test_no_number_is_read_twice(monkeypatch):
    _, read, numbers = backwards(Chain(), monkeypatch=monkeypatch)
    assert read == numbers


def test_what_was_changed_is_read_again(monkeypatch):
    spoil = behind_the_reducer("layers.3.weight", "layers.2.bias")
    verdict, read, numbers = backwards(Chain(), 1, spoil, monkeypatch)
    assert not verdict.step
    assert numbers < read < 2 * numbers
