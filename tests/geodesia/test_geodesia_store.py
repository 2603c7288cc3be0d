"""The packed store: bytes, page codec, and a state machine that drives pool and sequences against a plain model."""

import pytest
import torch
from geodesia_cases import GROUPED, SMALL, normal, quick
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvverify.geodesia.accounting import Geometry, bits_per_value, budget_bits, summary_bits, token_bits
from kvverify.geodesia.ladder import EXACT, LADDER, MEAN, dequantize, quantize
from kvverify.geodesia.pool import PagePool, decode, demote, encode
from kvverify.geodesia.sequence import Sequence
from kvverify.geodesia.store import reconstruct

RUNGS = range(len(LADDER))


def test_rung_bits_per_value_are_the_published_ones():
    geometry = Geometry(dim=128)
    rates = [float(bits_per_value(bits, 128, 64)) for bits in geometry.costs]
    assert rates == [16, 8.5, 4.5, 2.5, 0.25]


def test_other_exact_parts_cost_their_real_tokens():
    assert token_bits(128, 3) == 2 * 3 * 128 * 16
    assert summary_bits(128, 65, block=64) == 2 * 2 * 128 * 16
    assert budget_bits(4.5, 128, 65) == 4.5 * 2 * 65 * 128


def test_geometry_that_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match=r"group is 7, expected a divisor of block = 8"):
        Geometry(dim=8, block=8, group=7)
    with pytest.raises(ValueError, match=r"let every rung save bits"):
        Geometry(dim=8, block=8, group=2)
    with pytest.raises(ValueError, match=r"dim is 0"):
        Geometry(dim=0)
    with pytest.raises(ValueError, match=r"level is 5"):
        SMALL.block_bits(5)


def blocks_of(geometry, count, *, seed=0, offset=0.0, dtype=torch.bfloat16):
    rows = normal(2, count, geometry.block, geometry.dim, seed=seed) + offset
    return rows[0].to(dtype), rows[1].to(dtype)


def expected_block(keys, values, path, geometry):
    """Reconstruct one block that was demoted along a path of rungs, from the exact rows and the ladder alone."""
    rung = next((r for r in reversed(path) if r != MEAN), EXACT)
    if rung == EXACT:
        keys, values = keys.double(), values.double()
    else:
        bits = LADDER[rung]
        of_keys = {"axis": "token", "group": min(geometry.group, geometry.block)}
        of_values = {"axis": "channel", "group": geometry.group}
        keys = dequantize(*quantize(keys, bits=bits, **of_keys), bits=bits, **of_keys)
        values = dequantize(*quantize(values, bits=bits, **of_values), bits=bits, **of_values)
    if path and path[-1] == MEAN:
        keys, values = (rows.mean(0).half().double().expand(geometry.block, -1) for rows in (keys, values))
    return keys, values


@pytest.mark.parametrize("geometry", [SMALL, GROUPED])
@pytest.mark.parametrize("level", RUNGS)
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_a_page_has_its_accounted_bytes_and_gives_back_the_policys_rows(geometry, level, offset):
    keys, values = blocks_of(geometry, 3, offset=offset)
    pages = encode(keys, values, level=level, geometry=geometry)
    assert pages.shape == (3, geometry.block_bits(level) // 8)
    rows = decode(pages, level=level, geometry=geometry, dtype=torch.bfloat16)
    for b in range(3):
        expected = expected_block(keys[b], values[b], [level], geometry)
        assert torch.equal(rows[0][b].expand(geometry.block, -1), expected[0])
        assert torch.equal(rows[1][b].expand(geometry.block, -1), expected[1])


@pytest.mark.parametrize("geometry", [SMALL, GROUPED])
@quick(60)
@given(st.lists(st.sampled_from(range(1, 5)), min_size=1, max_size=4, unique=True), st.sampled_from([0.0, 300.0]))
def test_demotion_from_the_page_alone_is_nested(geometry, path, offset):
    path = sorted(path)
    keys, values = blocks_of(geometry, 2, offset=offset)
    level, pages = EXACT, encode(keys, values, level=EXACT, geometry=geometry)
    for to in path:
        pages = demote(pages, level=level, to=to, geometry=geometry, dtype=torch.bfloat16)
        level = to
    rows = decode(pages, level=level, geometry=geometry, dtype=torch.bfloat16)
    expected = expected_block(keys[1], values[1], path, geometry)
    assert torch.equal(rows[0][1].expand(geometry.block, -1), expected[0])
    assert torch.equal(rows[1][1].expand(geometry.block, -1), expected[1])


def test_promotion_is_refused():
    pages = encode(*blocks_of(SMALL, 1), level=2, geometry=SMALL)
    with pytest.raises(ValueError, match=r"to is 1, expected a rung below 2"):
        demote(pages, level=2, to=1, geometry=SMALL, dtype=torch.bfloat16)
    sequence = Sequence(PagePool(SMALL))
    sequence.append(normal(2, 8, 8).bfloat16(), normal(2, 8, 8).bfloat16())
    sequence.demote(torch.tensor([[2], [0]]))
    with pytest.raises(ValueError, match=r"expected rungs from"):
        sequence.demote(torch.tensor([[1], [0]]))


def test_a_freed_page_is_poisoned_and_reused_and_cannot_be_freed_twice():
    pool = PagePool(SMALL)
    where = pool.write(encode(*blocks_of(SMALL, 2), level=EXACT, geometry=SMALL), level=EXACT)
    pool.free(where[:1], level=EXACT)
    freed = pool.read(where[:1], level=EXACT)
    assert bool((freed == 0xFF).all())
    assert bool(freed.view(torch.bfloat16).isnan().all())
    with pytest.raises(ValueError, match=r"expected distinct pages in use"):
        pool.free(where[:1], level=EXACT)
    before = pool.capacity_bytes
    assert (
        pool.write(encode(*blocks_of(SMALL, 1), level=EXACT, geometry=SMALL), level=EXACT).tolist()
        == where[:1].tolist()
    )
    assert pool.capacity_bytes == before


def test_bad_tokens_are_named():
    sequence = Sequence(PagePool(SMALL))
    good = normal(2, 3, 8).bfloat16()
    with pytest.raises(TypeError, match=r"values has dtype torch.float32, expected torch.bfloat16"):
        sequence.append(good, good.float())
    with pytest.raises(ValueError, match=r"keys has shape \(1, 3, 8\), expected \(2, n, 8\)"):
        sequence.append(good[:1], good)
    with pytest.raises(ValueError, match=r"keys contains nan, expected finite values"):
        sequence.append(good * torch.nan, good)
    with pytest.raises(TypeError, match=r"dtype is torch.float32"):
        PagePool(SMALL, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"length is 1, expected 0 to 0"):
        sequence.crop(1)


def test_errors_for_the_certificate_cover_every_demotion():
    sequence = Sequence(PagePool(GROUPED))
    keys, values = normal(2, 32, 16, seed=1).bfloat16(), normal(2, 32, 16, seed=2).bfloat16()
    sequence.append(keys, values)
    for level in (1, 2, 3, 4):
        sequence.demote(torch.full((2, 2), level))
        now = reconstruct(sequence.packed())
        for error, rows, exact in zip((sequence.key_error, sequence.value_error), now, (keys, values), strict=True):
            true = (rows - exact.double()).norm(dim=-1).reshape(2, 2, 16).amax(2)
            # Equal after one demotion; the triangle inequality afterwards; norms of 16 numbers round by 18 u.
            assert bool((true <= error * (1 + 40 * 2.0**-53)).all())
            assert bool((true > 0).all())


def test_cropped_residual_tokens_are_gone_for_good():
    sequence = Sequence(PagePool(SMALL))
    rows = normal(2, 2, 24, 8).bfloat16()
    sequence.append(rows[0], rows[1])
    sequence.keep_exact([torch.tensor([2, 9, 20])] * 2)
    sequence.demote(torch.full((2, 3), MEAN))
    assert sequence.packed().residual_ids.tolist() == [2, 9, 20] * 2
    sequence.crop(16)
    assert sequence.packed().residual_ids.tolist() == [2, 9] * 2
    # Other tokens come to the old positions; they were never chosen.
    sequence.append(rows[0, :, :8], rows[1, :, :8])
    sequence.demote(torch.full((2, 3), MEAN))
    assert sequence.packed().residual_ids.tolist() == [2, 9] * 2


class StoreMachine(RuleBasedStateMachine):
    """Two sequences on one pool, against dense tensors and lists of rungs."""

    geometry = SMALL

    def __init__(self):
        super().__init__()
        self.pool = PagePool(self.geometry)
        self.seed = 0
        self.live = [self.fresh() for _ in range(2)]

    def fresh(self):
        empty = torch.empty(2, self.geometry.kv_heads, 0, self.geometry.dim, dtype=torch.bfloat16)
        # A closed block: its dense rows, its valid tokens, and for each head the path of rungs it took.
        return {"sequence": Sequence(self.pool, boxes=True), "blocks": [], "open": empty, "kept": set()}

    @rule(which=st.integers(0, 1), count=st.integers(0, 20))
    def append(self, which, count):
        one, block = self.live[which], self.geometry.block
        self.seed += 1
        rows = normal(2, self.geometry.kv_heads, count, self.geometry.dim, seed=self.seed).bfloat16()
        one["sequence"].append(rows[0], rows[1])
        one["open"] = torch.cat([one["open"], rows], 2)
        while one["open"].shape[2] >= block:
            dense = one["open"][:, :, :block]
            one["blocks"].append({"dense": dense, "valid": block, "path": [[] for _ in range(self.geometry.kv_heads)]})
            one["open"] = one["open"][:, :, block:]

    @precondition(lambda self: any(one["blocks"] for one in self.live))
    @rule(which=st.integers(0, 1), choice=st.lists(st.integers(0, 4), min_size=12, max_size=12))
    def demote(self, which, choice):
        one = self.live[which] if self.live[which]["blocks"] else self.live[1 - which]
        level = one["sequence"].level.clone()
        for b, block in enumerate(one["blocks"]):
            for head, path in enumerate(block["path"]):
                to = choice[(b * self.geometry.kv_heads + head) % 12]
                if to > level[head, b]:
                    level[head, b] = to
                    path.append(to)
        one["sequence"].demote(level)

    @precondition(lambda self: any(one["sequence"].length == 0 for one in self.live))
    @rule(count=st.integers(9, 30), ids=st.sets(st.integers(0, 29), min_size=1, max_size=8))
    def prefill_with_residual_tokens(self, count, ids):
        which = next(i for i, one in enumerate(self.live) if one["sequence"].length == 0)
        self.live[which] = self.fresh()
        self.append(which, count)
        one = self.live[which]
        one["kept"] = {i for i in ids if i < count}
        one["sequence"].keep_exact([torch.tensor(sorted(one["kept"]), dtype=torch.int64)] * self.geometry.kv_heads)

    @precondition(lambda self: any(one["sequence"].length for one in self.live))
    @rule(which=st.integers(0, 1), share=st.sampled_from([0.3, 0.7, 0.95, 1.0]))
    def crop(self, which, share):
        one = self.live[which] if self.live[which]["sequence"].length else self.live[1 - which]
        length = int(share * one["sequence"].length)
        one["sequence"].crop(length)
        one["kept"] = {i for i in one["kept"] if i < length}
        kept, start = [], 0
        for block in one["blocks"]:
            if start + block["valid"] > length:
                part = length - start
                rows = block["dense"][:, :, :part]
                one["open"] = one["open"][:, :, :0]
                if part > 0 and any(block["path"]):
                    kept.append({**block, "valid": part})
                elif part > 0:
                    one["open"] = rows
                break
            kept.append(block)
            start += block["valid"]
        else:
            one["open"] = one["open"][:, :, : length - start]
        one["blocks"] = kept

    @rule(which=st.integers(0, 1))
    def finish_and_start_another(self, which):
        self.live[which]["sequence"].release()
        self.live[which] = self.fresh()

    def model_rows(self, one):
        """Every token as the policy must see it, by the ladder's own functions on the model's dense rows."""
        heads, start = self.geometry.kv_heads, 0
        parts = [[] for _ in range(heads)]
        for block in one["blocks"]:
            for head in range(heads):
                path, dense = block["path"][head], block["dense"][:, head]
                both = torch.stack(expected_block(dense[0], dense[1], path, self.geometry))
                for place in range(block["valid"]):
                    if start + place in one["kept"]:
                        both[:, place] = dense[:, place].double()
                parts[head].append(both[:, : block["valid"]])
            start += block["valid"]
        return torch.stack([torch.cat([*parts[h], one["open"][:, h].double()], 1) for h in range(heads)], 1)

    @invariant()
    def rows_are_the_models_bit_for_bit(self):
        for one in self.live:
            rows = torch.stack(reconstruct(one["sequence"].packed()))
            assert torch.equal(rows, self.model_rows(one))

    @invariant()
    def bytes_are_the_accounted_bits(self):
        used = 0
        for one in self.live:
            store = one["sequence"].packed()
            exact_tokens = sum(
                len([i for i in one["kept"] if start <= i < start + block["valid"]])
                for block, start in zip(one["blocks"], self.starts(one), strict=True)
                for path in block["path"]
                if path
            )
            graded = sum(
                self.geometry.block_bits(path[-1] if path else 0) for block in one["blocks"] for path in block["path"]
            )
            used += graded // 8
            open_tokens = one["open"].shape[2]
            pages = self.geometry.kv_heads * (len(one["blocks"]) + (open_tokens > 0))
            extra = token_bits(self.geometry.dim, self.geometry.kv_heads * open_tokens + exact_tokens + pages)
            assert store.data_bytes * 8 == store.accounted_bits == graded + extra
            blocks, heads = len(one["blocks"]), self.geometry.kv_heads
            assert store.index_bytes == 9 * heads * blocks + 4 * blocks + 8 * exact_tokens + 4 * heads
            assert store.length == one["sequence"].length
        assert self.pool.used_bytes == used
        assert self.pool.capacity_bytes >= used

    @staticmethod
    def starts(one):
        starts, at = [], 0
        for block in one["blocks"]:
            starts.append(at)
            at += block["valid"]
        return starts

    @invariant()
    def boxes_contain_the_original_keys(self):
        for one in self.live:
            store = one["sequence"].packed()
            pages = [block["dense"][0] for block in one["blocks"]] + [one["open"][0]] * (one["open"].shape[2] > 0)
            for page, keys in enumerate(pages):
                assert bool((store.box_low[:, page, None].double() <= keys.double()).all())
                assert bool((store.box_high[:, page, None].double() >= keys.double()).all())


def test_store_follows_the_plain_model_through_any_history():
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
