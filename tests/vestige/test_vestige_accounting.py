"""Equation 2: the published read budget, and what it leaves out."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvverify.vestige.accounting import Reading, read_bytes, read_dims, read_ledger

RHO = Fraction(1, 32)


def per_context_token(fetched: Fraction, *, rank: int = 64) -> tuple[Reading, ...]:
    return read_ledger(kept=RHO, archived=1 - RHO, fetched=fetched, rank=rank)


@pytest.mark.parametrize(("rank", "dims"), [(64, 142), (128, 204), (192, 266)])
def test_dimensions_read_per_context_token_without_fetches(rank: int, dims: int) -> None:
    assert read_dims(per_context_token(Fraction(0), rank=rank), published=True) == dims


def test_with_the_published_fetch_rate_it_is_145_dimensions_and_a_quarter() -> None:
    dims = read_dims(per_context_token(Fraction(52, 10_000)), published=True)
    assert round(dims) == 145
    assert round(Fraction(576) / dims, 2) == Fraction(397, 100)


def test_bytes_read_per_context_token_are_287_9_and_a_row_per_fetch() -> None:
    still = read_bytes(per_context_token(Fraction(0)), published=True)
    assert still == Fraction(287_875, 1000)
    assert read_bytes(per_context_token(Fraction(1, 100)), published=True) - still == Fraction(1152, 100)


def test_an_index_entry_has_260_bytes() -> None:
    ledger = read_ledger(kept=0, archived=1, fetched=0)
    assert sum(item.bytes for item in ledger if item.name.startswith("index")) == 260
    assert read_bytes(ledger, published=True) == read_bytes(ledger, published=False) == 260


def test_what_the_paper_leaves_out_is_listed_apart() -> None:
    ledger = {item.name: item for item in read_ledger(kept=256, archived=7936, fetched=40, tail=100)}
    left_out = {name: (int(item.dims), int(item.bytes)) for name, item in ledger.items() if not item.published_dims}
    assert left_out == {
        "index: residual": (7936, 4 * 7936),
        "tail rows": (576 * 100, 1152 * 100),
        "attended rows again, for s*": (576 * 356, 1152 * 356),
        "row ids": (0, 8 * 396),
    }
    assert {name for name, item in ledger.items() if not item.published_bytes} == set(left_out) - {"index: residual"}


def test_a_step_costs_the_sum_of_its_parts() -> None:
    ledger = read_ledger(kept=256, archived=7936, fetched=40, tail=100)
    assert read_bytes(ledger, published=True) == 1152 * (256 + 40) + 260 * 7936
    assert read_bytes(ledger, published=False) == 1152 * (256 + 40 + 100 + 356) + 260 * 7936 + 8 * 396


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"fetched is -1: expected at least 0"):
        read_ledger(kept=0, archived=0, fetched=-1)
    with pytest.raises(ValueError, match=r"rank is -1: expected at least 0"):
        read_ledger(kept=0, archived=0, fetched=0, rank=-1)
