"""The statements of Geodesia-KV, in the paper's order; those about a whole run stand in `decode` and `ledger`.

Statements that no operator can be held to are tests of the policy, listed in `CLAIMED_ELSEWHERE`.
"""

from kvverify.geodesia.claims import allocation, attention, decode, ledger, pages, quantizer

__all__ = ["CLAIMED_ELSEWHERE", "allocation", "attention", "decode", "ledger", "pages", "quantizer"]

CLAIMED_ELSEWHERE = {
    "rate_formulas": ("published/test_published_capacity.py", "test_kivi_rates_and_their_growth_with_the_chunk"),
    "paired_reproduces": ("published/test_published_paired.py", "test_published_intervals_are_reproduced_bit_for_bit"),
    "capacity_reproduces": ("published/test_published_capacity.py", "test_capacity_tables_are_reproduced"),
    "supremum <= tightened <= printed": (
        "geodesia/test_geodesia_certificate.py",
        "test_supremum_is_at_most_tightened_is_at_most_printed",
    ),
    "bounds are counted": (
        "geodesia/test_geodesia_certificate.py",
        "test_compare_counts_what_it_checked_and_finds_a_violation",
    ),
    "tables of one chunk size": ("published/test_published_capacity.py", "test_a_table_refuses_to_mix_chunk_sizes"),
}
"""Statements about tables and statistics, which no kernel computes: the test file and the test that hold them."""
