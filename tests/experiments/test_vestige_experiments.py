"""The VestigeKV experiments: their machinery exactly, and one tiny run of each for structure, never for outcomes."""

import json
import math
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from kvverify.experiments import vestige, vestige_needles
from kvverify.experiments.results import Chart, Result, draw, quantile, table, write
from kvverify.experiments.vestige import EXPERIMENTS
from kvverify.experiments.vestige_anatomy import distinct_rows, page_recall
from kvverify.experiments.vestige_continuation import partition_of
from kvverify.experiments.vestige_retrieval import CALIBRATIONS, calibrated, recall
from kvverify.experiments.vestige_trials import (
    TIER_ONE,
    answer_loss,
    archive,
    asked,
    attend_all,
    attend_kept,
    question_trials,
    stay,
)
from kvverify.models.latents import Prefix
from kvverify.models.needles import load
from kvverify.vestige.calibration import Margins
from kvverify.vestige.index import calibrated_basis
from kvverify.vestige.partition import EvictionPolicy
from kvverify.vestige.step import Retrieval

TOKENS = 1024
UNIT_ROUNDOFF = 2.0**-24  # float32


@pytest.fixture(scope="module")
def model():
    return load("nope")


@pytest.fixture(scope="module")
def trial(model):
    return next(question_trials(model, trials=1, tokens=TOKENS, needles=2, continuation=4))


def result(rows):
    return Result("Title", ("policy", "size", "rate"), rows, Chart("size", "rate", "policy"))


def test_quantile_is_the_smallest_value_that_enough_values_do_not_exceed():
    assert [quantile([5, 1, 3, 2, 4], share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)] == [1, 1, 3, 5, 5]
    with pytest.raises(ValueError, match=r"^values is empty: expected at least one$"):
        quantile([], 0.5)


@pytest.mark.parametrize("row", [("a", 1), ("a", 1, math.nan)])
def test_a_row_that_does_not_fit_the_table_is_refused_in_one_line(row):
    with pytest.raises(ValueError, match=r"^rows holds .*: expected"):
        result((row,))


def test_a_table_aligns_names_left_and_numbers_right():
    lines = table(result((("long name", 8, 0.5), ("b", 128, None)))).splitlines()
    assert lines[0] == "Title"
    assert lines[2:] == [
        "policy     size  rate",
        "---------------------",
        "long name     8   0.5",
        "b           128     -",
    ]


def test_files_hold_the_result_and_the_same_result_gives_the_same_bytes(tmp_path):
    one = result((("a", 8, 0.5), ("a", 32, 0.25), ("b", 8, None)))
    record, picture = write(one, tmp_path / "new", "name")
    assert [tuple(row) for row in json.loads(record.read_text())["rows"]] == list(one.rows)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert picture.read_bytes() == draw(one)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["name.json", "name.svg"]


def test_a_greedy_cover_counts_representatives():
    rows = torch.tensor([[0.0], [0.0], [1.0], [1.5], [2.0]])
    assert [distinct_rows(rows, tolerance) for tolerance in (0.0, 0.5, 1.0, 9.0)] == [4, 3, 2, 1]
    assert distinct_rows(rows[:0], 1.0) == 0


@pytest.mark.parametrize("radius", ["mean", "max"])
def test_the_page_of_an_aligned_row_is_recalled_and_one_page_of_noise_is_not_all(radius):
    keys = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) / 100
    keys[37] = 0
    keys[37, 0] = 10
    query = torch.eye(8)
    assert page_recall(query[:1], keys, page=8, read=1, radius=radius) == 1.0
    assert page_recall(-query, keys, page=8, read=1, radius=radius) < 1.0
    assert page_recall(-query, keys, page=8, read=8, radius=radius) == 1.0
    with pytest.raises(ValueError, match=r"^keys has 63 rows: expected whole pages of 8$"):
        page_recall(query, keys[:63], page=8, read=1, radius=radius)


def test_recall_counts_hard_queries_whose_best_row_fires_strictly():
    sample = Margins(
        best_kept=torch.tensor([1.0, 1.0, 1.0, 3.0]),
        best_archived=torch.tensor([2.0, 2.0, 2.0, 2.0]),
        index_score=torch.tensor([0.5, 0.5, 0.5, 9.0]),
        certificate=torch.tensor([1.0, 0.5, 0.0, 1.0]),
    )
    assert recall(sample, 1.0) == (1, 3)


@pytest.mark.parametrize("compression", [8, 32, 128])
@pytest.mark.parametrize("name", TIER_ONE)
def test_tier_one_keeps_exactly_its_budget_in_every_layer(trial, name, compression):
    masks = stay(TIER_ONE[name], trial, (compression,))[compression]
    assert [mask.dtype for mask in masks] == [torch.bool] * 2
    assert [int(mask.sum()) for mask in masks] == [TOKENS // compression] * 2


def test_the_branch_tier_reads_the_branch_alone_and_the_full_row_tier_does_not(trial):
    moved = tuple(type(layer)(layer.content.flip(0), layer.branch) for layer in trial.prefix.latents)
    other = type(trial)(
        Prefix(trial.prefix.tokens, moved, trial.prefix.queries, trial.prefix.scale),
        *(getattr(trial, name) for name in ("key", "value", "position", "following", "seed")),
    )
    for name, same in (("branch, 4 bins", True), ("full row, 4 bins", False)):
        pairs = zip(stay(TIER_ONE[name], trial, (32,))[32], stay(TIER_ONE[name], other, (32,))[32], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) is same


def test_random_rows_differ_between_layers_and_trials(model, trial):
    first, second = stay(TIER_ONE["random"], trial, (32,))[32]
    assert not torch.equal(first, second)


def test_a_fetch_of_everything_restores_the_uncompressed_answer(model, trial):
    content = trial.prefix.latents[0].content.shape[1]
    kept = stay(TIER_ONE["random"], trial, (32,))[32]
    fetched = []
    archives = [
        archive(layer, mask, Retrieval(calibrated_basis(queries[:, 0, :content], rank=6), inflation=1e9))
        for layer, queries, mask in zip(trial.prefix.latents, trial.prefix.queries, kept, strict=True)
    ]
    whole, _ = answer_loss(model, trial, 0, attend_all(trial.prefix))
    restored, _ = answer_loss(model, trial, 0, attend_kept(trial.prefix, kept, archives, fetched=fetched))
    # Softmax over the same rows in another order: TOKENS roundings of weights, through two layers, logits below 64.
    assert abs(restored - whole) <= 2 * TOKENS * UNIT_ROUNDOFF * 64
    assert [(fetch.layer, fetch.rows) for fetch in fetched] == [(layer, TOKENS - TOKENS // 32) for layer in (0, 1)]
    assert all(abs(fetch.coverage - 1) <= TOKENS * UNIT_ROUNDOFF for fetch in fetched)


def test_coverage_is_a_share_and_everything_covers_everything(model, trial):
    found = {}
    for name, kept in (
        ("all", [torch.ones(TOKENS, dtype=torch.bool)] * 2),
        ("some", stay(TIER_ONE["random"], trial, (32,))[32]),
    ):
        found[name] = []
        answer_loss(model, trial, 0, attend_kept(trial.prefix, kept, fetched=found[name]))
    assert all(abs(fetch.coverage - 1) <= TOKENS * UNIT_ROUNDOFF for fetch in found["all"])
    assert all(0 < fetch.coverage < 0.9 and fetch.rows == 0 for fetch in found["some"])


def test_calibration_settings_are_usable_and_share_one_basis(trial):
    kept = stay(TIER_ONE["branch, 4 bins"], trial, (32,))[32]
    arms = [(calibration, gated) for calibration in CALIBRATIONS.values() for gated in (False, True)]
    settings = calibrated(trial.prefix, 0, kept[0], arms)
    assert len(settings) == 6
    for retrieval, (_, gated) in zip(settings, arms, strict=True):
        assert 0 <= retrieval.inflation <= 8
        assert retrieval.theta == -math.inf or (gated and 0 < retrieval.theta <= math.log(TOKENS // 32))
        assert torch.equal(retrieval.basis, settings[0].basis)
    basis = settings[0].basis
    assert (basis @ basis.T - torch.eye(6)).abs().max() <= 48 * 4 * UNIT_ROUNDOFF


def test_the_question_is_asked_of_every_layer(model, trial):
    queries = asked(model, trial, 1)
    assert [query.shape for query in queries] == [(4, 64)] * 2
    assert not torch.equal(queries[0], asked(model, trial, 0)[0])


def test_chunks_do_not_change_what_a_partition_attends(trial):
    branch, policy = trial.prefix.latents[1].branch[:1000], EvictionPolicy(block=256, bandwidth=4, fraction=1 / 32)
    masks = [partition_of(branch, policy, chunk) for chunk in (1000, 300, 7)]
    assert all(torch.equal(masks[0], mask) for mask in masks[1:])
    assert masks[0][768:].all()
    assert masks[0][:4].all()
    assert 24 <= int(masks[0][:768].sum()) <= 28


@pytest.fixture(scope="module")
def results():
    return {name: experiment(trials=1, tokens=TOKENS) for name, experiment in EXPERIMENTS.items()}


def test_every_experiment_fills_its_table_and_names_its_sizes(results):
    assert {name: len(found.rows) for name, found in results.items()} == {
        "needle_rates": 3 * len(TIER_ONE),
        "tier_two": 16,
        "branch_width": 10,
        "rope_twin": 24,
        "multiple_needles": 32,
        "branch_anatomy": 8,
        "continuation_loss": 6,
        "arkvale_digests": 16,
        "rank_knob": 8,
        "streaming_path": 4,
        "mergeable_rows": 20,
    }
    for name, found in results.items():
        assert found.settings["tokens"] == TOKENS, name
        for column in (found.chart.x, found.chart.y, found.chart.series):
            assert column in found.columns, name


def test_every_rate_lies_in_its_interval(results):
    for found in results.values():
        if "low" in found.columns:
            for low, rate, high in zip(*(found.column(name) for name in ("low", "rate", "high")), strict=True):
                assert low is None or 0 <= low <= rate <= high <= 1


def test_every_result_can_be_drawn(results):
    for found in results.values():
        assert ElementTree.fromstring(draw(found)).tag.endswith("svg")


def test_a_void_run_says_so(monkeypatch):
    monkeypatch.setattr(vestige_needles, "answer_loss", lambda *_: (0.0, False))
    found = vestige_needles.branch_width(trials=3, tokens=TOKENS)
    assert found.notes[0].startswith("3 of 3 questions dropped")
    assert found.notes[1].startswith("Void by the protocol")
    assert found.column("rate") == [None] * 10


def test_the_command_prints_a_table_and_writes_two_files(tmp_path):
    app = vestige.typer.Typer()
    app.command()(vestige.main)
    arguments = ["mergeable_rows", "--trials", "1", "--tokens", str(TOKENS), "--out", str(tmp_path)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "Distinct rows / T" in ran.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mergeable_rows.json", "mergeable_rows.svg"]
    for wrong in (["nothing"], ["mergeable_rows", "--tokens", "1100"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
