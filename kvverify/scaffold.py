"""`kvverify init POLICY`: a test file to start from, which gates your kernels for a policy's operators.

The file passes as it is written: every operator is bound to the reference. Replace the bodies one by one.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated

import typer

from kvverify.operator import POLICIES, Operator, registry
from kvverify.target import UsageError

__all__ = ["init", "register", "starting_file"]

_FILE = '''"""My kernels for {policy}, against kvverify: pytest {name}

Every function is bound to the reference, so this file passes as it is. Put your kernels in
the place of the bodies, one by one, and delete what you do not have.
"""

from kvverify import Implementation, implements, parametrize_with_checks
from kvverify.{policy} import reference
{functions}

impl = Implementation({bindings})


@parametrize_with_checks(impl)
def test_my_kernels(check):
    check()
'''

_FUNCTION = """

@implements("{operator}")
def {function}({parameters}):
    return reference.operators["{operator}"]({arguments})
"""

WIDTH = 88


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(init)


def init(
    policy: Annotated[str, typer.Argument(help=f"one of {', '.join(POLICIES)}")],
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="write it there; default: print it")] = None,
) -> None:
    """Start a test file that gates your kernels: every operator of a policy, bound to the reference."""
    name = "test_my_kernels.py" if file is None else file.name
    content = starting_file(policy, name)
    if file is None:
        typer.echo(content, nl=False)
        return
    if file.exists():
        raise UsageError(f"--file {file} exists, expected a new file: nothing is overwritten")
    if not file.parent.is_dir():
        raise UsageError(f"--file {file} is in no folder that exists, expected an existing one")
    if file.suffix != ".py":
        raise UsageError(f"--file {file} is no Python file, expected a name such as test_my_kernels.py")
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise UsageError(f"--file {file} cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {file}: run `pytest {file}`, then put your kernels in")


def starting_file(policy: str, name: str) -> str:
    """Return the text of the file `name` for `policy`; UsageError for a policy that is not one."""
    if policy not in POLICIES:
        raise UsageError(f"policy {policy!r} is unknown: expected one of {list(POLICIES)}")
    operators = [operator for key, operator in registry().items() if key.split(".")[0] == policy]
    functions = "".join(_function(operator) for operator in operators)
    names = _wrapped([_short(operator) for operator in operators], before="    [],", indent=4)
    bindings = _wrapped(['"my-kernels"', f"[{names}]", 'device="cpu"'], before="impl = Implementation()")
    return _FILE.format(policy=policy, name=name, functions=functions, bindings=bindings)


def _function(operator: Operator) -> str:
    """Bind one operator to the reference, with the parameters of its contract (an oracle's own have defaults)."""
    parameters = [p for p in inspect.signature(operator.oracle).parameters.values() if p.default is p.empty]
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    declared = [*names, *(["*", *keywords] if keywords else [])]
    passed = [*names, *(f"{name}={name}" for name in keywords)]
    short, bound = _short(operator), f'    return reference.operators["{operator.name}"]()'
    return _FUNCTION.format(
        operator=operator.name,
        function=short,
        parameters=_wrapped(declared, before=f"def {short}():"),
        arguments=_wrapped(passed, before=bound, indent=4),
    )


def _wrapped(items: list[str], *, before: str, indent: int = 0) -> str:
    """Join the items of a call on one line, or one a line where the line would be longer than `WIDTH`."""
    line = ", ".join(items)
    if len(before) + len(line) <= WIDTH:
        return line
    margin = " " * indent
    return "".join(f"\n{margin}    {item}," for item in items) + f"\n{margin}"


def _short(operator: Operator) -> str:
    return operator.name.split(".")[1]
