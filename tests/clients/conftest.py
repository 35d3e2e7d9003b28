"""A served model for the clients' tests, whose environments have no truespec.

TRUESPEC_URL names a server that already runs with `config.yaml`; without it one is started from .venv.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"
MODEL = "SmolLM2-135M-Instruct"
START_S = 300

# Before any client is imported: none of them asks a hub, and tokenizers start no threads beside the server's.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

NEEDS = {
    "test_with_agents.py": "agents",
    "test_with_guidellm.py": "guidellm",
    "test_with_instructor.py": "instructor",
    "test_with_langchain.py": "langchain_openai",
    "test_with_litellm.py": "litellm",
    "test_with_lm_eval.py": "lm_eval",
    "test_with_node.py": "langchain_openai",  # beside which Node's packages are
    "test_with_openai.py": "openai",
    "test_with_skyrl.py": "skyrl",
    "test_with_trl.py": "trl",
    "test_with_vllm_bench.py": "vllm",
}
"""What each file imports; an environment runs the files whose packages it has."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is for the main suite's environment, nor for one without the client."""
    if collection_path.parent != HERE or not collection_path.name.startswith("test_"):
        return None
    if config.inipath != HERE / "pytest.ini":
        return True
    needed = NEEDS.get(collection_path.name)
    return True if needed is not None and importlib.util.find_spec(needed) is None else None


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The address of the served model, without `/v1`."""
    if url := os.environ.get("TRUESPEC_URL"):
        yield url.rstrip("/")
        return
    port = _free_port()
    log = ROOT / "build" / "clients-server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [PYTHON, "-m", "deploy.cli.main", "serve", HERE / "config.yaml", "--port", str(port)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(server, url, log)
        yield url
        alarms = {line for line in _metrics(url) if "_alarms_total{" in line and not line.endswith(" 0.0")}
        assert not alarms, "the service found itself wrong"
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=90)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def api(base_url: str) -> str:
    """The address that clients of OpenAI's API are given."""
    return f"{base_url}/v1"


@pytest.fixture(scope="session")
def metric(base_url: str) -> Callable[[str], float]:
    """A metric of the service by its name, added up over labels."""
    return lambda name: sum(
        float(line.rsplit(" ", 1)[1]) for line in _metrics(base_url) if line.startswith((f"{name}{{", f"{name} "))
    )


@pytest.fixture(scope="session")
def watched(base_url: str) -> Iterator[str]:
    """The address of a `truespec watch proxy` in front of the served model, all of whose answers a referee judges."""
    port, referee_port = _free_port(), _free_port()
    log = ROOT / "build" / "clients-proxy.log"
    options = ["--share", "1", "--port", str(port), "--model", "smollm2-135m", "--referee-port", str(referee_port)]
    with log.open("wb") as out:
        command = [PYTHON, "-m", "deploy.cli.main", "watch", "proxy", base_url, *options]
        proxy = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(proxy, f"http://127.0.0.1:{referee_port}", log, "/health")
        _wait_until_up(proxy, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
        report = _report_of_all(f"http://127.0.0.1:{referee_port}")
        assert report["answers"]["judged"] > 0
        assert not report["findings"], "the referee found fault with a sound service"
    finally:
        proxy.send_signal(signal.SIGINT)
        proxy.wait(timeout=60)


@pytest.fixture(scope="session")
def run() -> Callable[..., None]:
    """Runs a command of this environment; its options are given as lines, since they are many."""

    def running(command: str, *options: str, **environment: str | None) -> None:
        changed = {name: value for name, value in (os.environ | environment).items() if value is not None}
        words = [word for line in options for word in line.split()]
        program, *first = shlex.split(command)
        subprocess.run([Path(sys.prefix) / "bin" / program, *first, *words], env=changed, check=True, timeout=300)

    return running


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def checkpoint() -> str:
    """The folder of the served checkpoint, for clients that tokenize or compare."""
    command = [PYTHON, "-m", "deploy.cli.main", "model", "get", "smollm2-135m"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    return shown.stdout.strip().splitlines()[-1]


def _metrics(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return reply.read().decode().splitlines()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _report_of_all(referee: str) -> dict[str, Any]:
    """What a referee says once it has judged all that was sent to it."""
    deadline, before = time.monotonic() + START_S, -1
    while True:
        time.sleep(2)
        with urllib.request.urlopen(f"{referee}/report.json", timeout=60) as reply:
            report: dict[str, Any] = json.load(reply)
        judged = report["answers"]["judged"]
        if 0 < judged == before or time.monotonic() > deadline:
            return report
        before = judged


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path, path: str = "/healthz") -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}{path}", timeout=5) as reply:
            if reply.status == 200:
                return
        assert server.poll() is None, f"the server ended with {server.returncode}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"no server within {START_S} s:\n{log.read_text()[-4000:]}"
        time.sleep(1)
