"""The report as files: report.json for machines, junit.xml for CI, summary.md for people."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from kvverify.report.text import failure_block, failure_blocks, summary
from kvverify.target import UsageError
from kvverify.verdicts import Report

__all__ = ["junit", "markdown", "reserve", "write_atomically", "write_reports"]

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document may hold, not even escaped: a kernel's message may hold any."""


def reserve(folder: Path) -> None:
    """Make the folder of a report before the run that fills it. Raises UsageError where there cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"report folder {str(folder)!r} cannot be written: {error.strerror}") from None


def write_reports(report: Report, folder: Path) -> list[Path]:
    """Write report.json, junit.xml and summary.md into a folder, whole or not at all; also GitHub's step summary."""
    reserve(folder)
    contents = {"report.json": report.to_json(), "junit.xml": junit(report), "summary.md": markdown(report)}
    for name, text in contents.items():
        write_atomically(folder / name, text)
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if step_summary:
        with Path(step_summary).open("a", encoding="utf-8") as page:
            page.write(contents["summary.md"])
    return [folder / name for name in contents]


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file beside the target, then rename: a reader sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text if text.endswith("\n") else text + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def junit(report: Report) -> str:
    """JUnit XML: one suite per operator, one test case per claim, the failure block as text."""
    root = ElementTree.Element("testsuites", name=f"kvverify {report.implementation}")
    for operator in dict.fromkeys(verdict.operator for verdict in report.verdicts):
        verdicts = [verdict for verdict in report.verdicts if verdict.operator == operator]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=operator,
            tests=str(len(verdicts)),
            failures=str(sum(not verdict.ok for verdict in verdicts)),
            time=f"{sum(verdict.seconds for verdict in verdicts):.3f}",
        )
        for verdict in verdicts:
            case = ElementTree.SubElement(
                suite, "testcase", classname=operator, name=verdict.claim, time=f"{verdict.seconds:.3f}"
            )
            if verdict.failure is not None:
                failure = ElementTree.SubElement(
                    case, "failure", type=verdict.failure.kind, message=verdict.failure.message
                )
                failure.text = failure_block(verdict)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + NOT_XML.sub("?", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(report: Report) -> str:
    """A step summary: the verdict, a table of claims, and each failure in full."""
    mark = "✔" if report.ok else "✘"
    lines = [
        f"## {mark} kvverify: {report.implementation}",
        "",
        f"`{report.device}` · {' '.join(report.dtypes)} · evidence `{report.evidence}` · profile `{report.profile}`"
        f" · seed {report.seed}",
        "",
        "| | operator | claim | cases | budget used | statement |",
        "|---|---|---|---:|---:|---|",
    ]
    for verdict in report.verdicts:
        used = f"{verdict.worst:.0%}" if verdict.evidence == "budget" and verdict.ok else ""
        lines.append(
            f"| {'✔' if verdict.ok else '✘'} | {verdict.operator} | {verdict.claim} | {verdict.examples} | {used}"
            f" | {_cell(verdict.statement)} |"
        )
    for block in failure_blocks(report):
        lines += ["", "```text", block, "```"]
    return "\n".join([*lines, "", summary(report), ""])
