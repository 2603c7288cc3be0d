"""The rotary embedding of a model: the model is asked, not guessed.

`probe` looks at what the model itself caches at several positions (`observation`), and searches the one leading
per-pair rotation by the model's own tables that explains it; what no such rotation explains is refused.
`rotary_tables` asks the same rotary module again, at any position, in float32.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kvverify.models.observation import Observation, RotaryCall, observe

__all__ = ["RotarySignature", "probe", "require_same_table", "rotary_tables", "table_changes_with_length"]

LAST_POSITION = 2**24 - 1  # its successor is the first integer beyond which float32 has gaps
TABLE_ROUNDOFF = 2.0**-8  # bfloat16 unit roundoff, the coarsest in which a model keeps its tables
# Rows of one token differ by rounding that grows with depth; a wrong layout is off by as much as the row itself.
FLOAT32_TOLERANCE = 2.0**-12


@dataclass(frozen=True)
class RotarySignature:
    """How one layer's rows are rotated IN THE CACHE, which may differ from the order of the weights.

    layout: pair i is (i, i + rotary_dims/2) in "half", (2i, 2i + 1) in "interleaved".
    rotary_dims: the leading dims that rotate; 0 in a layer without rotation.
    sense: +1 where (x, y) becomes (x cos - y sin, x sin + y cos), -1 where it turns the other way.
    amplitude: sqrt(cos^2 + sin^2) of the model's tables (not 1 for YaRN and LongRoPE).
    tensor: the cache tensor that holds the rotated rows; a latent cache (MLA) keeps its rotary branch in "values".
    """

    layout: Literal["half", "interleaved"]
    rotary_dims: int
    sense: Literal[1, -1]
    amplitude: float
    tensor: Literal["keys", "values"] = "keys"


SHAPES: tuple[tuple[Literal["half", "interleaved"], Literal[1, -1]], ...]
SHAPES = (("half", 1), ("interleaved", 1), ("half", -1), ("interleaved", -1))
UNROTATED = RotarySignature(layout="half", rotary_dims=0, sense=1, amplitude=1.0)

_Finding = tuple[RotarySignature, RotaryCall | None]
_seen: weakref.WeakKeyDictionary[nn.Module, tuple[Observation, dict[int, _Finding]]] = weakref.WeakKeyDictionary()


def probe(model: nn.Module, *, layer: int = 0) -> RotarySignature:
    """Find how `model` rotates the rows that layer `layer` caches; remembered per model object.

    The model must be in eval mode; its weights, tables and device stay untouched. ValueError for what is not a
    leading per-pair rotation of the keys alone: M-RoPE (three position axes), a rotation of trailing dims or of keys
    and values together (DeepSeek-V4), learned positions; and for layers that cache no rows. Positions that enter
    elsewhere (ALiBi, query scales that depend on the position) are not seen: their cached keys do not move.
    """
    return _find(model, layer)[0]


def rotary_tables(
    model: nn.Module, positions: Tensor, *, layer: int = 0, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the model's own (cos, sin), float32 [positions, pairs], amplitude included, on the model's device.

    The sense is folded into sin: (x, y) -> (x cos - y sin, x sin + y cos) rotates the pairs of every model. Asked in
    float32, because tables rounded to bfloat16 are off by up to 0.54 % in cos^2 + sin^2. The angle is the model's
    float32 product position * frequency; at position 65,536 that is up to 1.9e-3 rad from the exact one.

    positions: int64 [positions], 0 to 2^24 - 1.
    length: how many positions exist when the table is used. Required where the table depends on it
        (`table_changes_with_length`), and then above every position; elsewhere it has no effect.
    """
    _check_positions(positions)
    signature, call = _find(model, layer)
    if call is None:
        empty = torch.zeros(len(positions), 0, device=next(model.parameters()).device)
        return empty, empty.clone()
    if not table_changes_with_length(model, layer=layer):
        length = None
    elif length is None:
        raise ValueError(
            f"length: layer {layer}'s table depends on the sequence length; expected that length, got None"
        )
    elif len(positions) and int(positions.max()) >= length:
        raise ValueError(f"positions: expected all below length {length}, got {int(positions.max())}")
    cos, sin = call.tables(positions, length)
    return cos, signature.sense * sin


def table_changes_with_length(model: nn.Module, *, layer: int = 0) -> bool:
    """Say whether a longer sequence changes the table at a position already written (dynamic NTK, LongRoPE)."""
    call = _find(model, layer)[1]
    if call is None or not any("inv_freq" in name for name, _ in call.module.named_buffers()):
        return False  # no rotation, or a fixed array that ends
    one = torch.tensor([1])
    short, long = call.tables(one, 2), call.tables(one, LAST_POSITION)
    return not all(map(torch.equal, short, long))


def require_same_table(model: nn.Module, *, written_at: int, now: int, layer: int = 0) -> None:
    """Raise ValueError where keys written at sequence length `written_at` met another table than the one at `now`.

    Relocation takes a phase off with the table that put it on; with another table the key comes out wrong.
    """
    for argument, length in (("written_at", written_at), ("now", now)):
        if length < 1:
            raise ValueError(f"{argument}: expected a sequence length of at least 1, got {length}")
    if not table_changes_with_length(model, layer=layer):
        return
    first = torch.tensor([1])
    before, after = (rotary_tables(model, first, layer=layer, length=max(2, length)) for length in (written_at, now))
    if not all(map(torch.equal, before, after)):
        raise ValueError(
            f"now: layer {layer}'s rotary table at length {now} differs from the one its keys were written with "
            f"at length {written_at}; expected an unchanged table"
        )


def _find(model: nn.Module, layer: int) -> _Finding:
    if not isinstance(model, nn.Module) or model not in _seen:
        _seen[model] = (observe(model), {})
    seen, found = _seen[model]
    if layer not in range(len(seen.rows)):
        raise ValueError(f"layer: expected 0 to {len(seen.rows) - 1}, got {layer}")
    if layer not in found:
        found[layer] = _explain(seen, layer, type(model).__name__)
    return found[layer]


def _explain(seen: Observation, layer: int, name: str) -> _Finding:
    cached = seen.rows[layer]
    if cached is None:
        raise ValueError(f"layer: layer {layer} of {name} caches no rows; expected an attention layer of its own")
    if not all(bool(rows.any()) for rows in cached):
        raise ValueError(f"model: layer {layer} of {name} caches zeros alone; expected weights that are not zero")
    moved = [
        tensor
        for tensor, rows in zip(("keys", "values"), cached, strict=True)
        if _difference(rows, rows[:, :1]) > _tolerance(rows)
    ]
    if not moved:
        return UNROTATED, None
    if len(moved) == 2:
        raise ValueError(f"model: layer {layer} of {name} moves keys and values with the position; expected keys alone")
    tensor: Literal["keys", "values"] = "keys" if moved == ["keys"] else "values"
    rows = cached[0] if tensor == "keys" else cached[1]
    # The best of all fits, not the first: the tables of two layer types may differ in their slow pairs only.
    error, best = _tolerance(rows), None
    for call, cos, sin in seen.calls:
        if not 0 < 2 * cos.shape[-1] <= rows.shape[-1] or not _is_table(cos, sin):
            continue
        for layout, sense in SHAPES:
            found = _difference(rows, _from_first(rows, cos, sense * sin, layout))
            if found <= error:
                error, best = found, (call, layout, sense, 2 * cos.shape[-1])
    if best is None:
        raise ValueError(
            f"model: no rotation of leading pairs by its own tables explains layer {layer} of {name}; expected one "
            "(rotated trailing dims, learned positions and several position axes cannot be relocated)"
        )
    call, layout, sense, rotary_dims = best
    amplitude = float(call.tables(torch.tensor([0]))[0].mean())
    return RotarySignature(layout, rotary_dims, sense, amplitude, tensor), call


def _tolerance(rows: Tensor) -> float:
    return max(FLOAT32_TOLERANCE, 8 * torch.finfo(rows.dtype).eps)


def _difference(rows: Tensor, expected: Tensor) -> float:
    return float((rows.double() - expected).abs().max() / rows.abs().max())


def _is_table(cos: Tensor, sin: Tensor) -> bool:
    """Say whether the amplitude is one number, and no pair has turned at position 0 (as it has in (sin, cos))."""
    amplitude = torch.hypot(cos, sin)
    spread = (amplitude - amplitude[0, 0]).abs().max()
    return not bool(sin[0].any()) and bool(spread <= 2 * TABLE_ROUNDOFF * amplitude[0, 0])


def _from_first(rows: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the row at position 0, [tokens, 1, heads, dim], to the other probed positions."""
    pairs = cos.shape[-1]
    x_dims, y_dims = slice(0, pairs), slice(pairs, 2 * pairs)
    if layout == "interleaved":
        x_dims, y_dims = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    first = rows[:, :1].double()
    x, y = first[..., x_dims] / cos[0], first[..., y_dims] / cos[0]
    cos, sin = cos[:, None], sin[:, None]
    moved = first.repeat(1, len(cos), 1, 1)
    moved[..., x_dims], moved[..., y_dims] = x * cos - y * sin, x * sin + y * cos
    return moved


def _check_positions(positions: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions: expected an int64 tensor, got {type(positions).__name__}")
    if positions.dtype != torch.int64 or positions.ndim != 1:
        raise TypeError(f"positions: expected int64 [positions], got {positions.dtype} {list(positions.shape)}")
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) <= LAST_POSITION:
        raise ValueError(f"positions: expected 0 to {LAST_POSITION}, got {positions.min()} to {positions.max()}")
