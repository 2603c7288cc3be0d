"""What comes after the needle: continuation loss beside needles, and the streaming path against the one-shot path.

Loss over a continuation is by teacher forcing: the rows of the continuation are written and always attended.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvverify.experiments.results import Cell, Chart, Result, quantile
from kvverify.experiments.vestige_needles import INTACT
from kvverify.experiments.vestige_retrieval import deployed_archives
from kvverify.experiments.vestige_trials import (
    BLOCK,
    TIER_ONE,
    Archive,
    Trial,
    answer_loss,
    attend_all,
    attend_kept,
    question_trials,
    stay,
)
from kvverify.models.latents import Attend, step
from kvverify.models.needles import load
from kvverify.vestige.partition import EvictionPolicy, Partition, append, attended

__all__ = ["CONTINUATION", "continuation_loss", "partition_of", "streaming_path"]

CONTINUATION = 48
PREFILL_CHUNK = 300


def continuation_loss(*, trials: int, tokens: int = 4096) -> Result:
    """(g) Loss over the filler that follows, beside the needle's, for two tiers, tier 1, and recent rows only.

    Both are differences to the full cache, at 32x.
    """
    model = load("nope")
    excess: dict[str, list[float]] = {"two tiers": [], "tier 1 only": [], "recent only": []}
    needle: dict[str, list[float]] = {name: [] for name in excess}
    dropped = 0
    for trial in question_trials(model, trials=trials, tokens=tokens, continuation=CONTINUATION):
        whole = statistics.fmean(_losses(model, trial, attend_all(trial.prefix)))
        asked, right = answer_loss(model, trial, 0, attend_all(trial.prefix))
        dropped += not right
        salient = stay(TIER_ONE["branch, 4 bins"], trial, (32,))[32]
        arms: dict[str, tuple[list[Tensor], list[Archive]]] = {
            "two tiers": (salient, deployed_archives(trial.prefix, salient)),
            "tier 1 only": (salient, []),
            "recent only": ([torch.arange(tokens) >= tokens - tokens // 32 for _ in salient], []),
        }
        for name, arm in arms.items():
            excess[name].append(statistics.fmean(_losses(model, trial, attend_kept(trial.prefix, *arm))) - whole)
            if right:
                needle[name].append(answer_loss(model, trial, 0, attend_kept(trial.prefix, *arm))[0] - asked)
    return Result(
        f"Continuation loss beside needles, {tokens} tokens, 32x",
        ("policy", "measure", "excess, nats", "standard error", "trials"),
        tuple(
            (name, measure, statistics.fmean(values), _standard_error(values), len(values))
            for name in excess
            for measure, values in (("continuation, a token", excess[name]), ("needle", needle[name]))
            if values
        ),
        Chart("measure", "excess, nats", "policy"),
        {"tokens": tokens, "trials": trials, "continuation": CONTINUATION, "compression": 32},
        (f"{dropped} of {trials} needles dropped: the full cache does not answer them.",),
    )


def streaming_path(*, trials: int, tokens: int = 4096) -> Result:
    """(j) Chunked prefill, streamed closes and tier 2 against one shot; the floor is eager against SDPA attention.

    Gaps are |difference of loss| a token, over a teacher-forced continuation. Both paths run the deployed partition
    (4 sinks, tail attended). 16 needles, 4 of them asked for.
    """
    model, eager = load("nope"), load("nope")
    eager.set_attn_implementation("eager")
    rows: list[tuple[Cell, ...]] = []
    for compression in (32, 512):
        policy = EvictionPolicy(block=BLOCK, bandwidth=4, fraction=1 / compression)
        gaps: list[float] = []
        floor: list[float] = []
        moved = lost = recovered = asked = 0
        once, chunked = (
            question_trials(model, trials=trials, tokens=tokens, needles=16, continuation=CONTINUATION, chunk=chunk)
            for chunk in (None, PREFILL_CHUNK)
        )
        for one_shot, streamed in zip(once, chunked, strict=True):
            kept_once = [partition_of(layer.branch, policy, tokens) for layer in one_shot.prefix.latents]
            kept = [partition_of(layer.branch, policy, PREFILL_CHUNK) for layer in streamed.prefix.latents]
            moved += sum(int((a != b).sum()) for a, b in zip(kept_once, kept, strict=True))
            archives = deployed_archives(streamed.prefix, kept)
            expected = _losses(
                model, one_shot, attend_kept(one_shot.prefix, kept_once, deployed_archives(one_shot.prefix, kept_once))
            )
            gaps += _gaps(_losses(model, streamed, attend_kept(streamed.prefix, kept, archives)), expected)
            floor += _gaps(_model_losses(eager, one_shot), _model_losses(model, one_shot))
            for needle in range(4):
                full, right = answer_loss(model, one_shot, needle, attend_all(one_shot.prefix))
                if right:
                    evicted, _ = answer_loss(model, streamed, needle, attend_kept(streamed.prefix, kept))
                    restored, _ = answer_loss(model, streamed, needle, attend_kept(streamed.prefix, kept, archives))
                    asked += 1
                    lost += evicted - full >= INTACT
                    recovered += restored - full < INTACT
        counts = (moved, lost, recovered, asked)
        rows.append((compression, "streamed against one shot", quantile(gaps, 0.5), max(gaps), *counts))
        rows.append((compression, "eager against SDPA", quantile(floor, 0.5), max(floor), None, None, None, None))
    return Result(
        f"The streaming path, {tokens} tokens, prefill in chunks of {PREFILL_CHUNK}",
        (
            "compression",
            "path",
            "gap p50, nats a token",
            "gap max, nats a token",
            "kept rows that differ",
            "lost by tier 1",
            "intact with tier 2",
            "questions",
        ),
        tuple(rows),
        Chart("compression", "gap max, nats a token", "path"),
        {"tokens": tokens, "trials": trials, "chunk": PREFILL_CHUNK, "block": BLOCK, "bandwidth": 4, "sinks": 4},
    )


def partition_of(branch: Tensor, policy: EvictionPolicy, chunk: int) -> Tensor:
    """Bool mask[rows] of what a partition attends after it was appended in chunks: kept rows and tail."""
    partition = Partition(policy)
    for part in branch.split(chunk):
        partition = append(partition, part)
    mask = torch.zeros(branch.shape[0], dtype=torch.bool)
    mask[attended(partition)] = True
    return mask


def _losses(model: Any, trial: Trial, attention: Attend) -> list[float]:
    """Loss of each token of the continuation but the first, which is given."""
    losses = []
    for offset, (token, following) in enumerate(pairwise(trial.following)):
        logits = step(model, int(token), trial.prefix.length + offset, attention)
        losses.append(float(cross_entropy(logits.double()[None], following[None])))
    return losses


@torch.no_grad()
def _model_losses(model: Any, trial: Trial) -> list[float]:
    """The same by the model's own forward pass over everything, without a cache."""
    tokens = torch.cat([trial.prefix.tokens, trial.following[:-1]])
    logits = model(tokens[None], use_cache=False, logits_to_keep=trial.following.shape[0] - 1).logits[0]
    losses: list[float] = cross_entropy(logits.double(), trial.following[1:], reduction="none").tolist()
    return losses


def _gaps(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(found, expected, strict=True)]


def _standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
