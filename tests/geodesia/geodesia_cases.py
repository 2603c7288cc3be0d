"""Small shared pieces of the Geodesia tests: settings, geometries, data, and roundoff bounds for attention."""

import torch
from hypothesis import settings

from kvverify.geodesia.accounting import Geometry

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
SMALL = Geometry(dim=8, block=8, group=8, kv_heads=2)
GROUPED = Geometry(dim=16, block=16, group=8, kv_heads=2)


def quick(examples):
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(query, keys, values, *, scale):
    """Attention of [kv, group, dim] queries over [kv, tokens, dim] rows in float64."""
    scores = scale * torch.einsum("hgd,htd->hgt", query.double(), keys.double())
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


def roundoff(query, keys, values, *, scale, dtype=torch.float64):
    """Bounds (output, LSE) of the error of attention computed in `dtype`.

    A score of `dim` products is off by (dim + 2) u |q||k| scale; a relative error e in every weight moves the output by
    2 e max|v|; the sums over the tokens add tokens * u. All doubled for the second, equally exact, computation.
    """
    unit, dim, tokens = UNIT[dtype], keys.shape[-1], keys.shape[-2]
    reach = scale * float(query.double().norm(dim=-1).max() * keys.double().norm(dim=-1).max())
    score = (dim + 2) * unit * reach
    weight = 2 * score + (tokens + 8) * unit * (1 + reach)
    return 4 * weight * float(values.double().abs().max()), 2 * (score + weight)
