"""Phase relocation: take the phase of the source off a key, put the phase of the target on.

The budget of a rotation is taken pair by pair: fp32 arithmetic passes through quantities of the size of the pair,
about sixteen roundings of it for an inverse and a forward rotation with amplitudes, so `condition = 16 max|pair|`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs, generator
from kvverify.relay.cases import RelocateCase, factors, pairs_of
from kvverify.relay.operators import RELOCATE
from kvverify.relay.policy import rotate
from kvverify.run import Program, Run

__all__ = ["through"]

RELOCATION = "RoPERelay, phase relocation"
ROUNDINGS = 16
"""fp32 roundings of a pair on its way through an inverse and a forward rotation, amplitudes included."""


def moved(inputs: Inputs) -> Program:
    """Relocate, and look at the rotary pairs."""
    return lambda op: pairs_of(inputs.call(op), inputs.layout, inputs.rotary_dims)


def through(run: Run, program: Program) -> Tensor:
    """What fp32 passes through: sixteen times the size of each pair."""
    return ROUNDINGS * run.size(program)


def chained(inputs: Inputs, *places: tuple[Tensor, Tensor]) -> Program:
    """Relocate from the first place to the second, from there to the third, and so on."""

    def program(op: Callable[..., Any]) -> Tensor:
        keys = inputs.keys
        for old, new in pairwise(places):
            keys = op(keys, *old, *new, layout=inputs.layout, rotary_dims=inputs.rotary_dims)
        return pairs_of(keys, inputs.layout, inputs.rotary_dims)

    return program


def between(case: RelocateCase, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Factors of a third position for each row."""
    positions = torch.randint(0, 4096, (len(inputs.keys),), generator=generator(case.seed, stream=3))
    return factors(positions, inputs.cos_source.shape[1], case.amplitude)


def ends_of(inputs: Inputs) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The factors of source and target."""
    return (inputs.cos_source, inputs.sin_source), (inputs.cos_target, inputs.sin_target)


@RELOCATE.claim(evidence="exact", source=RELOCATION)
def passthrough(run: Run, case: RelocateCase) -> None:
    """Dims that do not rotate are returned bit for bit."""
    inputs = case.build()
    run.equal(lambda op: inputs.call(op)[:, inputs.rotary_dims :], inputs.keys[:, inputs.rotary_dims :], "passed dim")


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def relocation(run: Run, case: RelocateCase) -> None:
    """A key leaves with the phase of its source taken off and the phase of its target put on."""
    program = moved(case.build())
    run.close(program, condition=through(run, program))


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def identity(run: Run, case: RelocateCase) -> None:
    """Relocating to where a key already stands returns it within one rounding."""
    inputs = case.build()
    still = inputs.replace(cos_target=inputs.cos_source, sin_target=inputs.sin_source)
    stored = pairs_of(inputs.keys.double(), inputs.layout, inputs.rotary_dims)
    run.close(moved(still), truth=lambda _: stored, condition=through(run, moved(still)))


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def round_trip(run: Run, case: RelocateCase) -> None:
    """There and back again returns the key within two roundings."""
    inputs = case.build()
    source, target = ends_of(inputs)
    stored = pairs_of(inputs.keys.double(), inputs.layout, inputs.rotary_dims)
    there_and_back = chained(inputs, source, target, source)
    condition = 2 * through(run, there_and_back)
    run.close(there_and_back, truth=lambda _: stored, roundings=2, condition=condition)


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def composition(run: Run, case: RelocateCase) -> None:
    """From source over a third position to target equals from source to target."""
    inputs = case.build()
    source, target = ends_of(inputs)
    detour = chained(inputs, source, between(case, inputs), target)
    condition = 2 * through(run, detour)
    run.close(detour, truth=moved(inputs), roundings=2, condition=condition)


@RELOCATE.claim(evidence="budget", source="RoPERelay, independently constructed key references")
def reconstruct(run: Run, case: RelocateCase) -> None:
    """The key equals the unrotated projection rotated at the target position, which never saw the source."""
    inputs = case.build()
    _, _target = case.positions()
    cos, sin = (factor.double() for factor in ends_of(inputs)[1])
    built = rotate(case.projection(), cos, sin, layout=inputs.layout, rotary_dims=inputs.rotary_dims)
    expected = pairs_of(built, inputs.layout, inputs.rotary_dims)
    # Two roundings: the projection was stored once at its source.
    run.close(moved(inputs), truth=lambda _: expected, roundings=2, condition=through(run, moved(inputs)))


@RELOCATE.claim(evidence="budget", source="RoPERelay, static YaRN: division by c^2 + s^2 = a^2")
def amplitude(run: Run, case: RelocateCase) -> None:
    """The norm of a pair changes by target amplitude over source amplitude: not at all where they are equal."""
    inputs = case.build()
    source, target = ((cos.double().square() + sin.double().square()).sqrt() for cos, sin in ends_of(inputs))
    stored = pairs_of(inputs.keys.double(), inputs.layout, inputs.rotary_dims)
    expected = (stored.norm(dim=-1) * target / source)[..., None]

    def norms(op: Callable[..., Any]) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(moved(inputs)(op).double(), dim=-1, keepdim=True)
        return size

    run.close(norms, truth=lambda _: expected, condition=through(run, norms))


@RELOCATE.claim(evidence="budget", source="rotary embedding: scores depend on relative positions")
def relative(run: Run, case: RelocateCase) -> None:
    """Moving query and key on by 2,048 leaves every pair's share of the score, and its quadrature, as they were."""
    inputs = case.build()
    _, target = case.positions()
    pairs = inputs.cos_source.shape[1]
    query = torch.randn(pairs, 2, generator=generator(case.seed, stream=4), dtype=torch.float64)

    def shares(shift: int) -> Program:
        place = factors(target + shift, pairs, case.amplitude)
        turned = factors(target + shift + 100, pairs)
        cos, sin = (factor.double() for factor in turned)
        asked = torch.stack([query[:, 0] * cos - query[:, 1] * sin, query[:, 1] * cos + query[:, 0] * sin], -1)
        shifted = inputs.replace(cos_target=place[0], sin_target=place[1])

        def program(op: Callable[..., Any]) -> Tensor:
            key = moved(shifted)(op).double()
            along = asked[..., 0] * key[..., 0] + asked[..., 1] * key[..., 1]
            across = asked[..., 0] * key[..., 1] - asked[..., 1] * key[..., 0]
            return torch.stack([along, across], -1)

        return program

    # A rounded key moves (along, across) by up to sqrt(2) of its rounding, whatever its phase.
    run.close(shares(2048), truth=shares(0), roundings=2, condition=2 * through(run, shares(0)))


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def equivariant(run: Run, case: RelocateCase) -> None:
    """Rows in another order, with their positions, give the same keys in that order."""
    inputs = case.build()
    order = torch.randperm(len(inputs.keys), generator=generator(case.seed, stream=5))
    shuffled = Inputs({name: tensor[order] for name, tensor in inputs.tensors.items()}, inputs.static)
    program = moved(shuffled)
    run.close(program, truth=lambda op: moved(inputs)(op)[order], condition=through(run, program))


@RELOCATE.claim(evidence="budget", source=RELOCATION)
def one_rotation(run: Run, case: RelocateCase) -> None:
    """Where the amplitude is constant, inverse and forward rotation are one rotation by the distance moved."""
    inputs = replace(case, ratio=1.0).build()
    (cos_source, sin_source), (cos_target, sin_target) = (
        tuple(factor.double() for factor in place) for place in ends_of(inputs)
    )
    squared = (cos_source.square() + sin_source.square()) * (cos_target.square() + sin_target.square())
    cos = (cos_target * cos_source + sin_target * sin_source) / squared.sqrt()
    sin = (sin_target * cos_source - cos_target * sin_source) / squared.sqrt()
    turned = rotate(inputs.keys.double(), cos, sin, layout=inputs.layout, rotary_dims=inputs.rotary_dims)
    expected = pairs_of(turned, inputs.layout, inputs.rotary_dims)
    run.close(moved(inputs), truth=lambda _: expected, condition=through(run, moved(inputs)))
