"""A test of many things finds every fault and names it; nothing that it should check goes by."""

from pathlib import Path

import pytest

from tests.support.loops import for_each


@for_each([1, 2, 3])
def check(number: int, tmp_path: Path) -> None:
    (tmp_path / str(number)).touch()
    assert number < 2, "too large"
    assert not list(tmp_path.iterdir()), "beside others"


@for_each(["a", "b"], name=lambda text: f"the letter {text}")
def look_up(text: str) -> None:
    assert {"a": 1}[text] == 1


def test_all_faults_are_shown_with_names_lines_and_the_values_compared(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        check(tmp_path)
    first, *rest = str(failed.value).splitlines()
    assert first == "3 of 3 are wrong"
    assert [line for line in rest if "line" in line] == [
        "1: line 14: beside others",
        "2: line 13: too large",
        "3: line 13: too large",
    ]
    assert "assert 3 < 2" in rest
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3"}


def test_another_error_is_a_fault_too() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 are wrong\nthe letter b: line 19: KeyError: 'b'"):
        look_up()


def test_nothing_to_check_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="nothing to check"):
        for_each([])


@for_each(["fixtures", "are found by name"])
def test_as_pytest_sees_it(text: str, tmp_path: Path) -> None:
    assert text and tmp_path.is_dir()
