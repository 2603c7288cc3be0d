"""The quantizer and its stored format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.geodesia.cases import (
    DequantizeCase,
    PackCase,
    QuantizeCase,
)
from kvverify.geodesia.ladder import HALF_MAX, STEP_RATIO, requantize, unpack
from kvverify.geodesia.operators import (
    DEQUANTIZE,
    PACK,
    QUANTIZE,
)
from kvverify.geodesia.validity import FP32_EPSILON
from kvverify.run import Run

__all__: list[str] = []

QUANTIZER = "Geodesia-KV, quantizer"
LADDER_SOURCE = "Geodesia-KV, ladder of precisions"


def grouped(tensor: Tensor, case: QuantizeCase) -> Tensor:
    """View [tokens, dim] as [groups, members, other], float64."""
    along = tensor if case.axis == "token" else tensor.T
    return along.double().reshape(len(along) // case.members, case.members, along.shape[1])


def decoded(codes: Tensor, lo: Tensor, step: Tensor, case: QuantizeCase) -> Tensor:
    """The stored format in float64 [groups, members, other], where code * step is exact."""
    return grouped(codes, case) * (step.double() * STEP_RATIO[case.bits])[:, None] + lo.double()[:, None]


def first(fault: Tensor, tell: Callable[..., str]) -> str | None:
    """The first place where a fault is true, told by `tell(*place)`."""
    if not fault.any():
        return None
    place = tuple(int(i) for i in fault.nonzero()[0])
    return f"{tell(*place)} ({int(fault.sum())} of {fault.numel()})"


def well_stored(codes: Tensor, lo: Tensor, step: Tensor, case: QuantizeCase) -> str | None:
    """Whether codes and scales are what the format allows: fp16 scales, one for each group, codes below 2^bits."""
    along = codes if case.axis == "token" else codes.T
    shape = (len(along) // case.members, along.shape[1])
    for name, plane in (("lo", lo), ("step", step)):
        if plane.dtype != torch.float16 or tuple(plane.shape) != shape:
            return f"{name} is {plane.dtype} {list(plane.shape)}: expected float16 {list(shape)}, one scale a group"
        if not plane.isfinite().all():
            return f"{name} holds NaN or inf"
    return first(
        codes.int() >= 2**case.bits, lambda *at: f"code {int(codes[at])} at {list(at)} does not fit {case.bits} bits"
    )


@QUANTIZE.claim(evidence="exact", source=QUANTIZER)
def quantizer_bound(run: Run, case: QuantizeCase) -> None:
    """On the stored format, decoding is within half a step of every value, whatever the offset.

    Codes may come from fp32 arithmetic: a position of up to 2^bits steps is rounded twice.
    """
    inputs = case.build()

    def fault(codes: Tensor, lo: Tensor, step: Tensor) -> str | None:
        broken = well_stored(codes, lo, step, case)
        if broken:
            return broken
        error = (decoded(codes, lo, step, case) - grouped(inputs.x, case)).abs()
        delta = (step.double() * STEP_RATIO[case.bits])[:, None].expand_as(error)
        bound = delta * (0.5 + FP32_EPSILON * 2**case.bits)
        return first(error > bound, lambda *at: f"error {float(error[at]):.6g} at a step of {float(delta[at]):.6g}")

    run.valid(inputs.call, fault)


@QUANTIZE.claim(evidence="exact", source=QUANTIZER)
def tight_scales(run: Run, case: QuantizeCase) -> None:
    """lo and the stored step are as close to the minimum and to range / 255 as fp16 allows, at every number of bits.

    One fp16 neighbour more is allowed in either: directed rounding can be done in more than one way.
    """
    inputs = case.build()

    def fault(codes: Tensor, lo: Tensor, step: Tensor) -> str | None:
        broken = well_stored(codes, lo, step, case)
        if broken:
            return broken
        groups = grouped(inputs.x, case)
        low, high = groups.amin(1), groups.amax(1)
        spacing = 2.0**-24  # between neighbours of fp16 near zero
        two = 2 * (2.0**-10 * low.abs() + spacing)
        need = (high - lo.double()) / 255
        return first(
            (lo.double() - low).abs() > two, lambda *at: f"lo {float(lo[at]):.6g} for a minimum of {float(low[at]):.6g}"
        ) or first(
            step.double() > need.clamp(min=0) * (1 + 2.0**-9) + 2 * spacing,
            lambda *at: f"step {float(step[at]):.6g} where {float(need[at]):.6g} reaches the maximum",
        )

    run.valid(inputs.call, fault)


@QUANTIZE.claim(evidence="exact", source=QUANTIZER)
def constant_groups(run: Run, case: QuantizeCase) -> None:
    """A group of equal values that fp16 holds has code 0 and step 0, and comes back as it was."""
    inputs = case.build()
    groups = grouped(inputs.x, case).half().double()
    flat = groups[:, :1].expand_as(groups).flatten(0, 1)
    constant = inputs.replace(x=(flat if case.axis == "token" else flat.T).to(torch.float32).contiguous())
    wanted = (
        torch.zeros(constant.x.shape, dtype=torch.uint8),
        groups[:, 0].half(),
        torch.zeros_like(groups[:, 0]).half(),
    )
    run.equal(constant.call, wanted)


@QUANTIZE.claim(evidence="exact", source="loud channels of keys: each has its own scale")
def loud_channel(run: Run, case: QuantizeCase) -> None:
    """A group that is a hundred times louder changes nothing in any other group."""
    case = replace(case, groups=3, regime="normal")
    inputs = case.build()
    louder = grouped(inputs.x, case).float()
    louder[1] *= 100
    if louder.shape[2]:
        louder[:, :, -1] *= 100
    flat = louder.flatten(0, 1).clamp(-HALF_MAX / 2, HALF_MAX / 2)
    changed = inputs.replace(x=(flat if case.axis == "token" else flat.T.contiguous()).to(inputs.x.dtype))

    def others(op: Callable[..., Any], given: Inputs) -> tuple[Tensor, ...]:
        codes, lo, step = given.call(op)
        quiet = slice(None), slice(0, -1)
        return grouped(codes, case)[::2, :, :-1], lo[::2][quiet], step[::2][quiet]

    before = others(run.impl, inputs)
    run.equal(lambda op: others(op, changed), before, "quiet group")


@QUANTIZE.claim(evidence="exact", source=LADDER_SOURCE, status="corrected")
def nested_ladder(run: Run, case: QuantizeCase) -> None:
    """Quantizing at fewer bits stores the same lo and 8-bit step, and the codes that demoting 8-bit codes gives.

    Corrected: with a fresh fp16 scale on each rung, as printed, demoting and quantizing directly differ. Values within
    two fp32 roundings of a tie between codes may go either way.
    """
    eight = replace(case, bits=8).build()
    codes8, lo8, step8 = eight.call(run.impl)
    fewer = case.bits if case.bits < 8 else 4
    inputs = eight.replace(bits=fewer)

    def fault(codes: Tensor, lo: Tensor, step: Tensor) -> str | None:
        if not (torch.equal(lo, lo8) and torch.equal(step, step8)):
            return f"lo or step at {fewer} bits is not that at 8 bits"
        delta = step.double() * STEP_RATIO[fewer]
        position = (grouped(eight.x, case) - lo.double()[:, None]) / torch.where(delta > 0, delta, 1.0)[:, None]
        # The boundary 17 k + 8.5 between 8-bit codes that demote differently is the tie k + 0.5 here.
        near = ((position - position.floor()) - 0.5).abs() <= FP32_EPSILON * 256
        demoted = grouped(requantize(codes8, bits=8, to=fewer), case)
        mine = grouped(codes, case)
        return first((mine != demoted) & ~near, lambda *at: f"code {int(mine[at])}, demoted {int(demoted[at])}")

    run.valid(inputs.call, fault)


@DEQUANTIZE.claim(evidence="budget", source=QUANTIZER)
def stored_format(run: Run, case: DequantizeCase) -> None:
    """A code stands for code * step * {8: 1, 4: 17, 2: 85} + lo, with lo and step of its group."""
    inputs = case.build()
    delta = (inputs.step.double() * STEP_RATIO[case.bits])[:, None]
    through = grouped(inputs.codes, case) * delta + inputs.lo.double().abs()[:, None]
    flat = through.flatten(0, 1)
    run.close(inputs.call, condition=flat if case.axis == "token" else flat.T)


@PACK.claim(evidence="exact", source="packed store: codes are packed least significant bits first")
def pack_round_trip(run: Run, case: PackCase) -> None:
    """Unpacking gives every code back, and nothing is padded but the last byte."""
    inputs = case.build()
    flat = inputs.codes.flatten().tolist()

    def unpacked(op: Callable[..., Any]) -> Tensor:
        packed: Tensor = inputs.call(op)
        if packed.numel() != -(-len(flat) * case.bits // 8):
            return packed.new_full((len(flat) + 1,), 255)
        codes: Tensor = unpack(packed, bits=case.bits, count=len(flat))
        return codes

    run.equal(unpacked, torch.tensor(flat, dtype=torch.uint8), "code")


@PACK.claim(evidence="exact", source="packed store: codes are packed least significant bits first")
def first_code_lowest(run: Run, case: PackCase) -> None:
    """The bytes are those of the sum of code[i] * 2^(bits * i), least significant byte first, zeros at the end."""
    inputs = case.build()
    number = sum(code << (case.bits * i) for i, code in enumerate(inputs.codes.flatten().tolist()))
    size = -(-inputs.codes.numel() * case.bits // 8)
    run.equal(inputs.call, torch.tensor(list(number.to_bytes(size, "little")), dtype=torch.uint8), "byte")
