"""Quantize and pack 16,384 x 128 keys and values to 4 bits: this package against the cache layers of transformers.

    pip install --no-deps optimum-quanto hqq          in an environment of its own; either will do
    python bench/quantize_pair.py

One process, one thread, the calls interleaved; the ratio is of medians, with the spread of the ratio over rounds.
A layer quantizes as it takes in a prompt (`update`). It groups 64 neighbours of the flattened tensor; this package
groups 64 tokens of a channel (keys) and 64 channels of a token (values), rounds its scales outward to fp16, and finds
codes against the stored scales.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from kvverify.geodesia.ladder import pack, quantize

TOKENS, DIM, BITS, GROUP, ROUNDS = 16_384, 128, 4, 64, 15
LAYERS = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}


def ours(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Quantize and pack both; return the bytes made."""
    made = 0
    for rows, axis in ((keys, "token"), (values, "channel")):
        codes, low, step = quantize(rows[0, 0], bits=BITS, axis=axis, group=GROUP)
        made += sum(part.numel() * part.element_size() for part in (pack(codes, bits=BITS), low, step))
    return made


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each layer that is installed and runs here."""
    torch.set_num_threads(1)
    rows = torch.randn(2, 1, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        keys, values = rows.to(dtype)
        print(f"{dtype}: ours makes {ours(keys, values):,} bytes")
        for name, layer in LAYERS.items():

            def theirs(layer: type = layer, keys: torch.Tensor = keys, values: torch.Tensor = values) -> None:
                layer(nbits=BITS, q_group_size=GROUP).update(keys, values)

            try:
                theirs()
            except Exception as error:  # a backend that is missing, or needs a GPU, is named and passed over
                print(f"  {name}: does not run here: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            pairs = [(seconds(lambda: ours(keys, values)), seconds(theirs)) for _ in range(ROUNDS)]  # noqa: B023
            mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = sorted(a / b for a, b in pairs)
            print(
                f"  ours {1e3 * mine:.1f} ms, {name} {1e3 * other:.1f} ms: ratio {mine / other:.2f} "
                f"(rounds {ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
