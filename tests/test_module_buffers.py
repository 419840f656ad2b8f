"""A module's buffers: which change, what is put back, and that every rank gets rank 0's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from torch import Tensor, nn

from lightning_dp.health.buffers import ModuleBuffers
from lightning_dp.reduction.wire import Wire

NAN = float("nan")


class Layer(nn.Module):
    """Two buffers of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))


class Model(nn.Module):
    """Buffers of its own, a layer with two, one with a BatchNorm, and one that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.arange(4.0))
        self.register_buffer("other", torch.arange(4.0))
        self.layer = Layer()
        self.norm = nn.BatchNorm1d(3)
        self.constants = Layer()


NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
LATE = ModuleBuffers.WINDOWS_COMPARED + 3  # windows after which values are not compared by themselves
X = torch.arange(12.0).view(4, 3)


def windows(buffers: ModuleBuffers, number: int) -> None:
    """So many accumulation windows in which nothing happens."""
    for _ in range(number):
        buffers.begin()
        buffers.changed()


def known_to_change(buffers: ModuleBuffers) -> set[str]:
    """What :meth:`ModuleBuffers.changed` says, by name."""
    changed = dict(zip(buffers.names, buffers.changed(), strict=True))
    assert {name for name, does in changed.items() if does} == buffers.changing
    return set(buffers.changing)


# ------------------------------------------------------------------------------------------- which change


def nothing(model: Model) -> None:
    pass


def in_place(model: Model) -> None:
    model.state.add_(1)


def to_equal_values(model: Model) -> None:
    model.state.copy_(model.state.clone())


def replaced(model: Model) -> None:
    model.state = model.state + 1


def in_a_layer(model: Model) -> None:
    model.layer.mean[1] = 5.0


def trains(model: Model) -> None:
    model.norm.train()(X)


def evaluates(model: Model) -> None:
    model.norm.eval()(X)


def through_data(model: Model) -> None:
    model.state.data[2] = 7.0


def by_the_function(model: Model) -> None:
    F.batch_norm(X, model.layer.mean, model.layer.scale, training=True)


def every_way(model: Model) -> None:
    for write in (in_place, replaced, in_a_layer, trains, through_data, by_the_function):
        write(model)


Write = Callable[[Model], None]
LAYER = {"layer.mean", "layer.scale"}
# The write, what is found in the first windows, and what later, when only what autograd counts is looked at.
WRITES: list[tuple[Write, set[str], set[str]]] = [
    (nothing, set(), set()),
    (evaluates, set(), set()),
    (in_place, {"state"}, {"state"}),
    (to_equal_values, {"state"}, {"state"}),
    (replaced, {"state"}, {"state"}),
    (in_a_layer, LAYER, LAYER),  # both: what writes to one buffer of a layer may well write to the others
    (trains, NORM, NORM),
    (through_data, {"state"}, set()),
    (by_the_function, LAYER, set()),
    (every_way, {"state"} | LAYER | NORM, {"state"} | LAYER | NORM),
]


@pytest.mark.parametrize(("write", "at_first", "later"), WRITES)
def test_a_buffer_that_is_written_to_is_found(write: Write, at_first: set[str], later: set[str]) -> None:
    for before, found in ((0, at_first), (LATE, later)):
        model = Model()
        buffers = ModuleBuffers(model)
        windows(buffers, before)
        assert known_to_change(buffers) == set()
        buffers.begin()
        write(model)
        assert known_to_change(buffers) == found


def test_batch_norm_writes_its_statistics_uncounted() -> None:
    """The fact that makes the rule of the same layer necessary; and what the layer counts itself is counted."""
    norm = nn.BatchNorm1d(3)
    buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    before = [buffer._version for buffer in buffers]
    norm(X)
    assert [buffer._version - version for buffer, version in zip(buffers, before, strict=True)] == [0, 0, 1]


@pytest.mark.parametrize(("write", "at_first", "later"), WRITES)
def test_values_are_compared_whenever_that_is_asked_for(write: Write, at_first: set[str], later: set[str]) -> None:
    model = Model()
    buffers = ModuleBuffers(model)
    windows(buffers, LATE)
    write(model)
    by_value = set() if write is to_equal_values else at_first - ({"layer.scale"} if write is in_a_layer else set())
    assert buffers.compare() == by_value
    known = known_to_change(buffers)
    assert known == later, "comparing is not taking for a change"
    assert buffers.compare() == by_value - known, "what is known to change needs no comparison"


def test_a_buffer_that_has_changed_once_changes_always() -> None:
    model = Model()
    buffers = ModuleBuffers(model)
    buffers.begin()
    in_place(model)
    assert known_to_change(buffers) == {"state"}
    windows(buffers, LATE)
    assert known_to_change(buffers) == {"state"}


def test_names_are_those_at_first_and_not_the_ignored_ones() -> None:
    model = Model()
    buffers = ModuleBuffers(model, ["other", "layer.mean"])
    model.register_buffer("late", torch.zeros(2))
    model.other.add_(1)
    norm = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert buffers.names == ["state", "layer.scale", *norm, "constants.mean", "constants.scale"]
    assert known_to_change(buffers) == set()
    buffers.begin()
    assert buffers.copies().keys() == {*buffers.names} - {"norm.num_batches_tracked"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (nothing, set()),
        (replaced, set()),
        (lambda model: setattr(model, "state", torch.zeros(5)), {"state"}),
        (lambda model: setattr(model, "state", torch.zeros(4, 1)), {"state"}),
        (lambda model: model.state.resize_(2), {"state"}),
        (lambda model: setattr(model, "state", model.state.double()), {"state"}),
        (lambda model: setattr(model, "state", None), {"state"}),
        (lambda model: setattr(model, "norm", nn.Identity()), NORM),
        (lambda model: setattr(model, "norm", nn.BatchNorm1d(3)), set()),
        (lambda model: setattr(model, "norm", nn.BatchNorm1d(2)), {"norm.running_mean", "norm.running_var"}),
    ],
)
def test_a_buffer_of_another_shape_or_dtype_or_none_at_all_is_found(change: Write, found: set[str]) -> None:
    model = Model()
    buffers = ModuleBuffers(model)
    buffers.begin()
    change(model)
    assert {name for name, is_so in zip(buffers.names, buffers.resized(), strict=True) if is_so} == found
    buffers.put_back()  # what is gone is passed over
    buffers.begin()


# ------------------------------------------------------------------------------------------- what is put back

FLOATS = {
    "float64": torch.tensor([1.0, -0.0, 1e-310, float("inf")], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float16": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "complex64": torch.tensor([1 + 2j, 3 - 1j]),
    "0-dim": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "every second": torch.arange(6.0)[::2],
    "channels_last": torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last),
}
OTHERS = {
    "int64": torch.tensor([1, -(2**60)]),
    "uint8": torch.tensor([1, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "0-dim int64": torch.tensor(3),
    "0-dim bool": torch.tensor(True),
}


class Holder(nn.Module):
    """One buffer."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def spoiled(value: Tensor) -> Tensor:
    return torch.full_like(value, NAN)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("how", ["in place", "through data", "replaced", "resized"])
def test_every_bit_of_a_floating_point_buffer_is_put_back(kind: str, how: str) -> None:
    value = FLOATS[kind]
    model = Holder(value.clone())
    buffers = ModuleBuffers(model)
    buffers.begin()
    tensor = model.value
    if how == "in place":
        model.value.fill_(NAN)
    elif how == "through data":
        model.value.data.fill_(NAN)
    elif how == "replaced":
        tensor = model.value = spoiled(value)
    else:
        model.value = torch.full((5, 5), NAN).to(value.dtype)
    assert not value.numel() or bits(model.value) != bits(value), "negative control"
    assert buffers.put_back() == []
    assert bits(model.value) == bits(value)
    assert (model.value.dtype, model.value.shape) == (value.dtype, value.shape)
    if how != "resized":
        assert model.value is tensor, "others may hold on to it"


@pytest.mark.parametrize("kind", OTHERS)
def test_integers_stay_as_they_are(kind: str) -> None:
    model = Holder(OTHERS[kind].clone())
    buffers = ModuleBuffers(model)
    buffers.begin()
    model.value.copy_(torch.zeros_like(model.value))
    assert buffers.put_back() == []
    assert not model.value.any()


def test_each_window_has_its_own_beginning() -> None:
    model = Model()
    buffers = ModuleBuffers(model)
    assert not buffers.has_begun
    for start in (10.0, 20.0, 30.0):
        model.state.fill_(start)
        buffers.begin()
        assert buffers.has_begun
        for _ in range(2):
            model.state.add_(1)
            buffers.put_back()
            assert model.state.tolist() == [start] * 4


def test_a_graph_that_is_still_alive_is_not_disturbed() -> None:
    model = Model()
    buffers = ModuleBuffers(model)
    weight = torch.ones(4, requires_grad=True)
    buffers.begin()
    loss = (weight * model.state).sum()  # keeps the buffer for backward
    assert buffers.put_back() == []
    loss.backward()
    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 3.0]
    loss = (weight * model.state).sum()
    model.state.copy_(buffers.copies()["state"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # negative control: a write that is counted


def test_one_that_was_replaced_under_inference_mode_is_put_back() -> None:
    model = Holder(torch.zeros(2))
    buffers = ModuleBuffers(model)
    with torch.inference_mode():
        model.value = torch.full((2,), 3.0)
    buffers.begin()
    assert known_to_change(buffers) == {"value"}
    with torch.inference_mode():
        model.value = torch.full((2,), NAN)
    assert buffers.put_back() == []
    assert model.value.tolist() == [3.0, 3.0]


def test_one_whose_elements_share_memory_is_left_alone() -> None:
    """It cannot be written to in place, by nobody; put back is what replaced it."""
    model = Holder(torch.ones(1, 3).expand(4, 3))
    buffers = ModuleBuffers(model)
    buffers.begin()
    assert buffers.put_back() == []
    assert model.value.tolist() == [[1.0] * 3] * 4
    model.value = torch.full((1, 3), NAN).expand(4, 3)
    assert buffers.put_back() == []
    assert model.value.tolist() == [[1.0] * 3] * 4


# ------------------------------------------------------------------------------------------- large ones


def test_a_large_buffer_is_copied_once_it_is_known_to_change() -> None:
    numel = ModuleBuffers.ALWAYS_COPIED_NBYTES // 4
    model = nn.ModuleDict({"table": Holder(torch.zeros(numel + 1)), "edge": Holder(torch.zeros(numel))})
    buffers = ModuleBuffers(model)
    buffers.begin()
    assert buffers.copies().keys() == {"edge.value"}, "not larger than the limit"
    model["table"].value[0] = NAN
    assert buffers.put_back() == ["table.value"], "of which there was no copy"
    assert model["table"].value[0].isnan()
    model["table"].value.zero_()
    for _ in range(2):
        buffers.begin()
        assert buffers.copies().keys() == {"edge.value", "table.value"}
        model["table"].value[0] = NAN
        assert buffers.put_back() == []
        assert not model["table"].value.any()


def test_of_large_integers_nothing_is_reported() -> None:
    model = Holder(torch.zeros(ModuleBuffers.ALWAYS_COPIED_NBYTES, dtype=torch.int64))
    buffers = ModuleBuffers(model)
    buffers.begin()
    model.value.add_(1)
    assert buffers.put_back() == []


# ------------------------------------------------------------------------------------------- resumed within a window


def test_a_window_goes_on_from_what_it_began_with() -> None:
    model = Model()
    first = ModuleBuffers(model)
    first.begin()
    copies = first.copies()
    every_way(model)
    later = ModuleBuffers(model)  # as the checkpoint found the module
    later.begin_from({**copies, "gone": torch.zeros(1), "layer.mean": torch.zeros(7)})
    assert later.has_begun
    assert later.put_back() == []
    assert model.state.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.norm.running_mean.tolist() == [0.0] * 3
    assert model.norm.running_var.tolist() == [1.0] * 3
    assert model.layer.mean.tolist() != [0.0] * 3, "a copy of another shape is of no use"


def test_it_does_so_for_large_buffers_too() -> None:
    model = Holder(torch.zeros(ModuleBuffers.ALWAYS_COPIED_NBYTES // 4 + 1))
    first = ModuleBuffers(model)
    for _ in range(2):
        first.begin()
        model.value.add_(1)
        first.changed()
    copies = {name: copy.clone() for name, copy in first.copies().items()}
    assert copies.keys() == {"value"}
    later = ModuleBuffers(model)
    later.begin_from(copies)
    model.value.fill_(NAN)
    assert later.put_back() == []
    assert model.value.unique().tolist() == [1.0]
    later.begin()
    assert copies["value"].unique().tolist() == [1.0], "what was taken over is nobody else's"


# ------------------------------------------------------------------------------------------- sent

ODD_BITS = {
    "NaN with a payload": torch.tensor([0x7FF0_0000_0000_BEEF, -1]).view(torch.float64),
    "minus zero": torch.tensor([-0.0, 0.0]),
}
SENT = {**FLOATS, **OTHERS, **ODD_BITS}


def of_rank(rank: int) -> nn.ModuleDict:
    """On rank 0 the values above, on the others the same with every bit flipped, as far as there is such a value."""
    modules = {}
    for name, value in SENT.items():
        mine = value.clone()
        if rank:
            mine = ~value if value.dtype == torch.bool else torch.full_like(value, 77 + rank)
        modules[f"a {name}"] = Holder(mine)  # a ModuleDict has methods called as dtypes are
    return nn.ModuleDict(modules)


def broadcast(rank: int, chosen: list[str] | None) -> dict[str, tuple[bytes, bytes, bool]]:
    """Bits before and after by name, and whether the tensor is the same one with the same strides."""
    module = of_rank(rank)
    before = {name: (buffer, bits(buffer), buffer.stride()) for name, buffer in module.named_buffers()}
    wire = Wire()
    ModuleBuffers(module).broadcast(wire, chosen)
    return {
        name: (before[name][1], bits(buffer), buffer is before[name][0] and buffer.stride() == before[name][2])
        for name, buffer in module.named_buffers()
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_get_rank_zeros_bits(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, broadcast, None)
    right = {f"a {name}.value": bits(value) for name, value in SENT.items()}
    for rank, result in enumerate(results):
        for name, (before, after, same_tensor) in result.items():
            assert after == right[name], name
            assert same_tensor, name
            assert (before == after) == (rank == 0 or name == "a empty.value"), f"negative control: {name}"


def test_only_those_asked_for_are_sent(pool: RankPool) -> None:
    chosen = ["a bool.value", "a transposed.value"]
    for rank, result in enumerate(pool.run(2, broadcast, chosen)):
        for name, (before, after, _) in result.items():
            assert (before != after) == (rank == 1 and name in chosen), name


def send_what_is_not_alike(rank: int) -> tuple[list[Any], int]:
    """Between the step's end and the message one is resized on rank 1, one is gone there, and one on rank 0."""
    names = ["first", "resized", "gone on 1", "gone on 0", "resized on 0", "last"]
    module = nn.ModuleDict({name: Holder(torch.full((3,), float(rank))) for name in names})
    buffers = ModuleBuffers(module)
    if rank == 1:
        module["resized"].value, module["gone on 1"].value = torch.full((2,), 1.0), None
    else:
        module["resized on 0"].value, module["gone on 0"].value = torch.full((5,), 0.0), None
    wire = Wire()
    with mock.patch.object(wire, "broadcast", wraps=wire.broadcast) as message:
        buffers.broadcast(wire)
    values = [holder.value for holder in module.values()]
    return [None if value is None else value.tolist() for value in values], message.call_count


def test_one_that_is_not_alike_on_all_ranks_does_not_disturb_the_others(pool: RankPool) -> None:
    first, second = pool.run(2, send_what_is_not_alike)
    zero, one = [0.0] * 3, [1.0] * 3
    assert first == ([zero, zero, zero, None, [0.0] * 5, zero], 1)
    assert second == ([zero, [1.0] * 2, None, one, one, zero], 1)
