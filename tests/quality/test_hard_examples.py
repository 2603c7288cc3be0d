"""The hard examples are found by drawing, without being told where to look, and shrink to something small."""

import dataclasses

import pytest

from kvverify.matrix import _cases_until_rejected
from kvverify.operator import Implementation, registry
from kvverify.search import search

OPERATORS = {name: operator for name, operator in registry().items() if name.split(".")[0] in ("attention", "relay")}
MUTANTS = [(operator, mutant) for operator in OPERATORS.values() for mutant in operator.mutants.values()]
IDS = [f"{operator.name}-{mutant.name}" for operator, mutant in MUTANTS]

HARD = {
    "drops_partial_block": 30,
    "exponentiates_without_maximum": 30,
    "weighs_without_maximum": 30,
    "anchor_is_the_first_layers_length": 30,
    "positions_in_bf16": 40,
    "forgets_amplitude": 20,
    "divides_by_amplitude_twice": 20,
    "ignores_the_target_amplitude": 30,
    "skips_the_partial_block": 40,
    "ranks_by_slot": 30,
}
"""Drawn cases allowed where the default and captured cases do not show it: twice the most over six seeds, rounded up.

Measured: 11, 11, 3, 3, 15, 3, 7, 9, 14, 12. Every other mutant fell on the default case or a captured cache. None is
known by its witness alone.
"""
ON_FIXED_CASES = 3


@pytest.mark.parametrize(("operator", "mutant"), MUTANTS, ids=IDS)
def test_every_mutant_is_found_by_drawn_cases_within_its_allowance(operator, mutant):
    allowed = HARD.get(mutant.name, ON_FIXED_CASES)
    taken = [
        _cases_until_rejected(
            operator, operator.claims[name], mutant.function, in_place=mutant.in_place, seed=2, examples=allowed
        )
        for name in mutant.rejected_by
    ]
    assert min((count for count in taken if count is not None), default=allowed + 1) <= allowed


def told(case):
    """How many fields of a case are not at their default, how memory lies aside."""
    return sum(getattr(case, spec.name) != spec.default for spec in dataclasses.fields(case))


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "mutant"), MUTANTS, ids=IDS)
def test_every_failing_case_shrinks_to_two_fields_at_most(operator, mutant):
    found = [
        search(
            operator,
            operator.claims[name],
            Implementation(mutant.name, {operator.name: mutant.function}),
            seed=2,
            examples=50,
            seconds=20.0,
        )
        for name in mutant.rejected_by
    ]
    cases = [one.case for one in found if one.case is not None]
    assert cases
    assert max(map(told, cases)) <= 2, cases
