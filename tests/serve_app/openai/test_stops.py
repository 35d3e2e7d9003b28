"""What ends an answer, how it is reported, and that a stream ends as the whole answer does."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.responses.responses_adapter import ResponsesAdapter
from serve_app.openai.tokens.token_generation import GenerateRequest, prepare_generation
from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest, SequenceTooLong
from speculative.request import Structure
from tests.support.front_ends import DeltaSource, chat, chunks_of, completion, fake_front_end, front_end, info, reply_to

TEXT = "one two three STOP four hello world there"


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("include", [False, True])
async def test_the_stop_string_or_token_is_the_stop_reason(tokenizer: Tokenizer, make: Any, include: bool) -> None:
    """As in vLLM: null for the tokenizer's own end of text and for any other end."""
    front, _, script = fake_front_end(tokenizer)
    ids = tokenizer.encode(TEXT)
    for fields, finish, reason in (
        ({"stop": ["never", " STOP", "STOP"]}, "stop", " STOP"),
        ({"stop": "hello"}, "stop", "hello"),
        ({"stop_token_ids": [ids[3], ids[5]]}, "stop", ids[3]),
        ({}, "stop", None),
        ({"stop_token_ids": [2]}, "stop", None),
        ({"stop_token_ids": [2], "ignore_eos": True}, "stop", 2),
        ({"stop": "never", "max_tokens": 5}, "length", None),
    ):
        script.say(TEXT)
        asked = {"max_tokens": 60, "include_stop_str_in_output": include, **fields}
        (whole,) = (await reply_to(front, make(**asked)))["choices"]
        assert (whole["finish_reason"], whole["stop_reason"]) == (finish, reason), fields
        chunks = await chunks_of(front, make(stream=True, **asked))
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (finish, reason), fields
        assert all(chunk["choices"][0].get("stop_reason") is None for chunk in chunks[:-1])


async def test_another_end_of_text_of_the_model_is_reported(tokenizer: Tokenizer) -> None:
    front, _, script = fake_front_end(tokenizer)
    script.say([*tokenizer.encode("hello"), 0])
    (choice,) = (await reply_to(front, completion(stop_token_ids=[0], return_token_ids=True)))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", 0, "hello")
    assert choice["token_ids"] == [*tokenizer.encode("hello"), 0], "it counts, and has no text"


@pytest.mark.parametrize("run_length", [1, 5, 40])
async def test_streams_and_whole_answers_stop_alike_whichever_strings_a_run_holds(
    tokenizer: Tokenizer, run_length: int
) -> None:
    """Forty sets of strings, several of which may be in one accepted run: text, tokens, logprobs, usage and reason."""
    front, _, script = fake_front_end(tokenizer, run_length=run_length)
    rng, ids = random.Random(run_length), tokenizer.encode(TEXT)
    for _ in range(40):
        places = [(rng.randrange(len(TEXT)), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 6))]
        stops = [TEXT[begin : begin + size] for begin, size in places]
        asked = {"stop": stops, "return_token_ids": True, "logprobs": 1, "max_tokens": 60}
        script.say(TEXT)
        whole = await reply_to(front, completion(**asked))
        (choice,) = whole["choices"]
        chunks = await chunks_of(front, completion(stream=True, stream_options={"include_usage": True}, **asked))
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        ends = min((TEXT.index(stop) + len(stop), -len(stop)) for stop in stops)
        assert choice["text"] == TEXT[: ends[0] + ends[1]] and choice["stop_reason"] in stops
        needed = next(n for n in range(1, len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= ends[0])
        assert choice["token_ids"] == ids[:needed] and len(choice["logprobs"]["tokens"]) == needed
        assert whole["usage"]["completion_tokens"] == needed
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [one for part in parts for one in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", choice["stop_reason"])
        assert chunks[-1]["usage"] == whole["usage"]


# ---- what an engine refuses is refused in the client's words


async def ask(front: FrontEnd, endpoint: str, **fields: Any) -> None:
    if endpoint == "responses":
        body = {"model": "m", "input": "hello", **fields}
        job = await ResponsesAdapter(front).prepare(parse(json.dumps(body).encode(), ResponsesRequest), "")
    elif endpoint == "generate":
        body = {"model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 3, **fields}}
        job = await prepare_generation(front, parse(json.dumps(body).encode(), GenerateRequest))
    else:
        job = await front.prepare(chat(**fields) if endpoint == "chat" else completion(**fields))
    await front.collect(job)


async def refused(front: FrontEnd, endpoint: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await ask(front, endpoint, **fields)
    return caught.value


PROMPT = {"completion": "prompt", "chat": "messages", "responses": "input", "generate": "token_ids"}


async def test_an_id_beyond_the_model_is_a_fault_of_the_field_that_the_client_sent(tokenizer: Tokenizer) -> None:
    """A tokenizer may know more tokens than the model has rows for."""
    for endpoint, field in PROMPT.items():
        small = dataclasses.replace(info(tokenizer), vocab_size=3)
        error = await refused(FrontEnd(DeltaSource(InvalidRequest("n", "")), tokenizer, small), endpoint)
        assert error.field == field and re.match(rf"{field} holds the token id \d+ \('", error.message)


async def test_what_the_engine_refuses_is_named_as_the_endpoint_has_it(tokenizer: Tokenizer) -> None:
    for error in (InvalidRequest("prompt", "prompt is odd."), SequenceTooLong("prompt", "prompt is long.")):
        for endpoint, field in PROMPT.items():
            got = await refused(front_end(DeltaSource(error), tokenizer), endpoint)
            assert (type(got), got.field) == (type(error), field) and got.message.startswith(f"{field} is ")
    for endpoint in PROMPT:
        got = await refused(front_end(DeltaSource(InvalidRequest("request", "Something.")), tokenizer), endpoint)
        assert got.field == ""


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("endpoint", "fields", "field"),
    [
        ("completion", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("completion", {"response_format": SCHEMA}, "response_format"),
        ("chat", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ("chat", {"response_format": SCHEMA}, "response_format"),
        ("chat", TOOLS, "tool_choice"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("generate", {"structured_outputs": {"regex": "("}}, "sampling_params.structured_outputs.regex"),
    ],
)
async def test_a_form_that_the_engine_refuses_is_named_as_it_was_sent(
    tokenizer_folder: Path, tooled: Tokenizer, endpoint: str, fields: dict[str, Any], field: str
) -> None:
    for ends, grammar, why in (((), "start: /a/", "could never end"), ((2,), "start: (", "cannot be used")):
        with pytest.raises(InvalidRequest, match=why) as of_engine:
            StructureCompiler(tokenizer_folder, tooled.vocab_size, ends)(Structure("grammar", grammar))
        front = FrontEnd(DeltaSource(of_engine.value), tooled, info(tooled, 1000))
        got = await refused(front, endpoint, **fields)
        named = "tools" if fields is TOOLS and ends else field  # found before it is sent: the schemas are at fault
        assert got.field == named and why in got.message
