"""A toy operator, small enough to know everything about it: y = 2 x."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvverify.cases import Case, Inputs, among, generator
from kvverify.operator import Implementation, Operator, Output


@dataclass(frozen=True, repr=False)
class ToyCase(Case):
    rows: int = among(3, 0, 1, 8)
    level: int = among(0, 1, 2, 3)
    flag: bool = among(False, True)

    def build(self) -> Inputs:
        x = torch.randn(self.rows, 4, generator=generator(self.seed), dtype=torch.float64)
        return Inputs({"x": x.to(self.torch_dtype)}, {"level": self.level, "flag": self.flag})


def double(x, *, level, flag):
    return 2 * x


def toy(*, bare: bool = False) -> Operator:
    """The operator y = 2 x, with one claim and one mutant unless it is to be bare."""
    operator = Operator(
        "toy.double",
        "double(x[rows,dim], *, level, flag) -> y[rows,dim]",
        case=ToyCase,
        oracle=double,
        peer=double,
        outputs=(Output("y"),),
        read_bytes=lambda case: 16 * case.rows,
    )
    if not bare:

        @operator.claim(evidence="budget", source="arithmetic")
        def doubled(run, case):
            """Each entry is twice what it was."""
            run.close(case.build().call)

        @operator.mutant("doubled")
        def triples(x, *, level, flag):
            return 3 * x

    return operator


def implementation(kernel, **declared) -> Implementation:
    return Implementation("toy", {"toy.double": kernel}, **declared)
