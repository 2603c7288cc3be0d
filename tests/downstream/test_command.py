"""The command as its users meet it: exit codes, one clear line, reproductions that reproduce."""

import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kernel_packages import ADAPTER, KVVERIFY, run

from kvverify.cli import main
from kvverify.operator import registry
from kvverify.report import ladder_line
from kvverify.verdicts import Verdict

FACTS = Path(__file__).parents[1] / "published" / "facts" / "geodesia_paired.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("user")
    (home / "user_kernels.py").write_text(ADAPTER)
    (home / "user_breaks.py").write_text("raise RuntimeError('no driver\\nhere')\n")
    (home / "user_exits.py").write_text("import sys\nsys.exit(0)\n")
    return home


@pytest.fixture
def kvverify(folder, monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        return (stop.value.code, *capsys.readouterr())

    return call


def test_list_names_every_operator_with_its_signature(kvverify):
    code, out, err = kvverify("list")
    assert (code, err) == (0, "")
    for operator in registry().values():
        assert operator.name in out
        assert operator.signature in out


@pytest.mark.parametrize("name", ["relay.relocate", "attention.decode"])
def test_explain_tells_contract_claims_and_known_bad_kernels(kvverify, name):
    code, out, _ = kvverify("explain", name)
    operator = registry()[name]
    assert code == 0
    for part in (operator.signature, *operator.mutants, *operator.controls):
        assert part in out
    for claim in operator.claims.values():
        assert claim.statement in out


@pytest.mark.parametrize(("name", "says"), [("relay", "RoPERelay"), ("attention", "-inf"), ("budget", "2^-24")])
def test_explain_tells_a_policy_and_the_budget(kvverify, name, says):
    code, out, _ = kvverify("explain", name)
    assert code == 0
    assert says in out


USAGE = [
    (["explain", "relay.relocat"], 4, "operator 'relay.relocat' is unknown: expected one of"),
    (["gate", "user_kernels:good", "--profile", "fast"], 4, "profile 'fast' is unknown"),
    (["gate", "user_kernels:good", "--seed", "x"], 4, "Invalid value for '--seed'"),
    (["gate", "user_kernels:good", "--device", "warp"], 4, "device 'warp' is unknown"),
    (["gate", "user_kernels:good", "--require-gpu"], 5, "a GPU was required"),
    (["gate", "user_kernels:good", "--report", "user_kernels.py"], 4, "report folder 'user_kernels.py'"),
    (["gate", "user_kernels:good", "--colour"], 4, "No such option"),
    (["gate"], 4, "Missing argument"),
    (["gate", "no_such_module:impl"], 4, "No module named 'no_such_module'"),
    (["gate", "user_kernels:absent"], 4, "has no attribute 'absent'"),
    (["gate", "user_kernels:number"], 4, "is a int: expected"),
    (["gate", "user_kernels"], 4, "a module without @implements functions"),
    (["gate", "user-kernels:good"], 4, "is not a target"),
    (["gate", "user_breaks:impl"], 4, "does not import: RuntimeError: no driver here"),
    (["gate", "user_exits:impl"], 4, "does not import: SystemExit: 0"),
    (["gate", "user_kernels:unknown"], 4, "did you mean 'relay.compact'?"),
    (["gate", "user_kernels:unsupported"], 4, "supports['slots'] = ['7'] leaves nothing of CompactCase"),
    (["gate", "user_kernels:misspelt"], 4, "names 'slot', a field of no case"),
    (["repro", "user_kernels:good", "relay.compact", "ending", "CompactCase()"], 4, "claim 'ending' is unknown"),
    (["repro", "user_kernels:good", "relay.compact", "end", "CompactCase(slots=)"], 4, "does not read as a case"),
    (["repro", "user_kernels:good", "relay.compact", "end", "CompactCase(slots=-1)"], 4, "does not build"),
    (["repro", "user_kernels:good", "relay.relocate", "end", "CompactCase()"], 4, "is not bound by"),
    (["mutants", "relai"], 4, "policy 'relai' is unknown"),
    (["mutants", "relay", "--examples", "0"], 4, "Invalid value for '--examples'"),
    (["conquer"], 4, "No such command 'conquer'"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), USAGE, ids=[" ".join(arguments) for arguments, _, _ in USAGE])
def test_a_wrong_request_gets_one_line_and_its_exit_code(kvverify, arguments, code, says):
    found, out, err = kvverify(*arguments)
    assert found == code
    assert says in err
    assert err.startswith("kvverify: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


FAILING = [
    ("raising", "raised", "relay.compact raised RuntimeError: out of shared memory ?[31m"),
    ("none", "wrong result", "relay.compact returned NoneType: expected positions, anchor"),
    ("shape", "wrong shape", "positions has shape [1, 2, 5]: expected [2, 2, 5]"),
    ("aliased", "aliases input", "positions shares memory with an argument"),
    ("dtype", "wrong dtype", "positions has dtype torch.int32: expected int64"),
    ("leaving", "raised", "relay.compact raised SystemExit: 0"),
]


@pytest.mark.parametrize(("attribute", "kind", "says"), FAILING, ids=[attribute for attribute, _, _ in FAILING])
def test_an_adapter_that_breaks_the_contract_fails_with_one_line_for_each_claim(kvverify, attribute, kind, says):
    if attribute == "aliased":  # a view has the wrong dtype before it can be an alias
        kind, says = "wrong dtype", "positions has dtype torch.uint8"
    code, out, err = kvverify("gate", f"user_kernels:{attribute}")
    assert (code, err) == (1, "")
    assert f"· {kind}" in out
    assert says in out
    assert "Traceback" not in out
    assert "NOT OK: 0 of 4 claims hold" in out


def test_an_honest_adapter_passes_and_the_ladder_names_each_claim(kvverify):
    code, out, err = kvverify("gate", "user_kernels:good", "--seed", "5")
    assert (code, err) == (0, "")
    assert "seed 5" in out
    for claim in registry()["relay.compact"].claims:
        assert f"✔ {claim}" in out
    assert "ok: 4 of 4 claims hold" in out


def test_a_suite_that_cannot_fail_exits_3(kvverify, monkeypatch):
    compact = registry()["relay.compact"]
    monkeypatch.delitem(compact.mutants, "empty_slots_stand_at_zero")
    code, out, _ = kvverify("gate", "user_kernels:good")
    assert code == 3
    assert "suite defect: relay.compact: holes rejects no mutant" in out


def test_a_surprise_inside_exits_3_in_one_line(kvverify, monkeypatch):
    def surprise(*_, **__):
        raise KeyError("nobody\nexpected this")

    monkeypatch.setattr("kvverify.cli.self_check", surprise)
    code, _, err = kvverify("gate", "user_kernels:good")
    assert code == 3
    assert err.startswith("kvverify: internal error: KeyError")
    assert err.count("\n") == 1


def test_an_interrupt_exits_2(kvverify, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvverify.cli.self_check", interrupt)
    assert kvverify("gate", "user_kernels:good")[0] == 2


@pytest.fixture(scope="module")
def forgetful(folder):
    return run(KVVERIFY, "gate", "user_kernels:bad", "--report", "out", folder=folder)


def test_a_forgotten_amplitude_exits_1_and_names_the_claim_and_the_mutant(forgetful):
    assert forgetful.returncode == 1, forgetful.stderr
    assert "✘ relay.relocate · relocation · budget" in forgetful.stdout
    assert "your output equals mutant forgets_amplitude on 12 of 12 failing cases" in forgetful.stdout
    assert "RelocateCase(amplitude=1.1386)" in forgetful.stdout
    assert "✔ passthrough" in forgetful.stdout


def test_output_that_is_no_terminal_is_free_of_escape_codes(forgetful):
    assert "\x1b" not in forgetful.stdout + forgetful.stderr
    assert "Traceback" not in forgetful.stdout + forgetful.stderr


def test_no_color_is_honoured_even_where_colour_is_forced(folder):
    told = run(KVVERIFY, "list", folder=folder, NO_COLOR="1", FORCE_COLOR="1")
    assert told.returncode == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", told.stdout)


def test_the_printed_shell_line_reproduces_when_run_verbatim(forgetful, folder):
    lines = re.findall(r"^ +shell +(.*)$", forgetful.stdout, re.MULTILINE)
    assert lines
    again = run("bash", "-c", f"PATH={shlex.quote(str(KVVERIFY.parent))}:$PATH; {lines[0]}", folder=folder)
    assert again.returncode == 1
    assert "✘ budget: keys[" in again.stderr
    assert "Traceback" not in again.stderr


def test_the_printed_python_line_reproduces_when_run_verbatim(forgetful, folder):
    (line, *_) = re.findall(r"^ +python +(.*)$", forgetful.stdout, re.MULTILINE)
    again = run(sys.executable, "-c", line, folder=folder)
    assert again.returncode == 1
    assert "kvverify.harness.Violation: keys[" in again.stderr


def test_three_report_files_are_written_and_agree(forgetful, folder):
    names = ["report.json", "junit.xml", "summary.md"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(names)
    for name in names:
        assert f"out/{name}" in forgetful.stdout
    told = json.loads((folder / "out" / "report.json").read_text())
    failed = sum(not verdict["ok"] for verdict in told["verdicts"])
    assert not told["ok"]
    root = ElementTree.parse(folder / "out" / "junit.xml").getroot()
    assert len(list(root.iter("failure"))) == failed > 0
    assert "forgets_amplitude" in (folder / "out" / "summary.md").read_text()


def test_a_gate_leaves_nothing_behind_but_its_report(forgetful, folder):
    left = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert left <= {"user_kernels.py", "user_breaks.py", "user_exits.py", "out"}


def test_a_console_without_check_marks_still_gets_its_verdict(folder):
    told = run(KVVERIFY, "gate", "user_kernels:good", folder=folder, PYTHONIOENCODING="ascii")
    assert told.returncode == 0, told.stderr
    assert "ok: 4 of 4 claims hold" in told.stdout


@pytest.mark.slow
def test_mutants_shows_the_matrix_and_exits_0(kvverify):
    code, out, _ = kvverify("mutants", "attention", "--examples", "5")
    assert code == 0
    chosen = [operator for name, operator in registry().items() if name.startswith("attention.")]
    for operator in chosen:
        for name in (*operator.mutants, *operator.controls):
            assert name in out
    assert f"{sum(len(operator.controls) for operator in chosen)} equivalent kernels (=) passed" in out


def test_a_kernel_with_another_signature_is_refused_once_and_told_the_right_one(kvverify):
    code, out, err = kvverify("gate", "user_kernels:misfit")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1
    for part in ("relay.compact", "cannot be called as compact(valid[layers,heads,slots])", "'more'"):
        assert part in err


def test_version_tells_what_a_report_would(kvverify):
    code, out, err = kvverify("--version")
    assert (code, err) == (0, "")
    assert out.startswith("kvverify ")
    assert "torch" in out


def test_a_missing_extra_is_a_usage_error_that_names_it(kvverify, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    code, _, err = kvverify("stats", str(FACTS))
    assert code == 4
    assert "kvverify[stats]" in err
    assert err.count("\n") == 1


def test_a_device_asked_for_stands_in_the_lines_that_reproduce(kvverify):
    code, out, _ = kvverify("gate", "user_kernels:shape", "--device", "cpu")
    assert code == 1
    assert "--device cpu\n" in out
    assert "device='cpu')" in out


def test_a_claim_that_ran_out_of_time_says_so():
    verdict = Verdict("op", "claim", "Holds.", "", "holds", "exact", True, 1, 2.0, 0.0, out_of_time=True)
    assert "1 cases  exact, out of time" in ladder_line(verdict)
