"""The gate proves that it can fail before it judges, and judges by that alone."""

import dataclasses
import json

import pytest
import torch
from core_cases import double, implementation, toy

import kvverify
from kvverify.attention import reference
from kvverify.attention.policy import merge
from kvverify.gate import PROFILES, Session, check, check_claim, open_session, reproduce, self_check
from kvverify.harness import Violation
from kvverify.matrix import matrix
from kvverify.operator import Implementation
from kvverify.search import SuiteError
from kvverify.target import UsageError
from kvverify.universal import universal_mutants


def session(operator, kernel, **how):
    return Session(implementation(kernel), "", (operator,), **how)


def test_the_toy_gate_checks_itself():
    proven = self_check([toy()])
    assert proven.ok
    assert proven.mutants == 1 + len(universal_mutants(toy()))


def test_a_claim_that_rejects_nothing_is_a_defect_of_the_suite():
    operator = toy()

    @operator.claim(evidence="exact", source="none")
    def toothless(run, case):
        """Calls the kernel and looks away."""
        case.build().call(run.impl)

    proven = self_check([operator])
    assert not proven.ok
    assert proven.idle == ("toy.double: toothless rejects no mutant",)


def test_a_mutant_that_survives_is_a_defect_of_the_suite():
    operator = toy()

    @operator.mutant("doubled")
    def harmless(x, *, level, flag):
        return x + x

    proven = self_check([operator])
    assert not proven.ok
    assert proven.missed == ("toy.double: harmless passes doubled on ToyCase()",)


def test_an_operator_without_claims_lets_every_universal_mutant_pass():
    proven = self_check([toy(bare=True)])
    assert not proven.ok
    assert len(proven.missed) == proven.mutants == len(universal_mutants(toy()))


def test_nothing_to_check_proves_nothing():
    assert not self_check([]).ok


def test_an_oracle_that_raises_is_a_defect_of_the_suite_and_no_verdict():
    def raises(x, **static):
        raise RuntimeError("no truth today")

    broken = dataclasses.replace(toy(), oracle=raises)
    with pytest.raises(SuiteError, match="no truth today"):
        check_claim(session(broken, double), broken, broken.claims["doubled"])


def test_a_verdict_tells_the_case_the_numbers_and_two_ways_to_see_it_again():
    operator = toy()
    found = check_claim(session(operator, lambda x, **_: 2 * x + 1), operator, operator.claims["doubled"])
    assert not found.ok
    assert found.failure.case == "ToyCase()"
    assert found.failure.kind == "budget"
    assert "allowed" in found.failure.budget
    assert float(found.failure.actual) == pytest.approx(float(found.failure.expected) + 1, abs=1e-6)
    assert found.failure.command == 'kvverify repro MODULE:ATTRIBUTE toy.double doubled "ToyCase()"'
    assert check_claim(session(operator, double), operator, operator.claims["doubled"]).ok


def test_the_matrix_counts_cases_until_rejection_and_knows_a_wrong_control():
    operator = toy()
    operator.control(double)

    @operator.control
    def not_quite(x, *, level, flag):
        return 2 * x + (level == 2)

    rows = {row.name: row for row in matrix([operator], seed=0, examples=30)}
    assert rows["triples"].rejected == {"doubled": 0}
    assert rows["triples"].ok
    assert rows["double"].ok
    assert not rows["not_quite"].ok
    assert rows["not_quite"].missed == ("doubled",)


@pytest.fixture(scope="module")
def report():
    return check(Implementation("merging", {"attention.merge": merge}), seed=7)


def test_a_report_is_ok_only_if_something_was_tested_and_the_gate_proved_itself(report):
    assert report.ok
    assert not dataclasses.replace(report, verdicts=()).ok
    assert not dataclasses.replace(report, self_check=dataclasses.replace(report.self_check, missed=("m",))).ok
    failed = dataclasses.replace(report.verdicts[0], ok=False)
    assert not dataclasses.replace(report, verdicts=(failed, *report.verdicts[1:])).ok


def test_a_report_reads_as_json_and_as_text(report):
    told = json.loads(report.to_json())
    assert (told["ok"], told["seed"], told["profile"], told["evidence"]) == (True, 7, "quick", "reference")
    assert [verdict["claim"] for verdict in told["verdicts"]] == list(
        kvverify.operator.registry()["attention.merge"].claims
    )
    assert "5 of 5 claims hold" in str(report)


def test_equal_seeds_give_equal_verdicts(report):
    again = check(Implementation("merging", {"attention.merge": merge}), seed=7)
    assert [(v.claim, v.examples, v.worst) for v in again.verdicts] == [
        (v.claim, v.examples, v.worst) for v in report.verdicts
    ]


def test_verdicts_are_told_as_they_fall():
    told = []
    check(Implementation("merging", {"attention.merge": merge}), on_verdict=told.append)
    assert len(told) == 5


def test_profiles_look_longer_one_after_the_other():
    assert list(PROFILES) == ["quick", "ci", "nightly", "soak"]
    pairs = list(zip(PROFILES.values(), list(PROFILES.values())[1:], strict=False))
    assert all(less.examples < more.examples and less.seconds < more.seconds for less, more in pairs)


USAGE = [
    ({"profile": "fast"}, 4, "profile 'fast' is unknown: expected one of"),
    ({"device": "warp"}, 4, "device 'warp' is unknown"),
    ({"device": "meta"}, 4, "device 'meta' holds no tensors here"),
    ({"device": "cuda"}, 5, "torch sees no CUDA device here"),
    ({"require_gpu": True}, 5, "a GPU was required"),
]


@pytest.mark.parametrize(("how", "code", "says"), USAGE, ids=[says for _, _, says in USAGE])
def test_what_cannot_be_tested_is_refused_with_its_exit_code(how, code, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=says) as refused:
        open_session(reference, **how)
    assert refused.value.exit_code == code


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (Implementation("mine", {"attention.decod": double}), "did you mean 'attention.decode'"),
        (Implementation("mine", {"nothing.known": double}), "expected one of"),
        (Implementation("mine", {"attention.merge": merge}, supports={"splitz": {1}}), "a field of no case"),
        (Implementation("mine", {"attention.merge": merge}, supports={"splits": {5}}), "leaves nothing of MergeCase"),
        (3, "implementation is a int"),
    ],
)
def test_an_implementation_that_fits_nothing_is_refused_in_one_line(declared, says):
    with pytest.raises(UsageError, match=says) as refused:
        check(declared)
    assert "\n" not in str(refused.value)


def test_a_default_device_that_is_not_the_cpu_is_refused():
    torch.set_default_device("meta")
    try:
        with pytest.raises(UsageError, match="default device is 'meta': expected 'cpu'"):
            check(reference)
    finally:
        torch.set_default_device(None)


def test_reproduce_returns_where_a_claim_holds_and_raises_its_violation_where_not():
    bad = Implementation("bad", {"attention.merge": lambda out, lse: (merge(out, lse)[0] + 1, merge(out, lse)[1])})
    where = ("attention.merge", "weighted_mean", "MergeCase(splits=1)")
    assert reproduce(reference, *where) is None
    with pytest.raises(Violation) as found:
        reproduce(bad, *where)
    assert found.value.kind == "budget"


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (("relay.compact", "end", "CompactCase()"), "is not bound by"),
        (("attention.merge", "mean", "MergeCase()"), "claim 'mean' is unknown to attention.merge"),
        (("attention.merge", "weighted_mean", "DecodeCase()"), "case type 'DecodeCase' is unknown here"),
        (("attention.merge", "weighted_mean", "MergeCase(splits='x')"), "does not build"),
        (("attention.merge", "weighted_mean", "MergeCase(splits=-3)"), "does not build"),
        (("attention.merge", "weighted_mean", "MergeCase(dtype='int3')"), "does not build"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_in_one_line(where, says):
    with pytest.raises(UsageError, match=says) as refused:
        reproduce(reference, *where)
    assert "\n" not in str(refused.value)
