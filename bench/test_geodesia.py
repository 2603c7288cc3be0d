"""Time of the policy's own work: allocation, quantize and pack, and one decode step of a layer under each cache.

Time is a tripwire and moves with the machine. What a step costs above `full` is the overhead of its policy: 8 KV heads
would cost eight times the one head here. `bench/quantize_pair.py` compares with transformers' cache layers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from kvverify.geodesia import allocate
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.baselines import Full, Kivi
from kvverify.geodesia.decoding import Decoder, Policy
from kvverify.geodesia.ladder import pack, quantize
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.reconstructed import GradedCache
from kvverify.models.serving import LayerCache

TOKENS, DIM, GROUP, SCALE = 16_384, 128, 4, 128**-0.5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.benchmark(group="allocate 16,384 blocks x 5 levels")
@pytest.mark.parametrize("name", ["budget", "hull"])
def test_allocate(benchmark: BenchmarkFixture, name: str) -> None:
    mass = normal(TOKENS).softmax(0)
    error = normal(TOKENS, 5).abs().cumsum(1)
    level, hot = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.bool)
    cost = torch.tensor(Geometry(dim=DIM).costs)
    allowed = 4.5 * 2 * 64 * DIM * TOKENS
    run = getattr(allocate, name)
    found = benchmark(lambda: run(mass, error, level, hot, cost, budget_bits=allowed))
    assert found.status == "met"
    assert found.bits <= allowed


@pytest.mark.benchmark(group="quantize and pack 16,384 x 128")
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantize_and_pack(benchmark: BenchmarkFixture, bits: int, axis: str) -> None:
    rows = normal(TOKENS, DIM).bfloat16()

    def work() -> torch.Tensor:
        return pack(quantize(rows, bits=bits, axis=axis, group=64)[0], bits=bits)

    assert benchmark.pedantic(work, rounds=5, warmup_rounds=1).numel() == TOKENS * DIM * bits // 8


def _served(cache: LayerCache) -> Callable[[], torch.Tensor]:
    rows = normal(2, 1, TOKENS, DIM).bfloat16()
    cache.prefill(normal(1, GROUP, 32, DIM), rows[0], rows[1])
    query, row = normal(1, GROUP, DIM), normal(1, DIM).bfloat16()
    return lambda: cache.step(query, row, row)


def _stepped(decoder: Decoder) -> Callable[[], torch.Tensor]:
    rows = normal(2, 1, TOKENS, DIM).bfloat16()
    decoder.prefill(normal(1, GROUP, 32, DIM), rows[0], rows[1])
    query, row = normal(1, GROUP, DIM), normal(1, DIM).bfloat16()
    return lambda: decoder.step(query, row, row)[0]


GRADED = Policy(budget=4.5, scale=SCALE, decay=0.5)
STEPS: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
    "full": lambda: _served(Full(scale=SCALE)),
    "kivi": lambda: _served(Kivi(scale=SCALE, bits=4)),
    "graded, decoded rows": lambda: _served(GradedCache(GRADED, PagePool(Geometry(dim=DIM)))),
    "graded, packed store": lambda: _stepped(Decoder(GRADED, PagePool(Geometry(dim=DIM)))),
}


@pytest.mark.benchmark(group="one decode step, one KV head at 16,384 tokens")
@pytest.mark.parametrize("name", STEPS)
def test_step(benchmark: BenchmarkFixture, name: str) -> None:
    step = STEPS[name]()
    step()  # the first query pays for the demotion of the whole prompt
    out = benchmark.pedantic(step, rounds=10, warmup_rounds=1)
    assert out.shape == (1, GROUP, DIM)
    assert out.isfinite().all()
