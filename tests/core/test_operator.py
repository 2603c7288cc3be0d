"""What may be declared about operators and implementations, and what is refused in one line."""

import pytest
import torch
from core_cases import ToyCase, double, implementation, toy

from kvverify.operator import Implementation, implements

REFUSED = [
    ({"operators": {}}, "operators of 'mine' is empty"),
    ({"operators": {"a.b": 3}}, r"operators\['a.b'\] of 'mine' is 3: expected a callable"),
    ({"operators": double}, "operators of 'mine' is <function double.*expected a mapping"),
    ({"operators": [double]}, r"is not marked with @implements"),
    ({"operators": {3: double}}, r"is not marked with @implements"),
    ({"dtypes": ("bf16", "float8")}, "dtypes of 'mine' holds 'float8': expected some of"),
    ({"dtypes": ()}, "dtypes of 'mine' holds ''"),
    ({"in_place": ("other.op",)}, "in_place of 'mine' holds 'other.op': expected some of"),
    ({"supports": {"rows": 5}}, r"supports\['rows'\] of 'mine' is 5: expected a set of values"),
    ({"supports": {"layout": "half"}}, r"supports\['layout'\] of 'mine' is 'half': expected a set of values"),
    ({"evidence": "gpu"}, "evidence of 'mine' is 'gpu': expected one of"),
]


@pytest.mark.parametrize(("declared", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_wrong_declaration_is_refused_with_its_name_and_value(declared, says):
    with pytest.raises(ValueError, match=says) as refused:
        Implementation("mine", **{"operators": {"toy.double": double}, **declared})
    assert "\n" not in str(refused.value)


def test_one_operator_bound_twice_is_refused_and_the_same_function_twice_is_not():
    one, two = (implements("toy.double")(lambda x: x) for _ in range(2))
    assert Implementation("mine", [one, one]).bindings == {"toy.double": one}
    with pytest.raises(ValueError, match=r"binds 'toy.double' twice"):
        Implementation("mine", [one, two])


def test_a_single_name_stands_for_a_list_of_one():
    mine = implementation(double, dtypes="bf16", in_place="toy.double", device=torch.device("cpu"))
    assert (mine.dtypes, mine.in_place, mine.device) == (("bf16",), ("toy.double",), "cpu")


def test_the_evidence_level_follows_the_device():
    from dataclasses import replace

    mine = implementation(double, device="cuda:0", evidence="compiled")
    assert mine.evidence_level == "gpu"
    assert replace(mine, device="cpu").evidence_level == "compiled"


def test_supports_may_narrow_the_dtypes_further():
    assert implementation(double, supports={"dtype": {"fp16"}}).allowed["dtype"] == {"fp16"}


def test_a_claim_is_registered_once_under_its_name_with_its_first_paragraph():
    operator = toy()
    assert operator.claims["doubled"].statement == "Each entry is twice what it was."

    def doubled(run, case):
        """Again."""

    with pytest.raises(ValueError, match=r"claim doubled of toy.double is registered twice"):
        operator.claim(evidence="exact", source="none")(doubled)


def test_a_claim_without_words_is_refused():
    def silent(run, case):
        run.close(case.build().call)

    with pytest.raises(ValueError, match="silent has no docstring"):
        toy().claim(evidence="exact", source="none")(silent)


@pytest.mark.parametrize("names", [(), ("doubled", "trebled")])
def test_a_mutant_names_claims_that_exist(names):
    with pytest.raises(ValueError, match=r"mutant double names claims .* expected some of \['doubled'\]"):
        toy().mutant(*names)(double)


def test_a_mutant_and_a_control_are_registered_once():
    operator = toy()
    operator.control(double)
    for register, kernel in (
        (operator.control, double),
        (operator.mutant("doubled"), operator.mutants["triples"].function),
    ):
        with pytest.raises(ValueError, match="registered twice"):
            register(kernel)
    assert operator.mutants["triples"].case == ToyCase()


def test_result_shapes_follow_from_the_signature():
    from kvverify.operator import registry

    known = registry()
    args = [torch.zeros(2, 16), torch.zeros(9, 16), torch.zeros(9, 8), torch.zeros(5, dtype=torch.int64)]
    assert known["attention.decode"].result_shapes(args) == [(2, 8), (2,)]
    assert known["relay.compact"].result_shapes([torch.zeros(2, 3, 4)]) == [(2, 3, 4), ()]


@pytest.mark.parametrize("module", ["attention", "relay"])
def test_mutants_import_alone(module):
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", f"import kvverify.{module}.mutants"], check=True)
