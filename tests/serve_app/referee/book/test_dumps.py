"""Dumps are written whole, in bounds, and for nobody else to read."""

import json
import math
from pathlib import Path

import pytest

from serve_app.referee.book.dumps import DumpFolder


def test_a_dump_can_be_read_back(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path / "made" / "here", 10, 10_000)
    path = folder.write("distribution: support/../x", {"drift": math.inf, "rows": [(1, math.nan)], "name": "ü"})
    assert path is not None
    assert json.loads(path.read_text()) == {"drift": "inf", "rows": [[1, "nan"]], "name": "ü"}
    assert path.parent == tmp_path / "made" / "here", "a reason is no path"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path, 3, 10_000)
    (tmp_path / "not-ours.json").write_text("{}")
    for number in range(7):
        folder.write("drift", {"number": number})
    left = sorted(tmp_path.glob("truespec-*"))
    assert [json.loads(path.read_text())["number"] for path in left] == [4, 5, 6]
    assert (tmp_path / "not-ours.json").exists()


def test_all_of_them_are_bounded_in_bytes(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path, 100, 1000)
    for _ in range(10):
        folder.write("drift", {"fill": "x" * 300})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert folder.write("drift", {"fill": "x" * 2000}) is None
    assert len(list(tmp_path.iterdir())) == 3


def test_without_a_folder_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = DumpFolder(None, 10, 1000)
    assert not folder.enabled
    assert folder.write("drift", {}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert DumpFolder(tmp_path / "file" / "below", 10, 1000).write("drift", {}) is None
