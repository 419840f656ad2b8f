"""Making replicas: equal structure, then rank 0's bits."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailureError
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.errors import ConfigurationError, StructureMismatchError
from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.replication import broadcast_from_rank_zero, verify_same_structure
from lightning_dp.reduction.wire import Wire

# ----------------------------------------------------------------------------------------------- structure

Description = tuple[str, tuple[int, ...], torch.dtype, bool]  # name, shape, dtype, requires_grad

A: Description = ("a.weight", (2, 3), torch.float32, True)
B: Description = ("b.weight", (4,), torch.float32, True)
C: Description = ("c.scale", (), torch.float64, False)
MODEL = [A, B, C]


def verify(rank: int, models: list[list[Description]], group_ranks: list[int] | None = None) -> str:
    """The message of the error that this rank gets; empty if it gets none."""
    group = dist.new_group(group_ranks) if group_ranks else None
    named = [
        # Values differ between ranks: only the structure matters.
        (name, torch.full(shape, float(rank), dtype=dtype).requires_grad_(trainable))
        for name, shape, dtype, trainable in models[rank]
    ]
    if group_ranks and rank not in group_ranks:
        return ""
    try:
        verify_same_structure(iter(named), Wire(group))
    except StructureMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("model", [MODEL, [A], []], ids=["three tensors", "one", "none"])
def test_equal_structures_pass(pool, world_size, model):
    assert pool.run(world_size, verify, [model] * world_size) == [""] * world_size


@pytest.mark.parametrize(
    ("other", "here", "there"),
    [
        pytest.param(
            [A, ("b.weight", (5,), *B[2:]), C], "b.weight: float32 (5,)", "b.weight: float32 (4,)", id="shape"
        ),
        pytest.param(
            [A, ("b.weight", (2, 2), *B[2:]), C], "b.weight: float32 (2, 2)", "b.weight: float32 (4,)", id="same size"
        ),
        pytest.param(
            [A, ("b.weight", (4,), torch.bfloat16, True), C],
            "b.weight: bfloat16 (4,)",
            "b.weight: float32 (4,)",
            id="dtype",
        ),
        pytest.param([A, ("b.bias", *B[1:]), C], "b.bias: float32 (4,)", "b.weight: float32 (4,)", id="name"),
        pytest.param(
            [A, (*B[:3], False), C], "b.weight: float32 (4,)", "b.weight: float32 (4,) trainable", id="frozen here"
        ),
        pytest.param([A, B, (*C[:3], True)], "c.scale: float64 () trainable", "c.scale: float64 ()", id="thawed here"),
        pytest.param([A, ("new", (1,), *B[2:]), B, C], "new: float32 (1,)", "b.weight: float32 (4,)", id="one more"),
        pytest.param([A, C], "c.scale: float64 ()", "b.weight: float32 (4,)", id="one less"),
        pytest.param([B, A, C], "b.weight: float32 (4,)", "a.weight: float32 (2, 3)", id="another order"),
        pytest.param([*MODEL, ("d", (), *B[2:])], "d: float32 ()", "nothing more", id="one more at the end"),
        pytest.param([A, B], "nothing more", "c.scale: float64 ()", id="one less at the end"),
        pytest.param([], "nothing more", "a.weight: float32 (2, 3)", id="none at all"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(pool, other, here, there):
    for odd in (1, 2):
        messages = pool.run(3, verify, [other if rank == odd else MODEL for rank in range(3)])
        assert len(set(messages)) == 1  # all ranks stop, and say the same
        assert f"rank {odd} has '{here}" in messages[0]
        assert f"where rank 0 has '{there}" in messages[0]
        assert "build the same modules" in messages[0]


def test_where_rank_0_is_the_odd_one_the_first_other_rank_is_named(pool):
    messages = pool.run(3, verify, [[A, C], MODEL, MODEL])
    assert len(set(messages)) == 1
    assert "rank 1 has 'b.weight: float32 (4,) trainable' where rank 0 has 'c.scale: float64 ()'" in messages[0]


def test_only_the_ranks_of_the_group_are_compared(pool):
    """Rank 0 of all builds something else, and does not take part; ranks 1 and 2 are ranks 0 and 1 of the group."""
    assert pool.run(3, verify, [[A], MODEL, MODEL], [1, 2]) == ["", "", ""]
    messages = pool.run(3, verify, [MODEL, MODEL, [A, C]], [1, 2])
    assert messages[0] == ""
    assert messages[1] == messages[2]
    assert "rank 1 has 'c.scale: float64 ()' where rank 0 has 'b.weight" in messages[1]


def verify_strides(rank: int) -> str:
    tensor = torch.zeros(3, 2).t() if rank == 1 else torch.zeros(2, 3)
    try:
        verify_same_structure([("w", tensor)], Wire())
    except StructureMismatchError as error:
        return str(error)
    return ""


def test_other_strides_are_a_difference(pool):
    """A gradient lies in its bucket as its parameter does in memory, so ranks must agree on that."""
    for message in pool.run(2, verify_strides):
        assert "rank 1 has 'w: float32 (2, 3) strides (1, 2)' where rank 0 has 'w: float32 (2, 3)'" in message


def fail_to_verify(rank: int) -> None:
    verify_same_structure([("a", torch.zeros(1 + rank))], Wire())


def test_the_error_reaches_the_caller(pool):
    with pytest.raises(RankFailureError) as caught:
        pool.run(2, fail_to_verify)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == dict.fromkeys(
        range(2), StructureMismatchError
    )


def test_a_lazy_parameter_is_named_until_its_module_has_seen_a_batch():
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ConfigurationError) as caught:
        verify_same_structure(module.named_parameters(), Wire())
    assert str(caught.value).startswith("the shape of '1.weight' is not known yet, as its module is a lazy one: run a")
    assert "\n" not in str(caught.value)
    module(torch.ones(1, 2))
    verify_same_structure(module.named_parameters(), Wire())


# ----------------------------------------------------------------------------------------------- values

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
FORMS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: torch.zeros(3, 5, dtype=dtype),
    "0-dim": lambda dtype: torch.zeros((), dtype=dtype),
    "empty": lambda dtype: torch.zeros(0, 3, dtype=dtype),
    "transposed": lambda dtype: torch.zeros(5, 3, dtype=dtype).t(),
    "channels_last": lambda dtype: torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last),
    "every other column": lambda dtype: torch.zeros(3, 8, dtype=dtype)[:, 1::2],
    "part of a larger one": lambda dtype: torch.zeros(9, dtype=dtype)[2:6],
}


def memory(tensor: Tensor) -> Tensor:
    """The whole storage under a tensor, gaps included, as bytes."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def random_bytes(tensor: Tensor, seed: int) -> Tensor:
    """For its whole storage; with NaN payloads, infinities and subnormal numbers among them, as every bit is random."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if tensor.dtype is torch.bool else 256  # a byte of a bool is 0 or 1
    return torch.randint(0, highest, memory(tensor).shape, dtype=torch.uint8, generator=generator)


def elements(tensor: Tensor) -> bytes:
    """The elements of a tensor, one after the other in the order of their indices, to the last bit."""
    width, whole = tensor.element_size(), bytes(memory(tensor).tolist())
    places = torch.arange(len(whole) // width).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return b"".join(whole[place * width : (place + 1) * width] for place in places.flatten().tolist())


def send(rank: int, dtypes: list[torch.dtype], ranks: list[int] | None = None) -> list[tuple[bytes, bytes, bool]]:
    """For each tensor its bits before and after, and whether the memory around it is as it was."""
    group = dist.new_group(ranks) if ranks else None
    tensors = [form(dtype) for dtype in dtypes for form in FORMS.values()]
    for number, tensor in enumerate(tensors):
        memory(tensor).copy_(random_bytes(tensor, seed=99 * rank + number))
    before, whole = [elements(t) for t in tensors], [memory(t).clone() for t in tensors]
    if ranks is None or rank in ranks:
        broadcast_from_rank_zero(iter(tensors), Wire(group))
    kept = [outside_is_kept(t, old) for t, old in zip(tensors, whole, strict=True)]
    return list(zip(before, map(elements, tensors), kept, strict=True))


def outside_is_kept(tensor: Tensor, before: Tensor) -> bool:
    whole = memory(tensor)
    inside = torch.zeros(whole.numel() // tensor.element_size(), dtype=torch.bool)
    inside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    outside = ~inside.repeat_interleave(tensor.element_size())
    return torch.equal(whole[outside], before[outside])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gets_the_bits_of_rank_0(pool, dtype):
    results = pool.run(3, send, [dtype])
    for rank, result in enumerate(results):
        for form, (before, after, kept), (first, _, _) in zip(FORMS, result, results[0], strict=True):
            assert after == first, f"rank {rank}, {form}"
            assert kept, f"rank {rank}, {form}: memory around the tensor changed"
            if rank and len(before) > 2:
                assert before != first  # there was something to send


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_world_sizes(pool, world_size):
    results = pool.run(world_size, send, [torch.float32])
    for result in results:
        assert [after for _, after, _ in result] == [before for before, _, _ in results[0]]


def test_in_a_group_its_own_first_rank_is_the_source(pool):
    outsider, source, receiver = pool.run(3, send, [torch.float32, torch.bool], [1, 2])
    assert [after for _, after, _ in receiver] == [before for before, _, _ in source]
    assert [after for _, after, _ in source] == [before for before, _, _ in source]
    assert [after for _, after, _ in outsider] == [before for before, _, _ in outsider]


def send_parameters(rank: int) -> tuple[list[float], bool, bool, int]:
    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank + 5)))
    where = parameter.data_ptr()
    (parameter * 3).sum().backward()
    broadcast_from_rank_zero([parameter], Wire())
    kept = parameter.data_ptr() == where
    return parameter.flatten().tolist(), parameter.requires_grad, kept, int(parameter.grad.sum())


def test_a_parameter_stays_the_same_parameter(pool):
    """Overwritten in place, under autograd, so that optimizers and views that hold it stay right."""
    assert pool.run(3, send_parameters) == [([5.0] * 4, True, True, 12)] * 3


def test_the_bits_of_this_test_hold_nan_payloads():
    """Negative control: comparing numbers instead of bits would call a NaN different from itself."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    numbers = bits.view(torch.float32)
    assert torch.isnan(numbers).all() and not torch.equal(numbers, numbers)
    assert elements(numbers) == b"".join(int(b).to_bytes(4, "little", signed=True) for b in bits)


# ----------------------------------------------------------------------------------------------- settings


def reducer_with(rank: int, configs: list[ReducerConfig], deterministic: int | None = None) -> str:
    torch.use_deterministic_algorithms(rank == deterministic)
    try:
        GradientReducer(nn.Linear(2, 2).named_parameters(), config=configs[rank])
    except ConfigurationError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return ""


@pytest.mark.parametrize("value", [{"bucket_cap_mb": 3.0}, {"overlap": False}, {"reduce_dtype": "bf16"}], ids=str)
def test_other_settings_on_a_rank_are_refused_on_all(pool, value):
    name, there = next(iter(value.items()))
    said = pool.run(3, reducer_with, [ReducerConfig(), ReducerConfig(), ReducerConfig(**value)])
    here = getattr(ReducerConfig(), name)
    differ = f"settings differ between ranks: rank 2 has {name}={there!r} where rank 0 has {here!r}"
    assert said == [f"{differ}; give all ranks the same"] * 3


def test_deterministic_algorithms_on_one_rank_only_are_refused(pool):
    for said in pool.run(2, reducer_with, [ReducerConfig()] * 2, 1):
        assert "rank 1 has torch.are_deterministic_algorithms_enabled()=True where rank 0 has False" in said


def test_equal_settings_pass(pool):
    hook = default_hooks.allreduce_hook
    for config in (ReducerConfig(), ReducerConfig(bucket_cap_mb=3), ReducerConfig(comm_hook=hook, comm_state=object())):
        assert pool.run(2, reducer_with, [config] * 2) == ["", ""]
