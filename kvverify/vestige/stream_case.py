"""Sequences that grow, move and leave: the inputs of `vestige.stream`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvverify.cases import Case, Inputs, among, generator
from kvverify.vestige.cases import SCALE, orthonormal
from kvverify.vestige.stream import Event, Sequence, history

__all__ = ["SCRIPTS", "StreamCase"]

SCRIPTS: dict[str, tuple[Event, ...]] = {
    "chunks": (("append", 0, 5), ("append", 0, 12), ("append", 0, 1), ("append", 0, 30), ("append", 0, 3)),
    "one shot": (("append", 0, 51),),
    "short": (("append", 0, 3), ("append", 0, 1)),
    "exact blocks": (("append", 0, 28), ("append", 0, 28)),
    "decoding": (("append", 0, 23), *(("append", 0, 1),) * 6),
    "two slots": (("append", 0, 20), ("append", 1, 9), ("append", 0, 7), ("append", 1, 16)),
    "reuse": (
        ("append", 0, 30),
        ("rebalance", 0, 0.9),
        ("append", 1, 17),
        ("release", 0, 0),
        ("append", 0, 26),
        ("append", 0, 9),
    ),
    "rebalance": (
        ("append", 0, 40),
        ("rebalance", 0, 0.6),
        ("append", 0, 9),
        ("rebalance", 0, 0.05),
        ("append", 0, 8),
    ),
    "nothing": (("append", 0, 0),),
}
"""What happens to the sequences, in order: (append, slot, rows), (rebalance, slot, fraction) or (release, slot, 0)."""


@dataclass(frozen=True, repr=False)
class StreamCase(Case):
    """Sequences in two slots that are appended to, rebalanced and released, and a decode step at the end.

    events: a script out of `SCRIPTS`. gate: "open" fetches everything that is archived, "closed" nothing.
    """

    events: str = among("chunks", *(name for name in SCRIPTS if name != "chunks"))
    block: int = among(8, 4, 7)
    bandwidth: int = among(2, 1, 3)
    fraction: float = among(0.3, 0.03, 0.5, 0.0, 1.0)
    sinks: int = among(2, 0, 4)
    dense_below: int = among(0, 20, 33)
    heads: int = among(2, 1)
    content: int = among(8, 16)
    branch: int = among(4, 2)
    regime: str = among("normal", "one block", "ties", "trend")
    gate: str = among("open", "closed")

    @property
    def script(self) -> tuple[Event, ...]:
        """The events by their steps."""
        return SCRIPTS[self.events]

    def sequences(self) -> list[dict[int, Sequence]]:
        """Who is where after each event, in plain Python."""
        return history(self.script, block=self.block, dense_below=self.dense_below, fraction=self.fraction)

    def build(self) -> Inputs:
        """Build rows[rows, content + branch] in order of arrival, a query per head, and the basis of the sketch."""
        random = generator(self.seed)
        count = int(sum(amount for action, _, amount in self.script if action == "append"))
        dim = self.content + self.branch
        rows = torch.randn(count, dim, generator=random, dtype=torch.float64)
        branch = rows[:, self.content :]
        match self.regime:
            case "one block":
                branch[8:16] *= 10
            case "ties":
                branch.copy_(branch.round())
            case "trend":
                branch.mul_(0.1).add_(torch.linspace(-4, 4, count, dtype=torch.float64)[:, None])
        query = torch.randn(self.heads, dim, generator=random, dtype=torch.float64)
        return Inputs(
            {
                "rows": rows.to(self.torch_dtype),
                "query": query.to(self.torch_dtype),
                "basis": orthonormal(3, self.content, self.seed),
            },
            {
                "script": self.script,
                "slots": 2,
                "block": self.block,
                "bandwidth": self.bandwidth,
                "fraction": self.fraction,
                "sinks": self.sinks,
                "dense_below": self.dense_below,
                "scale": SCALE,
                "inflation": 1e4,
                "theta": -math.inf if self.gate == "open" else math.inf,
            },
        )
