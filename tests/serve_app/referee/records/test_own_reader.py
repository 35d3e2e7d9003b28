"""Our own replies off the wire, beside the engine's traces: no number, no text and no field is lost unseen."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.requests import WireRequest
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.referee.records.own_reader import OwnReader
from serve_app.text.tokenizer import Tokenizer
from tests.support.front_ends import info
from tests.support.tapped import BODIES, CHAT, COMPLETIONS, GENERATE, RESPONSES, TappedService

LONGEST = 900
TEXT = "one two three STOP four hello ü🙂 world there"
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
TOOL = {"name": "light", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}}
TOOLS, FLAT = [{"type": "function", "function": TOOL}], [{"type": "function", **TOOL}]
CALLS = "".join(
    f'<tool_call>\n{{"name": "light", "arguments": {{"on": {one}}}}}\n</tool_call>' for one in ("true", "false")
)
SHOWN = {"logprobs": 2, "return_token_ids": True, "return_token_kinds": True, "logprob_token_ids": [7, 8]}
TWICE: dict[str, Any] = {"prompt": ["hello", "one two"], "n": 2, "seed": 5}
OF_PROMPT, ONE_CALL = {"prompt_logprobs": 1}, {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200}
UNKNOWN_CALL = CHAT, f'<tool_call>{{"name": "other", "arguments": {{}}}}{CALLS}', ONE_CALL
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (COMPLETIONS, TEXT, {**TWICE, "max_tokens": 40, **OF_PROMPT, **SHOWN}),
    (COMPLETIONS, TEXT, {**TWICE, "max_tokens": 4, "echo": True, "logprobs": 1, "skip_special_tokens": False}),
    (COMPLETIONS, TEXT, {"max_tokens": 40, "stop": ["never", " STOP", "STOP"], "min_tokens": 2, **SHOWN}),
    (COMPLETIONS, TEXT, {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 0}),
    (CHAT, TEXT, {**SHOWN, "logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 2, "max_tokens": 40}),
    (CHAT, TEXT, {"stop": ["hello"], "include_stop_str_in_output": True, "max_tokens": 40}),
    (CHAT, f"I do it{CALLS}", {"tools": TOOLS, "max_tokens": 200, "logprobs": True, "return_token_ids": True}),
    (RESPONSES, TEXT, {"top_logprobs": 2, "max_output_tokens": 5, "instructions": "Be brief.", "temperature": 0.5}),
    (RESPONSES, TEXT, {"stop": "o", "include": ["message.output_text.logprobs"]}),  # in the first token
    (RESPONSES, f"I do it{CALLS}", {"tools": FLAT, "max_output_tokens": 200}),
    (GENERATE, TEXT, {"sampling_params": {"max_tokens": 40, "n": 2, "logprobs": 2, "prompt_logprobs": 1}}),
]
"""Requests, and what the engine says to them."""
FREE = (
    "created system_fingerprint object created_at completed_at type call_id store background refusal annotations error "
    "service_tier tools truncation cache_write_tokens rank summary reproducible_reason effort verbosity"
)
"""What is told of no answer, or by whom else it is judged."""


def made(tokenizer: Tokenizer) -> TappedService:
    reader = OwnReader(info(tokenizer, LONGEST), tokenizer)
    return TappedService(tokenizer, read=reader.answers, max_model_len=LONGEST)


async def asked(service: TappedService, path: str, said: Any, fields: dict[str, Any]) -> None:
    service.script.say(said)
    response = await service.post(path, **fields)
    assert response.status_code == 200, response.text


USAGE: dict[str, Any] = {"include_usage": True}
EACH, ALONE = USAGE | {"continuous_usage_stats": True}, {"continuous_usage_stats": True}


@pytest.mark.parametrize("options", [None, {}, USAGE, EACH, ALONE])
@pytest.mark.parametrize(("path", "said", "fields"), [*CASES, UNKNOWN_CALL])
async def test_sound_replies_agree(
    tooled: Tokenizer, path: str, said: str, fields: dict[str, Any], options: dict[str, Any] | None
) -> None:
    """Whole, and streamed with usage never, at the end and in every chunk."""
    service = made(tooled)
    if options is not None and path != GENERATE:
        fields = fields | {"stream": True} | ({} if path == RESPONSES else {"stream_options": options})
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


# ---- no field of a request may be lost on its way

SCHEMA = {"type": "object"}
EXAMPLES: dict[str, Any] = {
    "max_tokens": 5, "min_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 7,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"7": 1.0},
    "bad_words": ["x"], "allowed_token_ids": [5, 6], "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"}, "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a"],
    "guided_grammar": "start: \"a\"", "reproducible": True, "logprob_token_ids": [7], "prompt_logprobs": 1,
    "truncate_prompt_tokens": 1, "cache_salt": "x", "stop": "two", "stop_token_ids": [7], "ignore_eos": True,
    "stream": True, "return_token_ids": True, "return_token_kinds": True, "skip_special_tokens": False,
    "speculate": False, "priority": 3, "timeout": 5.0, "resume": True, "model": "other", "echo": True,
    "prompt": "world",
    "messages": [{"role": "user", "content": "world"}], "input": "world", "instructions": "Be brief.",
    "max_completion_tokens": 5, "max_output_tokens": 5, "tools": TOOLS, "add_generation_prompt": False,
    "continue_final_message": True, "token_ids": [7, 8], "request_id": "mine", "text": {"format": FORM},
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {  # what a field needs to have an effect, and its own value where that is another
    "truncate_prompt_tokens": {"prompt": "hello world", "truncate_prompt_tokens": 1},
    "return_tokens_as_token_ids": {"logprobs": 1, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    "include_stop_str_in_output": {"stop": "two", "include_stop_str_in_output": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "parallel_tool_calls": {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
}
WITHOUT_EFFECT = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "spaces_between_special_tokens", "max_tool_calls", "store",
}  # fmt: skip
"""Fields that change nothing of what is computed, nor of how it is told."""
JUDGED_ELSEWHERE = {"verify", "receipt"}
"""Fields whose effects are judged by whoever makes them."""
UNSEEN_HERE = {"reasoning_effort", "chat_template_kwargs", "reasoning", "add_special_tokens", "previous_response_id"}
"""Fields that this template and this tokenizer have no use for, or that only the server can follow."""
KINDS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest, RESPONSES: ResponsesRequest}


def fields_of(path: str) -> list[str]:
    kind: type[WireRequest] = KINDS[path]
    unseen = UNSEEN_HERE | {COMPLETIONS: {"parallel_tool_calls"}, RESPONSES: {"stream_options"}}.get(path, set())
    names = [field.alias or name for name, field in kind.model_fields.items() if name not in kind.unsupported]
    return [name for name in names if name not in WITHOUT_EFFECT | JUDGED_ELSEWHERE | unseen]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in KINDS for name in fields_of(path)])
async def test_a_field_that_is_lost_is_missed(tooled: Tokenizer, path: str, name: str) -> None:
    """The engine is asked, and the client answered, as if the field had not been sent."""
    beside = dict(BESIDE.get(name, {}))
    value = beside.pop(name, EXAMPLES.get(name, 2 if path == COMPLETIONS else True))
    others = {COMPLETIONS: {"top_logprobs"}, CHAT: {"prompt"}, RESPONSES: {"logprobs", "max_tokens", "prompt"}}
    beside = {one: given for one, given in beside.items() if one not in others[path]}
    beside |= {"logprobs": True} if path == CHAT and "logprobs" in beside else {}
    if path == RESPONSES:
        value = {"tools": FLAT, "include": ["message.output_text.logprobs"]}.get(name, value)
        beside |= {"tools": FLAT, "max_output_tokens": 300} if "tools" in beside else {}
    said = CALLS if "tools" in beside else [1, *tooled.encode(TEXT)] if name == "skip_special_tokens" else TEXT
    service = made(tooled)
    usual = {"max_tokens": None, "max_output_tokens": None} if name.startswith("max_") else {}
    await asked(service, path, said, {one: given for one, given in usual.items() if one in BODIES[path]} | beside)
    (exchange,), (records,) = service.exchanges, service.records
    sent = json.loads(exchange.request) | {name: value}
    reader = OwnReader(info(tooled, LONGEST), tooled)
    assert {one.wire for one in reader.answers(exchange, records)} == {"agrees"}
    found = reader.answers(replace(exchange, request=json.dumps(sent).encode()), records)
    assert "differs" in {one.wire for one in found}


class Thinking:
    """Parsers of reasoning that ends with `|`."""

    reads_tools, reads_reasoning, keeps_special, thought_end = False, True, False, "|"

    def reading(self, chat: Any, prompt: Any) -> "Thinking":
        return self

    def parser(self) -> Any:
        raise AssertionError("the referee reads no answer with the parsers of the front end")


async def test_reasoning_stays_apart_from_content(tooled: Tokenizer) -> None:
    service, reader = made(tooled), OwnReader(info(tooled, LONGEST), tooled, Thinking())
    for said, reasoning, content, wire in (
        ("one two|three four", "one two", "three four", "agrees"),
        ("one two|three four", "", "one twothree four", "differs"),
        ("one two|three four", "", "one two|three four", "differs"),
        ("one two|three four", "one two", "three", "differs"),
        ("one two|three four", "three four", "one two", "differs"),
        (tooled.encode("one two🙂")[:-1], "one two\ufffd", None, "agrees"),
    ):
        await asked(service, CHAT, said, {"max_tokens": 40})
        reply = json.loads(service.exchanges[-1].reply)
        reply["choices"][0]["message"] |= {"content": content, "reasoning": reasoning}
        other = replace(service.exchanges[-1], reply=json.dumps(reply).encode())
        assert [one.wire for one in reader.answers(other, service.records[-1])] == [wire], content
