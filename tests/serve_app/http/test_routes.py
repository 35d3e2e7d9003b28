import asyncio
import functools
import json
from typing import Any

import httpx
import pytest

from serve_app.backends.base import Pace
from serve_app.http.routes import Operations
from serve_app.openai.asked import Limits
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


# ---- bad input

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG: dict[str, tuple[Any, ...]] = {
    "messages": ([], None, "hi", [*HI, {"role": "system", "content": "late"}]),
    "max_tokens": (-1, 0, 1.5, "5", True, 10**100),
    "max_completion_tokens": (-5,),
    "temperature": (-0.1, "hot", 10**400),
    "top_p": (0, 1.01),
    "top_k": (-2, 2**40),
    "n": (0, 65, [2]),
    "seed": (2**64, -(2**63) - 1, "7"),
    "stop": ("", ["a"] * 17, ["a", 5], {"a": 1}),
    "stop_token_ids": ([10**6], 5),
    "stream": ("yes",),
    "stream_options": ({"include_usage": True},),
    "logprobs": (5,),
    "top_logprobs": (5,),
    "tool_choice": ("required",),
    "reasoning_effort": ("utmost",),
    "guided_json": ("{",),
    "guided_choice": ([],),
    "truncate_prompt_tokens": (0, -2),
    "cache_salt": ("", "a\0b"),
    "skip_special_tokens": (0,),
    "response_format": ("json",),
    "structured_outputs": ({}, {"regex": "a", "choice": ["a"]}),
    "min_p": (1.1, "0.1"),
    "presence_penalty": (2.5,),
    "frequency_penalty": (-2.1,),
    "repetition_penalty": (0, True),
    "min_tokens": (-1,),
    "logit_bias": (
        *({"5": 101}, {"five": 1}, {"-5": 1}, {"9" * 5000: 1}, {"999999": 1}, [[5, 1]]),
        dict.fromkeys(map(str, range(301)), 1),
    ),
    "bad_words": ("a", ["a"] * 1025),
    "allowed_token_ids": ([], [5, 10**6]),
    "logprob_token_ids": ([10**6], [1] * 1025, 5),
    "prompt_logprobs": (21, -1, True),
    "reproducible": (1,),
    "model": (None, 5, "a\0"),
    "user": (5, "a\0b"),
}
"""Values of a chat's fields that are refused by the name of the field."""

FORM = {"type": "json_object"}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
WRONG_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "response_format": FORM}, "response_format"),
    (FORCED | {"min_tokens": 5}, "tool_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "guided_regex"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}},
     "response_format.json_schema.schema"),
    ({"response_format": FORM, "ignore_eos": True}, "response_format"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice.1"),
    ({"structured_outputs": {"json": "[NaN]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORM}, "structured_outputs"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"bad_words": ["a", ""]}, "bad_words.1"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids.1"),
    ({"metadata": {"a\ud800": "b"}}, "a\ufffd"),
]  # fmt: skip
"""Fields of a chat, and what is named of them."""

WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "user"}, "content"),
    ({"role": "user", "content": []}, "content"),
    ({"role": "user", "content": [{"type": "text"}]}, "content.0.text"),
    *(({"role": "user", "content": half}, "content") for half in ("\udc00", "\ud83d")),
    ({"role": "king", "content": "a"}, "role"),
    ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id"),
    ({"role": "user", "content": "a", "reasoning": "b"}, "reasoning"),
    ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "tool_calls.0.function"),
]  # fmt: skip
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": [CALLED]}, "messages.0.tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    (CHAT, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
    (CHAT, {"tools": [TOOL]}, "tools"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
]
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [*HI, {"role": "user", "content": "a", "x": 1}]}, "messages.1.x"),
    (CHAT, {"stream": True, "stream_options": {"loud": True}}, "stream_options.loud"),
    (CHAT, {"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    (CHAT, {"frobnicate": 1}, "frobnicate"),
    (CHAT, {"rehearsal": True}, "rehearsal"),
    (COMPLETIONS, {"messages": HI}, "messages"),
]
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
    (CHAT, {"max_tokens": 100_000}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 256}, "prompt"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": value}, "prompt") for value in ("", [], None, {"a": 1}, ["a", ""], [5, -6], [5, 10**30])),
    *(({"prompt": value}, "prompt.1") for value in (["a", 5], [5, "a"], [5, True], [[5], []], [[5], 6])),
    *(({"logprobs": value}, "logprobs") for value in (21, True)),
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "receipt": True}, "receipt"),
]
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    *((CHAT, {field: value}, field, "invalid_value") for field, values in WRONG.items() for value in values),
    *((CHAT, fields, param, "invalid_value") for fields, param in WRONG_TOGETHER),
    *((CHAT, {"messages": [one]}, f"messages.0.{param}", "invalid_value") for one, param in WRONG_MESSAGES),
    *((COMPLETIONS, fields, param, "invalid_value") for fields, param in WRONG_COMPLETIONS),
    *((*case, "unsupported_parameter") for case in UNSUPPORTED),
    *((*case, "unknown_parameter") for case in UNKNOWN),
    *((*case, "context_length_exceeded") for case in TOO_LONG),
]

MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b'{"model": "fake", "prompt": "a\x00b"}',
    b'{"model": "fake", "prompt": "\xff\xfe"}',
    b'{"model": "fake", "prompt": "\xed\xa0\x80"}',  # a surrogate spelled in UTF-8
    b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "fake", "prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    b'{"model": "fake", "prompt": "\\ud800", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    '{"model": "fake"}'.encode("utf-16"),
    b"model=fake&prompt=a",
    bytes(range(256)),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), REFUSED)
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
    for path in (COMPLETIONS, CHAT, "/v1/responses"):
        error = error_of(httpx.post(server.url + path, content=body), 400)
        assert len(error["message"]) < 500
    assert server.source.requests == []


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
    for path in (CHAT, "/v1/responses"):
        wrong_method = httpx.get(server.url + path)
        assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
        assert wrong_method.headers["allow"] == "POST"
    assert error_of(httpx.post(server.url + "/healthz"), 405)["code"] == "method_not_allowed"
    error_of(httpx.get(server.url + "/metrics"), 404)  # a service that has no such page


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


@pytest.mark.parametrize("stream", [False, True])
def test_no_room_is_429_with_retry_after(serve_fake: ServeFake, stream: bool) -> None:
    server = serve_fake(max_num_seqs=1)
    response = server.post(COMPLETIONS, model="fake", prompt="a", n=2, stream=stream)
    assert error_of(response, 429)["code"] == "engine_overloaded"
    assert response.headers["retry-after"] == "2"
    server.wait_until_idle()


@pytest.mark.parametrize("interval_s", [0, 1000])
def test_events_arrive_while_the_engine_works_and_those_of_one_interval_together(
    serve_fake: ServeFake, interval_s: float
) -> None:
    server = serve_fake(limits=Limits(pace=Pace(interval_s)), step_s=0.05)
    body = {"model": "fake", "prompt": "a", "stream": True, "max_tokens": 31, "ignore_eos": True, "seed": 1}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
        messages = response.iter_raw()
        first = next(messages)
        assert server.backend.num_live == 1
        later = list(messages)
    assert (first + b"".join(later)).count(b"data: {") == 11
    if interval_s:
        assert (first.count(b"data: {"), len(later)) == (1, 1)
    server.wait_until_idle()


STREAMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    COMPLETIONS: ({"prompt": "a", "max_tokens": 4}, ("error", "code")),
    CHAT: ({"messages": HI, "max_tokens": 4}, ("error", "code")),
    "/v1/responses": ({"input": "a", "max_output_tokens": 4}, ("response", "error", "code")),
}
"""The routes that stream: what they are asked, and where the last event names a failure."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_has_its_headers_then_signs_of_life_then_its_events(
    serve_fake: ServeFake, path: str, fails: bool
) -> None:
    server = serve_fake(limits=Limits(keep_alive_s=0.1), step_s=0.35)
    server.source.takes_in, server.script.fail_at = True, 0 if fails else None
    fields, place = STREAMS[path]
    with httpx.stream("POST", server.url + path, json={"model": "fake", "stream": True} | fields) as response:
        assert (response.status_code, server.backend._stats.num_steps) == (200, 0), "headers waited for a token"
        headers = response.headers
        sent = response.read().decode()
    assert headers["content-type"] == "text/event-stream; charset=utf-8" and headers["cache-control"] == "no-cache"
    assert headers["x-request-id"] and "content-length" not in headers
    assert sent.endswith("data: [DONE]\n\n") == (not fails and path != "/v1/responses")
    waited = sent.partition("data:")[0].removesuffix("event: response.created\n")
    assert len(waited.split()) >= 4 and set(waited.split("\n\n")) == {": keep-alive", ""}, "before the first token"
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: {")]
    code = functools.reduce(lambda found, name: (found or {}).get(name), place, events[-1])
    expected = ("server_error" if path == "/v1/responses" else "engine_fault") if fails else None
    assert code == expected
    server.wait_until_idle()
