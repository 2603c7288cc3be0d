"""What a request costs: ratios by hand, bytes, and the stages that count."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from relay_cases import TEXTS, encode, tiny_reader

from kvverify.experiments import relay_overhead
from kvverify.experiments.relay_overhead import STAGES, logical_bytes, overhead, physical_bytes, ratios
from kvverify.experiments.relay_records import build_record
from kvverify.experiments.relay_selection import SELECTORS, Observed
from kvverify.models.conversation import read_history

LIMIT = 1300


@pytest.fixture(scope="module")
def reader():
    return tiny_reader()


def measured(name, original, relay):
    """A question as it is stored: per plan the seconds of every stage, all alike but for "relocate"."""

    def spent(second, relocate):
        return {**dict.fromkeys(STAGES, second), "relocate": relocate, "processor": second}

    seconds = {"original": [spent(*one) for one in original], "relay": [spent(*one) for one in relay]}
    held = {"logical": 10, "physical": 20}
    return {"history": 0, "name": name, "tokens": 30, "seconds": seconds, "bytes": {"original": held, "relay": held}}


def test_the_overhead_is_the_geometric_mean_of_ratios_of_medians():
    times = [
        {"original": [1.0, 9.0, 2.0], "relay": [4.0, 100.0, 0.0]},  # 4 / 2
        {"original": [8.0, 8.0, 8.0], "relay": [1.0, 1.0, 9.0]},  # 1 / 8
    ]
    assert ratios(times) == [2, 1 / 8]
    assert overhead(ratios(times)) == pytest.approx((2 / 8) ** 0.5 - 1)
    with pytest.raises(ValueError, match=r"^times is empty, expected at least one question$"):
        ratios([])


def test_physical_bytes_count_a_storage_once_and_whole():
    base = torch.zeros(10, dtype=torch.float32)
    assert physical_bytes([base[:2], base[5:], base.view(2, 5)]) == 40
    assert physical_bytes([base, base.clone()]) == 80


def test_logical_bytes_are_those_of_the_states_that_are_held(reader):
    record = build_record(encode, TEXTS, 0, limit=LIMIT)
    observed = Observed(record, read_history(reader.model, record.tokens))
    full = observed.history.session()
    assert logical_bytes(full) == full.keys.nbytes + full.values.nbytes
    selection, _ = SELECTORS["pyramidkv"](observed, "", 100)
    session = observed.history.session(selection)
    assert session.keys.shape[2] > 100
    assert logical_bytes(session) == 100 * full.keys.shape[0] * full.keys.shape[1] * (8 + 8) * 4


def test_requests_of_both_plans_hold_the_same_bytes_and_every_stage_is_timed(reader):
    said = []
    found = relay_overhead.run(
        reader, [0], tokens=LIMIT, kept=200, selector="snapkv", generate=3, repetitions=2, each=said.append
    )
    (question,) = found
    assert question["bytes"]["relay"] == question["bytes"]["original"]
    assert question["bytes"]["relay"]["logical"] == 200 * 3 * 2 * 16 * 4
    assert question["bytes"]["relay"]["physical"] > question["bytes"]["relay"]["logical"]
    for plan in ("original", "relay"):
        assert [set(one) for one in question["seconds"][plan]] == [{*relay_overhead.STAGES, "processor"}] * 2
    assert [line.split(", ")[2].split(":")[0] for line in said] == ["original", "relay", "relay", "original"]
    result = relay_overhead.view(found, {})
    assert [row[1] for row in result.rows] == ["original", "relay"]
    with pytest.raises(ValueError, match=r"^kept is 5000, expected less than the \d+ tokens of the history$"):
        relay_overhead.run(reader, [0], tokens=LIMIT, kept=5000)


def test_the_request_of_original_leaves_out_its_relocate_stage():
    # original: 4 stages of 1 s, its 50 s of relocation not counted; relay: 4 of 1 s and 0.5 s.
    first = measured("0-fact", [(1.0, 50.0)], [(1.0, 0.5)])
    second = measured("1-update", [(2.0, 50.0)], [(2.0, 0.0)])
    result = relay_overhead.view([first, second], {})
    assert result.column("request s") == [4.0, 4.5, 8.0, 8.0]
    assert result.column("overhead %") == [None, 12.5, None, 0.0]
    assert result.column("question") == ["0-fact", "0-fact", "1-update", "1-update"]
    by_clock = f"{100 * (1.125**0.5 - 1):+.2f} % (questions from +0.00 % to +12.50 %) by the clock, "
    assert by_clock in result.notes[0]
    assert "+0.00 % (questions from +0.00 % to +0.00 %) of processor time" in result.notes[0]
    # The median of 0.5 s and 0 s, over the median of 4 s and 8 s.
    assert "median 250.0 ms, 4.17 % of the median request of original" in result.notes[1]


def test_processor_time_is_that_of_the_stages_that_count(reader, monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.0, process_time=lambda: float(next(ticks)))
    monkeypatch.setattr(relay_overhead, "time", clock)
    record = build_record(encode, TEXTS, 0, limit=LIMIT)
    for plan, stages in (("original", 4), ("relay", 5)):
        spent, _ = relay_overhead.request(
            reader, record, record.questions[0], plan, selector="bm25", kept=200, generate=1
        )
        assert spent["processor"] == stages, f"{plan} has {stages} stages of one second of processor time"


def test_records_are_asked_their_questions_in_turn_and_a_system_without_load_average_has_none(reader, monkeypatch):
    asked = []

    def request(reader, record, question, plan, **settings):
        asked.append((question.name, plan))
        return dict.fromkeys([*STAGES, "processor"], 1.0), {"logical": 1, "physical": 1}

    monkeypatch.setattr(relay_overhead, "request", request)
    monkeypatch.delattr(os, "getloadavg", raising=False)
    found = relay_overhead.run(reader, [0, 1, 6, 7], tokens=LIMIT, kept=100, repetitions=1)
    names = ["0-fact", "1-update", "6-temporal", "7-cross"]
    assert [one["name"] for one in found] == names
    assert asked == [("0-fact", "relay"), *((name, plan) for name in names for plan in ("original", "relay"))]
    assert [one["load_average"] for one in found] == [None] * 4
