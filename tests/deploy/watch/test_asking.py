"""What is added to a request, and to which."""

import json
from typing import Any

import pytest

from deploy.exchange.asking import instrumented, keys_of, read_request
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS
from serve_app.referee.wire.vendors import VENDORS, vendor_of

IDS = {"token_ids", "prompt_token_ids", "response_token_ids", "token_logprobs"}


def added(path: str, fields: dict[str, Any], dialect: str = "vllm", level: int = 0) -> tuple[dict[str, Any], set[str]]:
    asked = read_request(path, json.dumps(fields).encode())
    assert asked is not None
    body, names = instrumented(asked, vendor_of(dialect).extras(path, asked.streamed)[level])
    return json.loads(body), set(keys_of(names))


@pytest.mark.parametrize(("path", "value"), [(COMPLETIONS, 1), (CHAT, True)])
def test_logprobs_and_ids_are_asked_for(path: str, value: object) -> None:
    fields, keys = added(path, {"model": "m", "n": 1})
    assert fields == {"model": "m", "n": 1, "logprobs": value, "return_token_ids": True}
    assert keys == IDS | {"logprobs"}


def test_every_value_of_the_client_stays() -> None:
    body = b'{"logprobs" : false, "a":1e2, "big": 12345678901234567890123, "f": 0.1, "return_token_ids":null}'
    asked = read_request(CHAT, body)
    assert asked is not None
    changed, names = instrumented(asked, vendor_of("vllm").extras(CHAT, False)[0])
    assert changed == b'{"logprobs":true,"a":100.0,"big":12345678901234567890123,"f":0.1,"return_token_ids":true}'
    assert names == ("logprobs", "return_token_ids")


def test_what_a_client_asks_for_stays_its_own() -> None:
    for own, keys in (({"logprobs": 5}, IDS), ({"logprobs": 0, "return_token_ids": True}, set())):
        assert added(COMPLETIONS, own) == ({"return_token_ids": True} | own, keys)


def test_each_dialect_has_its_fields() -> None:
    assert added(CHAT, {}, "llama.cpp")[0] == {"logprobs": True, "top_logprobs": 1}
    assert added(CHAT, {"logprobs": True}, "llama.cpp")[0] == {"logprobs": True}, "its own default of 20 stays"
    assert added(CHAT, {"stream": True}, "sglang")[0] == {"stream": True, "logprobs": True}
    assert added(CHAT, {}, "sglang")[0] == {"logprobs": True, "return_token_ids": True}
    assert added(COMPLETIONS, {}, "trtllm")[0] == {"logprobs": 1}
    for dialect in VENDORS:
        assert vendor_of(dialect).extras(CHAT, False)[-1] == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff{}",
        b'{"echo": true, "logprobs": 1}',
        b'{"use_beam_search": true}',
        b'{"top_logprobs": 2}',
        b'{"prompt_logprobs": 1}',
    ],
)
def test_requests_whose_answer_would_change_are_left_alone(body: bytes) -> None:
    assert read_request(COMPLETIONS, body) is None
    assert read_request("/v1/embeddings", b"{}") is None


def test_requests_with_other_fields_have_other_forms() -> None:
    bodies: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2}, {"tools": [1]}, {"logprobs": True}]
    forms = {asked.form for body in bodies if (asked := read_request(CHAT, json.dumps(body).encode()))}
    assert len(forms) == len(bodies)
    same = [read_request(CHAT, json.dumps({"messages": [text], "temperature": 0.1}).encode()) for text in "ab"]
    assert same[0] is not None and same[1] is not None
    assert same[0].form == same[1].form
