"""kvverify: the executable specification of three KV-cache policies, and a gate for the kernels that implement them.

    from kvverify import Implementation, check

    report = check(Implementation("mine", {"relay.relocate": my_relocate}, dtypes=("bf16",)))
    assert report.ok, report

The names below are the whole public surface; the policies are `kvverify.attention` and `kvverify.relay`, each
with its reference as an Implementation named `reference`. The command is `kvverify`, the pytest option `--kv-impl`.
"""

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
