"""What a run of the tests says at its end, and how CI runs them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SUITE = """
import pytest

@pytest.mark.parametrize("number", range(30))
def test_skipped(number):
    pytest.skip("no such library")

@pytest.mark.skipif(True, reason="no such device")
def test_marked():
    pass

def test_passes():
    pass
"""


def test_skipped_tests_are_one_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_suite.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # conftest.py takes a module from the project's tests
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "no such" in line)
    assert line == "Skipped: 31 tests (30: no such library; 1: no such device)."


def test_nothing_is_run_again_until_it_passes() -> None:
    assert "rerun" not in (ROOT / ".ci" / "run").read_text()
