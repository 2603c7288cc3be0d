"""Salience and selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.budget import FP32_EPSILON
from kvverify.cases import Inputs
from kvverify.run import Run
from kvverify.vestige.cases import SalienceCase, SelectCase
from kvverify.vestige.operators import SALIENCE, SELECT
from kvverify.vestige.policy import salience
from kvverify.vestige.salience import low_band_basis
from kvverify.vestige.selection import selection_fault

__all__: list[str] = []

SPECTRUM = "VestigeKV equation 3, salience"
SELECTION = "VestigeKV section 4.1, selection"


# Salience


def windows_of(case: SalienceCase, branch: Tensor) -> Tensor:
    """The branch by windows of the transform, float64[windows, span, columns]."""
    return branch.double().reshape(-1, case.span, case.columns)


def salience_condition(case: SalienceCase, branch: Tensor) -> Tensor:
    """What fp32 passes through, per row: the row, and its share of the window, once per level of the transform."""
    windows = windows_of(case, branch)
    share = windows.square().sum((1, 2)).div(case.span).sqrt()
    levels = 4 + 2 * math.log2(case.span)
    through: Tensor = levels * (windows.norm(dim=2) + share[:, None]).flatten()
    return through


def rounding_seen(case: SalienceCase, stored: Tensor, meant: Tensor) -> Tensor:
    """What storing a branch may do to the salience of a row, as a condition: the salience of the rounding errors."""
    seen: Tensor = salience(stored.double() - meant, bandwidth=case.bandwidth, block=case.block) / FP32_EPSILON
    return seen


@SALIENCE.claim(evidence="budget", source=SPECTRUM)
def high_band(run: Run, case: SalienceCase) -> None:
    """sigma is the norm of what the branch of a row has in the bins from `bandwidth` up."""
    inputs = case.build()
    run.close(inputs.call, condition=salience_condition(case, inputs.branch))


@SALIENCE.claim(evidence="budget", source="Parseval's identity")
def band_energy(run: Run, case: SalienceCase) -> None:
    """The squares of sigma sum to the energy of the window above the band."""
    inputs = replace(case, windows=max(case.windows, 1)).build()
    spectrum = torch.fft.rfft(windows_of(case, inputs.branch), dim=1).abs().square()
    twice = torch.full((spectrum.shape[1],), 2.0, dtype=torch.float64)
    twice[0] = 1
    if case.span % 2 == 0:
        twice[-1] = 1  # the highest bin of an even window is its own mirror image
    above = (spectrum * twice[:, None])[:, case.bandwidth :].sum((1, 2)).div(case.span).sqrt()

    def energy(op: Callable[..., Any]) -> Tensor:
        norm: Tensor = inputs.call(op).double().reshape(-1, case.span).norm(dim=1)
        return norm

    through = salience_condition(case, inputs.branch).reshape(-1, case.span).norm(dim=1)
    run.close(energy, truth=lambda _: above, condition=through)


@SALIENCE.claim(evidence="budget", source=SPECTRUM)
def low_band_is_invisible(run: Run, case: SalienceCase) -> None:
    """Adding a signal below the band, such as a constant or a slow trend, changes no sigma."""
    inputs = case.build()
    meant = inputs.branch.double() + 2 + 3 * case.tone(min(case.bandwidth - 1, case.span // 2))
    stored = meant.to(case.torch_dtype)
    through = salience_condition(case, stored) + rounding_seen(case, stored, meant)
    run.close(inputs.replace(branch=stored).call, truth=inputs.call, condition=through)


@SALIENCE.claim(evidence="budget", source=SPECTRUM)
def band_edge(run: Run, case: SalienceCase) -> None:
    """A tone in bin bandwidth - 1 has sigma 0, a tone in bin `bandwidth` its whole norm."""
    below, above = case.tone(case.bandwidth - 1), case.tone(case.bandwidth)
    everything_is_low = 2 * case.bandwidth > case.span
    expected = torch.cat([torch.zeros(case.rows), above.norm(dim=1) * (not everything_is_low)]).double()
    stored = [tone.to(case.torch_dtype) for tone in (below, above)]
    static = case.build().static

    def both(op: Callable[..., Any]) -> Tensor:
        return torch.cat([Inputs({"branch": tone}, static).call(op) for tone in stored])

    through = [
        salience_condition(case, tone) + rounding_seen(case, tone, meant)
        for tone, meant in zip(stored, (below, above), strict=True)
    ]
    run.close(both, truth=lambda _: expected, condition=torch.cat(through))


@SALIENCE.claim(evidence="budget", source=SPECTRUM)
def shift(run: Run, case: SalienceCase) -> None:
    """Turning the rows of every window in a circle turns their sigma with them."""
    inputs = case.build()

    def turned(rows: Tensor) -> Tensor:
        return rows.reshape(-1, case.span, *rows.shape[1:]).roll(5, 1).reshape(rows.shape)

    moved = inputs.replace(branch=turned(inputs.branch))
    through = salience_condition(case, moved.branch)
    run.close(moved.call, truth=lambda op: turned(inputs.call(op)), condition=through)


@SALIENCE.claim(evidence="budget", source=SPECTRUM)
def homogeneous(run: Run, case: SalienceCase) -> None:
    """Four times the branch has four times the sigma."""
    inputs = case.build()
    scaled = inputs.replace(branch=inputs.branch * 4)  # a power of two, which no storage dtype rounds
    through = salience_condition(case, scaled.branch)
    run.close(scaled.call, truth=lambda op: 4 * inputs.call(op), condition=through)


@SALIENCE.claim(evidence="budget", source="closed form, derived for this project from equation 3")
def closed_form(run: Run, case: SalienceCase) -> None:
    """sigma = || R - A A^T R || by rows, A the orthonormal basis of the 2 bandwidth - 1 low waves of the window."""
    inputs = case.build()
    windows = windows_of(case, inputs.branch)
    rest = torch.zeros_like(windows)
    if 2 * case.bandwidth <= case.span:
        basis = low_band_basis(case.span, case.bandwidth)
        rest = windows - basis @ (basis.T @ windows)
    expected = rest.norm(dim=2).flatten()
    run.close(inputs.call, truth=lambda _: expected, condition=salience_condition(case, inputs.branch))


@SALIENCE.claim(evidence="exact", source="VestigeKV, deployed block form")
def immutable(run: Run, case: SalienceCase) -> None:
    """In block form every block has, to the bit, the sigma that it has alone: closing further blocks changes none."""
    blocks = replace(case, form="block", windows=max(case.windows, 2))
    inputs = blocks.build()
    alone = [inputs.replace(branch=part).call(run.impl) for part in inputs.branch.split(case.window)]
    run.equal(inputs.call, torch.cat(alone), "salience")


# Selection


@SELECT.claim(evidence="exact", source=SELECTION)
def top(run: Run, case: SelectCase) -> None:
    """The kept rows are the `keep` largest of all closed rows and the sinks, under some tie-break."""
    inputs = case.build()
    run.valid(inputs.call, lambda mask: selection_fault(mask, inputs.salience, keep=case.keep, sinks=case.sinks))


@SELECT.claim(evidence="exact", source=SELECTION)
def count(run: Run, case: SelectCase) -> None:
    """Sinks are not counted in m: at least m and at most m + sinks rows are kept."""
    inputs = case.build()

    def fault(mask: Tensor) -> str | None:
        most = min(case.keep + case.sinks, case.rows)
        kept = int(mask.sum())
        return None if case.keep <= kept <= most else f"{kept} rows are kept: expected {case.keep} to {most}"

    run.valid(inputs.call, fault)


@SELECT.claim(evidence="exact", source=SELECTION)
def sinks(run: Run, case: SelectCase) -> None:
    """The first rows are kept whatever their salience."""
    inputs = case.build()
    expected = torch.ones(min(case.sinks, case.rows), dtype=torch.bool)
    run.equal(lambda op: inputs.call(op)[: case.sinks], expected, "sink is kept")


@SELECT.claim(evidence="exact", source="VestigeKV, 'the eviction decision is final'", status="corrected")
def final_for_fixed_count(run: Run, case: SelectCase) -> None:
    """With m fixed, a row that a prefix did not keep is never kept later.

    The paper says it without the condition. The deployed m grows with the closed rows, and then rows come back: a row
    of rank m + 1 is kept as soon as m has grown past it. Proof for fixed m: m rows of the prefix are larger, and they
    stay so.
    """
    inputs = replace(case, regime="distinct").build()
    half = case.rows // 2
    keep = min(case.keep, half)
    prefix = Inputs({"salience": inputs.salience[:half].clone()}, {"keep": keep, "sinks": case.sinks})

    def both(op: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        return prefix.call(op), inputs.replace(keep=keep).call(op)

    def fault(early: Tensor, late: Tensor) -> str | None:
        back = (~early & late[:half]).nonzero()
        return f"row {int(back[0])} was left out of the prefix and is kept now" if len(back) else None

    run.valid(both, fault)
