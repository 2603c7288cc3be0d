"""kvverify: the executable specification of three KV-cache policies, and a gate for the kernels that implement them.

    from kvverify import Implementation, check

    report = check(Implementation("mine", {"relay.relocate": my_relocate}, dtypes=("bf16",)))
    assert report.ok, report

The names below are the whole public surface; the policies are `kvverify.attention` and `kvverify.relay`, each
with its reference as an Implementation named `reference`. The command is `kvverify`, the pytest option `--kv-impl`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvverify.cases import Case
    from kvverify.conformance import parametrize_with_checks
    from kvverify.gate import Report, check, reproduce
    from kvverify.operator import Claim, Implementation, Mutant, Operator, implements, operators

__all__ = [
    "Case",
    "Claim",
    "Implementation",
    "Mutant",
    "Operator",
    "Report",
    "check",
    "implements",
    "operators",
    "parametrize_with_checks",
    "reproduce",
]

_HOMES = {"cases": ("Case",), "conformance": ("parametrize_with_checks",), "gate": ("Report", "check", "reproduce")}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: pytest loads this package for its plugin in sessions without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "operator")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
