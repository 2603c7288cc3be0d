"""One thread, so that a figure does not depend on what else the machine is doing with its cores."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run go to more rows than a laptop cares to wait for."""
    parser.addoption("--rows", type=int, default=131_072, help="largest cache of test_scale.py (at least 16 rows)")


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> int:
    """The largest number of rows."""
    return int(request.config.getoption("--rows"))
