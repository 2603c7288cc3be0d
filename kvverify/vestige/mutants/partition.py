"""Partitions and steps that are known to be wrong: a mutant changes what the reference says, or what it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvverify.vestige.mutants.eviction import best
from kvverify.vestige.operators import STREAM
from kvverify.vestige.policy import attend, salience, select
from kvverify.vestige.stream import Sequence, history, stream
from kvverify.vestige.stream_case import StreamCase

__all__: list[str] = []

Four = tuple[Tensor, Tensor, Tensor, Tensor]
NAMES = ("rows", "query", "basis")


def told(args: tuple[Tensor, ...], static: dict[str, Any], **changes: Any) -> Four:
    """The reference, with some arguments exchanged."""
    return stream(**{**dict(zip(NAMES, args, strict=True)), **static, **changes})


def sequences(static: dict[str, Any]) -> list[dict[int, Sequence]]:
    """The sequences after each event."""
    return history(
        static["script"], block=static["block"], dense_below=static["dense_below"], fraction=static["fraction"]
    )


def chosen(
    args: tuple[Tensor, ...], static: dict[str, Any], choose: Callable[[Tensor, Tensor, Sequence], Tensor]
) -> Four:
    """The reference, but with `choose(sigma[closed], branch[rows], sequence)` to say which closed rows are kept."""
    attended, archived, out, lse = told(args, static)
    branch = args[0][:, args[2].shape[1] :]
    for event, now in enumerate(sequences(static)):
        for sequence in now.values():
            closed = list(sequence.rows[: sequence.closed])
            sigma = salience(branch[closed], bandwidth=static["bandwidth"], block=static["block"])
            kept = choose(sigma, branch[list(sequence.rows)], sequence).long()
            attended[event, closed], archived[event, closed] = kept, 1 - kept
    return attended, archived, out, lse


def kept_by_count(args: tuple[Tensor, ...], static: dict[str, Any], count: Callable[[Sequence], int]) -> Four:
    """The reference with another m."""

    def choose(sigma: Tensor, _branch: Tensor, sequence: Sequence) -> Tensor:
        keep = min(max(count(sequence), 0), len(sigma))
        return select(sigma, keep=keep, sinks=static["sinks"])

    return chosen(args, static, choose)


@STREAM.mutant("quota", case=StreamCase(sinks=0))
def quota_of_the_first_block(*args: Tensor, **static: Any) -> Four:
    first = static["block"]
    return kept_by_count(args, static, lambda sequence: max(1, round(sequence.fraction * min(first, sequence.closed))))


@STREAM.mutant("quota", case=StreamCase(events="two slots", block=7, fraction=0.5, sinks=0))
def quota_rounded_down(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: max(1, math.floor(sequence.fraction * sequence.closed)))


@STREAM.mutant("quota", case=StreamCase(sinks=0))
def quota_rounded_up(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: max(1, math.ceil(sequence.fraction * sequence.closed)))


@STREAM.mutant("quota", case=StreamCase(block=7, fraction=0.5, sinks=0))
def quota_rounds_halves_up(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: max(1, math.floor(sequence.fraction * sequence.closed + 0.5)))


@STREAM.mutant("quota", case=StreamCase(sinks=0))
def quota_of_all_rows(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: max(1, round(sequence.fraction * len(sequence.rows))))


@STREAM.mutant("quota", case=StreamCase(fraction=0.0, sinks=0))
def quota_may_be_zero(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: round(sequence.fraction * sequence.closed))


@STREAM.mutant("quota", case=StreamCase(events="rebalance", sinks=0))
def ignores_a_new_fraction(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(args, static, lambda sequence: max(1, round(static["fraction"] * sequence.closed)))


@STREAM.mutant("most_salient", case=StreamCase(sinks=4))
def sinks_fill_the_quota(*args: Tensor, **static: Any) -> Four:
    def choose(sigma: Tensor, _branch: Tensor, sequence: Sequence) -> Tensor:
        raised = torch.cat([torch.full_like(sigma[: static["sinks"]], torch.inf), sigma[static["sinks"] :]])
        return best(raised, max(1, round(sequence.fraction * len(sigma)))) if len(sigma) else raised > 0

    return chosen(args, static, choose)


@STREAM.mutant("quota", case=StreamCase(sinks=0))
def unscored_rows_fill_the_quota(*args: Tensor, **static: Any) -> Four:
    return kept_by_count(
        args,
        static,
        lambda sequence: round(sequence.fraction * sequence.closed) - (len(sequence.rows) - sequence.closed),
    )


@STREAM.mutant("stream_sinks", case=StreamCase(fraction=0.03, sinks=4))
def partition_forgets_the_sinks(*args: Tensor, **static: Any) -> Four:
    return told(args, static, sinks=0)


@STREAM.mutant("most_salient", case=StreamCase(regime="one block"))
def partition_has_a_quota_per_block(*args: Tensor, **static: Any) -> Four:
    def choose(sigma: Tensor, _branch: Tensor, sequence: Sequence) -> Tensor:
        blocks = [best(part, round(sequence.fraction * len(part))) for part in sigma.split(static["block"])]
        mask = torch.cat(blocks) if blocks else sigma > 0
        mask[: static["sinks"]] = True
        return mask

    return chosen(args, static, choose)


@STREAM.mutant("most_salient")
def salience_of_the_content(*args: Tensor, **static: Any) -> Four:
    rows = args[0].clone()
    content = args[2].shape[1]
    rows[:, content:] = args[0][:, : rows.shape[1] - content]
    return told((rows, *args[1:]), static)


@STREAM.mutant("most_salient", case=StreamCase(content=16))
def salience_of_columns_half_in_the_content(*args: Tensor, **static: Any) -> Four:
    rows = args[0].clone()
    content, branch = args[2].shape[1], args[0].shape[1] - args[2].shape[1]
    rows[:, content:] = args[0][:, content - branch // 2 : content - branch // 2 + branch]
    return told((rows, *args[1:]), static)


@STREAM.mutant("most_salient", case=StreamCase(regime="trend"))
def salience_of_the_whole_prefix(*args: Tensor, **static: Any) -> Four:
    def choose(sigma: Tensor, branch: Tensor, sequence: Sequence) -> Tensor:
        whole = salience(branch[: len(sigma)], bandwidth=static["bandwidth"], block=None)
        keep = min(len(sigma), max(1, round(sequence.fraction * len(sigma))))
        return select(whole, keep=keep, sinks=static["sinks"])

    return chosen(args, static, choose)


@STREAM.mutant("most_salient")
def salience_is_zero(*args: Tensor, **static: Any) -> Four:
    rows = args[0].clone()
    rows[:, args[2].shape[1] :] = 0
    return told((rows, *args[1:]), static)


@STREAM.mutant("chunking", "tail", case=StreamCase(events="decoding"))
def each_append_closes_its_own_blocks(*args: Tensor, **static: Any) -> Four:
    # As if an append never filled the block that an earlier one began.
    attended, archived, out, lse = told(args, static)
    arrived = 0
    for event, (action, _, amount) in enumerate(static["script"]):
        if action == "append":
            late = slice(arrived, arrived + int(amount))
            if int(amount) < static["block"]:
                attended[event:, late] += archived[event:, late]
                archived[event:, late] = 0
            else:
                archived[event:, late] += attended[event:, late]
                attended[event:, late] = 0
            arrived = late.stop
    return attended, archived, out, lse


@STREAM.mutant("chunking", case=StreamCase(seed=5))
def keep_set_is_frozen_at_the_first_close(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    closing = [event for event in range(len(attended)) if archived[event].any()]
    if closing:
        old = archived[closing[0]] > 0
        for lists, other in ((archived, attended), (attended, archived)):
            lists[closing[0] :, old] = int(lists is archived)
            other[closing[0] :, old] = int(other is archived)
    return attended, archived, out, lse


@STREAM.mutant("tail", "partition")
def drops_the_tail(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    for event, now in enumerate(sequences(static)):
        for sequence in now.values():
            attended[event, list(sequence.rows[sequence.closed :])] = 0
    return attended, archived, out, lse


@STREAM.mutant("tail", case=StreamCase(dense_below=33))
def archives_the_tail(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    for event, now in enumerate(sequences(static)):
        for sequence in now.values():
            late = list(sequence.rows[sequence.closed :])
            attended[event, late], archived[event, late] = 0, 1
    return attended, archived, out, lse


@STREAM.mutant("tail", case=StreamCase(dense_below=33))
def ignores_the_dense_threshold(*args: Tensor, **static: Any) -> Four:
    return told(args, static, dense_below=0)


def moved(lists: Tensor, other: Tensor) -> Tensor:
    """Rows that came into a list since the event before, out of the other one: bool[events, rows]."""
    came = torch.zeros_like(lists, dtype=torch.bool)
    came[1:] = (lists[1:] > 0) & (other[:-1] > 0)
    return came.cumsum(0) > 0


@STREAM.mutant("partition", case=StreamCase(events="rebalance"))
def loses_demoted_rows(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    return attended, archived * ~moved(archived, attended), out, lse


@STREAM.mutant("partition", case=StreamCase(events="rebalance"))
def leaves_promoted_rows_in_the_archive(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    return attended, archived + (moved(attended, archived) & (archived == 0)).long() * (attended > 0), out, lse


@STREAM.mutant("partition")
def lists_a_new_row_twice(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    arrived = 0
    for event, (action, _, amount) in enumerate(static["script"]):
        if action == "append" and amount:
            arrived += int(amount)
            attended[event, arrived - 1] *= 2
    return attended, archived, out, lse


@STREAM.mutant("partition", case=StreamCase(events="reuse"))
def remembers_released_rows(*args: Tensor, **static: Any) -> Four:
    attended, archived, out, lse = told(args, static)
    gone = (attended + archived == 0) & ((attended + archived).cumsum(0) > 0)
    return attended + gone, archived, out, lse


@STREAM.mutant("reuse", "quota", case=StreamCase(events="reuse", sinks=0))
def a_slot_keeps_the_fraction_of_its_last_sequence(*args: Tensor, **static: Any) -> Four:
    force: dict[int, float] = {}
    fractions = []
    for action, slot, amount in static["script"]:
        force.update({slot: amount} if action == "rebalance" else {})
        fractions.append(dict(force))
    attended, archived, out, lse = told(args, static)
    for event, now in enumerate(sequences(static)):
        for slot, sequence in now.items():
            if slot in fractions[event] and sequence.closed:
                closed = list(sequence.rows[: sequence.closed])
                sigma = salience(
                    args[0][closed][:, args[2].shape[1] :], bandwidth=static["bandwidth"], block=static["block"]
                )
                keep = max(1, round(fractions[event][slot] * len(closed)))
                kept = select(sigma, keep=keep, sinks=static["sinks"]).long()
                attended[event, closed], archived[event, closed] = kept, 1 - kept
    return attended, archived, out, lse


def stepped(
    args: tuple[Tensor, ...], static: dict[str, Any], fetch: Callable[[list[int], list[int], Sequence], list[int]]
) -> Four:
    """The reference, but a step attends the rows that `fetch(attended, archived, sequence)` lists."""
    attended, archived, out, lse = told(args, static)
    rows, query, basis = args
    for slot, sequence in sequences(static)[-1].items():
        here = [row for row in sequence.rows if attended[-1, row]]
        there = [row for row in sequence.rows if archived[-1, row]] if static["theta"] < 0 else []
        listed = torch.tensor(fetch(here, there, sequence), dtype=torch.int64)
        out[slot], lse[slot] = attend(query, rows, listed, scale=static["scale"], value_dim=basis.shape[1])
    return attended, archived, out, lse


@STREAM.mutant("everything_fetched")
def attends_fetched_rows_twice(*args: Tensor, **static: Any) -> Four:
    return stepped(args, static, lambda here, there, _: here + there + there)


@STREAM.mutant("everything_fetched", case=StreamCase(events="two slots"))
def takes_archive_positions_for_rows(*args: Tensor, **static: Any) -> Four:
    return stepped(args, static, lambda here, there, sequence: here + [sequence.rows.index(row) for row in there])


@STREAM.mutant("everything_fetched")
def truncates_the_fetch_silently(*args: Tensor, **static: Any) -> Four:
    return stepped(args, static, lambda here, there, _: here + there[:4])


@STREAM.mutant("everything_fetched")
def never_fetches(*args: Tensor, **static: Any) -> Four:
    return told(args, static, theta=math.inf)


@STREAM.mutant("nothing_fetched", case=StreamCase(gate="closed"))
def fetches_through_a_closed_gate(*args: Tensor, **static: Any) -> Four:
    return told(args, static, theta=-math.inf)


@STREAM.mutant("nothing_fetched", "everything_fetched", case=StreamCase(gate="closed"))
def a_step_forgets_the_tail(*args: Tensor, **static: Any) -> Four:
    def fetch(here: list[int], there: list[int], sequence: Sequence) -> list[int]:
        late = set(sequence.rows[sequence.closed :])
        return [row for row in here if row not in late] + there

    return stepped(args, static, fetch)


@STREAM.mutant("everything_fetched")
def archives_in_eight_bits(*args: Tensor, **static: Any) -> Four:
    _, archived, _, _ = told(args, static)
    rows = args[0].clone()
    old = archived[-1] > 0
    rows[old] = rows[old].to(torch.float8_e4m3fn).to(rows.dtype)
    attended, archived, _, _ = told(args, static)
    return attended, archived, *told((rows, *args[1:]), static)[2:]


@STREAM.control
def stream_in_double_precision(*args: Tensor, **static: Any) -> Four:
    """float64, rounded once."""
    attended, archived, out, lse = told(tuple(tensor.double() for tensor in args), static)
    return attended, archived, out.to(args[0].dtype), lse.float()


@STREAM.control
def fetches_in_another_order(*args: Tensor, **static: Any) -> Four:
    """Fetched rows first, newest first."""
    return stepped(args, static, lambda here, there, _: [*reversed(there), *reversed(here)])
