"""The length of "The engine in 15 minutes" in docs/architecture.md."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools import reading_path
from tools.reading_path import PAGE, ReadingPathError, count_lines, written_count

MOST_LINES = 1000

Count = Callable[[str], int]
"""The lines that a step with these names counts."""

MODULE = '''"""A module.

In two lines.
"""

from speculative.other import _imported


@decorated
class Thing:
    """A thing."""

    size: int

    def __init__(self) -> None:
        self.size = _start()

    def go(self) -> int:
        return self._step() + _imported()

    def unread(self) -> int:
        return 0

    def _step(self) -> int:

        return _again(self.size)


def _start() -> int:
    return 1


def _again(size: int) -> int:
    return _again(size - 1)
'''
OTHER = '''"""Not counted: a helper's file is not named."""


def _imported() -> int:
    return 3
'''
SECTION = """\
## The engine in 15 minutes

On the way, with what they call, 1 lines

1. **{}** It is **q**.

Then.

## Next
"""


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Count:
    (tmp_path / "speculative").mkdir()
    (tmp_path / "speculative" / "one.py").write_text(MODULE)
    (tmp_path / "speculative" / "other.py").write_text(OTHER)
    monkeypatch.setattr(reading_path, "ROOT", tmp_path)
    return lambda names: count_lines(SECTION.format(names))


def test_the_page_gives_the_length_of_the_path() -> None:
    page = PAGE.read_text(encoding="utf-8")
    counted = count_lines(page)
    assert written_count(page) == counted, "run python -m tools.reading_path"
    assert counted <= MOST_LINES


def test_a_class_counts_without_its_methods_and_a_method_with_its_private_helpers(count: Count) -> None:
    docstring, thing, start = 2, 6, 2
    assert count("`speculative/one.py`: `Thing`.") == docstring + thing + start
    go, step, again, imported = 2, 2, 2, 2
    assert count("`speculative/one.py`: `go`.") == docstring + go + step + again + imported
    both = count("`speculative/one.py`: `Thing`, `Thing.go`, `go`.")
    assert both == docstring + thing + start + go + step + again + imported


@pytest.mark.parametrize(
    "names", ["`speculative/no.py`: `Thing`.", "`speculative/one.py`: `Nothing`.", "`speculative/one.py`.", "`go`."]
)
def test_a_name_that_leads_nowhere_is_refused(names: str, count: Count) -> None:
    with pytest.raises(ReadingPathError):
        count(names)
