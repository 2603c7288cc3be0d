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
from kvverify.geodesia.decode_operator import DecodeCase as GeodesiaDecodeCase
from kvverify.geodesia.operators import (
    AllocateCase,
    BoxCase,
    DequantizeCase,
    PackCase,
    QuantizeCase,
    RankPagesCase,
    ResidualCase,
    ToleranceCase,
)
from kvverify.geodesia.store_case import StoreCase
from kvverify.harness import as_outputs, same_bits
from kvverify.operator import registry
from kvverify.relay.cases import CompactCase, RelocateCase, SessionCase
from kvverify.vestige.cases import AttendCase, IndexCase, PrologueCase, SalienceCase, ScanCase, SelectCase
from kvverify.vestige.stream_case import StreamCase

KIMI = {"dtype": "bf16", "content": 512, "branch": 64}

SIZES: dict[str, Case] = {
    "attention.decode": DecodeCase(listed=4096, heads=8, dim=64, value_dim=64, spare=4096, dtype="bf16"),
    "attention.merge": MergeCase(splits=64, heads=32, dim=128),
    "vestige.salience": SalienceCase(window=4096, windows=4, columns=64, bandwidth=16, dtype="bf16"),
    "vestige.select": SelectCase(rows=1_048_576, kept="third", sinks=4),
    "vestige.index": IndexCase(rows=16_384, content=512, rank=64, dtype="bf16"),
    "vestige.prologue": PrologueCase(kept=2048, heads=32, rank=64, **KIMI),
    "vestige.scan": ScanCase(archived=32_768, heads=32, rank=64, **KIMI),
    "vestige.attend": AttendCase(listed=2048, heads=32, spare=2048, **KIMI),
    "vestige.stream": StreamCase(events="two slots", content=512, branch=64, dtype="bf16"),
    "geodesia.quantize": QuantizeCase(groups=256, members=64, other=128, bits=4, dtype="bf16"),
    "geodesia.dequantize": DequantizeCase(groups=256, members=64, other=128, bits=4),
    "geodesia.pack": PackCase(tokens=16_384, dim=128, bits=4),
    "geodesia.allocate": AllocateCase(blocks=16_384),
    "geodesia.tolerance": ToleranceCase(blocks=16_384),
    "geodesia.residual": ResidualCase(tokens=16_384, dim=128, block=64, count=1000, dtype="bf16"),
    "geodesia.box": BoxCase(tokens=16_384, dim=128, block=64, dtype="bf16"),
    "geodesia.rank_pages": RankPagesCase(pages=2048, heads=32, dim=128, keep=256, dtype="bf16"),
    "geodesia.attend": StoreCase(kv=2, group=4, tokens=8192, sizes=(64, 128, 64), dtype="bf16"),
    "geodesia.decode": GeodesiaDecodeCase(prompt=1024, new=4, sizes=(64, 64, 64), dtype="bf16"),
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
