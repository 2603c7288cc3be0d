"""What a selector returns: the source positions that stay, and nothing about the model they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Provenance", "Selection", "from_mask", "gather"]


@dataclass(frozen=True)
class Provenance:
    """Where a selection comes from: enough to make it again from the same rows.

    `budget` is the budget as requested, `history` the number of tokens it was spent on, `parameters` every other
    setting as (name, value) pairs, with the values that were in force (a window clamped to a short history, say).
    """

    name: str
    budget: int
    history: int
    parameters: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, eq=False)
class Selection:
    """The states kept per layer and KV head, in source order.

    `positions[layers, heads, slots]` int64: source positions, strictly ascending, then -1 where a head keeps fewer
    states than the fullest one. `values[layers, heads, slots, value_dim]`: the merged values, 0 in the padding, or
    None when values are untouched. `log_multiplicity[layers, heads, slots]`: what to add to the attention logit of a
    state that stands for several, ln(count); zeros unless states were merged with a count. A selection that breaks
    these rules cannot be built: ValueError.
    """

    positions: Tensor
    log_multiplicity: Tensor
    provenance: Provenance
    values: Tensor | None = None

    def __post_init__(self) -> None:
        positions, history = self.positions, self.provenance.history
        if positions.dtype != torch.int64 or positions.ndim != 3:
            raise ValueError(
                f"positions is {positions.dtype} of shape {tuple(positions.shape)}; "
                "expected int64 [layers, heads, slots]"
            )
        for name, tensor in (("log_multiplicity", self.log_multiplicity), ("values", self.values)):
            if tensor is not None and tensor.shape[:3] != positions.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected it to start with {tuple(positions.shape)}"
                )
        if positions.numel() and not -1 <= int(positions.min()) <= int(positions.max()) < history:
            raise ValueError(
                f"positions span {int(positions.min())}..{int(positions.max())}; expected -1 or 0..{history - 1}"
            )
        before, after = positions[..., :-1], positions[..., 1:]
        if not bool(((after == -1) | ((before >= 0) & (before < after))).all()):
            raise ValueError("positions of a head are not strictly ascending with the -1 padding on the right")

    @property
    def valid(self) -> Tensor:
        """Which slots hold a state: bool [layers, heads, slots]."""
        return self.positions >= 0

    @property
    def counts(self) -> Tensor:
        """How many states each head keeps: int64 [layers, heads]."""
        return self.valid.sum(dim=-1)


def from_mask(
    mask: Tensor, name: str, budget: int, *, parameters: dict[str, object], values: Tensor | None = None
) -> Selection:
    """Build the selection that keeps exactly the true entries of `mask[layers, kv_heads, history]`.

    Going through a mask makes source order and uniqueness facts of the construction rather than of each selector.
    `values` are in the source's rows, [layers, kv_heads, history, value_dim]; the kept rows are taken from them.
    """
    counts = mask.sum(dim=-1)
    slots = int(counts.max()) if counts.numel() else 0
    # A stable sort of "dropped" lists the kept positions first, ascending.
    order = torch.sort((~mask).to(torch.uint8), dim=-1, stable=True).indices[..., :slots]
    padding = torch.arange(slots, device=mask.device) >= counts.unsqueeze(-1)
    positions = order.masked_fill(padding, -1)
    return Selection(
        positions=positions,
        log_multiplicity=torch.zeros(positions.shape, dtype=torch.float32, device=mask.device),
        provenance=Provenance(name, budget, mask.shape[-1], tuple(parameters.items())),
        values=None if values is None else _take(values, positions, fill=0.0),
    )


def gather(selection: Selection, keys: Tensor, values: Tensor, *, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the kept keys and values, with `fill` in the padded slots.

    `keys[layers, heads, history, dim]` and `values[layers, heads, history, value_dim]` are the full cache (dim and
    value_dim may differ); the results are [layers, heads, slots, dim] and [..., value_dim], moved bit for bit. Where
    the selection carries merged values these are returned in the place of the cache's.
    """
    expected = (*selection.positions.shape[:2], selection.provenance.history)
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim != 4 or tensor.shape[:3] != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {expected} and a feature dimension")
    kept_keys = _take(keys, selection.positions, fill)
    if selection.values is None:
        return kept_keys, _take(values, selection.positions, fill)
    return kept_keys, selection.values.masked_fill(~selection.valid.unsqueeze(-1), fill)


def _take(source: Tensor, positions: Tensor, fill: float) -> Tensor:
    index = positions.clamp(min=0).unsqueeze(-1).expand(*positions.shape, source.shape[-1])
    return source.gather(2, index).masked_fill((positions < 0).unsqueeze(-1), fill)
