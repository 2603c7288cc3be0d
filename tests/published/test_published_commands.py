"""`kvverify capacity` and `kvverify stats` print the published figures, and refuse bad files in one line."""

import json
import re
from pathlib import Path

import pytest

from kvverify.cli import main
from kvverify.commands import PUBLISHED, PUBLISHED_RATES

FACTS = Path(__file__).parent / "facts"
CAPACITY = json.loads((FACTS / "geodesia_capacity.json").read_text())
# The policies of the facts, by the name that the command prints.
NAMES = {
    "full": "Full-KV BF16",
    "Quest": "Quest p=32",
    "compressed-Quest B=10": "Compressed-Quest B=10",
    "KIVI-4": "KIVI-4",
    "graded+RD": "Geodesia graded+RD 5-bit",
    "KIVI-2": "KIVI-2",
    "RD-V2": "Geodesia RD-V2 2-bit",
}


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return stop.value.code or 0, shown.out, shown.err


@pytest.mark.parametrize("context", [40_960, 131_072])
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_capacity_prints_the_published_table(capsys, name, context):
    code, out, _ = run(capsys, "capacity", name, "--context", context)
    assert code == 0
    assert set(NAMES) == set(PUBLISHED_RATES)
    model = CAPACITY["models"][name]
    shape, budget = PUBLISHED[name]
    assert [*shape, budget] == [model[key] for key in ("layers", "kv_heads", "head_dim", "cache_budget_bytes")]
    for line in out.splitlines()[2:9]:
        policy = line[:22].strip()
        _, kib, tokens, sequences = line[22:].split()
        published = model["policies"][NAMES[policy]]
        assert PUBLISHED_RATES[policy] == published["bits_per_value"]
        assert kib == f"{published['KiB_per_token']:.3f}"
        assert int(tokens.replace(",", "")) == published["max_context"]
        assert int(sequences.replace(",", "")) == published["concurrency"][str(context)]
    for line in out.splitlines()[9:11]:
        assert line[:12].strip() in {"SnapKV", "StreamingLLM"}
        assert int(line.split()[-1]) == model["derived"]["eviction_concurrency_constant_cache"]


def write(folder, value):
    path = folder / "file.json"
    path.write_text(json.dumps(value))
    return path


def test_capacity_reads_the_configurations_of_transformers(capsys, tmp_path):
    smollm2 = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    code, out, _ = run(capsys, "capacity", write(tmp_path, smollm2), "--memory", "1", "--context", "8192")
    assert code == 0
    assert "30 layers, 3 KV heads of 64; 1.00 GiB" in out
    full = out.splitlines()[2].split()
    # 30 layers, 2 sides, 3 heads of 64 values of 2 bytes: 23,040 bytes a token.
    assert full == ["full", "16", "22.500", f"{2**30 // 23040:,}", str(2**30 // (23040 * 8192))]
    nested = {"text_config": {**smollm2, "num_key_value_heads": 9, "head_dim": 128}}
    assert "30 layers, 9 KV heads of 128; 24.00 GiB" in run(capsys, "capacity", write(tmp_path, nested))[1]
    del smollm2["num_key_value_heads"]
    assert "30 layers, 9 KV heads of 64" in run(capsys, "capacity", write(tmp_path, smollm2))[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers of .* is 0, expected a positive integer"),
        ({"num_hidden_layers": 2}, "num_attention_heads of .* is None, expected a positive integer"),
        ({"kv_lora_rank": 512}, "caches a latent .*: expected a model that caches keys and values"),
        ([], "holds a list, expected a JSON object"),
    ],
)
def test_capacity_refuses_a_configuration_it_cannot_count(capsys, tmp_path, config, message):
    code, _, err = run(capsys, "capacity", write(tmp_path, config))
    assert code == 4
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_capacity_refuses_an_unknown_model_and_no_memory(capsys):
    code, _, err = run(capsys, "capacity", "Llama-9")
    assert (code, err.count("\n")) == (4, 1)
    assert "model 'Llama-9' is neither a file nor published" in err
    code, _, err = run(capsys, "capacity", "Qwen3-8B", "--memory", "0")
    assert (code, "--memory is 0.0, expected a positive number of GiB" in err) == (4, True)


def test_stats_prints_that_the_published_claim_does_not_survive(capsys):
    code, out, _ = run(capsys, "stats", FACTS / "geodesia_paired.json")
    assert code == 0
    graded, quest, rest = out.split("\n\n")
    assert not rest
    assert "ratio 1.00516 over 11 clusters, 8 of them above 1" in quest
    assert "cluster bootstrap  [1.00076, 1.00945]" in quest
    assert "t interval         [0.99999, 1.01035]" in quest
    assert "The claim that the ratio is not 1 does not survive: t interval, exact sign-flip test." in quest
    assert "ratio 0.99904" in graded


def test_stats_reads_the_results_of_a_run_against_the_full_cache(capsys, tmp_path):
    windows = [
        {"policies": {"full": {"nll": [1.0, 2.0]}, "A": {"nll": [1.1 + shift, 2.1]}}} for shift in (0.0, 0.01, 0.02)
    ]
    code, out, _ = run(capsys, "stats", write(tmp_path, {"windows": windows}))
    assert code == 0
    assert out.startswith("A / full\nratio 1.11071 over 3 clusters, 3 of them above 1")  # exp(.1 + .01 / 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "has neither 'pairs' nor 'windows'"),
        (
            {"pairs": {"a": {"policy_A": "A", "policy_B": "B", "windows": [{"nll_A": [1], "nll_B": [1, 2]}]}}},
            "a window has 1 and 2 scores, expected as many of both",
        ),
        (
            {"pairs": {"a": {"policy_A": "A", "policy_B": "B", "windows": [{"nll_A": [1], "nll_B": [2]}]}}},
            "A / B: there are 1 clusters, expected at least 2",
        ),
    ],
)
def test_stats_refuses_what_it_cannot_judge(capsys, tmp_path, data, message):
    code, _, err = run(capsys, "stats", write(tmp_path, data))
    assert (code, err.count("\n"), message in err) == (4, 1, True)


def test_stats_refuses_a_file_that_is_not_there(capsys, tmp_path):
    code, _, err = run(capsys, "stats", tmp_path / "none.json")
    assert (code, "cannot be read as JSON" in err) == (4, True)
