"""Windows of real text, and a needle planted in each: what is scored, made from names and checked against hashes.

A window is the first `prefix + scored` tokens of an address: the prefix is the prompt, the rest is teacher-forced.
Its needle version states a pass key inside the prompt, at a depth that cycles over the windows, and asks for it after
the prompt, so that no policy sees the question before it has compressed; the digits of the key are what is scored.
Perplexity can gain from forgetting; the needle cannot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DIGITS", "Window", "build_window", "sha256_of", "spread"]

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DIGITS = 5
STATEMENT = "\n\nThe pass key is {key}. Remember it.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is "


@dataclass(frozen=True, eq=False)
class Window:
    """Token ids of one window and of its needle version: prompt of `prefix` tokens, then what is teacher-forced."""

    text: str
    prefix: int
    tokens: Tensor  # int64[prefix + scored]
    needle: Tensor  # int64[prefix + question + digits]

    @property
    def record(self) -> dict[str, str]:
        """The window's line in a manifest."""
        return {"text": self.text, "tokens_sha256": sha256_of(self.tokens), "needle_sha256": sha256_of(self.needle)}


def build_window(tokenizer: Any, text: str, content: str, *, number: int, prefix: int, scored: int) -> Window:
    """Tokenize one text and plant its needle; ValueError if it is too short.

    The key is made of the text's name (sha256), its depth is DEPTHS[number mod 5] of the prompt.
    """
    # Eight characters a token is twice the average: enough for the window without tokenizing a whole address.
    ids = tokenizer(content[: 8 * (prefix + scored)]).input_ids[: prefix + scored]
    if len(ids) < prefix + scored:
        raise ValueError(f"text {text!r} has {len(ids)} tokens, expected at least {prefix + scored}")
    key = str(int(hashlib.sha256(text.encode()).hexdigest(), 16))[:DIGITS]
    statement = tokenizer(STATEMENT.format(key=key)).input_ids
    asked = tokenizer(QUESTION).input_ids + tokenizer(key).input_ids
    room = prefix - len(statement)
    depth = int(DEPTHS[number % len(DEPTHS)] * room)
    needle = ids[:depth] + statement + ids[depth:room] + asked
    return Window(text, prefix, torch.tensor(ids), torch.tensor(needle))


def spread(names: Sequence[str], count: int) -> list[str]:
    """Return `count` names evenly spaced over a list: the middles of `count` equal parts."""
    if not 1 <= count <= len(names):
        raise ValueError(f"count is {count}, expected 1 to {len(names)}, the number of names")
    return [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]


def sha256_of(tokens: Tensor) -> str:
    """Hash token ids as little-endian int64."""
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
