"""A run: one claim on one case, an implementation against a truth.

Theory of operation
-------------------
A claim is one program, run on three machines. `impl` is the implementation, called under adversity; `peer` is the
honest kernel; `oracle` is the float64 truth, which sees the same stored inputs and runs after the implementation has
returned, on its own clones. `close` judges what the program gives on the first
by what it gives on the other two; `equal` judges without allowance what is moved or counted; `valid` asks whether the
result is one of several right answers, such as a set under any tie-break. Claims raise nothing themselves, and never
compare with a bare tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvverify.budget import judge, unit_size
from kvverify.cases import leaves, rebuilt
from kvverify.harness import Caller, Violation, as_outputs
from kvverify.operator import Operator, Output

__all__ = ["Program", "Run"]

Program = Callable[[Callable[..., Any]], Any]
"""What a claim does with an operator: called with the implementation, the peer or the oracle in its place."""


def _oracle(operator: Operator) -> Callable[..., Any]:
    def call(*args: Any, **static: Any) -> Any:
        return operator.oracle(*map(_widened, args), **static)

    return call


def _widened(argument: Any) -> Any:
    """A tensor in float64, on its own memory; a stored format as it is stored, since its dtypes are part of it."""
    if not isinstance(argument, torch.Tensor):
        return rebuilt([argument], (tensor.clone() for tensor in leaves([argument])))[0]
    return argument.double() if argument.is_floating_point() else argument.clone()


@dataclass
class Run:
    """What a claim is given: three machines that call the operator, and three judges.

    impl, peer, oracle: call them as the operator is called. close: judge a program by the budget. equal: judge values
    without allowance. valid: judge by a rule. size: the largest truth in each unit, to state a condition with.
    """

    operator: Operator
    impl: Caller
    worst: float = 0.0
    results: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    @property
    def peer(self) -> Callable[..., Any]:
        """The honest kernel, called plainly."""
        return self.operator.peer

    @property
    def oracle(self) -> Callable[..., Any]:
        """The float64 truth on the same stored inputs."""
        return _oracle(self.operator)

    def size(self, program: Program, output: int = 0) -> torch.Tensor:
        """The largest absolute value of the truth in each unit of an output."""
        truth = as_outputs(program(self.oracle))[output]
        reduce = self.operator.outputs[output].reduce
        return unit_size(truth, reduce)

    def close(
        self,
        program: Program,
        *,
        truth: Program | None = None,
        roundings: float = 1,
        condition: float | torch.Tensor | Sequence[float | torch.Tensor] = 0.0,
        only: Sequence[str] = (),
    ) -> None:
        """Judge `program(impl)` by the budget against `truth(oracle)`, by default the same program.

        roundings, condition: see `kvverify.budget`; a sequence gives one condition per output. only: the outputs to
        judge, by name.
        """
        actual = as_outputs(program(self.impl))
        self.results.append(actual)
        peer = as_outputs(program(self.peer))
        true = as_outputs((truth or program)(self.oracle))
        conditions = [condition] * len(true) if isinstance(condition, (float, int, torch.Tensor)) else list(condition)
        for spec, mine, theirs, right, needed in zip(
            self.operator.outputs, actual, peer, true, conditions, strict=False
        ):
            if only and spec.name not in only:
                continue
            if mine.shape != right.shape:
                raise Violation(
                    "wrong shape", f"{spec.name} has shape {list(mine.shape)}: expected {list(right.shape)}"
                )
            # A program may widen what it looks at; the kernel still rounded to the storage dtype of the case.
            dtype = {"storage": self.impl.case.torch_dtype, "float16": torch.float16}.get(spec.dtype, torch.float32)
            verdict = judge(mine, theirs, right, reduce=spec.reduce, roundings=roundings, condition=needed, dtype=dtype)
            self.worst = max(self.worst, verdict.used)
            if not verdict.ok:
                kind = "not finite" if not math.isfinite(verdict.actual) and math.isfinite(verdict.truth) else "budget"
                place = self.operator.place(spec, verdict.index)
                raise Violation(
                    kind,
                    f"{place} is {verdict.actual:.6g}, should be {verdict.truth:.6g}",
                    expected=f"{verdict.truth:.9g}",
                    actual=f"{verdict.actual:.9g}",
                    budget=verdict.arithmetic,
                )

    def equal(self, program: Program, expected: Any, what: str = "") -> None:
        """Judge `program(impl)` value by value; NaN equals NaN.

        expected: tensors, or a program that is given the oracle. what: names what is compared.
        """
        actual = as_outputs(program(self.impl))
        self.results.append(actual)
        wanted = as_outputs(expected(self.oracle) if callable(expected) else expected)
        names = [what] * len(wanted) if what else [spec.name for spec in self.operator.outputs]
        for name, mine, right in zip(names, actual, wanted, strict=False):
            if mine.shape != right.shape:
                raise Violation("wrong shape", f"{name} has shape {list(mine.shape)}: expected {list(right.shape)}")
            different = mine != right.to(mine.dtype)
            different &= ~(mine.isnan() & right.isnan())
            if different.any():
                at = tuple(int(i) for i in different.nonzero()[0])
                place = self.operator.place(Output(name), at)
                raise Violation(
                    "exact",
                    f"{place} is {mine[at].item()}, should be {right[at].item()} "
                    f"({int(different.sum())} of {different.numel()} entries differ)",
                    expected=str(right[at].item()),
                    actual=str(mine[at].item()),
                )

    def valid(self, program: Program, fault: Callable[..., str | None]) -> None:
        """Judge `program(impl)` by a rule: `fault`, given what the program returns, says what is wrong, or None."""
        actual = as_outputs(program(self.impl))
        self.results.append(actual)
        told = fault(*actual)
        if told is not None:
            raise Violation("invalid", told)
