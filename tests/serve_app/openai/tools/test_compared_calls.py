"""Calls, and content behind reasoning, are compared with the client's own request when they go out.

What a comparison finds is tested in tests/serve_app/referee/wire/test_demands.py; here, that everything is compared.
The engine is a fake that says what a test sets, whatever the request asks for.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from serve_app.backends.base import ParsedDelta
from serve_app.openai.chat.chat_preprocessor import ResponseParser
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.prepared_request import PreparedRequest
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.responses.responses_adapter import ResponsesAdapter
from serve_app.text.tokenizer import Tokenizer
from tests.serve_app.openai.tools.test_tools import FakeParser, FakeParsers, ask, ask_streaming, front
from tests.serve_app.referee.wire.test_demands import BROKEN, NONE_MADE, listed

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": WEATHER}]}
REQUIRED = {**TOOLS, "tool_choice": "required"}
NAMED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
GOOD, BAD = '{"city": "Rome"}', '{"town": "Rome"}'


def noted(end: FrontEnd) -> list[str]:
    found: list[str] = []
    end.report_broken_to(lambda _, why: found.append(why))
    return found


async def reported(end: FrontEnd, **fields: Any) -> list[str]:
    """Return what is reported of the choices of one request, which is the same for a stream."""
    found = noted(end)
    await ask(end, **fields)
    whole = list(found)
    await ask_streaming(end, **fields)
    assert found == whole * 2, "streamed or not"
    return whole


@pytest.mark.parametrize("run_length", [1, 500])
@pytest.mark.parametrize(
    ("fields", "text", "found"),
    [
        (REQUIRED, listed(("weather", GOOD), ("weather", GOOD)), []),
        (REQUIRED, listed(("weather", GOOD), ("weather", BAD)), [BROKEN.replace("0", "1")]),
        (REQUIRED, "It rains.", [NONE_MADE]),
        (REQUIRED | {"n": 2}, listed(("weather", BAD)), [BROKEN] * 2),
        (REQUIRED | {"max_tokens": 3}, listed(("weather", GOOD)), []),
        (NAMED, BAD, [BROKEN]),
        # the model's own calls
        (TOOLS, f'<tool_call>{{"name": "wind", "arguments": {BAD}}}</tool_call>', []),
    ],
)
async def test_calls_that_go_out_are_compared(
    tooled: Tokenizer, run_length: int, fields: dict[str, Any], text: str, found: list[str]
) -> None:
    end, _, script = front(tooled, run_length=run_length)
    script.say(text)
    assert await reported(end, **fields) == found


async def test_calls_that_may_not_be_made_are_reported(tooled: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _, script = front(tooled, FakeParsers(reasoning=True))
    script.say("hm|@weather{};@weather{};")
    one = TOOLS | {"parallel_tool_calls": False}
    none = TOOLS | {"tool_choice": "none"}
    assert await reported(end, **none) == await reported(end, **one) == []
    monkeypatch.setattr(ResponseParser, "allowed", lambda self, calls: tuple(calls))
    assert await reported(end, **none) == ["2 calls were made, and the request allows 0"]
    assert await reported(end, **one) == ["2 calls were made, and the request allows 1"]


@pytest.mark.parametrize(
    ("fields", "text", "found"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "so|\nno", []),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "so", ["it ended before its reasoning did"]),
        ({"response_format": {"type": "json_object"}}, "so|[1]", ["it is not a JSON object"]),
        ({"response_format": {"type": "json_object"}}, "so|[1|]", []),  # where the reasoning ended is not certain
        (REQUIRED, "so|" + listed(("weather", BAD)), [BROKEN]),
        (NAMED, f"so|{BAD}", [BROKEN]),
    ],
)
async def test_content_and_calls_behind_reasoning_are_compared(
    tooled: Tokenizer, fields: dict[str, Any], text: str, found: list[str]
) -> None:
    end, _, script = front(tooled, FakeParsers(reasoning=True, end="|"))
    script.say(text)
    assert await reported(end, **fields) == found


@pytest.mark.parametrize(("shown", "found"), [(False, []), (True, ["it is not JSON"])])
async def test_an_end_of_reasoning_that_no_text_shows_is_not_taken_for_one_that_the_model_spelt(
    tooled: Tokenizer, monkeypatch: pytest.MonkeyPatch, shown: bool, found: list[str]
) -> None:
    """The first end is written letter by letter; the second is the token, which a text may leave out."""
    end = "<|im_start|>"

    class AtText(FakeParser):
        def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
            self._text += text
            reasoning, _, content = self._text.partition(end)
            return ParsedDelta(content, reasoning) if last else ParsedDelta()

    parsers = FakeParsers(reasoning=True, end=end)
    monkeypatch.setattr(parsers, "parser", lambda: AtText(True, []))
    parsers.keeps_special = shown
    front_end, _, script = front(tooled, parsers)
    reports, token = noted(front_end), tooled.added_id(end)
    assert token is not None
    spelt = [*tooled.encode("<|im_"), *tooled.encode("start|>")]
    script.say([*([] if shown else spelt), *tooled.encode(" b"), token, *tooled.encode(" b{}" if shown else "{}")])
    await ask(front_end, response_format={"type": "json_object"})
    assert reports == found


async def test_the_responses_api_is_compared_in_its_own_words(
    tooled: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request counts as it was sent, not as it reached the engine."""
    end, _, script = front(tooled)
    found = noted(end)

    async def prepared(**fields: Any) -> PreparedRequest:
        body = {"model": "fake", "input": "hi", **fields}
        return await ResponsesAdapter(end).prepare(parse(json.dumps(body).encode(), ResponsesRequest), "")

    async def send(**fields: Any) -> list[str]:
        found.clear()
        await end.collect(await prepared(**fields))
        async for _ in end.events(await prepared(stream=True, **fields)):
            pass
        return list(found)

    tools: dict[str, Any] = {"tools": [{"type": "function", "strict": True, **WEATHER}], "tool_choice": "required"}
    form = {"type": "json_schema", "name": "x", "schema": {"type": "null"}}
    script.say(listed(("weather", BAD)))
    assert await send(**tools) == [BROKEN] * 2
    script.say(listed(("weather", GOOD)))
    assert await send(**tools) == []
    assert await send(text={"format": form}) == ["it breaks `type` of its JSON schema"] * 2
    as_chat = ResponsesRequest.as_chat

    def losing(self: ResponsesRequest, conversation: Any) -> ChatCompletionRequest:
        lost = {"tools": None, "tool_choice": None, "response_format": None}
        return as_chat(self, conversation).model_copy(update=lost)

    monkeypatch.setattr(ResponsesRequest, "as_chat", losing)
    script.say("It rains.")
    assert await send(**tools) == [NONE_MADE] * 2
    assert await send(text={"format": form}) == ["it is not JSON"] * 2


async def test_schemas_of_the_tools_are_read_again_off_the_clients_own_words(
    tooled: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, source, script = front(tooled)
    found = noted(end)
    answers = end._chats.answers

    def other(chat: Any, prompt: Any, form: Any) -> ResponseParser | None:
        function = {**WEATHER, "parameters": {"type": "object"}}
        return answers(replace(chat, tools=({"type": "function", "function": function},)), prompt, form)

    monkeypatch.setattr(end._chats, "answers", other)
    script.say(BAD)
    await ask(end, **NAMED)
    assert "city" not in str(source.requests[0].params.structure) and found == [BROKEN]
