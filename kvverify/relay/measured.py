"""What finite precision does to relocation: the figures behind the claims of status "measured".

`python -m kvverify.relay.measured` prints them. None is a law: the sizes depend on the sample, fixed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.relay.policy import RotaryTable, default_table, relocate_positions

__all__ = ["amplitude_left_out", "bf16_tables", "common_shift", "drift", "main"]

ROWS, PAIRS = 512, 64


def _keys(dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 2 * PAIRS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _places(start: int) -> Tensor:
    return torch.arange(start, start + ROWS)


def drift(steps: int) -> float:
    """Relative error, in norm, of keys stored in bf16 after `steps` relocations by one position."""
    table, first = default_table(ROWS + steps + 1, PAIRS), _keys(torch.bfloat16)
    keys = first
    for step in range(steps):
        keys = relocate_positions(keys, _places(step), _places(step + 1), table)
    exact = relocate_positions(first.double(), _places(0), _places(steps), table)
    return float((keys.double() - exact).norm() / exact.norm())


def common_shift(shift: int) -> tuple[float, float]:
    """Root-mean-square and largest change of scores when queries and keys in bf16 both move on by `shift`."""
    table = default_table(ROWS + shift, PAIRS)
    zero = torch.zeros(ROWS, dtype=torch.int64)

    def scores(start: int) -> Tensor:
        query, key = (
            relocate_positions(_keys(torch.float32, seed), zero, _places(start), table).bfloat16().double()
            for seed in (1, 2)
        )
        product: Tensor = query @ key.T / (2 * PAIRS) ** 0.5
        return product

    change = scores(shift) - scores(0)
    return float(change.square().mean().sqrt()), float(change.abs().max())


def bf16_tables() -> float:
    """Largest relative deviation of c^2 + s^2 from a^2 = 1 in a table cast to bf16."""
    table = default_table(4096, PAIRS)
    squares = table.cos.bfloat16().double().square() + table.sin.bfloat16().double().square()
    return float((squares - 1).abs().max())


def amplitude_left_out(amplitude: float = 1.1386) -> float:
    """By how much the norm of a key grows when the division by a^2 is left out."""
    table = default_table(ROWS, PAIRS, amplitude=amplitude)
    keys = _keys(torch.float64)
    bare = RotaryTable(table.cos / amplitude**2, table.sin / amplitude**2)
    moved = relocate_positions(keys, _places(0), _places(0).flip(0), table, written_with=bare)
    return float((moved.norm() / keys.norm()).item())


def main() -> None:
    """Print the figures."""
    print(f"{ROWS} keys of {2 * PAIRS} dims, N(0, 1), theta 1e4")
    for steps in (1, 16, 256, 1024):
        print(f"drift of bf16 keys after {steps:>4} relocations by +1: {drift(steps):.2%}")
    rms, largest = common_shift(2048)
    print(f"scores after a common shift by 2048, bf16 storage: rms {rms:.4f}, largest {largest:.4f}")
    print(f"table cast to bf16, largest deviation of c^2 + s^2: {bf16_tables():.2%}")
    print(f"norm when the division by a^2 is left out, a = 1.1386: x {amplitude_left_out():.4f}")


if __name__ == "__main__":
    main()
