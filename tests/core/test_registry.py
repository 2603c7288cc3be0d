"""What holds of every operator, every module, and of importing them."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvverify
from kvverify.operator import POLICIES, registry
from kvverify.search import attempt
from kvverify.universal import universal_mutants

HOME = Path(kvverify.__file__).parent
MODULES = sorted(path.relative_to(HOME).as_posix() for path in HOME.rglob("*.py"))
OPERATORS = registry()
MUTANTS = [(operator, mutant) for operator in OPERATORS.values() for mutant in operator.mutants.values()]


def test_the_public_names_are_at_most_twelve_and_all_there():
    assert len(kvverify.__all__) <= 12
    assert all(getattr(kvverify, name) is not None for name in kvverify.__all__)
    assert set(kvverify.__all__) <= set(dir(kvverify))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvverify.nothing


def test_operators_are_listed_by_policy_in_report_order():
    assert kvverify.operators() == list(OPERATORS)
    assert list(dict.fromkeys(name.split(".")[0] for name in OPERATORS)) == list(POLICIES)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_every_claim_is_named_by_a_mutant(operator):
    assert set(operator.claims) == {name for mutant in operator.mutants.values() for name in mutant.rejected_by}
    assert operator.controls, "a control shows that the claims are not too narrow"


@pytest.mark.parametrize(("operator", "mutant"), MUTANTS, ids=[f"{o.name}-{m.name}" for o, m in MUTANTS])
def test_every_mutant_is_rejected_on_its_witness_by_each_claim_it_names(operator, mutant):
    for name in mutant.rejected_by:
        tried = attempt(operator, operator.claims[name], mutant.function, mutant.case, in_place=mutant.in_place)
        assert tried.violation is not None, name


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_universal_mutants_are_rejected_and_controls_pass_on_witnesses(operator):
    for mutant in universal_mutants(operator):
        claims = operator.claims.values()
        assert any(attempt(operator, claim, mutant.function, mutant.case).violation for claim in claims), mutant.name
    # Of a heavy operator every `weight`-th witness: all those of `geodesia.decode` take its controls two minutes.
    witnesses = {repr(mutant.case): mutant.case for mutant in list(operator.mutants.values())[:: operator.weight]}
    for control in operator.controls.values():
        for case in witnesses.values():
            for claim in operator.claims.values():
                violation = attempt(operator, claim, control.function, case).violation
                assert violation is None, f"{control.name} {claim.name} {case!r}: {violation}"


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_says_how_many_bytes_it_must_read(operator):
    for case in (operator.case(), *operator.captured):
        assert operator.read_bytes(case) > 0


def public_things():
    for info in pkgutil.walk_packages([str(HOME)], "kvverify."):
        if info.name.split(".")[-1] in ("kernels", "__main__"):
            continue
        module = importlib.import_module(info.name)
        yield info.name, module
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield f"{info.name}.{name}", thing


def test_every_public_thing_is_told_in_words_and_every_module_has_all():
    silent = [name for name, thing in public_things() if not (inspect.getdoc(thing) or "").strip()]
    assert silent == []
    unlisted = [
        name
        for name, thing in public_things()
        if inspect.ismodule(thing) and not hasattr(thing, "__path__") and not hasattr(thing, "__all__")
    ]
    assert unlisted == []


# Imports

LIST_LOADED = """
import json, sys
{statement}
loaded = dict(sys.modules)
home = lambda module: getattr(module, "__file__", None) or ""
print(json.dumps(sorted({{n.split(".")[0] for n, m in loaded.items() if "site-packages" in home(m)}})))
"""
OPTIONAL = {
    "transformers",
    "triton",
    "scipy",
    "matplotlib",
    "bm25s",
    "gguf",
    "dvc",
    "jinja2",
    "pandas",
    "typer",
    "rich",
}
NEEDED = {"torch", "numpy", "hypothesis", "pytest"}
THEIRS = {
    *("functorch", "torchgen", "typing_extensions", "sympy", "mpmath", "tqdm", "networkx", "filelock", "fsspec"),
    *(
        "_hypothesis_globals",
        "sortedcontainers",
        "attr",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "py",
        "pygments",
    ),
    *("_distutils_hack", "markupsafe", "pydot"),
}
"""What torch, numpy, hypothesis and pytest load themselves."""


def loaded(statement, tmp_path):
    script = LIST_LOADED.format(statement=statement)
    told = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    return set(json.loads(told.stdout))


def test_using_every_public_name_loads_torch_numpy_hypothesis_pytest_only(tmp_path):
    statement = "import kvverify; [getattr(kvverify, name) for name in kvverify.__all__]; kvverify.operators()"
    found = loaded(statement, tmp_path)
    assert found >= NEEDED
    assert found & OPTIONAL == set()
    assert found - NEEDED - THEIRS <= {"kvverify"}


def test_the_plugin_loads_nothing_but_pytest(tmp_path):
    found = loaded("import kvverify.plugin", tmp_path)
    assert found & (OPTIONAL | NEEDED) == {"pytest"}


def test_a_pytest_session_of_others_loads_neither_torch_nor_the_rest_of_kvverify(tmp_path):
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n\n\ndef test_theirs():\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert {name for name in sys.modules if name.startswith('kvverify')} == {'kvverify', 'kvverify.plugin'}\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


def imports(module):
    """The modules of ours that a module imports, at whichever depth, except for type checkers alone."""
    for node in ast.walk(ast.parse((HOME / module).read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                inner.names = []
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ROOMS = {"operators", "operator", "cases", "case", "claims", "mutants", "kernels", "__init__"}


def is_room(module, rooms=ROOMS):
    """Whether a module is, or lies in, a room of a policy's contract, such as claims or decode_mutants."""
    parts = module.removesuffix(".py").split("/")
    return parts[-1] == "__init__" or any(part.split("_")[-1] in rooms for part in parts[1:])


GATE_SIDE = ("gate", "search", "run", "harness", "matrix", "diagnosis", "report", "verdicts", "target", "cli", "plugin")
PAPERS = ("attention", "relay", "vestige", "geodesia")
REFERENCES = [module for module in MODULES if module.split("/")[0] in PAPERS and not is_room(module)]


@pytest.mark.parametrize("module", REFERENCES)
def test_a_reference_knows_neither_contract_nor_claims_nor_gate(module):
    own = module.split("/")[0]
    forbidden = [f"kvverify.{name}" for name in GATE_SIDE] + [f"kvverify.{own}.{room}" for room in ROOMS - {"__init__"}]
    assert [name for name in imports(module) if name.startswith(tuple(forbidden))] == []


@pytest.mark.parametrize("module", ["operator.py", "budget.py", "cases.py", "harness.py", "run.py", "search.py"])
def test_the_core_knows_no_paper(module):
    papers = tuple(f"kvverify.{policy}" for policy in (*PAPERS, "selectors", "models"))
    assert [name for name in imports(module) if name.startswith(papers)] == []


CONTRACTS = [module for module in MODULES if is_room(module, {"operators", "cases", "claims"})]


@pytest.mark.parametrize("module", [module for module in CONTRACTS if Path(module).stem != "__init__"])
def test_contracts_know_no_claims_and_claims_no_mutants(module):
    later = {"mutants"} if is_room(module, {"claims"}) else {"claims", "mutants"}
    assert [name for name in imports(module) if name.startswith("kvverify") and later & set(name.split("."))] == []


CATALOGUE = 350
"""Lines of a room that is read entry by entry, such as a list of mutants; everything else is 300 at most."""


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short(module):
    assert len((HOME / module).read_text().splitlines()) <= (CATALOGUE if is_room(module) else 300)
