"""A whole life of sequences in one pool: the state machine as one function, so that a gate can call it.

A script says what happens, in order: ("append", slot, rows), ("rebalance", slot, fraction) or ("release", slot, 0).
Rows arrive in the order of the input and are known by their number there.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvverify.vestige.index import index
from kvverify.vestige.partition import EvictionPolicy
from kvverify.vestige.pool import Pool
from kvverify.vestige.step import Retrieval, decode

__all__ = ["Event", "Sequence", "history", "stream"]

Event = tuple[str, int, float]


def stream(
    rows: Tensor,
    query: Tensor,
    basis: Tensor,
    *,
    script: Listing[Event],
    slots: int,
    block: int,
    bandwidth: int,
    fraction: float,
    sinks: int,
    dense_below: int,
    scale: float,
    inflation: float,
    theta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drive the partition of several sequences through a script, then decode one step in every slot.

    rows[rows, content + branch]; query[heads, content + branch]; basis V[rank, content]. Returns attended[events,
    rows] and archived[events, rows] (int64): how often each row stands, after each event, in the list that every step
    of its sequence attends (kept and tail), and in the archive; 0 in both before it arrives and after its release.
    Then out[slots, heads, content] and lse[slots, heads] of one step per slot, with this inflation and entropy gate.
    block, bandwidth, fraction, sinks, dense_below: see `EvictionPolicy`. Source: VestigeKV section 4.1, deployed.
    """
    content = basis.shape[1]
    policy = EvictionPolicy(block, bandwidth, fraction, sinks, dense_below)
    capacity = max(rows.shape[0], 1)
    pool = Pool(capacity, content=content, branch=rows.shape[1] - content, policy=policy, dtype=rows.dtype)
    number = torch.full((capacity,), -1)
    attended = torch.zeros(len(script), rows.shape[0], dtype=torch.int64)
    archived = torch.zeros_like(attended)
    arrived = 0
    for event, (action, slot, amount) in enumerate(script):
        if action == "append":
            new = slice(arrived, arrived + int(amount))
            pool.append(slot, rows[new])
            number[pool.row_of(slot)[pool.row_of(slot).shape[0] - int(amount) :]] = torch.arange(new.start, new.stop)
            arrived = new.stop
        elif action == "rebalance":
            pool.rebalance(slot, fraction=amount)
        else:
            pool.release(slot)
        for each in {used for _, used, _ in script[: event + 1]}:
            attended[event] += torch.bincount(number[pool.attended(each)], minlength=rows.shape[0])
            archived[event] += torch.bincount(number[pool.archived(each)], minlength=rows.shape[0])
    retrieval = Retrieval(basis, inflation=inflation, theta=theta)
    steps = []
    for slot in range(slots):
        old = pool.archived(slot)
        sketch, residual = index(pool.rows[old, :content], basis)
        steps.append(decode(query, pool.rows, pool.attended(slot), old, sketch, residual, retrieval, scale=scale))
    return attended, archived, torch.stack([step.out for step in steps]), torch.stack([step.lse for step in steps])


@dataclass(frozen=True)
class Sequence:
    """One sequence: the numbers of its rows, how many of them are closed, and the fraction in force."""

    rows: tuple[int, ...]
    closed: int
    fraction: float


def history(script: Listing[Event], *, block: int, dense_below: int, fraction: float) -> list[dict[int, Sequence]]:
    """The sequences by slot after each event: what a script says, without any tensor."""
    told: list[dict[int, Sequence]] = []
    arrived = 0
    for action, slot, amount in script:
        now = dict(told[-1]) if told else {}
        sequence = now.pop(slot, Sequence((), 0, fraction))
        if action == "append":
            rows = (*sequence.rows, *range(arrived, arrived + int(amount)))
            arrived += int(amount)
            closed = len(rows) // block * block if len(rows) >= dense_below else 0
            now[slot] = Sequence(rows, closed, sequence.fraction)
        elif action == "rebalance":
            now[slot] = replace(sequence, fraction=amount)
        told.append(now)
    return told
