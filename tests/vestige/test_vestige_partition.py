"""The partition of one sequence, and of several in one pool, against plain Python."""

from __future__ import annotations

import os
from collections import Counter
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor
from vestige_cases import attention_error, gaussian

from kvverify.vestige import attend, index, salience
from kvverify.vestige.partition import EvictionPolicy, Partition, append, archived, attended, rebalance
from kvverify.vestige.pool import Pool
from kvverify.vestige.step import Retrieval, decode

POLICY = EvictionPolicy(block=8, bandwidth=2, fraction=0.3, sinks=2)


def filled(branch: Tensor, policy: EvictionPolicy, chunks: list[int]) -> Partition:
    partition, start = Partition(policy), 0
    for chunk in chunks:
        partition = append(partition, branch[start : start + chunk])
        start += chunk
    return append(partition, branch[start:])


def same(left: Partition, right: Partition) -> bool:
    assert left.pending is not None
    assert right.pending is not None
    return (
        torch.equal(left.salience, right.salience)
        and torch.equal(left.kept, right.kept)
        and torch.equal(left.pending, right.pending)
    )


def test_nothing_is_closed_before_a_block_is_full() -> None:
    partition = append(Partition(POLICY), gaussian(7, 3))
    assert (partition.closed, partition.rows) == (0, 7)
    assert attended(partition).tolist() == list(range(7))
    assert archived(partition).tolist() == []


def test_the_tail_is_attended_and_never_archived() -> None:
    partition = append(Partition(POLICY), gaussian(21, 3))
    assert partition.closed == 16
    assert set(range(16, 21)) <= set(attended(partition).tolist())
    assert max(archived(partition).tolist()) < 16
    assert sorted(attended(partition).tolist() + archived(partition).tolist()) == list(range(21))


@given(st.lists(st.integers(0, 13), max_size=12), st.sampled_from([0, 20, 33]))
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_any_chunking_gives_the_partition_of_one_shot(chunks: list[int], dense_below: int) -> None:
    policy = EvictionPolicy(block=8, bandwidth=2, fraction=0.3, sinks=2, dense_below=dense_below)
    branch = gaussian(sum(chunks) + 5, 3, seed=len(chunks), dtype=torch.bfloat16)
    assert same(filled(branch, policy, chunks), append(Partition(policy), branch))


def test_crossing_the_dense_threshold_closes_all_blocks_in_one_pass() -> None:
    policy = EvictionPolicy(block=8, bandwidth=2, fraction=0.3, sinks=2, dense_below=40)
    branch = gaussian(43, 3)
    before = append(Partition(policy), branch[:39])
    assert before.closed == 0
    assert attended(before).tolist() == list(range(39))
    after = append(before, branch[39:40])
    assert after.closed == 40
    assert same(append(after, branch[40:]), filled(branch, POLICY, [8] * 5))


def test_the_caller_may_reuse_the_storage_it_passed() -> None:
    buffer, branch = torch.empty(4, 3, dtype=torch.float64), gaussian(16, 3, seed=1)
    partition = Partition(POLICY)
    for part in branch.split(4):
        buffer.copy_(part)
        partition = append(partition, buffer)
    assert same(partition, append(Partition(POLICY), branch))


def test_rebalance_moves_rows_both_ways_and_changes_no_salience() -> None:
    partition = append(Partition(POLICY), gaussian(64, 3, seed=2))
    grown = rebalance(partition, fraction=0.6)
    assert set(attended(partition).tolist()) < set(attended(grown).tolist())
    assert torch.equal(grown.salience, partition.salience)
    assert same(rebalance(grown, fraction=0.3), partition)
    assert same(rebalance(partition), partition)


def test_a_full_pool_refuses_rows_and_stays_as_it_was() -> None:
    pool = Pool(10, content=2, branch=3, policy=POLICY)
    pool.append(0, torch.ones(8, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"rows holds 3 rows: expected at most the 2 free ones"):
        pool.append(0, torch.ones(3, 5, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"rows has dtype torch.float32: expected torch.bfloat16"):
        pool.append(0, torch.ones(1, 5))
    assert pool.row_of(0).tolist() == list(range(8))
    pool.append(1, torch.ones(2, 5, dtype=torch.bfloat16))
    assert pool.row_of(1).tolist() == [8, 9]


class PoolMachine(RuleBasedStateMachine):
    """Three slots in one pool, against a model of Python lists: after every step, who is where, and who is attended
    how often.

    Column 0 of a row is its number, unique over the run, so that the rows themselves say which of them an id list
    names. Branches are small integers, so that equal saliences are common.
    """

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(dense_below=st.sampled_from([0, 20]), fraction=st.sampled_from([0.1, 0.3, 0.5]))
    def start(self, dense_below: int, fraction: float) -> None:
        self.policy = EvictionPolicy(block=8, bandwidth=2, fraction=fraction, sinks=2, dense_below=dense_below)
        self.pool = Pool(120, content=3, branch=2, policy=self.policy, dtype=torch.float64)
        self.model: dict[int, list[list[float]]] = {}
        self.fraction: dict[int, float] = {}
        self.written = 0

    @rule(slot=st.integers(0, 2), count=st.integers(0, 17), seed=st.integers(0, 99))
    def add(self, slot: int, count: int, seed: int) -> None:
        """Append, and with it close, rebalance and crossing the threshold."""
        rows = torch.randint(-2, 3, (count, 5), generator=torch.Generator().manual_seed(seed)).double()
        rows[:, 0] = torch.arange(self.written, self.written + count)
        held = sum(len(sequence) for sequence in self.model.values())
        if held + count > 120:
            PoolMachine.seen["refused"] += 1
            with pytest.raises(ValueError, match="free ones"):
                self.pool.append(slot, rows)
            return
        self.pool.append(slot, rows)
        self.written += count
        PoolMachine.seen["reused rows"] += int(count > 0 and int(self.pool.row_of(slot)[-1]) < self.written - count)
        self.model.setdefault(slot, []).extend(rows.tolist())

    @rule(slot=st.integers(0, 2))
    def release(self, slot: int) -> None:
        PoolMachine.seen["released closed rows"] += int(self.pool.partition(slot).closed > 0)
        self.pool.release(slot)
        self.model.pop(slot, None)
        self.fraction.pop(slot, None)

    @rule(slot=st.integers(0, 2), fraction=st.sampled_from([0.05, 0.25, 0.5]))
    def rebalance(self, slot: int, fraction: float) -> None:
        if slot in self.model:
            before = set(self.pool.attended(slot).tolist())
            self.pool.rebalance(slot, fraction=fraction)
            self.fraction[slot] = fraction
            PoolMachine.seen["rows moved by rebalance"] += int(before != set(self.pool.attended(slot).tolist()))

    @rule(
        slot=st.integers(0, 2),
        seed=st.integers(0, 99),
        cap=st.sampled_from([None, None, 1]),
        width=st.sampled_from([None, 2]),
    )
    def step(self, slot: int, seed: int, cap: int | None, width: int | None) -> None:
        """Decode: attended + fetched are the rows of the softmax, each once, whatever was fetched."""
        query = gaussian(2, 5, seed=seed)
        query[:, 0] = 0  # the number of a row is not part of its score
        kept, old = self.pool.attended(slot), self.pool.archived(slot)
        basis = torch.eye(3, dtype=torch.float64)[1:2]
        retrieval = Retrieval(basis, inflation=4.0, cap=cap, width=width)
        sketch, residual = index(torch.cat([old[:, None] * 0.0, self.pool.rows[old, 1:3]], dim=1), basis)
        result = decode(query, self.pool.rows, kept, old, sketch, residual, retrieval, scale=1.0)
        PoolMachine.seen["overflow"] += int(result.overflow)
        PoolMachine.seen["part of the archive fetched"] += int(0 < result.fetched.shape[0] < old.shape[0])
        listed = Counter(self.numbers(torch.cat([kept, result.fetched])))
        assert set(listed.values()) <= {1}
        assert set(self.numbers(result.fetched)) <= set(self.numbers(old))
        assert not result.overflow or set(listed) == {row[0] for row in self.model.get(slot, [])}
        payload = torch.tensor([row for row in self.model.get(slot, []) if row[0] in listed], dtype=torch.float64)
        if not listed:
            assert torch.equal(result.lse, torch.full((2,), -torch.inf, dtype=torch.float64))
            return
        payload[:, 0] = 0
        out, lse = attend(query, payload, torch.arange(len(listed)), scale=1.0, value_dim=3)
        out_bound, lse_bound = attention_error(query, payload, scale=1.0, value_dim=3)
        assert (result.lse - lse).abs().max() <= lse_bound
        assert (result.out - out)[:, 1:].abs().max() <= out_bound

    def numbers(self, ids: Tensor) -> list[float]:
        numbers: list[float] = self.pool.rows[ids, 0].tolist()
        return numbers

    @invariant()
    def every_slot_is_partitioned_as_the_model_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        PoolMachine.seen["steps"] += 1
        owners = Counter(row for slot in range(3) for row in self.pool.row_of(slot).tolist())
        assert set(owners.values()) <= {1}
        for slot in range(3):
            sequence = self.model.get(slot, [])
            kept, old = plain_partition(sequence, self.policy, self.fraction.get(slot, self.policy.fraction))
            tail = range(len(kept) + len(old), len(sequence))
            assert Counter(self.numbers(self.pool.attended(slot))) == Counter(
                sequence[row][0] for row in [*kept, *tail]
            )
            PoolMachine.seen["archive"] += int(len(old) > 0)
            PoolMachine.seen["past the dense threshold"] += int(0 < self.policy.dense_below <= len(sequence))
            assert self.pool.rows[self.pool.archived(slot)].tolist() == [sequence[row] for row in old]


def plain_partition(
    sequence: list[list[float]], policy: EvictionPolicy, fraction: float
) -> tuple[list[int], list[int]]:
    """Kept and archived positions, from the rule as it is written: sort all closed rows, take the head, add the
    sinks."""
    closed = len(sequence) // policy.block * policy.block if len(sequence) >= policy.dense_below else 0
    if not closed:
        return [], []
    branch = torch.tensor(sequence[:closed], dtype=torch.float64)[:, 3:]
    sigma = salience(branch, bandwidth=policy.bandwidth, block=policy.block).tolist()
    quota = max(1, round(fraction * closed))
    kept = set(sorted(range(closed), key=lambda row: (-sigma[row], row))[:quota]) | set(range(policy.sinks))
    return sorted(kept), [row for row in range(closed) if row not in kept]


def test_the_pool_agrees_with_lists_after_every_step() -> None:
    """At least 1,500 steps, and more where KVVERIFY_STATE_STEPS asks for them."""
    wanted = int(os.environ.get("KVVERIFY_STATE_STEPS", "1500"))
    PoolMachine.seen.clear()
    run_state_machine_as_test(
        # A fixed seed: the derandomized one happened to switch `add` off in every run, and all slots stayed empty.
        seed(6)(PoolMachine),
        settings=settings(
            max_examples=wanted // 30,  # some runs end before 50 steps
            stateful_step_count=50,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert PoolMachine.seen["steps"] >= wanted
    events = (
        "archive",
        "past the dense threshold",
        "released closed rows",
        "reused rows",
        "refused",
        "rows moved by rebalance",
        "part of the archive fetched",
        "overflow",
    )
    rare = [event for event in events if PoolMachine.seen[event] < 5]
    assert not rare, f"the run hardly met {rare}: {dict(PoolMachine.seen)}"
