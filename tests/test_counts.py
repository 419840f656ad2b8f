"""Counts: what a micro-batch weighs."""

import math
import warnings
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp.data.counts import as_count, equal, resolve_count, samples, tokens
from lightning_dp.errors import ConfigurationError, CountError, CountWarning

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Labelled:
    x: Any
    name: str = "train"
    extra: dict = field(default_factory=dict)


def rows(n: int, *rest: int) -> torch.Tensor:
    return torch.zeros(n, *rest)


# ----------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param(rows(4, 3), 4, id="tensor"),
        pytest.param(rows(0, 3), 0, id="empty tensor"),
        pytest.param(torch.tensor(7.0), 1, id="0-dim: one sample"),
        pytest.param([rows(4, 3), rows(4)], 4, id="list"),
        pytest.param((rows(4, 3), rows(4)), 4, id="tuple"),
        pytest.param(Pair(rows(4), rows(4, 2)), 4, id="namedtuple"),
        pytest.param({"x": rows(4), "y": rows(4)}, 4, id="dict"),
        pytest.param(OrderedDict(x=rows(4)), 4, id="ordered dict"),
        pytest.param(UserDict(x=rows(4)), 4, id="any mapping"),
        pytest.param(Labelled(rows(4)), 4, id="dataclass"),
        pytest.param(Labelled({"deep": [rows(4)]}, extra={"y": rows(4)}), 4, id="nested"),
        pytest.param([{"x": Pair(rows(4), Labelled(rows(4)))}, "a note", 17, None], 4, id="among other things"),
        pytest.param(["a note", {"ids": [1, 2, 3]}, rows(4)], 4, id="numbers in lists are not samples"),
    ],
)
def test_samples(batch, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samples(batch) == expected


@pytest.mark.parametrize(
    ("batch", "expected", "listed"),
    [
        pytest.param([rows(4), rows(2)], 4, "[2, 4]", id="list"),
        pytest.param({"x": rows(2), "y": [rows(4), rows(2)]}, 2, "[2, 4]", id="depth first"),
        pytest.param({"y": [[rows(5)], rows(3)], "x": rows(2)}, 5, "[2, 3, 5]", id="the first is deep"),
        pytest.param((rows(8, 3), torch.tensor(0.5)), 8, "[1, 8]", id="a 0-dim extra"),
        pytest.param(Labelled(rows(3), extra={"mask": rows(6)}), 3, "[3, 6]", id="dataclass"),
    ],
)
def test_samples_warns_where_tensors_disagree(batch, expected, listed):
    with pytest.warns(CountWarning) as caught:
        assert samples(batch) == expected
    (warning,) = caught
    text = str(warning.message)
    assert listed in text and f"the first, {expected}," in text and "count=<function of the batch>" in text


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ([1, 2, 3], "list"),
        ({}, "dict"),
        ("text", "str"),
        (None, "NoneType"),
        (Labelled, "type"),
        (Labelled(0), "Labelled"),
    ],
)
def test_samples_counts_1_and_warns_where_there_is_no_tensor(batch, kind):
    with pytest.warns(CountWarning, match=f"a {kind}, holds no tensor .* counts 1; pass count="):
        assert samples(batch) == 1


# ----------------------------------------------------------------------------------------------- tokens, equal


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param([[1, 2, 3], [4, -100, -100]], 4, id="padded"),
        pytest.param([[-100, -100]], 0, id="nothing to learn"),
        pytest.param([[0, -1, 100, -99, -101]], 5, id="only -100 is left out"),
        pytest.param([5, -100], 1, id="one sequence"),
        pytest.param([], 0, id="empty"),
    ],
)
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_tokens(labels, expected, kind):
    count = tokens(kind(labels=torch.tensor(labels, dtype=torch.int64), input_ids=rows(9)))
    assert count == expected
    assert type(count) is int


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        pytest.param({"input_ids": rows(2)}, "dict", id="no labels"),
        pytest.param({"labels": [1, 2]}, "dict", id="labels that are no tensor"),
        pytest.param([rows(2)], "list", id="no mapping"),
        pytest.param(rows(2), "Tensor", id="bare tensor"),
    ],
)
def test_tokens_says_what_it_needs(batch, kind):
    with pytest.raises(CountError, match=f"a mapping with a tensor 'labels' .*got a {kind}; pass count=<function"):
        tokens(batch)


@pytest.mark.parametrize("batch", [rows(4), [], None, {"labels": rows(9)}])
def test_equal(batch):
    assert equal(batch) == 1


# ----------------------------------------------------------------------------------------------- the setting


def three(batch: Any) -> int:
    return 3


@pytest.mark.parametrize(
    ("setting", "function"),
    [("samples", samples), ("tokens", tokens), ("equal", equal), (three, three), (len, len)],
)
def test_resolve_count(setting, function):
    assert resolve_count(setting) is function


@pytest.mark.parametrize("setting", ["sample", "", "Samples", 5, None])
def test_an_unknown_setting_is_answered_with_the_known_ones(setting):
    with pytest.raises(ConfigurationError, match=f"count={setting!r} .*samples, tokens, equal, or a function"):
        resolve_count(setting)


# ----------------------------------------------------------------------------------------------- as_count


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (7, 7),
        (2**40, 2**40),
        (7.0, 7),
        (torch.tensor(7), 7),
        (torch.tensor(7.0), 7),
        (torch.tensor(2**40), 2**40),
        (torch.tensor(0, dtype=torch.int32), 0),
        (np.int64(7), 7),
        (np.float32(7), 7),
        (Fraction(14, 2), 7),
        ((torch.tensor([3, -100, 4]) != -100).sum(), 2),
    ],
)
def test_as_count(value, expected):
    count = as_count(value, "rank 0")
    assert count == expected
    assert type(count) is int


@pytest.mark.parametrize(
    "value",
    [
        -1,
        -1.0,
        2.5,
        np.float32(2.5),
        np.float32("inf"),
        Fraction(5, 2),
        Decimal("2.5"),
        True,
        "5",
        b"5",
        math.nan,
        math.inf,
        -math.inf,
        None,
        "many",
        1j,
        [4],
        {},
        torch.tensor(-1),
        torch.tensor(2.5),
        torch.tensor(math.nan),
        torch.tensor(math.inf),
        torch.tensor([1, 2]),
        torch.tensor([]),
    ],
    ids=str,
)
def test_no_count(value):
    with pytest.raises(CountError) as caught:
        as_count(value, "rank 2, batch 17")
    text = str(caught.value)
    assert text.startswith("rank 2, batch 17: a count must be an integer of at least 0")
    assert repr(value) in text


def test_a_count_error_is_caught_as_what_it_is():
    """Both as a value that is wrong and as an error of this package's training."""
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind):
            as_count(-1, "rank 0")
