"""Two tensors are equal, drifted within budget, or changed; the figures beside the verdict are right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from kvverify.golden.compare import BUDGET, Difference, compare, compare_files
from kvverify.golden.files import Stored, parse, wide
from kvverify.golden.records import tensor_record
from kvverify.golden.tree import GoldenError


def stored(values: Any, dtype: torch.dtype = torch.float32) -> Stored:
    return parse(save({"x": torch.as_tensor(values, dtype=dtype)}))["x"]


def judged(before: Any, after: Any, dtype: torch.dtype = torch.float32) -> Difference:
    return compare("x", stored(before, dtype), stored(after, dtype))


FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_the_same_bytes_are_equal(dtype: torch.dtype) -> None:
    assert judged([0, 1, 1], [0, 1, 1], dtype).verdict == "equal"


@pytest.mark.parametrize(("dtype", "name"), FLOATS.items())
def test_floats_drift_up_to_the_budget_and_change_beyond_it(dtype: torch.dtype, name: str) -> None:
    before = torch.tensor([1.0, -4.0], dtype=torch.float64)
    for factor, verdict in ((0.9, "drifted"), (1.6, "changed")):
        after = before + torch.tensor([0.0, factor * BUDGET[name] * 4])
        found = judged(before, after, dtype)
        assert found.verdict == verdict, f"{name}: {factor} of the budget is {found.verdict}, should be {verdict}"


def test_the_budget_is_relative_to_the_largest_value_not_to_each() -> None:
    small = 0.5 * BUDGET["F32"] * 100
    assert judged([100.0, 0.0], [100.0, small]).verdict == "drifted"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_what_counts_has_no_budget(dtype: torch.dtype) -> None:
    found = judged([100, 1, 0], [100, 1, 1], dtype)
    assert (found.verdict, found.changed, found.ulp) == ("changed", 1 / 3, None)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([math.nan, 1.0], [math.nan, 1.0000001], "drifted"),
        ([math.nan, 1.0], [1.0, 1.0], "changed"),
        ([math.inf, 1.0], [-math.inf, 1.0], "changed"),
        ([1.0, 1.0], [1.0, math.inf], "changed"),
        ([0.0, 0.0], [0.0, 1e-30], "changed"),
        ([0.0, 1.0], [-0.0, 1.0], "drifted"),
    ],
)
def test_what_is_not_finite_stays_where_it_was(before: list[float], after: list[float], verdict: str) -> None:
    found = judged(before, after)
    assert found.verdict == verdict, f"{before} to {after} is {found.verdict}, should be {verdict}"


def test_shape_dtype_and_presence_are_changes() -> None:
    one = stored([1.0, 2.0])
    assert compare("x", one, stored([[1.0, 2.0]])).verdict == "changed"
    assert compare("x", one, stored([1.0, 2.0], torch.float64)).verdict == "changed"
    verdicts = [found.verdict for found in compare_files({"a": one, "b": one}, {"b": one, "c": one})]
    assert verdicts == ["removed", "equal", "added"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_counts_representable_numbers_across_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal
    assert judged([-tiny, 1.0], [tiny, 1.0], dtype).ulp == 2
    above = 1.0 + 3 * torch.finfo(dtype).eps
    assert judged([1.0, 9.0], [above, 9.0], dtype).ulp == 3


def test_bfloat16_is_widened_exactly() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert np.array_equal(wide(stored(values, torch.bfloat16)), values.double().numpy())


def test_a_record_is_of_finite_values_and_says_how_many_are_not() -> None:
    record = tensor_record(stored([3.0, -4.0, math.inf, math.nan]))
    told = {name: record[name] for name in ("mean", "rms", "largest", "nonfinite", "first", "shape", "dtype")}
    assert told == {
        "mean": -0.5,
        "rms": 3.53553391,
        "largest": 4.0,
        "nonfinite": 2,
        "first": [3.0, -4.0, "inf", "nan"],
        "shape": [4],
        "dtype": "F32",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"), (b"\x08\0\0\0\0\0\0\0{}", "not a whole")],
)
def test_what_is_no_safetensors_file_is_said_in_words(content: bytes, words: str) -> None:
    with pytest.raises(GoldenError, match=words):
        parse(content)


def test_the_strip_shows_where_a_tensor_differs() -> None:
    before = torch.ones(480)
    after = before.clone()
    after[470:] = 2.0
    strip = judged(before, after).strip
    assert strip[-1] == 1.0, f"the last cell is {strip[-1]}, expected the largest error"
    assert not any(strip[:-1]), "cells without a difference are not empty"
