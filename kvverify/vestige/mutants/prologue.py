"""Prologues that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.vestige.attend import Prologue
from kvverify.vestige.cases import PrologueCase
from kvverify.vestige.operators import PROLOGUE, peer_prologue
from kvverify.vestige.policy import prologue

__all__: list[str] = []

BLOCK = 64


@PROLOGUE.mutant("best_score", case=PrologueCase(regime="negative"))
def padded_row_wins(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(best=found.best.clamp(min=0)) if len(rows) % BLOCK else found


@PROLOGUE.mutant("best_score")
def best_is_shared_by_all_heads(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(best=found.best.amax().expand_as(found.best).clone())


@PROLOGUE.mutant("best_score")
def best_is_unscaled(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(best=found.best / scale)


@PROLOGUE.mutant("entropy")
def entropy_in_bits(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(entropy=found.entropy / torch.tensor(2.0).log())


@PROLOGUE.mutant("entropy", case=PrologueCase(regime="large"))
def entropy_is_nan_for_a_zero_weight(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    weights = torch.softmax(16 * scale * (query.float() @ rows.float().T), 1)
    return found._replace(entropy=-(weights * weights.log()).sum(1))


@PROLOGUE.mutant("partial_attention", "splits_join", case=PrologueCase(kept=65))
def prologue_drops_the_last_row(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    return prologue(query, rows[:-1], basis, scale=scale, value_dim=value_dim)


@PROLOGUE.mutant("partial_attention")
def values_are_not_the_content(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(out=prologue(query, rows.flip(1), basis, scale=scale, value_dim=value_dim).out)


@PROLOGUE.mutant("splits_join", "partial_attention")
def lse_without_the_maximum(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(lse=found.lse - found.best if len(rows) else found.lse)


@PROLOGUE.mutant("nothing_attended")
def nothing_minus_nothing_is_nan(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found if len(rows) else found._replace(entropy=found.lse - found.best)


@PROLOGUE.mutant("nothing_attended")
def best_of_nothing_is_zero(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found if len(rows) else found._replace(best=torch.zeros_like(found.best))


@PROLOGUE.mutant("parts_of_the_query")
def discarded_part_is_the_whole_norm(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(query_residual=query[:, : basis.shape[1]].float().norm(dim=1))


@PROLOGUE.mutant("parts_of_the_query", case=PrologueCase(query="inside", heads=8))
def discarded_part_by_pythagoras(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    squared = query[:, : basis.shape[1]].float().square().sum(1) - found.query_sketch.square().sum(1)
    return found._replace(query_residual=squared.clamp(min=0).sqrt())


@PROLOGUE.mutant("parts_of_the_query")
def query_sketch_in_bf16(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    found = prologue(query, rows, basis, scale=scale, value_dim=value_dim)
    return found._replace(query_sketch=found.query_sketch.bfloat16().float())


@PROLOGUE.control
def prologue_in_one_pass(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    """A fused kernel: rounded weights, entropy as lse less the mean score."""
    return peer_prologue(query, rows, basis, scale=scale, value_dim=value_dim)


@PROLOGUE.control
def prologue_in_double_precision(
    query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int
) -> Prologue:
    """float64, rounded once."""
    found = prologue(query.double(), rows.double(), basis.double(), scale=scale, value_dim=value_dim)
    return Prologue(
        *(part.to(rows.dtype if name == "out" else torch.float32) for name, part in found._asdict().items())
    )
