"""The pytest plugin in a user's session: targets, exit codes, reports, parallel workers."""

import json
import sys

import pytest
from kernel_packages import ADAPTER, environment, run

CLAIMS = ("end", "gaps", "holes", "definition")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("user")
    (home / "plugin_kernels.py").write_text(ADAPTER)
    (home / "test_mine.py").write_text(
        "import kvverify\nimport plugin_kernels\n\n\n"
        "@kvverify.parametrize_with_checks(plugin_kernels.good)\ndef test_good(check):\n    check()\n\n\n"
        "@kvverify.parametrize_with_checks('plugin_kernels:dtype', seed=3)\ndef test_bad(check):\n    check()\n"
    )
    (home / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return home


def session(folder, *arguments, package="kvverify.conformance"):
    pyargs = ("--pyargs", package) if package else ()
    return run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *pyargs, *arguments, folder=folder)


@pytest.mark.parametrize("package", ["kvverify.conformance", "kvverify.conformance.test_conformance"])
def test_an_honest_implementation_passes_with_a_report_in_order(folder, tmp_path, package):
    told = session(folder, "--kv-impl", "plugin_kernels:good", "--kv-report", str(tmp_path), package=package)
    assert told.returncode == 0, told.stdout
    assert "5 passed" in told.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert tuple(verdict["claim"] for verdict in report["verdicts"]) == CLAIMS
    assert report["self_check"]["mutants"] > 10


@pytest.mark.slow
def test_parallel_workers_share_a_seed_and_the_controller_writes_the_whole_report(folder, tmp_path):
    common = ("--kv-impl", "plugin_kernels:dtype", "--kv-seed", "11", "--kv-report")
    parallel = session(folder, *common, str(tmp_path / "two"), "-n", "2")
    alone = session(folder, *common, str(tmp_path / "one"), "-p", "no:xdist")
    assert (parallel.returncode, alone.returncode) == (1, 1), parallel.stdout
    two, one = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("two", "one"))
    assert two["seed"] == one["seed"] == 11

    def facts(report):
        return [(v["claim"], v["ok"], v["failure"]["case"], v["failure"]["message"]) for v in report["verdicts"]]

    assert facts(two) == facts(one)
    assert two["self_check"] == one["self_check"]


def test_a_failure_shows_the_block_and_no_traceback_of_ours(folder):
    told = session(folder, "--kv-impl", "plugin_kernels:raising", "-k", "holes")
    assert told.returncode == 1
    assert "✘ relay.compact · holes · raised" in told.stdout
    assert 'kvverify repro plugin_kernels:raising relay.compact holes "CompactCase()"' in told.stdout
    assert "harness.py" not in told.stdout
    assert "\x1b" not in told.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--kv-impl", "plugin_kernels:absent"], 4, "has no attribute 'absent'"),
        (["--kv-impl", "no_such_module:x"], 4, "No module named 'no_such_module'"),
        (["--kv-impl", "plugin_kernels:good", "--kv-profile", "fast"], 4, "profile 'fast' is unknown"),
        (["--kv-impl", "plugin_kernels:good", "--kv-require-gpu"], 5, "a GPU was required"),
        (["--kv-impl", "plugin_kernels:good", "--kv-report", "pytest.ini"], 4, "report folder"),
        (["--kv-impl", "plugin_kernels:good", "-k", "nothing"], 5, "deselected"),
        (["--kv-impl", "plugin_kernels:good", "-k", "known_bad"], 5, "1 passed"),
        ([], 4, "kvverify.conformance needs --kv-impl MODULE:ATTRIBUTE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_or_empty_request_has_its_exit_code_and_line(folder, arguments, code, says):
    told = session(folder, *arguments)
    assert told.returncode == code, told.stdout + told.stderr
    assert says in told.stdout + told.stderr
    assert "Traceback" not in told.stdout + told.stderr
    assert "INTERNALERROR" not in told.stdout + told.stderr


@pytest.mark.slow
def test_the_decorator_gives_one_test_per_claim_in_a_file_of_ones_own(folder):
    told = session(folder, "test_mine.py", package="")
    assert told.returncode == 1
    assert f"{len(CLAIMS)} failed, {len(CLAIMS)} passed" in told.stdout
    for claim in CLAIMS:
        assert f"test_bad[relay.compact-{claim}]" in told.stdout


def test_the_decorator_refuses_what_cannot_be_tested():
    import kvverify
    from kvverify.target import UsageError

    with pytest.raises(UsageError, match="is a int"):
        kvverify.parametrize_with_checks(3)


def test_the_environment_of_these_tests_forces_no_colour():
    assert not {"FORCE_COLOR", "NO_COLOR"} & set(environment())
