"""The partition of one sequence: a state machine of pure functions.

    row --append--> pending --its block is full and the sequence is past the dense threshold--> closed
    closed = kept (attended) + archived (bit-exact, reached through the index)

A row is in exactly one of pending, kept, archived. Pending rows are the *tail*: they have no salience and are always
attended. Every close reruns the global selection with the grown quota, so rows may move BOTH ways between kept and
archived; the salience itself never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_real, require_tensor
from kvverify.vestige.salience import salience
from kvverify.vestige.selection import quota, select

__all__ = ["EvictionPolicy", "Partition", "append", "archived", "attended", "rebalance"]


@dataclass(frozen=True)
class EvictionPolicy:
    """The tier-1 settings; the defaults are the deployed ones, except that no threshold is set.

    block: rows that close together. bandwidth: low bins that the salience removes. fraction: rho, the share of closed
    rows that salience keeps. sinks: leading rows kept in any case. dense_below: a shorter sequence stays dense, and
    the step that reaches this length closes all whole blocks at once (deployed: 32,768; 0 = no threshold).
    """

    block: int = 4096
    bandwidth: int = 16
    fraction: float = 1 / 32
    sinks: int = 4
    dense_below: int = 0

    def __post_init__(self) -> None:
        require_count("block", self.block, minimum=1)
        require_count("bandwidth", self.bandwidth, minimum=1)
        require_real("fraction", self.fraction, minimum=0.0, maximum=1.0)
        require_count("sinks", self.sinks)
        require_count("dense_below", self.dense_below)


@dataclass(frozen=True)
class Partition:
    """What tier 1 knows of one sequence; an empty sequence is `Partition(policy)`.

    salience[closed] and kept[closed] (bool: True = attended, False = archived) are of the closed rows, in row order.
    pending[tail, branch] is the branch of the rows that are not closed yet, None before the first row.
    """

    policy: EvictionPolicy = field(default_factory=EvictionPolicy)
    salience: Tensor = field(default_factory=lambda: torch.zeros(0))
    kept: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    pending: Tensor | None = None

    @property
    def closed(self) -> int:
        """Rows that have a salience."""
        return self.salience.shape[0]

    @property
    def rows(self) -> int:
        """All rows of the sequence."""
        return self.closed + (0 if self.pending is None else self.pending.shape[0])


def append(partition: Partition, branch: Tensor) -> Partition:
    """Add rows with this branch[new, branch], close every block that they complete, and rerun the selection.

    The result depends on the rows and not on how they were cut into calls: the salience of a block is computed from
    that block, and the selection sees all closed rows. Chunked prefill of any chunking, one-shot prefill and
    token-by-token decoding agree bit for bit.
    """
    require_tensor("branch", branch, (None, None if partition.pending is None else partition.pending.shape[1]))
    # A copy even of the first rows: the caller may write to that storage again before the block closes.
    pending = branch.clone() if partition.pending is None else torch.cat([partition.pending, branch])
    policy = partition.policy
    dense = partition.closed + pending.shape[0] < policy.dense_below
    closing = 0 if dense else pending.shape[0] // policy.block * policy.block
    if closing == 0:
        return replace(partition, pending=pending)
    fresh = salience(pending[:closing], bandwidth=policy.bandwidth, block=policy.block)
    grown = torch.cat([partition.salience.to(fresh), fresh])
    return rebalance(replace(partition, salience=grown, pending=pending[closing:].clone()))


def rebalance(partition: Partition, *, fraction: float | None = None) -> Partition:
    """Rerun the selection over all closed rows, from now on under `fraction` if one is given."""
    policy = partition.policy if fraction is None else replace(partition.policy, fraction=fraction)
    kept = select(partition.salience, keep=quota(partition.closed, fraction=policy.fraction), sinks=policy.sinks)
    return replace(partition, policy=policy, kept=kept)


def archived(partition: Partition) -> Tensor:
    """Ascending positions of the archived rows, int64."""
    return (~partition.kept).nonzero().flatten()


def attended(partition: Partition) -> Tensor:
    """Ascending positions of the rows that every step attends, kept and tail, int64; fetched rows come on top."""
    tail = torch.arange(partition.closed, partition.rows, device=partition.kept.device)
    return torch.cat([partition.kept.nonzero().flatten(), tail])
