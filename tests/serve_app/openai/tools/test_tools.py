"""Tool calls and reasoning in the front end: what the model is shown, what its answer must be, how it is returned.

The engine is a fake that says what a test sets, and so is the parser of calls that are made freely; vLLM's own are
tested where vLLM is.
"""

import itertools
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_app.backends.base import CallPart, ChatPrompt, ParsedDelta, Parsers
from serve_app.errors import UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.replies import put_together
from serve_app.openai.tools.call_readers import (
    ForcedList,
    FreeCalls,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    NamedCall,
    XmlCalls,
    format_of,
)
from serve_app.openai.tools.forced_calls import behind_thought, call_form
from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault
from speculative.request import Structure
from tests.support.fake_serving import BackendSource, Script, make_backend
from tests.support.front_ends import chat, chunks_of, reply_to

HI = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"name": {"type": "string"}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": 'the "clock"'}}
TOOLS = [WEATHER, CLOCK]
CALLS = [
    ("weather", '{"city": "A\\"}[{", "days": 2}'),
    ('the "clock"', '{"zones": [{"a": "]"}, {}]}'),
    ("weather", '{"city": ""}'),
]
LIST = "[" + ", ".join(f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in CALLS) + "]"


def chat_prompt(use: Any, **fields: Any) -> ChatPrompt:
    named = "weather" if use == "named" else ""
    return ChatPrompt(tuple(HI), tuple(TOOLS), use, named, **fields)


@pytest.fixture(scope="module")
def compiler(tokenizer_folder: Path, tooled: Tokenizer) -> StructureCompiler:
    return StructureCompiler(tokenizer_folder, tooled.vocab_size, tooled.eos_token_ids)


def fits(compiler: StructureCompiler, form: Structure, ids: Sequence[int], end: int) -> bool:
    """Whether the tokens are a whole answer of the form."""
    masks = compiler(form).allowed([], ids)
    return len(masks) == len(ids) + 1 and bool(masks[-1][end])


# ---- the form that forces calls


ANY, ONE, NAMED = chat_prompt("required"), chat_prompt("required", parallel=False), chat_prompt("named")
ROME = '[{"name": "weather", "arguments": {"city": "Rome"}}]'


@pytest.mark.parametrize(
    ("asked", "text", "right"),
    [
        (ANY, LIST, True),
        (ANY, ROME, True),
        (ANY, '[{"name": "weather", "arguments": {"days": 2}}]', False),
        (ANY, '[{"name": "weather", "arguments": {"city": "x", "days": 10}}]', False),
        (ANY, '[{"name": "weather", "arguments": {"city": "x", "more": 1}}]', False),
        (ANY, '[{"name": "wind", "arguments": {}}]', False),
        (ANY, '[{"name": "weather", "arguments": {"city":    "x"}}]', False),
        (ANY, '[{"name": "the \\"clock\\"", "arguments": []}]', False),
        (ANY, "[]", False),
        (ANY, "It rains.", False),
        (ONE, LIST, False),
        (ONE, ROME, True),
        (NAMED, CALLS[0][1], True),
        (NAMED, CALLS[1][1], False),
    ],
)
def test_required_calls_are_calls_of_the_tools(
    compiler: StructureCompiler, tooled: Tokenizer, asked: ChatPrompt, text: str, right: bool
) -> None:
    assert fits(compiler, call_form(asked), tooled.encode(text), tooled.eos_token_ids[0]) == right


@pytest.mark.parametrize(
    "text", ['a // b # c } { " \\ %json /*', "http://x.y/z#a", '🙂 ü \n\t ::= "x"', "|", "%llguidance {}"]
)
def test_names_and_schemas_may_hold_any_text(compiler: StructureCompiler, tooled: Tokenizer, text: str) -> None:
    """None of it is read as a part of the grammar."""
    schema = {"description": text, "properties": {"a": {"const": text}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": text, "parameters": schema}}
    form = call_form(ChatPrompt(tools=(tool,), use="required"))
    answer = json.dumps([{"name": text, "arguments": {"a": text}}], ensure_ascii=False)
    assert fits(compiler, form, tooled.encode(answer), tooled.eos_token_ids[0])
    (call,) = ForcedList().push(answer, last=True).calls
    assert (call.name, json.loads(call.arguments)) == (text, {"a": text})


@pytest.mark.parametrize("end_of_thought", ["</think>", "<|im_start|>"])
@pytest.mark.parametrize("kind", ["required", "json_schema", "json_object", "choice"])
def test_a_form_may_begin_behind_free_reasoning(
    compiler: StructureCompiler, tooled: Tokenizer, end_of_thought: str, kind: str
) -> None:
    """One end is text, and one a token that was added to the vocabulary."""
    forms = {
        "required": (call_form(chat_prompt("required")), LIST),
        "json_schema": (Structure("json_schema", '{"properties": {"a": {"const": 1}}}'), '{"a": 1}'),
        "json_object": (Structure("json_object"), '{"b": [2]}'),
        "choice": (Structure("choice", '["yes", "no"]'), "no"),
    }
    plain, answer = forms[kind]
    ends = tooled.eos_token_ids
    form = behind_thought(plain, end_of_thought, tooled.added_id(end_of_thought), ends)
    thought, end = tooled.encode(f"so <b </thin [] it is{end_of_thought}"), ends[0]
    assert not any(compiler(form).allowed([], thought[:3])[-1][list(ends)])
    assert fits(compiler, form, [*thought, *tooled.encode(f"\n\n{answer}")], end)
    assert fits(compiler, form, [*thought, *tooled.encode(answer)], end)
    assert not fits(compiler, form, [*thought, *tooled.encode(f"\u2003{answer}")], end), "no blank of JSON's"
    assert not fits(compiler, form, tooled.encode(answer), end)
    assert not fits(compiler, form, [*thought, *tooled.encode("I say no more")], end)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_not_every_form_may_begin_behind_reasoning(kind: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        behind_thought(Structure(kind, "start: /a/"), "</think>", None, (2,))
    assert caught.value.field == f"structured_outputs.{kind}"


# ---- reading calls that had to be made


@given(st.sets(st.integers(1, len(LIST) - 1), max_size=30))
@settings(derandomize=True, database=None, deadline=None)
def test_calls_read_the_same_however_the_text_is_cut(cuts: set[int]) -> None:
    borders = [0, *sorted(cuts), len(LIST)]
    reader = ForcedList()
    parts = [
        part
        for begin, end in itertools.pairwise(borders)
        for part in reader.push(LIST[begin:end], last=end == len(LIST)).calls
    ]
    assert [(call.name, call.arguments) for call in put_together(parts)] == CALLS
    assert [part.index for part in parts if part.name is not None] == [0, 1, 2], "each call is named once"
    whole = ForcedList().push(LIST, last=True).calls
    assert [(call.name, call.arguments) for call in whole] == CALLS
    assert len({call.call_id for call in whole}) == 3


def test_a_call_that_is_cut_off_is_reported_as_far_as_it_came() -> None:
    cut = LIST[: LIST.index("zones") + 2]
    (first, second) = ForcedList().push(cut, last=True).calls
    assert first.arguments == CALLS[0][1]
    assert (second.name, second.arguments) == ('the "clock"', '{"zo')
    begun = LIST[: LIST.index("weather") + 2]
    assert ForcedList().push(begun, last=True) == ParsedDelta(begun), "what is no call yet is not lost"
    assert NamedCall("weather").push(' \n{"ci', last=True).calls[0].arguments == '{"ci'
    assert NamedCall("weather").push("", last=True).calls == ()


# ---- what the model is shown


def wire(**fields: Any) -> ChatCompletionRequest:
    return chat(**{"model": "fake", "messages": HI, **fields})


def front(tokenizer: Tokenizer, parsers: Parsers | None = None, **more: Any) -> tuple[FrontEnd, BackendSource, Script]:
    backend, script = make_backend(tokenizer, max_model_len=4096, **more)
    source = BackendSource(backend)
    return FrontEnd(source, tokenizer, backend.info, parsers=parsers), source, script


async def prompt_of(end: FrontEnd, tokenizer: Tokenizer, **fields: Any) -> str:
    job = await end.prepare(wire(**fields))
    return tokenizer.decode(job.head.prompts[0], skip_special=False)


LONG = "hello " * 1000


@pytest.mark.parametrize(
    ("fields", "elsewhere"),
    [
        ({}, False),
        ({"messages": [{"role": "user", "content": LONG}]}, True),
        ({"tools": [CLOCK | {"function": {"name": "f", "parameters": {LONG: 1}}}]}, True),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": LONG}]}, True),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}]}]}, True),
        ({"messages": [{"role": "user", "content": "a"}] * 1000}, True),
    ],
)  # fmt: skip
async def test_whatever_is_long_to_render_is_rendered_beside_the_event_loop(
    tooled: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], elsewhere: bool
) -> None:
    threads: list[threading.Thread] = []

    def encode(_: str) -> list[int]:
        threads.append(threading.current_thread())
        return [5]

    monkeypatch.setattr(tooled, "encode_rendered", encode)
    end, _, _ = front(tooled)
    await end.prepare(wire(**fields, tool_choice="none"))
    assert [thread is not threading.main_thread() for thread in threads] == [elsewhere]


async def test_a_template_that_shows_no_tools_is_no_way_to_serve_them(tokenizer: Tokenizer) -> None:
    end, _, _ = front(tokenizer)
    for choice in ("auto", "required"):
        with pytest.raises(UnsupportedParameter, match=r"model\.chat_template.*chatml-tools") as caught:
            await end.prepare(wire(tools=TOOLS, tool_choice=choice))
        assert caught.value.field == "tools"
    await end.prepare(wire(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}))
    await end.prepare(wire(tools=[], tool_choice="auto"))


# Templates that show tools, and write calls as the families do.
SHOWN = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
OF_FAMILY = {
    HermesCalls: '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    LlamaCalls: '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    MistralCalls: '{% if c.id | length != 9 %}{{ raise_exception("id") }}{% endif %}[TOOL_CALLS] [{{ f | tojson }}]',
    XmlCalls: "<tool_call>\n<function={{ f.name }}>\n</function>\n</tool_call>",
    None: "call:{{ f.name }}",
}


def templated(folder: Path, call: str) -> Tokenizer:
    """A tokenizer whose chat template writes calls so."""
    path = folder / "template.jinja"
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}"
    path.write_text(SHOWN + calls + "{% endfor %}", encoding="utf-8")
    return Tokenizer.from_folder(folder, str(path))


@pytest.fixture
def copied(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "tokenizer"))


@pytest.mark.parametrize("kind", OF_FAMILY)
def test_the_format_of_calls_is_that_of_the_chat_template(copied: Path, kind: type[FreeCalls] | None) -> None:
    assert format_of(templated(copied, OF_FAMILY[kind])) is kind
    assert format_of(templated(copied, "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")) is MistralCalls


async def test_a_named_function_is_judged_by_its_own_schema(tooled: Tokenizer) -> None:
    end, _, _ = front(tooled)
    other = {"type": "function", "function": {"name": "other", "parameters": {"not": {}}}}
    await end.prepare(wire(tools=[other, WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}))
    for choice in ("required", {"type": "function", "function": {"name": "other"}}):
        with pytest.raises(UnsupportedParameter) as caught:
            await end.prepare(wire(tools=[other, WEATHER], tool_choice=choice))
        assert caught.value.field == "tools.0.function.parameters"


async def test_calls_that_nobody_can_read_are_refused_with_the_fix(copied: Path) -> None:
    end, _, _ = front(templated(copied, OF_FAMILY[None]))
    with pytest.raises(UnsupportedParameter) as caught:
        await end.prepare(wire(tools=TOOLS))
    assert caught.value.field == "tools"
    for fix in ("tool_choice = required", "vllm.tool_parser", "model.chat_template", "chatml-tools", "Hermes"):
        assert fix in caught.value.message
    job = await end.prepare(wire(tools=TOOLS, tool_choice="required"))
    assert job.requests[0].params.structure == call_form(chat_prompt("required"))
    by_vllm, _, _ = front(templated(copied, OF_FAMILY[None]), FakeParsers())
    await by_vllm.prepare(wire(tools=TOOLS))


THINKING = (
    "{{ reasoning_effort }}/{{ enable_thinking }}/{{ style }}{% for m in messages %}"
    "{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
)


async def test_a_template_is_reported_how_much_to_reason(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(THINKING)
    tokenizer = Tokenizer.from_folder(tokenizer_folder, str(tmp_path / "t.jinja"))
    end, _, _ = front(tokenizer)
    said = [{"role": "assistant", "content": "b", "reasoning": "a"}, *HI]
    reported = await prompt_of(
        end, tokenizer, reasoning_effort="low", messages=said, chat_template_kwargs={"style": "x"}
    )
    assert reported == "low/True/xabhi"
    assert await prompt_of(end, tokenizer, reasoning_effort="none") == "none/False/hi"
    own = {"enable_thinking": False}
    assert await prompt_of(end, tokenizer, reasoning_effort="low", chat_template_kwargs=own) == "low/False/hi"
    for name in ("tone", "messages", "eos_token"):
        with pytest.raises(UnsupportedParameter, match="enable_thinking, reasoning_effort, style") as caught:
            await end.prepare(wire(chat_template_kwargs={name: "x"}))
        assert caught.value.field == f"chat_template_kwargs.{name}"


# ---- answers


class FakeParser:
    """A fake, of a format of its own: reasoning up to `|`, text, calls as `@name{...};`. It notes what it gets."""

    def __init__(self, thinks: bool, noted: list[tuple[str, tuple[int, ...], bool]]) -> None:
        self._text, self._thinks, self._noted, self._index = "", thinks, noted, 0

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        self._noted.append((text, tuple(token_ids), last))
        if "!" in text:
            raise EngineFault("the parser is at its end")
        said = [self._character(character) for character in text]
        return ParsedDelta(
            "".join(one.content for one in said),
            "".join(one.reasoning for one in said),
            tuple(part for one in said for part in one.calls),
        )

    def _character(self, character: str) -> ParsedDelta:
        if self._thinks:
            self._thinks = character != "|"
            return ParsedDelta(reasoning=character) if self._thinks else ParsedDelta()
        if not self._text and character != "@":
            return ParsedDelta(character)
        self._text += character
        if character != ";":
            return ParsedDelta()
        name, _, rest = self._text[1:-1].partition("{")
        self._text, self._index = "", self._index + 1
        return ParsedDelta(calls=(CallPart(self._index - 1, "{" + rest, name, f"id{self._index}"),))


class FakeParsers:
    def __init__(self, *, tools: bool = True, reasoning: bool = False, end: str | None = "") -> None:
        self.reads_tools, self.reads_reasoning = tools, reasoning
        self.keeps_special, self.thought_end = True, end
        self.noted: list[tuple[str, tuple[int, ...], bool]] = []

    def reading(self, chat: ChatPrompt, prompt: Sequence[int]) -> "FakeParsers":
        return self

    def parser(self) -> FakeParser:
        return FakeParser(self.reads_reasoning, self.noted)


async def ask(end: FrontEnd, **fields: Any) -> dict[str, Any]:
    reply = await reply_to(end, wire(**fields))
    ChatCompletion.model_validate(reply)
    return reply


async def ask_streaming(end: FrontEnd, **fields: Any) -> list[dict[str, Any]]:
    chunks = await chunks_of(end, wire(stream=True, **fields))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def reported(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the chunks of one choice say together, as a message has it."""
    content = reasoning = ""
    parts, reason = [], None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls", ()):
            function = part["function"]
            assert ("name" in function) == ("id" in part) == ("type" in part)
            parts.append(CallPart(part["index"], function["arguments"], function.get("name"), part.get("id")))
    calls = [(call.name, call.arguments) for call in put_together(parts)]
    return {"content": content or None, "reasoning": reasoning, "calls": calls, "reason": reason}


def same_form(reply: dict[str, Any]) -> dict[str, Any]:
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert all(call["id"] and call["type"] == "function" for call in message.get("tool_calls", ()))
    reasoning = message.get("reasoning", "")
    return {"content": message["content"], "reasoning": reasoning, "calls": calls, "reason": choice["finish_reason"]}


@pytest.mark.parametrize("run_length", [1, 3, 500])
async def test_required_calls_are_reported_as_calls(tooled: Tokenizer, run_length: int) -> None:
    end, _, script = front(tooled, run_length=run_length)
    script.say(LIST)
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    expected = {"content": None, "reasoning": "", "calls": CALLS, "reason": "tool_calls"}
    assert same_form(await ask(end, **asked)) == expected
    assert reported(await ask_streaming(end, **asked)) == expected
    first = CALLS[:1]
    assert same_form(await ask(end, **asked, parallel_tool_calls=False))["calls"] == first
    assert reported(await ask_streaming(end, **asked, parallel_tool_calls=False))["calls"] == first
    cut = await ask(end, **asked, max_tokens=8)
    assert cut["choices"][0]["finish_reason"] == "length"


async def test_a_named_functions_call_ends_with_stop_as_openai_has_it(tooled: Tokenizer) -> None:
    end, source, script = front(tooled)
    script.say(CALLS[0][1])
    asked = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    expected = {"content": None, "reasoning": "", "calls": CALLS[:1], "reason": "stop"}
    assert same_form(await ask(end, **asked)) == reported(await ask_streaming(end, **asked)) == expected
    assert source.requests[0].params.structure == call_form(chat_prompt("named"))


SAID = 'hm, 你 so|Let me see 🙂. @weather{"city": "x"};@the "clock"{};'
MEANT = {
    "content": "Let me see 🙂. ",
    "reasoning": "hm, 你 so",
    "calls": [("weather", '{"city": "x"}'), ('the "clock"', "{}")],
    "reason": "tool_calls",
}


@pytest.mark.parametrize("run_length", [1, 2, 5, 500])
@pytest.mark.parametrize("stop", [None, [" 你 not"]])
async def test_what_is_parsed_does_not_depend_on_how_tokens_come(
    tooled: Tokenizer, run_length: int, stop: list[str] | None
) -> None:
    parsers = FakeParsers(reasoning=True)
    end, source, script = front(tooled, parsers, run_length=run_length)
    script.say(SAID)
    assert reported(await ask_streaming(end, tools=TOOLS, stop=stop)) == MEANT
    ids = [*tooled.encode(SAID), tooled.eos_token_ids[0]]
    decoder = tooled.detokenizer(skip_special=False, continuation=True)
    texts = [*decoder.push(ids[:-1]), ""]
    assert parsers.noted == [
        (text, (token,), number == len(ids)) for number, (token, text) in enumerate(zip(ids, texts, strict=True), 1)
    ], "each token comes by itself, with all of its text"
    assert same_form(await ask(end, tools=TOOLS, stop=stop)) == MEANT
    assert parsers.noted[len(ids) :] == parsers.noted[: len(ids)], "a whole answer is read as its stream is"
    assert source.requests[0].params.structure is None


async def test_a_stop_string_ends_what_is_parsed(tooled: Tokenizer) -> None:
    end, _, script = front(tooled, FakeParsers(reasoning=True), run_length=4)
    script.say(SAID)
    expected = {"content": "Let me", "reasoning": "hm, 你 so", "calls": [], "reason": "stop"}
    assert reported(await ask_streaming(end, stop=[" see"])) == expected
    assert same_form(await ask(end, stop=[" see"])) == expected


async def test_forced_calls_and_forms_come_behind_the_reasoning(tooled: Tokenizer) -> None:
    parsers = FakeParsers(reasoning=True, end="|")
    end, source, script = front(tooled, parsers)
    script.say(f"so|\n{LIST}")
    expected = {"content": None, "reasoning": "so", "calls": CALLS, "reason": "tool_calls"}
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    assert same_form(await ask(end, **asked)) == reported(await ask_streaming(end, **asked)) == expected
    assert source.requests[0].params.structure == behind_thought(call_form(chat_prompt("required")), "|", None, ())
    script.say("so|no")
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert same_form(await ask(end, **form)) == expected | {"content": "no", "calls": [], "reason": "stop"}
    assert source.requests[-1].params.structure == behind_thought(Structure("choice", '["yes", "no"]'), "|", None, ())
    parsers.thought_end = None
    with pytest.raises(UnsupportedParameter, match="does not say where that ends"):
        await end.prepare(wire(**form))
    parsers.thought_end = ""  # the prompt has ended it
    job = await end.prepare(wire(**form))
    assert job.requests[0].params.structure == Structure("choice", '["yes", "no"]')


async def test_a_parser_that_fails_ends_the_answer_with_an_error(tooled: Tokenizer) -> None:
    end, _, script = front(tooled, FakeParsers())
    script.say("well! no")
    with pytest.raises(EngineFault, match="at its end"):
        await ask(end, tools=TOOLS)
    chunks = [event async for event in end.events(await end.prepare(wire(tools=TOOLS, stream=True)))]
    assert b"error" in chunks[-1] and not any(b"[DONE]" in chunk for chunk in chunks)


FREE = (
    'Let me see 🙂.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Osl\u00f6"}}\n</tool_call>\n<tool_call>\n'
)
FREE += '{"name": "wind", "arguments": {"kn": 7}}\n</tool_call>'
FOUND = {
    "content": "Let me see 🙂.",
    "reasoning": "",
    "calls": [("weather", '{"city": "Oslö"}'), ("wind", '{"kn": 7}')],
    "reason": "tool_calls",
}


@pytest.mark.parametrize("run_length", [1, 3, 500])
async def test_calls_made_freely_are_read_without_any_setting(tooled: Tokenizer, run_length: int) -> None:
    end, source, script = front(tooled, run_length=run_length)
    script.say(FREE)
    assert same_form(await ask(end, tools=TOOLS)) == FOUND
    assert reported(await ask_streaming(end, tools=TOOLS)) == FOUND
    first = FOUND | {"calls": FOUND["calls"][:1]}
    assert same_form(await ask(end, tools=TOOLS, parallel_tool_calls=False)) == first
    assert reported(await ask_streaming(end, tools=TOOLS, parallel_tool_calls=False)) == first
    assert source.requests[0].params.structure is None
    text = FOUND | {"content": FREE, "calls": [], "reason": "stop"}
    assert same_form(await ask(end, tools=TOOLS, tool_choice="none")) == text


async def test_calls_made_freely_come_behind_the_reasoning_that_vllm_finds(tooled: Tokenizer) -> None:
    end, _, script = front(tooled, FakeParsers(tools=False, reasoning=True))
    script.say(f"hm <tool_call>|{FREE}")
    expected = FOUND | {"reasoning": "hm <tool_call>"}
    assert same_form(await ask(end, tools=TOOLS)) == reported(await ask_streaming(end, tools=TOOLS)) == expected


async def test_markers_may_be_special_tokens_and_others_are_not_shown(copied: Path) -> None:
    config = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    added = config["added_tokens"]
    number = 1 + max(one["id"] for one in [*added, {"id": max(config["model"]["vocab"].values())}])
    added.append(added[0] | {"id": number, "content": "[TOOL_CALLS]", "special": True})
    (copied / "tokenizer.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = templated(copied, OF_FAMILY[MistralCalls])
    end, _, script = front(tokenizer)
    script.say('So<|endoftext|>.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "x"}}]')
    expected = FOUND | {"content": "So.", "calls": [("weather", '{"city": "x"}')]}
    reply = await ask(end, tools=TOOLS)
    assert same_form(reply) == reported(await ask_streaming(end, tools=TOOLS)) == expected
    said = [{"role": "assistant", "tool_calls": reply["choices"][0]["message"]["tool_calls"]}]
    await end.prepare(wire(messages=[*HI, *said], tools=TOOLS))  # the template takes the ids that it gets back
    script.say("[TOOL_CALLS] x")
    kept = FOUND | {"content": "[TOOL_CALLS] x", "calls": [], "reason": "stop"}
    assert same_form(await ask(end, tools=TOOLS)) == reported(await ask_streaming(end, tools=TOOLS)) == kept
    script.say(LIST)
    (call, *_) = (await ask(end, tools=TOOLS, tool_choice="required"))["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
