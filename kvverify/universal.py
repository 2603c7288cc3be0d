"""Mutants that every operator has: kernels that do no work, and ones that break the rules of calling.

They need no witness of their own, since each must fall on the operator's default case, at whichever claim is first to
see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvverify.cases import leaves
from kvverify.operator import Mutant, Operator

__all__ = ["universal_mutants"]


def _each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tuple(change(tensor) for tensor in result) if isinstance(result, tuple) else change(result)


def universal_mutants(operator: Operator) -> list[Mutant]:
    """Known-bad kernels of any operator, each to be rejected by at least one of its claims on the default case."""
    remembered: dict[tuple[int, ...], Any] = {}
    calls = [0]

    def returns_zeros(*args: Any, **static: Any) -> Any:
        return _each(operator.peer(*args, **static), torch.zeros_like)

    def returns_unwritten_memory(*args: Any, **static: Any) -> Any:
        return _each(operator.peer(*args, **static), torch.empty_like)

    def remembers_by_address(*args: Any, **static: Any) -> Any:
        address = tuple(tensor.data_ptr() for tensor in leaves(args))
        if address not in remembered:
            remembered[address] = operator.peer(*args, **static)
        return _each(remembered[address], torch.clone)

    def destroys_its_input(*args: Any, **static: Any) -> Any:
        result = operator.peer(*args, **static)
        for tensor in leaves(args):
            tensor.zero_()
        return result

    def differs_between_calls(*args: Any, **static: Any) -> Any:
        calls[0] += 1
        return _each(operator.peer(*args, **static), lambda tensor: tensor + calls[0] % 2)

    def returns_none(*_args: Any, **_static: Any) -> None:
        return None

    return [
        Mutant(function.__name__, operator.name, function, tuple(operator.claims), operator.case())
        for function in (
            returns_zeros,
            returns_unwritten_memory,
            remembers_by_address,
            destroys_its_input,
            differs_between_calls,
            returns_none,
        )
    ]
