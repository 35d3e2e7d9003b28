"""Our own replies off the wire, beside the engine's traces: nothing that is told may be another, and no sound reply is
accused."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from serve_app.referee.wire.own import OwnReader
from serve_app.text.tokenizer import Tokenizer
from tests.support.front_ends import info
from tests.support.tapped import CHAT, COMPLETIONS, GENERATE, RESPONSES, TappedService

LONGEST = 900
TEXT = "one two three STOP four hello ü🙂 world there"
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"name": "light", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALLS = "".join(
    f'<tool_call>\n{{"name": "light", "arguments": {{"on": {one}}}}}\n</tool_call>' for one in ("true", "false")
)
SHOWN = {"logprobs": 2, "return_token_ids": True, "return_token_kinds": True, "logprob_token_ids": [7, 8]}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (
        COMPLETIONS,
        TEXT,
        {"max_tokens": 40, "prompt": ["hello", "one two"], "n": 2, "seed": 5, "prompt_logprobs": 1, **SHOWN},
    ),
    (COMPLETIONS, TEXT, {"max_tokens": 4, "echo": True, "logprobs": 1, "skip_special_tokens": False}),
    (COMPLETIONS, TEXT, {"max_tokens": 40, "stop": ["never", " STOP", "STOP"], "min_tokens": 2, **SHOWN}),
    (COMPLETIONS, TEXT, {"max_tokens": 0, "echo": True, "logprobs": 1}),
    (CHAT, TEXT, {**SHOWN, "logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 2, "max_tokens": 40}),
    (CHAT, TEXT, {"stop": ["hello"], "include_stop_str_in_output": True, "max_tokens": 40}),
    (CHAT, f"I do it{CALLS}", {"tools": TOOLS, "max_tokens": 200, "logprobs": True}),
    (RESPONSES, TEXT, {"top_logprobs": 2, "max_output_tokens": 5, "instructions": "Be brief.", "temperature": 0.5}),
    (RESPONSES, f"I do it{CALLS}", {"tools": [{"type": "function", **TOOL}], "max_output_tokens": 200}),
    (GENERATE, TEXT, {"sampling_params": {"max_tokens": 40, "n": 2, "logprobs": 2, "prompt_logprobs": 1}}),
]
"""Requests, and what the engine says to them."""
FREE = (
    "created system_fingerprint object created_at completed_at type call_id store background role refusal annotations "
    "error service_tier tool_choice tools truncation reasoning_tokens cache_write_tokens max_tool_calls rank summary "
    "prompt_cache_key safety_identifier decoded_token reproducible reproducible_reason effort verbosity"
)
"""What is told of no answer, or by whom else it is judged."""


def made(tokenizer: Tokenizer) -> TappedService:
    reader = OwnReader(info(tokenizer, LONGEST), tokenizer)
    return TappedService(tokenizer, read=reader.answers, max_model_len=LONGEST)


async def asked(service: TappedService, path: str, said: Any, fields: dict[str, Any]) -> None:
    service.script.say(said)
    response = await service.post(path, **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "said", "fields"), CASES)
async def test_sound_replies_agree(
    tooled: Tokenizer, path: str, said: str, fields: dict[str, Any], streamed: bool
) -> None:
    service = made(tooled)
    if streamed and path != GENERATE:
        fields = fields | {"stream": True} | ({} if path == RESPONSES else {"stream_options": {"include_usage": True}})
    await asked(service, path, said, fields)
    found = [(one.wire, one.broken_limit) for one in service.submitted]
    assert found and set(found) == {("agrees", "")}


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if str(key) not in FREE.split() and (key != "id" or not place):
            yield from leaves(part, (*place, key))
    if place and not isinstance(value, dict):
        yield place


def changed(value: Any, place: tuple[Any, ...]) -> Any:
    """A copy with something else in one place: one more, a letter less, a list without its last."""
    whole = copy.deepcopy(value)
    at = whole
    for key in place[:-1]:
        at = at[key]
    old = at[place[-1]]
    if isinstance(old, bool) or old is None:
        at[place[-1]] = not old
    elif isinstance(old, int | float):
        at[place[-1]] = old + 1
    else:
        at[place[-1]] = old[:-1] if old else ["x"] if isinstance(old, list) else "x"
    return whole


@pytest.mark.parametrize(("path", "said", "fields"), CASES)
async def test_nothing_in_a_reply_may_be_another(
    tooled: Tokenizer, path: str, said: str, fields: dict[str, Any]
) -> None:
    service = made(tooled)
    await asked(service, path, said, fields)
    (exchange,), (records,) = service.exchanges, service.records
    reply = json.loads(exchange.reply)
    reader = OwnReader(info(tooled, LONGEST), tooled)
    unseen = []
    for place in leaves(reply):
        other = replace(exchange, reply=json.dumps(changed(reply, place)).encode())
        if {one.wire for one in reader.answers(other, records)} == {"agrees"}:
            unseen.append(place)
    assert not unseen
