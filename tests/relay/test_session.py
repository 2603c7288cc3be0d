"""A session's protocol, its numbers against complex arithmetic, and any sequence of events against Python lists."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import kvverify.relay.session
from kvverify.relay.plans import PLANS, Plan, Retained
from kvverify.relay.policy import RotaryTable, default_table
from kvverify.relay.session import TRANSITIONS, Event, State, begin, session

DIM, VALUE_DIM, PAIRS, LENGTH = 7, 3, 2, 40

# Writing a key: two products and a sum, 2u on each side, 2 sqrt(2) u as a vector. Relocating it: less than 10u more
# (tests/relay/test_policy.py derives it). All in float64.
ROUNDING = 13 * 2.0**-53

# Ragged heads, slots out of source order, empty slots between, one empty head. M = 4.
SOURCE = torch.tensor(
    [
        [[31, 2, -1, 9, 17], [-1, 8, -1, -1, 3]],
        [[-1, -1, -1, -1, -1], [39, 0, 1, -1, -1]],
    ]
)
HISTORY = [[[3, 0, -1, 1, 2], [-1, 3, -1, -1, 2]], [[-1] * 5, [3, 1, 2, -1, -1]]]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_tables(layout: str = "half") -> list[RotaryTable]:
    """Two layers with frequencies and amplitudes of their own."""
    return [
        default_table(64, PAIRS, theta=10_000.0, layout=layout),
        default_table(64, PAIRS, theta=100.0, amplitude=1.25, layout=layout),
    ]


def rotated(raw: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """Float64 rows turned by complex multiplication; rows at position -1 are zero."""
    pairs = table.cos.shape[1]
    if table.layout == "half":
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    else:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    factor = torch.complex(table.cos.double(), table.sin.double())[positions.clamp(min=0)]
    turned = torch.complex(raw[..., first], raw[..., second]) * factor
    out = raw.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out.masked_fill((positions < 0).unsqueeze(-1), 0)


def all_rotated(raw: Tensor, positions: Tensor, tables: list[RotaryTable]) -> Tensor:
    return torch.stack([rotated(*layer) for layer in zip(raw, positions, tables, strict=True)])


def assert_keys(keys: Tensor, truth: Tensor) -> None:
    """Within the rounding of one writing and one relocation; a row's norm bounds the norms of its pairs."""
    bound = ROUNDING * truth.norm(dim=-1, keepdim=True)
    assert bool(((keys - truth).abs() <= bound).all()), f"off by {float((keys - truth).abs().max())}"


class Inputs:
    """A history written at SOURCE, with NaN where slots are empty, and ten continuing tokens."""

    def __init__(self, layout: str = "half", source: Tensor = SOURCE) -> None:
        self.source, self.tables = source, layer_tables(layout)
        layers, heads, slots = source.shape
        self.raw = normal(layers, heads, slots, DIM, seed=1)
        empty = (source < 0).unsqueeze(-1)
        self.keys = all_rotated(self.raw, source, self.tables).masked_fill(empty, torch.nan)
        self.values = normal(layers, heads, slots, VALUE_DIM, seed=2).masked_fill(empty, torch.nan)
        self.fresh_keys = normal(layers, heads, 10, DIM, seed=3)
        self.fresh_values = normal(layers, heads, 10, VALUE_DIM, seed=4)
        self.kept_values = self.values.masked_fill(empty, 0)

    def arguments(self, steps: tuple[int, ...] = (4, 1, 1, 1, 3), **change: object) -> dict[str, object]:
        names = ("keys", "values", "source", "fresh_keys", "fresh_values")
        cos, sin = (torch.stack([getattr(table, name) for table in self.tables]) for name in ("cos", "sin"))
        tables = {"cos_written": cos, "sin_written": sin, "cos": cos, "sin": sin}
        options = {"length": LENGTH, "steps": steps, "layout": self.tables[0].layout, "rotary_dims": 2 * PAIRS}
        return {name: getattr(self, name) for name in names} | tables | options | change

    def begin(self, **options: object):
        return begin(self.keys, self.values, Retained(self.source, LENGTH), self.tables, **options)

    def forward(self, opened, start: int):
        """Append the tokens that a forward opened."""
        tokens = slice(start, start + opened.opened)
        return opened.append(self.fresh_keys[:, :, tokens], self.fresh_values[:, :, tokens])


# The protocol.


def test_the_table_in_the_documentation_is_the_protocol():
    documented = re.findall(r"^\| (\w+) +\| (\w+) +\| (\w+) +\|$", kvverify.relay.session.__doc__, re.MULTILINE)
    assert documented == [(state, event, after) for (state, event), after in TRANSITIONS.items()]


def test_every_state_can_be_reached_and_left():
    assert {state for state, _ in TRANSITIONS} == set(get_args(State))
    assert {"selected", *TRANSITIONS.values()} == set(get_args(State))
    assert {event for _, event in TRANSITIONS} == set(get_args(Event))


def in_every_state() -> tuple[Inputs, dict[str, object]]:
    inputs = Inputs()
    selected = inputs.begin()
    relocated = selected.relocate()
    asking = relocated.ask(2)
    answering = inputs.forward(asking, 0)
    states = (selected, relocated, asking, answering, answering.generate())
    return inputs, {current.state: current for current in states}


@pytest.mark.parametrize("event", get_args(Event))
@pytest.mark.parametrize("state", get_args(State))
def test_an_event_happens_exactly_where_the_table_allows_it(state, event):
    inputs, states = in_every_state()
    assert set(states) == set(get_args(State))
    current = states[state]
    happen = {
        "relocate": current.relocate,
        "ask": lambda: current.ask(3),
        "generate": current.generate,
        "append": lambda: inputs.forward(current, 2),
    }[event]
    if (state, event) in TRANSITIONS:
        assert happen().state == TRANSITIONS[state, event]
    else:
        with pytest.raises(ValueError, match=rf"^{event}: got it in state '{state}', expected ") as caught:
            happen()
        allowed = " or ".join(name for before, name in TRANSITIONS if before == state)
        assert str(caught.value).endswith(f"{allowed} (see TRANSITIONS)")


def test_the_question_starts_at_the_anchor_and_everything_after_continues_from_it():
    inputs = Inputs()
    current = inputs.begin()
    assert current.next_position == LENGTH
    current = current.relocate()
    assert (current.rows, current.next_position) == (5, 4)
    seen, start = [], 0
    for count in (4, 1, 1, 3):
        current = current.generate() if count == 1 else current.ask(count)
        seen.append(list(current.pending))
        current = inputs.forward(current, start)
        start += count
        assert list(current.pending) == []
    assert seen == [[4, 5, 6, 7], [8], [9], [10, 11, 12]]
    assert (current.rows, current.next_position) == (14, 13)
    assert current.positions[..., :5].tolist() == HISTORY
    assert current.positions[..., 5:].tolist() == [[list(range(4, 13))] * 2] * 2


def test_sources_stay_on_record_and_new_tokens_continue_the_text():
    inputs = Inputs()
    current = inputs.forward(inputs.forward(inputs.begin().relocate().ask(2), 0).generate(), 2)
    assert torch.equal(current.source[..., :5], SOURCE)
    assert current.source[..., 5:].tolist() == [[[40, 41, 42]] * 2] * 2


def test_an_event_leaves_the_session_before_it_as_it_was():
    inputs = Inputs()
    selected = inputs.begin()
    keys = selected.keys.clone()
    first, second = selected.relocate(), selected.relocate()
    assert torch.equal(first.keys, second.keys)
    inputs.forward(first.ask(2), 0)
    assert torch.equal(selected.keys, keys)
    assert (first.rows, first.state, selected.state) == (5, "relocated", "selected")


# The functional form.


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_every_key_stands_at_its_position_and_every_value_is_untouched(layout):
    inputs = Inputs(layout)
    keys, values, positions = session(**inputs.arguments())
    expected = [[head + list(range(4, 14)) for head in layer] for layer in HISTORY]
    assert positions.tolist() == expected
    assert positions.dtype == torch.int64
    raw = torch.cat([inputs.raw, inputs.fresh_keys], dim=2)
    assert_keys(keys, all_rotated(raw, positions, inputs.tables))
    assert torch.equal(values, torch.cat([inputs.kept_values, inputs.fresh_values], dim=2))
    assert torch.equal(keys[..., 2 * PAIRS :], raw.masked_fill((positions < 0).unsqueeze(-1), 0)[..., 2 * PAIRS :])


def test_how_forwards_divide_the_tokens_changes_no_bit():
    inputs = Inputs()
    once = session(**inputs.arguments((10,)))
    for steps in ((4, 1, 1, 1, 3), (1,) * 10, (1, 9), (5, 5)):
        for found, wanted in zip(session(**inputs.arguments(steps)), once, strict=True):
            assert torch.equal(found, wanted)


def test_empty_slots_are_never_read_and_come_back_as_zero():
    inputs = Inputs()
    results = session(**inputs.arguments())
    inputs.keys.nan_to_num_(nan=1e30)
    inputs.values.nan_to_num_(nan=-torch.inf)
    for found, wanted in zip(session(**inputs.arguments()), results, strict=True):
        assert torch.equal(found, wanted)
    keys, values, positions = results
    assert int((positions == -1).sum()) == 11
    for tensor in (keys, values):
        assert bool((tensor[positions == -1] == 0).all())
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_storage_dtypes_are_kept_and_keys_rounded_once(dtype):
    inputs = Inputs()
    arguments = inputs.arguments()
    stored = {name: arguments[name].to(dtype) for name in ("keys", "values", "fresh_keys", "fresh_values")}
    keys, values, positions = session(**(arguments | stored))
    exact = session(**(arguments | {name: tensor.double() for name, tensor in stored.items()}))
    assert (keys.dtype, values.dtype) == (dtype, dtype)
    assert torch.equal(positions, exact[2])
    assert torch.equal(values.double(), exact[1])
    # fp32 inside: less than 10 roundings of 2^-24; then one to storage.
    roundoff = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    bound = (10 * 2.0**-24 + roundoff) * exact[0].norm(dim=-1, keepdim=True)
    assert bool(((keys.double() - exact[0]).abs() <= bound).all())


def test_a_session_of_no_new_tokens_is_the_relocation_alone():
    inputs = Inputs()
    none = {"fresh_keys": inputs.fresh_keys[:, :, :0], "fresh_values": inputs.fresh_values[:, :, :0]}
    keys, values, positions = session(**inputs.arguments((), **none))
    assert positions.tolist() == HISTORY
    assert torch.equal(keys, inputs.begin().relocate().keys)
    assert torch.equal(values, inputs.kept_values)


def test_a_history_without_states_asks_at_zero():
    inputs = Inputs(source=torch.full((2, 2, 3), -1))
    _, _, positions = session(**inputs.arguments())
    assert positions.tolist() == [[[-1] * 3 + list(range(10))] * 2] * 2


def test_arguments_are_left_alone():
    inputs = Inputs()
    arguments = inputs.arguments()
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    session(**arguments)
    for name, tensor in before.items():
        assert torch.equal(arguments[name].nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0)), name


# One cache under other plans and tables.


@pytest.mark.parametrize("name", PLANS)
def test_a_session_runs_under_every_plan(name):
    inputs = Inputs()
    inputs.tables = [default_table(2200, PAIRS), default_table(2200, PAIRS, theta=100.0, amplitude=1.25)]
    inputs.keys = all_rotated(inputs.raw, SOURCE, inputs.tables)
    retained = Retained(SOURCE, LENGTH, scores=normal(*SOURCE.shape, seed=5))
    plan = PLANS[name](retained)
    current = begin(inputs.keys, inputs.values, retained, inputs.tables).relocate(plan)
    current = inputs.forward(inputs.forward(current.ask(3), 0).generate(), 3)
    asked = list(range(plan.question, plan.question + 4))
    assert torch.equal(current.positions[..., :5], plan.positions)
    assert current.positions[..., 5:].tolist() == [[asked] * 2] * 2
    raw = torch.cat([inputs.raw, inputs.fresh_keys[:, :, :4]], dim=2)
    assert_keys(current.keys, all_rotated(raw, current.positions, inputs.tables))


def test_relay_equals_original_bit_for_bit_when_nothing_was_evicted():
    whole = Inputs(source=torch.arange(LENGTH).expand(2, 2, LENGTH))
    selected = whole.begin()
    runs = [selected.relocate(PLANS[name](selected.retained)) for name in ("relay", "original")]
    for ours, original in zip(*([run, whole.forward(run.ask(3), 0)] for run in runs), strict=True):
        assert torch.equal(ours.keys, original.keys)
        assert torch.equal(ours.positions, original.positions)
        assert ours.next_position == original.next_position
    assert torch.equal(runs[0].keys, whole.keys)


def test_a_table_that_changed_since_the_cache_was_written_is_refused_or_inverted():
    inputs = Inputs()
    written_with = inputs.tables
    records = [table.fingerprint for table in written_with]
    assert torch.equal(inputs.begin(written_with=records).relocate().keys, inputs.begin().relocate().keys)
    inputs.tables = [written_with[0], default_table(64, PAIRS, theta=777.0)]
    with pytest.raises(ValueError, match=r"^written_with: got fingerprint \w+, expected \w+: the table changed"):
        inputs.begin(written_with=records).relocate()
    current = inputs.begin(written_with=written_with).relocate()
    assert_keys(current.keys, all_rotated(inputs.raw, current.positions, inputs.tables))


def test_a_layer_without_rotary_embedding_passes_keys_through():
    inputs = Inputs()
    inputs.tables = [inputs.tables[0], default_table(64, 0)]
    current = inputs.forward(inputs.begin().relocate().ask(3), 0)
    held = SOURCE[1] >= 0
    assert torch.equal(current.keys[1, :, :5][held], inputs.keys[1][held])
    assert torch.equal(current.keys[1, :, 5:], inputs.fresh_keys[1, :, :3])


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": (4, 5)}, ValueError, "fresh_keys: got shape (2, 2, 10, 7), expected (2, 2, 9, 7)"),
        ({"steps": (10, 0)}, ValueError, "steps: got 0, expected at least 1"),
        ({"steps": (5.0, 5)}, TypeError, "steps: got 5.0, expected an int"),
        (
            {"fresh_keys": torch.zeros(2, 2, 10, 8).double()},
            ValueError,
            "fresh_keys: got shape (2, 2, 10, 8), expected (2, 2, 10, 7)",
        ),
        ({"fresh_keys": torch.zeros(2, 2, 10, 7)}, TypeError, "fresh_keys: got torch.float32, expected float64"),
        (
            {"fresh_values": torch.zeros(2, 2, 9, 3).double()},
            ValueError,
            "fresh_values: got shape (2, 2, 9, 3), expected (2, 2, 10, 3)",
        ),
        ({"keys": torch.zeros(2, 5, 7)}, ValueError, "keys: got shape (2, 5, 7), expected [layers, heads, slots, dim]"),
        (
            {"keys": torch.zeros(2, 2, 4, 7)},
            ValueError,
            "keys: got shape (2, 2, 4, 7), expected (2, 2, 5) first, as source",
        ),
        (
            {"values": torch.zeros(2, 1, 5, 3)},
            ValueError,
            "values: got shape (2, 1, 5, 3), expected (2, 2, 5) first, as source",
        ),
        ({"cos": torch.ones(1, 64, 2)}, ValueError, "cos: got 1 layers, expected 2, the layers of source"),
        ({"sin": torch.ones(2, 64, 2).half()}, TypeError, "sin: got torch.float16, expected float32 or float64"),
        ({"rotary_dims": 7}, ValueError, "rotary_dims: got 7, expected 2 * pairs = 4"),
        ({"layout": "split"}, ValueError, "layout: got 'split', expected 'half' or 'interleaved'"),
        ({"length": 39}, ValueError, "source: got position 39, expected less than length = 39"),
        ({"source": SOURCE.half()}, TypeError, "source: got torch.float16, expected int32 or int64"),
    ],
)
def test_session_names_what_it_refuses(change, error, message):
    with pytest.raises(error) as caught:
        session(**Inputs().arguments(**({"steps": (5, 5)} | change)))
    assert str(caught.value) == message


def test_a_table_too_short_for_the_history_or_for_what_follows_is_refused():
    inputs = Inputs()
    inputs.tables = [default_table(40, PAIRS), default_table(6, PAIRS)]
    with pytest.raises(ValueError, match=r"^source: got position 39, expected 0 to 5, the positions of the table$"):
        inputs.begin().relocate()
    inputs.tables = [default_table(40, PAIRS)] * 2
    current = inputs.begin().relocate().ask(37)
    tokens = torch.zeros(2, 2, 37, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^tables: got 40 positions, expected one for the token at 40$"):
        current.append(tokens, tokens[..., :VALUE_DIM])
    assert inputs.begin().relocate().ask(36).append(tokens[:, :, 1:], tokens[:, :, 1:, :VALUE_DIM]).next_position == 40


def test_begin_and_the_events_name_what_they_refuse():
    inputs = Inputs()
    with pytest.raises(ValueError, match=r"^tables: got 1 of them, expected 2, one for each layer$"):
        begin(inputs.keys, inputs.values, Retained(SOURCE, LENGTH), inputs.tables[:1])
    with pytest.raises(ValueError, match=r"^written_with: got 1 of them, expected 2, one for each layer$"):
        inputs.begin(written_with=["a record"])
    with pytest.raises(ValueError, match=r"^keys: got no layers, expected at least 1$"):
        begin(inputs.keys[:0], inputs.values[:0], Retained(SOURCE[:0], LENGTH), [])
    other = Plan(torch.arange(5).expand(2, 2, 5), 5, "mine")
    with pytest.raises(ValueError, match=r"^plan: got other slots than source has, expected a position"):
        inputs.begin().relocate(other)
    relocated = inputs.begin().relocate()
    with pytest.raises(ValueError, match=r"^count: got 0, expected at least 1$"):
        relocated.ask(0)
    with pytest.raises(ValueError, match=r"^keys: got shape \(2, 2, 10, 7\), expected \(2, 2, 2, 7\)$"):
        relocated.ask(2).append(inputs.fresh_keys, inputs.fresh_values)


# Any legal and illegal sequence of events, against lists.


class SessionAgainstLists(RuleBasedStateMachine):
    """For each head a list of [source, position, key before rotation, value], or None for an empty slot."""

    @initialize(
        sources=st.lists(st.lists(st.integers(0, 19), unique=True, max_size=4), min_size=2, max_size=2),
        seed=st.integers(0, 9),
        layout=st.sampled_from(["half", "interleaved"]),
    )
    def select(self, sources, seed, layout):
        self.table = default_table(400, PAIRS, amplitude=1.25, layout=layout)
        self.drawn = seed
        padded = [(head + [-1] * 4)[:4] for head in sources]
        source = torch.tensor([padded])
        raw, values = self.fresh(4)
        keys = all_rotated(raw, source, [self.table])
        self.model = [
            [None if p < 0 else [p, p, raw[0, h, i], values[0, h, i]] for i, p in enumerate(head)]
            for h, head in enumerate(padded)
        ]
        self.state, self.next, self.open, self.tokens = "selected", 20, 0, 0
        self.session = begin(keys, values, Retained(source, 20), [self.table])

    def fresh(self, count):
        self.drawn += 100
        return normal(1, 2, count, DIM, seed=self.drawn), normal(1, 2, count, VALUE_DIM, seed=self.drawn + 1)

    @precondition(lambda self: self.state == "selected")
    @rule()
    def relocate(self):
        self.session = self.session.relocate()
        held = [sorted(row[0] for row in head if row) for head in self.model]
        self.next = max(map(len, held))
        for head, kept in zip(self.model, held, strict=True):
            for row in filter(None, head):
                row[1] = self.next - len(kept) + kept.index(row[0])
        self.state = "relocated"

    @precondition(lambda self: self.state in ("relocated", "answering"))
    @rule(count=st.integers(1, 3))
    def ask(self, count):
        self.session, self.open, self.state = self.session.ask(count), count, "asking"

    @precondition(lambda self: self.state == "answering")
    @rule()
    def generate(self):
        self.session, self.open, self.state = self.session.generate(), 1, "generating"

    @precondition(lambda self: self.state in ("asking", "generating"))
    @rule()
    def append(self):
        raw, values = self.fresh(self.open)
        self.session = self.session.append(raw, values)
        for i in range(self.open):
            for h, head in enumerate(self.model):
                head.append([20 + self.tokens + i, self.next + i, raw[0, h, i], values[0, h, i]])
        self.next, self.tokens = self.next + self.open, self.tokens + self.open
        self.open, self.state = 0, "answering"

    @rule(event=st.sampled_from(get_args(Event)))
    def an_event_out_of_turn_is_refused(self, event):
        allowed = {"selected": ["relocate"], "relocated": ["ask"], "answering": ["ask", "generate"]}
        if event in allowed.get(self.state, ["append"]):
            return
        arguments = {"ask": (1,), "append": self.fresh(1)}.get(event, ())
        with pytest.raises(ValueError, match=f"^{event}: got it in state '{self.state}'"):
            getattr(self.session, event)(*arguments)

    @invariant()
    def the_session_is_what_the_lists_say(self):
        found = self.session
        zero = [-1, -1, torch.zeros(DIM).double(), torch.zeros(VALUE_DIM).double()]
        columns = list(zip(*((row or zero) for head in self.model for row in head), strict=True))
        rows = len(self.model[0])
        source, positions = (torch.tensor(column).view(1, 2, rows) for column in columns[:2])
        raw, values = (torch.stack(column).view(1, 2, rows, -1) for column in columns[2:])
        assert (found.state, found.next_position, found.rows) == (self.state, self.next, rows)
        assert list(found.pending) == list(range(self.next, self.next + self.open))
        assert torch.equal(found.source, source)
        assert torch.equal(found.positions, positions)
        assert torch.equal(found.values, values)
        assert_keys(found.keys, all_rotated(raw, positions, [self.table]))


TestSessionAgainstLists = SessionAgainstLists.TestCase
TestSessionAgainstLists.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, stateful_step_count=14
)
