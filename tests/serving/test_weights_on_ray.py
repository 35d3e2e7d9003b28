"""New weights for a service on Ray, as a trainer brings them: by path and over the wire, under traffic."""

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deploy.rl import push_weights
from serve_app.errors import UpdateRefused
from speculative.engine import EngineCore
from tests.support.engines import settings, teacher_forced
from tests.support.services import MODEL, REPLAY, Service, administered, app_args, deployed
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three steps of one training."""
    base = tmp_path_factory.mktemp("checkpoints")
    return [
        write_tiny_model(base / f"step{seed}", tokenizer=True, max_position_embeddings=2048, seed=seed)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def service(ray_port: int, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    replay = {**REPLAY, "independent_rate": 1.0}
    admin = administered(tmp_path_factory.mktemp("secrets"))
    args = app_args(checkpoints[0], "disaggregated", admin=admin, replay=replay)
    with deployed(ray_port, "weights", args) as running:
        yield running


def answer(service: Service, seed: int, max_tokens: int = 16) -> dict[str, Any]:
    return service.completion(
        prompt=PROMPT, max_tokens=max_tokens, seed=seed, logprobs=0, return_token_ids=True, ignore_eos=True
    )


def assert_made_by(reply: dict[str, Any], version: str, checkpoint: Path) -> None:
    """The reply names this version, and its logprobs are those of this checkpoint, computed afresh without a cache."""
    assert reply["metadata"] == {"weight_version": version}
    (choice,) = reply["choices"]
    distribution = teacher_forced(EngineCore.load(checkpoint, settings()), PROMPT, choice["token_ids"])
    wanted = distribution[range(len(choice["token_ids"])), choice["token_ids"]]
    torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), wanted, atol=1e-4, rtol=0)


def test_an_update_by_path_under_traffic(service: Service, checkpoints: list[Path]) -> None:
    assert_made_by(answer(service, 1), "default", checkpoints[0])
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        replies = [pool.submit(answer, service, seed, 200) for seed in range(8)]
        update = pool.submit(service.operate, "POST", "weights", path=str(checkpoints[1]), weight_version="step-1")
        done = update.result()
        assert done.status_code == 200, done.text
        assert done.json()["complete"]
        assert {one["weight_version"] for one in done.json()["replicas"]} == {"step-1"}
        assert len({one["fingerprint"] for one in done.json()["replicas"]}) == 1 and len(done.json()["replicas"]) == 2
        for reply in replies:  # what ran was let finish: each answer is of one version, whichever
            version = reply.result()["metadata"]["weight_version"]
            assert_made_by(reply.result(), version, checkpoints[version == "step-1"])
    assert_made_by(answer(service, 1), "step-1", checkpoints[1])
    assert service.operate("GET", "weights").json()["replicas"] == done.json()["replicas"]


def test_handoffs_go_on_and_replays_of_old_answers_accuse_nobody(service: Service) -> None:
    before = service.metrics()["handoffs_by_result"].get("ok", 0)
    answer(service, 7)
    wait_for(lambda: service.metrics()["handoffs_by_result"].get("ok", 0) > before, "a handoff between new weights")

    wait_for(lambda: service.count("verdicts_total") >= 10, "verdicts on all answers")
    suspect = [line for line in service.metrics_text().splitlines() if 'verdict="suspect"' in line]
    assert suspect and all(line.endswith(" 0.0") for line in suspect)


def test_weights_that_one_cannot_load_change_nothing(service: Service, tmp_path: Path, checkpoints: list[Path]) -> None:
    refused = service.operate("POST", "weights", path=str(tmp_path / "nowhere"), weight_version="step-9")
    assert refused.status_code == 409 and "Nothing changed" in refused.json()["error"]["message"]
    same = service.operate("POST", "weights", path=str(checkpoints[1]), weight_version="step-1")
    assert same.status_code == 409 and "give new weights a new name" in same.json()["error"]["message"]
    assert_made_by(answer(service, 2), "step-1", checkpoints[1])
    with service.http() as http:
        assert http.post("/admin/weights", json={"path": "x", "weight_version": "y"}).status_code == 401


def test_a_trainer_hands_over_its_tensors(service: Service, checkpoints: list[Path]) -> None:
    tensors = load_file(checkpoints[2] / "model.safetensors")
    short = {name: value for name, value in tensors.items() if "norm" not in name}
    with pytest.raises(UpdateRefused, match="lacks the tensors"):
        push_weights(short.items(), weight_version="step-2", app_name=service.name)
    outcome = push_weights(tensors.items(), weight_version="step-2", app_name=service.name)
    assert outcome.complete
    assert_made_by(answer(service, 3), "step-2", checkpoints[2])
    total, before = service.count, service.count("independent_replays_total", result="agrees")

    def agreed() -> bool:
        answer(service, 5)
        return total("independent_replays_total", result="agrees") > before + 2  # one may have been under way

    wait_for(agreed, "answers that transformers checks with the weights that came over the wire", timeout_s=600)
    assert [total("independent_replays_total", result=one) for one in ("disagrees", "unsupported", "failed")] == [0] * 3


def test_a_replica_that_starts_later_serves_what_the_others_serve(service: Service, checkpoints: list[Path]) -> None:
    title = f"ray::ServeReplica:{service.name}:PrefillServer".encode()
    old = {path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if title in path.read_bytes()}
    assert old
    for process in old:
        os.kill(int(process.name), signal.SIGKILL)
    before = service.metrics()["handoffs_by_result"].get("ok", 0)

    def handed_off() -> bool:
        """From the first request after the kill on, none is lost."""
        assert_made_by(answer(service, 4), "step-2", checkpoints[2])
        return bool(service.metrics()["handoffs_by_result"].get("ok", 0) > before)

    wait_for(handed_off, "a handoff from the new prefill replica")
    assert service.metrics()["handoffs_by_result"].get("refused", 0) <= 8, "its handoffs were of other weights"


def test_pause_keeps_new_requests_waiting_and_resume_lets_them_go(service: Service) -> None:
    paused = service.operate("POST", "pause", mode="wait")
    assert paused.status_code == 200 and paused.json()["complete"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, service, 5)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(timeout=2)
        assert service.operate("POST", "resume").json()["complete"]
        assert waiting.result(timeout=60)["metadata"] == {"weight_version": "step-2"}
    with service.http() as http:
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}).status_code == 200
