"""SmolLM2 on Ray with vLLM's engine, prefill and decode apart: what clients get, and what is found out about it."""

import concurrent.futures
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.config import load_config
from speculative.errors import ConfigError
from speculative.model.loading import resolve_model
from tests.serving.conftest import Service, deployed, ray_port, wait_for  # noqa: F401  # a fixture
from tests.vllm.installed import NEEDS_VLLM

SOURCE = "smollm2-135m"
MODEL = "SmolLM2-135M-Instruct"
FILE = Path(__file__).parents[2] / "deploy" / "configs" / "vllm.yaml"
COUNTING = "Count: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 1 2 3 4 5 6 7 8 9 10 11"


def has_model() -> bool:
    try:
        resolve_model(SOURCE)
    except ConfigError:
        return False
    return True


pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_model(), reason=f"{SOURCE} is not fetched; `truespec model get {SOURCE}`"),
]


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def service(ray_port: int, request: pytest.FixtureRequest) -> Iterator[Service]:  # noqa: F811
    args: dict[str, Any] = load_config(FILE).application.args.model_dump(mode="json", exclude_unset=True)
    args["engine"]["max_model_len"], args["engine"]["kv_cache_tokens"] = 512, 4096
    if request.param == "draft_model":  # itself: whatever it drafts is right
        args["drafter"] = {"kind": "draft_model", "model": SOURCE, "num_draft_tokens": 3}
    with deployed(ray_port, f"vllm-{request.param}".replace("_", "-"), args) as running:
        yield running


def complete(service: Service, **body: Any) -> dict[str, Any]:
    return service.completion(**{"model": MODEL, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **body})


def test_drafts_are_accepted_and_change_nothing(service: Service) -> None:
    on = complete(service, prompt=COUNTING)
    off = complete(service, prompt=COUNTING, speculate=False)
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]
    assert on["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 5
    assert off["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert service.metrics()["handoffs"] >= 2


def test_a_chat_streams_what_it_says_at_once(service: Service) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = service.openai.chat.completions.create(**asked).choices[0].message.content
    chunks = service.openai.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert whole is not None and "Paris" in whole


def test_answers_are_replayed_and_found_right(service: Service) -> None:
    reply = complete(service, prompt=COUNTING, verify=True, logprobs=2)
    assert reply["verdict"] == "verified"
    sampled = complete(service, prompt=COUNTING, verify=True, temperature=1.0, seed=4)
    assert sampled["verdict"] == "verified"
    metrics = service.metrics()
    assert metrics["replayed_tokens"] >= 48 and metrics["tme"] is not None and metrics["tme"] < 1.05


def test_sampled_answers_are_sampled_from_the_model(service: Service) -> None:
    """Where vLLM verifies drafts at a temperature it says garbage here: 9 nats a token instead of about 2."""

    def surprisal(number: int) -> float:
        reply = complete(service, prompt=COUNTING, temperature=1.0, seed=number, logprobs=0)
        told = reply["choices"][0]["logprobs"]["token_logprobs"]
        return -sum(told) / len(told)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        greedy = [pool.submit(complete, service, prompt=COUNTING) for _ in range(4)]
        means = list(pool.map(surprisal, range(8)))
    assert sum(means) / len(means) < 4.0
    assert len({tuple(one.result()["choices"][0]["token_ids"]) for one in greedy}) == 1


def test_what_it_cannot_keep_is_refused_with_the_field(service: Service) -> None:
    for name, value in (("min_p", 0.1), ("reproducible", True)):
        with pytest.raises(openai.BadRequestError) as caught:
            service.openai.completions.create(
                model=MODEL, prompt="x", max_tokens=2, extra_body={name: value}, temperature=1
            )
        assert caught.value.param == name, caught.value


def test_labels_are_scored(service: Service) -> None:
    with service.http() as http:
        reply = http.post(
            "/v1/score",
            json={"model": MODEL, "contexts": ["The capital of France is"], "labels": [" Paris", " Rome", " Oslo"]},
        ).json()
    labels = reply["data"][0]["labels"]
    assert max(labels, key=lambda label: label["score"]) == labels[0]


def test_a_killed_engine_is_replaced_and_leaves_nothing_behind(service: Service) -> None:
    complete(service, prompt="before")
    title = f"ray::ServeReplica:{service.name}:DecodeServer"
    found = subprocess.run(["pgrep", "-f", f"^{title}"], capture_output=True, text=True, check=False).stdout
    replicas = [int(pid) for pid in found.split()]
    assert len(replicas) == 1
    engines = children(replicas[0])
    assert engines
    os.kill(replicas[0], signal.SIGKILL)
    wait_for(lambda: not any(map(alive, engines)), "the end of the killed replica's engine")
    wait_for(lambda: answers(service), "an answer of its replacement", 240)


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [process for child in map(int, found) for process in (child, *children(child))]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def answers(service: Service) -> bool:
    with service.http() as http:
        body = {"model": MODEL, "prompt": "after", "max_tokens": 2}
        return http.post("/v1/completions", json=body).status_code == 200
