"""Test helpers: Prometheus' own programs, and what they say."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.ports import free_ports

INSTALL = "apt-get install --no-install-recommends prometheus"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; {INSTALL}")
    return found


def promtool(*args: str, text: str | None = None) -> str:
    """What promtool prints; fails the test when it is not content."""
    command = [program("promtool"), *args]
    done = subprocess.run(command, check=False, input=text, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **params: str) -> Any:
        """The data of an answer of its API.

        Raises:
            AssertionError: the answer is an error, in Prometheus' words.
        """
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=60).json()
        assert answer["status"] == "success", (params, answer.get("error"))
        assert not answer.get("warnings"), (params, answer["warnings"])
        return answer["data"]

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expr)["result"]]

    def value(self, expr: str) -> float:
        """The one value of an expression now."""
        ((_, value),) = self.values(expr)
        return value


@contextlib.contextmanager
def running_prometheus(folder: Path, scrape: list[dict[str, Any]], rules: list[Path]) -> Iterator[Prometheus]:
    """A real Prometheus that scrapes and evaluates every few seconds, with its data in `folder`."""
    executable = program("prometheus")
    (port,) = free_ports(1)
    files = []
    for path in rules:
        file = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in file["groups"]:
            group["interval"] = "2s"
        files.append(str(folder / path.name))
        Path(files[-1]).write_text(yaml.safe_dump(file), encoding="utf-8")
    timing = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
    config = {"global": timing, "scrape_configs": scrape, "rule_files": files}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        executable,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", folder / "log")
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"Prometheus did not start: {log.read_text(encoding='utf-8')}")
