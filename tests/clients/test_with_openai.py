"""OpenAI's SDK for Python: completions and chat, whole and streamed, logprobs, structured output, tools, errors."""

import json

import openai
import pytest
from pydantic import BaseModel, ConfigDict

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A small model ends an object only where nothing more is allowed in it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    country: str


@pytest.fixture(scope="module")
def client(api: str):
    with openai.OpenAI(base_url=api, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_chat_stream_equals_whole_answer(client: openai.OpenAI, model: str) -> None:
    """chat, whole, streamed and by the stream helper, with the one model that is listed"""
    assert [one.id for one in client.models.list()] == [model]
    asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "stop"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        chunks[-1].usage.prompt_tokens,
        chunks[-1].usage.completion_tokens,
    )
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 1 and "".join(deltas) == final.choices[0].message.content == text


def test_legacy_completions(client: openai.OpenAI, model: str) -> None:
    """completions with several prompts, `n` and logprobs"""
    made = client.completions.create(
        model=model, prompt=["Water is", "The sky is"], max_tokens=8, n=2, temperature=0, logprobs=2
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.choices[0].text == made.choices[1].text != made.choices[2].text
    for choice in made.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        for token, logprob, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert logprob == top[token] == max(top.values())  # greedy


def test_parse(client: openai.OpenAI, model: str) -> None:
    """`parse` into a Pydantic class"""
    made = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=City, temperature=0, max_tokens=80
    )
    assert isinstance(made.choices[0].message.parsed, City)


def test_tools_streamed_and_whole(client: openai.OpenAI, model: str) -> None:
    """forced tool calls, whole and streamed"""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "How warm is it in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == streamed.function.name == "get_weather"
    assert call.function.arguments == streamed.function.arguments
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    assert whole.finish_reason == "tool_calls"


def test_responses(client: openai.OpenAI, model: str) -> None:
    """responses: whole, streamed, parsed, and continued from the one before"""
    asked = {"model": model, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 60}
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text == whole.output_text
    assert client.responses.parse(**asked, text_format=City).output_parsed.name
    following = client.responses.create(**asked | {"input": "And of Italy?"}, previous_response_id=whole.id)
    assert following.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens - 2


def test_responses_call_tools(client: openai.OpenAI, model: str) -> None:
    """responses with tools, whole and streamed"""
    tool = {"type": "function", **WEATHER["function"]}
    asked = {
        "model": model,
        "input": "How warm is it in Paris?",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 80,
    }
    (call,) = client.responses.create(**asked).output
    with client.responses.stream(**asked) as stream:
        (streamed,) = stream.get_final_response().output
    assert (call.type, call.name, call.arguments) == (streamed.type, streamed.name, streamed.arguments)
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "unit"}


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
    ],
    ids=["model", "temperature", "unknown-field"],
)
def test_errors(client: openai.OpenAI, model: str, changes: dict, error: type, field: str) -> None:
    """errors as the SDK's classes, with the field's name"""
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, "max_tokens": 4, **changes})
    assert raised.value.type == "invalid_request_error"
    assert raised.value.param == field
    assert field in raised.value.message
