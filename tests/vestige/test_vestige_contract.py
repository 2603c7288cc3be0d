"""VestigeKV in the gate: where each of its statements is checked, and that the checks alarm when and only when they
should."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from kvverify.gate import self_check
from kvverify.operator import Implementation, Operator, registry
from kvverify.search import search
from kvverify.vestige import reference
from kvverify.vestige.cases import ScanCase
from kvverify.vestige.operators import ATTEND, SCAN

SEEDS = range(int(os.environ.get("KVVERIFY_SEEDS", "3")))
EXAMPLES = 4
OPERATORS = [operator for name, operator in registry().items() if name.startswith("vestige.")]

CHECKED = {
    "exchangeable": {"attend.exchangeable", "test_attention_is_a_function_of_the_multiset_of_stored_rows"},
    "stationary": {"attend.stationary", "test_the_ranking_of_rows_is_stationary_without_rotation_only"},
    "position_free": {"attend.position_free", "test_one_content_at_two_positions_is_one_row_without_rotation_only"},
    "row_certificate": {"attend.row_certificate"},
    "extreme_point": {"test_a_winning_row_is_a_vertex_of_the_hull_of_the_rows"},
    "merge": {"attend.merge_of_equal_rows", "attend.merge_needs_the_lse"},
    "norm_merge": {"test_a_scaled_latent_gives_the_same_normed_content_only_without_epsilon"},
    "index_identity": {"index.index_identity", "index.entry", "prologue.parts_of_the_query"},
    "sound_fetch": {"scan.sound_fetch", "scan.deployed_clamp_misses"},
    "leakage": {"attend.leakage"},
    "leakage_output": {"attend.leakage_output"},
    "band_energy": {
        "salience.band_energy",
        "salience.low_band_is_invisible",
        "salience.band_edge",
        "salience.shift",
        "salience.homogeneous",
    },
    "closed_form": {"salience.closed_form"},
    "immutable": {"salience.immutable", "stream.chunking"},
    "partition": {"stream.partition", "stream.everything_fetched", "stream.nothing_fetched", "stream.reuse"},
    "count": {"stream.quota", "stream.most_salient", "select.top", "select.count"},
    "sinks": {"stream.stream_sinks", "select.sinks"},
    "tail": {"stream.tail"},
    "read_budget": {
        "test_dimensions_read_per_context_token_without_fetches",
        "test_bytes_read_per_context_token_are_287_9_and_a_row_per_fetch",
        "test_what_the_paper_leaves_out_is_listed_apart",
    },
    "page_radius": {
        "test_a_rotated_page_has_the_energy_of_its_closed_form",
        "test_the_radius_of_a_rotated_page_is_a_constant_share_of_its_fast_pairs",
    },
    "dividends": {
        "test_the_box_of_a_page_bounds_its_scores_wherever_its_rows_stand",
        "test_the_expected_mass_of_a_row_has_no_age_term",
        "test_the_votes_of_a_window_are_the_same_at_any_time",
        "test_low_rank_projection_error_is_the_discarded_part_of_the_score",
    },
}
"""Where each statement of the paper is checked: a claim of the gate (operator.claim) or a test of the reference."""

CONTROLS = [
    (operator, name, function)
    for operator in OPERATORS
    for name, function in [
        ("reference", reference.bindings[operator.name]),
        *((control.name, control.function) for control in operator.controls.values()),
    ]
]


def test_every_statement_is_a_registered_claim_or_a_named_test() -> None:
    registered = {
        f"{operator.name.removeprefix('vestige.')}.{name}" for operator in OPERATORS for name in operator.claims
    }
    tests = {
        node.name
        for file in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for statement, places in CHECKED.items():
        assert places <= registered | tests, f"{statement}: {sorted(places - registered - tests)} do not exist"


def test_three_statements_are_corrected_and_a_deployed_value_is_shown_to_miss() -> None:
    corrected = {name for operator in OPERATORS for name, claim in operator.claims.items() if claim.status != "holds"}
    assert corrected == {
        "leakage_output",
        "merge_needs_the_lse",
        "final_for_fixed_count",
        "deployed_clamp_misses",
    }


def test_every_known_bad_kernel_is_caught_on_its_witness() -> None:
    proven = self_check(OPERATORS)
    assert proven.mutants > 100
    assert (proven.missed, proven.idle) == ((), ())


def alarm(operator: Operator, claim: str, function: object, seed: int) -> object:
    """The case on which a claim alarms, or None."""
    bound = Implementation("bound", {operator.name: function})
    return search(operator, operator.claims[claim], bound, seed=seed, examples=EXAMPLES, seconds=60).case


def test_a_rotary_cache_breaks_stationarity_and_position_but_not_exchangeability() -> None:
    """Lemma 1 holds for stored rotated rows too: it cannot tell the two apart."""
    rotary = ATTEND.mutants["rotates_the_branch"].function
    assert alarm(ATTEND, "stationary", rotary, 0) is not None
    assert alarm(ATTEND, "position_free", rotary, 0) is not None
    assert [alarm(ATTEND, "exchangeable", rotary, seed) for seed in range(5)] == [None] * 5


@pytest.mark.parametrize(
    ("operator", "function"),
    [(operator, function) for operator, _, function in CONTROLS],
    ids=[f"{operator.name}-{name}" for operator, name, _ in CONTROLS],
)
def test_no_right_implementation_raises_an_alarm(operator: Operator, function: object) -> None:
    alarms = {(claim, seed): alarm(operator, claim, function, seed) for claim in operator.claims for seed in SEEDS}
    assert {place: case for place, case in alarms.items() if case is not None} == {}


def test_an_entry_of_the_published_shape_is_read_with_260_bytes() -> None:
    published = {"dtype": "bf16", "content": 512, "branch": 64, "rank": 64}
    more, fewer = (SCAN.read_bytes(ScanCase(archived=rows, **published)) for rows in (1001, 1000))
    assert more - fewer == 260
