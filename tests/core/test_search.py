"""The search finds, shrinks, repeats itself, and keeps to itself."""

import subprocess
import sys

import hypothesis
import pytest
import torch
from core_cases import ToyCase, double, implementation, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvverify.cases import cases
from kvverify.search import SuiteError, attempt, claim_seed, draw, failing_cases, search

OPERATOR = toy()
CLAIM = OPERATOR.claims["doubled"]


def looked(kernel, seed=0, examples=200, seconds=20.0, **declared):
    return search(OPERATOR, CLAIM, implementation(kernel, **declared), seed=seed, examples=examples, seconds=seconds)


def wrong_where(condition):
    return lambda x, *, level, flag: 2 * x + bool(condition(x, level, flag))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("condition", "smallest"),
    [
        (lambda x, level, flag: len(x) > 0, ToyCase()),
        (lambda x, level, flag: level >= 2 and len(x), ToyCase(level=2)),
        (lambda x, level, flag: len(x) == 8, ToyCase(rows=8)),
        (lambda x, level, flag: flag and level == 3 and len(x), ToyCase(level=3, flag=True)),
        (lambda x, level, flag: x.element_size() == 2 and not x.is_contiguous() and len(x) == 8, None),
    ],
)
def test_the_smallest_failing_case_is_found(condition, smallest, seed):
    found = looked(wrong_where(condition), seed)
    if smallest is None:
        smallest = ToyCase(dtype=found.case.dtype, memory=found.case.memory, rows=8)
        assert found.case.dtype == "bf16"
    assert found.case == smallest
    assert found.violation is not None


def test_an_honest_kernel_fails_nowhere_and_every_case_counts_once():
    found = looked(double, examples=100)
    assert (found.case, found.violation) == (None, None)
    assert 90 <= found.examples <= 101
    assert found.worst == 0.0


def test_a_kernel_that_answers_differently_each_time_gets_a_verdict_and_no_flaky_error():
    calls = iter(range(100_000))
    found = looked(lambda x, **_: 2 * x + (next(calls) % 7 == 3))
    assert found.violation.kind in ("nondeterministic", "budget")
    assert found.case is not None


def test_no_case_runs_twice():
    seen = []

    @OPERATOR_COUNTED.claim(evidence="exact", source="counting")
    def counted(run, case):
        """Counts."""
        seen.append(repr(case))
        run.close(case.build().call)

    declared = implementation(wrong_where(lambda x, level, flag: level >= 2 and len(x) == 8))
    search(OPERATOR_COUNTED, OPERATOR_COUNTED.claims["counted"], declared, seed=0, examples=100, seconds=20)
    assert len(seen) == len(set(seen)) > 10


OPERATOR_COUNTED = toy(bare=True)


def test_time_spent_ends_the_search_after_one_case():
    assert looked(double, seconds=0.0).examples == 1


def test_unsupported_values_are_never_tried_and_the_default_case_neither():
    rejects_everything_else = wrong_where(lambda x, level, flag: len(x) != 8 or level != 1)
    assert looked(rejects_everything_else, supports={"rows": {8}, "level": {1}}).case is None
    assert looked(rejects_everything_else, supports={"rows": {8}}).case == ToyCase(rows=8)


def test_seeds_of_claims_differ_by_name_and_seed_alone():
    assert claim_seed(1, OPERATOR, CLAIM) == claim_seed(1, toy(), toy().claims["doubled"])
    assert claim_seed(1, OPERATOR, CLAIM) != claim_seed(2, OPERATOR, CLAIM)


def drawn(seed):
    seen = []
    draw(cases(ToyCase), lambda case: seen.append(repr(case)), seed=seed, examples=30)
    return seen


def test_equal_seeds_draw_equal_cases_and_others_others():
    assert drawn(3) == drawn(3) != drawn(4)


DRAWING = """
{first}
from kvverify.attention.operators import DecodeCase
from kvverify.cases import cases
from kvverify.search import draw
draw(cases(DecodeCase), lambda case: print(case), seed=5, examples=30)
"""


def test_a_seed_draws_the_same_cases_in_every_process_whatever_was_imported_first(tmp_path):
    (tmp_path / "constants.py").write_text("NUMBERS = [63, 7, 12345, 99]\nWORDS = ['negative', 'bf16']\n")
    told = [
        subprocess.run(
            [sys.executable, "-c", DRAWING.format(first=first)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for first in ("", "import constants, kvverify.relay.mutants, kvverify.cli")
    ]
    assert told[0] == told[1]
    assert len(set(told[0].splitlines())) > 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["constants.py"]


@settings(max_examples=3)
@given(st.integers(0, 3))
def test_a_search_works_inside_a_given_of_ones_own(seed):
    found = looked(wrong_where(lambda x, level, flag: level >= 1 and len(x)), seed, examples=60)
    assert found.case == ToyCase(level=1)


def test_a_profile_of_the_user_is_not_inherited():
    before = looked(double, examples=60).examples
    settings.register_profile("stingy", max_examples=1, derandomize=True, database=None, phases=(), deadline=1)
    settings.load_profile("stingy")
    try:
        assert looked(double, examples=60).examples == before > 50
        assert drawn(3) == drawn(3) != drawn(4)
    finally:
        settings.load_profile("kvverify-tests")


def test_every_setting_that_hypothesis_knows_is_passed():
    """A setting that is left out is inherited from the user's profile; stateful steps do not concern us."""
    import inspect

    source = inspect.getsource(draw)
    known = set(inspect.signature(hypothesis.settings.__init__).parameters) - {"self", "parent", "stateful_step_count"}
    assert [name for name in sorted(known) if f"{name}=" not in source] == []


def test_a_claim_that_raises_is_a_defect_of_the_suite_and_names_the_case():
    operator = toy(bare=True)

    @operator.claim(evidence="exact", source="none")
    def broken(run, case):
        """Breaks."""
        raise KeyError("typo")

    with pytest.raises(SuiteError, match=r"toy.double broken on ToyCase\(rows=8\): KeyError: 'typo'"):
        attempt(operator, operator.claims["broken"], double, ToyCase(rows=8))


def test_a_claim_that_never_calls_the_implementation_is_a_defect_of_the_suite():
    operator = toy(bare=True)

    @operator.claim(evidence="exact", source="none")
    def idle(run, case):
        """Holds, whatever is under test."""

    with pytest.raises(SuiteError, match="never called the implementation"):
        attempt(operator, operator.claims["idle"], double, ToyCase())


def test_failing_cases_are_different_and_all_fail():
    declared = implementation(wrong_where(lambda x, level, flag: level >= 2 and len(x)))
    found = failing_cases(OPERATOR, CLAIM, declared, seed=0, enough=12, seconds=20)
    assert len({repr(case) for case, _ in found}) == len(found) == 12
    assert all(case.level >= 2 and tried.violation for case, tried in found)


def test_a_result_that_a_claim_can_make_nothing_of_is_the_implementations_doing():
    operator = toy(bare=True)

    @operator.claim(evidence="exact", source="none")
    def looked_up(run, case):
        """Twice an entry is a place in a table of ten."""
        table = torch.arange(10)
        x = torch.ones(case.rows, 4)
        run.equal(lambda op: table[op(x, level=0, flag=False).long()], table[torch.full((case.rows, 4), 2)], "entry")

    tried = attempt(operator, operator.claims["looked_up"], lambda x, *, level, flag: 99 * x, ToyCase())
    assert tried.violation is not None
    assert tried.violation.kind == "unusable result"
    assert "IndexError" in str(tried.violation)
    assert attempt(operator, operator.claims["looked_up"], lambda x, *, level, flag: x + x, ToyCase()).violation is None
