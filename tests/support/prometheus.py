"""Test helpers: Prometheus' own programs, and what they say."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tools.chaos import prometheus


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; {prometheus.INSTALL}")
    return found


def promtool(*args: str, text: str | None = None) -> str:
    """What promtool prints; fails the test when it is not content."""
    command = [program("promtool"), *args]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # in one, so that what failed follows its name
    done = subprocess.run(command, check=False, input=text, text=True, timeout=120, **output)
    assert done.returncode == 0, _without_successes(done.stdout)
    return done.stdout


def _without_successes(output: str) -> str:
    """What promtool prints without the files of unit tests that succeed."""
    parts = re.split(r"^(?=Unit Testing:)", output, flags=re.MULTILINE)
    return "".join(part for part in parts if part.split("\n", 1)[1:] != ["  SUCCESS\n\n"])


@dataclass(frozen=True)
class Suite:
    """Unit tests as promtool's files have them, and the groups of rules that they are of.

    promtool evaluates every rule each minute of every test, so `part_of` the groups is better than all of them.
    """

    groups: list[dict[str, Any]]
    tests: list[dict[str, Any]]


def run_suites(folder: Path, suites: dict[str, Suite]) -> None:
    """Run promtool once for all suites; fails with what is wrong in each, by name."""
    for name, suite in suites.items():
        rules = folder / f"{name}-rules.yaml"
        file = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": suite.tests}
        rules.write_text(yaml.safe_dump({"groups": suite.groups}, sort_keys=False), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    promtool("test", "rules", *(str(folder / f"{name}.yaml") for name in suites))


def part_of(groups: list[dict[str, Any]], alert: str) -> list[dict[str, Any]]:
    """The rules of an alert and the recordings that it reads; groups keep their names."""
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    needed: set[str] = set()
    waiting = [rule["expr"] for rule in rules if rule.get("alert") == alert]
    while waiting:
        new = set(re.findall(r"[a-zA-Z_:][\w:]*", waiting.pop())) & recorded.keys() - needed
        needed |= new
        waiting += [recorded[name] for name in new]
    kept = []
    for group in groups:
        own = [rule for rule in group["rules"] if rule.get("record") in needed or rule.get("alert") == alert]
        kept += [{**group, "rules": own}] if own else []
    return kept


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **params: str) -> Any:
        """The data of an answer of its API. Raises AssertionError: the answer is an error, in Prometheus' words."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=60).json()
        assert answer["status"] == "success", (params, answer.get("error"))
        assert not answer.get("warnings"), (params, answer["warnings"])
        return answer["data"]

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expr)["result"]]


@contextlib.contextmanager
def running_prometheus(folder: Path, scrape: list[dict[str, Any]], rules: list[Path]) -> Iterator[Prometheus]:
    """A real Prometheus that scrapes and evaluates every few seconds, with its data in `folder`."""
    program("prometheus")
    with prometheus.running_prometheus(folder, scrape, rules) as url:
        yield Prometheus(url)
