"""Each adversity of the harness rejects the cheat it was made for, and an honest kernel passes them all."""

import sys
from dataclasses import replace

import pytest
import torch
from core_cases import ToyCase, double, toy

from kvverify.harness import GUARD, Caller, Violation, placed, poisoned_allocations, same_bits

OPERATOR = toy()
MEMORIES = ("dense", "strided", "transposed")


def call(kernel, case=None, **how):
    case = case or ToyCase()
    return case.build().call(Caller(OPERATOR, kernel, case, **how))


def never_writes(x, *, level, flag):
    return torch.empty_like(x)


def writes_all_but_the_last_row(x, *, level, flag):
    out = torch.empty(x.shape, dtype=x.dtype)
    out[:-1] = 2 * x[:-1]
    return out


def remembering(key):
    known = {}

    def kernel(x, *, level, flag):
        return known.setdefault(key(x), 2 * x).clone()

    return kernel


def writes_into_its_input(x, *, level, flag):
    out = 2 * x
    x[0, 0] += 1
    return out


def writes_before_its_input(x, *, level, flag):
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(1.0)
    return 2 * x


def writes_behind_its_input(x, *, level, flag):
    last = x.storage_offset() + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    x.as_strided((1,), (1,), last + 1).fill_(1.0)
    return 2 * x


def returns_a_view(x, *, level, flag):
    return x.mul(1)[:] if level < 0 else x[:]


def differs_between_calls():
    calls = iter(range(1_000))
    return lambda x, **_: 2 * x + next(calls)


def raises(x, *, level, flag):
    raise RuntimeError("out of\nregisters \x1b[31m")


def exits(x, *, level, flag):
    sys.exit(0)


def skips(x, *, level, flag):
    pytest.skip("not on this machine")


CHEATS = [
    (writes_into_its_input, "input changed", "the contents of argument 0"),
    (writes_before_its_input, "input changed", "memory outside argument 0"),
    (writes_behind_its_input, "input changed", "memory outside argument 0"),
    (returns_a_view, "aliases input", "shares memory"),
    (lambda x, **_: None, "wrong result", "returned NoneType"),
    (lambda x, **_: (2 * x, x), "wrong result", "returned Tensor, Tensor"),
    (lambda x, **_: (2 * x).numpy(), "wrong result", "returned ndarray"),
    (lambda x, **_: (2 * x).to_sparse(), "wrong result", "expected y"),
    (lambda x, **_: (2 * x).to("meta"), "wrong result", "expected y"),
    (lambda x, **_: (2 * x)[:-1], "wrong shape", "[2, 4]: expected [3, 4]"),
    (lambda x, **_: (2 * x).flatten(), "wrong shape", "[12]: expected [3, 4]"),
    (lambda x, **_: (2 * x).long(), "wrong dtype", "torch.int64"),
    (lambda x, **_: (2 * x).half(), "wrong dtype", "torch.float16: expected storage or wider"),
    (differs_between_calls(), "nondeterministic", "y differs between two equal calls"),
    (raises, "raised", "toy.double raised RuntimeError: out of registers"),
    (exits, "raised", "raised SystemExit: 0"),
    (skips, "raised", "raised Skipped"),
]


@pytest.mark.parametrize(
    ("kernel", "kind", "says"), CHEATS, ids=[f"{i}-{kind}" for i, (_, kind, _) in enumerate(CHEATS)]
)
def test_a_kernel_that_breaks_the_rules_of_calling_is_rejected_for_it(kernel, kind, says):
    with pytest.raises(Violation) as found:
        call(kernel)
    assert found.value.kind == kind
    assert says in str(found.value)
    assert str(found.value).isprintable()


@pytest.mark.parametrize("memory", ["strided", "dense"])
def test_a_write_into_the_gap_between_rows_is_seen(memory):
    def writes_behind_each_row(x, *, level, flag):
        if x.stride(0) > x.shape[1]:
            x.as_strided((x.shape[0] - 1, 1), (x.stride(0), 1), x.storage_offset() + x.shape[1]).fill_(1.0)
        return 2 * x

    if memory == "dense":  # there is no gap, so the same kernel does no harm
        assert same_bits(call(writes_behind_each_row), double(ToyCase().build().x, level=0, flag=False))
        return
    with pytest.raises(Violation, match="memory outside argument 0"):
        call(writes_behind_each_row, ToyCase(memory=memory))


@pytest.mark.parametrize("kernel", [never_writes, writes_all_but_the_last_row])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_that_nobody_wrote_is_seen(kernel, dtype):
    with pytest.raises(Violation, match="y holds memory that the call allocated and never wrote"):
        call(kernel, ToyCase(dtype=dtype))


def test_unwritten_memory_that_reaches_a_result_is_seen():
    def averages_scratch(x, *, level, flag):
        scratch = torch.empty(4, dtype=x.dtype)
        scratch[:2] = 0.0
        return 2 * x + scratch.sum()

    with pytest.raises(Violation) as found:
        call(averages_scratch)
    assert found.value.kind == "unwritten memory"


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(2, 3),
        torch.empty_like,
        lambda x: torch.empty_strided((2, 3), (3, 1)),
        lambda x: torch.empty_permuted((2, 3), (1, 0)),
        lambda x: x.new_empty(2, 3),
        lambda x: x.new_empty_strided((2, 3), (3, 1)),
        lambda x: torch.Tensor(2, 3),
    ],
)
def test_every_way_to_allocate_is_born_poisoned(allocate):
    with poisoned_allocations():
        assert allocate(torch.ones(2, 3)).isnan().all()
        assert torch.zeros(2).eq(0).all()


def test_integers_and_masks_are_born_with_values_no_id_can_have():
    with poisoned_allocations():
        assert (torch.empty(3, dtype=torch.int64) < -(2**60)).all()
        assert torch.empty(3, dtype=torch.bool).all()
        assert torch.empty(3, dtype=torch.uint8).eq(0xA5).all()


@pytest.mark.parametrize("key", [lambda x: x.data_ptr(), lambda x: tuple(x.shape), lambda x: 0])
def test_a_result_remembered_by_address_or_shape_is_stale(key):
    case = ToyCase()
    stale = call(remembering(key))
    assert not torch.equal(stale, 2 * case.build().x)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_an_honest_kernel_passes_in_every_memory_and_sees_the_inputs_unchanged(memory, dtype, rows):
    case = ToyCase(rows=rows, dtype=dtype, memory=memory)
    assert same_bits(call(double, case), 2 * case.build().x)


@pytest.mark.parametrize("memory", MEMORIES)
def test_inputs_lie_as_the_case_says_between_poisoned_guards(memory):
    tensor = torch.arange(12.0).reshape(3, 4)
    view, storage = placed(tensor, memory, "cpu")
    assert torch.equal(view, tensor)
    assert view.storage_offset() == GUARD
    assert storage.isnan().sum() == len(storage) - 12
    assert storage[:GUARD].isnan().all()
    assert storage[-GUARD:].isnan().all()
    assert view.is_contiguous() == (memory == "dense")
    assert view.t().is_contiguous() == (memory == "transposed")


def test_guards_of_integers_are_zero_and_of_masks_true():
    _, ids = placed(torch.full((3,), 7), "strided", "cpu")
    _, mask = placed(torch.zeros(3, dtype=torch.bool), "dense", "cpu")
    assert ids.sum() == 21
    assert mask.sum() == len(mask) - 3


@pytest.mark.parametrize("returns", [True, False])
def test_an_in_place_kernel_is_judged_on_a_clone(returns):
    def doubles_in_place(x, *, level, flag):
        x.mul_(2)
        return x if returns else None

    case = ToyCase()
    inputs = case.build()
    result = inputs.call(Caller(OPERATOR, doubles_in_place, case, in_place=True))
    assert torch.equal(result, 2 * case.build().x)
    assert torch.equal(inputs.x, case.build().x)
    with pytest.raises(Violation, match="the contents of argument 0"):
        call(doubles_in_place if returns else lambda x, **_: x.mul_(2).clone())


def test_an_in_place_kernel_may_still_not_leave_its_argument():
    def spills(x, *, level, flag):
        x.mul_(2)
        return writes_before_its_input(x, level=level, flag=flag)

    with pytest.raises(Violation, match="memory outside argument 0"):
        call(spills, in_place=True)


def test_a_warm_up_that_raises_does_not_count():
    calls = []

    def refuses_the_first_call(x, *, level, flag):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("cold")
        return 2 * x

    assert torch.equal(call(refuses_the_first_call), 2 * ToyCase().build().x)
    assert len(calls) == 4  # with other contents twice, judged, repeated


def test_a_compiled_kernel_is_judged_as_compiled():
    """A backend that miscompiles shows what runs: under a dispatch mode torch.compile falls back to the function."""

    def miscompiles(graph, _examples):
        return lambda *args: tuple(out + 1 for out in graph(*args))

    compiled = torch.compile(lambda x, *, level, flag: x * 2, backend=miscompiles)
    assert torch.equal(call(compiled), 2 * ToyCase().build().x + 1)


def test_a_keyboard_interrupt_is_not_a_verdict():
    def interrupted(x, *, level, flag):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


def test_wider_results_are_accepted():
    case = ToyCase(dtype="bf16")
    assert call(lambda x, **_: 2 * x.float(), case).dtype == torch.float32
    assert call(lambda x, **_: 2 * x.float(), replace(case, rows=0)).shape == (0, 4)
