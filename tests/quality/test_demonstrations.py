"""What a fixed tolerance misses and this suite does not, on one kernel and on all of them."""

from dataclasses import replace

import pytest
import torch

from kvverify.attention.mutants import drops_last_row
from kvverify.attention.operators import DECODE, DecodeCase, decode_condition, peer_decode
from kvverify.attention.policy import decode
from kvverify.budget import judge
from kvverify.operator import registry
from kvverify.rules import (
    RULES,
    PlainCase,
    abs_and_rel,
    allclose,
    drawn_cases,
    plain_cases,
    survey,
    table,
    twice_the_peer,
)
from kvverify.search import attempt

registry()
LONG = PlainCase(listed=2048)


def exact(inputs):
    return inputs.replace(**{name: inputs.tensors[name].double() for name in ("query", "keys", "values")}).call(decode)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_dropped_of_2048_escapes_allclose_in_bf16_output(seed):
    inputs = replace(LONG, seed=seed).build()
    out, _ = inputs.call(drops_last_row)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), exact(inputs)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_hundred_times_over_the_budget_in_lse(seed):
    inputs = replace(LONG, seed=seed).build()
    (_, mine), (_, peer), (_, truth) = inputs.call(drops_last_row), inputs.call(peer_decode), exact(inputs)
    # The least condition is that of fp32 near the lse; that of the claim also admits the bias of a long sum.
    least = judge(mine, peer, truth, reduce=0, condition=float(truth.abs().max()))
    claimed = judge(mine, peer, truth, reduce=0, condition=decode_condition(inputs)[1])
    assert least.used >= 100
    assert claimed.used >= 10


def test_the_canary_at_the_end_of_the_list_catches_it_by_the_output_alone():
    places = (0, 1, 63, 64, 65, 127, 128, 2047, 2048)
    last = DecodeCase(dtype="bf16", seed=places.index(2048))
    violation = attempt(DECODE, DECODE.claims["canaries"], drops_last_row, last).violation
    assert violation is not None
    inputs = replace(
        last, listed=2049, pads=0, spare=3, regime="normal", heads=1, dim=16, value_dim=8, canary=2048
    ).build()
    (mine, _), (peer, _), (truth, _) = inputs.call(drops_last_row), inputs.call(peer_decode), exact(inputs)
    assert not judge(mine, peer, truth, condition=decode_condition(inputs)[0]).ok
    assert not torch.allclose(mine.double(), truth, rtol=1e-2, atol=1e-2)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_rules_are_what_they_say():
    truth = numbers(0.0, 100.0)
    assert allclose(numbers(0.01, 101.0), truth, truth)
    assert not allclose(numbers(0.011, 100.0), truth, truth)
    assert abs_and_rel(numbers(0.0, 100.9), truth, truth)
    assert not abs_and_rel(numbers(0.0, 101.1), truth, truth)
    assert not abs_and_rel(numbers(float("nan"), 100.0), truth, truth)
    peer = numbers(0.0, 100.5)
    assert twice_the_peer(numbers(0.0, 101.0), peer, truth)
    assert not twice_the_peer(numbers(0.0, 101.1), peer, truth)
    assert not twice_the_peer(numbers(float("nan"), 100.0), peer, truth)
    assert all(rule(numbers(-torch.inf), numbers(-torch.inf), numbers(-torch.inf)) for rule in RULES.values())
    assert all(rule(numbers(), numbers(), numbers()) for rule in RULES.values())


@pytest.mark.slow
def test_the_claim_itself_rejects_it_on_such_a_list():
    long = DecodeCase(dtype="bf16", listed=2048, heads=8, dim=64)
    assert attempt(DECODE, DECODE.claims["log_sum_exp"], drops_last_row, long).violation is not None


@pytest.fixture(scope="module")
def plain():
    return survey(DECODE.mutants.values(), plain_cases(4))


def test_plain_random_cases_let_known_bad_kernels_through_every_classical_rule(plain):
    for name in RULES:
        assert 5 <= plain.kernels - len(plain.rejected[name]) <= 10
    assert len(plain.rejected["gate"]) == plain.kernels == len(DECODE.mutants)


@pytest.mark.slow
def test_cases_of_this_suite_are_what_the_classical_rules_lacked(plain):
    ours = survey(DECODE.mutants.values(), drawn_cases(40))
    assert ours.cases == 40
    for name in RULES:
        assert len(ours.rejected[name]) >= ours.kernels - 1 > len(plain.rejected[name])
    assert len(ours.rejected["gate"]) == ours.kernels


@pytest.mark.slow
def test_only_twice_the_peer_rejects_kernels_that_are_right():
    ours = survey(DECODE.controls.values(), drawn_cases(40))
    assert ours.rejected["twice the peer"]
    assert not any(names for name, names in ours.rejected.items() if name != "twice the peer")


@pytest.mark.slow
def test_the_table_has_a_line_for_each_rule_on_each_kind_of_case():
    lines = table(plain=1, drawn=3)
    assert len(lines) == 2 + 2 * (len(RULES) + 1)
    assert lines[0].startswith("attention.decode")
    assert "18 of 18" in lines[5]
