"""What commands print: whole lines in a log, lines of the terminal's width on a terminal."""

import io
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from deploy.cli.console import CONFIGS, console
from deploy.cli.main import main

pytestmark = pytest.mark.slow

_LONG = "a step of a long job, with figures " * 8


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    out = console(stream)
    out.print(_LONG)
    table = Table("what", "how much")
    table.add_row(_LONG, "1")
    out.print(table)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


def test_lines_of_a_log_are_whole_and_those_on_a_terminal_have_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rows = printed(io.StringIO(), monkeypatch)
    assert first.rstrip() == _LONG.rstrip()
    assert any(_LONG.rstrip() in row for row in rows)
    assert max(map(len, rows)) < 2 * len(_LONG), "a table is as wide as what is in it"
    lines = printed(Terminal(), monkeypatch)
    assert len(lines) > 10 and max(map(len, lines)) <= 40


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_configuration_that_comes_with_truespec_goes_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["config", "check", "--file-only", name])
    assert said.exit_code == 0 and said.output == f"{CONFIGS / name}.yaml: fine\n"
    assert name in CliRunner().invoke(main, ["serve", "--help"]).output
    (tmp_path / name).mkdir()  # a checkout of vllm, say
    assert CliRunner().invoke(main, ["config", "check", "--file-only", name]).output == said.output
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("applications: 1\n")
    mine = CliRunner().invoke(main, ["config", "check", "--file-only", name])
    assert mine.exit_code == 1 and f"Error: {name}: applications" in mine.output, "a file here is meant first"
    neither = CliRunner().invoke(main, ["serve", f"./nowhere/{name}"])
    assert neither.exit_code == 1 and f"There is no file or folder ./nowhere/{name} here" in neither.output
