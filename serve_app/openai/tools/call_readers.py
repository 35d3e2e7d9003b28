"""Tool calls, read out of the text of an answer while it grows: those that it was forced into, and those that a model
makes as it likes, in the format of its family.

What a reader finds is the same for a stream and for the whole text. A call counts from where its name is known and its
arguments begin. Arguments are passed on as the model wrote them, and put right where they are no JSON; a call that
breaks off has those that came. Tags that close may be missing. What is no call, and what follows a broken one, stays
content. White space around calls belongs to the format.
"""

import itertools
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from serve_app.backends.base import CallPart, ParsedDelta, ReplyParser
from serve_app.openai.tools.growing_text import GrowingText, Step
from serve_app.text.json_text import JsonRepairer, refuse_constant, repaired
from serve_app.text.schema_types import argument_types, kinds_of
from serve_app.text.template_marks import CALLED, TOOL
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest

MAX_NAME = 256  # characters of a function's name
_ARGUMENTS = ("arguments", "parameters")
_BEFORE_ARGUMENTS = ("name", *_ARGUMENTS, "type", "id")  # keys of a call; an object with others is none

NewId = Callable[[], str]
Tools = Sequence[Mapping[str, Any]]


def new_call_id() -> str:
    """A name for a call, by which its result comes back."""
    return f"call_{uuid.uuid4().hex[:24]}"


class AnswerReader:
    """Reads an answer's calls (a `ReplyParser`), behind what takes the reasoning out of its text."""

    def __init__(self, calls: "CallReader", inner: ReplyParser | None = None) -> None:
        self._calls = calls
        self._inner = inner

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        """Return what the next part of the text says."""
        said = ParsedDelta(text) if self._inner is None else self._inner.push(text, token_ids, last=last)
        found = self._calls.push(said.content, last=last)
        before = (ParsedDelta(reasoning=said.reasoning),) if found.parts else ()
        return found._replace(reasoning=said.reasoning, parts=before + found.parts)


@dataclass(slots=True)
class _Part:
    """A part of a call, while its arguments come; the first has its name."""

    index: int
    name: str | None = None
    call_id: str | None = None
    arguments: list[str] = field(default_factory=list)

    def made(self) -> CallPart:
        """The part as it goes out."""
        return CallPart(self.index, "".join(self.arguments), self.name, self.call_id)


@dataclass(slots=True)
class _Object:
    """A call while its object is read: its name, and its arguments where they came first."""

    name: str = ""
    early: str | None = None
    begun: bool = False


class CallReader(ABC):
    """Reads the calls of one answer. `new_id` names them."""

    def __init__(self, new_id: NewId = new_call_id) -> None:
        self._new_id = new_id
        self._text = GrowingText()
        self._found: list[str | _Part] = []  # since the last push, in order: content, and parts of calls
        self._index = -1
        self._steps = self._read()

    def push(self, text: str, *, last: bool) -> ParsedDelta:
        """Return what the next part of the text says; `last` = it ends here."""
        self._text.add(text, last=last)
        next(self._steps, None)
        parts = tuple(
            ParsedDelta(one) if isinstance(one, str) else ParsedDelta(calls=(one.made(),)) for one in self._found
        )
        self._found = []
        content, calls = "".join(one.content for one in parts), tuple(call for one in parts for call in one.calls)
        in_order = not calls or all(one.calls for one in itertools.dropwhile(lambda one: not one.calls, parts))
        return ParsedDelta(content, calls=calls, parts=() if in_order else parts)

    @abstractmethod
    def _read(self) -> Step[None]:
        """Read all of the text."""

    def _begin(self, name: str) -> None:
        self._index += 1
        self._found.append(_Part(self._index, name, self._new_id()))

    def _add(self, arguments: str) -> None:
        """More arguments of the call that was begun last."""
        if not arguments:
            return
        last = self._found[-1] if self._found else None
        if not isinstance(last, _Part):
            last = _Part(self._index)
            self._found.append(last)
        last.arguments.append(arguments)

    def _call(self, *, bare: bool = True) -> Step[bool]:
        """Read a call that is an object with name and arguments, in any order; whether there is one. bare: a name alone
        is a call without arguments."""
        text, call = self._text, _Object()
        if not (yield from text.literal("{")):
            return False
        whole = yield from self._member(call)
        while whole and (yield from text.literal(",")):
            whole = yield from self._member(call)
        whole = whole and (yield from text.literal("}"))
        if call.begun or not whole or not call.name or (call.early is None and not bare):
            return call.begun
        self._begin(call.name)
        self._add("{}" if call.early is None else call.early)
        return True

    def _member(self, call: _Object) -> Step[bool]:
        """Read a key of a call's object, its value, and the white space around them; False = they are broken."""
        text = self._text
        yield from text.blanks()
        key = yield from text.string()
        if key is None or (not call.begun and key not in _BEFORE_ARGUMENTS):
            return False
        yield from text.blanks()
        if not (yield from text.literal(":")):
            return False
        yield from text.blanks()
        if key == "name" and not call.name:
            call.name = (yield from text.string()) or ""
            whole = bool(call.name)
        elif key in _ARGUMENTS and not call.begun and call.early is None:
            whole = yield from self._arguments(call)
        else:
            whole = yield from text.value()
        yield from text.blanks()
        return whole

    def _arguments(self, call: _Object) -> Step[bool]:
        """Read a call's arguments: an object, which is passed on as it comes, its text as a string, or null."""
        text = self._text
        begin = text.at
        if call.name and (yield from text.peek()) == "{":
            self._begin(call.name)
            call.begun = True
            return (yield from self._object())
        if not (yield from text.value()):
            return False
        call.early = _object_text(text.since(begin))
        if call.name and call.early is not None:
            self._begin(call.name)
            self._add(call.early)
            call.begun = True
        return call.early is not None

    def _object(self) -> Step[bool]:
        """Read the arguments of the call that was begun, and pass them on as JSON; False = they are broken."""
        repairer = JsonRepairer()
        whole = yield from self._text.value(lambda character: self._add(repairer.push(character)))
        by_tag = not whole and bool((yield from self._text.peek()))
        self._add(repairer.close() if by_tag else repairer.end())
        return whole

    def _list(self, *, bare: bool = True) -> Step[bool]:
        """Read a list of calls, or several without its brackets and commas; whether there is any."""
        text = self._text
        is_list = yield from text.literal("[")
        yield from text.blanks()
        if not (yield from self._call(bare=bare)):
            return False
        yield from self._further("," if is_list else "", bare=bare)
        if not is_list:
            return True
        yield from text.blanks()
        yield from text.literal("]")
        return True

    def _further(self, separator: str, *, bare: bool = True) -> Step[None]:
        """Read calls that follow one, each behind a separator, which may be missing; a comma may end a list."""
        text = self._text
        while True:
            end = text.at
            yield from text.blanks()
            yield from text.literal(separator)
            if (following := (yield from text.blanks())) != "{":
                text.at = text.at if separator == "," and following == "]" else end
                return
            if not (yield from self._call(bare=bare)):
                self._no_call(end)
                return

    def _no_call(self, begin: int) -> None:
        """Keep the text since `begin` as content; it is no call."""
        self._found.append(self._text.since(begin))


def _object_text(value: str) -> str | None:
    """The text of the object that a value of JSON is, or that it holds as a string; None = it is no arguments."""
    if value.startswith('"'):
        try:
            value = json.loads(value, strict=False)
        except ValueError:
            return None
    if value.strip() in ("", "[]", "null", "None"):
        return "{}"
    return repaired(value) if value.lstrip().startswith("{") else None


class NamedCall(CallReader):
    """The text is the arguments of one call."""

    def __init__(self, name: str, new_id: NewId = new_call_id) -> None:
        super().__init__(new_id)
        self._name = name

    def _read(self) -> Step[None]:
        if (yield from self._text.blanks()):
            self._begin(self._name)
        while character := (yield from self._text.take()):
            self._add(character)


class ForcedList(CallReader):
    """The text is a list of calls, as `call_form` lays it out."""

    def _read(self) -> Step[None]:
        yield from self._text.blanks()
        if not (yield from self._list()):
            self._no_call(0)


class FreeCalls(CallReader):
    """Calls that a model makes as it likes, in the text that it writes.

    Args:
        tools: that it was shown.
    """

    title: ClassVar[str]
    """Name of the format, for people."""
    rendered: ClassVar[re.Pattern[str]]
    """Pattern of a call of the function `probe` in a chat template of the format."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Texts of the format that may be special tokens."""

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(self.new_id)
        self._tools = tools
        self._after_call = False  # whether nothing but white space was read since a call

    @staticmethod
    def new_id() -> str:
        """An id of a call, as the format's chat templates take it."""
        return new_call_id()

    def _read(self) -> Step[None]:
        text = self._text
        while True:
            begin = text.at
            yield from text.blanks()
            place = text.at
            if (yield from self._calls_at(line=begin == 0 or self._after_call or "\n" in text.since(begin))):
                self._after_call = True
                continue
            ended = text.at == place and not (yield from text.take())
            if not (ended and self._after_call):
                self._no_call(begin)
            if ended:
                return
            self._after_call = False

    @abstractmethod
    def _calls_at(self, *, line: bool) -> Step[bool]:
        """Read calls that begin here; whether there are any. If not, what was read on the way is content, so that
        nothing is read twice. `line` = this is the beginning of a line, or of the text behind a call."""

    def _closing(self, marker: str) -> Step[bool]:
        """Read what closes a call, if it is there."""
        end = self._text.at
        yield from self._text.blanks()
        closed = yield from self._text.literal(marker)
        if not closed:
            self._text.at = end
        return closed


class HermesCalls(FreeCalls):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`; SmolLM2 writes a list of calls in there."""

    title = "Hermes (Qwen2.5, Qwen3, SmolLM)"
    rendered = re.compile(r'<tool_call>\s*\[?\s*\{\s*"(name"\s*:\s*"probe"|arguments")')
    markers = ("<tool_call>", "</tool_call>")

    def _calls_at(self, *, line: bool) -> Step[bool]:
        if not (yield from self._text.literal("<tool_call>")):
            return False
        yield from self._text.blanks()
        if not (yield from self._list()):
            return False
        yield from self._closing("</tool_call>")
        return True


class LlamaCalls(FreeCalls):
    """`{"name": …, "parameters": …}` at the beginning of a line or behind `<|python_tag|>`; `;` between several."""

    title = "Llama 3 (JSON)"
    rendered = re.compile(r'\{"name": "probe", "parameters": \{')
    markers = ("<|python_tag|>",)

    def _calls_at(self, *, line: bool) -> Step[bool]:
        text = self._text
        if not (yield from text.literal("<|python_tag|>")) and not line:
            return False
        yield from text.blanks()
        if not (yield from self._list(bare=False)):
            return False
        yield from self._further(";", bare=False)
        return True


class MistralCalls(FreeCalls):
    """`[TOOL_CALLS] [{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`."""

    title = "Mistral"
    rendered = re.compile(r'\[TOOL_CALLS\]\s*(probe\b|\[?\s*\{\s*"name": ?"probe")')
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: the templates refuse any other."""
        return uuid.uuid4().hex[:9]

    def _calls_at(self, *, line: bool) -> Step[bool]:
        if not (yield from self._text.literal("[TOOL_CALLS]")):
            return False
        if (yield from self._text.blanks()) in ("[", "{"):
            return (yield from self._list())
        return (yield from self._named())

    def _named(self) -> Step[bool]:
        """Read a name, an id that the model made up, and arguments."""
        text = self._text
        name = yield from text.word("[{ \n", MAX_NAME)
        yield from text.blanks()
        if (yield from text.literal("[CALL_ID]")):
            yield from text.word("[{ \n", MAX_NAME)
            yield from text.blanks()
        yield from text.literal("[ARGS]")
        yield from text.blanks()
        call = _Object(name)
        return bool(name) and ((yield from self._arguments(call)) or call.begun)


class XmlCalls(FreeCalls):
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: values are bare text, and become JSON
    by the function's schema."""

    title = "Qwen3-Coder (XML)"
    rendered = re.compile(r"<tool_call>\s*<function=probe>")
    markers = ("<tool_call>", "</tool_call>")

    def _calls_at(self, *, line: bool) -> Step[bool]:
        text = self._text
        opened = yield from text.literal("<tool_call>")
        if (yield from text.blanks()) in ("{", "[") and opened:  # as Hermes has it
            called = yield from self._list()
        else:
            called = yield from self._function()
        if called:
            yield from self._closing("</tool_call>")
        return called

    def _function(self) -> Step[bool]:
        """Read one call; whether there is one."""
        text = self._text
        name = yield from self._tag("<function=")
        if not name:
            return False
        self._begin(name)
        if (yield from text.blanks()) == "{":
            yield from self._object()
        else:
            schemas = (tool["function"].get("parameters") for tool in self._tools if tool["function"]["name"] == name)
            yield from self._parameters(next(schemas, {}) or {})
        yield from self._closing("</function>")
        return True

    def _parameters(self, schema: Mapping[str, Any]) -> Step[None]:
        """Read all arguments, up to a tag that is none of theirs; text between them follows the call as content."""
        text, separator, others = self._text, "{", list[str]()
        while True:
            begin = text.at
            yield from text.blanks()
            key = yield from self._tag("<parameter=")
            if key:
                yield from text.line_end()
                self._add(f"{separator}{_quoted(key)}: ")
                types = argument_types(key, schema)
                yield from (self._string() if types == {"string"} else self._other(types))
                separator = ", "
            if key or (yield from text.literal("</parameter>")):  # one too many
                continue
            if (yield from self._ends()):
                break
            text.at = begin
            while not (yield from self._ends()):
                yield from text.take()
            others.append(text.since(begin))
        self._add("{}" if separator == "{" else "}")
        self._found += others

    def _tag(self, begin: str) -> Step[str]:
        """Read a tag that names something; "" = none is here."""
        text, at = self._text, self._text.at
        name = (yield from text.word("<>\n", MAX_NAME)) if (yield from text.literal(begin)) else ""
        if name.strip() and (yield from text.literal(">")):
            return name.strip()
        text.at = at
        return ""

    def _ends(self) -> Step[bool]:
        """Return whether a value ends here: with a line, before a tag of the format, or with the text. Its own closing
        tag is read."""
        text, begin = self._text, self._text.at
        yield from text.line_end()
        place, character = text.at, (yield from text.peek())
        if not character or (character == "<" and (yield from text.literal("</parameter>"))):
            return True
        ends = character == "<" and (yield from self._other_tag())
        text.at = place if ends else begin
        return ends

    def _other_tag(self) -> Step[bool]:
        """Read a tag, other than that which ends a value; whether there is one."""
        text = self._text
        if (yield from text.literal("</function>")) or (yield from text.literal("</tool_call>")):
            return True
        if (yield from text.literal("<tool_call>")):
            yield from text.blanks()
        elif (yield from self._tag("<parameter=")):
            return True
        return bool((yield from self._tag("<function=")))

    def _string(self) -> Step[None]:
        """Read a text, which is passed on as it comes."""
        self._add('"')
        while not (yield from self._ends()):
            self._add(_quoted((yield from self._text.take()))[1:-1])
        self._add('"')

    def _other(self, types: frozenset[str]) -> Step[None]:
        text, begin = self._text, self._text.at
        end = begin
        while not (yield from self._ends()):
            yield from text.take()
            end = text.at
        at, text.at = text.at, end
        self._add(_as_json(text.since(begin), types))
        text.at = at


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def _as_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value that was written as bare text and may have these types."""
    bare, may_be_text = text.strip(), "string" in types
    bare = repaired(bare if may_be_text else _CONSTANTS.get(bare.lower(), bare))
    try:
        kinds = kinds_of(json.loads(bare, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        return _quoted(text)
    return _quoted(text) if may_be_text and types.isdisjoint(kinds) else bare


FORMATS: tuple[type[FreeCalls], ...] = (XmlCalls, HermesCalls, MistralCalls, LlamaCalls)


def format_of(tokenizer: Tokenizer) -> type[FreeCalls] | None:
    """The format in which a model writes calls as it likes: that of its chat template; None = none that is known."""
    try:
        text = tokenizer.render_chat(CALLED, tools=(TOOL,))
    except InvalidRequest:
        return None
    return next((one for one in FORMATS if one.rendered.search(text)), None)
