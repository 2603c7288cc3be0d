"""`kvverify init`: a file to start from that passes as it is, and fails once a kernel in it is wrong."""

import pytest

from kvverify.operator import POLICIES, registry
from kvverify.scaffold import init, starting_file
from kvverify.target import UsageError


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operator_of_a_policy_is_bound_once(policy):
    content = starting_file(policy, "test_mine.py")
    for name in registry():
        assert content.count(f'@implements("{name}")') == (name.split(".")[0] == policy), name
    compile(content, "test_mine.py", "exec")
    assert max(map(len, content.splitlines())) <= 100


def test_the_file_passes_as_written_and_fails_with_a_wrong_kernel(pytester):
    content = starting_file("attention", "test_mine.py")
    right = 'return reference.operators["attention.merge"](out, lse)'
    assert right in content
    pytester.makepyfile(test_mine=content)
    only = ("-p", "no:cacheprovider", "-k", "merge")
    pytester.runpytest_subprocess(*only).assert_outcomes(passed=5, deselected=8)
    pytester.makepyfile(test_mine=content.replace(right, "return out[0], lse[0]"))
    assert pytester.runpytest_subprocess(*only).parseoutcomes()["failed"] >= 1


def test_a_file_is_never_overwritten_and_an_unknown_policy_is_named(tmp_path):
    file = tmp_path / "test_mine.py"
    init("relay", file)
    assert file.read_text(encoding="utf-8") == starting_file("relay", "test_mine.py")
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"test_mine\.py exists, expected a new file"):
        init("relay", file)
    assert file.read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    with pytest.raises(UsageError, match=r"nowhere/x\.py is in no folder that exists"):
        init("relay", tmp_path / "nowhere" / "x.py")
    with pytest.raises(UsageError, match=r"mine\.txt is no Python file"):
        init("relay", tmp_path / "mine.txt")
    with pytest.raises(UsageError, match="policy 'mine' is unknown: expected one of"):
        init("mine", None)
