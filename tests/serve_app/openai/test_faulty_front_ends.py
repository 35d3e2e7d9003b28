"""Faults between a client's JSON and the engine's request, and between the engine's deltas and the reply's bytes: what
went over the wire shows each, streamed or not, and nothing of a sound front end. Others are in `tools/faults`; fields
that are lost, and whatever is changed in a whole reply, in `test_own_reader.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.openai import plan, replies
from serve_app.openai.chat import chat_preprocessor as chats
from serve_app.openai.choice import ChoiceRun, _Choice
from serve_app.openai.responses import response_objects
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.referee.records.own_reader import OwnReader
from serve_app.text.tokenizer import Tokenizer
from tests.support.front_ends import info
from tests.support.tapped import CHAT, COMPLETIONS, RESPONSES, TappedService

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
TEXT = "one two STOP four"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
CALLED = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
REQUIRED = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required", "max_tokens": 60}


def around(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """A fault in what a function or property gives; `change` takes that, and what the function took."""

    def install(patch: Patch) -> None:
        right = getattr(owner, name)
        if isinstance(right, property):
            get = right.fget
            assert get is not None
            patch.setattr(owner, name, property(lambda self: change(get(self))))
        else:
            patch.setattr(owner, name, lambda *args, **rest: change(right(*args, **rest), *args))

    return install


def of_pieces(change: Callable[[replies.ChoiceDelta], replies.ChoiceDelta]) -> Fault:
    return around(_Choice, "push", lambda piece, *_: piece if piece is None else change(piece))


def count_drafts(usage: replies.Usage, *_: Any) -> replies.Usage:
    return replace(usage, completion_tokens=usage.completion_tokens + usage.rejected_tokens)


def in_events(owner: Any, right: bytes, wrong: bytes) -> Fault:
    return around(owner, "sse_event", lambda event, *_: event.replace(right, wrong))


LOGPROBS = {"logprobs": 1, "return_token_ids": True}
STREAM = {"stream": True}
USED = {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ITEMS = {"tools": [{"type": "function", **WEATHER}], "tool_choice": "required", "max_tokens": 60}
PLAIN, ANY = (COMPLETIONS, CHAT), (COMPLETIONS, CHAT, RESPONSES)
FAULTS: list[tuple[tuple[str, ...], dict[str, Any], str, Fault]] = [
    (ANY, {}, TEXT, of_pieces(lambda piece: piece._replace(text=piece.text.replace("o", "0")))),
    (ANY, {"max_tokens": 2}, TEXT, of_pieces(lambda one: one._replace(finish_reason=one.finish_reason and "stop"))),
    ((COMPLETIONS,), LOGPROBS, TEXT, lambda patch: patch.setattr("serve_app.openai.choice.finite_logprob", abs)),
    (PLAIN, {"seed": 7, "n": 2}, TEXT, lambda patch: patch.setattr(plan, "choice_seed", lambda seed, _: seed)),
    ((RESPONSES,), {}, TEXT, around(ChoiceRun, "usage", count_drafts)),
    (PLAIN, {"seed": 7}, TEXT, around(plan, "Request", lambda one, *_: replace(one, chosen_seed=False))),
    ((CHAT,), REQUIRED, CALLED, of_pieces(lambda piece: piece._replace(calls=piece.calls[1:]))),
    ((CHAT,), REQUIRED, CALLED, around(chats, "ResponseParser", lambda one, *_: replace(one, new_id=str))),
    ((RESPONSES,), ITEMS, CALLED, around(ResponsesRequest, "echo", lambda told, *_: told | {"tools": []})),
    ((CHAT,), STREAM, TEXT, in_events(replies, b'"metadata"', b'"created":1,"metadata"')),
    (PLAIN, STREAM, TEXT, in_events(replies, b'"finish_reason":null', b'"finish_reason":"stop"')),
    (PLAIN, USED, TEXT, in_events(replies, b':1,"total_tokens":', b':1,"total_tokens":1')),
    ((CHAT,), STREAM, TEXT, in_events(replies, b'"role":"assistant",', b"")),
    ((RESPONSES,), STREAM, TEXT, in_events(response_objects, b"output_text.done", b"output_text.end")),
    ((CHAT,), REQUIRED, CALLED.replace("city", "town"), lambda _: None),
]


def served(tokenizer: Tokenizer) -> TappedService:
    reader = OwnReader(info(tokenizer, 900), tokenizer)
    return TappedService(tokenizer, read=reader.answers, max_model_len=900)


async def found(tokenizer: Tokenizer, path: str, fields: dict[str, Any], text: str) -> list[str]:
    """What is said of the reply to a request, and of its stream."""
    service, said = served(tokenizer), list[str]()
    for more in ({}, {"stream": True}):
        service.script.say(text)
        assert (await service.post(path, **fields | more)).status_code == 200
        said.append(max(one.broken_limit for one in service.submitted))
        assert set(service.counted) <= {"agrees", "differs"}
        service.submitted.clear()
    return said


@pytest.mark.parametrize(("paths", "fields", "text", "install"), FAULTS)
async def test_a_fault_is_found_in_what_went_over_the_wire(
    tooled: Tokenizer, monkeypatch: Patch, paths: tuple[str, ...], fields: dict[str, Any], text: str, install: Fault
) -> None:
    for path in paths:
        if "town" not in text:
            assert await found(tooled, path, own_words(path, fields), text) == ["", ""]
        with monkeypatch.context() as patch:
            install(patch)
            assert all(why.startswith("wire: ") for why in await found(tooled, path, own_words(path, fields), text))


def own_words(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the endpoint names them."""
    names = {"max_tokens": "max_output_tokens"} if path == RESPONSES else {}
    return {names.get(name, name): value for name, value in fields.items()}
