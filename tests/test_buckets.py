"""Buckets: the layout of flat memory, and the gradients that live in it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dp.reduction.buckets import Bucket, BucketPlan, plan_buckets

F16, F32, F64, C64 = torch.float16, torch.float32, torch.float64, torch.complex64
WIDTH = {F16: 2, torch.bfloat16: 2, F32: 4, F64: 8, C64: 8}  # bytes of one element


def meta(numel: int, dtype: torch.dtype = F32) -> Tensor:
    """A parameter without memory: a layout needs none."""
    return torch.empty(numel, dtype=dtype, device="meta")


def indices(plan: BucketPlan) -> list[list[int]]:
    return [list(layout.indices) for layout in plan.buckets]


# ----------------------------------------------------------------------------------------------- plan_buckets


@pytest.mark.parametrize(
    ("sizes", "order", "cap", "first_cap", "expected"),
    [
        # sizes in float32 elements, caps in bytes
        pytest.param([], [], 8, 8, [], id="no parameter, no bucket"),
        pytest.param([1], [0], 8, 8, [[0]], id="one"),
        pytest.param([1, 1, 1, 1], [3, 2, 1, 0], 8, 8, [[3, 2], [1, 0]], id="a bucket may be exactly full"),
        pytest.param([1, 1, 1, 1], [3, 2, 1, 0], 7.9, 7.9, [[3], [2], [1], [0]], id="one byte less is too little"),
        pytest.param([1, 1, 1, 1, 1], [0, 1, 2, 3, 4], 8, 4, [[0], [1, 2], [3, 4]], id="the first is smaller"),
        pytest.param([1, 9, 1, 1], [0, 1, 2, 3], 8, 8, [[0], [1], [2, 3]], id="an oversize one is alone"),
        pytest.param([9, 1, 1], [0, 1, 2], 8, 4, [[0], [1, 2]], id="an oversize one uses up the first cap"),
        pytest.param([2, 1, 2, 1], [0, 1, 2, 3], 12, 12, [[0, 1], [2, 3]], id="greedy, in order"),
        pytest.param([2, 2, 1], [0, 1, 2], 12, 12, [[0], [1, 2]], id="no looking ahead for a better fit"),
        pytest.param([0, 1, 0, 1, 0], [0, 1, 2, 3, 4], 4, 4, [[0, 1, 2], [3, 4]], id="empty ones fit anywhere"),
        pytest.param([1, 1, 1], [1, 2, 0], float("inf"), float("inf"), [[1, 2, 0]], id="no cap"),
        pytest.param([1, 1], [1, 0], 0, 0, [[1], [0]], id="cap 0: one parameter a bucket"),
    ],
)
def test_exact_layout(sizes, order, cap, first_cap, expected):
    plan = plan_buckets([meta(size) for size in sizes], order, cap, first_cap)
    assert indices(plan) == expected
    for layout in plan.buckets:
        ends = list(itertools.accumulate(sizes[i] for i in layout.indices))
        assert list(layout.offsets) == [0, *ends[:-1]]
        assert (layout.numel, layout.nbytes) == (ends[-1], 4 * ends[-1])
    assert plan.nbytes == 4 * sum(sizes)


@pytest.mark.parametrize(
    ("dtypes", "cap", "first_cap", "expected"),
    [
        # Parameters of one element each, ready in the order 0, 1, 2, ...
        pytest.param([F32, F16, F32, F16], 99, 99, [[0, 2], [1, 3]], id="dtypes do not mix"),
        pytest.param([F32, F16, F16, F32], 99, 99, [[1, 2], [0, 3]], id="ready first, launched first"),
        pytest.param([F64, F32, F64, F32, F64], 16, 8, [[0], [1, 3], [2, 4]], id="each dtype has a first bucket"),
        pytest.param([F16, C64, F16, F16, F16], 4, 4, [[1], [0, 2], [3, 4]], id="complex is 8 bytes wide"),
    ],
)
def test_dtypes_travel_apart(dtypes, cap, first_cap, expected):
    plan = plan_buckets([meta(1, dtype) for dtype in dtypes], range(len(dtypes)), cap, first_cap)
    assert indices(plan) == expected
    for layout in plan.buckets:
        assert {dtypes[i] for i in layout.indices} == {layout.dtype}


def test_devices_travel_apart():
    parameters = [torch.zeros(1), meta(1), torch.zeros(1), meta(1)]
    plan = plan_buckets(parameters, [0, 1, 2, 3], 99, 99)
    assert [(layout.indices, layout.device.type) for layout in plan.buckets] == [((0, 2), "cpu"), ((1, 3), "meta")]


@pytest.mark.parametrize("order", [[0, 0], [0], [0, 1, 2], [1, 2]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(AssertionError, match="every parameter once"):
        plan_buckets([meta(1), meta(1)], order, 8, 8)


def longest_run(sizes: list[int], cap: float) -> int:
    """How many of the first ``sizes`` go into one bucket: all that fit, and at least one. Tries every length."""
    fitting = [length for length in range(1, len(sizes) + 1) if sum(sizes[:length]) <= cap]
    return max(fitting, default=1)


@st.composite
def plan_arguments(draw):
    shapes = st.lists(st.integers(0, 4), max_size=3)
    kinds = st.tuples(shapes, st.sampled_from(sorted(WIDTH, key=str)), st.sampled_from(["cpu", "meta"]))
    parameters = [
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in draw(st.lists(kinds, max_size=14))
    ]
    order = draw(st.permutations(range(len(parameters))))
    return parameters, order, draw(st.integers(0, 300)), draw(st.integers(0, 100))


@settings(max_examples=300, deadline=None)
@given(plan_arguments())
def test_every_plan(arguments):
    parameters, order, cap, first_cap = arguments
    plan = plan_buckets(*arguments)

    assert sorted(itertools.chain(*indices(plan))) == list(range(len(parameters)))  # every parameter once
    for layout in plan.buckets:
        end = 0
        for index, offset in zip(layout.indices, layout.offsets, strict=True):
            assert offset == end  # no gap, no overlap
            end += parameters[index].numel()
            assert (parameters[index].dtype, parameters[index].device) == (layout.dtype, layout.device)
        assert end == layout.numel

    ready = [max(order.index(i) for i in layout.indices) for layout in plan.buckets]
    assert ready == sorted(ready)  # launched in the order in which they are complete

    for key in {(p.dtype, p.device) for p in parameters}:  # each stream of one dtype and device is cut greedily
        stream = [i for i in order if (parameters[i].dtype, parameters[i].device) == key]
        sizes = [parameters[i].numel() * WIDTH[key[0]] for i in stream]
        runs = [layout.indices for layout in plan.buckets if (layout.dtype, layout.device) == key]
        at, caps = 0, itertools.chain([first_cap], itertools.repeat(cap))
        for run in runs:
            length = longest_run(sizes[at:], next(caps))
            assert list(run) == stream[at : at + length]
            at += length
        assert at == len(stream)

    fresh = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in parameters]
    assert plan_buckets(fresh, order, cap, first_cap) == plan  # a function of shapes, dtypes and order alone


# ----------------------------------------------------------------------------------------------- memory


def one_bucket(*parameters: Tensor) -> Bucket:
    plan = plan_buckets(parameters, range(len(parameters)), float("inf"), float("inf"))
    assert len(plan.buckets) == 1
    return Bucket(plan.buckets[0], parameters)


CHANNELS_LAST = {"memory_format": torch.channels_last}


@pytest.mark.parametrize(
    ("data", "strides"),
    [
        pytest.param(torch.zeros(2, 3), (3, 1), id="contiguous"),
        pytest.param(torch.zeros(()), (), id="0-dim"),
        pytest.param(torch.zeros(0, 3), None, id="empty"),
        pytest.param(torch.zeros(3, 0), None, id="empty, last dimension"),
        pytest.param(torch.zeros(3, 2).t(), (1, 2), id="transposed"),
        pytest.param(torch.zeros(2, 3, 4).permute(1, 2, 0), (4, 1, 12), id="permuted"),
        pytest.param(torch.zeros(2, 3, 4, 5).to(**CHANNELS_LAST), (60, 1, 15, 3), id="channels_last"),
        pytest.param(torch.zeros(4, 3, 1, 1).to(**CHANNELS_LAST), (3, 1, 3, 3), id="1x1 convolution, channels_last"),
        pytest.param(torch.zeros(4, 3, 1, 1), (3, 1, 1, 1), id="1x1 convolution"),
        pytest.param(torch.zeros(2, 9)[:1, :3], (9, 1), id="one row of a larger matrix"),
        pytest.param(torch.zeros(1, 3).expand(2, 3), (3, 1), id="expanded: made contiguous"),
        pytest.param(torch.zeros(2, 6)[:, ::2], (3, 1), id="with gaps: made contiguous"),
        pytest.param(torch.zeros(4).as_strided((2, 2), (1, 1)), (2, 1), id="overlapping: made contiguous"),
    ],
)
def test_a_view_has_the_strides_of_its_parameter(data, strides):
    bucket = one_bucket(torch.zeros(2), data, torch.zeros(3))
    before, view, after = bucket.views
    assert view.shape == data.shape
    if strides is not None:
        assert view.stride() == strides

    numbers = torch.arange(1.0, 1 + data.numel()).reshape(data.shape)
    view.copy_(numbers)
    # Element by element where the strides say it lies, and nowhere else.
    expected = torch.zeros(5 + data.numel())
    for place in itertools.product(*(range(n) for n in data.shape)):
        lies_at = 2 + sum(i * stride for i, stride in zip(place, view.stride(), strict=True))
        assert expected[lies_at] == 0
        expected[lies_at] = numbers[place]
    assert torch.equal(bucket.flat, expected)
    assert not before.any() and not after.any()


def test_a_complex_gradient_lies_as_pairs_of_real_numbers():
    parameter = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
    bucket = one_bucket(parameter)
    assert (bucket.flat.dtype, bucket.flat.numel()) == (F32, 4)
    assert bucket.flat.numel() * 4 == bucket.layout.nbytes
    parameter.abs().square().sum().backward()
    bucket.take(0)
    assert torch.equal(bucket.flat, torch.tensor([2.0, 4.0, 6.0, -8.0]))  # d|z|^2 = 2z in torch's convention
    bucket.flat.mul_(0.5)  # what a reduction does to the pairs happens to the complex numbers
    assert torch.equal(parameter.grad, torch.tensor([1 + 2j, 3 - 4j]))


# ----------------------------------------------------------------------------------------------- gradients


def take_each(bucket: Bucket) -> None:
    for slot in range(len(bucket.parameters)):
        bucket.take(slot)


MOVERS = pytest.mark.parametrize("move", [take_each, Bucket.take_all, Bucket.fill], ids=["take", "take_all", "fill"])


def three_parameters() -> tuple[list[nn.Parameter], Bucket]:
    """Of 1, 2 and 3 elements; the second has no gradient; the buffer is full of old numbers."""
    parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)]
    bucket = one_bucket(*parameters)
    bucket.flat.fill_(-9)
    parameters[0].grad = torch.tensor([1.0])
    parameters[2].grad = torch.tensor([4.0, 5.0, 6.0])
    return parameters, bucket


@MOVERS
def test_gradients_move_into_the_buffer(move):
    parameters, bucket = three_parameters()
    move(bucket)
    assert [p.grad is view for p, view in zip(parameters, bucket.views, strict=True)] == [True, False, True]
    assert parameters[1].grad is None  # missing stays missing
    assert bucket.flat[[0, 3, 4, 5]].tolist() == [1, 4, 5, 6]
    # Only what is sent needs zeros in the place of a missing gradient.
    assert bucket.flat[1:3].tolist() == ([0, 0] if move is Bucket.fill else [-9, -9])


@MOVERS
def test_a_gradient_that_is_in_the_buffer_already_is_left_alone(move):
    parameters, bucket = three_parameters()
    move(bucket)
    bucket.flat.mul_(2)
    move(bucket)
    assert parameters[0].grad is bucket.views[0]
    assert bucket.flat[[0, 3, 4, 5]].tolist() == [2, 8, 10, 12]


def test_take_moves_one_gradient_only():
    parameters, bucket = three_parameters()
    bucket.take(2)
    assert bucket.flat.tolist() == [-9, -9, -9, 4, 5, 6]
    assert parameters[0].grad is not bucket.views[0]


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)))
def test_fill_tells_who_has_a_gradient_and_zeroes_the_rest(present):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in present]
    bucket = one_bucket(*parameters)
    bucket.flat.fill_(float("nan"))
    for parameter, has in zip(parameters, present, strict=True):
        parameter.grad = torch.ones(2) if has else None
    assert bucket.fill() == [slot for slot, has in enumerate(present) if not has]
    assert bucket.flat.tolist() == [float(has) for has in present for _ in range(2)]


@MOVERS
def test_a_sparse_gradient_is_made_dense(move):
    table = nn.Embedding(4, 2, sparse=True)
    bucket = one_bucket(table.weight)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad.is_sparse and not table.weight.grad.is_coalesced()
    move(bucket)
    assert table.weight.grad is bucket.views[0]
    assert bucket.flat.view(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


@MOVERS
def test_empty_and_0_dim_parameters(move):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(), (0, 3), (1,)]]
    bucket = one_bucket(*parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1)
    move(bucket)
    assert bucket.flat.tolist() == [1, 3]
    assert all(p.grad is view for p, view in zip(parameters, bucket.views, strict=True))


def test_a_bucket_of_nothing_but_empty_parameters():
    bucket = one_bucket(nn.Parameter(torch.zeros(0)))
    assert bucket.flat.numel() == 0
    assert bucket.fill() == [0]


@MOVERS
def test_a_gradient_with_other_strides_than_its_view(move):
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(**CHANNELS_LAST))
    bucket = one_bucket(parameter)
    gradient = torch.arange(120.0).reshape(2, 3, 4, 5)
    parameter.grad = gradient.clone()
    move(bucket)
    assert torch.equal(parameter.grad, gradient)
    assert torch.equal(bucket.flat, gradient.permute(0, 2, 3, 1).reshape(-1))


@MOVERS
def test_the_graph_of_a_gradient_stays_outside(move):
    """A gradient of ``create_graph=True`` has a history, which must not grow from step to step."""
    parameter = nn.Parameter(torch.tensor([3.0]))
    bucket = one_bucket(parameter)
    (parameter.grad,) = torch.autograd.grad(parameter.square().sum(), parameter, create_graph=True)
    move(bucket)
    assert bucket.flat.tolist() == [6]
    assert not bucket.flat.requires_grad and parameter.grad.grad_fn is None


def backward(parameter: nn.Parameter, slope: float) -> None:
    (slope * parameter).sum().backward()


@MOVERS
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(move, set_to_none):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    bucket = one_bucket(parameter)
    backward(parameter, 2)
    move(bucket)
    backward(parameter, 3)  # accumulates in place
    assert parameter.grad is bucket.views[0]
    assert bucket.flat.tolist() == [5, 5]

    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert parameter.grad is None
        assert bucket.flat.tolist() == [5, 5]  # old numbers, dealt with by the next take or fill
    else:
        assert parameter.grad is bucket.views[0]
        assert bucket.flat.tolist() == [0, 0]

    backward(parameter, 7)
    move(bucket)
    assert parameter.grad is bucket.views[0]
    assert bucket.flat.tolist() == [7, 7]
