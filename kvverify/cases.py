"""Cases: small frozen descriptions from which tensors are built.

Theory of operation
-------------------
A test input of a cache kernel is megabytes; a failing one must still fit on a line. So Hypothesis never draws
tensors. It draws a `Case`: a frozen dataclass whose every field has a default and a short list of other values,
written `among(default, *others)`. `Case.build()` turns it into `Inputs`, always the same ones for the same case. From
that follow, at no further cost:

* a failure is one readable line, `DecodeCase(rows=65, canary=64)`: fields at their default are not printed;
* that line can be parsed back (`parse_case`), so a reproduction carries the case and not a random seed;
* shrinking is Hypothesis' own: every field walks towards its default, which stands first;
* an implementation that supports less declares it by field (`supports={"layout": {"half"}}`) and the rest is still
  drawn.

Every field is independent of the others: any combination must build. No field takes a wide range of integers, because
Hypothesis mixes constants of local modules into wide ranges and a seed would then mean different cases after
different imports.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

__all__ = [
    "DTYPES",
    "Case",
    "Inputs",
    "among",
    "cases",
    "generator",
    "leaves",
    "magnitudes",
    "parse_case",
    "rebuilt",
    "restrict",
]

C = TypeVar("C", bound="Case")

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Storage dtypes by the names that cases and implementations use."""


def among(default: Any, *others: Any) -> Any:
    """A dataclass field with a default and the other values that may be drawn; shrinking goes towards the default."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass(frozen=True)
class Inputs:
    """The arguments of one operator call: `tensors` in signature order, then `static` keyword arguments.

    One of the tensors may be a dataclass of tensors, such as a packed store: a format that is passed as a whole.
    An attribute names either, so `inputs.keys` and `inputs.scale` read like the signature.

    """

    tensors: Mapping[str, Any]
    static: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        for group in ("tensors", "static"):
            if name in self.__dict__.get(group, {}):
                return self.__dict__[group][name]
        raise AttributeError(name)

    def call(self, op: Callable[..., Any]) -> Any:
        """Call an operator: tensors by position, as a kernel names its arguments as it likes, the rest by keyword."""
        return op(*self.tensors.values(), **self.static)

    def replace(self, **changes: Any) -> Inputs:
        """The same arguments with some exchanged."""
        unknown = set(changes) - set(self.tensors) - set(self.static)
        if unknown:
            raise ValueError(f"inputs have no argument {sorted(unknown)}; they have {[*self.tensors, *self.static]}")
        return Inputs(
            {name: changes.get(name, tensor) for name, tensor in self.tensors.items()},
            {name: changes.get(name, value) for name, value in self.static.items()},
        )


@dataclass(frozen=True)
class Case:
    """What every case has: a seed, a storage dtype, and how its tensors lie in memory.

    `memory` is applied by the harness, not by `build`: "dense" (contiguous, at an offset, between guard bands),
    "strided" (rows further apart than they are long, poison between them) or "transposed" (the last two axes
    exchanged in memory).

    """

    seed: int = among(0, *range(1, 100))
    dtype: str = among("fp32", "bf16", "fp16")
    memory: str = among("dense", "strided", "transposed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._told())})"

    def _told(self) -> Iterator[tuple[str, Any]]:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value != spec.default:
                yield spec.name, value

    @property
    def torch_dtype(self) -> torch.dtype:
        """The storage dtype as torch names it."""
        return DTYPES[self.dtype]

    def build(self) -> Inputs:
        """The tensors this case stands for: the same for the same case, on the CPU, contiguous."""
        raise TypeError(f"{type(self).__name__} does not say how to build its tensors")


def choices(case_type: type[Case]) -> dict[str, tuple[Any, ...]]:
    """The values each field of a case type may take, default first."""
    return {spec.name: tuple(spec.metadata["choices"]) for spec in dataclasses.fields(case_type)}


def restrict(case_type: type[Case], supports: Mapping[str, Collection[Any]]) -> dict[str, tuple[Any, ...]]:
    """The choices that an implementation supports: a field it does not mention is tested in full.

    Raises ValueError when nothing is left of a field.

    """
    allowed = {}
    for name, values in choices(case_type).items():
        allowed[name] = tuple(value for value in values if name not in supports or value in supports[name])
        if not allowed[name]:
            raise ValueError(
                f"supports[{name!r}] = {sorted(map(str, supports[name]))} leaves nothing of {case_type.__name__}: "
                f"expected at least one of {list(values)}"
            )
    return allowed


def cases(case_type: type[C], supports: Mapping[str, Collection[Any]] | None = None) -> st.SearchStrategy[C]:
    """A strategy of cases of one type, each field drawn on its own."""
    allowed = restrict(case_type, supports or {})
    return st.builds(case_type, **{name: st.sampled_from(values) for name, values in allowed.items()})


def parse_case(text: str, case_types: Collection[type[Case]]) -> Case:
    """Read a case back from its one-line form, without executing anything.

    Raises ValueError, naming what was expected, for an unknown case type, an unknown field or a value that is not a
    literal.

    """
    by_name = {case_type.__name__: case_type for case_type in case_types}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        tree = None
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args):
        raise ValueError(f"case {text!r} does not read as a case: expected for example {next(iter(by_name))}(seed=1)")
    case_type = by_name.get(tree.func.id)
    if case_type is None:
        raise ValueError(f"case type {tree.func.id!r} is unknown here: expected one of {sorted(by_name)}")
    values = {}
    known = {spec.name for spec in dataclasses.fields(case_type)}
    for keyword in tree.keywords:
        if keyword.arg not in known:
            raise ValueError(f"{case_type.__name__} has no field {keyword.arg!r}: expected one of {sorted(known)}")
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"field {keyword.arg!r} of case {text!r} is not a literal value") from None
    return case_type(**values)


def leaves(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of positional arguments; those of a dataclass in the order of its fields."""
    return [tensor for argument in arguments for tensor in _parts(argument).values()]


def rebuilt(arguments: Iterable[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The same arguments made of other tensors, given in the order of `leaves`."""
    supply = iter(tensors)
    return [
        next(supply)
        if isinstance(argument, torch.Tensor)
        else dataclasses.replace(argument, **{name: next(supply) for name in _parts(argument)})
        for argument in arguments
    ]


def _parts(argument: Any) -> dict[str, torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return {"": argument}
    parts = {spec.name: getattr(argument, spec.name) for spec in dataclasses.fields(argument)}
    return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


def generator(seed: int, *, stream: int = 0) -> torch.Generator:
    """A seeded source of random numbers; a further stream of one seed does not change the others."""
    return torch.Generator().manual_seed(1_000_003 * (stream + 1) + seed)


def magnitudes(count: int, seed: int) -> torch.Tensor:
    """Row scales from 1e-6 to 64, shuffled, float64[count]: a global tolerance would hide the small rows."""
    scales = torch.logspace(-6, 1.806, max(count, 1), dtype=torch.float64)
    return scales[torch.randperm(max(count, 1), generator=generator(seed, stream=7))][:count]
