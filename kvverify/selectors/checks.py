"""What every selector asks of its arguments, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_budget", "check_count", "check_rows", "protected_count"]


def check_rows(rows: Tensor, kv_heads: int | None) -> tuple[Tensor, int]:
    """`rows` as [layers, heads, queries, history] (a missing layers axis is added) and the number of KV heads.

    `kv_heads` None means one KV head per head of `rows`.
    """
    if not rows.is_floating_point() or rows.ndim not in (3, 4):
        raise ValueError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)}; "
            "expected floating point [heads, queries, history] or [layers, heads, queries, history]"
        )
    layered = rows if rows.ndim == 4 else rows.unsqueeze(0)
    heads = layered.shape[1]
    kv_heads = heads if kv_heads is None else check_count("kv_heads", kv_heads, minimum=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} does not divide the {heads} heads of rows")
    return layered, kv_heads


def check_count(name: str, value: int, *, minimum: int = 0) -> int:
    """`value`, if it is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected an int")
    if value < minimum:
        raise ValueError(f"{name}={value} is out of range; expected at least {minimum}")
    return value


def check_budget(budget: int, history: int) -> int:
    """Return the number of states a head can keep: the budget, or the history where that is shorter."""
    if isinstance(budget, float):
        raise TypeError(f"budget={budget!r} is a float; expected a number of states (see budget_from_share)")
    return min(check_count("budget", budget), history)


def protected_count(name: str, count: int, budget: int, history: int) -> int:
    """How many of `count` protected states there are to keep, `budget` being what `check_budget` returned.

    A budget of 0 keeps none and a budget of the whole history keeps all there are; in between the protected states
    have to fit, or the selector would silently be another one.
    """
    if count > budget and 0 < budget < history:
        raise ValueError(f"{name}={count} exceeds budget={budget}; expected the protected states to fit in the budget")
    return min(count, budget)
