"""The verbs of `truespec` as jobs of a Ray cluster with token auth, submitted as docs/jobs.md says."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_head import RayHead, ray_head
from tests.support.runbook_shell import commands, run
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(num_cpus=4) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True, num_hidden_layers=4)


def test_a_job_needs_the_clusters_token_and_fails_with_its_command(head: RayHead) -> None:
    refused = head.submit("truespec", "--version", token=False)
    assert refused.returncode != 0 and ("401" in refused.stdout + refused.stderr or "token" in refused.stderr)
    failed = head.submit("truespec", "model", "get", "no-such-model")
    assert failed.returncode == 1 and "no-such-model" in failed.stdout + failed.stderr


def test_batch_with_an_engine_of_its_own_twice(head: RayHead, model: Path, tmp_path: Path) -> None:
    """The second job finds nothing left of the first one's application, and what it wrote."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def ask(number: int) -> None:
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 6, "logprobs": 1, "return_token_ids": True}
        lines = [
            {"custom_id": f"r{one}", "method": "POST", "url": "/v1/completions", "body": body | {"seed": one}}
            for one in range(number)
        ]
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    command = ["truespec", "batch", str(requests), str(answers), "--model", str(model), "--verify"]
    for number in (8, 12):
        ask(number)
        done = head.submit(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        results = [json.loads(line) for line in answers.read_text().splitlines()]
        assert {result["custom_id"] for result in results} == {f"r{one}" for one in range(number)}
        assert len(results) == number
    assert "12 of 12 requests done, 8 of them before" in done.stdout
    for result in results:
        body = result["response"]["body"]
        assert body["verdict"] == "verified", body
        (choice,) = body["choices"]
        assert len(choice["token_logprobs"]) == len(choice["token_ids"]) >= 1
        assert all(logprob <= 0 for logprob in choice["token_logprobs"])


@pytest.mark.parametrize("command", commands("in_head"))
def test_the_runbooks_commands_for_the_head_pod_run(head: RayHead, command: str, tmp_path: Path) -> None:
    inside = {"RAY_ADDRESS": head.address, "RAY_DASHBOARD_ADDRESS": head.dashboard, "PYTHONWARNINGS": "ignore"}
    assert run(command, tmp_path, {}, head.environment | inside)
