"""Decisions of Geodesia-KV on keys and values, and of VestigeKV on latents, for the last queries of a history.

Geodesia-KV, per layer l and rate in bits per value, as `kvverify.geodesia.serving.decode` returns them; the rows are
stored in bfloat16 first, as a cache has them:

    geodesia.<rate>.l.{out, lse, level, mass, met, resident, pages, read, bound, kept}

VestigeKV, per layer l. Eigenvectors have no sign, so of the index only what does not depend on it is kept:

    vestige.l.{salience, salience_prefix, kept, archived}    tier 1
    vestige.l.{residual, sketch_norm, inflation, theta}      the index, and z of three calibrations
    vestige.l.{fired, fetched, out, lse, entropy, bytes}     served queries; fired has a column per archived row
"""

from __future__ import annotations

import torch
from torch import Tensor

from golden import stages
from kvverify.geodesia.serving import decode as geodesia_decode
from kvverify.vestige.accounting import read_bytes, read_ledger
from kvverify.vestige.attend import prologue
from kvverify.vestige.calibration import conformal_archived, conformal_hard, entropy_gate, ladder, margins
from kvverify.vestige.index import calibrated_basis, index
from kvverify.vestige.partition import EvictionPolicy, Partition, append, archived, attended
from kvverify.vestige.salience import salience
from kvverify.vestige.step import Retrieval, decode

SETTINGS = stages.parameters("decide")
RESULTS = ("out", "lse", "level", "mass", "met", "resident", "pages", "read", "bound", "kept")


def geodesia(captured: dict[str, Tensor]) -> dict[str, Tensor]:
    """Serve the last queries from the compressed cache of every layer, at every rate."""
    settings, served = SETTINGS["geodesia"], SETTINGS["served"]
    layers = zip(*(stages.numbered(captured, name) for name in ("queries", "keys", "values")), strict=True)
    tensors: dict[str, Tensor] = {}
    for layer, (queries, *rows) in enumerate(layers):
        keys, values = (side.bfloat16() for side in rows)
        grouped = queries.unflatten(0, (keys.shape[0], -1))
        for rate in settings["rates"]:
            found = geodesia_decode(
                grouped[:, :, :-served],
                keys[:, :-served],
                values[:, :-served],
                grouped[:, :, -served:],
                keys[:, -served:],
                values[:, -served:],
                rates=(rate,) * served,
                chunk=1,
                scale=float(captured["scale"][layer]),
                block=settings["block"],
                group=settings["group"],
                decay=settings["decay"],
                sinks=settings["sinks"],
                window=settings["window"],
                residual=settings["residual"],
                page_fraction=settings["pages"],
            )
            tensors |= {f"geodesia.{rate}.{layer}.{name}": t for name, t in zip(RESULTS, found, strict=True)}
    return tensors


def vestige(captured: dict[str, Tensor]) -> dict[str, Tensor]:
    """Evict, index, calibrate and serve every layer of latents."""
    branch = int(captured["branch"])
    tensors: dict[str, Tensor] = {}
    for layer, (queries, keys) in enumerate(zip(*(stages.numbered(captured, n) for n in ("queries", "keys")))):
        # Captured rows are [branch ; content]; the policy's are [content ; branch].
        rows, asked = (torch.cat([t[..., branch:], t[..., :branch]], dim=-1) for t in (keys[0], queries))
        found = tiers(rows, asked.transpose(0, 1), branch, float(captured["scale"][layer]))
        tensors |= {f"vestige.{layer}.{name}": tensor for name, tensor in found.items()}
    return tensors


def tiers(rows: Tensor, queries: Tensor, branch: int, scale: float) -> dict[str, Tensor]:
    """Both tiers of one layer: rows[n, content + branch], queries[m, heads, content + branch] of the last tokens."""
    settings = SETTINGS["vestige"]
    content, side = rows.split([rows.shape[1] - branch, branch], dim=1)
    names = ("block", "bandwidth", "fraction", "sinks")
    partition = append(Partition(EvictionPolicy(**{name: settings[name] for name in names})), side)
    away = archived(partition)
    kept = torch.ones(len(rows), dtype=torch.bool)
    kept[away] = False
    flat = queries.flatten(0, 1)
    position = torch.arange(len(rows) - len(queries), len(rows)).repeat_interleave(queries.shape[1])
    basis = calibrated_basis(flat[:, : content.shape[1]], rank=settings["rank"])
    sketch, residual = index(content, basis)
    sample = margins(flat, position, rows, kept, sketch, residual, basis, scale=scale)
    rules = [rule(sample, recall=settings["recall"]) for rule in (ladder, conformal_hard, conformal_archived)]
    entropy = torch.stack([prologue(q, rows[kept], basis, scale=scale, value_dim=1).entropy for q in queries])
    theta = entropy_gate(entropy.flatten(), sample.hard, recall=settings["recall"])
    retrieval = Retrieval(basis, rules[-1], theta)
    entries = (sketch[away], residual[away], retrieval)
    steps = [decode(q, rows, attended(partition), away, *entries, scale=scale) for q in queries[-SETTINGS["served"] :]]
    fired = torch.stack([torch.isin(away, step.fetched) for step in steps])
    return {
        "salience": partition.salience,
        "salience_prefix": salience(side, bandwidth=settings["bandwidth"], block=None),
        "kept": partition.kept,
        "archived": away.int(),
        "residual": residual,
        "sketch_norm": torch.linalg.vector_norm(sketch, dim=1),
        "inflation": torch.tensor(rules, dtype=torch.float64),
        "theta": torch.tensor(theta, dtype=torch.float64),
        "fired": fired,
        "fetched": torch.tensor([len(step.fetched) for step in steps]),
        "out": torch.stack([step.out for step in steps]),
        "lse": torch.stack([step.lse for step in steps]),
        "entropy": entropy,
        "bytes": torch.tensor([read(partition, len(away), step.fetched, branch, content) for step in steps]),
    }


def read(partition: Partition, away: int, fetched: Tensor, branch: int, content: Tensor) -> list[int]:
    """Bytes that one step reads, in all and as published, at the deployed widths."""
    ledger = read_ledger(
        kept=int(partition.kept.sum()),
        tail=partition.rows - partition.closed,
        archived=away,
        fetched=len(fetched),
        rank=SETTINGS["vestige"]["rank"],
        content=content.shape[1],
        branch=branch,
    )
    return [int(read_bytes(ledger, published=published)) for published in (False, True)]
