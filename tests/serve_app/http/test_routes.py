import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from serve_app.http.routes import Operations
from serve_app.openai.prepared_request import Limits
from speculative.errors import EngineFault
from tests.support.fake_serving import Served, ServeFake

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, checked to be in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return dict(error)


# ---- bad input: (endpoint, fields beside the right ones, parameter named, code)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG_VALUES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": None}, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_value"),
    (CHAT, {"messages": [5]}, "messages.0", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "invalid_value",
    ),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": 1, "content": "a"}]}, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role", "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "tool"}]}, "messages.0.content", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        "messages.0.tool_call_id",
        "invalid_value",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "messages.0.reasoning", "invalid_value"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": "a", "x": 1}]}, "messages.1.x", "unknown_parameter"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.function",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "messages.0.tool_calls",
        "unsupported_parameter",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "unsupported_parameter",
    ),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 300}]}, "messages", "context_length_exceeded"),
    (CHAT, {"max_tokens": -1}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": "5"}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": True}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 10**100}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    (CHAT, {"temperature": -0.1}, "temperature", "invalid_value"),
    (CHAT, {"temperature": "hot"}, "temperature", "invalid_value"),
    (CHAT, {"temperature": 10**400}, "temperature", "invalid_value"),
    (CHAT, {"top_p": 0}, "top_p", "invalid_value"),
    (CHAT, {"top_p": 1.01}, "top_p", "invalid_value"),
    (CHAT, {"top_k": -2}, "top_k", "invalid_value"),
    (CHAT, {"top_k": 2**40}, "top_k", "invalid_value"),
    (CHAT, {"n": 0}, "n", "invalid_value"),
    (CHAT, {"n": 65}, "n", "invalid_value"),
    (CHAT, {"n": [2]}, "n", "invalid_value"),
    (CHAT, {"seed": 2**64}, "seed", "invalid_value"),
    (CHAT, {"seed": -(2**63) - 1}, "seed", "invalid_value"),
    (CHAT, {"seed": "7"}, "seed", "invalid_value"),
    (CHAT, {"stop": ""}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a", 5]}, "stop", "invalid_value"),
    (CHAT, {"stop": {"a": 1}}, "stop", "invalid_value"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids.0", "invalid_value"),
    (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": 5}, "stop_token_ids", "invalid_value"),
    (CHAT, {"stream": "yes"}, "stream", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"stream": True, "stream_options": {"loud": True}}, "stream_options.loud", "unknown_parameter"),
    (CHAT, {"stream": True, "stream_options": []}, "stream_options", "invalid_value"),
    (CHAT, {"logprobs": 5}, "logprobs", "invalid_value"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "invalid_value"),
    (CHAT, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type", "unsupported_parameter"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools.1.function.name", "invalid_value"),
    (CHAT, {"tools": [TOOL]}, "tools", "unsupported_parameter"),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}, "tools", "unsupported_parameter"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools", "unsupported_parameter"),
    (CHAT, {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_value",
    ),
    (CHAT, {"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "min_tokens": 5}, "tool_choice", "invalid_value"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    (CHAT, {"reasoning_effort": "utmost"}, "reasoning_effort", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "unsupported_parameter"),
    ("/v1/completions", {"tools": [TOOL]}, "tools", "unsupported_parameter"),
    ("/v1/completions", {"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    (CHAT, {"guided_json": "{"}, "guided_json", "invalid_value"),
    (CHAT, {"guided_choice": []}, "guided_choice", "invalid_value"),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    (CHAT, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "invalid_value"),
    (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "invalid_value"),
    (CHAT, {"guided_regex": "a", "min_tokens": 2}, "guided_regex", "invalid_value"),
    (CHAT, {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "unsupported_parameter"),
    (CHAT, {"echo": True}, "echo", "unsupported_parameter"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "invalid_value"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    (CHAT, {"cache_salt": ""}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "a\0b"}, "cache_salt", "invalid_value"),
    (CHAT, {"skip_special_tokens": 0}, "skip_special_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"response_format": {}}, "response_format.type", "invalid_value"),
    (CHAT, {"response_format": "json"}, "response_format", "invalid_value"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
    (
        CHAT,
        {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 1}, "response_format", "invalid_value"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format", "invalid_value"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    (CHAT, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "invalid_value"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    (CHAT, {"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice.1", "invalid_value"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    (CHAT, {"structured_outputs": {"json": "[NaN]"}}, "structured_outputs.json", "invalid_value"),
    (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_value"),
    (CHAT, {"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unknown_parameter"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "structured_outputs", "invalid_value"),
    (
        CHAT,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_value",
    ),
    (CHAT, {"min_p": 1.1}, "min_p", "invalid_value"),
    (CHAT, {"min_p": "0.1"}, "min_p", "invalid_value"),
    (CHAT, {"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    (CHAT, {"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    (CHAT, {"repetition_penalty": True}, "repetition_penalty", "invalid_value"),
    (CHAT, {"min_tokens": -1}, "min_tokens", "invalid_value"),
    (CHAT, {"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_value"),
    (CHAT, {"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"-5": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": [[5, 1]]}, "logit_bias", "invalid_value"),
    (CHAT, {"bad_words": "a"}, "bad_words", "invalid_value"),
    (CHAT, {"bad_words": ["a", ""]}, "bad_words.1", "invalid_value"),
    (CHAT, {"bad_words": [5]}, "bad_words.0", "invalid_value"),
    (CHAT, {"bad_words": ["a"] * 1025}, "bad_words", "invalid_value"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    (CHAT, {"allowed_token_ids": [5, -1]}, "allowed_token_ids.1", "invalid_value"),
    (CHAT, {"allowed_token_ids": [5, 10**6]}, "allowed_token_ids", "invalid_value"),
    (CHAT, {"logprob_token_ids": [10**6]}, "logprob_token_ids", "invalid_value"),
    (CHAT, {"logprob_token_ids": [1] * 1025}, "logprob_token_ids", "invalid_value"),
    (CHAT, {"logprob_token_ids": 5}, "logprob_token_ids", "invalid_value"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    (CHAT, {"prompt_logprobs": True}, "prompt_logprobs", "invalid_value"),
    (CHAT, {"reproducible": 1}, "reproducible", "invalid_value"),
    (CHAT, {"prompt": "a"}, "prompt", "unknown_parameter"),
    (CHAT, {"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    (CHAT, {"model": None}, "model", "invalid_value"),
    (CHAT, {"model": 5}, "model", "invalid_value"),
    (CHAT, {"user": 5}, "user", "invalid_value"),
    (CHAT, {"user": "a\0b"}, "user", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, "messages.0.content", "invalid_value"),
    (CHAT, {"metadata": {"a\ud800": "b"}}, "a\ufffd", "invalid_value"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": None}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt.1", "invalid_value"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt.1", "invalid_value"),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt.1", "invalid_value"),
    (COMPLETIONS, {"prompt": [[5], []]}, "prompt.1", "invalid_value"),
    (COMPLETIONS, {"prompt": [[5], 6]}, "prompt.1", "invalid_value"),
    (COMPLETIONS, {"prompt": [5, -6]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [5, 10**30]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [5] * 256}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "invalid_value"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "invalid_value"),
    (COMPLETIONS, {"echo": 1}, "echo", "invalid_value"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "receipt": True}, "receipt", "invalid_value"),
    (COMPLETIONS, {"continue_final_message": True}, "continue_final_message", "unknown_parameter"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of", "unsupported_parameter"),
    (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    (COMPLETIONS, {"messages": HI}, "messages", "unknown_parameter"),
]

MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"model"',
    b"{'model': 'fake'}",
    b'{"model": "fake", "prompt": "a\x00b"}',
    b'{"model": "fake", "prompt": "\xff\xfe"}',
    b'{"model": "fake", "prompt": "\xed\xa0\x80"}',  # a surrogate spelled in UTF-8
    b'{"model": "fake", "prompt": "a", "temperature": NaN}',
    b'{"model": "fake", "prompt": "a", "temperature": -Infinity}',
    b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "fake", "prompt": "\\ud800", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    '{"model": "fake"}'.encode("utf-16"),
    b"model=fake&prompt=a",
    bytes(range(256)),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), WRONG_VALUES)
def test_wrong_values_are_refused_by_name(
    server: Served, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    right: dict[str, Any] = {"model": "fake"} | ({"messages": HI} if path == CHAT else {"prompt": "a"})
    for stream in ({}, {"stream": True}) if "stream" not in fields and "stream_options" not in fields else ({},):
        body = json.dumps(right | stream | fields).encode()
        error = error_of(httpx.post(server.url + path, content=body), 400)
        assert (error["param"], error["code"]) == (param, code), error
        assert error["type"] == "invalid_request_error"
    assert server.source.requests == []


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_bodies_are_refused(server: Served, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        error = error_of(httpx.post(server.url + path, content=body), 400)
        assert len(error["message"]) < 500
    assert server.source.requests == []


def test_an_overflowing_number_is_refused_by_name(server: Served) -> None:
    body = b'{"model": "fake", "prompt": "a", "temperature": 1e999}'
    assert error_of(httpx.post(server.url + COMPLETIONS, content=body), 400)["param"] == "temperature"


def test_a_wrong_model_is_404(server: Served) -> None:
    error = error_of(server.post(COMPLETIONS, model="gpt-9", prompt="a"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "served: fake." in error["message"]


def test_missing_fields_are_named(server: Served) -> None:
    assert error_of(server.post(COMPLETIONS, prompt="a"), 400)["param"] == "model"
    assert error_of(server.post(COMPLETIONS, model="fake"), 400)["param"] == "prompt"
    assert error_of(server.post(CHAT, model="fake"), 400)["param"] == "messages"


def test_context_errors_state_the_numbers(server: Served) -> None:
    message = error_of(server.post(COMPLETIONS, model="fake", prompt=[5] * 200, max_tokens=57), 400)["message"]
    assert all(number in message for number in ("256", "200", "57", "56"))


def test_a_body_longer_than_the_limit_is_413_declared_or_not(serve_fake: ServeFake) -> None:
    server = serve_fake(Limits(max_body_bytes=1000))
    body = json.dumps({"model": "fake", "prompt": "a" * 2000}).encode()
    assert error_of(httpx.post(server.url + COMPLETIONS, content=body), 413)["code"] == "body_too_large"
    chunked = httpx.post(server.url + COMPLETIONS, content=iter([body[:500], body[500:1500], body[1500:]]))
    assert error_of(chunked, 413)["code"] == "body_too_large"
    assert server.post(COMPLETIONS, model="fake", prompt="a").status_code == 200


# ---- paths


@pytest.mark.parametrize(
    ("path", "words"), [("embeddings", "embeddings"), ("assistants", "chat/completions"), ("audio/speech", "audio")]
)
def test_endpoints_of_openai_that_are_not_served_are_named(server: Served, path: str, words: str) -> None:
    assert words in error_of(server.post(f"/v1/{path}", model="fake", input="a"), 400)["message"]


def test_unknown_paths_and_methods_are_reported_in_the_same_form(server: Served) -> None:
    assert error_of(server.post("/v1/nonsense"), 404)["code"] == "not_found"
    assert error_of(httpx.get(server.url + "/"), 404)["code"] == "not_found"
    assert error_of(httpx.get(server.url + "/v1/models/no/such"), 404)["code"] == "model_not_found"
    wrong_method = httpx.get(server.url + CHAT)
    assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    assert error_of(httpx.post(server.url + "/healthz"), 405)["code"] == "method_not_allowed"


def test_models_are_listed_with_their_context(server: Served) -> None:
    models = httpx.get(server.url + "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["fake"]
    assert models["data"][0]["max_model_len"] == 256
    assert httpx.get(server.url + "/v1/models/fake").json() == models["data"][0]


def test_health_and_metrics_are_asked_of_those_who_know(serve_fake: ServeFake) -> None:
    ill = False

    async def health() -> None:
        if ill:
            raise EngineFault("the engine stands still")

    async def metrics() -> tuple[bytes, str]:
        await asyncio.sleep(0)
        return b"up 1\n", "text/plain; version=1.0.0"

    server = serve_fake(operations=Operations(metrics, health))
    for path in ("/healthz", "/health", "/ping"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}
    page = httpx.get(server.url + "/metrics")
    assert (page.content, page.headers["content-type"]) == (b"up 1\n", "text/plain; version=1.0.0")
    ill = True
    response = httpx.get(server.url + "/healthz")
    assert (response.status_code, response.json()) == (503, {"status": "unhealthy"})


def test_without_a_metrics_page_there_is_none(server: Served) -> None:
    error_of(httpx.get(server.url + "/metrics"), 404)


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-123", True), ("a" * 129, False), ("semi;colon", False), ("", False), (None, False)]
)
def test_a_request_id_that_is_no_proper_one_is_replaced(server: Served, sent: str | None, kept: bool) -> None:
    """One that is kept comes back from Ray Serve's proxy (tests/serving/test_tracing_on_ray.py)."""
    headers = {} if sent is None else {"x-request-id": sent}
    for path, body in ((COMPLETIONS, {"model": "fake", "prompt": "a"}), ("/nowhere", {})):
        answered = httpx.post(server.url + path, json=body, headers=headers).headers.get_list("x-request-id")
        assert [one.startswith("req-") for one in answered] == ([] if kept else [True])


# ---- failures and load


def test_an_engine_fault_is_500_without_its_words(server: Served) -> None:
    server.script.fail_at = 2
    error = error_of(server.post(COMPLETIONS, model="fake", prompt="a"), 500)
    assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_fault", None)
    assert "secret" not in error["message"]
    server.script.fail_at = 0
    assert "secret" not in server.post(CHAT, model="fake", messages=HI, stream=True).text


def test_a_fault_while_streaming_is_an_error_event_and_no_done(server: Served) -> None:
    server.script.fail_at = 5
    response = server.post(COMPLETIONS, model="fake", prompt="a", stream=True, ignore_eos=True)
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_fault"
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_no_room_is_429_with_retry_after(serve_fake: ServeFake, stream: bool) -> None:
    server = serve_fake(max_num_seqs=1)
    response = server.post(COMPLETIONS, model="fake", prompt="a", n=2, stream=stream)
    assert error_of(response, 429)["code"] == "engine_overloaded"
    assert response.headers["retry-after"] == "2"
    server.wait_until_idle()


def test_a_stream_is_sent_as_events(server: Served) -> None:
    response = server.post(COMPLETIONS, model="fake", prompt="a", stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["x-request-id"]


def test_events_arrive_while_the_engine_still_works(serve_fake: ServeFake) -> None:
    server = serve_fake(step_s=0.05)
    body = {"model": "fake", "prompt": "a", "stream": True, "max_tokens": 31, "ignore_eos": True, "seed": 1}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.backend.num_live == 1
        assert sum(line.startswith("data: {") for line in lines) == 10
    server.wait_until_idle()


def test_events_of_one_interval_arrive_together(serve_fake: ServeFake) -> None:
    server = serve_fake(limits=Limits(stream_interval_s=1000), step_s=0.05)
    body = {"model": "fake", "prompt": "a", "stream": True, "max_tokens": 31, "ignore_eos": True, "seed": 1}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
        messages = list(response.iter_raw())
    assert messages[0].count(b"data: {") == 1
    assert b"".join(messages[1:]).count(b"data: {") == 10
    assert len(messages) == 2
    server.wait_until_idle()


# ---- clients that leave


SLOW = {"model": "fake", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "n": 2}


def send_raw(server: Served, body: dict[str, Any]) -> socket.socket:
    payload = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head + payload)
    return connection


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read_first", [False, True])
def test_a_client_that_leaves_frees_the_engine(serve_fake: ServeFake, stream: bool, read_first: bool) -> None:
    server = serve_fake(step_s=0.05 if read_first else 1000.0)
    connection = send_raw(server, SLOW | {"stream": stream})
    wait_for(lambda: server.backend.num_live == 2)
    if stream and read_first:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    server.wait_until_idle()  # where steps are slow, before the engine's next one
    assert len(server.backend.aborted) == 2


def test_a_client_that_leaves_amid_the_body_starts_nothing(server: Served) -> None:
    started = server.backend.num_started
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n".encode() + b'{"mod')
    time.sleep(0.05)
    connection.close()
    time.sleep(0.05)
    assert server.backend.num_started == started
    assert server.post(COMPLETIONS, model="fake", prompt="a").status_code == 200


def test_many_clients_at_once_all_get_theirs(server: Served) -> None:
    async def ask_all() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=120) as client:
            bodies = [{"model": "fake", "prompt": [5 + i], "temperature": 0, "max_tokens": 1 + i} for i in range(40)]
            replies = await asyncio.gather(*(client.post(server.url + COMPLETIONS, json=body) for body in bodies))
            return [reply.json() for reply in replies]

    replies = asyncio.run(ask_all())
    assert [reply["usage"]["completion_tokens"] for reply in replies] == list(range(1, 41))
    assert len({reply["id"] for reply in replies}) == 40


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x00" * 99]
)
def test_bytes_that_are_not_http_do_no_harm(server: Served, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(4096)
    assert httpx.get(server.url + "/healthz").status_code == 200
