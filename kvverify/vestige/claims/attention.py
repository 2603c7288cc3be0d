"""Attention over rows that carry no position: exchangeability, merging, leakage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.attention import merge
from kvverify.budget import FP32_EPSILON, unit_roundoff
from kvverify.cases import Inputs, generator
from kvverify.run import Program, Run
from kvverify.vestige.bounds import leakage_output_bound, leakage_ratio, score_change_bound
from kvverify.vestige.cases import AttendCase
from kvverify.vestige.operators import ATTEND, attend_condition

__all__: list[str] = []

DEFINITION = "definition of softmax attention"
LEMMA_1 = "VestigeKV Lemma 1, exchangeability"
LEMMA_3 = "VestigeKV Lemma 3, leakage"


@ATTEND.claim(evidence="exact", source="convention: neutral element of the merge")
def empty(run: Run, case: AttendCase) -> None:
    """A list without a row gives out 0 and lse -inf, exactly, however many pads it holds."""
    inputs = replace(case, listed=0).build()
    run.equal(inputs.call, (torch.zeros(case.heads, case.content), torch.full((case.heads,), -torch.inf)))


@ATTEND.claim(evidence="budget", source=DEFINITION)
def output(run: Run, case: AttendCase) -> None:
    """The output is the softmax-weighted mean of the content of the listed rows."""
    inputs = case.build()
    run.close(inputs.call, condition=attend_condition(inputs), only=["out"])


@ATTEND.claim(evidence="budget", source=DEFINITION)
def log_sum_exp(run: Run, case: AttendCase) -> None:
    """The lse is the natural logarithm of the sum of the exponentiated scores of the listed rows."""
    inputs = case.build()
    run.close(inputs.call, condition=attend_condition(inputs), only=["lse"])


def unchanged(run: Run, before: Program, after: Program, condition: tuple[Tensor, ...]) -> None:
    """Judge that an implementation gives twice the same (out, lse), whatever it gives, but for twice what it may err.

    condition: as `attend_condition` has it, so that its quotient is max|v|. Beside that of fp32, each answer has two
    roundings to storage, of the weights and of the output.
    """
    roundoff = unit_roundoff(run.impl.case.torch_dtype)
    size = condition[0] / condition[1].clamp(min=1)
    allowed = 4 * FP32_EPSILON * condition[0] + 4 * roundoff * size, 4 * FP32_EPSILON * condition[1]

    def fault(out: Tensor, lse: Tensor, out_after: Tensor, lse_after: Tensor) -> str | None:
        for name, one, two, most in (("out", out, out_after, allowed[0][:, None]), ("lse", lse, lse_after, allowed[1])):
            apart = (two.double() - one.double()).abs().where(one != two, 0.0).nan_to_num(nan=torch.inf)
            if (apart > most).any():
                at = tuple(int(i) for i in (apart > most).nonzero()[0])
                return f"{name}{list(at)} changes from {float(one[at]):.7g} to {float(two[at]):.7g}"
        return None

    run.valid(lambda op: (*before(op), *after(op)), fault)


@ATTEND.claim(evidence="budget", source=LEMMA_1)
def exchangeable(run: Run, case: AttendCase) -> None:
    """Attention is a function of the multiset of rows: the order of the list plays no part.

    It holds for stored rotated rows as well, and so cannot tell a cache with rotary position from one without.
    """
    inputs = case.build()
    shuffled = inputs.ids[torch.randperm(len(inputs.ids), generator=generator(case.seed, stream=1))]
    unchanged(run, inputs.call, inputs.replace(ids=shuffled).call, attend_condition(inputs))


def each_alone(inputs: Inputs, ids: Tensor) -> tuple[Program, tuple[Tensor, ...]]:
    """Attend to one row at a time, so that lse is its score and out its content: [rows * heads, ...]; conditions."""
    single = [inputs.replace(ids=row[None]) for row in ids]

    def program(op: Callable[..., Any]) -> tuple[Tensor, ...]:
        return tuple(torch.cat(side) for side in zip(*(one.call(op) for one in single), strict=True))

    through = [attend_condition(one) for one in single]
    return program, tuple(torch.cat(side) for side in zip(*through, strict=True))


def some_rows(case: AttendCase) -> tuple[Inputs, Tensor]:
    """The case with at least one listed row, and up to three of them."""
    inputs = replace(case, listed=max(case.listed, 1)).build()
    return inputs, inputs.ids[inputs.ids >= 0][:3]


@ATTEND.claim(evidence="budget", source="VestigeKV Corollary 1, stationarity")
def stationary(run: Run, case: AttendCase) -> None:
    """For a fixed query the score of a row does not depend on how far the sequence has grown since."""
    inputs, ids = some_rows(case)
    later = inputs.replace(rows=torch.cat([inputs.rows, inputs.rows[ids[:1]].expand(7, -1)]))
    grown, through = each_alone(later, ids)
    unchanged(run, each_alone(inputs, ids)[0], grown, through)


@ATTEND.claim(evidence="budget", source="VestigeKV section 3, rows without position")
def position_free(run: Run, case: AttendCase) -> None:
    """One and the same row at another place of the pool has the same score and the same value."""
    inputs, ids = some_rows(case)
    rows = len(inputs.rows)
    copies = torch.arange(rows + 2, rows + 2 + len(ids))
    elsewhere = inputs.replace(rows=torch.cat([inputs.rows, inputs.rows[:1], inputs.rows[:1], inputs.rows[ids]]))
    moved, through = each_alone(elsewhere, copies)
    unchanged(run, each_alone(inputs, ids)[0], moved, through)


@ATTEND.claim(evidence="budget", source="convention: -1 is a pad")
def pads_are_silent(run: Run, case: AttendCase) -> None:
    """Pads at the front, between and behind the rows change nothing."""
    inputs = case.build()
    bare = inputs.ids[inputs.ids >= 0]
    spread = torch.full((2 * len(bare) + 3,), -1)
    spread[2 : 2 + 2 * len(bare) : 2] = bare
    run.close(inputs.replace(ids=spread).call, truth=inputs.replace(ids=bare).call, condition=attend_condition(inputs))


@ATTEND.claim(evidence="budget", source="VestigeKV section 3(c), row certificate")
def row_certificate(run: Run, case: AttendCase) -> None:
    """Replacing a row by one at distance eps moves a score by at most lambda ||Q|| eps: just that along Q."""
    inputs, ids = some_rows(case)
    row, query = ids[:1], inputs.query.double()
    rows = inputs.rows.clone()
    size = 0.1 * inputs.rows[row].double().norm()
    rows[row] = (inputs.rows[row].double() + size * query[:1] / query[:1].norm()).to(rows.dtype)
    distance = float((rows[row].double() - inputs.rows[row].double()).norm())
    bound = score_change_bound(query, distance, scale=inputs.scale)
    moved = inputs.replace(rows=rows)
    through = each_alone(inputs, row)[1][1] + each_alone(moved, row)[1][1]

    def change(op: Callable[..., Any]) -> Tensor:
        before, after = (one.replace(ids=row).call(op)[1].double() for one in (inputs, moved))
        size: Tensor = (after - before).abs()
        return size

    def fault(moved_by: Tensor) -> str | None:
        over = (moved_by - bound - 2 * FP32_EPSILON * through).nan_to_num(nan=torch.inf)
        head = int(over.argmax())
        told = f"head {head}: the score moved by {float(moved_by[head]):.6g}, the certificate allows {bound[head]:.6g}"
        return told if over[head] > 0 else None

    run.valid(change, fault)


@ATTEND.claim(evidence="budget", source="VestigeKV Proposition 1, merging equal rows")
def merge_of_equal_rows(run: Run, case: AttendCase) -> None:
    """m equal rows are one row with logit bias ln m, for the pair (out, lse)."""
    inputs, ids = some_rows(case)
    listed = inputs.ids[inputs.ids >= 0]
    row = ids[:1]
    crowd = inputs.replace(ids=torch.cat([listed[listed != row], row.expand(5)]))

    def one_with_bias(op: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        others = inputs.replace(ids=listed[listed != row]).call(op)
        single = inputs.replace(ids=row).call(op)
        return merge(torch.stack([others[0], single[0]]), torch.stack([others[1], single[1] + math.log(5)]))

    run.close(crowd.call, truth=one_with_bias, condition=attend_condition(crowd))


@ATTEND.claim(evidence="budget", source="VestigeKV Proposition 1", status="corrected")
def merge_needs_the_lse(run: Run, case: AttendCase) -> None:
    """Two rows of one content and different branches: one of them gives the same output, and another lse than ln 2.

    So "the merge reproduces the output" does not make rows equal; the statement holds for the pair. Proof: the output
    is p v + (1 - p) v = v for any weights p; the lse is ln(e^s + e^s').
    """
    inputs, ids = some_rows(replace(case, regime="normal", canary=-1))
    twin = inputs.rows[ids[:1]].clone()
    asked = inputs.query[:1, case.content :].double()
    twin[:, case.content :] += (6 / inputs.scale * asked / asked.square().sum()).to(twin.dtype)
    rows = torch.cat([inputs.rows, twin])
    first, both = ids[:1], torch.cat([ids[:1], torch.tensor([len(inputs.rows)])])
    value = inputs.rows[first, : case.content].double()

    def pair(op: Callable[..., Any]) -> tuple[Tensor, ...]:
        merged = inputs.replace(rows=rows, ids=both).call(op)
        return (*inputs.replace(rows=rows, ids=first).call(op), *merged)

    def fault(out: Tensor, lse: Tensor, merged_out: Tensor, merged_lse: Tensor) -> str | None:
        # The two weights are rounded to storage, and so is the output; the mass that divides them is not.
        allowed = (3 * unit_roundoff(case.torch_dtype) + 64 * FP32_EPSILON) * value.abs().max()
        if not ((merged_out.double() - value).abs().max() <= allowed and (out.double() - value).abs().max() <= allowed):
            return "two rows of one content do not give that content"
        if not abs(float(merged_lse[0] - lse[0]) - math.log(2)) > 1:
            return f"lse rises by {float(merged_lse[0] - lse[0]):.6g}: expected far more than ln 2"
        return None

    run.valid(pair, fault)


def best_and_rest(case: AttendCase) -> tuple[Inputs, Tensor, Tensor]:
    """At least five listed rows: the best of head 0 is admitted, the others are excluded. (inputs, best, others)."""
    inputs = replace(case, listed=max(case.listed, 5)).build()
    listed = inputs.ids[inputs.ids >= 0].unique()
    score = inputs.query[:1].double() @ inputs.rows[listed].double().T
    at = int(score.argmax())
    return inputs, listed[at : at + 1], torch.cat([listed[:at], listed[at + 1 :]])


@ATTEND.claim(evidence="budget", source=LEMMA_3)
def leakage(run: Run, case: AttendCase) -> None:
    """If every excluded score is tau below the best admitted one, their mass ratio is at most x = excluded e^-tau."""
    inputs, admitted, excluded = best_and_rest(case)
    query = inputs.query.double()
    best = inputs.scale * (query @ inputs.rows[admitted].double().T).flatten()
    margin = best - inputs.scale * (query @ inputs.rows[excluded].double().T).amax(1)
    bound = math.log(len(excluded)) - margin  # ln x, since e^-tau may be no number
    whole = inputs.replace(ids=torch.cat([admitted, excluded]))
    slack = 4 * FP32_EPSILON * attend_condition(whole)[1]

    def logarithm(op: Callable[..., Any]) -> Tensor:
        inside, outside = (inputs.replace(ids=ids).call(op)[1].double() for ids in (admitted, excluded))
        ratio: Tensor = outside - inside
        return ratio

    def fault(log_ratio: Tensor) -> str | None:
        over = (log_ratio - bound - slack).nan_to_num(nan=torch.inf)
        head = int(over.argmax())
        told = f"head {head}: ln(mass ratio) is {float(log_ratio[head]):.6g}, above ln x = {float(bound[head]):.6g}"
        return told if over[head] > 0 else None

    run.valid(logarithm, fault)


@ATTEND.claim(evidence="budget", source=LEMMA_3, status="corrected")
def leakage_output(run: Run, case: AttendCase) -> None:
    """At mass ratio x the output moves by at most 2 x / (1 + x) max||v||, and the printed x max||v|| is exceeded.

    Counterexample to the printed bound: kept value +1, excluded value -1, x = 1/2 move the output by 2/3. Proof of
    the corrected one: the error is p ||mean of the excluded values - output over the kept||, p <= x / (1 + x) the
    excluded share, and the two are at most 2 max||v|| apart.
    """
    rows = torch.zeros(3, case.content + case.branch, dtype=torch.float64)
    rows[0], rows[1, 0], rows[2, 0], rows[2, -1] = torch.nan, 1, -1, -math.log(2)
    query = torch.zeros(case.heads, case.content + case.branch, dtype=torch.float64)
    scale = 0.5
    query[:, -1] = 1 / scale
    store = case.torch_dtype
    inputs = Inputs(
        {"query": query.to(store), "rows": rows.to(store), "ids": torch.tensor([1, 2])},
        {"scale": scale, "value_dim": case.content},
    )
    ratio = leakage_ratio(1, -float(rows[2, -1].to(store)))

    def error(op: Callable[..., Any]) -> Tensor:
        full, only = (inputs.replace(ids=torch.tensor(ids)).call(op)[0].double() for ids in ([1, 2], [1]))
        size: Tensor = torch.linalg.vector_norm(full - only, dim=1)
        return size

    def fault(moved: Tensor) -> str | None:
        # Three roundings: the weights, and the two outputs.
        slack = 4 * unit_roundoff(store) + 64 * FP32_EPSILON
        if not (moved <= leakage_output_bound(ratio, 1.0) + slack).all():
            return f"the output moved by {float(moved.max()):.6g}: the bound is {leakage_output_bound(ratio, 1.0):.6g}"
        if not (moved > ratio + 0.1).all():
            return (
                f"the output moved by {float(moved.min()):.6g}: expected 2/3, more than the printed bound {ratio:.6g}"
            )
        return None

    run.valid(error, fault)


@ATTEND.claim(evidence="budget", source="convention: a canary at every block border of a long list")
def canaries(run: Run, case: AttendCase) -> None:
    """A row that outweighs all others shows wherever it stands in a list of 2,049: at the ends, at block borders."""
    places = (0, 1, 63, 64, 65, 127, 128, 2047, 2048)
    long = replace(case, listed=2049, pads=0, spare=3, regime="normal", heads=1, content=8, branch=4)
    inputs = replace(long, canary=places[case.seed % len(places)]).build()
    run.close(inputs.call, condition=attend_condition(inputs))
