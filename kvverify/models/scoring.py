"""Teacher-forced scores of a text under several policies, row by row.

With a prefix of n tokens, token n is the first input and token n + 1 the first target, so m tokens after the prefix
make m - 1 calls at Q = 1 and as many targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Scores", "score"]


@dataclass(frozen=True, eq=False)
class Scores:
    """Per row and target: negative log-likelihood and KL(row 0 || row) of the next token (nats); did argmax hit."""

    nll: Tensor  # [rows, targets]
    next_token_kl: Tensor  # [rows, targets]
    correct: Tensor  # [rows, targets]


def score(forward: Callable[[Tensor], Tensor], tokens: Tensor, *, prefix: int, chunk: int = 1) -> Scores:
    """Score tokens prefix+1 .. of a text by teacher forcing, `chunk` inputs a call, after the prefix was read.

    `forward(tokens[n]) -> logits[rows, n, vocab]`, the logits after each token. nll = -log p(target).

    Shapes: tokens[n] -> Scores of n - prefix - 1 targets.
    """
    targets = len(tokens) - prefix - 1
    if prefix < 1 or targets < 1:
        raise ValueError(f"prefix is {prefix}, expected 1 to {len(tokens) - 2}, to leave an input and a target")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least one token a call")
    inputs, wanted = tokens[prefix:-1], tokens[prefix + 1 :]
    parts = []
    for start in range(0, targets, chunk):
        logp = forward(inputs[start : start + chunk]).double().log_softmax(-1)
        now = wanted[start : start + chunk]
        nll = -logp.gather(2, now.expand(len(logp), -1)[..., None])[..., 0]
        kl = (logp[:1].exp() * (logp[:1] - logp)).sum(-1)
        parts.append((nll, kl, logp.argmax(-1) == now))
    return Scores(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))
