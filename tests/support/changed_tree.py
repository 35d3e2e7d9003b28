"""A copy of the product in which somebody from outside has added or changed files, and programs that run in it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.project_files import ROOT

_FOLDERS = ("speculative", "serve_app", "dashboards", "deploy", "helm", "tools", "tests/support")


def changed_tree(folder: Path, files: Mapping[str, str]) -> Path:
    """Link the product into a new folder, with these files, by name, in the place of its own or beside."""
    for part in _FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__", "dashboards" if part == "helm" else "")
        shutil.copytree(ROOT / part, folder / part, copy_function=os.symlink, ignore=skipped)
    for name, text in files.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def with_added(changes: Mapping[str, Iterable[tuple[str, str]]]) -> dict[str, str]:
    """Files with what somebody adds to them: behind a text that each has once, another."""
    files = {}
    for name, additions in changes.items():
        files[name] = (ROOT / name).read_text(encoding="utf-8")
        for place, added in additions:
            assert files[name].count(place) == 1, f"{name}: {place}"
            files[name] = files[name].replace(place, place + added)
    return files


def run_in(tree: Path, program: str) -> str:
    """Run a program that imports the product from there; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
