"""The stream router on a real Ray: the same service as without it, and streams that outlive their replica."""

import concurrent.futures
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

import serve_app.app
from serve_app.app import build_app
from tests.support.faulty_services import hold_long_answers, slow_steps, with_fault
from tests.support.gpu_probe import visible_gpus
from tests.support.services import LOOPING, MODEL, Service, administered, app_args, deployed
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_for
from tools.chaos.replicas import Killer, replica_pids
from tools.chaos.run import Strikes, run_chaos
from tools.chaos.streams import plan

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

HALF = {"num_cpus": 0.5}
SIZES = {"PrefillServer": 2, "DecodeServer": 2}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no answer of `routed` ends that is long."""
    return tmp_path_factory.mktemp("faults") / "held"


@pytest.fixture(scope="module")
def routed(ray_port: int, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, held: Path) -> Iterator[Service]:
    pools = {"prefill": {"replicas": 2, **HALF}, "decode": {"replicas": 2, **HALF}, "router": HALF}
    recovery = {"resume": True, "max_resumes": 20, "decode_timeout_s": 10}
    admin = administered(tmp_path_factory.mktemp("secrets"))
    args = app_args(tiny_folder, "disaggregated", pools=pools, recovery=recovery, admin=admin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_app.app, "DecodeServer", with_fault(serve_app.app.DecodeServer, hold_long_answers, held))
        with deployed(ray_port, "routed", args) as service:
            yield service


def stream(service: Service, **body: Any) -> Iterator[dict[str, Any]]:
    """The choices of a streamed completion."""
    with service.http() as http:
        asked = {"model": MODEL, "stream": True, "return_token_ids": True, **body}
        with http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    reported = json.loads(line.removeprefix("data: "))
                    assert "error" not in reported, reported
                    yield from reported["choices"]


def whole(choices: Iterator[dict[str, Any]]) -> tuple[str, list[int], str]:
    text, tokens, reason = "", list[int](), ""
    for choice in choices:
        text += choice["text"]
        tokens += choice.get("token_ids") or ()
        reason = choice["finish_reason"] or reason
    return text, tokens, reason


def test_the_router_changes_nothing_that_clients_see(routed: Service, monolith: Service) -> None:
    body = {"prompt": LOOPING, "max_tokens": 20, "seed": 5, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    for more in ({"temperature": 0}, {"temperature": 1.0, "n": 3}, {"temperature": 0.8, "reproducible": True}):
        ours, theirs = (service.completion(**body, **more) for service in (routed, monolith))
        for one, other in zip(ours["choices"], theirs["choices"], strict=True):
            assert one["text"] == other["text"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
    reply = routed.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    assert reply.usage is not None and 0 < reply.usage.completion_tokens <= 8
    assert routed.completion(prompt=LOOPING, max_tokens=9, verify=True)["verdict"] == "verified"


def test_a_service_without_gpus_sees_none_of_its_nodes(routed: Service) -> None:
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [one for one in named if one["name"].startswith(f"SERVE_REPLICA::{routed.name}#")]
    assert len(ours) == 6, "two that prefill, two that decode, router, controller"
    actors = [ray.get_actor(one["name"], one["namespace"]) for one in ours]
    assert ray.get([actor.__ray_call__.remote(visible_gpus) for actor in actors]) == [""] * 6


def test_a_client_that_leaves_frees_what_its_worker_held(routed: Service) -> None:
    with contextlib.closing(stream(routed, prompt="go on", max_tokens=1900, ignore_eos=True)) as choices:
        assert next(choices)["token_ids"]
    wait_for(routed.idle, "return to idle")


def resumed(service: Service) -> float:
    return service.count("resumes_total", result="resumed")


@pytest.fixture
def holding(held: Path) -> Iterator[Path]:
    held.touch()
    yield held
    held.unlink(missing_ok=True)


def test_a_stream_goes_on_when_its_replica_is_killed(routed: Service, holding: Path) -> None:
    """Every decode replica is killed: the stream waits for a new one, and goes on there."""
    body = {"prompt": LOOPING, "max_tokens": 400, "seed": 11, "reproducible": True, "ignore_eos": True}
    before = resumed(routed)
    with contextlib.closing(stream(routed, **body, speculate=False)) as choices:
        begun = [next(choices) for _ in range(5)]
        killed = replica_pids("routed", "DecodeServer")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        holding.unlink()
        disturbed = whole(iter([*begun, *choices]))
    assert killed
    assert len(disturbed[1]) == 400
    assert disturbed == whole(stream(routed, **body, speculate=False))
    assert resumed(routed) > before
    wait_for(routed.idle, "return to idle")


def test_a_stream_goes_on_when_its_replica_hangs(routed: Service, holding: Path) -> None:
    """Every decode replica stands still: none is dead, and the stream is given up. One of them comes round."""
    body = {"prompt": LOOPING, "max_tokens": 400, "seed": 12, "reproducible": True, "ignore_eos": True}
    before = resumed(routed)
    with contextlib.closing(stream(routed, **body, speculate=False)) as choices:
        begun = [next(choices) for _ in range(5)]
        stopped = replica_pids("routed", "DecodeServer")
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            holding.unlink()
            wait_for(lambda: resumed(routed) > before, "the stream being given up")
            os.kill(stopped[0], signal.SIGCONT)
            disturbed = whole(iter([*begun, *choices]))
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # Serve replaces one that fails its health checks
                    os.kill(pid, signal.SIGCONT)
    assert disturbed == whole(stream(routed, **body, speculate=False))
    wait_for(routed.idle, "return to idle")


def test_a_killed_prefill_is_asked_for_again(routed: Service) -> None:
    body = {"prompt": LOOPING, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    expected = routed.completion(**body)["choices"][0]["token_ids"]
    killer = Killer("routed", SIZES, seed=1)
    killer.wait_until_whole()
    metric = routed.count
    wait_for(lambda: metric("replicas_running") == metric("replicas_wanted") == 6, "the count of replicas and proxy")
    restarts = metric("replica_restarts_total")
    killer.kill("PrefillServer")
    answers = [routed.completion(**body)["choices"][0]["token_ids"] for _ in range(5)]
    assert answers == [expected] * 5
    wait_for(lambda: metric("replica_restarts_total") > restarts, "the count of the restart")


def test_twenty_requests_under_fire(routed: Service) -> None:
    """The small sister of `make chaos`."""
    killer = Killer("routed", SIZES, seed=3)
    killer.wait_until_whole()
    bodies = plan(MODEL, 20, seed=2, max_tokens=600)
    reported: list[str] = []
    figures = run_chaos(routed.base_url, killer, bodies, 8, Strikes(0.5, 600.0, most=2), reported.append)
    assert figures.sound, figures
    assert (figures.requests, figures.errors) == (20, [])
    assert figures.kills == 2
    assert figures.tokens > 20 * 150


def test_replies_report_new_weights_from_the_first_on(routed: Service, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", tokenizer=True, max_position_embeddings=2048, seed=1)
    Killer("routed", SIZES, seed=1).wait_until_whole()
    body = {"prompt": LOOPING, "max_tokens": 4}
    before = routed.completion(**body)["system_fingerprint"]
    done = routed.operate("POST", "weights", path=str(other), weight_version="step-1")
    assert done.status_code == 200 and done.json()["complete"], done.text
    (fingerprint,) = {one["fingerprint"][:12] for one in done.json()["replicas"]}
    assert not before.startswith(f"fp_{fingerprint}")
    for _ in range(4):  # whichever replica answers
        reply = routed.completion(**body)
        assert reply["system_fingerprint"].startswith(f"fp_{fingerprint}")
        assert reply["metadata"] == {"weight_version": "step-1"}


def test_a_redeployment_keeps_streams_alive(
    ray_port: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that began under the old settings ends while the new ones are served."""
    slow = tmp_path / "slow"
    monkeypatch.setattr(serve_app.app, "DecodeServer", with_fault(serve_app.app.DecodeServer, slow_steps, slow))

    def args(max_choices: int) -> dict[str, Any]:
        pools = {"prefill": HALF, "decode": HALF}
        return app_args(tiny_folder, "disaggregated", pools=pools, limits={"max_choices": max_choices})

    def statuses() -> int:
        with service.http() as http:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "n": 2}
            return http.post("/v1/completions", json=body).status_code

    body = {"prompt": LOOPING, "max_tokens": 400, "seed": 1, "reproducible": True, "ignore_eos": True}
    with deployed(ray_port, "redeployed", args(2)) as service, concurrent.futures.ThreadPoolExecutor(1) as thread:
        undisturbed = whole(stream(service, **body, speculate=False))
        assert statuses() == 200
        slow.touch()
        with contextlib.closing(stream(service, **body, speculate=False)) as choices:
            begun = [next(choices) for _ in range(3)]
            deploying = thread.submit(serve.run, build_app(args(1)), name="redeployed", route_prefix="/redeployed")
            rest = list(choices)
        assert whole(iter([*begun, *rest])) == undisturbed
        slow.unlink()
        deploying.result(timeout=300)
        assert statuses() == 400
