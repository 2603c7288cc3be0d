"""The pytest entry point: `--kv-impl` and its companions.

It imports nothing of ours, nor torch, until it is asked: every pytest session of an environment loads it. Tests record
their verdicts as properties, which travel from parallel workers to the session that started them; only that one
writes the report and decides the exit code.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

__all__: list[str] = []

NOTHING_TESTED = 5
SESSION = pytest.StashKey[Any]()
FOUND = pytest.StashKey[dict[str, list[Any]]]()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all with the prefix --kv-."""
    group = parser.getgroup("kvverify", "conformance of KV-cache kernels")
    group.addoption("--kv-impl", metavar="MODULE:ATTRIBUTE", help="the implementation that kvverify.conformance tests")
    group.addoption("--kv-profile", default="quick", help="quick, ci, nightly or soak (default: quick)")
    group.addoption("--kv-seed", type=int, default=0, help="which cases are drawn (default: 0)")
    group.addoption("--kv-device", help="overrides the implementation's device")
    group.addoption("--kv-report", metavar="DIR", help="write report.json, junit.xml and summary.md there")
    group.addoption("--kv-require-gpu", action="store_true", help="exit 5 unless the implementation runs on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Resolve the implementation at once, so that a wrong name ends the session before anything is collected."""
    target = config.getoption("--kv-impl")
    if not target:
        return
    from kvverify.gate import open_session
    from kvverify.report.files import reserve
    from kvverify.target import UsageError

    try:
        if config.getoption("--kv-report"):
            reserve(Path(config.invocation_params.dir, config.getoption("--kv-report")))
        config.stash[SESSION] = open_session(
            target,
            profile=config.getoption("--kv-profile"),
            seed=config.getoption("--kv-seed"),
            device=config.getoption("--kv-device"),
            folder=str(config.invocation_params.dir),
            require_gpu=config.getoption("--kv-require-gpu"),
        )
    except UsageError as error:
        pytest.exit(f"kvverify: {error}", returncode=error.exit_code)
    config.stash[FOUND] = {"kv_verdict": [], "kv_self_check": []}
    config.stash[STARTED] = time.monotonic()
    config.pluginmanager.register(_Recorder(config), "kvverify-recorder")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested, on what, and with which seed."""
    if SESSION not in config.stash:
        return []
    from kvverify.report.text import header

    return [f"kvverify: {line}" for line in header(config.stash[SESSION]).splitlines()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per claim."""
    if "kv_check" in metafunc.fixturenames:
        from kvverify.conformance import checks

        found = checks(metafunc.config.stash[SESSION]) if SESSION in metafunc.config.stash else []
        metafunc.parametrize("kv_check", found, ids=[str(check) for check in found])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run our tests without an implementation."""
    ours = {"kv_check", "kv_session"}
    if SESSION not in config.stash and any(ours.intersection(getattr(item, "fixturenames", ())) for item in items):
        raise pytest.UsageError("kvverify.conformance needs --kv-impl MODULE:ATTRIBUTE")


@pytest.fixture
def kv_session(pytestconfig: pytest.Config) -> Any:
    """What is tested: the implementation, its operators, the profile and the seed."""
    return pytestconfig.stash[SESSION]


class _Recorder:
    """Collects what the tests recorded and, where no worker runs it, reports at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the recorded properties of each test that was called."""
        if report.when == "call":
            for name, value in report.user_properties:
                self.config.stash[FOUND].get(name, []).append(value)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; a run that was asked for conformance and tested no claim exits 5."""
        if hasattr(session.config, "workerinput"):
            return
        found = self.config.stash[FOUND]
        if not found["kv_verdict"] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = NOTHING_TESTED
        folder = self.config.getoption("--kv-report")
        if folder and found["kv_verdict"]:
            self._write(Path(self.config.invocation_params.dir, folder))

    def _write(self, folder: Path) -> None:
        from kvverify.report.files import write_reports
        from kvverify.verdicts import SelfCheck, Verdict

        found, session = self.config.stash[FOUND], self.config.stash[SESSION]
        count, missed, idle = found["kv_self_check"][0] if found["kv_self_check"] else (0, (), ())
        verdicts = [Verdict.from_dict(told) for told in found["kv_verdict"]]
        rank = {(operator.name, claim.name): at for at, (operator, claim) in enumerate(session.claims())}
        verdicts.sort(key=lambda verdict: rank[verdict.operator, verdict.claim])  # parallel workers finish in any order
        seconds = time.monotonic() - self.config.stash[STARTED]
        report = session.report(SelfCheck(count, tuple(missed), tuple(idle)), verdicts, seconds)
        write_reports(report, folder)
