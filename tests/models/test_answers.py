"""`python -m kvverify.models` answers over a compressed history with each policy."""

import re

import pytest
from typer.testing import CliRunner

from kvverify.models.__main__ import POLICIES, app


def answered(*policies):
    result = CliRunner().invoke(app, policies)
    assert result.exit_code == 0, result.output
    return result.output


def test_vestige_answers_what_the_full_cache_answers_and_reads_less():
    lines = answered("vestige").splitlines()
    found = {
        name: (int(right), float(share))
        for name, right, share in re.findall(
            r"^  (.+?)\s+(\d) of 8 right, ([\d.]+) of the bytes", "\n".join(lines), re.M
        )
    }
    assert set(found) == {"all rows", "evicted", "fetched"}
    assert found["fetched"][0] >= found["evicted"][0]
    assert found["evicted"][1] < found["fetched"][1] < found["all rows"][1] == 1


@pytest.mark.slow
def test_relay_answers_with_smollm2():
    output = answered("relay")
    assert "all states   question at  1024  ' 48213'" in output
    assert re.search(r"relay        question at +66  ' .+'", output)


def test_an_unknown_policy_is_named():
    result = CliRunner().invoke(app, ["mine"])
    assert result.exit_code == 2
    assert f"POLICY is 'mine', expected some of {', '.join(POLICIES)}" in " ".join(result.output.split())
