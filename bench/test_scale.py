"""How the work of an eviction grows with the rows, and how much the closed form of the salience saves.

`extra_info` carries the seconds at each size and the slope of log(seconds) over log(rows), which is 1 where the time
is linear. `pytest bench/test_scale.py --rows 1048576` goes to a million rows of 576 columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from kvverify.harness import same_bits
from kvverify.vestige import index, salience, scan, select
from kvverify.vestige.index import provisional_basis
from kvverify.vestige.salience import salience_by_projection

CONTENT, BRANCH, RANK, HEADS = 512, 64, 64, 32
ROUNDS = 3


def cache_rows(rows: int) -> Tensor:
    """Distinct bf16 rows; drawn once for 4,096 of them, since only the time is of interest."""
    drawn = torch.randn(4096, CONTENT + BRANCH, generator=torch.Generator().manual_seed(0)).bfloat16()
    return drawn.repeat(math.ceil(rows / 4096), 1)[:rows]


def selecting(rows: int) -> Callable[[], Tensor]:
    sigma = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    return lambda: select(sigma, keep=rows // 32, sinks=4)


def indexing(rows: int) -> Callable[[], Tensor]:
    stored, basis = cache_rows(rows)[:, :CONTENT], provisional_basis(RANK, CONTENT)
    return lambda: index(stored, basis)[1]


def scanning(rows: int) -> Callable[[], Tensor]:
    random = torch.Generator().manual_seed(2)
    side, sketch = torch.randn(rows, BRANCH, generator=random), torch.randn(rows, RANK, generator=random)
    query = torch.randn(HEADS, CONTENT + BRANCH, generator=random)
    entries = side.bfloat16(), sketch.half(), torch.rand(rows, generator=random), provisional_basis(RANK, CONTENT)
    threshold = torch.full((HEADS,), 4.0)
    return lambda: scan(query.bfloat16(), *entries, threshold, scale=192**-0.5, inflation=2.0)


def seconds(call: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def slope(rows: list[int], times: list[float]) -> float:
    """Least-squares slope of log(times) over log(rows)."""
    at, of = torch.tensor(rows).double().log(), torch.tensor(times).double().log()
    return float(((at - at.mean()) * (of - of.mean())).sum() / (at - at.mean()).square().sum())


@pytest.mark.parametrize("work", [selecting, indexing, scanning])
def test_time_by_rows(benchmark: BenchmarkFixture, work: Callable[[int], Callable[[], Tensor]], rows: int) -> None:
    sizes = [rows >> shift for shift in (4, 3, 2, 1, 0)]
    times = []
    for size in sizes:
        call = work(size)
        assert same_bits(call(), call()), "two equal calls differ"
        times.append(min(seconds(call) for _ in range(ROUNDS)))
    benchmark.extra_info.update(rows=sizes, seconds=times, slope=slope(sizes, times))
    print(f"\n{work.__name__}: {rows:,} rows in {times[-1]:.3f} s, slope {slope(sizes, times):.2f}")
    benchmark.pedantic(work(rows), rounds=ROUNDS, iterations=1)


def test_projection_against_transform(benchmark: BenchmarkFixture) -> None:
    branch = torch.randn(65_536, BRANCH, generator=torch.Generator().manual_seed(3))

    def by_transform() -> Tensor:
        return salience(branch, bandwidth=16, block=4096)

    def by_projection() -> Tensor:
        return salience_by_projection(branch, bandwidth=16, block=4096)

    # Two fp32 evaluations of one norm, each within 32 roundings of the largest row.
    assert (by_transform() - by_projection()).abs().max() <= 64 * 2.0**-24 * branch.norm(dim=1).max()
    ratios = [seconds(by_transform) / seconds(by_projection) for _ in range(15)]  # paired, so that a load hits both
    benchmark.extra_info.update(transform_over_projection=median(ratios), ratios=ratios)
    print(f"\nthe transform takes {median(ratios):.2f} times as long as the projection (median of {len(ratios)} pairs)")
    benchmark.pedantic(by_projection, rounds=ROUNDS, iterations=1)
