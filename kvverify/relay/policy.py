"""Compact positions and phase relocation: the two rules of RoPERelay that act on a selected cache.

A key is cached after rotation, so it carries the phase of its source position. Relocation takes that phase off and puts
the phase of another position on; nothing is run through the model again. Float64 keys or factors are computed with in
float64, all others in float32, and there is one rounding to storage at the end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

__all__ = ["Layout", "RotaryTable", "align_end", "compact", "default_table", "relocate", "relocate_positions", "rotate"]

Layout: TypeAlias = Literal["half", "interleaved"]
"""Which dims form pair i: "half" is (i, i + pairs), "interleaved" is (2i, 2i + 1)."""

CHUNK_ROWS = 16_384
STORAGE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FACTOR_DTYPES = (torch.float32, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)


def compact(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Close the gaps between the retained states: consecutive positions in source order, every head ending at M - 1.

    With m = m_lh states kept by head h of layer l and M the largest of these counts, state i of the head moves to::

        p'_i = (M - m_lh) + i

    valid: bool[layers, heads, slots], True where a slot holds a state. The valid slots of a head are in ascending
    source order (any other order: `plans.relay`). One sample: every sample of a batch has its own M.

    Returns positions int64[layers, heads, slots], -1 where there is no state, and the anchor M, a 0-d int64 tensor.
    Source: RoPERelay, position organisation.
    """
    check_tensor("valid", valid, "layers, heads, slots", (torch.bool,))
    return align_end(valid.cumsum(-1) - 1, valid)


def align_end(offsets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Shift every head so that all heads end at one position.

    With e_lh one past the largest valid offset of a head (0 if it has none) and A the largest of these, the state at
    offset o moves to A - e_lh + o.

    offsets: int64[layers, heads, slots], at least 0 where valid, anything elsewhere. valid: bool of the same shape.
    Returns positions int64[layers, heads, slots], -1 where not valid, and A, a 0-d int64 tensor: the first position
    after the history.
    """
    if valid.numel() == 0:
        return torch.full(valid.shape, -1, dtype=torch.int64, device=valid.device), torch.tensor(0, device=valid.device)
    ends = torch.where(valid, offsets, -1).amax(-1, keepdim=True) + 1
    anchor = ends.max()
    return torch.where(valid, anchor - ends + offsets, -1), anchor


def relocate(
    keys: Tensor,
    cos_source: Tensor,
    sin_source: Tensor,
    cos_target: Tensor,
    sin_target: Tensor,
    *,
    layout: Layout,
    rotary_dims: int,
    chunk: int = CHUNK_ROWS,
) -> Tensor:
    """Take the source phase off every key and put the target phase on.

    With the model's own factors c = a cos(phi) and s = a sin(phi), each pair (x, y) becomes::

        (u, v)   = (x c_p + y s_p,  y c_p - x s_p) / (c_p^2 + s_p^2)
        (x', y') = (u c_p' - v s_p',  v c_p' + u s_p')

    the transposed rotation over the squared amplitude, then the rotation of the target. Where the two amplitudes
    differ, the key leaves scaled by their ratio, as the target would have written it.

    keys: [rows, dim] in fp16, bf16, fp32 or fp64.
    cos_source, sin_source, cos_target, sin_target: [rows, pairs] in fp32 or fp64, amplitude included.
    layout: which dims are pair i: "half" (i, i + pairs), "interleaved" (2i, 2i + 1).
    rotary_dims: 2 * pairs, the leading dims that rotate; the others return bit for bit.
    chunk: of this reference only: rows in work at a time. It bounds the temporaries and changes no bit.

    Returns [rows, dim] in the dtype of `keys`. TypeError for another dtype; ValueError where shape, layout, rotary_dims
    or device do not fit, a factor is not finite, or a source amplitude is zero. Source: RoPERelay, phase relocation.
    """
    check_tensor("keys", keys, "rows, dim", STORAGE_DTYPES)
    check_tensor("cos_source", cos_source, "rows, pairs", FACTOR_DTYPES)
    names = ("cos_source", "sin_source", "cos_target", "sin_target")
    factors = (cos_source, sin_source, cos_target, sin_target)
    (rows, dim), pairs = keys.shape, cos_source.shape[1]
    for name, factor in zip(names, factors, strict=True):
        check_tensor(name, factor, "rows, pairs", FACTOR_DTYPES)
        expect(tuple(factor.shape) == (rows, pairs), name, f"shape {tuple(factor.shape)}", f"{(rows, pairs)}")
        check_device(name, factor, keys)
    check_layout(layout)
    check_integer("rotary_dims", rotary_dims, least=0)
    expect(rotary_dims == 2 * pairs, "rotary_dims", rotary_dims, f"2 * pairs = {2 * pairs}")
    expect(rotary_dims <= dim, "rotary_dims", rotary_dims, f"at most dim = {dim}")
    check_integer("chunk", chunk, least=1)

    wide = torch.float64 if torch.float64 in {keys.dtype, *(factor.dtype for factor in factors)} else torch.float32
    moved = keys.clone()
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        cos, sin, new_cos, new_sin = (factor[part].to(wide) for factor in factors)
        squared_amplitude = cos * cos + sin * sin
        for name, factor in (("source", squared_amplitude), ("target", new_cos), ("target", new_sin)):
            expect(bool(factor.isfinite().all()), f"cos_{name}, sin_{name}", "NaN or infinity", "finite factors")
        expect(bool((squared_amplitude > 0).all()), "cos_source, sin_source", "amplitude 0", "a positive amplitude")
        first, second = (side.to(wide) for side in _pairs(keys[part], layout, pairs))
        first, second = _turn(first, second, cos, -sin)
        first, second = _turn(first / squared_amplitude, second / squared_amplitude, new_cos, new_sin)
        for stored, side in zip(_pairs(moved[part], layout, pairs), (first, second), strict=True):
            stored.copy_(side)
    return moved


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout, rotary_dims: int) -> Tensor:
    """Rotate keys that carry no phase yet, (x, y) -> (x c - y s, y c + x s): relocation from phase zero.

    Shapes, dtypes and errors are those of `relocate`, with `cos` and `sin` as its target.
    """
    check_tensor("cos", cos, "rows, pairs", FACTOR_DTYPES)
    one, zero = (torch.full((), value, dtype=cos.dtype, device=cos.device).expand_as(cos) for value in (1.0, 0.0))
    return relocate(keys, one, zero, cos, sin, layout=layout, rotary_dims=rotary_dims)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """The rotary factors of one layer: row p holds a_p cos(phi_p) and a_p sin(phi_p), for p = 0, 1, 2, ...

    cos, sin: [positions, pairs] in fp32 or fp64. Ask the model for fp32: in a table cast to bf16, c^2 + s^2 is off by
    up to .54 %. A table with no pairs is that of a layer without rotary embedding: its keys pass through.
    """

    cos: Tensor
    sin: Tensor
    layout: Layout = "half"

    def __post_init__(self) -> None:
        for name, factor in (("cos", self.cos), ("sin", self.sin)):
            check_tensor(name, factor, "positions, pairs", FACTOR_DTYPES)
            expect(bool(factor.isfinite().all()), name, "NaN or infinity", "finite factors")
        shape = tuple(self.cos.shape)
        expect(tuple(self.sin.shape) == shape, "sin", f"shape {tuple(self.sin.shape)}", f"{shape}, the shape of cos")
        check_device("sin", self.sin, self.cos)
        expect(bool((self.cos**2 + self.sin**2 > 0).all()), "cos, sin", "amplitude 0", "a positive amplitude")
        check_layout(self.layout)

    @property
    def rotary_dims(self) -> int:
        """The leading dims that rotate: two for each pair."""
        return 2 * self.cos.shape[1]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides a phase. Read anew every time, because a tensor can change in place."""
        digest = hashlib.sha256(f"{self.layout} {self.cos.dtype} {self.sin.dtype} {tuple(self.cos.shape)}".encode())
        for factor in (self.cos, self.sin):
            digest.update(factor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def relocate_positions(
    keys: Tensor,
    source: Tensor,
    target: Tensor,
    table: RotaryTable,
    *,
    written_with: RotaryTable | str | None = None,
    chunk: int = CHUNK_ROWS,
) -> Tensor:
    """Relocate keys from positions to positions; a key that stays where it is keeps its stored bytes.

    keys: [rows, dim]. source, target: int32 or int64 [rows], within their tables. Never a half type, which counts
    exactly only to 256 (bf16) or 2048 (fp16).
    table: the factors to apply.
    written_with: what the keys were written with, if that is on record: a fingerprint must be that of `table`, a
    RotaryTable is the one inverted (dynamic scaling, LongRoPE's change of list). None says: with `table`.

    Rows are independent, and two may share a position, as rows of different heads do. That two states of one head never
    meet is checked where heads are known, by `plans.Plan`.
    Errors are those of `relocate`, and ValueError for a position outside its table or a table that has changed.
    """
    check_tensor("keys", keys, "rows, dim", STORAGE_DTYPES)
    check_integer("chunk", chunk, least=1)
    check_instance("table", table, RotaryTable)
    if written_with is not None:
        check_instance("written_with", written_with, RotaryTable, str)
    writing = _writing_table(table, written_with)
    for name, positions, known in (("source", source, writing), ("target", target, table)):
        check_tensor(name, positions, "rows", POSITION_DTYPES)
        expect(len(positions) == len(keys), name, f"{len(positions)} rows", f"{len(keys)}, the rows of keys")
        check_device(name, positions, keys)
        limit = len(known.cos)
        for outside in positions[(positions < 0) | (positions >= limit)][:1].tolist():
            raise ValueError(f"{name}: got position {outside}, expected 0 to {limit - 1}, the positions of the table")

    moving = source != target if writing is table else torch.ones_like(source, dtype=torch.bool)
    moved = keys.clone()
    for part in torch.split(moving.nonzero().flatten(), chunk):
        old, new = source[part], target[part]
        factors = writing.cos[old], writing.sin[old], table.cos[new], table.sin[new]
        moved[part] = relocate(keys[part], *factors, layout=table.layout, rotary_dims=table.rotary_dims)
    return moved


def default_table(
    count: int,
    pairs: int,
    *,
    theta: float = 10_000.0,
    factor: float = 1.0,
    amplitude: float = 1.0,
    layout: Layout = "half",
) -> RotaryTable:
    """Build the table of positions 0 to count - 1 as models do: fp32 angles p theta^(-i / pairs) / factor.

    factor: that of linear scaling. amplitude: the attention factor of YaRN, 0.1 ln(s) + 1 for a scale s.
    An fp32 angle is off by up to p 2^-24 omega (1.9e-3 rad at 65,536); it is what the key was written with.
    """
    check_integer("count", count, least=0)
    check_integer("pairs", pairs, least=0)
    for name, value in (("theta", theta), ("factor", factor), ("amplitude", amplitude)):
        expect(0 < value < float("inf"), name, value, "a finite number above 0")
    frequencies = 1.0 / theta ** (torch.arange(pairs, dtype=torch.float32) / max(pairs, 1)) / factor
    angles = torch.outer(torch.arange(count, dtype=torch.float32), frequencies)
    return RotaryTable(angles.cos() * amplitude, angles.sin() * amplitude, layout)


def _turn(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return first * cos - second * sin, second * cos + first * sin


def _pairs(keys: Tensor, layout: Layout, pairs: int) -> tuple[Tensor, Tensor]:
    """View the two sides of every pair."""
    if layout == "half":
        return keys[:, :pairs], keys[:, pairs : 2 * pairs]
    return keys[:, 0 : 2 * pairs : 2], keys[:, 1 : 2 * pairs : 2]


def _writing_table(table: RotaryTable, written_with: RotaryTable | str | None) -> RotaryTable:
    """Find the table to invert: `table` itself where nothing has changed."""
    if written_with is None:
        return table
    now = table.fingerprint
    if isinstance(written_with, str):
        changed = f"{now[:12]}: the table changed since the keys were written, pass the RotaryTable that wrote them"
        expect(written_with == now, "written_with", f"fingerprint {written_with[:12]}", changed)
        return table
    kind, wanted = (f"{known.rotary_dims} dims in {known.layout} layout" for known in (written_with, table))
    expect(kind == wanted, "written_with", kind, f"{wanted}, as table")
    return table if written_with.fingerprint == now else written_with


def expect(condition: bool, argument: str, got: object, expected: str, error: type[Exception] = ValueError) -> None:
    """Unless `condition` holds, raise one line: the argument, what it was, what it should have been."""
    if not condition:
        raise error(f"{argument}: got {got}, expected {expected}")


def check_tensor(argument: str, value: object, dims: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse anything but a tensor of one of `dtypes`, with one dimension for each name in `dims`."""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: got {type(value).__name__}, expected a tensor [{dims}] of {names}")
    expect(value.dtype in dtypes, argument, value.dtype, names, TypeError)
    expect(value.ndim == len(dims.split(",")), argument, f"shape {tuple(value.shape)}", f"[{dims}]")


def check_device(argument: str, value: Tensor, like: Tensor) -> None:
    """Refuse a tensor that lies elsewhere."""
    expect(value.device == like.device, argument, f"device {value.device}", f"{like.device}, as the other arguments")


def check_instance(argument: str, value: object, *kinds: type) -> None:
    """Refuse anything but an instance of one of these types."""
    wanted = " or ".join(kind.__name__ for kind in kinds)
    expect(isinstance(value, kinds), argument, type(value).__name__, wanted, TypeError)


def check_integer(argument: str, value: object, *, least: int) -> None:
    """Refuse anything but a Python int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument}: got {value!r}, expected an int")
    expect(value >= least, argument, value, f"at least {least}")


def check_layout(layout: object) -> None:
    """Refuse anything but a known layout."""
    expect(layout in get_args(Layout), "layout", repr(layout), "'half' or 'interleaved'")
