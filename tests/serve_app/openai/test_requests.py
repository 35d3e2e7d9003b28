import contextlib
import json
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.errors import MalformedBody, UnknownParameter, UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.parsing import parse
from serve_app.openai.wire import MAX_LEVELS, UNSUPPORTED, Wire
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from speculative.request import Structure
from tests.serve_app.openai.responses.test_response_items import as_chat
from tests.support.front_ends import chat, completion

MESSAGES = [{"role": "user", "content": "hi"}]


def test_prompts_come_in_four_forms() -> None:
    for sent, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])):
        assert completion(prompt=sent).prompts() == prompts


def test_null_means_the_default() -> None:
    names = set(ChatCompletionRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_field_is_refused_by_name_and_null_is_harmless(name: str) -> None:
    known = {chat: ChatCompletionRequest.model_fields, completion: CompletionRequest.model_fields}
    for make in (make for make, fields in known.items() if name not in fields):
        with pytest.raises(UnsupportedParameter) as caught:
            make(**{name: {"a": 1}})
        assert caught.value.field == name
        assert caught.value.message.startswith(f"{name}: ")
        assert make(**{name: None}) == make()


def test_a_token_has_one_bias() -> None:
    for bias in ({"5": 1, "05": 2}, {"0": 1, "00": 1}):
        with pytest.raises(InvalidRequest, match="must not name a token twice") as caught:
            chat(logit_bias=bias)
        assert caught.value.field == "logit_bias"
    assert chat(logit_bias={"05": 1}).sampling_fields()["logit_bias"] == ((5, 1.0),)


SCHEMA = {"type": "object", "properties": {"a": {"const": "ü"}}}


@pytest.mark.parametrize(
    ("sent", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         Structure("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA}}, Structure("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+", "json": None}, "response_format": {"type": "text"}, "min_tokens": 0},
         Structure("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, Structure("choice", '["yes", "n\\"o"]')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Structure("grammar", "start: /a/")),
    ],
)  # fmt: skip
def test_a_form_is_asked_for_as_openai_and_as_vllm_name_it(sent: Any, structure: Structure | None) -> None:
    assert chat(**sent).structure == completion(**sent).structure == structure
    assert completion(**sent).sampling_fields()["structure"] == structure


def test_a_schema_too_deep_for_text_is_refused_and_not_a_crash() -> None:
    for depth in range(100, 2000, 50):
        body = (
            b'{"model": "m", "prompt": "a", "structured_outputs": {"json": ' + b'{"a":' * depth + b"1" + b"}" * (depth)
        )
        with contextlib.suppress(InvalidRequest):
            assert parse(body + b"}}", CompletionRequest).structure is not None


CHARACTERS = [*map(chr, (*range(32), 127, 0x85, 0x2028, 0xFEFF, 0xFFFF)), "🙂", "\\u0000 is not NUL"]


@pytest.mark.parametrize("character", CHARACTERS)
def test_text_for_the_model_may_hold_any_character(tokenizer: Tokenizer, character: str) -> None:
    text = f"a{character}b"
    assert completion(prompt=text).prompts() == [text]
    assert completion(prompt=[text, "c"], stop=text, bad_words=[text]).stop_strings == (text,)
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].content == text
    assert "".join(tokenizer.token_bytes(token).decode("latin-1") for token in tokenizer.encode(text)) == (
        text.encode().decode("latin-1")
    ), "and the tokenizer takes it as it is"


def test_stop_takes_up_to_sixteen_short_strings() -> None:
    for stop in ("a", ["a"] * 16, ["a" * 1024]):
        assert completion(stop=stop).stop_strings == ((stop,) if isinstance(stop, str) else tuple(stop))
    for stop in ("a" * 1025, ["a", "b" * 1025]):
        with pytest.raises(InvalidRequest, match="at most 1024 characters") as caught:
            completion(stop=stop)
        assert caught.value.field == "stop"


# ---- faults without number

MANY = 3000
UNKNOWN = {f"x{number}": 1 for number in range(MANY)}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "sent", "field"),
    [
        (ChatCompletionRequest, {"messages": [{}] * MANY}, "messages.0.role"),
        (ChatCompletionRequest, {"messages": [MESSAGES[0] | {"content": [{}] * MANY}]}, "messages.0.content.0.type"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "tool_calls": [CALL] + [{}] * MANY}]},
            "messages.0.tool_calls.1.function",
        ),
        (ChatCompletionRequest, {"messages": MESSAGES, "tools": [{}] * MANY}, "tools"),
        (ChatCompletionRequest, {"messages": MESSAGES} | UNKNOWN, "x0"),
        (CompletionRequest, {"prompt": [[1]] + [["a"] * 10] * MANY}, "prompt.1.0"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}, "stop"),
        (CompletionRequest, {"prompt": "a", "logit_bias": UNKNOWN}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", "structured_outputs": UNKNOWN}, "structured_outputs.x0"),
    ],
)  # fmt: skip
def test_of_faults_without_number_few_are_collected(kind: type[Wire], sent: dict[str, Any], field: str) -> None:
    """Each takes memory and time, and only the first is reported."""
    body = {"model": "m"} | sent
    with pytest.raises(ValidationError) as collected:
        kind.model_validate(body)
    assert collected.value.error_count() < 10
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(body).encode(), kind)
    assert caught.value.field == field


# ---- names that clients make up


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"<text>": 1}, "<text>"),
        ({"messages": [MESSAGES[0] | {"<text>": 1}]}, "messages.0.<text>"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "<parts>": 1}]}]},
         "messages.0.content.0.<parts>"),
        ({"y" * 10_000: 1}, "y" * 100),
        ({"stream": True, "stream_options": {"<" * 10_000: 1}}, "stream_options." + "<" * 100),
    ],
)  # fmt: skip
def test_an_unknown_field_is_reported_by_its_own_name(sent: dict[str, Any], field: str) -> None:
    with pytest.raises(UnknownParameter) as caught:
        chat(**sent)
    assert caught.value.field == field
    assert f"'{field}'" in caught.value.message


@pytest.mark.parametrize("value", [None, [], {}])
def test_fields_that_ask_nothing_are_accepted_wherever_clients_put_them(value: Any) -> None:
    """`top_logprobs: 0` and what frameworks add or send back; other unknown fields, if they are empty; and an answer as
    the client library dumps it."""
    dumped = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    more = {"x": value, "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}}
    more |= {"reasoning_details": [{"text": "hm"}], "finish_reason": "stop"}
    part, function = {"type": "text", "text": "a", **more}, {"name": "f", "parameters": {"type": "object"}}
    said = {"role": "assistant", "content": "b", "tool_calls": [CALL | more], **more}
    tools = [{"type": "function", "function": function | more, **more}]
    messages = [{"role": "user", "content": [part], **more}, said | dumped]
    plain = chat(messages=[{"role": "user", "content": "a"}, said | {"tool_calls": [CALL]}], tools=tools)
    sent = chat(messages=messages, tools=tools, top_logprobs=0, logprobs=False, stream_options=None, **more)
    assert sent.chat_prompt() == plain.chat_prompt() and sent.num_logprobs is None
    assert tools[0]["function"] != sent.chat_prompt().tools[0]["function"] == function
    as_chat(input=[{"role": "user", "content": [part | {"type": "input_text"}], **more}], **more)
    for wrong in (0, "", [0], False):
        with pytest.raises(UnknownParameter):
            chat(messages=[MESSAGES[0] | {"y": value, "x": wrong}])


def test_a_name_that_is_no_token_is_not_reported_as_a_path() -> None:
    for name in ("<a>", "<text>", "z" * 10_000):
        with pytest.raises(InvalidRequest, match="token ids as its keys") as caught:
            chat(logit_bias={name: "x"})
        assert caught.value.field == "logit_bias"
    with pytest.raises(InvalidRequest) as caught:
        chat(metadata={"z" * 10_000: "\0"})
    assert caught.value.field == "metadata." + "z" * 100


# ---- what a chat template is given


def called_with(arguments: Any) -> ChatCompletionRequest:
    call = {"type": None, "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"a": ["ä"]}, {"a": ["ä"]}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ('{"a": ["b", {"\\udc00": 1}]}', {"a": ["b", {"\ufffd": 1}]}),
        (nested(MAX_LEVELS + 1), {}),
        (nested(900), {}),
        ('{"a": ' + "[" * 100_000, {}),
        ('{"a": {"x": 1, "x": 2}}', {"a": {"x": 2}}),
        ('{"a": "b\n\t\\d", "c": [True,],}', {"a": "b\n\t\\d", "c": [True]}),
        *(
            (text, json.loads(text))
            for text in ('{"a": "\\ud83d\\ude42 \\\\u0000 \\\\ud800"}', nested(MAX_LEVELS), "{}")
        ),
        *((text, {}) for text in ("", '{"a": ', "[1]", "null", "no", '{"a" 1}', None)),
    ],
)
def test_whatever_a_model_wrote_as_arguments_can_be_sent_back(written: Any, meant: dict[str, Any]) -> None:
    (message,) = called_with(written).chat_prompt().messages[1:]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == json.loads(arguments.text) == meant
    (call,) = as_chat(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": written}]).messages
    assert call.for_template()["tool_calls"][0]["function"]["arguments"] == meant


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_an_answer_that_was_cut_off_in_its_reasoning_can_be_sent_back(content: dict[str, Any]) -> None:
    said = {"role": "assistant", **content, "reasoning": "hm", "tool_calls": [], "refusal": None}
    (message,) = chat(messages=[*MESSAGES, said]).chat_prompt().messages[1:]
    assert message == {"role": "assistant", "content": "", "reasoning": "hm", "reasoning_content": "hm"}
    others = [{"role": "assistant", **content, "refusal": "No."}, {"role": "tool", **content}]
    assert [message["content"] for message in chat(messages=others).chat_prompt().messages] == ["No.", ""]
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", **content}])
    assert caught.value.field == "messages.0.content"


def test_parameters_may_be_nested_some_levels() -> None:
    def tool(levels: int) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": json.loads(nested(levels))}}

    (shown,) = chat(tools=[tool(MAX_LEVELS)]).chat_prompt().tools
    assert shown == tool(MAX_LEVELS)
    for levels in (MAX_LEVELS + 1, 300, 900):
        with pytest.raises(InvalidRequest, match="at most 64 levels") as caught:
            chat(tools=[tool(1), tool(levels)])
        assert caught.value.field == "tools.1.function.parameters"


def test_a_function_may_describe_what_it_returns() -> None:
    # As transformers' get_json_schema writes functions, which TRL sends; a chat template may show it.
    function = {"name": "weather", "return": {"type": "string", "description": "The weather."}}
    (tool,) = chat(tools=[{"type": "function", "function": function}]).tools or ()
    assert tool.for_template() == {"type": "function", "function": function}


BODY = '{"model": "m", "prompt": "a", '


@pytest.mark.parametrize(
    ("rest", "key"),
    [
        ('"temperature": 0, "temperature": 1}', "temperature"),
        ('"logit_bias": {"7": 1, "7": 1}}', "7"),
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
         '{"properties": {"x": {"type": "null", "type": "string"}}}}}}',
         "type"),
        ('"stop": ["a", {"b": 1, "b": 2}]}', "b"),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice_is_refused_by_its_name(rest: str, key: str) -> None:
    with pytest.raises(MalformedBody, match=rf" {key} is given twice in one object"):
        parse((BODY + rest).encode(), CompletionRequest)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    for field in ("temperature", "seed", "max_tokens", "timeout"):
        with pytest.raises(InvalidRequest):
            parse((BODY + f'"{field}": {number}}}').encode(), CompletionRequest)
    with pytest.raises(InvalidRequest):
        parse((BODY + f'"logit_bias": {{"5": {number}}}}}').encode(), CompletionRequest)


def test_numbers_reach_the_engine_as_plain_floats_and_integers_whole() -> None:
    rest = f'"temperature": 1.10, "top_p": 1E-1, "seed": {2**63 - 1}, "logit_bias": {{"7": 1.50}}}}'
    wire = parse((BODY + rest).encode(), CompletionRequest)
    values = [wire.temperature, wire.top_p, (wire.logit_bias or {})["7"]]
    assert [(type(value), value) for value in values] == [(float, 1.1), (float, 0.1), (float, 1.5)]
    assert wire.seed == 2**63 - 1
