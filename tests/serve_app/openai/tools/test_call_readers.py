"""Calls that a model makes as it likes: each family's format, whole and in any parts, broken, and cut off anywhere."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.backends.base import CallPart
from serve_app.openai.replies import put_together
from serve_app.openai.tools.call_readers import FreeCalls, HermesCalls, LlamaCalls, MistralCalls, XmlCalls
from serve_app.openai.tools.growing_text import GrowingText, Step

Calls = list[tuple[str, str]]
STRING, NULL = {"type": "string"}, {"type": "null"}
PROPERTIES: dict[str, Any] = {
    "room": STRING, "level": {"type": "integer"}, "share": {"type": "number"}, "on": {"type": "boolean"},
    "colours": {"type": "array"}, "scene": {"anyOf": [STRING, NULL]}, "mode": {"$ref": "#/$defs/mode"}, "any": {},
    "text": {"allOf": [{"$ref": "#/$defs/text"}], "description": "As Pydantic before 2.9 has it."},
    "deep": {"oneOf": [{"allOf": [{"anyOf": [{"$ref": "#/$defs/deep"}]}]}]}, "list": {"type": ["array", "null"]},
    "both": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "array"]}]}, "one": {"const": "1"},
    "loose": {"anyOf": [STRING, {}]}, "may": {"$ref": "#/$defs/text", "nullable": True}, "upper": {"type": "STRING"},
    "never": {"anyOf": [STRING, False]},
}  # fmt: skip
DEFINED = {
    "mode": {"enum": ["1", "2"]}, "text": {"$ref": "#/$defs/a~1b%20c"}, "a/b c": STRING,
    "deep": {"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/deep"}]},
}  # fmt: skip
TOOLS = ({"function": {"name": "light", "parameters": {"properties": PROPERTIES, "$defs": DEFINED}}},)
MARKED = '{"a": "</tool_call> <tool_call>{\\"name\\": \\"x\\"} \\\\\\" }}"}'
DEEP = '{"city": "A\\"}[{\\u00fc ü", "days": [1, {"a": "]"}], "more": {}}'

ONE, OTHER = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {}}'
BOTH = [("a", '{"x": 1}'), ("b", "{}")]
XML = """<tool_call>
<function=light>
<parameter=room>
the "big" one,

2nd floor
</parameter>
<parameter=level>
3
</parameter>
</function>
</tool_call>
<tool_call>
<function=clock>
</function>
</tool_call>"""


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


# format, text, content, calls
READ: list[tuple[type[FreeCalls], str, str, Calls]] = [
    (HermesCalls, hermes(ONE), "", BOTH[:1]),
    (HermesCalls, f"Let me see.\n\n{hermes(ONE, OTHER)}\n", "Let me see.", BOTH),
    (HermesCalls, hermes(f'{{"name": "a", "arguments": {DEEP}}}'), "", [("a", DEEP)]),
    (HermesCalls, hermes(f'{{"name": "a", "arguments": {MARKED}}}'), "", [("a", MARKED)]),
    (HermesCalls, hermes('{"arguments": {"x": 1}, "name": "a"}'), "", BOTH[:1]),
    (HermesCalls, f"<tool_call>[{ONE}, {OTHER}]</tool_call>", "", BOTH),
    (HermesCalls, hermes('{"id": 7, "type": "function", "name": "a", "arguments": "{\\"x\\": 1}"}'), "", BOTH[:1]),
    (HermesCalls, hermes('{"name": "a"}', '{"name": "b", "arguments": null}'), "", [("a", "{}"), ("b", "{}")]),
    (HermesCalls, f"<think>\na <tool_call>?\n</think>\n\n{hermes(ONE)}", "<think>\na <tool_call>?\n</think>", BOTH[:1]),
    (HermesCalls, f"{hermes(ONE)}\nDone.\n", "\nDone.\n", BOTH[:1]),
    (LlamaCalls, '{"name": "a", "parameters": {"x": 1}}', "", BOTH[:1]),
    (LlamaCalls, '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}', "", BOTH),
    (LlamaCalls, 'Yes.\n{"type": "function", "name": "a", "parameters": {"x": 1}}', "Yes.", BOTH[:1]),
    (LlamaCalls, f"Now <|python_tag|>{ONE}\n{OTHER} ok", "Now ok", BOTH),
    (MistralCalls, f'[TOOL_CALLS] [{ONE[:-1]}, "id": "VvvODy9mT"}}, {OTHER}]', "", BOTH),
    (MistralCalls, '[TOOL_CALLS][{"arguments": {"x": 1}, "name": "a"}]', "", BOTH[:1]),
    (MistralCalls, f"Well.[TOOL_CALLS]a[ARGS]{DEEP}[TOOL_CALLS]b[ARGS]{{}}", "Well.", [("a", DEEP), ("b", "{}")]),
    (MistralCalls, '[TOOL_CALLS]a[CALL_ID]VvvODy9mT[ARGS]{"x": 1}[TOOL_CALLS]b{}', "", BOTH),
    (XmlCalls, f"On it.\n\n{XML}", "On it.",
     [("light", '{"room": "the \\"big\\" one,\\n\\n2nd floor", "level": 3}'), ("clock", "{}")]),
    (XmlCalls, "<function=light><parameter=room>x < y</parameter><parameter=on>True</parameter></function>", "",
     [("light", '{"room": "x < y", "on": true}')]),
    # untidy: what closes is missing before the next tag or at the end, blanks are others, text is between
    (XmlCalls, "<tool_call>\n<function=light>\n<parameter=level>\n3\n<parameter=room>\na.md\n</tool_call>", "",
     [("light", '{"level": 3, "room": "a.md"}')]),
    (XmlCalls, "<function=light><parameter=room>a<parameter=level>3</function>\n<function=clock>", "",
     [("light", '{"room": "a", "level": 3}'), ("clock", "{}")]),
    (XmlCalls, "<tool_call><function=light>\n<parameter=room>\na\n<tool_call>\n<function=clock>\n</function>", "",
     [("light", '{"room": "a"}'), ("clock", "{}")]),
    (XmlCalls, "<tool_call>\n<function=light>\n\n<parameter=room>a\n", "", [("light", '{"room": "a"}')]),
    (XmlCalls, "<function=light>\n<parameter=level>3</parameter>\nso\n<parameter=room>a</parameter>\n</function>",
     "\nso\n", [("light", '{"level": 3, "room": "a"}')]),
    (XmlCalls, "<function=light><parameter=room><tool_call> is <parameter=> a </function</parameter></function>.", ".",
     [("light", '{"room": "<tool_call> is <parameter=> a </function"}')]),
    (XmlCalls, f"{hermes(ONE)}\n<tool_call><function=b>{{}}", "", BOTH),
    (HermesCalls, f"<tool_call>{ONE}\n<tool_call>\n{OTHER}", "", BOTH),
    (HermesCalls, '<tool_call>{"name": "a", "arguments": {"x": 1</tool_call>\n.', "\n.", BOTH[:1]),
    (HermesCalls, '<tool_call>{"name": "a", "arguments": {"x": [{"y": 1,\n</tool_call>', "",
     [("a", '{"x": [{"y": 1}]}')]),
    (HermesCalls, '<tool_call>{"arguments": {"x": "\t\\d"}, "name": "a"}', "", [("a", '{"x": "\\t\\\\d"}')]),
    (HermesCalls, hermes('{"name": "a", "arguments": {"x": "1\n\t2"}}'), "", [("a", '{"x": "1\\n\\t2"}')]),
    (HermesCalls, hermes(r'{"name": "a", "arguments": {"x": "\d\u12", "y": "\u00e4\\ \""}}'), "",
     [("a", r'{"x": "\\d\\u12", "y": "\u00e4\\ \""}')]),
    (HermesCalls, hermes('{"name": "a", "arguments": {"x": True, "y": [None, False,], }}'), "",
     [("a", '{"x": true, "y": [null, false] }')]),
    (HermesCalls, hermes("{'name': 'a', 'arguments': {'x': 'it\\'s \"</tool_call>\"', 'y': [True]}}"), "",
     [("a", '{"x": "it\'s \\"</tool_call>\\"", "y": [true]}')]),
    (LlamaCalls, f"[{ONE}, {OTHER}]", "", BOTH),
    (MistralCalls, f"[TOOL_CALLS] [{ONE}\n{OTHER},\n]", "", BOTH),
    *((kind, f"{begin}{ONE}\n{OTHER}{end}", "", BOTH) for kind, begin, end in (
        (HermesCalls, "<tool_call>", "\n</tool_call>"), (MistralCalls, "[TOOL_CALLS] ", ""))),
    (LlamaCalls, f"<|python_tag|>{ONE[:-1]}", "", BOTH[:1]),
    (MistralCalls, f"[TOOL_CALLS] [{ONE}\n[TOOL_CALLS] b \n[ARGS] {{}}", "", BOTH),
    (MistralCalls, '[TOOL_CALLS]a[ARGS]"{\\"x\\": 1}"[TOOL_CALLS] [{"name": "b", "arguments": ""}]', "", BOTH),
    (XmlCalls, f" {XML}".replace("\n<", "\n  <").replace("\n", "\r\n").replace("\r\n  </par", "\r\n</par"), "",
     [("light", '{"room": "the \\"big\\" one,\\r\\n\\r\\n2nd floor", "level": 3}'), ("clock", "{}")]),
]  # fmt: skip


def kept(kind: type[FreeCalls], text: str) -> tuple[type[FreeCalls], str, str, Calls]:
    """A text in which nothing is called."""
    return kind, text, text, []


# What is no call, or stops being one: nothing of it is lost.
BROKEN: list[tuple[type[FreeCalls], str, str, Calls]] = [
    kept(HermesCalls, "a <tool_ call> {"),
    kept(HermesCalls, f" \n{ONE} "),
    kept(HermesCalls, hermes('{"nam": "a"}')),
    kept(HermesCalls, hermes('{"name": "a", "arguments": [1]}')),
    kept(HermesCalls, hermes('{"name": "", "arguments": {}}')),
    (HermesCalls, f"<tool_call>\n{hermes(ONE)}", "<tool_call>\n", BOTH[:1]),
    (HermesCalls, f"{hermes(ONE[:-1])} so", " so", BOTH[:1]),
    (HermesCalls, f"<tool_call>{ONE}}}</tool_call>", "}</tool_call>", BOTH[:1]),
    (HermesCalls, f"<tool_call>[{ONE}, 5]</tool_call>", ", 5]</tool_call>", BOTH[:1]),
    kept(LlamaCalls, '{"name": "Rome", "people": 3}'),
    kept(LlamaCalls, f"It is {ONE}"),
    kept(LlamaCalls, '<|python_tag|>search.call(query="x")'),
    (LlamaCalls, f"{ONE}; and", "; and", BOTH[:1]),
    kept(MistralCalls, "[TOOL_CALLS]"),
    kept(MistralCalls, "[TOOL_CALLS] []"),
    kept(MistralCalls, "[TOOL_CALLS]a b"),
    kept(XmlCalls, "<tool_call>\n<function>"),
    kept(XmlCalls, "<function= >"),
    kept(LlamaCalls, '[{"name": "Rome"}]'),
]


def read(kind: type[FreeCalls], parts: Sequence[str]) -> tuple[str, Calls, list[CallPart]]:
    """Content, calls, and the parts of calls of a text that comes in these parts; its end comes by itself."""
    reader, content, found = kind(TOOLS), "", []
    for said in (*(reader.push(part, last=False) for part in parts), reader.push("", last=True)):
        content += said.content
        found += said.calls
    return content, [(call.name or "", call.arguments) for call in put_together(found)], found


@pytest.mark.parametrize(("kind", "text", "content", "calls"), READ + BROKEN)
def test_calls_are_read_whole_and_however_the_text_is_cut(
    kind: type[FreeCalls], text: str, content: str, calls: Calls
) -> None:
    whole = kind(TOOLS).push(text, last=True)
    assert (whole.content, [(call.name, call.arguments) for call in whole.calls]) == (content, calls)
    for cut in range(len(text) + 1):
        assert read(kind, (text[:cut], text[cut:]))[:2] == (content, calls), text[:cut]
    _, _, parts = read(kind, text)
    assert [part.index for part in parts if part.name is not None] == list(range(len(calls))), "each is named once"
    assert len({part.call_id for part in parts if part.name is not None}) == len(calls)


@pytest.mark.parametrize(("kind", "text"), [case[:2] for case in READ + BROKEN])
def test_a_text_that_is_cut_off_anywhere_reads_the_same_in_any_parts_and_is_not_lost(
    kind: type[FreeCalls], text: str
) -> None:
    for cut in range(len(text)):
        begun = text[:cut]
        whole = kind(TOOLS).push(begun, last=True)
        content, calls, _ = read(kind, begun)
        assert (content, calls) == (whole.content, [(call.name, call.arguments) for call in whole.calls])
        if not calls:
            assert content == begun
        assert all(name in text for name, _ in calls)


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=f>"),
    *("<parameter=room>", "</parameter>", "</function>", '{"name": "f"', '"arguments": ', '"parameters": ', "null"),
    *("{", "}", "[", "]", ", ", ";", '"', "\\", "\n", " ", "x", "1", "ü", '{"name": "f", "parameters": {"a": "}"}}'),
]


@pytest.mark.parametrize("kind", [HermesCalls, LlamaCalls, MistralCalls, XmlCalls])
def test_whatever_a_model_writes_is_read_the_same_whole_and_in_parts(kind: type[FreeCalls]) -> None:
    @settings(max_examples=400, derandomize=True, database=None, deadline=None)
    @given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.sets(st.integers(0, 200), max_size=20))
    def check(text: str, cuts: set[int]) -> None:
        borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        content, calls, _ = read(kind, [text[begin:end] for begin, end in itertools.pairwise(borders)])
        whole = kind(TOOLS).push(text, last=True)
        assert (content, calls) == (whole.content, [(call.name, call.arguments) for call in whole.calls])
        if not calls:
            assert content == text

    check()


def test_names_come_first_and_arguments_as_they_are_written() -> None:
    reader = HermesCalls()
    assert reader.push('Hi <tool_call>{"name": "we', last=False).calls == ()
    assert reader.push('ather", "arguments": ', last=False).calls == ()
    (begun,) = reader.push('{"ci', last=False).calls
    assert (begun.index, begun.name, begun.arguments) == (0, "weather", '{"ci')
    assert reader.push('ty": "Os', last=False).calls == (CallPart(0, 'ty": "Os'),)
    assert reader.push("lo", last=False).calls == (CallPart(0, "lo"),)
    assert reader.push('"}}</tool_call>', last=False).calls == (CallPart(0, '"}'),)
    reader = XmlCalls(TOOLS)
    reader.push("<tool_call>\n<function=light>\n<parameter=room>\n", last=False)
    assert reader.push('a "long', last=False).calls == (CallPart(0, 'a \\"long'),)
    assert reader.push(" text\n", last=False).calls == (CallPart(0, " text"),), (
        "the end of a line may belong to the tag"
    )


@pytest.mark.parametrize("kind", [HermesCalls, LlamaCalls, MistralCalls, XmlCalls])
def test_no_part_of_a_marker_is_shown_before_it_is_known_to_be_none(kind: type[FreeCalls]) -> None:
    for marker in kind.markers[:1]:
        reader = kind()
        assert reader.push(f"So {marker[:-1]}", last=False).content == "So"
        assert reader.push("x", last=False).content == f" {marker[:-1]}x"


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("room", "12", '"12"'),
        ("room", "true", '"true"'),
        ("level", " 12 ", "12"),
        ("level", "twelve", '"twelve"'),
        ("share", "NaN", '"NaN"'),
        ("on", "False", "false"),
        ("colours", '["a", {"b": 1}]', '["a", {"b": 1}]'),
        ("scene", "None", "null"),
        ("scene", "5", '"5"'),
        ("mode", "1", '"1"'),
        ("any", "1", "1"),
        ("any", "one", '"one"'),
        ("unknown", "[1", '"[1"'),
        ("level", "", '""'),
        ("room", "", '""'),
        ("text", "12345", '"12345"'),
        ("deep", "12345", '"12345"'),
        ("one", "1", '"1"'),
        ("both", "1", "1"),
        ("both", "one", '"one"'),
        ("loose", "1", "1"),
        ("level", "NONE", "null"),
        ("on", "TRUE", "true"),
        ("list", '["a", True,]', '["a", true]'),
        ("list", "['a', True]", '["a", true]'),
        *((key, "12345", '"12345"') for key in ("may", "upper", "never")),
        ("may", "null", "null"),
        ("list", "[1,", '"[1,"'),
    ],
)
def test_bare_values_become_json_by_the_functions_schema(key: str, written: str, meant: str) -> None:
    text = f"<tool_call>\n<function=light>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = XmlCalls(TOOLS).push(text, last=True).calls
    assert call.arguments == f'{{"{key}": {meant}}}'
    json.loads(call.arguments)


@pytest.mark.parametrize(
    ("parameters", "meant"),
    [
        ({"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"a": STRING}}}}, '"1"'),
        ({"allOf": [{}, {"properties": {"a": STRING}}], "additionalProperties": True}, '"1"'),
        ({"anyOf": [{"properties": {"b": {"type": "integer"}}}, {"properties": {"a": STRING}}]}, '"1"'),
        ({"additionalProperties": STRING}, '"1"'),
        *(
            ({"properties": {"a": schema}}, "1")  # which says nothing
            for schema in (
                *({"type": 3}, {"$ref": "#/x"}, {"$ref": 1}, {"anyOf": 1}, {"enum": []}, True, {"$ref": "#"}),
                *({"$ref": ref} for ref in ("#/$defs", "#/properties/a/x/0", "https://x.org/y")),
                *({"anyOf": [{"$ref": "#/properties/a"}] * 50}, {"type": [{}], "allOf": 5}),
            )
        ),
    ],
)
def test_an_argument_is_looked_up_wherever_its_schema_stands(parameters: Any, meant: str) -> None:
    tools = ({"function": {"name": "f", "parameters": parameters}},)
    (call,) = XmlCalls(tools).push("<function=f><parameter=a>1</parameter></function>", last=True).calls
    assert call.arguments == f'{{"a": {meant}}}'


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        (HermesCalls, '<tool_call>{"arguments": {'),
        (HermesCalls, '<tool_call>[{"name": "a", "arguments": {}}, {"arguments": {'),
        (HermesCalls, "<tool_call>\n\n"),
        (LlamaCalls, '\n{"parameters": {'),
        (MistralCalls, '[TOOL_CALLS][{"arguments": {'),
        (XmlCalls, "<tool_call><function=f><parameter=any>"),
    ],
)
def test_a_text_is_read_in_steps_that_grow_with_its_length(
    monkeypatch: pytest.MonkeyPatch, kind: type[FreeCalls], piece: str
) -> None:
    """An answer of what looks like calls again and again holds up no other stream."""
    peek, seen = GrowingText.peek, 0

    def counting(text: GrowingText) -> Step[str]:
        nonlocal seen
        seen += 1
        return peek(text)

    monkeypatch.setattr(GrowingText, "peek", counting)
    kind().push(piece * 50, last=True)
    few, seen = seen, 0
    kind().push(piece * 500, last=True)
    assert seen < 11 * few
