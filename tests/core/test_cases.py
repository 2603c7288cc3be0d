"""A case is one line, and that line is the case."""

import pytest
import torch
from core_cases import ToyCase
from hypothesis import given, settings
from hypothesis import strategies as st

from kvverify.cases import Case, Inputs, cases, choices, generator, magnitudes, parse_case, restrict
from kvverify.harness import same_bits
from kvverify.operator import registry

CASE_TYPES = sorted(
    {type(case) for operator in registry().values() for case in (operator.case(), *operator.captured)},
    key=lambda case_type: case_type.__name__,
)


def test_a_case_shows_only_what_is_not_default():
    assert repr(ToyCase()) == "ToyCase()"
    assert repr(ToyCase(rows=8, dtype="bf16")) == "ToyCase(dtype='bf16', rows=8)"


@pytest.mark.parametrize("case_type", CASE_TYPES, ids=lambda case_type: case_type.__name__)
@given(data=st.data())
def test_every_drawn_case_is_read_back_from_its_line(case_type, data):
    case = data.draw(cases(case_type))
    assert parse_case(repr(case), {case_type}) == case


@pytest.mark.parametrize("name", registry())
@settings(max_examples=40)
@given(data=st.data())
def test_every_drawn_case_builds_the_same_bytes_twice_under_any_default_dtype(name, data):
    case = data.draw(cases(registry()[name].case))
    once = case.build()
    torch.set_default_dtype(torch.float64)
    try:
        twice = case.build()
    finally:
        torch.set_default_dtype(torch.float32)
    assert once.static.keys() == twice.static.keys()
    for argument, tensor in once.tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(tensor, twice.tensors[argument]), argument


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Other(seed=1)", "case type 'Other' is unknown here: expected one of ['ToyCase']"),
        ("ToyCase(row=1)", "has no field 'row'"),
        ("ToyCase(rows=1 + 1)", "is not a literal"),
        ("ToyCase(rows=__import__('os').getpid())", "is not a literal"),
        ("ToyCase(rows={[]: 1})", "is not a literal"),
        ("ToyCase(3)", "does not read as a case"),
        ("ToyCase(rows=1", "does not read as a case"),
        ("", "does not read as a case"),
        ("ToyCase(**{'rows': 1})", "has no field None"),
    ],
)
def test_what_is_not_a_case_is_refused_in_one_line(line, says):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 -- the whole message is compared below
        parse_case(line, {ToyCase})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_parsing_executes_nothing(tmp_path):
    trace = tmp_path / "trace"
    with pytest.raises(ValueError, match="is not a literal"):
        parse_case(f"ToyCase(rows=open({str(trace)!r}, 'w'))", {ToyCase})
    assert not trace.exists()


def test_supports_keeps_the_default_first_and_leaves_unmentioned_fields_alone():
    allowed = restrict(ToyCase, {"rows": {8, 1}})
    assert allowed["rows"] == (1, 8)
    assert {name: values for name, values in allowed.items() if name != "rows"} == {
        name: values for name, values in choices(ToyCase).items() if name != "rows"
    }


def test_supports_that_leaves_nothing_is_refused_with_field_value_and_choices():
    with pytest.raises(ValueError, match=r"supports\['rows'\] = \['5'\] leaves nothing of ToyCase.*\[3, 0, 1, 8\]"):
        restrict(ToyCase, {"rows": {5}})


@given(cases(ToyCase, {"rows": {0}, "dtype": ("fp16",)}))
def test_only_supported_values_are_drawn(case):
    assert (case.rows, case.dtype) == (0, "fp16")


def test_inputs_are_exchanged_by_name_and_unknown_names_are_refused():
    inputs = ToyCase().build()
    assert inputs.replace(level=3).level == 3
    assert inputs.level == 0
    with pytest.raises(ValueError, match="no argument"):
        inputs.replace(levl=3)
    with pytest.raises(AttributeError):
        _ = inputs.levl


def test_a_call_gives_tensors_by_position_and_the_rest_by_keyword():
    inputs = Inputs({"a": torch.ones(1), "b": torch.zeros(1)}, {"scale": 3})
    assert inputs.call(lambda one, two, *, scale: (float(one), float(two), scale)) == (1.0, 0.0, 3)


def test_streams_of_one_seed_differ_and_repeat():
    draws = [torch.randn(4, generator=generator(5, stream=stream)) for stream in (0, 1, 0)]
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_magnitudes_span_eight_decades_and_any_count():
    scales = magnitudes(65, 0)
    assert scales.shape == (65,)
    assert float(scales.max() / scales.min()) > 1e7
    assert magnitudes(0, 0).shape == (0,)


def test_a_case_without_build_says_so():
    with pytest.raises(TypeError, match="Case does not say how to build"):
        Case().build()
