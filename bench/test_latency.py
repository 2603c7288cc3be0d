"""Time of each operator's reference at one size, and the bytes it must at least read.

Time is a tripwire and moves with the machine; bytes are exact. Run with `nox -s bench`; `extra_info` of
pytest-benchmark's JSON (`--benchmark-json`) carries operator, case, bytes and the evidence level. The result is
compared with that of a plain call while it is timed, so that a fast wrong answer is no record.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvverify.attention.operators import DecodeCase, MergeCase
from kvverify.cases import Case
from kvverify.harness import as_outputs, same_bits
from kvverify.operator import registry
from kvverify.relay.operators import CompactCase, RelocateCase, SessionCase

SIZES: dict[str, Case] = {
    "attention.decode": DecodeCase(listed=4096, heads=8, dim=64, value_dim=64, spare=4096, dtype="bf16"),
    "attention.merge": MergeCase(splits=64, heads=32, dim=128),
    "relay.compact": CompactCase(layers=32, heads=8, slots=2048),
    "relay.relocate": RelocateCase(rows=65_536, pairs=32, passed=0, dtype="bf16"),
    "relay.session": SessionCase(layers=2, heads=2, slots=2048, pairs=32, passed=0, dtype="bf16"),
}


@pytest.mark.parametrize("name", registry())
def test_reference(benchmark: BenchmarkFixture, name: str) -> None:
    operator, case = registry()[name], SIZES[name]  # an operator without a size is an error, not a gap in the table
    inputs = case.build()
    expected = as_outputs(inputs.call(operator.peer))
    benchmark.group = name
    benchmark.extra_info.update(
        operator=name, case=repr(case), read_bytes=operator.read_bytes(case), evidence="reference"
    )

    def call_and_compare() -> None:
        found = as_outputs(inputs.call(operator.peer))
        assert all(map(same_bits, found, expected)), f"{name}: two equal calls differ"

    benchmark.pedantic(call_and_compare, rounds=5, warmup_rounds=1, iterations=1)
