"""Does the needle survive tier 1? Intact rates by policy, by branch width, on the RoPE twin, and with many needles.

A needle is intact iff the answer loses less than 1 nat against the full cache. Trials that the full cache does not
answer are dropped; a run that drops more than two is void. Tier 2 is off: with it on, any tier 1 passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvverify.experiments.results import Chart, Result
from kvverify.experiments.vestige_trials import (
    TIER_ONE,
    TierOne,
    answer_loss,
    attend_all,
    attend_kept,
    by_salience,
    question_trials,
    stay,
)
from kvverify.models.latents import Latents
from kvverify.models.needles import load
from kvverify.vestige.calibration import wilson_interval

__all__ = ["ALLOWED_DROPS", "INTACT", "branch_width", "multiple_needles", "needle_rates", "rope_twin"]

INTACT = 1.0
ALLOWED_DROPS = 2
COMPRESSIONS = (8, 32, 128)
RATE_COLUMNS = (
    "compression",
    "intact",
    "trials",
    "rate",
    "low",
    "high",
    "needle kept, layer 0",
    "needle kept, layer 1",
)
RATE_CHART = Chart("compression", "rate", "policy", "low", "high")


@dataclass
class _Tally:
    """Counts of one row of a table."""

    intact: int = 0
    trials: int = 0
    held: tuple[int, ...] = ()

    def add(self, lost: float, held: tuple[bool, ...]) -> None:
        self.intact += lost < INTACT
        self.trials += 1
        self.held = tuple(map(sum, zip(self.held or (0,) * len(held), held, strict=True)))

    def cells(self) -> tuple[int | float | None, ...]:
        """Intact, trials, rate, Wilson ends, and the share of needles kept in each of the two layers."""
        if self.trials == 0:
            return (0, 0, None, None, None, None, None)
        low, high = wilson_interval(self.intact, self.trials)
        return (
            self.intact,
            self.trials,
            self.intact / self.trials,
            low,
            high,
            *(count / self.trials for count in self.held),
        )


def needle_rates(*, trials: int, tokens: int = 4096) -> Result:
    """(a) Intact rate of one needle for every tier 1 at 8x, 32x and 128x."""
    rows, notes = _rates(load("nope"), TIER_ONE, trials=trials, tokens=tokens)
    return Result(
        f"Needles intact after tier 1, {tokens} tokens, NoPE",
        ("policy", *RATE_COLUMNS),
        rows,
        RATE_CHART,
        {"tokens": tokens, "trials": trials},
        notes,
    )


def branch_width(*, trials: int, tokens: int = 4096) -> Result:
    """(c) The same at 32x where the salience sees the branch through its leading principal components only."""
    tiers = {f"{width} of 16": by_salience(_leading(width), bandwidth=4) for width in (1, 2, 4, 8, 16)}
    rows, notes = _rates(load("nope"), tiers, trials=trials, tokens=tokens, compressions=(32, 128))
    return Result(
        f"Needles intact by width of the branch, {tokens} tokens",
        ("policy", *RATE_COLUMNS),
        rows,
        RATE_CHART,
        {"tokens": tokens, "trials": trials, "bandwidth": 4},
        notes,
    )


def rope_twin(*, trials: int, tokens: int = 4096) -> Result:
    """(d) The operator of (a) on the RoPE twin, whose cached branch is rotated, beside the NoPE model."""
    chosen = ("branch, 4 bins", "branch, 16 bins", "full row, 4 bins", "random")
    tiers = {name: TIER_ONE[name] for name in chosen}
    rows, notes = [], []
    for position in ("nope", "rope"):
        found, said = _rates(load(position), tiers, trials=trials, tokens=tokens)
        rows += [(f"{position}: {row[0]}", *row[1:]) for row in found]
        notes += [f"{position}: {note}" for note in said]
    return Result(
        f"The same tier 1 with and without rotary position, {tokens} tokens",
        ("policy", *RATE_COLUMNS),
        tuple(rows),
        RATE_CHART,
        {"tokens": tokens, "trials": trials},
        tuple(notes),
    )


def multiple_needles(*, trials: int, tokens: int = 4096) -> Result:
    """(e) Haystacks of 1 to 32 needles, each asked for; a trial is one question."""
    model = load("nope")
    tiers = {name: TIER_ONE[name] for name in ("branch, 4 bins", "full row, 4 bins", "H2O", "random")}
    rows, notes = [], []
    for needles in (1, 8, 16, 32):
        stacks = max(1, trials // needles)
        found, said = _rates(model, tiers, trials=stacks, tokens=tokens, needles=needles, compressions=(32, 128))
        rows += [(needles, *row) for row in found]
        notes += [f"{needles} needles: {note}" for note in said]
    return Result(
        f"Needles intact by number of needles, {tokens} tokens",
        ("needles", "policy", *RATE_COLUMNS),
        tuple(rows),
        Chart("needles", "rate", "policy", "low", "high"),
        {"tokens": tokens, "trials": trials},
        tuple(notes),
    )


def _leading(width: int) -> Callable[[Latents], Tensor]:
    """The branch seen through its `width` leading principal components over the prefix."""

    def side(layer: Latents) -> Tensor:
        centred = layer.branch.double() - layer.branch.double().mean(dim=0)
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        projected: Tensor = layer.branch.double() @ vectors[:, -width:]
        return projected

    return side


def _rates(
    model: Any,
    tiers: Mapping[str, TierOne],
    *,
    trials: int,
    tokens: int,
    needles: int = 1,
    compressions: tuple[int, ...] = COMPRESSIONS,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[str, ...]]:
    tally = {(name, compression): _Tally() for name in tiers for compression in compressions}
    dropped = 0
    for trial in question_trials(model, trials=trials, tokens=tokens, needles=needles):
        full = [answer_loss(model, trial, needle, attend_all(trial.prefix)) for needle in range(needles)]
        answered = [needle for needle in range(needles) if full[needle][1]]
        dropped += needles - len(answered)
        for name, tier in tiers.items():
            for compression, kept in stay(tier, trial, compressions).items():
                for needle in answered:
                    loss, _ = answer_loss(model, trial, needle, attend_kept(trial.prefix, kept))
                    held = tuple(bool(mask[trial.position[needle]]) for mask in kept)
                    tally[name, compression].add(loss - full[needle][0], held)
    notes = [f"{dropped} of {trials * needles} questions dropped: the full cache does not answer them."]
    if dropped > ALLOWED_DROPS:
        notes.append(f"Void by the protocol, which allows {ALLOWED_DROPS} drops; reported as measured.")
    return tuple((name, compression, *row.cells()) for (name, compression), row in tally.items()), tuple(notes)
