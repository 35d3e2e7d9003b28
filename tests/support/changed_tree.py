"""A copy of the product in which somebody from outside has added or changed files, and programs that run in it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.support.project_files import ROOT

_IN_A_SERVICE = """
import json
from pathlib import Path

import httpx

from speculative.config import DrafterConfig, EngineConfig
from tools.faults.served import FaultyServer

drafter = DrafterConfig(kind="draft_model", model="model", num_draft_tokens=3)
config = EngineConfig(dtype="float32", device="cpu", kv_cache_tokens=512, drafter=drafter, **SETTINGS)
with FaultyServer(Path("model"), config=config).running() as url:
    choice = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]
print(json.dumps([choice["token_ids"], choice["logprobs"]["token_logprobs"]]))
"""
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


def files_to_add_to(addition: str) -> set[str]:
    """The modules that docs/architecture.md names for an addition: `addition` is how its paragraph begins."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return set(re.findall(r"`([A-Za-z_/]+\.py)`", page.partition(f"**{addition}")[2].partition("\n**")[0]))


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


def served_in(tree: Path, prompt: Sequence[int], count: int, **settings: object) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs of the tree's service of its folder `model`, in float32 on a CPU."""
    body = {"model": "audited", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 0}
    text = run_in(tree, _IN_A_SERVICE.replace("BODY", repr(body)).replace("SETTINGS", repr(settings)))
    tokens, logprobs = json.loads(text.splitlines()[-1])
    return tokens, logprobs
