"""The prompt of a question, and how an answer is scored: exact match, token F1 and negative log-likelihood.

The prompt was chosen by the full cache's accuracy, all tokens of the answer being first choices, on pilot histories
that are not used again (1,000 to 1,007, 32 questions, 2,048 tokens): question and stem on two lines 16 right, on one
line 15, the stem alone 15. On the first 16 of the questions, before the stems of updates were worded like the
statements, question and stem had 5, the question alone 0, with an instruction 0, the chat template with the stem 4.

Texts are compared after lower-casing, without punctuation and articles.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.experiments.relay_records import MemoryQuestion

__all__ = ["PROMPT", "Prompt", "build_prompt", "clean_answer", "exact_match", "mean_nll", "normalise", "token_f1"]

PROMPT = "\nQuestion: {question}\nAnswer: {stem}"
"""The question, and the start of the sentence that the answer completes."""

_ENDS = re.compile(r"[\n.,;:!?<]")
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids of a question as asked, question[q], and of its reference answer, answer[a]."""

    question: Tensor
    answer: Tensor


def build_prompt(encode: Callable[[str], list[int]], question: MemoryQuestion, template: str = PROMPT) -> Prompt:
    """Tokenize a question and its answer; the answer begins with the blank that follows the stem.

    template: what is asked, with the fields {question} and {stem}.
    """
    text = template.format(question=question.text, stem=question.stem)
    return Prompt(torch.tensor(encode(text)), torch.tensor(encode(" " + question.answer)))


def clean_answer(text: str) -> str:
    """Return the answer in what a model wrote: up to the first punctuation or line end."""
    return _ENDS.split(text.strip(), maxsplit=1)[0].strip()


def normalise(text: str) -> list[str]:
    """Split into words in lower case, without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def exact_match(answer: str, reference: str) -> bool:
    """Tell whether both texts have the same words in the same order."""
    return normalise(answer) == normalise(reference)


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words, each counted as often as it occurs: 2 common / (words of both); 1 where both have none."""
    given, wanted = normalise(answer), normalise(reference)
    if not given and not wanted:
        return 1.0
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def mean_nll(logits: Sequence[Tensor], answer: Tensor) -> list[float]:
    """Mean negative log-likelihood per answer token, in nats, of each row.

    logits: [rows, steps, vocab] each, together one step for every token of answer[a].
    """
    scores = torch.cat(list(logits), 1).double().log_softmax(-1)
    if scores.shape[1] != len(answer):
        raise ValueError(f"logits are of {scores.shape[1]} steps, expected {len(answer)}, one for each answer token")
    found = -scores.gather(2, answer.expand(len(scores), -1)[..., None])[..., 0]
    return [float(value) for value in found.mean(1)]
