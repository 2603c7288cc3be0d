"""What a model caches for single tokens at several positions, and which rotary tables it used for it.

One token alone attends only itself, so its hidden state does not depend on its position, in any layer: the rows that
one forward pass over single-token sequences leaves in the cache differ by what the position does to them, and by
nothing else. The rotary modules (`*Rotary*` in the class name, the only name relied upon) are replaced by deep copies
during the pass, so that a table which a model recomputes on the fly stays as it was.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvverify.models import require

__all__ = ["Observation", "RotaryCall", "observe"]

PROBE_POSITIONS = (0, 1, 2, 11)
# The last probe position, as far as the model goes: there, slow pairs turn by enough to tell two tables apart.
FARTHEST_POSITION = 4095


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module: how to repeat it, and which reading of its answer has one column per pair."""

    module: nn.Module
    arguments: Mapping[str, Any]  # all but position_ids
    device: torch.device
    reading: int = 0

    def tables(self, positions: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Ask a copy of the module for float32 (cos, sin) [positions, pairs], once `length` positions exist."""
        module = copy.deepcopy(self.module)
        asked = positions
        if length is not None:
            # Position 0 alone takes a grown table back; the last position then makes it grow to this length exactly.
            module(position_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), **self.arguments)
            asked = torch.cat((positions, positions.new_tensor([length - 1])))
        output = module(position_ids=asked.to(self.device)[None], **self.arguments)
        cos, sin = readings(output)[self.reading]
        return cos[0, : len(positions)].float().contiguous(), sin[0, : len(positions)].float().contiguous()


@dataclass(frozen=True)
class Observation:
    """Cached rows [tokens, positions, heads, dim] by layer, and the rotary calls with the tables the pass used.

    A layer's entry is (keys, values) as its cache names them, or None where it caches no rows. A call's tables are
    float64 cos and sin [positions, pairs], rounded as the model rounded them.
    """

    rows: tuple[tuple[Tensor, Tensor] | None, ...]
    calls: tuple[tuple[RotaryCall, Tensor, Tensor], ...]


def observe(model: nn.Module) -> Observation:
    """Run two tokens at each of a few positions, each in a sequence of its own, and return what the cache holds.

    ValueError for a model in training mode (dropout would move the rows) and for M-RoPE, which takes three positions.
    """
    transformers = require("transformers")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    if model.training:
        raise ValueError(f"model: {name} is in training mode; expected model.eval()")
    if any(hasattr(module, "mrope_section") for module in model.modules()):
        raise ValueError(f"model: {name} rotates by three position axes (M-RoPE); expected one position per token")
    text = model.config.get_text_config()
    # Two tokens, as one of them may be a padding token of zeros.
    tokens = torch.tensor([text.vocab_size // 2, text.vocab_size // 3], device=model.device)
    farthest = min(FARTHEST_POSITION, getattr(text, "max_position_embeddings", FARTHEST_POSITION) - 1)
    positions = torch.tensor((*PROBE_POSITIONS, farthest), device=model.device)
    shape = (len(tokens), len(positions))
    cache = transformers.DynamicCache(config=text)
    with _recorded_rotary_calls(model) as recorded, torch.no_grad():
        model(
            input_ids=tokens.repeat_interleave(len(positions))[:, None],
            position_ids=positions.repeat(len(tokens))[:, None],
            cache=cache,
            use_cache=True,
        )
    used = (slice(0, len(positions)), 0)  # the tables are the same for both tokens
    calls = [
        (replace(call, reading=number), cos[used].cpu().double(), sin[used].cpu().double())
        for call, output in recorded
        for number, (cos, sin) in enumerate(readings(output))
    ]
    return Observation(tuple(_rows(layer, shape) for layer in cache.layers), tuple(calls))


def readings(output: Any) -> list[tuple[Tensor, Tensor]]:
    """List the ways to read (cos, sin), one column per pair: complex, in either order, each pair once or twice."""
    if isinstance(output, Tensor):
        return [(output.real, output.imag)] if output.is_complex() else []
    if not (isinstance(output, tuple) and len(output) == 2):
        return []
    first, second = output
    width = first.shape[-1]
    columns = (slice(0, width // 2), slice(0, width, 2), slice(0, width))
    return [(a[..., chosen], b[..., chosen]) for chosen in columns for a, b in ((first, second), (second, first))]


def _rows(layer: Any, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    if not isinstance(getattr(layer, "keys", None), Tensor):
        return None  # a recurrent layer, or one that borrows the rows of another
    keys, values = (tensor[:, :, -1].unflatten(0, shape).cpu() for tensor in (layer.keys, layer.values))
    return keys, values


@contextmanager
def _recorded_rotary_calls(model: nn.Module) -> Iterator[list[tuple[RotaryCall, Any]]]:
    """Let copies stand in for the rotary modules of `model`, and list every call that is given position_ids."""
    recorded: list[tuple[RotaryCall, Any]] = []
    homes = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "Rotary" in type(child).__name__
    ]

    def recorder(original: nn.Module) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            positions = arguments.pop("position_ids", None)
            if positions is None:
                return
            # A rotary module reads only type and device of its input; asked in float32, it does not round its tables.
            plain = torch.zeros(1, device=positions.device)
            arguments = {name: plain if isinstance(value, Tensor) else value for name, value in arguments.items()}
            recorded.append((RotaryCall(original, arguments, positions.device), output))

        return record

    try:
        for parent, name, child in homes:
            stand_in = copy.deepcopy(child)
            stand_in.register_forward_hook(recorder(child), with_kwargs=True)
            setattr(parent, name, stand_in)
        yield recorded
    finally:
        for parent, name, child in homes:
            setattr(parent, name, child)
