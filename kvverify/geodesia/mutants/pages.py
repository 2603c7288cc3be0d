"""Known-bad and equivalent kernels: the exact residual and page summaries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.geodesia import policy
from kvverify.geodesia.cases import (
    BoxCase,
    RankPagesCase,
    ResidualCase,
)
from kvverify.geodesia.operators import (
    BOX,
    RANK_PAGES,
    RESIDUAL,
)
from kvverify.geodesia.residual import salience

__all__: list[str] = []


@RESIDUAL.mutant("residual_topk", case=ResidualCase(mass="peaked"))
def keeps_the_largest_masses(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    return mass.sort(descending=True, stable=True).indices[:count]


@RESIDUAL.mutant("residual_topk", case=ResidualCase(mass="peaked"))
def forgets_the_masses(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    return policy.residual(torch.ones_like(mass), values, block=block, count=count)


@RESIDUAL.mutant("residual_topk", case=ResidualCase(regime="offset", tokens=65))
def mean_of_a_padded_block(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % block)).double()
    mean = padded.reshape(-1, block, values.shape[1]).mean(1).repeat_interleave(block, 0)[: len(values)]
    score = mass.double() * (values.double() - mean).square().sum(1)
    return score.sort(descending=True, stable=True).indices[:count]


@RESIDUAL.mutant("residual_topk", case=ResidualCase(regime="offset"))
def distance_from_zero(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    return policy.residual(mass, torch.cat([values, -values]), block=len(values), count=count)


@RESIDUAL.mutant("residual_topk", case=ResidualCase(count=5))
def keeps_the_best_token_twice(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    ids = policy.residual(mass, values, block=block, count=count)
    return torch.cat([ids[:-1], ids[:1]]) if count > 1 else ids


@RESIDUAL.mutant("residual_topk", case=ResidualCase(tokens=130))
def published_form_without_saying_so(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    score = salience(mass, values, block=block)
    score[len(score) - min(64, len(score)) :] = torch.inf
    return score.sort(descending=True, stable=True).indices[:count]


@RESIDUAL.control
def last_of_equal_tokens_first(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    """Another tie order, and the ids in order of score."""
    score = salience(mass, values, block=block)
    return len(score) - 1 - score.flip(0).sort(descending=True, stable=True).indices[:count]


@RESIDUAL.control
def salience_in_single_precision(mass: Tensor, values: Tensor, *, block: int, count: int) -> Tensor:
    """Means and distances in fp32."""
    wide = values.float()
    mean = torch.cat([rows.mean(0, keepdim=True).expand_as(rows) for rows in wide.split(block)]) if len(wide) else wide
    score = mass.float() * (wide - mean).square().sum(1)
    return score.sort(descending=True, stable=True).indices[:count]


@BOX.mutant("box_contains", "box_outward", case=BoxCase(regime="offset"))
def box_rounded_to_nearest(keys: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    rows = torch.split(keys, block) if len(keys) else ()
    low, high = ([getattr(part, side)(0) for part in rows] for side in ("amin", "amax"))
    if not rows:
        return policy.box(keys, block=block)
    return torch.stack(low).half(), torch.stack(high).half()


@BOX.mutant("box_contains", case=BoxCase(regime="normal"))
def box_of_quantized_keys(keys: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """The stored keys of 2 bits, which do not reach to the largest ones."""
    low, high = policy.box(keys, block=block)
    middle, half = (high.float() + low.float()) / 2, (high.float() - low.float()) / 2
    return (middle - 0.9 * half).half(), (middle + 0.9 * half).half()


@BOX.mutant("box_outward")
def padding_rows_count_as_keys(keys: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    return policy.box(torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % block)), block=block)


@BOX.mutant("box_outward", case=BoxCase(regime="loud"))
def one_box_for_all_channels(keys: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    low, high = policy.box(keys, block=block)
    return low.amin(-1, keepdim=True).expand_as(low).clone(), high.amax(-1, keepdim=True).expand_as(high).clone()


@BOX.control
def box_by_sorting(keys: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """Extremes of sorted keys, rounded outward by comparison in fp32."""
    if not len(keys):
        return policy.box(keys, block=block)
    ends = [part.float().sort(0).values[[0, -1]] for part in torch.split(keys, block)]
    found = []
    for side, toward in ((0, -torch.inf), (1, torch.inf)):
        exact = torch.stack([end[side] for end in ends])
        near = exact.half()
        short = near.float() > exact if side == 0 else near.float() < exact
        found.append(torch.where(short, torch.nextafter(near, torch.full_like(near, toward)), near))
    return found[0], found[1]


def ranked(score: Tensor, keep: int) -> Tensor:
    """The pages of largest score."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :keep]


@RANK_PAGES.mutant("best_pages", "box_bound", case=RankPagesCase(pages=2, regime="spread", keep=1))
def ranks_by_centres(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    return ranked(query.double() @ (low.double() + high.double()).T, keep)


@RANK_PAGES.mutant("best_pages", "box_bound", case=RankPagesCase(seed=3))
def takes_the_smaller_product(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    return policy.rank_pages(query, high, low, keep=keep, scale=scale)


@RANK_PAGES.mutant("best_pages", case=RankPagesCase(heads=7))
def all_heads_read_the_pages_of_the_first(
    query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float
) -> Tensor:
    return policy.rank_pages(query[:1].expand_as(query), low, high, keep=keep, scale=scale)


@RANK_PAGES.mutant("best_pages")
def keeps_the_best_page_twice(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    pages = policy.rank_pages(query, low, high, keep=keep, scale=scale)
    return torch.cat([pages[:, :-1], pages[:, :1]], 1) if keep > 1 else pages


@RANK_PAGES.mutant("best_pages")
def keeps_the_first_pages(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    return torch.arange(keep).expand(len(query), keep).clone()


@RANK_PAGES.control
def by_centre_and_half_width(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    """The same bound as q . centre + |q| . half width."""
    wide, centre, half = query.double(), (high.double() + low.double()) / 2, (high.double() - low.double()) / 2
    return ranked(scale * (wide @ centre.T + wide.abs() @ half.T), keep)


@RANK_PAGES.control
def last_of_equal_pages_first(query: Tensor, low: Tensor, high: Tensor, *, keep: int, scale: float) -> Tensor:
    """fp32, and another tie order."""
    wide = query.float()
    score = scale * (wide.clamp(min=0) @ high.float().T + wide.clamp(max=0) @ low.float().T)
    return len(low) - 1 - ranked(score.flip(1), keep)
