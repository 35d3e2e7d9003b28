"""The demo service on Ray with its real model: answers are drafted, handed over, verified and counted, and they are
those that README and quick start show."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from deploy.cli.console import CONFIGS
from deploy.run.cluster import running_app
from serve_app.config.files import load_config
from speculative.kernels.library import cpu_kernels
from tests.support.project_files import ROOT
from tests.support.waiting import wait_for
from tools.chaos.sockets import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

_SHOWN = re.compile(
    r"^```(python)?\n((?:from openai|curl -s \S+/v1/chat)[^`]*)^```\n(?:\n[^`]*`[^`]*`[^`]*)?\n```\n([^`]*)^```", re.M
)
SNIPPETS = [
    (path.name, *found)
    for path in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    for found in _SHOWN.findall(path.read_text(encoding="utf-8"))
]


@contextmanager
def running_demo() -> Iterator[tuple[str, str]]:
    """The service that `make serve` starts, at another port."""
    file = load_config(CONFIGS / "demo.yaml")
    http = file.http_options.model_copy(update={"port": free_ports(1)[0]})
    with running_app(file.model_copy(update={"http_options": http}), lambda _: None) as (url, name, _):
        yield url, name


COUNTED = ("draft_tokens_total", "accepted_tokens_total", 'handoffs_total{[^}]*result="ok"', "replay_tokens_total")


def test_an_answer_is_drafted_handed_over_verified_and_counted() -> None:
    with running_demo() as (base_url, model_name), httpx.Client(base_url=base_url, timeout=300) as client:
        for temperature in (0.0, 1.0):
            asked = {
                "model": model_name,
                "messages": [{"role": "user", "content": "What is the capital of France, and what is it famous for?"}],
                "temperature": temperature,
                "seed": 7,
                "max_tokens": 32,
                "logprobs": True,
                "verify": True,
            }
            answers = [client.post("/v1/chat/completions", json=asked).raise_for_status().json() for _ in range(2)]
            assert [answer["verdict"] for answer in answers] == ["verified"] * 2
            texts = {answer["choices"][0]["message"]["content"] for answer in answers}
            assert len(texts) == 1, "a seed gives one text"
            streamed = client.post("/v1/chat/completions", json=asked | {"stream": True}).text
            events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices")]
            assert {"".join(pieces)} == texts
        wait_for(lambda: all(counts(client.get("/metrics").text)), "all that is counted", 30)
        kernels, capability = cpu_kernels(), torch.backends.cpu.get_cpu_capability()
        is_shown = capability == "AVX512" and kernels is not None and not kernels.has_tiles  # whose rounding is shown
        for name, language, code, shown in SNIPPETS:
            said = _output_of(code, language, base_url)
            assert said == shown if is_shown else said.strip() and ("Paris" in said) == ("Paris" in shown), name


def counts(metrics: str) -> list[float]:
    """What the service has counted, over all replicas."""
    found = [re.findall(rf"^truespec_{name}[^ ]* ([0-9.e+]+)$", metrics, re.M) for name in COUNTED]
    return [sum(map(float, values)) for values in found]


def test_both_documents_show_what_is_answered() -> None:
    assert [(name, language) for name, language, _, _ in SNIPPETS] == [
        ("README.md", "python"),
        ("quickstart.md", ""),
        ("quickstart.md", "python"),
    ]
    assert all("temperature" in code and "max_tokens" in code for _, _, code, _ in SNIPPETS)


def _output_of(code: str, language: str, url: str) -> str:
    ours = code.replace("http://127.0.0.1:8000", url)
    assert ours != code
    command = [sys.executable, "-c", ours] if language == "python" else ["bash", "-c", ours]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=Path(sys.prefix)).stdout
    if language == "python":
        return said
    reply = json.loads(said)
    assert reply["verdict"] == "verified"
    return f"{reply['choices'][0]['message']['content']}\n"
