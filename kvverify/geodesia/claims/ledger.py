"""Statements about what a run reads, holds and certifies: pages, bytes, the output certificate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.geodesia import pages as page_rules
from kvverify.geodesia.accounting import token_bits
from kvverify.geodesia.claims.following import follow, geometry_of, judged
from kvverify.geodesia.decode_operator import DECODE, DecodeCase
from kvverify.geodesia.ladder import EXACT
from kvverify.geodesia.pages import box, page_scores
from kvverify.geodesia.plain import PlainHead, Trace
from kvverify.geodesia.validity import FP32_EPSILON, top_fault
from kvverify.run import Run

__all__: list[str] = []

PAGES = "Geodesia-KV, compressed Quest"
BYTES = "Geodesia-KV, accounting: every byte of a buffer is an accounted one"
CERTIFICATE = "Geodesia-KV, output certificate"


def candidates(inputs: Inputs, query: int) -> int:
    """Pages closed before a query: the page that holds it is the first that is not."""
    return int(inputs.prompt_keys.shape[1] + query) // int(inputs.block)


@DECODE.claim(evidence="exact", source=PAGES)
def page_count(run: Run, case: DecodeCase) -> None:
    """Of n pages closed before the query, min(n, max(1, ceil(f n))) are read."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for query in range(case.new):
            closed = candidates(inputs, query)
            wanted = page_rules.page_count(closed, inputs.page_fraction)
            counts = trace.pages[:, :, query, :closed].sum(-1)
            if (counts != wanted).any():
                return f"query {query} reads {counts.flatten().tolist()} of {closed} pages: expected {wanted}"
        return None

    run.valid(*judged(replace(case, pages=case.pages or 0.25), rule))


@DECODE.claim(evidence="exact", source=PAGES)
def current_readable(run: Run, case: DecodeCase) -> None:
    """The page that holds the query is always read, by every head."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for query in range(case.new):
            if not trace.pages[:, :, query, candidates(inputs, query)].all():
                return f"query {query} does not read its own page {candidates(inputs, query)}"
        return None

    run.valid(*judged(replace(case, pages=case.pages or 0.25), rule))


@DECODE.claim(evidence="exact", source=PAGES)
def original_boxes(run: Run, case: DecodeCase) -> None:
    """Pages are ranked by boxes of the original keys, taken before quantization; ties are free."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        keys = torch.cat([inputs.prompt_keys, inputs.keys], 1)
        for query in range(case.new):
            closed = candidates(inputs, query)
            for head, rows in enumerate(keys):
                low, high = box(rows[: closed * inputs.block], block=inputs.block)
                asked = inputs.queries[head, :, query]
                score = page_scores(asked, low, high, scale=inputs.scale)
                far = asked.double().abs() @ torch.maximum(low.abs(), high.abs()).double().T * inputs.scale
                for member, read in enumerate(trace.pages[head, :, query, :closed]):
                    chosen = read.nonzero()[:, 0]
                    slack = far[member] * FP32_EPSILON * (rows.shape[1] + 2)
                    fault = top_fault(chosen, score[member], slack, count=len(chosen))
                    if fault:
                        return f"head {head}.{member}, query {query} {fault}"
        return None

    run.valid(*judged(replace(case, pages=case.pages or 0.25), rule))


def accounted(inputs: Inputs, trace: Trace) -> tuple[Tensor, int]:
    """Bits of every page with its residual tokens int64[kv, new, pages], and of one page's box."""
    geometry, prompt = geometry_of(inputs), inputs.prompt_keys.shape[1]
    token, block = token_bits(geometry.dim, 1), geometry.block
    bits = torch.zeros(trace.mass.shape, dtype=torch.int64)
    cost = torch.tensor(geometry.costs)
    for head in range(len(bits)):
        for i in range(len(inputs.rates)):
            length = prompt + i + 1
            closed = length // block
            level = trace.level[head, i, :closed]
            bits[head, i, :closed] = cost[level]
            if length % block:
                bits[head, i, closed] = (length - closed * block) * token
            home = trace.kept[head] // block
            demoted = home[home < closed]
            demoted = demoted[level[demoted] != EXACT]
            bits[head, i].index_add_(0, demoted, torch.full_like(demoted, token))
    return bits, 0 if inputs.page_fraction is None else token


def resident_bits(inputs: Inputs, trace: Trace) -> Tensor:
    """Bits of all heads after each query: pages, residual tokens, boxes."""
    bits, per_box = accounted(inputs, trace)
    boxes = [-(-(inputs.prompt_keys.shape[1] + i + 1) // inputs.block) * per_box for i in range(bits.shape[1])]
    return bits.sum((0, 2)) + len(bits) * torch.tensor(boxes)


@DECODE.claim(evidence="exact", source=BYTES)
def bytes_equal_accounting(run: Run, case: DecodeCase) -> None:
    """The bits held are those of the rungs with their scales, the open block's tokens and the boxes: no byte more."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        wanted = resident_bits(inputs, trace)
        return None if torch.equal(trace.resident, wanted) else f"{trace.resident.tolist()}: expected {wanted.tolist()}"

    run.valid(*judged(replace(case, residual=0.0), rule))


@DECODE.claim(evidence="exact", source="Geodesia-KV, exact residual")
def residual_cost(run: Run, case: DecodeCase) -> None:
    """A residual token costs 2 D 16 bits on top of the budget, and nothing while its block is still exact."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        wanted = resident_bits(inputs, trace)
        return None if torch.equal(trace.resident, wanted) else f"{trace.resident.tolist()}: expected {wanted.tolist()}"

    run.valid(*judged(replace(case, residual=0.2), rule))


@DECODE.claim(evidence="exact", source=BYTES)
def read_at_most_resident(run: Run, case: DecodeCase) -> None:
    """A query reads all boxes and its pages, the current one included, which is never more than what is held."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        bits, per_box = accounted(inputs, trace)
        boxes = torch.tensor([-(-(case.prompt + i + 1) // inputs.block) * per_box for i in range(bits.shape[1])])
        wanted = (trace.pages * bits[:, None]).sum(-1) + boxes
        if not torch.equal(trace.read, wanted):
            return f"read is {trace.read.flatten().tolist()}: expected {wanted.flatten().tolist()}"
        over = trace.read.amax(1).sum(0) > trace.resident
        return f"query {int(over.nonzero()[0])} reads more than is resident" if over.any() else None

    run.valid(*judged(replace(case, pages=case.pages or 0.25), rule))


@DECODE.claim(evidence="exact", source=CERTIFICATE)
def certificate(run: Run, case: DecodeCase) -> None:
    """No output is farther from that of the full cache than its certificate, which the cache computes by itself."""
    inputs = case.build()
    seen, program = follow(run, inputs)
    full = inputs.replace(rates=(16.0,) * case.new, page_fraction=None).call(run.oracle)[0]
    apart = (program(run.oracle).out - full).norm(dim=-1)
    slack = 2.0**-30 * inputs.values.double().abs().amax()

    def fault(bound: Tensor) -> str | None:
        broken = ~(bound.double() * (1 + 2.0**-16) + slack >= apart)  # NaN is no bound
        at = tuple(broken.nonzero()[0].tolist()) if broken.any() else ()
        return f"bound {float(bound[at]):.6g} at {list(at)}, the error is {float(apart[at]):.6g}" if at else None

    run.valid(lambda _: seen.bound, fault)


class WorseCenter(PlainHead):
    """The plain model with values measured from zero, or from their mean in the prompt, whichever is farther."""

    def radius(self) -> float:
        """Return the larger of the two."""
        return max(super().radius(), float(self.original[1].norm(dim=-1).max()))


@DECODE.claim(evidence="exact", source=CERTIFICATE, status="corrected")
def certificate_tightened(run: Run, case: DecodeCase) -> None:
    """The certificate is at most its tightened form, which never exceeds the printed one; scaled values scale it.

    Corrected: the printed total variation M+/M- - M-/M+ is sound and about four times too large. Any centre of the
    values may be used; the form is granted the worse of their mean in the prompt and zero.
    """
    inputs = replace(case, pages=0.0).build()
    seen, program = follow(run, inputs)
    most = program(partial(run.oracle, head_type=WorseCenter)).bound
    slack = 2.0**-30 * inputs.values.double().abs().amax()

    def fault(bound: Tensor) -> str | None:
        broken = bound.double() > most * (1 + 2.0**-16) + slack
        at = tuple(broken.nonzero()[0].tolist()) if broken.any() else ()
        return f"bound {float(bound[at]):.6g} at {list(at)}, tightened {float(most[at]):.6g}" if at else None

    run.valid(lambda _: seen.bound, fault)
