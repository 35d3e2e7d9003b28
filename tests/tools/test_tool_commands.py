"""What a maintainers' command is given is checked before it begins."""

from pathlib import Path
from typing import Never

import click
import pytest
from click.testing import CliRunner

from tools.bench import __main__ as bench
from tools.chaos import __main__ as chaos
from tools.faults import __main__ as faults

BENCH, CHAOS, FAULTS = bench.main, chaos.main, faults.main


def started(*_: object, **__: object) -> Never:
    raise AssertionError("the work began")


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((chaos, "served"), (faults, "audit_mutants")):
        monkeypatch.setattr(module, name, started)


@pytest.mark.parametrize("option", ["--kill-every", "--minutes"])
def test_a_number_beyond_use_is_refused(option: str) -> None:
    reported = CliRunner().invoke(CHAOS, [option, "nan"])
    assert reported.exit_code == 2 and f"Invalid value for '{option}'" in reported.output, reported.output


@pytest.mark.parametrize(
    ("command", "arguments", "option"),
    [
        (CHAOS, [], "--json"),
        (BENCH, ["--model", "/none"], "--markdown"),
        (FAULTS, ["find"], "--page"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    command: click.Command, arguments: list[str], option: str, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    path = in_the_way / "out"
    reported = CliRunner().invoke(command, [*arguments, option, str(path)])
    assert reported.exit_code == 1, reported.output
    assert f"{option} {path}" in reported.output and "cannot be written: " in reported.output
