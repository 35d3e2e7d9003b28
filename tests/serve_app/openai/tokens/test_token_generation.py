"""/inference/v1/generate: token ids in, token ids and their logprobs out."""

from typing import Any

import httpx
import pytest

from tests.support.fake_backend import fake_logprob
from tests.support.fake_serving import Served


def generate(server: Served, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 1}} | fields
    reply = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_tokens_and_logprobs_are_those_of_a_completion(server: Served) -> None:
    sampling = {"max_tokens": 4, "seed": 1, "n": 2, "logprobs": 1, "prompt_logprobs": 1, "output_kind": 2, "top_k": -1}
    reply = generate(server, sampling_params=sampling, request_id="mine", cache_salt="s", model="fake")
    del sampling["output_kind"]
    extra = {"model": "fake", "prompt": [5, 6, 7], "return_token_ids": True}
    same = server.post("/v1/completions", **extra, **sampling).json()["choices"]
    assert reply["request_id"] == "mine"
    assert [choice["token_ids"] for choice in reply["choices"]] == [choice["token_ids"] for choice in same]
    for choice in reply["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert [entry["logprob"] for entry in content] == [fake_logprob(token) for token in choice["token_ids"]]
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)
        assert choice["finish_reason"] == "length"
    assert reply["prompt_logprobs"] == same[0]["prompt_logprobs"]
    assert reply["prompt_logprobs"][1]["6"]["logprob"] == fake_logprob(6)
    assert {request.cache_salt for request in server.source.requests[:2]} == {"s"}
    plain = generate(server)
    assert plain["prompt_logprobs"] is None and plain["choices"][0]["logprobs"] is None and plain["request_id"]


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"token_ids": []}, "token_ids", "invalid_value"),
        ({"token_ids": [10**6]}, "token_ids", "invalid_value"),
        ({"token_ids": [5] * 500}, "token_ids", "context_length_exceeded"),
        ({"sampling_params": None}, "sampling_params", "invalid_value"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "invalid_value"),
        ({"sampling_params": {"logit_bias": {"9999": 1}}}, "sampling_params.logit_bias", "invalid_value"),
        ({"sampling_params": {"max_tokens": 500}}, "sampling_params.max_tokens", "context_length_exceeded"),
        ({"sampling_params": {"stream": True}}, "sampling_params.stream", "unknown_parameter"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", "invalid_value"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "unsupported_parameter"),
        ({"features": {"a": 1}}, "features", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Served, fields: dict[str, Any], field: str, code: str
) -> None:
    error = generate(server, status=404 if code == "model_not_found" else 400, **fields)["error"]
    assert (error["param"], error["code"]) == (field, code), error
    assert error["param"] in error["message"]
    assert "echo" not in error["message"], "a field that this endpoint does not have"
