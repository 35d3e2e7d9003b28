"""The script of `helm test`, against a server that answers as the service does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy.watch.proxy import HEALTH
from tests.support.fake_http import QuietHandler, serving
from tools.chart import CHART

TOKENS = 3


@contextmanager
def service(models: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with these models: its URL, and the completions it was asked for."""
    asked: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            answers = {
                "/healthz": json.dumps({"status": "ok"}),
                "/v1/models": json.dumps({"data": [{"id": name} for name in models]}),
                "/metrics": f'truespec_emitted_tokens_total{{pool="decode"}} {TOKENS * len(asked)}\n',
            }
            self.say(200, answers[self.path].encode())

        def do_POST(self) -> None:
            asked.append(json.loads(self.sent()))
            choice = {"text": "a", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0] * TOKENS}}
            self.say(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": TOKENS}}).encode())

    with serving(Handler) as url:
        yield url, asked


def smoke(*urls: str, script: str = "smoke.py", seconds: str = "20") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files" / script), *urls, seconds]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


def test_a_service_with_adapters_passes_and_its_model_is_asked() -> None:
    with service(["base", "adapter"]) as (url, asked):
        done = smoke(url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") == 6
    assert [body["model"] for body in asked] == ["base"]


def test_a_service_without_a_model_fails() -> None:
    with service([]) as (url, asked):
        done = smoke(url)
    assert done.returncode != 0 and "FAILED: models are served: []" in done.stderr
    assert not asked


@contextmanager
def part(*answers: tuple[str, int, int]) -> Iterator[str]:
    """A part of a watch that answers paths with a status, after so many that say that it is not ready: its URL."""
    waits = {path: not_ready for path, _, not_ready in answers}
    statuses = {path: status for path, status, _ in answers}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            waits[self.path] = waits.get(self.path, 0) - 1
            self.say(503 if waits[self.path] >= 0 else statuses.get(self.path, 404))

    with serving(Handler) as url:
        yield url


def test_a_watch_passes_once_its_server_answers_if_only_that_it_wants_a_key() -> None:
    with part((HEALTH, 200, 0), ("/v1/models", 401, 1)) as proxy, part(("/health", 200, 0)) as referee:
        done = smoke(proxy, referee, script="smoke_watch.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") == 3


def test_a_watch_without_its_server_or_its_referee_fails() -> None:
    with part((HEALTH, 200, 0), ("/v1/models", 502, 0)) as proxy, part(("/health", 200, 0)) as referee:
        done = smoke(proxy, referee, script="smoke_watch.py", seconds="0")
        assert done.returncode != 0 and "FAILED: they reach the server" in done.stderr
    with part((HEALTH, 200, 0), ("/v1/models", 200, 0)) as proxy:
        done = smoke(proxy, referee, script="smoke_watch.py", seconds="0")  # the referee's port is closed by now
        assert done.returncode != 0 and f"FAILED: {referee}/health" in done.stderr
