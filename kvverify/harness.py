"""Calling an implementation under adversity, and judging what comes back.

Theory of operation
-------------------
A kernel that is wrong on a friendly allocator is wrong in production on the first unfriendly day, so every call made
here is unfriendly:

1. each input lies at an offset between guard bands, densely, with gaps between rows, or transposed, as the case says;
   guards and gaps hold NaN (0 in integers, because row 0 of every pool is a NaN row that nobody lists; True in
   masks);
2. the call is first made on the same storage with other contents (a result remembered by address is then stale),
   which are restored;
3. every allocation made during the call is born NaN, so that memory that was never written shows;
4. afterwards inputs and guards must be bitwise what they were, and the result must have the right count, shape, dtype
   and device and share no memory with an input;
5. the call is repeated without that poison (with another, if a result looks like poison), and must give the same bits.

A broken promise raises `Violation`, whose `kind` says which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvverify.cases import Case, leaves, rebuilt
from kvverify.operator import Operator, Output

__all__ = ["Caller", "Violation", "as_outputs", "one_line", "placed", "poisoned_allocations", "same_bits"]

GUARD = 64
GAP = 8
SLOW_SECONDS = 0.005
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class Violation(Exception):
    """A claim does not hold. kind: one word for reports; the message can be read alone."""

    def __init__(self, kind: str, message: str, *, expected: str = "", actual: str = "", budget: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.expected = expected
        self.actual = actual
        self.budget = budget


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """What memory holds that nobody wrote: NaN, or a value no id, count or code can have."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    if dtype == torch.bool:
        return True
    return 0xA5 if dtype == torch.uint8 else torch.iinfo(dtype).min // 3


def _other_poison(dtype: torch.dtype) -> float | int | bool:
    """A second poison, which no number of the first can be taken for."""
    if dtype.is_floating_point or dtype.is_complex:
        return 12_345.0
    return False if dtype == torch.bool else 0x5A


class _Poison(TorchDispatchMode):
    def __init__(self, value: Callable[[torch.dtype], float | int | bool]) -> None:
        super().__init__()
        self.value = value

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave torch.compile alone: under a mode without this it silently runs the uncompiled function instead."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            result.fill_(self.value(result.dtype))
        return result


@contextmanager
def poisoned_allocations(*, other: bool = False) -> Iterator[None]:
    """Within this context every tensor allocated without contents is filled with poison, NaN or, the other, 12345."""
    with _Poison(_other_poison if other else poison_value):
        yield


def guard_value(dtype: torch.dtype) -> float | int | bool:
    """What stands around and between inputs."""
    if dtype.is_floating_point:
        return math.nan
    return dtype == torch.bool or (255 if dtype == torch.uint8 else 0)


def placed(tensor: torch.Tensor, memory: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a tensor to a device between guard bands: (the view, the whole storage around it)."""
    order = list(range(tensor.dim()))
    if memory == "transposed" and len(order) > 1:
        order[-2:] = [order[-1], order[-2]]
    stride = [0] * tensor.dim()
    step = 1 + (memory == "strided" and len(order) == 1)
    for axis in reversed(order):
        stride[axis] = step
        step *= max(tensor.shape[axis], 1)
        if memory == "strided" and axis == order[-1]:
            step += GAP
    storage = torch.full((GUARD + step + GUARD,), guard_value(tensor.dtype), dtype=tensor.dtype, device=device)
    view = storage.as_strided(tensor.shape, stride, GUARD)
    view.copy_(tensor)
    return view, storage


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes, so that NaN equals itself and -0 differs from 0."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits in the same shape."""
    return left.shape == right.shape and left.dtype == right.dtype and bool(torch.equal(_bits(left), _bits(right)))


def _other_contents(view: torch.Tensor, *, in_order: bool) -> None:
    """Exchange an input for other contents in the same storage: reversed along every axis, and floats halved."""
    changed = view.clone() if in_order else view.flip(tuple(range(view.dim())))
    view.copy_(0.5 * changed if view.dtype.is_floating_point else changed)


def one_line(error: BaseException) -> str:
    """What an error says, on one line that a terminal and an XML file can hold."""
    text = " ".join(str(error).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def as_outputs(result: Any) -> tuple[Any, ...]:
    """What an operator returned, as a tuple, whether it returns one tensor or several; an int is a 0-d tensor."""
    several = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return tuple(torch.tensor(item) if type(item) is int else item for item in several)


@dataclass
class Caller:
    """An implementation of one operator, called under adversity; `calls` counts, `seconds` is the slowest call."""

    operator: Operator
    function: Callable[..., Any]
    case: Case
    device: str = "cpu"
    in_place: bool = False
    repeat_slow: bool = True
    calls: int = 0
    seconds: float = 0.0

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Call it as the operator is called; return its results as CPU tensors. Raises Violation."""
        self.calls += 1
        placed_args = [placed(tensor, self.case.memory, self.device) for tensor in leaves(args)]
        views = rebuilt(args, (view for view, _ in placed_args))
        before = [storage.clone() for _, storage in placed_args]
        self._warm_up(placed_args, before, views, static)
        first = self._once(views, static, poisoned_allocations())
        self._check_inputs(placed_args, before)
        shared = {storage.untyped_storage().data_ptr() for _, storage in placed_args}
        self._check_outputs(first, args, shared)
        kept = tuple(tensor.detach().cpu().clone() for tensor in first)
        if self.seconds < SLOW_SECONDS or self.repeat_slow:
            for (_, storage), original in zip(placed_args, before, strict=True):
                storage.copy_(original)
            # Recycled memory could hold the first poison again: what looks like it is asked for with another.
            suspect = any(bool(_born(tensor).any()) for tensor in kept)
            again = self._once(views, static, poisoned_allocations(other=True) if suspect else nullcontext())
            for output, one, two in zip(self.operator.outputs, kept, again, strict=False):
                if not same_bits(one, two.detach().cpu()):
                    raise _unsteady(output.name, one, two.detach().cpu())
        return kept[0] if len(self.operator.outputs) == 1 else kept

    def _once(
        self, views: list[Any], static: dict[str, Any], allocations: AbstractContextManager[None]
    ) -> tuple[torch.Tensor, ...]:
        started = time.perf_counter()
        try:
            with allocations:
                result = self.function(*views, **static)
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, or a pytest.skip, would otherwise end the gate as if all were well
            text = one_line(error)
            raise Violation("raised", f"{self.operator.name} raised {type(error).__name__}: {text}") from error
        self.seconds = max(self.seconds, time.perf_counter() - started)
        if result is None and self.in_place:
            result = views[0]
        return as_outputs(result)

    def _warm_up(
        self,
        placed_args: list[tuple[torch.Tensor, torch.Tensor]],
        before: list[torch.Tensor],
        views: list[Any],
        static: dict[str, Any],
    ) -> None:
        for in_order in (False, True):  # contents out of order may be refused; only the judged call counts
            for view, _ in placed_args:
                _other_contents(view, in_order=in_order)
            try:
                self.function(*views, **static)
                accepted = True
            except KeyboardInterrupt:
                raise
            except BaseException:
                accepted = False
            for (_, storage), original in zip(placed_args, before, strict=True):
                storage.copy_(original)
            if accepted:
                return

    def _check_inputs(self, placed_args: list[tuple[torch.Tensor, torch.Tensor]], before: list[torch.Tensor]) -> None:
        for position, ((view, storage), original) in enumerate(zip(placed_args, before, strict=True)):
            now = storage.clone()
            if self.in_place and position == 0:
                now.as_strided(view.shape, view.stride(), GUARD).copy_(
                    original.as_strided(view.shape, view.stride(), GUARD)
                )
            if not same_bits(now, original):
                inside = same_bits(
                    now.as_strided(view.shape, view.stride(), GUARD),
                    original.as_strided(view.shape, view.stride(), GUARD),
                )
                what = "memory outside" if inside else "the contents of"
                raise Violation("input changed", f"{self.operator.name} changed {what} argument {position}")

    def _check_outputs(self, outputs: tuple[Any, ...], args: Sequence[Any], shared: set[int]) -> None:
        name, specs = self.operator.name, self.operator.outputs
        wanted = f"expected {', '.join(spec.name for spec in specs)} as in {self.operator.signature}"
        if len(outputs) != len(specs) or not all(_is_dense(tensor) for tensor in outputs):
            got = ", ".join(type(item).__name__ for item in outputs)
            raise Violation("wrong result", f"{name} returned {got}: {wanted}")
        for spec, tensor, shape in zip(specs, outputs, self.operator.result_shapes(args), strict=True):
            if len(tensor.shape) != len(shape) or any(
                size not in (None, got) for size, got in zip(shape, tensor.shape, strict=True)
            ):
                raise Violation("wrong shape", f"{spec.name} has shape {list(tensor.shape)}: expected {list(shape)}")
            if not _dtype_fits(spec, tensor.dtype, args[0].dtype):
                raise Violation("wrong dtype", f"{spec.name} has dtype {tensor.dtype}: expected {spec.dtype} or wider")
            if tensor.dim() and tensor.device.type != torch.device(self.device).type:
                raise Violation("wrong device", f"{spec.name} is on {tensor.device}: expected {self.device}")
            if not self.in_place and tensor.numel() and tensor.untyped_storage().data_ptr() in shared:
                raise Violation("aliases input", f"{spec.name} shares memory with an argument: expected a new tensor")


def _born(result: torch.Tensor) -> torch.Tensor:
    """Where a result holds what memory is born with."""
    value = poison_value(result.dtype)
    return result.isnan() if isinstance(value, float) else result == value


def _unsteady(name: str, poisoned: torch.Tensor, plain: torch.Tensor) -> Violation:
    """Why two equal calls differ, of which the first had its allocations poisoned: did the poison come through."""
    if poisoned.shape == plain.shape and bool((_born(poisoned) & (poisoned != plain)).any()):
        return Violation("unwritten memory", f"{name} holds memory that the call allocated and never wrote")
    return Violation("nondeterministic", f"{name} differs between two equal calls")


def _is_dense(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.layout == torch.strided and not result.is_meta


def _dtype_fits(spec: Output, dtype: torch.dtype, storage: torch.dtype) -> bool:
    if spec.dtype in ("int64", "uint8", "bool"):
        return dtype is getattr(torch, spec.dtype)
    least = {"float16": torch.float16, "float32": torch.float32}.get(spec.dtype, storage)
    return dtype == least or dtype in (torch.float32, torch.float64)
