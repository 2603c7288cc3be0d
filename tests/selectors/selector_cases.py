"""Inputs of the selector tests: small attention rows in the regimes where a selector can go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import settings

from kvverify.selectors import Selection, by_name

THOROUGH = settings(max_examples=60, derandomize=True, database=None, deadline=None)

WINDOW = 2
# Every selector that reads rows, with parameters that fit histories of a few tokens.
SMALL = {
    "streaming_llm": {"sinks": 1},
    "h2o": {},
    "snapkv": {"window": WINDOW, "kernel": 3},
    "pyramidkv": {"window": WINDOW, "kernel": 3},
    "chunkkv": {"window": WINDOW, "kernel": 3, "chunk": 3},
    "ada_kv": {"window": WINDOW, "kernel": 3},
    "finch": {"window": WINDOW},
    "cam": {"window": WINDOW, "width": 3},
    "random": {"seed": 7},
}
SCORED_BY_WINDOW = ("snapkv", "pyramidkv", "chunkkv", "ada_kv", "finch")
assert set(SMALL) | {"bm25"} == set(by_name)


@dataclass(frozen=True)
class RowsCase:
    history: int
    queries: int = 3
    layers: int = 2
    kv_heads: int = 2
    group: int = 2
    regime: str = "softmax"
    seed: int = 0

    def rows(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.layers, self.kv_heads * self.group, self.queries, self.history)
        if self.regime == "coarse":  # eighths: many ties, and every sum is exact in float64
            return torch.randint(0, 3, shape, generator=generator).float() / 8
        if self.regime == "equal":
            return torch.full(shape, 0.125)
        scores = torch.randn(shape, generator=generator)
        return scores.softmax(-1) if self.regime == "softmax" else (scores.abs() * 1e30).round()

    def values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(-8, 9, (self.layers, self.kv_heads, self.history, 3), generator=generator).float() / 4


def rows_cases(*, regimes: tuple[str, ...] = ("softmax", "coarse", "equal", "huge"), minimum: int = 0):
    return st.builds(
        RowsCase,
        history=st.integers(minimum, 24),
        queries=st.sampled_from([2, 3, 5]),
        layers=st.sampled_from([1, 2, 5]),
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.sampled_from([1, 2, 7]),
        regime=st.sampled_from(regimes),
        seed=st.integers(0, 99),
    )


def budgets(history: int):
    """The budgets at which the protected states of SMALL fit."""
    return st.one_of(st.just(0), st.integers(min(WINDOW, history), history + 2))


def run(name: str, case: RowsCase, budget: int, rows: torch.Tensor | None = None, **changed: object) -> Selection:
    parameters: dict[str, object] = {**SMALL[name], **changed}
    if name == "cam":
        parameters.setdefault("values", case.values())
    return by_name[name](case.rows() if rows is None else rows, budget=budget, kv_heads=case.kv_heads, **parameters)


def kept(selection: Selection) -> list[list[list[int]]]:
    """The positions of every layer and head, without the padding."""
    return [[[p for p in head if p >= 0] for head in layer] for layer in selection.positions.tolist()]
