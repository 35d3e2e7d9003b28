"""What a client was sent is compared with what it asked for, in its own words."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serve_app.referee.wire.demands import ClientDemands, Delivered, Parsed, spellings, vllm_spellings

EOS = 2


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def said(text: str, *, reason: str = "stop", **more: Any) -> Delivered:
    return Delivered(text, encode(text), reason, **more)


KEEPS = {"include_stop_str_in_output": True}
NULL_FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}}
NULL_TEXT = {"text": {"format": {"type": "json_schema", "name": "x", "schema": '{"type": "null"}'}}}
GOES_ON = "its text goes on behind stop string 0, or holds it"
SHORT = "it ended for its length"
NO_MATCH = "it does not match its regular expression"


@pytest.mark.parametrize(
    ("body", "answer", "found"),
    [
        ({}, said("anything"), ""),
        ({"stop": "END"}, said("before", stop_reason="END"), ""),
        ({"stop": "END"}, said("before END after"), GOES_ON),
        ({"stop": ["x", "END"]}, said("before END"), "its text goes on behind stop string 1, or holds it"),
        ({"stop": "END", **KEEPS}, said("before END", stop_reason="END"), ""),
        ({"stop": "END", **KEEPS}, said("END after", reason="length"), GOES_ON),
        ({"stop": "END"}, said("before", stop_reason="FIN"), "a stop string ended it that the request does not name"),
        ({"stop": "a", "min_tokens": 3}, said("abcd", unsearched=3), ""),
        ({"stop": "d", "min_tokens": 3}, said("abc"), "it ended with 3 tokens, and min_tokens is 3"),
        ({"max_completion_tokens": 3, "max_tokens": 9}, said("abcd"), "it has 4 tokens, and max_tokens is 3"),
        ({"max_tokens": 9}, said("abcd", reason="length"), f"{SHORT} with 4 tokens, and there was room for 9"),
        ({}, said("abcd", reason="length"), ""),  # the server's own limit
        ({"stop_token_ids": [98]}, said("abcd"), "token 1 ends the answer, and others follow"),
        ({"bad_words": ["bx", "cd"]}, said("abcd"), "a bad word ends with token 3"),
        ({"bad_words": ["bd"]}, said("abcd"), ""),
        ({"response_format": {"type": "json_object"}}, said("[1]"), "it is not a JSON object"),
        ({"response_format": {"type": "text"}}, said("[1]"), ""),
        (NULL_FORM, said("1"), "it breaks `type` of its JSON schema"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, said("maybe"), "it is none of its choices"),
        ({"guided_regex": "[0-9]+"}, said("12a"), NO_MATCH),
        ({"max_output_tokens": 3}, said("abcd"), "it has 4 tokens, and max_tokens is 3"),
        (NULL_TEXT, said("1"), "it breaks `type` of its JSON schema"),
        ({"structured_outputs": {"choice": ["yes", "no"]}, "stop": "s"}, said("ye", stop_reason="s"), ""),
        ({"guided_regex": "[0-9]+", **KEEPS}, said("12<end>"), ""),  # its last token's text
        ({"guided_regex": "[0-9]+", **KEEPS}, said("12<end>", reason="length"), NO_MATCH),
    ],
)
def test_what_a_request_demands(body: dict[str, Any], answer: Delivered, found: str) -> None:
    assert ClientDemands.of(body, encode).broken(answer, (EOS,), room=9) == found


# ---- reasoning

THOUGHT = Parsed("no", thought_end="</t>")
TOKEN = replace(THOUGHT, thought_end_id=ord(">"))
JSON_FORM = {"response_format": {"type": "json_object"}}
YES = {"structured_outputs": {"choice": ["yes", " yes, sir "]}}
LATE = "it ended before its reasoning did"


@pytest.mark.parametrize(
    ("body", "text", "parsed", "found"),
    [
        (YES, "hm</t>no", THOUGHT, "it is none of its choices"),
        (YES, "hm</t>\n\nyes", replace(THOUGHT, content="\n\nyes"), ""),
        (YES, "<t>hm</t>\n yes, sir ", replace(THOUGHT, content="yes, sir"), ""),  # as some parsers have it
        (JSON_FORM, 'hm</t> {"a": 1}', replace(THOUGHT, content='{"a": 1}'), ""),
        (JSON_FORM, "[]", Parsed("[]"), "it is not a JSON object"),
        (JSON_FORM, "no</t>", Parsed(""), ""),  # no parser of ours reads reasoning where there is to be none
        (JSON_FORM, "hm", Parsed("", thought_end="</t>"), LATE),
        (JSON_FORM, "hm", Parsed("hm", thought_end="</t>", thought_end_id=1), LATE),
        # of what a parser splits elsewhere nobody can say how it was generated
        (JSON_FORM, "hm</t>[1]", replace(THOUGHT, content="1]"), ""),
        (JSON_FORM, 'hm</t>{"a": "<t>"}', Parsed("", thought_end="</t>"), ""),
        (JSON_FORM, "a </t> b</t>{}", replace(TOKEN, content="b</t>{}"), ""),
        (JSON_FORM, "a </t> b{}", Parsed("b{}", thought_end=None, thought_end_id=ord("b")), ""),
        (JSON_FORM, "a </t>", Parsed("", thought_end=None, thought_end_id=ord("b")), LATE),
        ({}, "hm", Parsed("", thought_end="</t>"), ""),
    ],
)
def test_a_structure_is_looked_for_behind_the_reasoning(
    body: dict[str, Any], text: str, parsed: Parsed, found: str
) -> None:
    assert ClientDemands.of(body, encode).broken(said(text, parsed=parsed), (EOS,)) == found


@pytest.mark.parametrize(
    ("text", "parsed", "found"),
    [
        ("hm", Parsed("", thought_end="</t>"), ""),
        ("hm</t>So", replace(THOUGHT, content="So"), "it is not a JSON object"),
        ("hm</t>So", Parsed("So", thought_end="</t>", thought_end_id=1), ""),  # the model spelt it, and goes on
        ('hm</t>{"a', replace(THOUGHT, content='{"a'), ""),
    ],
)
def test_of_reasoning_that_was_cut_off_nothing_is_demanded(text: str, parsed: Parsed, found: str) -> None:
    assert ClientDemands.of(JSON_FORM, encode).broken(said(text, reason="length", parsed=parsed), (EOS,)) == found


# ---- calls


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = tool("weather", properties={"city": {"type": "string"}}, required=["city"], additionalProperties=False)
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = {"tools": [CITY, CLOCK]}
REQUIRED = {**TOOLS, "tool_choice": "required"}
NAMED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
FLAT = {"tools": [{"type": "function", **CITY["function"]}], "tool_choice": {"type": "function", "name": "weather"}}


def listed(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


LONG_NUMBER = f'{{"city": "", "a": {"1" * 5000}}}'
ROME = ("weather", '{"city": "Rome"}')
BROKEN = "the arguments of call 0: it breaks `required` of its JSON schema"
OTHER = "call 0 is of a function that the request does not have called"
NONE_MADE = "it says something else than the calls that the request demands"


@pytest.mark.parametrize(
    ("body", "calls", "found"),
    [
        (REQUIRED, [ROME, ("clock", '{"any": [1]}')], ""),
        (REQUIRED, [("weather", "{}")], BROKEN),
        (REQUIRED, [ROME, ("weather", '{"town": "Rome"}')], BROKEN.replace("0", "1")),
        (REQUIRED, [("clock", "[]")], "the arguments of call 0: it breaks `type` of its JSON schema"),
        (REQUIRED, [("weather", '{"city": "Ro')], NONE_MADE),
        (REQUIRED, [("wind", "{}")], OTHER),
        (REQUIRED | {"parallel_tool_calls": False}, [ROME, ROME], "2 calls were made, and the request allows 1"),
        (NAMED, [ROME], ""),
        (NAMED, [("weather", "{}")], BROKEN),
        (NAMED, [("clock", "{}")], OTHER),
        (FLAT, [("weather", "{}")], BROKEN),
        # what the model chooses to call is its own
        (TOOLS, [("wind", "nonsense"), ROME], ""),
        (TOOLS, [], ""),
        (TOOLS | {"parallel_tool_calls": False}, [ROME, ROME], "2 calls were made, and the request allows 1"),
        (TOOLS | {"tool_choice": "none"}, [ROME], "1 calls were made, and the request allows 0"),
        ({}, [ROME], "1 calls were made, and the request allows 0"),
    ],
)
def test_calls_are_those_that_the_request_allows_and_demands(
    body: dict[str, Any], calls: list[tuple[str, str]], found: str
) -> None:
    answer = said(listed(*calls), parsed=Parsed("", calls=tuple(calls)))
    assert ClientDemands.of(body, encode).broken(answer, (EOS,)) == found


@pytest.mark.parametrize(
    ("body", "text", "calls", "loses_text", "found"),
    [
        (NAMED, ' {"city": "Rome"}', [ROME], False, ""),
        (NAMED, ROME[1], [], False, NONE_MADE),
        (NAMED, "It rains.", [("weather", "It rains.")], False, NONE_MADE),
        (REQUIRED, "It rains.", [], False, NONE_MADE),
        (REQUIRED, f"[{listed(ROME)[1:-1]}, 5]", [ROME], False, NONE_MADE),
        (REQUIRED, listed(ROME, ("weather", "{}")), [ROME], False, NONE_MADE),
        (REQUIRED, listed(ROME), [("weather", '{"city": "Oslo"}')], False, NONE_MADE),
        # what the parsers of others leave out, they leave out of any answer
        (REQUIRED, listed(ROME, ("weather", "{}")), [ROME], True, ""),
        (REQUIRED, listed(ROME), [("weather", '{"city": "')], True, ""),
        (NAMED, "[" * 100_000, [("weather", "{}")], False, ""),  # nested more deeply than is read here
        (NAMED, LONG_NUMBER, [("weather", LONG_NUMBER)], False, ""),
    ],
)
def test_calls_that_had_to_be_made_are_those_that_were_generated(
    body: dict[str, Any], text: str, calls: list[tuple[str, str]], loses_text: bool, found: str
) -> None:
    answer = said(text, parsed=Parsed("", calls=tuple(calls), loses_text=loses_text))
    assert ClientDemands.of(body, encode).broken(answer, (EOS,)) == found


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([], ""),
        ([ROME, ("weather", '{"ci')], ""),
        ([("weather", "{}")], ""),  # its end may be what was cut off
        ([("weather", "Rome")], "the arguments of call 0: it is not JSON"),
        ([("weather", "{}"), ROME], BROKEN),
        ([("wind", "")], OTHER),
    ],
)
def test_of_calls_that_were_cut_off_all_but_the_last_are_whole(calls: list[tuple[str, str]], found: str) -> None:
    by_stop = said("as far as it came", stop_reason="x", parsed=Parsed("", calls=tuple(calls)))
    for answer in (by_stop, replace(by_stop, stop_reason=None, finish_reason="length")):
        assert ClientDemands.of(REQUIRED | {"stop": "x"}, encode).broken(answer, (EOS,)) == found


def test_calls_behind_reasoning_that_a_parser_split_elsewhere_are_left_unchecked() -> None:
    demands = ClientDemands.of(REQUIRED, encode)
    bad, good = (("weather", "{}"),), f"so</t>{listed(ROME)}"
    thought = Parsed("", bad, loses_text=True, thought_end="</t>")
    assert demands.broken(said(f"hm</t>{listed(*bad)}", parsed=thought), (EOS,)) == BROKEN
    assert demands.broken(said(f"hm</t>\u2003{listed(ROME)}", parsed=replace(thought, calls=(ROME,))), (EOS,)) == ""
    assert demands.broken(said(f"hm</t>{good}", parsed=replace(thought, calls=())), (EOS,)) == ""
    assert demands.broken(said("hm</t>[{}", reason="length", parsed=thought), (EOS,)) == ""


def test_all_calls_of_an_answer_share_one_budget() -> None:
    many = tool("many", properties={"a": {"type": "array", "items": {"type": "integer"}}})
    body = {"tools": [many], "tool_choice": "required"}
    one, wrong = ("many", json.dumps({"a": [1] * 400})), ("many", "[]")
    for number, found in ((3, "the arguments of call 3: it breaks `type` of its JSON schema"), (30, "")):
        calls = (*[one] * number, wrong)
        answer = said(listed(*calls), parsed=Parsed("", calls=calls))
        assert ClientDemands.of(body, encode).broken(answer, (EOS,)) == found


def test_a_bad_word_is_also_one_behind_a_space() -> None:
    def as_one(text: str) -> list[int]:
        return {"cat": [5], " cat": [6], "dog": [7], " dog": [8, 7]}[text]

    assert spellings("cat", as_one) == vllm_spellings("cat", as_one) == [(5,), (6,)]
    assert spellings(" dog", as_one) == [(7,), (8, 7)]
    assert vllm_spellings(" dog", as_one) == [(7,)], "where that takes as many tokens"
