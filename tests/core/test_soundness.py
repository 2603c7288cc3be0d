"""Gates with other seeds: never a false alarm, never a mutant that gets away.

KVVERIFY_SEEDS says how many consecutive seeds are tried.
"""

import os

import pytest

from kvverify.gate import PROFILES, self_check
from kvverify.operator import Implementation, registry
from kvverify.search import failing_cases, search

SEEDS = range(1, 1 + int(os.environ.get("KVVERIFY_SEEDS", "3")))
OPERATORS = [operator for name, operator in registry().items() if name.split(".")[0] in ("attention", "relay")]
RIGHT = [
    (operator, name, function)
    for operator in OPERATORS
    for name, function in (
        ("reference", operator.oracle),
        *((control.name, control.function) for control in operator.controls.values()),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("operator", "name", "function"), RIGHT, ids=[f"{o.name}-{name}" for o, name, _ in RIGHT])
def test_no_seed_raises_an_alarm_on_a_kernel_that_is_right(operator, name, function, seed):
    right = Implementation(name, {operator.name: function})
    for claim in operator.claims.values():
        found = search(operator, claim, right, seed=seed, examples=PROFILES["quick"].examples, seconds=60.0)
        assert found.violation is None, f"{claim.name} on {found.case!r}: {found.violation}"
        assert found.examples >= 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operator", OPERATORS, ids=[operator.name for operator in OPERATORS])
def test_no_seed_lets_a_mutant_get_away(operator, seed):
    def caught(mutant):
        bad = Implementation(mutant.name, {operator.name: mutant.function})
        return any(fails(operator, operator.claims[name], bad, seed) for name in mutant.rejected_by)

    assert [mutant.name for mutant in operator.mutants.values() if not caught(mutant)] == []


def fails(operator, claim, implementation, seed):
    """Whether forty drawn cases, fewer than a quick gate has, hold one that fails."""
    return failing_cases(operator, claim, implementation, seed=seed, enough=1, seconds=60.0) != []


def test_the_gate_of_both_policies_checks_itself():
    proven = self_check(OPERATORS)
    assert proven.ok, (proven.missed, proven.idle)
    assert proven.mutants > 60
