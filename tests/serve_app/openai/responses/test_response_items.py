"""Items of the Responses API become chat messages, and errors name the item that is at fault."""

import json
from typing import Any

import pytest

from serve_app.errors import UnknownParameter, UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.parsing import parse
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.wire import UNSUPPORTED_IN_RESPONSES
from speculative.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


def wire(**fields: Any) -> ResponsesRequest:
    return parse(json.dumps({"model": "fake", "input": "hi", **fields}).encode(), ResponsesRequest)


def as_chat(**fields: Any) -> ChatCompletionRequest:
    asked = wire(**fields)
    return asked.as_chat(asked.conversation((), asked.items))


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in as_chat(input=list(items), **fields).messages]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"type": "message", "role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
         {"role": "user", "content": "a\nb"}),
        (
            {
                **{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"},
                "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
            },
            {"role": "assistant", "content": "a"},
        ),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
         {"role": "assistant", "content": "No."}),
        (OUTPUT, {"role": "tool", "content": "rain", "tool_call_id": "c1"}),
        (OUTPUT | {"output": [{"type": "input_text", "text": "a"}]},
         {"role": "tool", "content": "a", "tool_call_id": "c1"}),
    ],
)  # fmt: skip
def test_one_item_is_one_message(item: dict[str, Any], message: dict[str, Any]) -> None:
    assert messages(item) == [message]


def test_what_the_model_said_in_one_turn_is_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": "I look."}
    user = {"role": "user", "content": "Weather?"}
    calls = [CALL, CALL | {"call_id": "c2"}]
    shown = messages(user, thought, said, *calls, OUTPUT, OUTPUT | {"call_id": "c2"}, said, said)
    assert [message["role"] for message in shown] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    turn = shown[1]
    assert (turn["content"], turn["reasoning"]) == ("I look.", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    between = [message["role"] for message in messages(CALL, OUTPUT, CALL, OUTPUT)]
    assert between == ["assistant", "tool", "assistant", "tool"], "a result lies between the turns"


def test_reasoning_is_of_what_follows_it_and_a_message_alone() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"}
    alone = {"role": "assistant", "content": "", "reasoning": "short", "reasoning_content": "short"}
    assert messages({"role": "user", "content": "a"}, thought) == [{"role": "user", "content": "a"}, alone]
    (turn,) = messages(thought, CALL)
    assert turn["reasoning"] == "short"


@pytest.mark.parametrize(
    ("fields", "field", "kind"),
    [
        ({"input": []}, "input", InvalidRequest),
        ({"input": [5]}, "input.0", InvalidRequest),
        ({"input": [{"role": "user"}]}, "input.0.content", InvalidRequest),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role", InvalidRequest),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", UnsupportedParameter),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type", UnsupportedParameter),
        ({"input": [{"type": ["message"], "role": "user", "content": "a"}]}, "input.0.type", InvalidRequest),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0.type", UnsupportedParameter),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input.0.x", UnknownParameter),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", InvalidRequest),
        ({"input": [OUTPUT | {"output": 5}]}, "input.0.output", InvalidRequest),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", UnsupportedParameter),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", InvalidRequest),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type", UnsupportedParameter),
        ({"tool_choice": "any"}, "tool_choice", InvalidRequest),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", InvalidRequest),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", InvalidRequest),
        ({"text": {"verbosity": "high"}}, "text.verbosity", InvalidRequest),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", InvalidRequest),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", InvalidRequest),
        ({"include": ["all"]}, "include", InvalidRequest),
        ({"metadata": {"a": 1}}, "metadata.a", InvalidRequest),
        ({"suffix": "a"}, "suffix", UnsupportedParameter),
        ({"top_logprobs": 21}, "top_logprobs", InvalidRequest),
        ({"loud": True}, "loud", UnknownParameter),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", InvalidRequest),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields: dict[str, Any], field: str, kind: type[InvalidRequest]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(**fields)
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert field.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize("name", UNSUPPORTED_IN_RESPONSES)
def test_an_unsupported_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        wire(**{name: {"a": 1}})
    assert caught.value.field == name and caught.value.message.startswith(f"{name}: ")


def test_what_has_no_effect_is_accepted() -> None:
    wire(
        **{"background": False, "conversation": None, "truncation": "disabled", "n": 1, "store": True, "user": "u"},
        **{"include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "service_tier": "auto", "metadata": {}},
        **{"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"summary": "auto"}},
        **{"parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s", "prompt": None},
        **{"stream": True, "stream_options": {"include_obfuscation": False}},
    )


def test_the_settings_are_those_of_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": None}
    chat = as_chat(
        **{"max_output_tokens": 7, "temperature": 0.5, "seed": 3, "top_k": 4, "speculate": False, "priority": 2},
        **{"text": {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}},
        **{"tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}},
        **{"include": ["message.output_text.logprobs"], "top_logprobs": 2, "parallel_tool_calls": False},
    )
    sent = {
        **{"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        **{"max_completion_tokens": 7, "temperature": 0.5, "seed": 3, "top_k": 4, "speculate": False, "priority": 2},
        **{"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}},
        **{"tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]},
        **{"tool_choice": {"type": "function", "function": {"name": "f"}}, "reasoning_effort": "low"},
        **{"logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False},
    }
    expected = ChatCompletionRequest.model_validate(sent)
    assert chat.chat_prompt() == expected.chat_prompt()
    assert chat.sampling_fields() == expected.sampling_fields()
    assert (chat.num_logprobs, chat.token_budget) == (2, ("max_completion_tokens", 7))
    named = ("seed", "priority", "reasoning_effort", "parallel_tool_calls", "tool_choice")
    assert [getattr(chat, name) for name in named] == [getattr(expected, name) for name in named]


@pytest.mark.parametrize(
    ("include", "top", "num_logprobs"),
    [((), None, None), ((), 0, None), ((), 3, 3), (("message.output_text.logprobs",), None, 0)],
)
def test_to_ask_for_likely_tokens_is_to_ask_for_logprobs(
    include: tuple[str, ...], top: int | None, num_logprobs: int | None
) -> None:
    assert as_chat(include=list(include), top_logprobs=top).num_logprobs == num_logprobs


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("messages.1.tool_calls.1.function.arguments must be", "input.3.arguments must be"),
        ("messages.1.tool_calls: the chat template", "input.2: the chat template"),
        ("messages.0.content is", "instructions.content is"),
        ("messages.2: a", "input.4: a"),
        ("and messages has 9 tokens", "and input has 9 tokens"),
        ("max_completion_tokens may be", "max_output_tokens may be"),
        ("response_format.json_schema and type", "text.format and type"),
        ("tools.3.function.name", "tools.3.name"),
        ("reasoning_effort: none", "reasoning.effort: none"),
    ],
)
def test_what_is_said_of_the_chat_request_is_said_in_the_words_of_this_api(said: str, meant: str) -> None:
    asked = wire(
        instructions="a",
        input=[{"type": "reasoning", "summary": []}, {"role": "assistant", "content": "a"}, CALL, CALL, OUTPUT],
    )
    assert asked.conversation((), asked.items).in_our_words(said) == meant
