"""The index, the scan, and the prologue that feeds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.attention import merge
from kvverify.budget import FP32_EPSILON
from kvverify.cases import Inputs, generator
from kvverify.run import Run
from kvverify.vestige.cases import SCALE, IndexCase, PrologueCase, ScanCase
from kvverify.vestige.index import provisional_basis, query_parts
from kvverify.vestige.operators import INDEX, PROLOGUE, SCAN, prologue_condition
from kvverify.vestige.scan import archive_scores, sound_inflation

__all__: list[str] = []

DEFINITION = "definition of softmax attention"
LEMMA_2 = "VestigeKV Lemma 2, index identity"
FIRING = "VestigeKV equation 4, firing"


# The index


def half_ulp(values: Tensor) -> Tensor:
    """Half the distance between neighbouring fp16 numbers at each value."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=2.0**-14)))
    return torch.exp2(exponent - 11)


@INDEX.claim(evidence="budget", source="VestigeKV section 4.2, index entry")
def entry(run: Run, case: IndexCase) -> None:
    """The sketch is V c within 2 ulp of fp16, the residual || c - V^T V c || within 1e-5 of itself.

    Beside these budgets, fp32 passes through the norm of the content: four times for a sketch, eight for a residual.
    """
    inputs = case.build()
    sketch, residual = inputs.call(run.oracle)
    norm = FP32_EPSILON * inputs.content.double().norm(dim=1)

    def fault(found_sketch: Tensor, found_residual: Tensor) -> str | None:
        checks = (
            ("sketch", found_sketch, sketch, 4 * half_ulp(sketch) + 4 * norm[:, None]),
            ("residual", found_residual, residual, 1e-5 * residual + 8 * norm),
        )
        for name, found, truth, allowed in checks:
            over = ((found.double() - truth).abs() - allowed).nan_to_num(nan=torch.inf)
            if over.numel() and over.max() > 0:
                at = tuple(int(i) for i in torch.unravel_index(over.argmax(), over.shape))
                told = f"{name}{list(at)} is {float(found[at]):.7g}, should be {float(truth[at]):.7g}"
                return f"{told} within {float(allowed[at]):.2e}"
        return None

    run.valid(inputs.call, fault)


@INDEX.claim(evidence="budget", source=LEMMA_2)
def index_identity(run: Run, case: IndexCase) -> None:
    """A content score is its sketch score within || (I - V^T V) q_c || eta: for any query, also along the residual."""
    inputs = case.build()
    content, basis = inputs.content.double(), inputs.basis.double()
    free = torch.randn(2, case.content, generator=generator(case.seed, stream=1), dtype=torch.float64)
    aligned = content - content @ basis.T @ basis
    inside = free @ basis.T @ basis
    query = torch.cat([free, inside, 3 * aligned / aligned.norm(dim=1, keepdim=True).clamp(min=1e-12)])
    asked, outside = query_parts(query, basis)
    true = query @ content.T
    rounding = asked.abs() @ (4 * half_ulp(content @ basis.T)).T
    passed = 16 * FP32_EPSILON * torch.outer(query.norm(dim=1), content.norm(dim=1))

    def fault(sketch: Tensor, residual: Tensor) -> str | None:
        bound = torch.outer(outside, residual.double()) * (1 + 1e-5)
        over = ((true - asked @ sketch.double().T).abs() - bound - rounding - passed).nan_to_num(nan=torch.inf)
        if over.numel() and over.max() > 0:
            at = tuple(int(i) for i in torch.unravel_index(over.argmax(), over.shape))
            return f"row {at[1]}: a score lies {float(over[at]):.3e} outside of its certificate {float(bound[at]):.6g}"
        return None

    run.valid(inputs.call, fault)


# The scan


def set_fault(fired: Tensor, rows: int) -> str | None:
    """Why these are no distinct positions in an archive of `rows`."""
    outside = fired[(fired < 0) | (fired >= rows)]
    if len(outside):
        return f"position {int(outside[0])} is fired: expected positions in [0, {rows})"
    if len(fired.unique()) < len(fired):
        return f"{len(fired)} positions are fired, {len(fired.unique())} of them different: expected no repeats"
    return None


def firing_fault(fired: Tensor, score: Tensor, threshold: Tensor) -> str | None:
    """Why this is not what score[heads, archived] fires.

    Only rows within 1e-5 (1 + max|score|) of a threshold may differ, and at most max(4, archived / 4096) of them.
    """
    told = set_fault(fired, score.shape[1])
    if told is not None or not score.shape[1]:
        return told
    limit = threshold.double()[:, None]
    near = 1e-5 * (1 + score.abs().amax(1, keepdim=True))
    mine = torch.zeros(score.shape[1], dtype=torch.bool)
    mine[fired] = True
    missed = (~mine & (score > limit + near).any(0)).nonzero()
    if len(missed):
        return f"row {int(missed[0])} is above the threshold of a head and did not fire ({len(missed)} such rows)"
    extra = (mine & ~(score > limit - near).any(0)).nonzero()
    if len(extra):
        return f"row {int(extra[0])} is below every threshold and fired ({len(extra)} such rows)"
    differing, most = int((mine != (score > limit).any(0)).sum()), max(4, score.shape[1] // 4096)
    return f"{differing} rows near a threshold differ: expected at most {most}" if differing > most else None


def index_scores(inputs: Inputs) -> Tensor:
    """Index score and inflated certificate of every head and row, in float64 on the stored entries."""
    known, certificate = archive_scores(
        inputs.query.double(), inputs.side, inputs.sketch, inputs.residual, inputs.basis, scale=inputs.scale
    )
    inflation: float = inputs.inflation
    return known + inflation * certificate


@SCAN.claim(evidence="budget", source=FIRING)
def fires(run: Run, case: ScanCase) -> None:
    """A row fires if its score, certificate included, is above the threshold of ANY head, and is listed once."""
    inputs = case.build()
    score = index_scores(inputs)
    run.valid(inputs.call, lambda fired: firing_fault(fired, score, inputs.threshold))


@SCAN.claim(evidence="exact", source=FIRING)
def gates(run: Run, case: ScanCase) -> None:
    """A closed gate (+inf) never fires; a head that attends to nothing (-inf) fires every row."""
    inputs = case.build()
    shut = torch.full((case.heads,), torch.inf)
    one_open = shut.clone()
    one_open[case.seed % case.heads] = -torch.inf

    def both(op: Callable[..., Any]) -> tuple[Tensor, ...]:
        return tuple(inputs.replace(threshold=threshold).call(op).sort().values for threshold in (shut, one_open))

    run.equal(both, (torch.zeros(0, dtype=torch.int64), torch.arange(case.archived)), "fired")


@SCAN.claim(evidence="exact", source=FIRING)
def strict(run: Run, case: ScanCase) -> None:
    """A row whose score equals the threshold does not fire.

    Small integers, a scale of 1/4 and no residual: every sum is exact in any order and any of the dtypes.
    """
    random = generator(case.seed)
    heads, rows, content, branch = case.heads, max(case.archived, 12), case.content, case.branch
    query = torch.randint(-2, 3, (heads, content + branch), generator=random)
    side = torch.randint(-1, 2, (rows, branch), generator=random)
    sketch = torch.randint(-1, 2, (rows, case.rank), generator=random)
    score = 0.25 * (query[:, content:] @ side.T + query[:, : case.rank] @ sketch.T).double()
    threshold = score.mode(1).values
    inputs = Inputs(
        {
            "query": query.to(case.torch_dtype),
            "side": side.to(case.torch_dtype),
            "sketch": sketch.half(),
            "residual": torch.zeros(rows),
            "basis": provisional_basis(case.rank, content),
            "threshold": threshold.float(),
        },
        {"scale": 0.25, "inflation": case.z},
    )
    expected = (score > threshold[:, None]).any(0).nonzero().flatten()
    run.equal(lambda op: inputs.call(op).sort().values, expected, "fired")


@SCAN.claim(evidence="budget", source="VestigeKV section 4.2, soundness; the rounding term is derived for this project")
def sound_fetch(run: Run, case: ScanCase) -> None:
    """With inflation sqrt(content - rank) no row above s* by more than the rounding of its sketch is missed.

    Unrounded, a row cannot score above its index score by more than the certificate (Cauchy-Schwarz). The stored
    sketch adds lambda ||V q_c|| ||sketch - V c||.
    """
    aligned = replace(case, inflation="sound")
    inputs = aligned.build()
    query, rows, basis = (tensor.double() for tensor in aligned.operands())
    true = SCALE * (query @ rows.T)
    asked, _ = query_parts(query, basis)
    exact_sketch = rows[:, : case.content] @ basis.T
    rounding = SCALE * torch.outer(asked.norm(dim=1), (inputs.sketch.double() - exact_sketch).norm(dim=1))
    threshold = aligned.thresholds_between(true)
    near = 1e-5 * (1 + true.abs().amax(1, keepdim=True)) if case.archived else 0.0
    needed = (true > threshold.double()[:, None] + rounding + near).any(0)

    def fault(fired: Tensor) -> str | None:
        told = set_fault(fired, case.archived)
        if told is None:
            missed = sorted(set(needed.nonzero().flatten().tolist()) - set(fired.tolist()))
            told = f"row {missed[0]} is above s* of a head and was not fetched" if missed else None
        return told

    run.valid(inputs.replace(threshold=threshold).call, fault)


@SCAN.claim(evidence="exact", source="VestigeKV section 4.2, the clamp z <= 8", status="corrected")
def deployed_clamp_misses(run: Run, case: ScanCase) -> None:
    """At content 512 and rank 64 the deployed z = 8 misses an aligned row of twice s*; sqrt(448) fetches it.

    Counterexample to "never misses": query and row both lie in one direction that the basis discards. The index score
    is 0 and the certificate lambda q c / 21.17, of which 8 give .38 of the true score.
    """
    basis = provisional_basis(64, 512)
    rows, place = max(case.archived, 1), case.seed % max(case.archived, 1)
    query = torch.zeros(case.heads, 512 + case.branch)
    query[:, 100] = 3
    residual = torch.zeros(rows)
    residual[place] = 4
    inputs = Inputs(
        {
            "query": query.to(case.torch_dtype),
            "side": torch.zeros(rows, case.branch, dtype=case.torch_dtype),
            "sketch": torch.zeros(rows, 64, dtype=torch.float16),
            "residual": residual,
            "basis": basis,
            "threshold": torch.full((case.heads,), SCALE * 12 / 2),
        },
        {"scale": SCALE, "inflation": 8.0},
    )
    enough = inputs.replace(inflation=sound_inflation(512, 64))
    expected = torch.zeros(0, dtype=torch.int64), torch.tensor([place])
    run.equal(lambda op: (inputs.call(op), enough.call(op)), expected, "fired")


@SCAN.claim(evidence="budget", source="convention: fired are positions in the archive, as it is listed")
def archive_order(run: Run, case: ScanCase) -> None:
    """With the archive in another order, the positions of the same rows fire."""
    inputs = case.build()
    order = torch.randperm(case.archived, generator=generator(case.seed, stream=2))
    moved = inputs.replace(side=inputs.side[order], sketch=inputs.sketch[order], residual=inputs.residual[order])
    score = index_scores(inputs)

    def named(op: Callable[..., Any]) -> Tensor:
        fired = moved.call(op)
        inside = (fired >= 0) & (fired < case.archived)
        return torch.where(inside, order[fired.where(inside, 0)], fired) if case.archived else fired

    run.valid(named, lambda fired: firing_fault(fired, score, inputs.threshold))


# The prologue


def prologue_claim(run: Run, case: PrologueCase, *only: str) -> None:
    """Judge some outputs of the prologue by the budget."""
    inputs = case.build()
    run.close(inputs.call, condition=prologue_condition(inputs), only=only)


@PROLOGUE.claim(evidence="budget", source=FIRING)
def best_score(run: Run, case: PrologueCase) -> None:
    """s* of a head is its best score over the attended rows, -inf where there are none."""
    prologue_claim(run, case, "best")


@PROLOGUE.claim(evidence="budget", source="VestigeKV section 4.3, entropy gate")
def entropy(run: Run, case: PrologueCase) -> None:
    """The entropy is that of the softmax over the attended rows, in nats, and 0 where there are none."""
    prologue_claim(run, case, "entropy")


@PROLOGUE.claim(evidence="budget", source=DEFINITION)
def partial_attention(run: Run, case: PrologueCase) -> None:
    """(out, lse) is attention over the attended rows, ready to be merged with that over the fetched ones."""
    prologue_claim(run, case, "out", "lse")


@PROLOGUE.claim(evidence="budget", source=LEMMA_2)
def parts_of_the_query(run: Run, case: PrologueCase) -> None:
    """The query splits into V q_c and the norm of what the basis discards."""
    prologue_claim(run, case, "query_sketch", "query_residual")


@PROLOGUE.claim(evidence="exact", source="convention: neutral element of the merge")
def nothing_attended(run: Run, case: PrologueCase) -> None:
    """Without attended rows: best -inf, entropy 0, out 0, lse -inf, never NaN."""
    inputs = replace(case, kept=0).build()
    nothing, zero = torch.full((case.heads,), -torch.inf), torch.zeros(case.heads)
    run.equal(lambda op: inputs.call(op)[:4], (nothing, zero, torch.zeros(case.heads, case.content), nothing))


@PROLOGUE.claim(evidence="budget", source="flash decoding: splitting the rows and merging equals one pass")
def splits_join(run: Run, case: PrologueCase) -> None:
    """Over two halves of the rows: the larger s* is that of all, and the partial attentions merge into that of all."""
    inputs = case.build()
    halves = [inputs.replace(rows=inputs.rows[start::2].clone()) for start in range(2)]

    def joined(op: Callable[..., Any]) -> tuple[Tensor, ...]:
        left, right = (half.call(op) for half in halves)
        out, lse = merge(torch.stack([left[2], right[2]]), torch.stack([left[3], right[3]]))
        return torch.maximum(left[0], right[0]), left[1], out, lse

    run.close(
        joined,
        truth=lambda op: inputs.call(op)[:4],
        roundings=3,
        condition=prologue_condition(inputs),
        only=("best", "out", "lse"),
    )
