"""How every command of the package ends: one line on stderr and one exit code, never a traceback.

Exit codes: 0 ok, 1 conformance failure, 2 interrupted, 3 internal, 4 usage, 5 nothing tested; 10 is the golden store's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

import typer

from kvverify.harness import Violation
from kvverify.search import SuiteError
from kvverify.target import UsageError

__all__ = ["FAILED", "INTERNAL", "INTERRUPTED", "NOTHING_TESTED", "OK", "USAGE", "run"]

OK, FAILED, INTERRUPTED, INTERNAL, USAGE, NOTHING_TESTED = range(6)
CLICK_INTERRUPTED = 130


def run(
    app: typer.Typer,
    arguments: Sequence[str] | None = None,
    *,
    name: str = "kvverify",
    usage: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Run `app` and exit. Errors of the types `usage` are told as the user's, others of no known kind as internal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that cannot show a check mark still gets its verdict

    def complain(text: str, code: int) -> int:
        print(f"{name}: {text}", file=sys.stderr)
        return code

    # An extra that is not installed is the user's to install: the message names it.
    theirs: tuple[type[Exception], ...] = (ImportError, *usage)
    try:
        # Without standalone mode, click returns the code of a typer.Exit instead of raising it.
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False) or OK
        if code == CLICK_INTERRUPTED:
            code = complain("interrupted", INTERRUPTED)
    except UsageError as error:
        code = complain(str(error), error.exit_code)
    except Violation as violation:
        lines = [f"✘ {violation.kind}: {violation}", *([violation.budget] if violation.budget else [])]
        code = complain("\n  ".join(lines), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = complain("interrupted", INTERRUPTED)
    except SuiteError as error:
        code = complain(f"the suite itself failed: {error}", INTERNAL)
    except theirs as error:
        code = complain(" ".join(str(error).split()), USAGE)
    except Exception as error:
        if hasattr(error, "format_message"):
            code = complain(error.format_message(), USAGE)
        else:
            code = complain(f"internal error: {type(error).__name__}: {' '.join(str(error).split())}", INTERNAL)
    sys.exit(code)
