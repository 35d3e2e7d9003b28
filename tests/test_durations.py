"""What the record of durations does: a new test that takes long fails, one that is listed or slow does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.durations import RECORD

ROOT = Path(__file__).parents[1]
SUITE = """
import time

import pytest

def spend():
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass

def test_listed(): spend()
def test_new(): spend()
@pytest.mark.slow
def test_slow(): spend()
def test_waits(): time.sleep(0.3)
"""
CONFTEST = """
from pathlib import Path

from tests.support import durations

durations.LIMIT_S, durations._NARROW, durations._SHARED, durations._NOTED_S = 0.2, 1.0, 1.0, 0.1

def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: slow")
    writes = config.getoption("--write-durations")
    config.made = durations.Durations(writes=writes, record=Path("durations.json"))
    config.pluginmanager.register(config.made)

def pytest_sessionfinish(session):
    if session.config.getoption("--write-durations"):
        session.config.made.write()
"""


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_suite.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_new_test_that_takes_long_fails_until_it_is_listed(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "durations.json").write_text(json.dumps({"files": {}, "tests": {"test_suite.py::test_listed": 0.3}}))
    printed = run(tmp_path)
    assert "1 failed, 3 passed" in printed, printed
    assert "test_suite.py::test_new took 0." in printed and "`make durations`" in printed
    assert "4 passed" in run(tmp_path, "--write-durations")
    found = json.loads((tmp_path / "durations.json").read_text())["tests"]
    assert found.keys() == {f"test_suite.py::test_{name}" for name in ("listed", "new", "slow")}
    assert "4 passed" in run(tmp_path)


def test_every_file_that_is_listed_exists() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    files = {name.partition("::")[0] for part in record.values() for name in part}
    gone = sorted(name for name in files if not (ROOT / name).exists())
    assert not gone, f"{', '.join(gone)}: gone; `make durations` replaces the record"
