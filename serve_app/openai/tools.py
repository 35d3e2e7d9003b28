"""Calls that an answer must hold: the form that forces them, and how they are read out of the text again.

An answer to `tool_choice: required` is a JSON list of calls, one to a named function its arguments, as vLLM has it. The
form is a grammar of llguidance's (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), in which each
function's JSON schema is a document of its own, so that `$defs` and references stay as they are. Both engines keep to
it, and no parser of a model's own way to call is needed.
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_app.backends.base import CallPart, ChatPrompt, ParsedDelta, ReplyParser
from serve_app.errors import UnsupportedParameter
from speculative.request import Structure

# A replay by the torch engine must allow exactly what vLLM's guidance allowed, in another version of the library.
# JSON is laid out as `json.dumps` does, which is how models saw it: under unbounded white space a small one may write
# blanks until its tokens run out. `whitespace_pattern` is not known to the version beside vLLM.
_HEADER = '%llguidance {"no_forcing": true}'  # as in `structured`: no tokenisation is preferred
_START = "start: answer"
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE_TEXT = "/(?s:.*)/"
_BLANKS = r"/\s{0,8}/"
_HEAD = re.compile(r'[\[\s,}]*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


def forces_calls(talk: ChatPrompt) -> bool:
    """Whether the answer must call a tool."""
    return talk.use in ("required", "named")


def call_form(talk: ChatPrompt) -> Structure:
    """The form of an answer that must call a tool."""
    functions = [tool["function"] for tool in talk.tools]
    schemas = {one["name"]: {"type": "object", **one.get("parameters", {})} for one in functions}
    if talk.use == "named":
        return _grammar([_START, f"answer: {_json(schemas[talk.function])}"])
    rules = []
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        rules += [f'call{number}: {head} arguments{number} "}}"', f"arguments{number}: {_json(schema)}"]
    more = ' (", " call)*' if talk.parallel else ""
    calls = " | ".join(f"call{number}" for number in range(len(schemas)))
    return _grammar([_START, f'answer: "[" call{more} "]"', f"call: {calls}", *rules])


def behind_thought(form: Structure, end: str, end_id: int | None, eos_token_ids: Sequence[int]) -> Structure:
    """A form that begins behind the model's reasoning, which is free.

    Args:
        form: of what comes then.
        end: the text that ends the reasoning.
        end_id: the token that was added for this text, of which the reasoning is then free to the token; None = there
            is none, and the reasoning is text without special tokens.
        eos_token_ids: with which an answer does not end before it has begun.

    Raises:
        UnsupportedParameter: the form cannot begin behind anything.
    """
    if end_id is None:
        thought = f"thought[suffix={json.dumps(end)}]: {_FREE_TEXT}"
    else:
        thought = f"thought: <[^{','.join(map(str, (end_id, *eos_token_ids)))}]>* <[{end_id}]>"
    return _grammar(["start: thought BLANKS answer", thought, f"BLANKS: {_BLANKS}", _answer(form)])


def _grammar(rules: Sequence[str]) -> Structure:
    return Structure("grammar", "\n".join((_HEADER, *rules)))


def _answer(form: Structure) -> str:
    """The rules of what is to come, by the name of `answer`."""
    own = f"{_HEADER}\n{_START}\n"
    if form.kind == "grammar" and form.text.startswith(own):
        return form.text.removeprefix(own)
    if form.kind == "json_schema":
        return f"answer: {_json(json.loads(form.text))}"
    if form.kind == "json_object":
        return f"answer: {_json({'type': 'object'})}"
    if form.kind == "choice":
        return f"answer: {' | '.join(map(json.dumps, json.loads(form.text)))}"
    field = f"structured_outputs.{form.kind}"
    raise UnsupportedParameter(
        field, f"{field} cannot begin behind the model's reasoning; use json or choice, or ask for no reasoning."
    )


def _json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as a rule's right-hand side."""
    return "%json " + json.dumps({"x-guidance": _LAYOUT, **schema})


def new_call_id() -> str:
    """A name for a call, by which its result comes back."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ForcedCalls:
    """Reads the calls of an answer that had to call (a `ReplyParser`).

    Args:
        talk: that forces them.
        inner: what takes the reasoning out of the text before; None = there is none.
    """

    def __init__(self, talk: ChatPrompt, inner: ReplyParser | None = None) -> None:
        self._calls = _NamedCall(talk.function) if talk.use == "named" else _CallList()
        self._inner = inner

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        """What the next part of the text says."""
        said = ParsedDelta(text) if self._inner is None else self._inner.push(text, token_ids, last=last)
        return ParsedDelta(reasoning=said.reasoning, calls=tuple(self._calls.push(said.content)))

    def whole(self, text: str, token_ids: Sequence[int]) -> ParsedDelta:
        """What the whole text says."""
        said = ParsedDelta(text) if self._inner is None else self._inner.whole(text, token_ids)
        return ParsedDelta(reasoning=said.reasoning, calls=put_together(self._calls.push(said.content)))


def put_together(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """One part for each call, in order."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        begun = calls.get(part.index)
        if begun is None:
            calls[part.index] = part
        else:
            name, call_id = begun.name or part.name, begun.call_id or part.call_id
            calls[part.index] = CallPart(part.index, begun.arguments + part.arguments, name, call_id)
    return tuple(calls[index] for index in sorted(calls))


class _NamedCall:
    """The text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[CallPart]:
        """Parts of the call that the text adds."""
        if self._begun:
            return [CallPart(0, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._begun = True
        return [CallPart(0, text, self._name, new_call_id())]


class _CallList:
    """The text is a list of calls, as `call_form` lays it out."""

    def __init__(self) -> None:
        self._text = ""  # not read yet
        self._index = -1
        self._depth = 0  # of brackets in the arguments; 0 = between calls
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[CallPart]:
        """Parts of calls that the text adds."""
        self._text += text
        parts: list[CallPart] = []
        while self._text:
            if self._depth:
                parts.append(CallPart(self._index, self._take_arguments()))
                continue
            head = _HEAD.match(self._text)
            if head is None or head.end() == len(self._text):
                break
            self._index += 1
            parts.append(CallPart(self._index, "", json.loads(head[1]), new_call_id()))
            self._text, self._depth = self._text[head.end() :], 1
            parts.append(CallPart(self._index, self._take_arguments(opened=False)))
        return list(put_together(parts))

    def _take_arguments(self, *, opened: bool = True) -> str:
        """The arguments up to their end, or as far as they have come; `opened` = their bracket was counted."""
        for place, character in enumerate(self._text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += opened
                opened = True
            elif character in "}]":
                self._depth -= 1
            if not self._depth:
                taken, self._text = self._text[: place + 1], self._text[place + 1 :]
                return taken
        taken, self._text = self._text, ""
        return taken
