"""A replica with a faulty engine, under load: it stops speculating by itself, what it answers from then on is right,
and when the fault is gone speculation comes back."""

import json
from pathlib import Path
from typing import Any

import pytest

import serve_app.app
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from tests.support.engines import NO_DRAFTS, tiny_engine
from tests.support.faulty_services import commit_first_drafts, misplace_rounds_with_drafts, with_fault
from tests.support.services import LOOPING, Load, Service, administered, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]


def drawn(seed: int, temperature: float) -> dict[str, Any]:
    """What has the token-wise verifier judge: a seed alone would have the coupled one do it."""
    return {"seed": seed, "temperature": temperature, "reproducible": False}


def body_of_load(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} {LOOPING}", "max_tokens": 24, "ignore_eos": True, **drawn(number, 1.0)}


def verdict_of(service: Service, reply: dict[str, Any]) -> dict[str, Any]:
    with service.http() as http:
        reported = http.get(f"/v1/verdicts/{reply['id']}")
    assert reported.status_code == 200, reported.text
    return json.loads(reported.text)


def breaker_state(service: Service) -> float:
    """Of the replica that speculates; the others' breakers stay closed, which is 0."""
    return service.gauge("breaker_state")


def asked(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": f"again {number} {LOOPING}",
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
        **drawn(number, number % 2),
        **fields,
    }


def test_a_faulty_replica_falls_back_and_comes_back(
    ray_port: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, dumps = tmp_path / "fault", tmp_path / "dumps"
    flag.touch()
    faulty = with_fault(serve_app.app.DecodeServer, misplace_rounds_with_drafts, flag)
    monkeypatch.setattr(serve_app.app, "DecodeServer", faulty)
    args = app_args(
        tiny_folder, "disaggregated", breaker={"cooldown_s": 1.0, "canary_requests": 3}, dumps={"folder": str(dumps)},
        admin=administered(tmp_path),
    )  # fmt: skip
    with deployed(ray_port, "faulty", args) as service:
        with Load(service, body_of_load, clients=4) as load:
            wait_for(lambda: breaker_state(service) > 0, "the breaker's trip")
        assert not load.errors
        text = service.metrics_text()
        tripped = {reason for reason in ("drift", "law") if f'reason="{reason}"}} 1.0' in text}
        assert tripped, [line for line in text.splitlines() if "breaker_trips" in line]
        wait_for(lambda: "suspect" in {verdict_of(service, one)["verdict"] for one in load.replies}, "suspicion")
        assert list(dumps.glob("truespec-*-trip-*.json"))
        # It decodes plainly now, and rightly, while the fault is still there.
        engine = tiny_engine(tiny_folder, drafter=NO_DRAFTS)
        for number in range(4):
            reply = service.completion(**asked(number, verify=True))
            assert reply["choices"][0]["token_ids"] == plain_answer(engine, reply, number)
            assert reply["verdict"] == "verified"
            assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        wait_for(lambda: service.count("canaries_total", result="failed") > 0, "a canary that fails")
        assert breaker_state(service) > 0
        flag.unlink()
        # Each canary that failed has doubled the time to the next.
        wait_for(lambda: breaker_state(service) == 0, "speculation to come back")
        assert service.count("canaries_total", result="passed") == 1
        again = [service.completion(**asked(number, verify=True)) for number in range(4)]
        assert {reply["verdict"] for reply in again} == {"verified"}
        assert again[0]["choices"][0]["token_ids"] == plain_answer(engine, again[0], 0), "greedy: drafts change nothing"
        drafted = [reply["usage"]["completion_tokens_details"] for reply in again]
        assert sum(one["accepted_prediction_tokens"] + one["rejected_prediction_tokens"] for one in drafted) > 0
        _switch_off_and_on(service)


@pytest.mark.slow  # Serve takes half a minute to believe that a replica is unhealthy
def test_a_replica_that_goes_wrong_twice_is_replaced(
    ray_port: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "fault"
    faulty = with_fault(serve_app.app.MonolithServer, commit_first_drafts, flag)
    monkeypatch.setattr(serve_app.app, "MonolithServer", faulty)
    breaker = {"cooldown_s": 1.0, "canary_requests": 3}
    args = app_args(tiny_folder, "monolith", breaker=breaker, admin=administered(tmp_path))
    with deployed(ray_port, "faulty-twice", args) as service:
        service.completion(**asked(0))
        first = replica_names(service)
        for _ in range(2):
            wait_for(lambda: breaker_state(service) == 0, "speculation to come back")
            flag.touch()
            with Load(service, body_of_load, clients=4):
                wait_for(lambda: breaker_state(service) > 0, "the breaker's trip")
            flag.unlink()
        wait_for(lambda: bool(replica_names(service) - first), "another replica")
        reply = service.completion(**asked(0, verify=True))
        assert reply["choices"][0]["token_ids"] == plain_answer(
            tiny_engine(tiny_folder, drafter=NO_DRAFTS), reply, 0
        ), "greedy: drafts change nothing"
        details = reply["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0, "it speculates"


def replica_names(service: Service) -> set[str]:
    """Replicas that the referee has heard of lately; none while the only one is being replaced."""
    reported = service.operate("GET", "speculation")
    return {one["replica"] for one in reported.json()["replicas"]} if reported.status_code == 200 else set()


def plain_answer(engine: EngineCore, reply: dict[str, Any], number: int) -> list[int]:
    """What an engine without the fault says to the same prompt, with nothing drafted."""
    prompt = tuple(reply["choices"][0]["prompt_token_ids"])
    params = SamplingParams(max_tokens=24, temperature=number % 2, ignore_eos=True)
    engine.add(Request(reply["id"], prompt, params, seed=number))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    return tokens


def _switch_off_and_on(service: Service) -> None:
    """The operator's way to the same end."""
    with service.http() as http:
        assert http.post("/admin/speculation", json={"mode": "off"}).status_code == 401
    reported = service.operate("POST", "speculation", mode="off")
    assert reported.status_code == 200, reported.text
    wait_for(lambda: service.gauge("speculation_enabled") == 0, "speculation to be off")
    details = service.completion(**asked(0))["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == 0
    service.operate("POST", "speculation", mode="auto")
    wait_for(lambda: service.gauge("speculation_enabled") > 0, "speculation to be on")
