"""A choice is compared with what its client asked for, in the client's own words, as far as the vendor keeps to it."""

import json
from typing import Any, cast

import pytest

from serve_app.referee.wire.demands import Demands, Made, spellings, vllm_spellings
from serve_app.referee.wire.reply import Choice, Reply
from serve_app.referee.wire.vendors import VENDORS
from serve_app.text.tokenizer import Tokenizer

EOS, THINK = 2, 3
SPECIAL = {EOS: "<end>", THINK: "</t>"}


class Letters:
    """A tokenizer with a token for each character."""

    eos_token_id = EOS

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [ord(character) for character in text]

    encode_continuation = encode

    def decode(self, ids: list[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        return "".join(SPECIAL.get(one, chr(one)) for one in ids if not (skip_special and one in SPECIAL))

    def added_id(self, text: str) -> int | None:
        return next((token for token, own in SPECIAL.items() if own == text), None)


LETTERS = cast(Tokenizer, Letters())


class Said:
    """A choice, and what was generated for it: by default its text and what ended it."""

    def __init__(self, text: str, *, reason: str = "stop", ids: str | None = None, **more: Any) -> None:
        self.choice, stop = Choice(text=text, has_text=True, finish_reason=reason, **more), more.get("stopped_by")
        ended = stop if isinstance(stop, str) else chr(EOS) if reason in ("stop", "tool_calls") else ""
        self.choice.token_ids = Letters().encode(text + ended if ids is None else ids)

    def broken(self, body: dict[str, Any], dialect: str = "truespec", *, is_chat: bool = True, **known: Any) -> str:
        demands = Demands.of(body, LETTERS, VENDORS[dialect], is_chat=is_chat)
        return demands.broken(self.choice, Made(self.choice.token_ids or (), (EOS,), **known))


KEEPS = {"include_stop_str_in_output": True}
JSON_FORM = {"response_format": {"type": "json_object"}}
GOES_ON = "its text goes on behind stop string 0, or holds it"
NO_MATCH = "it does not match its regular expression"
ELSEWHERE = "its text ends elsewhere than at the stop string that is said to have ended it"
NO_END = "it is said to have ended by itself, and its last token ends no answer"
OTHER_TEXT = "its text is not that of its tokens"
TYPE = "it breaks `type` of its JSON schema"


def json_form(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


NULL_FORM = json_form({"type": "null"})
TWO_STOPS = {"stop": ["STOP", "HALT"]}
SAME = "the same"


@pytest.mark.parametrize(
    ("body", "said", "found", "of_vllm"),
    [
        ({}, Said("anything"), "", SAME),
        # stop strings
        ({"stop": "END"}, Said("before ", stopped_by="END"), "", SAME),
        ({"stop": "END"}, Said("before END after"), GOES_ON, SAME),
        ({"stop": ["x", "END"]}, Said("before END"), "its text goes on behind stop string 1, or holds it", SAME),
        ({"stop": "END", **KEEPS}, Said("before END", stopped_by="END", ids="before END"), "", SAME),
        ({"stop": "END", **KEEPS}, Said("END after", reason="length"), GOES_ON, SAME),
        ({"stop": "END"}, Said("befor", stopped_by="END", ids="beforeEND"), ELSEWHERE, SAME),
        ({"stop": "END"}, Said("beforeE", stopped_by="END", ids="beforeEND"), ELSEWHERE, SAME),
        ({"stop": "END"}, Said("before", stopped_by="END", ids="before it ends"), ELSEWHERE, SAME),
        ({"stop": "END", **KEEPS}, Said("before", stopped_by="END", ids="beforeEND"), ELSEWHERE, SAME),
        ({"stop": "END"}, Said("so", reasoning="hm", stopped_by="END", ids="hm\3soEND"), "", SAME),
        ({"stop": "END"}, Said("s", reasoning="hm", stopped_by="END", ids="hm\3soEND"), ELSEWHERE, SAME),
        ({"stop": "hm"}, Said("so", reasoning="hm", ids="hm\3so\2"), GOES_ON, SAME),
        ({"stop": "a", "min_tokens": 3}, Said("abcd"), "", SAME),
        ({"stop": "d", "min_tokens": 3}, Said("abcd e"), GOES_ON, SAME),
        # both came in one step of vLLM, and the first in the list ended the text
        (TWO_STOPS, Said("at HALT and ", stopped_by="STOP"), "", SAME),
        (TWO_STOPS, Said("at HALT and ", stopped_by="HALT"), GOES_ON.replace("0", "1"), SAME),
        ({"stop": [f"{n} " for n in range(51)]}, Said("0 or 8"), GOES_ON, ""),  # more than are searched for
        # ends
        ({}, Said("abcd", ids="abcd"), NO_END, SAME),
        ({"max_tokens": 4}, Said("abcd", ids="abcd"), NO_END, SAME),
        ({"stop_token_ids": [100]}, Said("abc", ids="abcd"), "", SAME),
        ({"stop_token_ids": [100]}, Said("abc", ids="abcd", stopped_by=100), "", SAME),
        ({"max_tokens": 3}, Said("abc"), "it has 4 tokens, and max_tokens is 3", SAME),
        ({}, Said("abcd", reason="length"), "", SAME),  # the server's own limit
        ({"bad_words": ["bx", "cd"]}, Said("abcd"), "a bad word ends with token 3", SAME),
        ({"bad_words": ["bd"]}, Said("abcd"), "", SAME),
        # structure
        (JSON_FORM, Said("[1]"), "it is not a JSON object", SAME),
        ({"response_format": {"type": "text"}}, Said("[1]"), "", SAME),
        (JSON_FORM | {"tools": [{}]}, Said("[1]"), "it is not a JSON object", ""),
        (NULL_FORM, Said("1"), TYPE, SAME),
        (json_form({"type": "null"}, strict=False), Said("1"), TYPE, ""),
        (json_form({"oneOf": [{}, {}]}), Said("1"), "it breaks `oneOf` of its JSON schema", ""),
        (json_form({"anyOf": [{}], "type": "null"}), Said("1"), TYPE, ""),
        (json_form({"anyOf": [{"type": "null"}]}), Said("1"), "it breaks `anyOf` of its JSON schema", SAME),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Said("maybe"), "it is none of its choices", SAME),
        ({"structured_outputs": {"choice": ["yes", "no"]}, "stop": "s"}, Said("ye", stopped_by="s"), "", SAME),
        ({"guided_regex": "[0-9]+"}, Said("12a"), NO_MATCH, SAME),
        ({"guided_regex": "[0-9]+"}, Said("\u0663"), NO_MATCH, SAME),
        ({"guided_regex": r"\d+"}, Said("\u0663"), "", SAME),  # a digit, as Unicode has it
        ({"guided_regex": "[0-9]+", **KEEPS}, Said("12<end>"), "", SAME),  # its last token's text
        ({"guided_regex": "[0-9]+", **KEEPS}, Said("12<end>", reason="length"), NO_MATCH, SAME),
        (JSON_FORM | {"stop_token_ids": [20]}, Said('{"a": 1', ids='{"a": 1\24'), "", SAME),
        (JSON_FORM | {"stop_token_ids": [20]}, Said('{"a": 1', ids="", stopped_by=20), "", SAME),
        (JSON_FORM | {"stop_token_ids": [20]}, Said("[1", ids="[1\24"), "it is not a JSON object", SAME),
    ],
)
def test_what_a_request_demands(body: dict[str, Any], said: Said, found: str, of_vllm: str) -> None:
    assert said.broken(body) == found
    assert said.broken(body, "vllm") == (found if of_vllm == SAME else of_vllm)
    limit = "" if "max_tokens is" not in found else found
    assert said.broken(body, "sglang") == limit, "whose rules are not known"


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_text_of_a_completion_is_that_of_its_tokens(is_chat: bool) -> None:
    for dialect in ("vllm", "truespec"):
        found = "" if is_chat else OTHER_TEXT  # which a parser may have read
        assert Said("one twp", ids="one two\2").broken({}, dialect, is_chat=is_chat) == found
        for said in (Said("<end>one", ids="\2one", reason="length"), Said("a\ufffd", ids="a", reason="length")):
            assert said.broken({"ignore_eos": True}, dialect, is_chat=is_chat) == ""


def whole(num: int, num_tokens: int | None = None) -> Reply:
    return Reply(num_tokens=num_tokens, choices={n: Choice(n, token_ids=[5, EOS]) for n in range(num)})


def test_the_number_of_choices_and_tokens_is_that_of_the_reply() -> None:
    for body, reply, found in (
        ({}, whole(1, 2), ""),
        ({}, whole(1), ""),
        ({"n": 2}, whole(2, 4), ""),
        ({"n": 2}, whole(1, 2), "1 choices came, and the request demands 2"),
        ({"prompt": [[1], [2]], "n": 2}, whole(3), "3 choices came, and the request demands 4"),
        ({}, whole(1, 5), "its usage counts 5 tokens, and it has 2"),
        ({"n": 2}, whole(2, 2), "its usage counts 2 tokens, and it has 4"),
    ):
        for dialect in ("truespec", "vllm"):
            demands = Demands.of(body, LETTERS, VENDORS[dialect], is_chat=False)
            assert demands.broken_whole(reply) == found


NO_IDS = "it has no token ids, which were asked for"
TOO_FEW = "it has 3 tokens and 2 of the logprobs that were asked for"
ASKED = " tokens that were asked for"
TOP = {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("body", "change", "found"),
    [
        ({"logprobs": True}, {}, ""),
        ({"logprobs": True}, {"logprobs": [-1.0, -1.0]}, TOO_FEW),
        ({"logprobs": True}, {"logprobs": [-1.0, None, -1.0]}, TOO_FEW),
        ({"logprobs": True}, {"logprobs": None}, "it has 3 tokens and 0 of the logprobs that were asked for"),
        ({}, {"logprobs": None, "top_logprobs": None, "scored_logprobs": None, "prompt_logprobs": None}, ""),
        (TOP, {}, ""),
        (TOP | {"top_logprobs": 3}, {}, "a place has 2 of the 3 likeliest" + ASKED),
        (TOP, {"top_logprobs": [[1, 2]] * 2}, "a place has 0 of the 2 likeliest" + ASKED),
        (TOP, {"top_logprobs": [{"a": -1.0}] * 3}, ""),  # two tokens of one text
        (TOP, {"top_logprobs": [{"token_id:1": -1.0}] * 3}, "a place has 1 of the 2 likeliest" + ASKED),
        ({"logprob_token_ids": [7, 8]}, {}, ""),
        ({"logprob_token_ids": [7, 9]}, {}, "the logprobs of some ids that were asked for are not there"),
        ({"prompt_logprobs": 0}, {}, ""),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": None}, "it has no logprobs of its prompt, which were asked for"),
        ({"return_token_ids": True}, {"token_ids": None}, NO_IDS),
        ({}, {"token_ids": None}, ""),
    ],
)
def test_what_was_asked_for_is_there(body: dict[str, Any], change: dict[str, Any], found: str) -> None:
    """One entry that is missing makes the others those of other tokens, maybe."""
    reported: dict[str, Any] = {"logprobs": [-1.0] * 3, "top_logprobs": [[1, 2]] * 3, "prompt_logprobs": [None, {}]}
    said = Said("ab", **reported | {"scored_logprobs": [{7: -1.0, 8: -2.0}] * 3})
    for name, value in change.items():
        setattr(said.choice, name, value)
    assert said.broken(body) == said.broken(body, "vllm") == found


# ---- reasoning

YES = {"structured_outputs": {"choice": ["yes", " yes, sir "]}}
LATE = "it ended before its reasoning did"


@pytest.mark.parametrize(
    ("body", "ids", "content", "found"),
    [
        (YES, "hm\3no", "no", "it is none of its choices"),
        (YES, "hm\3\n\nyes", "\n\nyes", ""),
        (YES, "hm\3 yes, sir ", "yes, sir", ""),  # as some parsers have it
        (JSON_FORM, 'hm\3 {"a": 1}', '{"a": 1}', ""),
        (JSON_FORM, "hm\3[1]", "[1]", "it is not a JSON object"),
        (JSON_FORM, "hm", "", LATE),
        # of what a parser splits elsewhere nobody can say how it was generated
        (JSON_FORM, 'hm\3{"a": "<t>"}', "", ""),
        (JSON_FORM, "hm</t>[1]", "[1]", ""),  # the model spelt it
        (JSON_FORM, "hm\3a\3[1]", "a</t>[1]", ""),
        ({}, "hm", "", ""),
    ],
)
def test_a_structure_is_looked_for_behind_the_reasoning(
    body: dict[str, Any], ids: str, content: str, found: str
) -> None:
    said = Said(content, reasoning="hm", ids=f"{ids}\2")
    assert said.broken(body, mark="</t>") == found
    assert said.broken(body) == said.broken(body, "vllm") == "", "where that is not known"


@pytest.mark.parametrize(
    ("ids", "content", "found"), [("hm", "", ""), ("hm\3So", "So", "it is not a JSON object"), ('hm\3{"a', '{"a', "")]
)
def test_of_reasoning_that_was_cut_off_nothing_is_demanded(ids: str, content: str, found: str) -> None:
    assert Said(content, reasoning="hm", ids=ids, reason="length").broken(JSON_FORM, mark="</t>") == found


# ---- calls


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = tool("weather", type="object", properties={"city": {"type": "string"}}, required=["city"])
CLOCK = tool("clock", type="object")
TOOLS = {"tools": [CITY, CLOCK]}
REQUIRED = {**TOOLS, "tool_choice": "required"}
NAMED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}


def with_schema(**fields: Any) -> dict[str, Any]:
    known = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], **fields}
    made = {name: value for name, value in known.items() if value is not None}
    return {"tools": [tool("weather", **made)], "tool_choice": "required"}


def listed(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


def calling(calls: list[tuple[str, str]], ids: str, **more: Any) -> Said:
    ended = "\2" if more.get("reason", "stop") == "stop" and "stopped_by" not in more else ""
    return Said("", ids=ids + ended, calls=dict(enumerate(calls)), **more)


LONG_NUMBER = f'{{"city": "", "a": {"1" * 5000}}}'
ROME = ("weather", '{"city": "Rome"}')
BAD = ("weather", '{"town": "x"}')
BROKEN = "the arguments of call 0: it breaks `required` of its JSON schema"
OTHER = "call 0 is of a function that the request does not have called"
NONE_MADE = "it says something else than the calls that the request demands"
ALLOWS = "2 calls were made, and the request allows 1"
BY_ITS_PATH = {"city": {"$ref": "#/properties/b"}, "b": {"type": "string"}}
OF_A = {"properties": {"city": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("body", "calls", "found", "of_vllm"),
    [
        (REQUIRED, [ROME, ("clock", '{"any": [1]}')], "", ""),
        (REQUIRED, [BAD], BROKEN, BROKEN),
        (REQUIRED, [ROME, BAD], BROKEN.replace("0", "1"), SAME),
        (REQUIRED, [("clock", "[]")], "the arguments of call 0: it breaks `type` of its JSON schema", SAME),
        (REQUIRED, [("weather", '{"city": "Ro')], NONE_MADE, ""),
        (REQUIRED, [("wind", "{}")], OTHER, SAME),
        (NAMED, [BAD], BROKEN, SAME),
        (NAMED, [("clock", "{}")], OTHER, SAME),
        # what the model chooses to call is its own
        (TOOLS, [("wind", "nonsense"), ROME], "", ""),
        (TOOLS, [], "", ""),
        # vLLM's versions differ in these
        (REQUIRED | {"parallel_tool_calls": False}, [ROME, ROME], ALLOWS, ""),
        (TOOLS | {"parallel_tool_calls": False}, [ROME, ROME], ALLOWS, ""),
        (TOOLS | {"tool_choice": "none"}, [ROME], "1 calls were made, and the request allows 0", ""),
        ({}, [ROME], "1 calls were made, and the request allows 0", ""),
        # it passes over some keywords, or takes them for more than JSON Schema does
        (with_schema(oneOf=[{"required": ["city"]}]), [BAD], BROKEN, ""),
        (with_schema(required=["land"]), [BAD], BROKEN, ""),
        (with_schema(properties=BY_ITS_PATH), [BAD], BROKEN, ""),
        (with_schema(**{"$defs": {"a": {"type": "null"}}, **OF_A}), [BAD], BROKEN, SAME),
        (with_schema(**{"$defs": {"a": {}}}), [BAD], BROKEN, ""),
        (with_schema(properties={"city": {"minLength": 1}}), [BAD], BROKEN, ""),
        (with_schema(properties={"city": {"type": "integer", "enum": ["x"]}}), [BAD], BROKEN, ""),
        (with_schema(type=None), [BAD], BROKEN, ""),
        (REQUIRED | {"tools": [{"function": CITY["function"] | {"strict": False}}]}, [BAD], BROKEN, ""),
    ],
)
def test_calls_are_those_that_the_request_allows_and_demands(
    body: dict[str, Any], calls: list[tuple[str, str]], found: str, of_vllm: str
) -> None:
    answer = calling(calls, listed(*calls))
    assert answer.broken(body) == found
    assert answer.broken(body, "vllm") == (found if of_vllm == SAME else of_vllm)
    assert answer.broken(body, "sglang") == ""


@pytest.mark.parametrize(
    ("body", "text", "calls", "loses_text", "found"),
    [
        (NAMED, ' {"city": "Rome"}', [ROME], False, ""),
        (NAMED, ROME[1], [], False, NONE_MADE),
        (NAMED, "It rains.", [("weather", "It rains.")], False, NONE_MADE),
        (REQUIRED, "It rains.", [], False, NONE_MADE),
        (REQUIRED, f"[{listed(ROME)[1:-1]}, 5]", [ROME], False, NONE_MADE),
        (REQUIRED, listed(ROME, BAD), [ROME], False, NONE_MADE),
        (REQUIRED, listed(ROME), [("weather", '{"city": "Oslo"}')], False, NONE_MADE),
        (REQUIRED, f"<tool_call>{listed(ROME)}</tool_call>", [ROME], False, NONE_MADE),
        # what the parsers of others leave out, they leave out of any answer
        (REQUIRED, listed(ROME, BAD), [ROME], True, ""),
        (REQUIRED, listed(ROME), [("weather", '{"city": "')], True, ""),
        (NAMED, "[" * 100_000, [BAD], False, ""),  # nested more deeply than is read here
        (NAMED, LONG_NUMBER, [("weather", LONG_NUMBER)], False, ""),
    ],
)
def test_calls_that_had_to_be_made_are_those_that_were_generated(
    body: dict[str, Any], text: str, calls: list[tuple[str, str]], loses_text: bool, found: str
) -> None:
    answer = calling(calls, text)
    answer.choice.text = "" if calls else text
    assert answer.broken(body, loses_text=loses_text) == found
    assert answer.broken(body, "vllm") == "", "whose parser may have read it out of a text that nothing forced"


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([], ""),
        ([ROME, ("weather", '{"ci')], ""),
        ([BAD], ""),  # its end may be what was cut off
        ([("weather", "Rome")], "the arguments of call 0: it is not JSON"),
        ([BAD, ROME], BROKEN),
        ([("wind", "")], OTHER),
    ],
)
def test_of_calls_that_were_cut_off_all_but_the_last_are_whole(calls: list[tuple[str, str]], found: str) -> None:
    for end in ({"stopped_by": "x"}, {"reason": "length"}):
        answer = calling(calls, "as far as it camex", **end)
        answer.choice.text = "" if calls or "reason" in end else "as far as it came"
        assert answer.broken(REQUIRED | {"stop": "x"}) == found


def test_calls_behind_reasoning_that_a_parser_split_elsewhere_are_left_unchecked() -> None:
    for ids, calls, found in (
        (f"hm\3{listed(BAD)}", [BAD], BROKEN),
        (f"hm\3\u2003{listed(ROME)}", [ROME], ""),
        (f"hm\3so\3{listed(BAD)}", [BAD], ""),
        (f"hm</t>{listed(BAD)}", [BAD], ""),
    ):
        assert calling(calls, ids, reasoning="hm").broken(REQUIRED, mark="</t>") == found


def test_all_calls_of_an_answer_share_one_budget() -> None:
    many = tool("many", properties={"a": {"type": "array", "items": {"type": "integer"}}})
    one, wrong = ("many", json.dumps({"a": [1] * 400})), ("many", "[]")
    for number, found in ((3, "the arguments of call 3: it breaks `type` of its JSON schema"), (30, "")):
        calls = [*[one] * number, wrong]
        assert calling(calls, listed(*calls)).broken({"tools": [many], "tool_choice": "required"}) == found


# ---- limits


def test_a_bad_word_is_also_one_behind_a_space() -> None:
    def as_one(text: str) -> list[int]:
        return {"cat": [5], " cat": [6], "dog": [7], " dog": [8, 7]}[text]

    assert spellings("cat", as_one) == vllm_spellings("cat", as_one) == [(5,), (6,)]
    assert spellings(" dog", as_one) == [(7,), (8, 7)]
    assert vllm_spellings(" dog", as_one) == [(7,)], "where that takes as many tokens"
