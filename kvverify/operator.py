"""The nouns: Operator, Claim, Mutant, Implementation, and the registry from which everything else is derived.

Theory of operation
-------------------
An *operator* is a function that a downstream kernel may implement. Its policy folder says, once, all there is to know
about it: the float64 `oracle`, the honest `peer`, the case type, what it returns, and how many bytes it must at least
read. Around it stand

* *claims*: statements of a paper as plain functions of (run, case), `@OP.claim(...)`, told in words by their
  docstring;
* *mutants*: known-bad implementations, `@OP.mutant("claim", case=...)`, each with the claims that must reject it and
  a witness: a case on which they do;
* *controls*: different but equally right implementations, `@OP.control`, which every claim must accept.

The gate, the test suite, the mutant matrix, the benchmarks and the tables in the documentation all walk `registry()`.
A fourth policy is one folder and one name in `POLICIES`.

WARNING: this module knows no paper and no tensor mathematics. `registry()` imports the policies lazily, because they
import this module.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvverify.cases import DTYPES, Case

__all__ = ["Claim", "Control", "Implementation", "Mutant", "Operator", "Output", "implements", "operators", "registry"]

POLICIES = ("attention", "vestige", "relay", "geodesia")
"""The folders that hold operators, in the order in which reports show them."""

Function = TypeVar("Function", bound=Callable[..., Any])
Evidence = Literal["exact", "budget"]
Status = Literal["holds", "corrected", "measured"]
EVIDENCE = ("reference", "interpreter", "compiled")


@dataclass(frozen=True)
class Output:
    """One tensor that an operator returns; its shape stands in the signature.

    dtype: "storage" (that of the first input, or wider), "float16" or "float32" (or wider), "int64", "uint8" or
    "bool". reduce: how many trailing axes make one unit of the budget. axes: what one step along each axis is called
    where claims look at the output in another shape than the signature's.
    """

    name: str
    dtype: Literal["storage", "float16", "float32", "int64", "uint8", "bool"] = "storage"
    reduce: int = 1
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One named statement, executable: `function(run, case)` raises a Violation where it does not hold."""

    name: str
    operator: str
    function: Callable[[Any, Any], None]
    source: str
    evidence: Evidence
    status: Status
    statement: str


@dataclass(frozen=True)
class Mutant:
    """A known-bad implementation, the claims that must reject it, and a witness: a case on which they do."""

    name: str
    operator: str
    function: Callable[..., Any]
    rejected_by: tuple[str, ...]
    case: Case
    in_place: bool = False


@dataclass(frozen=True)
class Control:
    """An implementation that differs from the reference and is just as right."""

    name: str
    operator: str
    function: Callable[..., Any]


def _dims(text: str) -> tuple[str, ...]:
    return tuple(dim.strip() for dim in text.split(",") if dim.strip())


def _statement(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"{function.__name__} has no docstring: a claim is told in words")
    return " ".join(text.split("\n\n")[0].split())


@dataclass(frozen=True, eq=False)
class Operator:
    """A kernel-level function that a downstream can implement.

    name: "policy.operator". signature: as documentation shows it. case: the case type, whose `build()` gives the
    inputs. oracle: float64 truth on the same stored inputs. peer: the best honest kernel. read_bytes: case -> the
    bytes an implementation must at least read. captured: cases that hold data of a real model, run beside the drawn
    ones. weight: how many cases of a single kernel one of its cases takes the time of; so many fewer are drawn.
    """

    name: str
    signature: str
    case: type[Case]
    oracle: Callable[..., Any]
    peer: Callable[..., Any]
    outputs: tuple[Output, ...]
    read_bytes: Callable[[Any], int]
    captured: tuple[Case, ...] = ()
    weight: int = 1
    claims: dict[str, Claim] = field(default_factory=dict)
    mutants: dict[str, Mutant] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)

    def claim(
        self, *, evidence: Evidence, source: str, status: Status = "holds"
    ) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
        """Register a claim under its function's name; the first paragraph of its docstring is the statement."""

        def register(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            name = function.__name__
            self._fresh(name, self.claims, "claim")
            self.claims[name] = Claim(name, self.name, function, source, evidence, status, _statement(function))
            return function

        return register

    def mutant(
        self, *rejected_by: str, case: Case | None = None, in_place: bool = False
    ) -> Callable[[Function], Function]:
        """Register a known-bad kernel, the claims that must reject it, and its witness (else the default case)."""

        def register(function: Function) -> Function:
            unknown = set(rejected_by) - set(self.claims)
            if unknown or not rejected_by:
                raise ValueError(
                    f"mutant {function.__name__} names claims {sorted(unknown)}: expected some of {list(self.claims)}"
                )
            self._fresh(function.__name__, self.mutants, "mutant")
            witness = self.case() if case is None else case
            self.mutants[function.__name__] = Mutant(
                function.__name__, self.name, function, rejected_by, witness, in_place
            )
            return function

        return register

    def control(self, function: Function) -> Function:
        """Register an equivalent implementation that every claim must accept."""
        self._fresh(function.__name__, self.controls, "control")
        self.controls[function.__name__] = Control(function.__name__, self.name, function)
        return function

    def place(self, output: Output, index: Sequence[int]) -> str:
        """One entry of an output in words: "keys[row 3, pair 1, side 0]", by the output's or the signature's axes."""
        found = re.search(rf"\b{re.escape(output.name)}\b\[([^\]]*)\]", self.signature.split("->")[1])
        signed = tuple(dim.split("+")[0].removesuffix("s") for dim in _dims(found[1])) if found else ()
        axes = next((axes for axes in (signed, output.axes) if len(axes) == len(index)), None)
        steps = index if axes is None else [f"{axis} {step}" for axis, step in zip(axes, index, strict=True)]
        return f"{output.name}[{', '.join(map(str, steps))}]" if index else output.name

    def result_shapes(self, args: Sequence[Any]) -> list[tuple[int | None, ...]]:
        """The shapes that the signature promises for these arguments; None where it depends on more than shapes."""
        before, after = self.signature.split("->")
        sizes: dict[str, int] = {}
        for (_, dims), tensor in zip(re.findall(r"(\w+)\[([^\]]*)\]", before), args, strict=False):
            sizes.update(zip(_dims(dims), tensor.shape, strict=False))
        shapes = []
        for output in self.outputs:
            found = re.search(rf"\b{output.name}\b(?:\[([^\]]*)\])?", after)
            terms = [dim.split("+") for dim in _dims(found[1] or "")] if found else []
            shapes.append(
                tuple(sum(sizes[t] for t in term) if all(t in sizes for t in term) else None for term in terms)
            )
        return shapes

    def _fresh(self, name: str, known: Mapping[str, Any], kind: str) -> None:
        if name in known:
            raise ValueError(f"{kind} {name} of {self.name} is registered twice")


def registry() -> dict[str, Operator]:
    """Every operator by name, in report order."""
    found = {}
    for policy in POLICIES:
        package = importlib.import_module(f"kvverify.{policy}.operators")
        for room in ("claims", "mutants"):
            importlib.import_module(f"kvverify.{policy}.{room}")
        for operator in package.OPERATORS:
            found[operator.name] = operator
    return found


def operators() -> list[str]:
    """The names of all operators."""
    return list(registry())


def implements(operator: str) -> Callable[[Function], Function]:
    """Mark a function as an implementation of an operator: the decorator form of a binding."""

    def mark(function: Function) -> Function:
        function.__kvverify_operator__ = operator  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Implementation:
    """What is under test: a name, and a callable for each operator that it implements.

    operators: a mapping from operator names to callables, or functions marked with `@implements`. device: where
    inputs are placed, as torch names it. dtypes: the storage dtypes it handles, out of "fp32", "bf16", "fp16",
    "fp64". supports: per case field the values it handles, e.g. `{"layout": {"half"}}`; a field that is not mentioned
    is tested in full. in_place: operators that change their first argument instead of returning a new tensor; they
    are judged on a clone. evidence: how the kernel runs where there is no GPU: "reference" (torch), "interpreter"
    (Triton on a CPU), "compiled".
    """

    name: str
    operators: Mapping[str, Any] | Iterable[Callable[..., Any]]
    device: str = field(default="cpu", kw_only=True)
    dtypes: Sequence[str] = field(default=("fp32", "bf16", "fp16"), kw_only=True)
    supports: Mapping[str, Collection[Any]] = field(default_factory=dict, kw_only=True)
    in_place: Collection[str] = field(default=(), kw_only=True)
    evidence: Literal["reference", "interpreter", "compiled"] = field(default="reference", kw_only=True)

    def __post_init__(self) -> None:
        bindings = self._bound()
        dtypes = (self.dtypes,) if isinstance(self.dtypes, str) else tuple(self.dtypes)
        in_place = (self.in_place,) if isinstance(self.in_place, str) else tuple(self.in_place)
        for dtype in dtypes or ("",):
            if dtype not in DTYPES:
                raise ValueError(f"dtypes of {self.name!r} holds {dtype!r}: expected some of {list(DTYPES)}")
        for operator in in_place:
            if operator not in bindings:
                raise ValueError(f"in_place of {self.name!r} holds {operator!r}: expected some of {sorted(bindings)}")
        for case_field, values in self.supports.items():
            if isinstance(values, str) or not isinstance(values, Collection):
                raise ValueError(f"supports[{case_field!r}] of {self.name!r} is {values!r}: expected a set of values")
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence of {self.name!r} is {self.evidence!r}: expected one of {list(EVIDENCE)}")
        object.__setattr__(self, "operators", bindings)
        object.__setattr__(self, "dtypes", dtypes)
        object.__setattr__(self, "in_place", in_place)
        object.__setattr__(self, "device", str(self.device))

    def _bound(self) -> dict[str, Callable[..., Any]]:
        if isinstance(self.operators, Mapping):
            pairs = list(self.operators.items())
        elif isinstance(self.operators, Iterable):
            pairs = [(getattr(function, "__kvverify_operator__", None), function) for function in self.operators]
        else:
            raise ValueError(
                f"operators of {self.name!r} is {self.operators!r}: expected a mapping from operator names to callables"
            )
        bindings: dict[str, Callable[..., Any]] = {}
        for operator, function in pairs:
            if not isinstance(operator, str):
                raise ValueError(f"operators of {self.name!r}: {function!r} is not marked with @implements(...)")
            if not callable(function):
                raise ValueError(f"operators[{operator!r}] of {self.name!r} is {function!r}: expected a callable")
            if bindings.setdefault(operator, function) is not function:
                raise ValueError(f"operators of {self.name!r} binds {operator!r} twice: expected one function for it")
        if not bindings:
            raise ValueError(f"operators of {self.name!r} is empty: expected at least one binding")
        return bindings

    @property
    def bindings(self) -> dict[str, Callable[..., Any]]:
        """The callable bound to each operator."""
        return self.operators  # type: ignore[return-value]  # a mapping since __post_init__

    @property
    def evidence_level(self) -> str:
        """What a run of it proves: its `evidence`, or "gpu" where it runs on a CUDA device."""
        return "gpu" if self.device.startswith("cuda") else self.evidence

    @property
    def allowed(self) -> dict[str, Collection[Any]]:
        """What it supports, dtypes included, as case fields."""
        return {"dtype": self.dtypes, **self.supports}
