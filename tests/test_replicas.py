"""The replica check: one flipped bit anywhere is found and its rank named; equal replicas raise no alarm."""

import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankFailureError
from torch import Tensor, nn

from lightning_dp.errors import ConfigurationError, ReplicaMismatchError
from lightning_dp.health.fingerprint import fingerprints
from lightning_dp.health.replicas import Difference, ReplicaCheck, ReplicaReport, named_state
from lightning_dp.reduction.wire import Wire

# ----------------------------------------------------------------------------------------------- what is compared


class Model(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.wave = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.long = nn.Parameter(torch.randn(40_000))
        self.register_buffer("mask", torch.rand(11) < 0.5)
        self.register_buffer("table", torch.randint(0, 100, (9,), dtype=torch.int16))
        self.register_buffer("eight", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("nan", torch.full((3,), float("nan")))
        self.register_buffer("one", torch.randn(1, 3).expand(4, 3))


def trained(seed: int = 0) -> tuple[Model, list[torch.optim.Optimizer]]:
    """The same on each rank: a model, and optimizers that have taken two steps."""
    torch.manual_seed(seed)
    model = Model()
    parameters = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters[:4], lr=1e-3),
        torch.optim.SGD(parameters[4:], lr=0.1, momentum=0.9),
    ]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def leaves(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The tensors by name, put together without the code under test."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"parameter {name}": p.data for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            found |= {
                f"optimizer {number}: {key} of {names[id(parameter)]}": value
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
    return found


def flip(tensor: Tensor, bit: int) -> None:
    """Flips a bit of a tensor: in its storage, so that no operation on numbers is involved."""
    storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    width = tensor.element_size()
    places = torch.arange(storage.numel() // width).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    byte = int(places.flatten()[bit // (8 * width)]) * width + bit // 8 % width
    storage[byte] ^= 1 << (bit % 8)


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {
        name: bytes(torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()).tolist())
        for name, t in tensors.items()
    }


def quietly(check: ReplicaCheck, where: str = "") -> tuple[ReplicaReport, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return check.check(where), [str(warning.message) for warning in caught]


# ----------------------------------------------------------------------------------------------- many flips


def flip_many(rank: int, world_size: int, trials: int) -> list[tuple[str, int, Any]]:
    """Per trial: the tensor and rank where a bit was flipped, and what the check found. Every bit is put back."""
    model, optimizers = trained()
    tensors = leaves(model, optimizers)
    check = ReplicaCheck(Wire(), lambda: named_state(model, optimizers))
    found = []
    rng = random.Random(100 + world_size)
    for _ in range(trials):
        name = rng.choice([name for name, tensor in tensors.items() if tensor.numel()])
        odd, tensor = rng.randrange(world_size), tensors[name]
        # A byte of a bool is 0 or 1.
        bit = rng.randrange(tensor.numel()) * 8 if tensor.dtype is torch.bool else rng.randrange(tensor.nbytes * 8)
        if rank == odd:
            flip(tensor, bit)
        report, _ = quietly(check)
        found.append((name, odd, ([d.name for d in report.differences], report.odd_ranks)))
        if rank == odd:
            flip(tensor, bit)
    assert check.check().agree
    return found


@pytest.mark.timeout(400)  # many checks, on as many processors as there are
def test_300_flipped_bits_are_found_and_their_ranks_named(pool, capsys):
    kinds: dict[str, int] = {}
    ranks: dict[int, list[int]] = {}
    for world_size in (2, 3, 4):
        results = pool.run(world_size, flip_many, world_size, 100, timeout=120)
        assert all(result == results[0] for result in results)
        for name, odd, found in results[0]:
            assert found == ([name], (odd,) if world_size > 2 else ())
            kinds[name.split()[0]] = kinds.get(name.split()[0], 0) + 1
            ranks.setdefault(world_size, [0] * world_size)[odd] += 1
    assert sum(kinds.values()) == 300 and set(kinds) == {"parameter", "buffer", "optimizer"}
    with capsys.disabled():
        print(f"\n300 flipped bits ({kinds}), by world size and rank {ranks}: 300 found, all right; with 3 or 4 ranks")
        print(f"the right rank was named in {sum(map(sum, ranks.values())) - sum(ranks[2])} of 200")


def check_many(rank: int, times: int, step: bool) -> tuple[int, float]:
    model, optimizers = trained()
    check = ReplicaCheck(Wire(), lambda: named_state(model, optimizers), action="raise")
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    agreed = 0
    for _ in range(times):
        if step:
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            for optimizer in optimizers:
                optimizer.step()
        agreed += check.check().agree
    return agreed, (time.perf_counter() - start) / times


@pytest.mark.timeout(400)
def test_2000_clean_checks_raise_no_alarm(pool, capsys):
    still = pool.run(3, check_many, 1700, False, timeout=240)
    trained_on = pool.run(2, check_many, 300, True, timeout=100)
    assert [agreed for agreed, _ in still] == [1700] * 3
    assert [agreed for agreed, _ in trained_on] == [300] * 2
    with capsys.disabled():
        print(f"\n2,000 clean checks: 0 alarms; {max(seconds for _, seconds in still) * 1e3:.1f} ms each on 3 ranks")


# ----------------------------------------------------------------------------------------------- what is a difference

Change = Callable[[Model, list[torch.optim.Optimizer]], None]


def nan_payload(model: Model, _: Any) -> None:
    model.nan.view(torch.int32)[1] += 1
    assert torch.isnan(model.nan).all()


def minus_zero(model: Model, _: Any) -> None:
    model.norm.bias.data.mul_(-1)


def a_key_more(_: Any, optimizers: Any) -> None:
    optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]["max_exp_avg_sq"] = torch.zeros(2)


def a_key_less(_: Any, optimizers: Any) -> None:
    del optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]["exp_avg_sq"]


def no_state(_: Any, optimizers: Any) -> None:
    optimizers[1].state.clear()


def another_shape(model: Model, _: Any) -> None:
    model.table = torch.zeros(4, dtype=torch.int16)


def another_dtype(model: Model, _: Any) -> None:
    model.mask = model.mask.to(torch.uint8)


def another_step(_: Any, optimizers: Any) -> None:
    next(iter(optimizers[0].state.values()))["step"] += 1


def another_learning_rate(_: Any, optimizers: Any) -> None:
    optimizers[0].param_groups[0]["lr"] *= 1 + 1e-15


def another_beta(_: Any, optimizers: Any) -> None:
    optimizers[0].param_groups[0]["betas"] = (0.9, 0.99)


def a_buffer_more(model: Model, _: Any) -> None:
    model.register_buffer("extra", torch.zeros(2))


def replaced(model: Model, _: Any) -> None:
    model.table = model.table + 1


CHANGES: dict[Change, tuple[str, bool]] = {  # first difference, and whether it can be copied
    nan_payload: ("buffer nan", True),
    minus_zero: ("parameter norm.bias", True),
    a_key_more: ("optimizer 0: max_exp_avg_sq of low", False),
    a_key_less: ("optimizer 0: exp_avg_sq of low", False),
    no_state: ("optimizer 1: momentum_buffer of empty", False),
    another_shape: ("buffer table", False),
    another_dtype: ("buffer mask", False),
    another_step: ("optimizer 0: step of low", True),
    another_learning_rate: ("optimizer 0: lr of group 0", False),
    another_beta: ("optimizer 0: betas of group 0[1]", False),
    a_buffer_more: ("buffer extra", False),
    replaced: ("buffer table", True),
}


def compare(rank: int, number: int, odd: list[int], action: str) -> tuple[Any, ...]:
    """Bits before and after, and what the check says, when the given ranks make a change of their own."""
    model, optimizers = trained()
    model.norm.bias.data.zero_()
    check = ReplicaCheck(Wire(), lambda: named_state(model, optimizers), action)
    assert check.check().agree
    before = bits(leaves(model, optimizers))
    if rank in odd:
        list(CHANGES)[number](model, optimizers)
    changed = bits(leaves(model, optimizers))
    try:
        report, said = quietly(check, "step 7")
    except ReplicaMismatchError as error:
        return before, changed, bits(leaves(model, optimizers)), None, str(error)
    return before, changed, bits(leaves(model, optimizers)), report, *said


def number_of(change: Change) -> int:
    return list(CHANGES).index(change)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("odd", [0, 2])
def test_each_difference_is_found(pool, change, odd):
    name, copyable = CHANGES[change]
    results = pool.run(3, compare, number_of(change), [odd], "warn")
    reports = [result[3] for result in results]
    assert reports[0] == reports[1] == reports[2] or change in (a_buffer_more, a_key_more, a_key_less, no_state)
    for report in reports:
        assert not report.agree and report.odd_ranks == (odd,) and not report.resynced
        assert report.differences[0].name == name
        assert report.differences[0].copyable is copyable
    # Rank 0 says it, once.
    assert [len(result) for result in results] == [5, 4, 4]
    assert re.match(rf"step 7: rank {odd} of 3 differs from the rest in {re.escape(name)}", results[0][4])


@pytest.mark.parametrize("change", [nan_payload, a_key_more, a_key_less], ids=lambda change: change.__name__)
def test_two_ranks_have_no_majority(pool, change):
    for result in pool.run(2, compare, number_of(change), [1], "warn")[:1]:
        assert result[3].odd_ranks == ()
        assert result[3].undecided == result[3].differences
        assert result[4].startswith("step 7: the 2 ranks' replicas differ (no majority tells which is right) in ")


def test_the_ranks_that_lack_something_are_named(pool):
    one_less = pool.run(3, compare, number_of(a_key_less), [2], "warn")[0][4]
    assert "rank 2 of 3 differs from the rest in optimizer 0: exp_avg_sq of low (missing on rank 2)" in one_less
    one_more = pool.run(3, compare, number_of(a_key_more), [0], "warn")[0][4]
    assert "rank 0 of 3 differs from the rest in" in one_more and "(missing on ranks 1, 2)" in one_more


# ----------------------------------------------------------------------------------------------- what follows


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_resync_restores_every_bit(pool, odd):
    for change in (nan_payload, minus_zero, another_step, replaced):
        results = pool.run(3, compare, number_of(change), [odd], "resync")
        good = results[(odd + 1) % 3][0]
        assert results[odd][1] != good  # there was something to restore
        for before, _, after, report, *_ in results:
            assert after == before == good
            assert report.resynced and report.odd_ranks == (odd,)
        assert "the majority's values were copied" in results[0][4]


def test_raise_reaches_every_rank(pool):
    results = pool.run(3, compare, number_of(nan_payload), [1], "raise")
    assert len({result[4] for result in results}) == 1
    assert results[0][4].startswith("step 7: rank 1 of 3 differs from the rest in buffer nan; ")
    for _, changed, after, *_ in results:
        assert after == changed


@pytest.mark.parametrize(
    ("change", "world_size", "odd", "why"),
    [
        (nan_payload, 2, [1], "without a majority it is not known which rank to copy from"),
        (nan_payload, 4, [0, 3], "without a majority it is not known which rank to copy from"),
        (another_learning_rate, 3, [1], "optimizer 0: lr of group 0 cannot be copied"),
        (another_shape, 3, [1], "buffer table cannot be copied"),
        (another_dtype, 3, [0], "buffer mask cannot be copied"),
        (no_state, 3, [2], "optimizer 1: momentum_buffer of empty cannot be copied"),
    ],
)
def test_resync_that_is_not_possible_raises_on_every_rank(pool, change, world_size, odd, why):
    results = pool.run(world_size, compare, number_of(change), odd, "resync")
    assert len({result[4] for result in results}) == 1
    assert why in results[0][4]
    for _, changed, after, *_ in results:
        assert after == changed  # nothing was copied before the error


def differ_in_two(rank: int) -> tuple[ReplicaReport, list[str], bool]:
    """Two ranks have faults of their own: no two ranks agree on everything, but each tensor has a majority."""
    tensors = {name: torch.arange(5.0) for name in "abcdefgh"}
    check = ReplicaCheck(Wire(), tensors.items, "resync")
    if rank == 0:
        flip(tensors["b"], 3)
    if rank == 1:
        for name in "cdefgh":
            flip(tensors[name], 5)
    report, said = quietly(check)
    return report, said, all(torch.equal(tensor, torch.arange(5.0)) for tensor in tensors.values())


def test_faults_of_several_ranks_are_told_apart(pool):
    results = pool.run(3, differ_in_two)
    for report, _, restored in results:
        assert {d.name: d.odd_ranks for d in report.differences} == {"b": (0,), **dict.fromkeys("cdefgh", (1,))}
        assert restored
    (said,) = results[0][1]
    assert said.startswith("ranks 0, 1 of 3 differ from the rest in b, c, d, e, f and 2 more; ")


def in_another_order(rank: int) -> list[ReplicaReport]:
    state = {"a": torch.ones(3), "b": 2, "c": torch.zeros(4), "d": 5}
    if rank == 1:
        state = dict(reversed(state.items()))
    same = ReplicaCheck(Wire(), state.items, "raise").check()
    if rank == 2:
        state["c"][1] = -0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [same, ReplicaCheck(Wire(), state.items).check()]


def test_another_order_is_no_difference(pool):
    for same, odd in pool.run(3, in_another_order):
        assert same == ReplicaReport(3, 4)
        assert [(d.name, d.odd_ranks) for d in odd.differences] == [("c", (2,))]


# ----------------------------------------------------------------------------------------------- what it sends


def count_messages(rank: int) -> list[tuple[int, int]]:
    model, optimizers = trained()
    wire = Wire()
    check = ReplicaCheck(wire, lambda: named_state(model, optimizers))
    sent = []
    for _ in range(3):
        check.check()
        sent.append((wire.messages, wire.nbytes))
        wire.reset_counters()
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_clean_check_sends_one_number_per_rank(pool, world_size):
    assert pool.run(world_size, count_messages) == [[(1, 8 * world_size)] * 3] * world_size


def never_arrives(rank: int) -> None:
    if rank == 0:
        ReplicaCheck(Wire(), {"a": torch.zeros(2)}.items).check()
    else:
        time.sleep(6)


def test_a_rank_that_does_not_take_part_is_no_hang(pool):
    with pytest.raises(RankFailureError, match="exchange of the replicas' fingerprints did not complete"):
        pool.run(2, never_arrives, group_timeout=2)


# ----------------------------------------------------------------------------------------------- one process


def check_of(state: dict[str, Any]) -> int:
    """The fingerprints' total of a rank, through one process's check."""
    from lightning_dp.health.replicas import _Snapshot

    return int(_Snapshot(state.items(), None).total())


def test_one_rank_agrees_with_itself():
    model, optimizers = trained()
    report = ReplicaCheck(Wire(), lambda: named_state(model, optimizers), "raise").check()
    assert report.agree and report.odd_ranks == ()
    assert report.describe() == "all 1 ranks hold the same"
    numbers = 2 + 2 * len(optimizers)  # more than the tensors: settings of optimizers
    assert report.compared > len(leaves(model, optimizers)) + numbers


def test_all_that_replicas_have_in_common_is_named():
    model, optimizers = trained()
    named = dict(named_state(model, optimizers))
    expected = leaves(model, optimizers)
    assert expected.keys() <= named.keys()
    assert all(named[name].data_ptr() == expected[name].data_ptr() for name in expected)
    settings = {name for name in named if not isinstance(named[name], Tensor)}
    assert {"optimizer 0: lr of group 0", "optimizer 1: momentum of group 0"} <= settings


def test_buffers_can_be_left_out():
    model, _ = trained()
    named = dict(named_state(model, compares_buffer=lambda name: "running" not in name))
    assert "buffer norm.num_batches_tracked" in named and "buffer mask" in named
    assert not [name for name in named if "running" in name]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": 1}, {"a": 2}, id="integers"),
        pytest.param({"a": 1}, {"a": 1.0}, id="types"),
        pytest.param({"a": 0.0}, {"a": -0.0}, id="signs of zero"),
        pytest.param({"a": 0.1}, {"a": 0.1 + 2**-56}, id="the last bit"),
        pytest.param({"a": None}, {"a": False}, id="nothing"),
        pytest.param({"a": 1}, {"b": 1}, id="names"),
        pytest.param({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, id="names of tensors"),
        pytest.param({"a": [torch.zeros(2), 3]}, {"a": [torch.zeros(2), 4]}, id="in a list"),
        pytest.param({"a": {"x": {"y": (1, 2)}}}, {"a": {"x": {"y": (1, 3)}}}, id="deep inside"),
        pytest.param({"a": [1]}, {"a": [1, 1]}, id="lengths"),
        pytest.param({"a": torch.eye(3).to_sparse()}, {"a": 2 * torch.eye(3).to_sparse()}, id="sparse values"),
        pytest.param(
            {"a": torch.eye(3).to_sparse_csr()}, {"a": torch.eye(3).flip(0).to_sparse_csr()}, id="sparse places"
        ),
    ],
)
def test_values_are_told_apart(one, other):
    assert check_of(one) == check_of(dict(one))
    assert check_of(one) != check_of(other)


def test_objects_are_passed_over():
    """Another one may well stand on each rank."""
    assert check_of({"a": 1, "hook": object(), "device": torch.device("cuda", 0)}) == check_of({"a": 1})


def test_a_name_must_be_unique():
    with pytest.raises(ConfigurationError, match="two of the values to compare have the name 'a'"):
        ReplicaCheck(Wire(), lambda: [("a", 1), ("a", torch.zeros(1))]).check()


def test_an_unknown_action_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="action='stop' is not known: use one of warn, raise, resync"):
        ReplicaCheck(Wire(), dict.items, "stop")


def test_a_difference_knows_where_the_majority_begins():
    assert Difference("a", (7, 5, 5), True).source == 1
    assert Difference("a", (5, 5, 7), True).source == 0


def test_a_comparison_of_numbers_would_miss_it():
    """Negative control: equal numbers are not equal bits, and NaN equals nothing."""
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert torch.equal(zero, -zero) and not torch.equal(nan, nan)
    assert len(set(fingerprints([zero, -zero]).tolist())) == 2
    assert len(set(fingerprints([nan, nan.clone()]).tolist())) == 1
