"""What attention over a list must do, cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvverify.attention.operators import DECODE, MERGE, DecodeCase, MergeCase, decode_condition
from kvverify.attention.policy import decode
from kvverify.cases import Inputs, generator
from kvverify.run import Run

__all__: list[str] = []

DEFINITION = "definition of softmax attention"


def merge_condition(inputs: Inputs) -> tuple[float, float]:
    """fp32 subtracts the lse of a split from the joint one: their size is what it passes through."""
    finite = inputs.lse[inputs.lse.isfinite()].double()
    level = 4 * (2 + float(finite.abs().max())) if finite.numel() else 0.0
    known = inputs.out[inputs.lse.isfinite()].double()
    return level * float(known.abs().max()) if known.numel() else 0.0, level


@DECODE.claim(evidence="exact", source="convention: neutral element of the merge")
def empty(run: Run, case: DecodeCase) -> None:
    """A list without a row gives out 0 and lse -inf, exactly, however many pads it holds."""
    inputs = replace(case, listed=0).build()
    heads, width = len(inputs.query), inputs.values.shape[1]
    run.equal(inputs.call, (torch.zeros(heads, width), torch.full((heads,), -torch.inf)))


@DECODE.claim(evidence="budget", source=DEFINITION)
def output(run: Run, case: DecodeCase) -> None:
    """The output is the softmax-weighted mean of the listed values, each row as often as it is listed."""
    inputs = case.build()
    run.close(inputs.call, condition=decode_condition(inputs), only=["out"])


@DECODE.claim(evidence="budget", source=DEFINITION)
def log_sum_exp(run: Run, case: DecodeCase) -> None:
    """The lse is the natural logarithm of the sum of the exponentiated scores of the listed rows."""
    inputs = case.build()
    run.close(inputs.call, condition=decode_condition(inputs), only=["lse"])


@DECODE.claim(evidence="budget", source="Lemma 1 of VestigeKV: attention is a function of the multiset of rows")
def order_free(run: Run, case: DecodeCase) -> None:
    """The order of the list does not matter."""
    inputs = case.build()
    shuffled = inputs.ids[torch.randperm(len(inputs.ids), generator=generator(case.seed, stream=1))]
    run.close(inputs.replace(ids=shuffled).call, truth=inputs.call, condition=decode_condition(inputs))


@DECODE.claim(evidence="budget", source="convention: -1 is a pad")
def pads_are_silent(run: Run, case: DecodeCase) -> None:
    """Pads at the front, between and behind the rows change nothing."""
    inputs = case.build()
    bare = inputs.ids[inputs.ids >= 0]
    spread = torch.full((2 * len(bare) + 3,), -1)
    spread[2 : 2 + 2 * len(bare) : 2] = bare
    run.close(inputs.replace(ids=spread).call, truth=inputs.replace(ids=bare).call, condition=decode_condition(inputs))


@DECODE.claim(evidence="budget", source="convention: ids are rows of the pool, wherever they lie")
def pool_order_free(run: Run, case: DecodeCase) -> None:
    """Moving the rows of the pool and the ids with them changes nothing."""
    inputs = case.build()
    rows = len(inputs.keys)
    moved = torch.cat(
        [torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(rows - 1, generator=generator(case.seed, stream=2))]
    )
    target = torch.empty(rows, dtype=torch.int64)
    target[moved] = torch.arange(rows)
    elsewhere = inputs.replace(
        keys=inputs.keys[moved], values=inputs.values[moved], ids=torch.where(inputs.ids < 0, -1, target[inputs.ids])
    )
    run.close(elsewhere.call, truth=inputs.call, condition=decode_condition(inputs))


@DECODE.claim(evidence="budget", source="Proposition 1 of VestigeKV: m equal rows are one row with logit bias ln m")
def repeats_count(run: Run, case: DecodeCase) -> None:
    """Listing every row twice leaves the output and raises the lse by ln 2."""
    inputs = case.build()
    twice = inputs.replace(ids=torch.cat([inputs.ids, inputs.ids]))

    def raised(op: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = inputs.call(op)
        return out, lse + torch.tensor(2.0, dtype=torch.float64).log()

    run.close(twice.call, truth=raised, condition=decode_condition(twice))


@DECODE.claim(evidence="budget", source="convention: a canary at every block border of a long list")
def canaries(run: Run, case: DecodeCase) -> None:
    """A row that outweighs all others shows wherever it stands in a list of 2,049: at the ends, at block borders."""
    places = (0, 1, 63, 64, 65, 127, 128, 2047, 2048)
    long = replace(case, listed=2049, pads=0, spare=3, regime="normal", heads=1, dim=16, value_dim=8)
    inputs = replace(long, canary=places[case.seed % len(places)]).build()
    run.close(inputs.call, condition=decode_condition(inputs))


@MERGE.claim(evidence="exact", source="convention: neutral element of the merge")
def all_empty(run: Run, case: MergeCase) -> None:
    """Splits that are all empty, or no split at all, give out 0 and lse -inf, exactly, never NaN."""
    inputs = replace(case, empty="all").build()
    heads, width = inputs.out.shape[1:]
    run.equal(inputs.call, (torch.zeros(heads, width), torch.full((heads,), -torch.inf)))


@MERGE.claim(evidence="budget", source="online softmax: exp-weighted mean of the parts")
def weighted_mean(run: Run, case: MergeCase) -> None:
    """The merged output weighs every split by exp(lse - joint lse); the joint lse is the log-sum-exp of all."""
    inputs = case.build()
    run.close(inputs.call, condition=merge_condition(inputs))


@MERGE.claim(evidence="budget", source="convention: neutral element of the merge")
def empty_split_is_neutral(run: Run, case: MergeCase) -> None:
    """Adding an empty split, whose out may hold NaN, changes nothing."""
    inputs = case.build()
    hollow = inputs.replace(
        out=torch.cat([torch.full_like(inputs.out[:1], torch.nan), inputs.out])
        if len(inputs.out)
        else torch.full((1, *inputs.out.shape[1:]), torch.nan, dtype=inputs.out.dtype),
        lse=torch.cat([torch.full((1, inputs.lse.shape[1]), -torch.inf), inputs.lse]),
    )
    run.close(hollow.call, truth=inputs.call, condition=merge_condition(inputs))


@MERGE.claim(evidence="budget", source="online softmax: the merge is associative and commutative")
def split_order_free(run: Run, case: MergeCase) -> None:
    """The order of the splits does not matter."""
    inputs = case.build()
    backwards = inputs.replace(out=inputs.out.flip(0), lse=inputs.lse.flip(0))
    run.close(backwards.call, truth=inputs.call, condition=merge_condition(inputs))


@MERGE.claim(evidence="budget", source="flash decoding: splitting a list and merging equals one pass")
def splits_join(run: Run, case: MergeCase) -> None:
    """Attention over the parts of a list, merged, is attention over the whole list."""
    whole = DecodeCase(
        seed=case.seed, dtype=case.dtype, listed=65, heads=case.heads, value_dim=case.dim, dim=16
    ).build()
    parts = [whole.ids[start :: case.splits + 1] for start in range(case.splits + 1)]
    # The parts are attended in float64, so that only the merge is under test; storage rounds them once.
    exact = whole.replace(query=whole.query.double(), keys=whole.keys.double(), values=whole.values.double())
    outs, lses = zip(*(exact.replace(ids=part).call(decode) for part in parts), strict=True)
    inputs = case.build().replace(out=torch.stack(outs).to(case.torch_dtype), lse=torch.stack(lses).float())
    one_pass = exact.call(decode)
    run.close(inputs.call, truth=lambda _: one_pass, roundings=2, condition=merge_condition(inputs))
