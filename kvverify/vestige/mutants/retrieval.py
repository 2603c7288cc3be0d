"""Index and scan that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.vestige.cases import IndexCase, ScanCase
from kvverify.vestige.index import query_parts
from kvverify.vestige.operators import INDEX, SCAN
from kvverify.vestige.policy import index, scan
from kvverify.vestige.scan import archive_scores, sound_inflation

__all__: list[str] = []

Pair = tuple[Tensor, Tensor]
BLOCK = 64


# The index


@INDEX.mutant("entry", "index_identity")
def residual_is_squared(content: Tensor, basis: Tensor) -> Pair:
    sketch, residual = index(0.01 * content.float(), basis)
    return 100 * sketch.float(), residual.square()


@INDEX.mutant("entry", "index_identity", case=IndexCase(regime="outside"))
def residual_is_zero(content: Tensor, basis: Tensor) -> Pair:
    sketch, residual = index(content, basis)
    return sketch, torch.zeros_like(residual)


@INDEX.mutant("entry")
def residual_is_the_norm_of_the_row(content: Tensor, basis: Tensor) -> Pair:
    return index(content, basis)[0], content.float().norm(dim=1)


@INDEX.mutant("entry", case=IndexCase(regime="inside"))
def residual_by_pythagoras(content: Tensor, basis: Tensor) -> Pair:
    wide = content.float()
    squared = wide.square().sum(1) - (wide @ basis.T).square().sum(1)
    return index(content, basis)[0], squared.clamp(min=0).sqrt()


@INDEX.mutant("entry")
def residual_in_half_precision(content: Tensor, basis: Tensor) -> Pair:
    sketch, residual = index(content, basis)
    return sketch, residual.half().float()


@INDEX.mutant("entry")
def sketch_in_bf16(content: Tensor, basis: Tensor) -> Pair:
    sketch, residual = index(content, basis)
    return sketch.bfloat16().half(), residual


@INDEX.mutant("entry", "index_identity")
def basis_is_the_identity(content: Tensor, basis: Tensor) -> Pair:
    return index(content, torch.eye(*basis.shape))


@INDEX.mutant("entry", "index_identity", case=IndexCase(regime="inside"))
def basis_is_not_orthonormal(content: Tensor, basis: Tensor) -> Pair:
    return index(content, basis / 2)


@INDEX.mutant("entry", "index_identity")
def centres_the_content(content: Tensor, basis: Tensor) -> Pair:
    return index(content - content.float().mean(0), basis)


@INDEX.mutant("entry", "index_identity", case=IndexCase(rows=65))
def skips_the_partial_block(content: Tensor, basis: Tensor) -> Pair:
    sketch, residual = index(content, basis)
    whole = len(content) // BLOCK * BLOCK if len(content) > BLOCK else len(content)
    sketch[whole:], residual[whole:] = 0, 0
    return sketch, residual


@INDEX.control
def entries_in_double_precision(content: Tensor, basis: Tensor) -> Pair:
    """float64, with the sketch left in fp32."""
    sketch, residual = index(content.double(), basis.double())
    return sketch.float(), residual.float()


@INDEX.control
def entries_row_by_row(content: Tensor, basis: Tensor) -> Pair:
    """One row at a time, as they are archived."""
    entries = [index(row[None], basis) for row in content]
    if not entries:
        return index(content, basis)
    sketch, residual = (torch.cat(side) for side in zip(*entries, strict=True))
    return sketch, residual


# The scan

SCAN_NAMES = ("query", "side", "sketch", "residual", "basis", "threshold")


def arguments(args: tuple[Tensor, ...], scale: float, inflation: float) -> Inputs:
    """The arguments by name."""
    return Inputs(dict(zip(SCAN_NAMES, args, strict=True)), {"scale": scale, "inflation": inflation})


def rescanned(args: tuple[Tensor, ...], scale: float, inflation: float, **changes: Any) -> Tensor:
    """The reference, with some arguments exchanged."""
    fired: Tensor = arguments(args, scale, inflation).replace(**changes).call(scan)
    return fired


def margins(args: tuple[Tensor, ...], scale: float, inflation: float) -> Tensor:
    """Score, inflated certificate included, less threshold: [heads, archived]."""
    known, certificate = archive_scores(*args[:5], scale=scale)
    return known + inflation * certificate - args[5][:, None]


def root(args: tuple[Tensor, ...]) -> float:
    """sqrt(content - rank), which the certificate is divided by."""
    return max(sound_inflation(args[4].shape[1], args[4].shape[0]), 1.0)


def positions(mask: Tensor) -> Tensor:
    """Where a mask is set."""
    return mask.nonzero().flatten()


@SCAN.mutant("sound_fetch", "fires", case=ScanCase(regime="aligned", heads=1, archived=300))
def forgets_the_certificate(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, 0.0)


@SCAN.mutant("fires", "deployed_clamp_misses", case=ScanCase(inflation=8.0))
def certificate_without_the_root(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation * root(args))


@SCAN.mutant("fires", "sound_fetch", case=ScanCase(regime="aligned", heads=1, archived=300, inflation="sound"))
def certificate_with_the_root_twice(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation / root(args))


@SCAN.mutant("deployed_clamp_misses")
def clamps_the_inflation_at_eight(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return scan(*args, scale=scale, inflation=min(inflation, 8.0))


@SCAN.mutant("fires")
def certificate_without_the_query(*args: Tensor, scale: float, inflation: float) -> Tensor:
    spread = scale * inflation / root(args) * args[3]
    return positions((margins(args, scale, 0.0) + spread > 0).any(0))


@SCAN.mutant("fires")
def forgets_the_branch(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation, side=torch.zeros_like(args[1]))


@SCAN.mutant("fires", case=ScanCase(regime="two heads"))
def one_threshold_for_all_heads(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation, threshold=args[5].amax().expand_as(args[5]))


@SCAN.mutant("fires", case=ScanCase(regime="two heads"))
def every_head_must_ask(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return positions((margins(args, scale, inflation) > 0).all(0))


@SCAN.mutant("fires", case=ScanCase(heads=7))
def only_the_first_head_asks(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation, query=args[0][:1], threshold=args[5][:1])


@SCAN.mutant("strict")
def fires_on_equality(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return positions((margins(args, scale, inflation) >= 0).any(0))


@SCAN.mutant("gates", "fires", case=ScanCase(thresholds="one closed"))
def a_closed_gate_is_minus_infinity(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation, threshold=torch.where(args[5] == torch.inf, -torch.inf, args[5]))


@SCAN.mutant("gates", case=ScanCase(thresholds="one open"))
def an_empty_kept_set_is_nan(*args: Tensor, scale: float, inflation: float) -> Tensor:
    # s* less s*, as a running maximum forms it: NaN for -inf, and no comparison with NaN holds.
    still = (args[5] - args[5])[:, None]
    return positions((margins(args, scale, inflation) > still).any(0))


@SCAN.mutant("fires")
def fires_once_per_head(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return (margins(args, scale, inflation) > 0).nonzero()[:, 1]


@SCAN.mutant("fires", "gates", case=ScanCase(regime="negative"))
def padded_rows_fire(*args: Tensor, scale: float, inflation: float) -> Tensor:
    short = -len(args[1]) % BLOCK
    side, sketch, residual = (torch.cat([tensor, tensor.new_zeros(short, *tensor.shape[1:])]) for tensor in args[1:4])
    return rescanned(args, scale, inflation, side=side, sketch=sketch, residual=residual)


@SCAN.mutant("fires", case=ScanCase(archived=65))
def skips_the_partial_block_of_the_archive(*args: Tensor, scale: float, inflation: float) -> Tensor:
    fired = rescanned(args, scale, inflation)
    return fired[fired < len(args[1]) // BLOCK * BLOCK] if len(args[1]) > BLOCK else fired


@SCAN.mutant("fires", "archive_order")
def counts_positions_from_one(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation) + 1


@SCAN.mutant("fires", "archive_order")
def truncates_silently(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return rescanned(args, scale, inflation)[:2]


@SCAN.mutant("fires", "archive_order", case=ScanCase(archived=64))
def gives_ranks_for_positions(*args: Tensor, scale: float, inflation: float) -> Tensor:
    return torch.arange(len(rescanned(args, scale, inflation)))


@SCAN.mutant("fires", case=ScanCase(archived=300, seed=1))
def scores_in_bf16(*args: Tensor, scale: float, inflation: float) -> Tensor:
    rounded = [tensor.bfloat16().float() for tensor in args[:5]]
    return rescanned((*rounded, args[5]), scale, inflation)


@SCAN.control
def scan_in_double_precision(*args: Tensor, scale: float, inflation: float) -> Tensor:
    """float64, positions from the end of the archive."""
    return rescanned(tuple(tensor.double() for tensor in args), scale, inflation).flip(0)


@SCAN.control
def scan_by_margins(*args: Tensor, scale: float, inflation: float) -> Tensor:
    """Head by head in fp32, with the scale in the query and one concatenated product."""
    query, side, sketch, residual, basis, threshold = (tensor.float() for tensor in args)
    asked, outside = query_parts(query, basis)
    content, rank = basis.shape[1], basis.shape[0]
    spread = inflation / sound_inflation(content, rank) if rank < content else 0.0
    entries = torch.cat([side, sketch, residual[:, None]], dim=1)
    wanted = scale * torch.cat([query[:, content:], asked, spread * outside[:, None]], dim=1)
    fired = torch.zeros(len(side), dtype=torch.bool)
    for head in range(len(query)):
        fired |= entries @ wanted[head] > threshold[head]
    return positions(fired)
