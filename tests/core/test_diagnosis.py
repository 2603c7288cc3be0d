"""The nearest mutant is named when it is one, and nobody is named when it is not."""

import pytest
from core_cases import implementation, toy

from kvverify.diagnosis import nearest_mutant
from kvverify.operator import Implementation, registry

OPERATOR = toy()


def named(kernel):
    return nearest_mutant(OPERATOR, OPERATOR.claims["doubled"], implementation(kernel), seed=0)


def test_an_implementation_that_equals_a_mutant_is_named_so():
    assert named(lambda x, **_: x + x + x) == ("triples", 12)


def test_one_that_nearly_equals_a_mutant_is_named_so():
    assert named(lambda x, **_: 3 * x * (1 + 2**-10)) == ("triples", 12)


def test_another_bug_is_not_named():
    assert named(lambda x, **_: 5 * x) == (None, 12)
    assert named(lambda x, **_: 2 * x + 1) == (None, 12)


def test_another_kind_of_violation_is_not_named():
    def raises(x, **_):
        raise RuntimeError

    assert named(raises) == (None, 12)


def test_fewer_than_twelve_failing_cases_are_not_compared():
    assert named(
        lambda x, *, level, flag: 3 * x if len(x) == 8 and level == 3 and flag and x[0, 0] > 1.5 else 2 * x
    ) == (
        None,
        0,
    )


@pytest.mark.parametrize(
    ("operator", "mutant"),
    [
        ("relay.relocate", "forgets_amplitude"),
        ("relay.relocate", "takes_the_other_layout"),
        ("relay.compact", "every_head_starts_at_zero"),
        ("attention.merge", "averages_the_splits"),
    ],
)
def test_a_mutant_of_the_registry_is_recognised_as_itself(operator, mutant):
    chosen = registry()[operator]
    bad = chosen.mutants[mutant]
    mine = Implementation("mine", {operator: bad.function})
    nearest, compared = nearest_mutant(chosen, chosen.claims[bad.rejected_by[0]], mine, seed=0)
    assert (nearest, compared) == (mutant, 12)
