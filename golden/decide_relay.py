"""Decisions of the selectors, and of the ten plans of RoPERelay.

Written, of all layers at once unless numbered by l:

    kept.<selector>.<share>[layers, kv, slots]      source positions, -1 where a head keeps fewer
    merged.cam.<share>                              values of the first layer's first head, after merging
    plan.<plan>.positions[layers, kv, slots]        of what SnapKV keeps at the largest share
    plan.<plan>.question                            the position of the question
    relocated.<plan>.l[kv, states, dim]             the first keys of a head, moved to the plan
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from golden import stages
from kvverify.relay.plans import PLANS, Plan, Retained
from kvverify.relay.policy import Layout, RotaryTable, relocate_positions
from kvverify.selectors import (
    HistoryUnit,
    Selection,
    ada_kv,
    attention_rows,
    bm25,
    budget_from_share,
    cam,
    chunkkv,
    finch,
    h2o,
    pyramidkv,
    random,
    snapkv,
    streaming_llm,
)

SETTINGS = stages.parameters("decide")
RELOCATED = ("relay", "rank_sync", "half_gap", "reverse")


def decisions(captured: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of the module's tensors."""
    keys, queries = (stages.numbered(captured, name) for name in ("keys", "queries"))
    scales = captured["scale"].tolist()
    rows = torch.stack([attention_rows(q, k, scale=s) for q, k, s in zip(queries, keys, scales, strict=True)])
    tensors = {}
    budget = 0
    for share in SETTINGS["shares"]:
        budget = budget_from_share(Fraction(share), rows.shape[-1])
        label = share.replace("/", "_")
        for name, selection in selections(captured, rows, budget).items():
            tensors[f"kept.{name}.{label}"] = selection.positions.int()
            if selection.values is not None:
                tensors[f"merged.{name}.{label}"] = selection.values[0, 0]
    chosen = snapkv(rows, budget=budget, kv_heads=keys[0].shape[0], window=SETTINGS["window"])
    return tensors | plans(captured, keys, rows, chosen)


def selections(captured: dict[str, Tensor], rows: Tensor, budget: int) -> dict[str, Selection]:
    """What every selector keeps. Words, for the one that reads words, are the tokens themselves."""
    window, chunk, tokens = SETTINGS["window"], SETTINGS["chunk"], captured["tokens"].tolist()
    kv_heads = stages.numbered(captured, "keys")[0].shape[0]
    common: dict[str, Any] = {"budget": budget, "kv_heads": kv_heads}
    values = stages.numbered(captured, "values") or stages.numbered(captured, "keys")
    words = [" ".join(f"t{token}" for token in tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
    units = [HistoryUnit(text, chunk * i, min(chunk * (i + 1), len(tokens))) for i, text in enumerate(words)]
    return {
        "streaming_llm": streaming_llm(rows, **common),
        "h2o": h2o(rows, **common),
        "snapkv": snapkv(rows, window=window, **common),
        "snapkv_max": snapkv(rows, window=window, pooling="max", **common),
        "pyramidkv": pyramidkv(rows, window=window, **common),
        "ada_kv": ada_kv(rows, window=window, **common),
        "chunkkv": chunkkv(rows, window=window, chunk=chunk, **common),
        "finch": finch(rows, window=window, **common),
        "random": random(rows, **common),
        "cam": cam(rows, values=torch.stack(values), window=window, **common),
        "bm25": bm25(units, budget=budget, query=words[-1], layers=len(rows), kv_heads=kv_heads),
    }


def plans(captured: dict[str, Tensor], keys: list[Tensor], rows: Tensor, chosen: Selection) -> dict[str, Tensor]:
    """The ten plans of one selection, and keys moved to those that stay within the captured table."""
    mass = rows.sum(2).unflatten(1, (keys[0].shape[0], -1)).sum(2)
    held = chosen.positions.clamp(min=0)
    retained = Retained(chosen.positions, rows.shape[-1], scores=mass.gather(2, held))
    layout: Layout = "interleaved" if bool(captured["interleaved"]) else "half"
    factors = zip(stages.numbered(captured, "cos"), stages.numbered(captured, "sin"), strict=True)
    tables = [RotaryTable(cos, sin, layout) for cos, sin in factors]
    tensors = {}
    for name, plan in PLANS.items():
        made = plan(retained)
        tensors[f"plan.{name}.positions"] = made.positions.int()
        tensors[f"plan.{name}.question"] = torch.tensor(made.question)
        if name in RELOCATED:
            for layer, (rotated, table) in enumerate(zip(keys, tables, strict=True)):
                tensors[f"relocated.{name}.{layer}"] = moved(rotated, chosen.positions[layer], made, layer, table)
    return tensors


def moved(keys: Tensor, source: Tensor, plan: Plan, layer: int, table: RotaryTable) -> Tensor:
    """The first keys[kv, states, dim] of each head, at their places in the plan; 0 where a head keeps fewer."""
    count = SETTINGS["relocated"]
    source, target = source[:, :count], plan.positions[layer][:, :count]
    held = source >= 0
    found = keys.new_zeros(*source.shape, keys.shape[-1])
    rows = keys.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, keys.shape[-1]))
    found[held] = relocate_positions(rows[held], source[held], target[held], table)
    return found
