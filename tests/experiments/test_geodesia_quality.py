"""The quality experiment: frozen inputs, a report that is a function of the results, and one window run again."""

import copy
import dataclasses
import hashlib
import json
import statistics
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from kvverify.experiments import geodesia_quality
from kvverify.experiments.geodesia_quality import MANIFEST, POLICIES, build_cache, check_window, freeze, score_tokens
from kvverify.experiments.quality_report import paired_windows, plot, rows, table, write_report
from kvverify.experiments.watching import Watched
from kvverify.experiments.windows import build_window, sha256_of, spread
from kvverify.geodesia import rates
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.baselines import Full, StreamingLLM
from kvverify.models.loading import load_smollm2
from kvverify.stats import compare

FOLDER = Path(__file__).parents[2] / "golden" / "experiments" / "geodesia_quality"
RESULTS = json.loads((FOLDER / "results.json").read_text())
FROZEN = json.loads(MANIFEST.read_text())


@pytest.fixture(scope="module")
def committed():
    return rows(RESULTS)


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})


def text_of(ids):
    return "".join(map(chr, ids.tolist()))


def test_a_window_is_the_start_of_its_text_with_the_needle_inside_and_the_question_after_the_prompt():
    content = "abcdefghij" * 40
    found = [build_window(Letters(), "name", content, number=i, prefix=200, scored=20) for i in range(6)]
    assert text_of(found[0].tokens) == content[:220]
    places = []
    for window in found:
        prompt, asked = text_of(window.needle[:200]), text_of(window.needle[200:])
        start = prompt.index("\n\nThe pass key is ")
        key = prompt[start + 18 : start + 23]
        assert key.isdigit()
        assert asked == f"\n\nWhat is the pass key? The pass key is {key}"
        statement = f"\n\nThe pass key is {key}. Remember it.\n\n"
        assert prompt.replace(statement, "") == content[: 200 - len(statement)]
        places.append(start)
    assert places[:5] == sorted(set(places))
    assert places[5] == places[0]
    other = build_window(Letters(), "other", content, number=0, prefix=200, scored=20)
    assert sha256_of(other.needle) != sha256_of(found[0].needle)
    assert sha256_of(other.tokens) == sha256_of(found[0].tokens)


def test_a_short_text_is_refused():
    with pytest.raises(ValueError, match="text 'name' has 30 tokens, expected at least 220"):
        build_window(Letters(), "name", "x" * 30, number=0, prefix=200, scored=20)


def test_spread_takes_the_middles_of_equal_parts():
    assert spread("abcdefghij", 5) == ["b", "d", "f", "h", "j"]
    assert spread("abc", 3) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="count is 4, expected 1 to 3"):
        spread("abc", 4)


def test_the_manifest_is_what_the_module_says_and_what_the_committed_results_were_run_with():
    assert FROZEN["policies"] == POLICIES
    assert FROZEN["queries_per_call"] == RESULTS["queries_per_call"] == 1
    assert (FROZEN["prefix"], FROZEN["scored"], len(FROZEN["windows"])) == (2048, 64, 20)
    assert RESULTS["manifest_sha256"] == hashlib.sha256(MANIFEST.read_bytes()).hexdigest()
    assert len(RESULTS["windows"]) >= 11
    for frozen, scored in zip(FROZEN["windows"], RESULTS["windows"], strict=False):
        assert (scored["text"], scored["tokens_sha256"]) == (frozen["text"], frozen["tokens_sha256"])
        assert list(scored["policies"]) == list(POLICIES)
        assert {len(policy["nll"]) for policy in scored["policies"].values()} == {63}


def test_a_text_that_is_not_the_frozen_one_stops_the_run(monkeypatch):
    content = "abcdefghij" * 300
    monkeypatch.setattr(geodesia_quality, "load_text", lambda package, name: content)
    window = build_window(Letters(), "name", content, number=0, prefix=200, scored=20)
    line = {**window.record, "text_sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest = {"prefix": 200, "scored": 20, "windows": [line]}
    assert torch.equal(check_window(Letters(), manifest, 0).tokens, window.tokens)
    for name in ("tokens_sha256", "needle_sha256", "text_sha256"):
        altered = {**manifest, "windows": [{**line, name: "0" * 64}]}
        with pytest.raises(ValueError, match=f"{name} of window name is .*, expected 0000.* as frozen"):
            check_window(Letters(), altered, 0)


def test_every_line_of_the_manifest_makes_a_cache():
    geometry = Geometry(dim=64, kv_heads=3)
    for line in POLICIES.values():
        cache = build_cache(line, geometry=geometry, scale=0.125, dtype=torch.bfloat16)
        assert cache.weight.numel() == 0
    with pytest.raises(ValueError, match="kind is 'h2o', expected 'graded' or one of"):
        build_cache({"kind": "h2o"}, geometry=geometry, scale=0.125, dtype=torch.bfloat16)


def watched(cache, steps=4):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    found = Watched(cache, scale=0.5, dtype=torch.bfloat16, every=2)
    keys, values = draw(2, 30, 8), draw(2, 30, 8)
    found.prefill(draw(2, 3, 4, 8), keys, values)
    queries = []
    for _ in range(steps):
        query, key, value = draw(2, 3, 8), draw(2, 8), draw(2, 8)
        found.step(query, key, value)
        keys = torch.cat([keys, key[:, None]], 1)
        queries.append((query, keys))
    return found, queries


def test_attention_kl_is_zero_for_the_full_cache_and_that_of_the_weights_otherwise():
    assert watched(Full(scale=0.5))[0].attention_kl == [0.0, 0.0]
    found, queries = watched(StreamingLLM(scale=0.5, sinks=2, recent=6))
    assert len(found.attention_kl) == 2
    for measured, (query, keys) in zip(found.attention_kl, queries[::2], strict=True):
        tokens = keys.shape[1]
        weight = (0.5 * query.double() @ keys.bfloat16().double().mT).softmax(-1)
        kept = weight[..., [0, 1, *range(tokens - 6, tokens)]]
        # Renormalizing a part of a distribution: KL(part || whole) = -ln of the part's mass.
        expected = float(-kept.sum(-1).log().mean())
        assert abs(measured - expected) <= 64 * 2.0**-53 * (1 + expected)


def test_a_watched_footprint_is_the_sum_over_the_steps():
    found, _ = watched(StreamingLLM(scale=0.5, sinks=2, recent=6))
    lengths = range(31, 35)
    assert found.resident / found.values == rates.retained(lengths, tokens=8).resident
    assert found.values == 2 * 2 * 8 * sum(lengths)


def test_the_committed_table_is_that_of_the_committed_results(tmp_path):
    text = write_report(RESULTS, tmp_path)
    assert (tmp_path / "table.md").read_text() == (FOLDER / "table.md").read_text()
    assert text.startswith((FOLDER / "table.md").read_text())
    assert text.count("The claim that the ratio is not 1") == 3


def test_the_plot_shows_every_policy_and_is_the_same_bytes_again(committed, tmp_path):
    for name in ("first.svg", "second.svg"):
        plot(committed, tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert drawn == (tmp_path / "second.svg").read_text()
    for shown in (drawn, (FOLDER / "rate.svg").read_text()):
        assert all(f">{name}</text>" in shown for name in POLICIES)


def test_a_row_is_the_mean_over_windows_and_tokens_and_its_interval_is_paired(committed):
    found = {row.policy: row for row in committed}
    windows = [window["policies"] for window in RESULTS["windows"]]
    differences = [[a - b for a, b in zip(w["KIVI-2"]["nll"], w["full"]["nll"], strict=True)] for w in windows]
    row = found["KIVI-2"]
    assert row.difference == statistics.fmean(value for window in differences for value in window)
    assert row.against_full == compare(differences)
    assert paired_windows(RESULTS, "KIVI-2", "full") == differences
    assert found["full"].difference == 0
    assert found["full"].next_token_kl == 0
    assert float(found["full"].rate.resident) == 16
    with pytest.raises(ValueError, match="policy 'H2O' is not in the results, expected one of"):
        paired_windows(RESULTS, "H2O", "full")


def test_rates_of_the_baselines_are_the_closed_forms_over_the_63_calls(committed):
    found = {row.policy: float(row.rate.resident) for row in committed}
    lengths = range(2049, 2112)
    exact = {
        "KIVI-4": rates.kivi(lengths, key_bits=4, value_bits=4, dim=64).resident,
        "KIVI-2": rates.kivi(lengths, key_bits=2, value_bits=2, dim=64).resident,
        "Quest": rates.quest(lengths, pages=4).resident,
        "StreamingLLM": rates.retained(lengths, tokens=260).resident,
        "sinks+recent": rates.retained(lengths, tokens=656).resident,
        "SnapKV": Fraction(16 * sum(256 + T - 2048 for T in lengths), sum(lengths)),
    }
    for policy, rate in exact.items():
        # A mean of equal floats.
        assert abs(found[policy] - float(rate)) <= 32 * 2.0**-53 * 16, policy


def test_a_table_refuses_rows_of_different_q(committed):
    first, second, *_ = committed
    mixed = [first, dataclasses.replace(second, rate=dataclasses.replace(second.rate, chunk=64))]
    with pytest.raises(ValueError, match=r"rates have chunk sizes \[1, 64\], expected one size for a table"):
        table(mixed)


def test_a_policy_below_the_full_cache_is_flagged_and_no_other():
    altered = {**RESULTS, "windows": copy.deepcopy(RESULTS["windows"][:1])}
    for window in altered["windows"]:
        for name, policy in window["policies"].items():
            shift = {"full": 0.0, "SnapKV": -0.01}.get(name, 0.01)
            policy["nll"] = [value + shift for value in window["policies"]["full"]["nll"]]
    text = table(rows(altered))
    assert text.count("(below full)") == 1
    assert "Below the full cache, not a gain by itself: SnapKV." in text


def test_violations_are_counted_together_with_what_was_checked(committed):
    found = [row for row in committed if row.certificate]
    assert [row.policy for row in found] == ["graded+RD", "RD-V2"]
    # 8 of the 63 calls, 30 layers, 9 query heads.
    assert {row.certificate[0] for row in found} == {len(RESULTS["windows"]) * 8 * 30 * 9}
    assert {row.certificate[1] for row in found} == {0}
    altered = {**RESULTS, "windows": copy.deepcopy(RESULTS["windows"][:1])}
    altered["windows"][0]["policies"]["RD-V2"]["certificate"]["violations"] = 3
    assert "Certificate: 3 violations in" in table(rows(altered))


def test_no_window_is_no_report():
    with pytest.raises(ValueError, match="results hold 0 windows"):
        rows({"windows": [], "queries_per_call": 1})


@pytest.mark.slow
def test_the_rule_gives_the_manifest_and_its_first_window_is_scored_as_committed():
    model, tokenizer = load_smollm2()
    assert freeze(tokenizer) == FROZEN
    window = check_window(tokenizer, FROZEN, 0)
    policies = ("full", "KIVI-4", "graded+RD", "compressed-Quest")
    manifest = {**FROZEN, "policies": {name: FROZEN["policies"][name] for name in policies}}
    scores, caches = score_tokens(model, manifest, window.tokens)
    committed = RESULTS["windows"][0]["policies"]
    for row, name in enumerate(policies):
        found = float(scores.nll[row].mean())
        # float32 over 30 layers leaves 2e-3 of a token's NLL (`allowed` in test_serving.py). Where that flips a choice
        # between equal damages or pages, another block is coarser: the policies may differ by ten times as much.
        bound = 2e-3 if name == "full" else 2e-2
        assert abs(found - statistics.fmean(committed[name]["nll"])) <= bound, name
        values = sum(layer.values for layer in caches[row])
        resident = float(sum(layer.resident for layer in caches[row]) / values)
        assert abs(resident - committed[name]["resident"]) <= (0.05 if "e" in name else 1e-12), name
    assert float(scores.next_token_kl[0].abs().max()) == 0
