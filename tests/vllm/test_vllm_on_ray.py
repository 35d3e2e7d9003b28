"""SmolLM2 on Ray with vLLM's engine, prefill and decode apart: what clients get, and what is found out about it."""

import concurrent.futures
import importlib.util
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.run.models import model_here
from deploy.run.processes import process_tree
from serve_app.config.files import load_config
from speculative.model.loading import resolve_model
from tests.support.processes import alive
from tests.support.services import Service, administered, deployed
from tests.support.tiny_adapters import write_tiny_adapter
from tests.support.vllm_installed import NEEDS_VLLM
from tests.support.waiting import wait_for

SOURCE = "smollm2-135m"
MODEL = "SmolLM2-135M-Instruct"
FILE = Path(__file__).parents[2] / "deploy" / "configs" / "vllm.yaml"
ADAPTERS = ("sql", "legal")
COUNTING = "Count: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 1 2 3 4 5 6 7 8 9 10 11"


pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(model_here(SOURCE) is None, reason=f"{SOURCE} is not fetched; `truespec model get {SOURCE}`"),
]


def drawn_from(name: str, scratch: Path) -> dict[str, Any]:
    """What a service of this name has, besides what all have."""
    if name == "ngram":
        model = resolve_model(SOURCE)
        for seed, adapter in enumerate(ADAPTERS):
            write_tiny_adapter(scratch / adapter, model, seed=seed, modules=("q_proj", "v_proj"))
        modules = {adapter: str(scratch / adapter) for adapter in ADAPTERS}
        return {"vllm": {"engine_args": {"enforce_eager": True}, "lora_modules": modules, "replays": "vllm"}}
    if name == "draft_model":  # itself: whatever it drafts is right
        return {"drafter": {"kind": "draft_model", "model": SOURCE, "num_draft_tokens": 3}}
    if name == "eagle3":  # with all that the others leave out
        head = {"kind": "eagle3", "model": "smollm2-135m-eagle3", "num_draft_tokens": 3}
        transport = "plasma" if importlib.util.find_spec("nixl") is None else "nixl"
        return {"drafter": head, "handoff": {"transport": transport}}
    return {}


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle3"])
def service(
    ray_port: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    args: dict[str, Any] = load_config(FILE).application.args.model_dump(mode="json", exclude_unset=True)
    args["engine"]["max_model_len"], args["engine"]["kv_cache_tokens"] = 512, 4096
    scratch = tmp_path_factory.mktemp("service")
    args |= {"admin": administered(scratch)} | drawn_from(request.param, scratch)
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
    by_result = service.metrics()["handoffs_by_result"]
    assert by_result.get("ok", 0) >= 2 and not by_result.get("refused"), by_result


def tested(service: Service) -> float:
    """The number of answers that were evidence on the distribution."""
    return service.count("replay_distributions_total", distribution="tested")


def test_answers_are_replayed_and_found_right(service: Service) -> None:
    reply = complete(service, prompt=COUNTING, verify=True, logprobs=2)
    assert reply["verdict"] == "verified"
    before = tested(service)
    sampled = complete(service, prompt=COUNTING, verify=True, temperature=1.0, seed=4)
    by_vllm = service.name.endswith("ngram")  # which gives no distribution of sampled answers
    assert sampled["verdict"] == ("logprobs_only" if by_vllm else "verified")
    assert (tested(service) > before) == (not by_vllm), "our own engine, the default, knows how answers are sampled"
    metrics = service.metrics()
    assert metrics["replayed_tokens"] >= 48 and metrics["tme"] is not None and metrics["tme"] < 1.05


def test_adapters_are_chosen_by_name_and_verified_with_themselves(service: Service) -> None:
    listed = service.openai.models.list().data
    adapters = {card.id: card.parent for card in listed if card.parent is not None}  # type: ignore[attr-defined]
    if not service.name.endswith("ngram"):
        assert [card.id for card in listed] == [MODEL] and not adapters
        return
    assert adapters == dict.fromkeys(ADAPTERS, MODEL)
    before = service.metrics()["handoffs_by_result"]
    names = [MODEL, *ADAPTERS, MODEL]
    asked = {"prompt": COUNTING, "verify": True}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda name: complete(service, **asked, model=name), names))
    assert [reply["model"] for reply in replies] == names
    assert {reply["verdict"] for reply in replies} == {"verified"}
    said = [reply["choices"][0]["token_ids"] for reply in replies]
    assert said[0] == said[3] and said[1] not in (said[0], said[2]) and said[2] != said[0]
    by_result = service.metrics()["handoffs_by_result"]
    assert by_result["ok"] == before["ok"] + 4 and by_result.get("refused") == before.get("refused")
    with pytest.raises(openai.NotFoundError):
        service.openai.completions.create(model="alien", prompt="x", max_tokens=2)


def test_a_killed_engine_is_replaced_and_leaves_nothing_behind(service: Service) -> None:
    complete(service, prompt="before")
    title = f"ray::ServeReplica:{service.name}:DecodeServer"
    found = subprocess.run(["pgrep", "-f", f"^{title}"], capture_output=True, text=True, check=False).stdout
    replicas = [int(pid) for pid in found.split()]
    assert len(replicas) == 1
    engines = process_tree(replicas[0])[1:]
    assert engines
    os.kill(replicas[0], signal.SIGKILL)
    wait_for(lambda: not any(map(alive, engines)), "the end of the killed replica's engine")
    wait_for(lambda: answers(service), "an answer of its replacement", 400)


def answers(service: Service) -> bool:
    with service.http() as http:
        body = {"model": MODEL, "prompt": "after", "max_tokens": 2}
        try:
            return http.post("/v1/completions", json=body).status_code == 200
        except httpx.TimeoutException:  # it waits for the replica
            return False
