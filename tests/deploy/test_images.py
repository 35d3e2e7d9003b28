"""What container images leave out, and the `truespec` command without it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.project_files import ROOT, project_files
from tests.test_architecture import PACKAGES, WORKSHOP

_RUN = """
import json, sys
sys.meta_path = [one for one in sys.meta_path if "__editable__" not in str(one)]  # which finds the checkout's packages
from click.testing import CliRunner
from deploy.cli.main import main
print("\\n" + json.dumps([(done.exit_code, done.output) for done in (CliRunner().invoke(main, words) for words in %r)]))
"""
WORK = [
    ["--help"],
    ["serve", "--help"],
    ["config", "check", "--file-only", "demo"],
    ["watch", "--help"],
    ["verify", "--help"],
    ["audit", "server", "--help"],
    ["batch", "--help"],
    ["bench", "--help"],
]
_NOWHERE = ["--json", "/nowhere/figures.json"]  # so that none would run for long
NEED = {
    "bench": [["bench", "--engines", "none"], ["bench-handoff", *_NOWHERE], ["bench-proxy", *_NOWHERE]],
    "chaos": [["chaos", *_NOWHERE], ["load", *_NOWHERE]],
    "faults": [["audit", "faults", "--only", "none"], ["audit", "clean", "1"]],
}


def left_out() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{PACKAGES[-1]}/")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, as an image has them."""
    folder = tmp_path_factory.mktemp("image")
    for name in project_files(*PACKAGES):
        if not name.startswith(tuple(f"{path}/" for path in left_out())):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(installed: Path, commands: list[list[str]]) -> list[Any]:
    """What each command gives: its exit code and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN % (commands,)],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_images_leave_the_workshop_out_and_nothing_else() -> None:
    assert {path.replace("/", ".") for path in left_out()} == WORKSHOP
    assert all((ROOT / path).is_dir() for path in left_out())


def test_commands_for_those_who_serve_work_without_it(installed: Path) -> None:
    assert [(words, code) for words, (code, _) in zip(WORK, run(installed, WORK), strict=True) if code] == []


def test_a_command_of_the_workshop_says_where_it_runs(installed: Path) -> None:
    commands = [words for room in NEED.values() for words in room]
    said = iter(run(installed, commands))
    for room, own in NEED.items():
        for words in own:
            code, output = next(said)
            assert code == 1, words
            assert output.startswith(f"Error: deploy.{room} is not part of this installation;"), words
            assert len(output.splitlines()) == 1
