"""Coordinate plans: where the states of one selected cache, and the question after them, stand.

`Retained` says what a selector kept; a plan is a pure function from it to a `Plan`. All plans share the states, the
values and the bytes; they differ in positions only. RoPERelay is `relay`; the others are the paper's controls. Slots
may be in any order (SnapKV, for one, keeps score order): the state in slot i stays in slot i, and its position follows
from its source. So permuting the slots permutes the plan.

With p the source positions of a head in ascending order, m their number, M the largest m of any layer and head, and L
the length of the history:

| plan         | state i (source order)                | question     | what it isolates                         |
|--------------|---------------------------------------|--------------|------------------------------------------|
| original     | p_i                                   | L            | no change                                |
| relay        | (M - m) + i                           | M            | RoPERelay                                |
| rank_sync    | i                                     | M            | aligned ends                             |
| key_only     | (M - m) + i                           | L            | the synchronised question                |
| query_only   | p_i                                   | L + 2048     | a farther question                       |
| common_shift | p_i + 2048                            | L + 2048     | nothing in exact arithmetic              |
| score        | (M - m) + rank, best score last       | M            | source order                             |
| reverse      | (M - m) + (m - 1 - i)                 | M            | source order                             |
| random       | (M - m) + rank in a seeded order      | M            | source order (mean of at least 5 seeds)  |
| half_gap     | each gap g becomes 1 + floor((g-1)/2) | largest span + 1 | closing the gaps in full             |

Generation continues from the plan's own question position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvverify.relay.policy import (
    POSITION_DTYPES,
    STORAGE_DTYPES,
    align_end,
    check_device,
    check_integer,
    check_tensor,
    expect,
)

__all__ = [
    "PLANS",
    "SHIFT",
    "Plan",
    "Retained",
    "common_shift",
    "half_gap",
    "key_only",
    "original",
    "query_only",
    "random",
    "rank_sync",
    "relay",
    "reverse",
    "score",
]

SHIFT = 2048
"""Positions by which `query_only` and `common_shift` move (RoPERelay, mechanism study)."""

NO_STATE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class Retained:
    """What a selector kept of one sample.

    source: int32 or int64 [layers, heads, slots], the positions the keys were written at, -1 where a slot is empty.
    Slots in any order, no position twice in a head, each below `length`.
    length: tokens of the whole history, L.
    scores: float [layers, heads, slots], the relevance of each state; only `score` reads it.
    seed: only `random` reads it.
    """

    source: Tensor
    length: int
    scores: Tensor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, least=0)
        check_integer("seed", self.seed, least=0)
        _check_positions("source", self.source)
        for outside in self.source[self.source >= self.length][:1].tolist():
            raise ValueError(f"source: got position {outside}, expected less than length = {self.length}")
        if self.scores is not None:
            check_tensor("scores", self.scores, "layers, heads, slots", STORAGE_DTYPES)
            got, wanted = tuple(self.scores.shape), tuple(self.source.shape)
            expect(got == wanted, "scores", f"shape {got}", f"{wanted}, the shape of source")
            check_device("scores", self.scores, self.source)
            expect(not bool(self.scores[self.valid].isnan().any()), "scores", "NaN", "a number for every state")

    @property
    def valid(self) -> Tensor:
        """Tell the slots that hold a state: bool[layers, heads, slots]."""
        return self.source >= 0


@dataclass(frozen=True, eq=False)
class Plan:
    """Positions of the states and of what follows them.

    positions: int64[layers, heads, slots], -1 where a slot is empty, no position twice in a head.
    question: the position of the first question token, after every state; generation continues from there.
    """

    positions: Tensor
    question: int
    name: str

    def __post_init__(self) -> None:
        check_integer("question", self.question, least=0)
        _check_positions("positions", self.positions)
        for late in self.positions[self.positions >= self.question][:1].tolist():
            raise ValueError(f"question: got {self.question}, expected more than {late}, the position of a state")


def original(retained: Retained) -> Plan:
    """Leave every key at its source position, and ask at L."""
    return Plan(retained.source.long(), retained.length, "original")


def relay(retained: Retained) -> Plan:
    """Close the gaps in source order, end every head at M - 1, and ask at M: RoPERelay."""
    return Plan(*_compact(_source_ranks(retained), retained), "relay")


def rank_sync(retained: Retained) -> Plan:
    """Close the gaps in source order, start every head at 0, and ask at M."""
    ranks = _source_ranks(retained)
    return Plan(torch.where(retained.valid, ranks, -1), _compact(ranks, retained)[1], "rank_sync")


def key_only(retained: Retained) -> Plan:
    """Move the keys as `relay` does, and ask at L."""
    return Plan(relay(retained).positions, retained.length, "key_only")


def query_only(retained: Retained) -> Plan:
    """Leave every key at its source position, and ask at L + 2048."""
    return Plan(retained.source.long(), retained.length + SHIFT, "query_only")


def common_shift(retained: Retained) -> Plan:
    """Move keys and question by 2048: no distance changes."""
    shifted = torch.where(retained.valid, retained.source.long() + SHIFT, -1)
    return Plan(shifted, retained.length + SHIFT, "common_shift")


def score(retained: Retained) -> Plan:
    """Order the compact positions by relevance, the best state nearest the question; equal scores keep source order."""
    if retained.scores is None:
        raise ValueError("scores: got None, expected the relevance of every state, by which plan score orders them")
    by_source = _source_keys(retained).argsort(-1)
    # A state of infinite score ties with the empty slots and still comes before them, as it did in the first sort.
    scores = torch.where(retained.valid, retained.scores.double(), torch.inf).gather(-1, by_source)
    order = by_source.gather(-1, scores.argsort(dim=-1, stable=True))
    return Plan(*_compact(_ranks(order), retained), "score")


def reverse(retained: Retained) -> Plan:
    """Order the compact positions against the source: the latest state farthest from the question."""
    counts = retained.valid.sum(-1, keepdim=True)
    return Plan(*_compact(counts - 1 - _source_ranks(retained), retained), "reverse")


def random(retained: Retained) -> Plan:
    """Order the compact positions by a seeded permutation of the history, the same for all heads."""
    generator = torch.Generator().manual_seed(retained.seed)
    # One entry more than the history has: empty slots (-1) read the last one, and an empty history still has it.
    shuffled = torch.randperm(retained.length + 1, generator=generator).to(retained.source.device)
    keys = torch.where(retained.valid, shuffled[retained.source.long()], NO_STATE)
    return Plan(*_compact(_ranks(keys.argsort(-1)), retained), "random")


def half_gap(retained: Retained) -> Plan:
    """Halve what was evicted between neighbours: a gap g = p_{i+1} - p_i becomes 1 + floor((g - 1) / 2).

    Every head ends one below the anchor, the largest span p'_{m-1} - p'_0 plus 1, and the question stands there. Our
    reading: the paper names half-gap compaction without an equation.
    """
    ordered, order = _source_keys(retained).sort(-1)
    held = ordered != NO_STATE
    gaps = torch.where(held, ordered, 0).diff(dim=-1, prepend=ordered[..., :1])
    steps = torch.where(held & (gaps > 0), 1 + (gaps - 1) // 2, 0)
    return Plan(*_compact(steps.cumsum(-1).gather(-1, _ranks(order)), retained), "half_gap")


PLANS: Mapping[str, Callable[[Retained], Plan]] = MappingProxyType(
    {
        plan.__name__: plan
        for plan in (
            original,
            relay,
            rank_sync,
            key_only,
            query_only,
            common_shift,
            score,
            reverse,
            random,
            half_gap,
        )
    }
)
"""Every plan by name, in the order of the table above."""


def _compact(offsets: Tensor, retained: Retained) -> tuple[Tensor, int]:
    """Align the ends of all heads; the anchor as the number that a question position is."""
    positions, anchor = align_end(offsets, retained.valid)
    return positions, int(anchor)


def _source_keys(retained: Retained) -> Tensor:
    """Give the source positions with empty slots after all states, to sort by."""
    return torch.where(retained.valid, retained.source.long(), NO_STATE)


def _source_ranks(retained: Retained) -> Tensor:
    """Count, for every state, the states of its head with a smaller source."""
    return _ranks(_source_keys(retained).argsort(-1))


def _ranks(order: Tensor) -> Tensor:
    """Invert the permutations along the last dimension: the place of each slot in `order`."""
    return order.argsort(-1)


def _check_positions(argument: str, positions: Tensor) -> None:
    """Refuse what is not one distinct position, or -1, for each slot of a head."""
    check_tensor(argument, positions, "layers, heads, slots", POSITION_DTYPES)
    for negative in positions[positions < -1][:1].tolist():
        raise ValueError(f"{argument}: got position {negative}, expected at least 0, or -1 for an empty slot")
    ordered = positions.sort(-1).values
    for twice in ordered[..., 1:][(ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)][:1].tolist():
        raise ValueError(f"{argument}: got position {twice} twice in one head, expected it once")
