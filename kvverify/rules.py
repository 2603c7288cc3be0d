"""What other comparison rules would have let through, on the same known-bad kernels.

Theory of operation
-------------------
Kernel tests commonly draw everything from N(0, 1) and compare with a fixed tolerance. `survey` measures what that
misses: each known-bad kernel of `attention.decode` runs on plain random cases and on the cases of this suite, and each
rule judges the same results, out and lse alike. The rules are

    allclose        |actual - truth| <= 1e-2 + 1e-2 |truth| everywhere
    abs and rel     no entry is off by more than 1e-2 absolutely and by more than 1e-2 relatively
    twice the peer  max|actual - truth| <= 2 max|peer - truth| + 1e-5
    gate            every claim of the operator, by the budget, under the adversities of the harness

A rule rejects a kernel if it rejects it on at least one case; a kernel that raises is rejected by all. The classical
rules see the case as it is; the gate runs its claims on it, which add pads, repeats and canaries of their own. The
equivalent kernels go through the same mill, since a rule that rejects one of those is no better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.attention.operators import DECODE, DecodeCase
from kvverify.cases import Case, Inputs, among, cases, generator
from kvverify.harness import as_outputs
from kvverify.operator import Control, Mutant, registry
from kvverify.search import attempt, draw

__all__ = ["RULES", "PlainCase", "Survey", "drawn_cases", "plain_cases", "survey", "table"]

TOLERANCE = 1e-2
PEER_FACTOR = 2
PEER_SLACK = 1e-5

Rule = Callable[[Tensor, Tensor, Tensor], bool]
"""Whether a rule accepts (actual, peer, truth), all float64 of one shape."""


@dataclass(frozen=True, repr=False)
class PlainCase(DecodeCase):
    """What kernel tests commonly draw: everything N(0, 1), a list of rows without pads, nothing in between."""

    dtype: str = among("bf16")
    listed: int = among(1024)
    heads: int = among(8)
    dim: int = among(64)
    value_dim: int = among(64)

    def build(self) -> Inputs:
        """Build a pool of twice the listed rows, all of them ordinary."""
        random = generator(self.seed)
        shapes = {
            "query": (self.heads, self.dim),
            "keys": (2 * self.listed, self.dim),
            "values": (2 * self.listed, self.value_dim),
        }
        drawn = {
            name: torch.randn(shape, generator=random, dtype=torch.float64).to(self.torch_dtype)
            for name, shape in shapes.items()
        }
        ids = torch.randperm(2 * self.listed, generator=random)[: self.listed]
        return Inputs({**drawn, "ids": ids}, {"scale": self.dim**-0.5})


def allclose(actual: Tensor, _peer: Tensor, truth: Tensor) -> bool:
    """|actual - truth| <= 1e-2 + 1e-2 |truth|, everywhere."""
    return torch.allclose(actual, truth, rtol=TOLERANCE, atol=TOLERANCE)


def abs_and_rel(actual: Tensor, _peer: Tensor, truth: Tensor) -> bool:
    """No entry is off by more than 1e-2 both absolutely and relatively; NaN is off."""
    error = (actual - truth).abs().masked_fill(actual == truth, 0.0)
    return bool(((error <= TOLERANCE) | (error <= TOLERANCE * truth.abs())).all())


def twice_the_peer(actual: Tensor, peer: Tensor, truth: Tensor) -> bool:
    """The largest error is at most twice that of the honest kernel, and a little slack."""
    mine, theirs = (
        (result - truth).abs().masked_fill(result == truth, 0.0).amax() if truth.numel() else torch.zeros(())
        for result in (actual, peer)
    )
    return bool(mine <= PEER_FACTOR * theirs + PEER_SLACK)


RULES: dict[str, Rule] = {"allclose": allclose, "abs and rel": abs_and_rel, "twice the peer": twice_the_peer}
"""The classical rules, in the order of the table; the gate comes last."""


@dataclass(frozen=True)
class Survey:
    """Which kernels each rule rejects on some cases. rejected: rule -> names; kernels: how many there were."""

    cases: int
    kernels: int
    rejected: dict[str, tuple[str, ...]]


def plain_cases(count: int, seed: int = 0) -> list[Case]:
    """Plain random cases, n = 1,024, one after the other."""
    return [PlainCase(seed=seed + number) for number in range(count)]


def drawn_cases(count: int, seed: int = 0) -> list[Case]:
    """The first different cases that the suite draws."""
    found: dict[str, Case] = {}
    draw(cases(DECODE.case), lambda case: found.update({repr(case): case}), seed=seed, examples=2 * count, shrink=False)
    return list(found.values())[:count]


def survey(kernels: Iterable[Mutant | Control], tested: Iterable[Case]) -> Survey:
    """Run every kernel on every case and let every rule judge the same results."""
    kernels, tested = tuple(kernels), tuple(tested)
    rejected: dict[str, list[str]] = {name: [] for name in (*RULES, "gate")}
    known = [_results(case) for case in tested]
    for kernel in kernels:
        actual = [_called_by_stranger(kernel.function, inputs) for inputs, _, _ in known]
        for name, rule in RULES.items():
            if not all(_accepts(rule, mine, peer, truth) for mine, (_, peer, truth) in zip(actual, known, strict=True)):
                rejected[name].append(kernel.name)
        if any(
            attempt(DECODE, claim, kernel.function, case, repeat_slow=False).violation
            for case in tested
            for claim in DECODE.claims.values()
        ):
            rejected["gate"].append(kernel.name)
    return Survey(len(tested), len(kernels), {name: tuple(names) for name, names in rejected.items()})


def _results(case: Case) -> tuple[Inputs, tuple[Tensor, ...], tuple[Tensor, ...]]:
    inputs = case.build()
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items() if tensor.is_floating_point()}
    return inputs, _call(DECODE.peer, inputs), _call(DECODE.oracle, inputs.replace(**wide))


def _call(function: Callable[..., object], inputs: Inputs) -> tuple[Tensor, ...]:
    copied = inputs.replace(**{name: tensor.clone() for name, tensor in inputs.tensors.items()})
    return tuple(tensor.double() for tensor in as_outputs(copied.call(function)))


def _called_by_stranger(function: Callable[..., object], inputs: Inputs) -> tuple[Tensor, ...] | None:
    try:
        return _call(function, inputs)
    except (ValueError, IndexError, RuntimeError):
        return None


def _accepts(
    rule: Rule, actual: tuple[Tensor, ...] | None, peer: tuple[Tensor, ...], truth: tuple[Tensor, ...]
) -> bool:
    return actual is not None and all(rule(*three) for three in zip(actual, peer, truth, strict=True))


def table(plain: int = 8, drawn: int = 40, seed: int = 0) -> list[str]:
    """The survey of all known-bad kernels of `attention.decode` as lines, for `kvverify mutants --rules`."""
    registry()
    lines = [f"attention.decode: {len(DECODE.mutants)} known-bad and {len(DECODE.controls)} equivalent kernels"]
    lines += [f"{'cases':<12} {'rule':<15} {'known-bad rejected':>19} {'equivalent rejected':>20}  lets through"]
    for kind, tested in (("N(0,1)", plain_cases(plain, seed)), ("ours", drawn_cases(drawn, seed))):
        bad, good = survey(DECODE.mutants.values(), tested), survey(DECODE.controls.values(), tested)
        for name in bad.rejected:
            escaped = [mutant for mutant in DECODE.mutants if mutant not in bad.rejected[name]]
            lines.append(
                f"{kind:<12} {name:<15} {f'{len(bad.rejected[name])} of {bad.kernels}':>19}"
                f" {f'{len(good.rejected[name])} of {good.kernels}':>20}  {', '.join(escaped) or '-'}"
            )
    return lines
