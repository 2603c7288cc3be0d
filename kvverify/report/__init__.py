"""Views of a report: terminal, JSON, JUnit, Markdown. None of them decides anything; all read a `Report`."""

from kvverify.report.files import reserve, write_reports
from kvverify.report.text import (
    failure_block,
    failure_blocks,
    header,
    ladder_line,
    matrix_line,
    render,
    self_check_line,
    summary,
)

__all__ = [
    "failure_block",
    "failure_blocks",
    "header",
    "ladder_line",
    "matrix_line",
    "render",
    "reserve",
    "self_check_line",
    "summary",
    "write_reports",
]
