"""One storage for the rows of several sequences: where positions become pool rows.

Kernels see pool rows, never positions. Freed rows are handed out again last-in first-out, so that a reused slot lies
on scattered rows in no particular order, between stale ones: the layout that a kernel must survive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_tensor
from kvverify.vestige.partition import EvictionPolicy, Partition, append, archived, attended, rebalance

__all__ = ["Pool"]


class Pool:
    """Cache rows[capacity, content + branch] shared by sequences, each named by an int slot.

    A row is written once, by `append`. Closing and rebalancing move no data: that is why an archived row stays
    bit-exact.
    """

    def __init__(
        self, capacity: int, *, content: int, branch: int, policy: EvictionPolicy, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        require_count("capacity", capacity, minimum=1)
        require_count("content", content, minimum=1)
        require_count("branch", branch, minimum=1)
        self.rows = torch.zeros(capacity, content + branch, dtype=dtype)
        self.content = content
        self.policy = policy
        self._free = list(reversed(range(capacity)))
        self._partition: dict[int, Partition] = {}
        self._row_of: dict[int, Tensor] = {}

    def append(self, slot: int, rows: Tensor) -> None:
        """Store rows[new, content + branch] at the end of the sequence in `slot`; an unknown slot starts empty."""
        require_tensor("rows", rows, (None, self.rows.shape[1]), dtype=self.rows.dtype)
        if rows.shape[0] > len(self._free):
            raise ValueError(f"rows holds {rows.shape[0]} rows: expected at most the {len(self._free)} free ones")
        # The pure step first: if it refuses the rows, the pool is as it was.
        partition = append(self.partition(slot), rows[:, self.content :])
        taken = torch.tensor([self._free.pop() for _ in range(rows.shape[0])], dtype=torch.int64)
        self.rows[taken] = rows
        self._row_of[slot] = torch.cat([self.row_of(slot), taken])
        self._partition[slot] = partition

    def rebalance(self, slot: int, *, fraction: float) -> None:
        """Rerun the selection of `slot`, from now on under this fraction."""
        self._partition[slot] = rebalance(self.partition(slot), fraction=fraction)

    def release(self, slot: int) -> None:
        """Free the rows of `slot` and forget its state; what the storage holds is left there."""
        self._free.extend(self.row_of(slot).tolist())
        self._row_of.pop(slot, None)
        self._partition.pop(slot, None)

    def partition(self, slot: int) -> Partition:
        """Return the partition of `slot`."""
        return self._partition.get(slot, Partition(self.policy))

    def row_of(self, slot: int) -> Tensor:
        """Pool row of each position of `slot`: int64 [rows]."""
        return self._row_of.get(slot, torch.zeros(0, dtype=torch.int64))

    def attended(self, slot: int) -> Tensor:
        """Pool rows that every step of `slot` attends: kept and tail."""
        return self.row_of(slot)[attended(self.partition(slot))]

    def archived(self, slot: int) -> Tensor:
        """Pool rows of the archive of `slot`, in archive order, which is the order of positions."""
        return self.row_of(slot)[archived(self.partition(slot))]
