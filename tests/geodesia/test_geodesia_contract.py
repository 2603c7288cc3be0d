"""The contract of Geodesia-KV: every statement is a claim or a named test, and nothing right raises an alarm."""

from pathlib import Path

import pytest
import torch
from geodesia_cases import quick
from hypothesis import given

from kvverify.cases import cases, leaves
from kvverify.gate import open_session, self_check
from kvverify.geodesia import policy, reference
from kvverify.geodesia.claims import CLAIMED_ELSEWHERE
from kvverify.geodesia.decode_operator import DECODE, DecodeCase
from kvverify.geodesia.operators import OPERATORS
from kvverify.geodesia.plain import Trace
from kvverify.geodesia.plain import decode as plain_decode
from kvverify.geodesia.store_case import StoreCase
from kvverify.operator import Implementation, registry
from kvverify.search import attempt, search

TESTS = Path(__file__).parents[1]

# The paper's statements, in its order: operator and claim, or test module and test.
STATEMENTS = {
    "monotone": ("decode", "monotone"),
    "current_prefix": ("allocate", "current_prefix"),
    "slack_noop": ("allocate", "slack_noop"),
    "retighten": ("decode", "retighten"),
    "mass_simplex": ("decode", "mass_simplex"),
    "ema_recurrence": ("decode", "ema_recurrence"),
    "causal": ("decode", "causal"),
    "gqa_once": ("decode", "gqa_once"),
    "append_chunking": ("decode", "append_chunking"),
    "no_compression_is_dense": ("attend", "no_compression_is_dense"),
    "quantizer_bound": ("quantize", "quantizer_bound"),
    "nested_ladder": ("quantize", "nested_ladder"),
    "box_contains": ("box", "box_contains"),
    "box_bound": ("rank_pages", "box_bound"),
    "page_count": ("decode", "page_count"),
    "current_readable": ("decode", "current_readable"),
    "read <= resident": ("decode", "read_at_most_resident"),
    "bytes_equal_accounting": ("decode", "bytes_equal_accounting"),
    "pack_round_trip": ("pack", "pack_round_trip"),
    "residual_topk": ("residual", "residual_topk"),
    "residual_cost": ("decode", "residual_cost"),
    "tolerance_guarantee": ("tolerance", "tolerance_guarantee"),
    "certificate": ("decode", "certificate"),
    "certificate_tightened <= printed": ("decode", "certificate_tightened"),
    "allocation_monotone": ("allocate", "allocation_monotone"),
    "hull_damage": ("allocate", "hull_damage"),
    "split_merge": ("attend", "split_merge"),
    "own_state_only": ("decode", "own_state_only"),
    **CLAIMED_ELSEWHERE,
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_statement_is_a_claim_or_a_named_test(statement):
    place, name = STATEMENTS[statement]
    known = {operator.name.removeprefix("geodesia."): operator.claims for operator in registered()}
    if place in known:
        assert name in known[place]
    else:
        assert f"def {name}(" in (TESTS / place).read_text()


def registered():
    registry()  # claims and mutants stand around their operators once the registry has been read
    return OPERATORS


def test_the_reference_binds_every_operator():
    assert list(reference.bindings) == [f"geodesia.{name}" for name in policy.__all__]
    assert set(reference.bindings) == {operator.name for operator in registered()}


def test_every_mutant_is_rejected_on_its_witness_and_every_claim_rejects_one():
    checked = self_check(registered())
    assert checked.ok, (checked.missed, checked.idle)
    assert checked.mutants > 100


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_neither_the_reference_nor_an_equivalent_kernel_raises_an_alarm(operator, seed):
    registry()
    controls = list(operator.controls.values())
    turn = controls[seed % len(controls)]  # every control has its turn in ten seeds
    kernels = {"reference": reference.bindings[operator.name], turn.name: turn.function}
    for kernel, function in kernels.items():
        implementation = Implementation(kernel, {operator.name: function})
        for claim in operator.claims.values():
            examples = -(-12 // operator.weight)
            found = search(operator, claim, implementation, seed=seed + 1, examples=examples, seconds=60)
            assert found.violation is None, f"{kernel} {claim.name} on {found.case!r}: {found.violation}"


@quick(25)
@given(cases(DecodeCase))
def test_the_packed_cache_and_the_plain_model_decide_and_serve_alike(case):
    inputs = case.build()
    packed = Trace(*inputs.call(policy.decode))
    wide = inputs.replace(**{name: tensor.double() for name, tensor in inputs.tensors.items()})
    plain = wide.call(plain_decode)
    for name, mine, theirs in zip(Trace._fields, packed, plain, strict=True):
        assert mine.shape == theirs.shape, name
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs), name
            continue
        # Both in float64: a few hundred roundings of quantities below 2^10 (scores, values, norms).
        apart = (mine - theirs).abs().nan_to_num(0)
        assert float(apart.amax() if apart.numel() else 0) <= 2.0**-53 * 2**18, name


def test_a_store_is_judged_between_guard_bands_like_any_tensor():
    store = StoreCase(levels="mixed").build().store
    assert any(tensor is store.payload for tensor in leaves([store]))
    operator = next(operator for operator in registered() if operator.name == "geodesia.attend")

    def writes_into_the_store(query, store, *, scale):
        result = policy.attend(query, store, scale=scale)
        store.payload[0] = 0
        return result

    found = attempt(operator, operator.claims["output"], writes_into_the_store, StoreCase())
    assert found.violation is not None
    assert found.violation.kind == "input changed"


def test_the_gate_takes_the_reference():
    session = open_session("kvverify.geodesia:reference")
    assert {operator.name for operator in session.operators} == set(reference.bindings)
    assert DECODE.weight > 1
