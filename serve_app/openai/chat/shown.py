"""From a conversation to the text of its prompt, in which everything that the model is to see must be found.

Chat templates differ in what they take (no content, or an empty one; a call's arguments as an object, or as its text;
a message's content as text, or as parts) and in what they leave out. The forms are tried in turn until one shows
everything, which is seen by the outcome: the conversation is rendered once more with a mark at the end of each text.
"""

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.backends.base import ChatPrompt
from serve_app.errors import UnsupportedParameter
from serve_app.text.tokenizer import Tokenizer, shipped_templates
from speculative.errors import InvalidRequest

Messages = list[dict[str, Any]]

_OTHER_TEMPLATE = f"Set model.chat_template to one that does: {' or '.join(shipped_templates())} fit ChatML models."
_TAG = secrets.token_hex(4)
_MARK = re.compile(rf"zq{_TAG}x\d+qz")
_QUOTED = re.compile(rf"'({_MARK.pattern})'")
_NOT_SHOWN = "the model's chat template does not show it to the model"


@dataclass(slots=True)
class _Marks:
    """Words that are put at the end of what must be shown, each with the field that it stands for and the fix."""

    fields: dict[str, tuple[str, str]] = field(default_factory=dict)

    def new(self, name: str, fix: str) -> str:
        """A word that no conversation holds, of letters and digits only, so that no template changes it."""
        mark = f"zq{_TAG}x{len(self.fields)}qz"
        self.fields[mark] = (name, fix)
        return mark

    def missing(self, text: str) -> list[tuple[str, str]]:
        """The fields, each with its fix, that a text does not show."""
        shown = set(_MARK.findall(text))  # in one pass, as texts are long and marks many
        return [known for mark, known in self.fields.items() if mark not in shown]


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt in one of the forms, and what is wrong with it."""

    text: str
    missing: list[tuple[str, str]]
    writes_python: bool  # a call's arguments as Python writes an object
    num_none: int  # of the word None, which a template writes that does not know what no content is

    @property
    def faults(self) -> tuple[int, bool, int]:
        return len(self.missing), self.writes_python, self.num_none


def prompt_text(tokenizer: Tokenizer, chat: ChatPrompt, variables: Mapping[str, Any]) -> str:
    """The prompt of a conversation in the chat template.

    Args:
        tokenizer: the model's, with its chat template.
        chat: the conversation and its tools.
        variables: further ones of the template.

    Raises:
        InvalidRequest: the template refuses the conversation.
        UnsupportedParameter: it leaves out a message, a call, a result or a tool; `field` says which.
    """
    best: _Rendered | None = None
    refused: InvalidRequest | None = None
    for messages in _forms(chat):
        try:
            found = _render(tokenizer, chat, messages, variables)
        except InvalidRequest as error:
            refused = refused or error
            continue
        if best is None or found.faults < best.faults:
            best = found
        if not any(found.faults):
            break
    if best is None:
        assert refused is not None
        raise refused
    for name, fix in best.missing[:1]:
        raise UnsupportedParameter(name, f"{name}: {_NOT_SHOWN}. {fix}")
    # Results in another order than their calls are refused, where the prompt does not name the calls.
    ids: list[str | None] = []
    last = -1
    for number, message in enumerate(chat.messages):
        if message["role"] != "tool":
            ids, last = [call.get("id") for call in message.get("tool_calls", ())], -1
            continue
        call_id = message.get("tool_call_id")
        if call_id not in ids:
            continue
        place = ids.index(call_id)
        if place < last and str(call_id) not in best.text:
            name = f"messages.{number}.tool_call_id"
            raise UnsupportedParameter(
                name, f"{name}: {_NOT_SHOWN}, so that results must come in the order of their calls. Reorder them."
            )
        last = max(last, place)
    return best.text


def _render(tokenizer: Tokenizer, chat: ChatPrompt, messages: Messages, variables: Mapping[str, Any]) -> _Rendered:
    text = tokenizer.render_chat(messages, tools=chat.tools, variables=variables)
    marks = _Marks()
    marked = [_marked(message, f"messages.{number}", marks) for number, message in enumerate(messages)]
    tools = [_marked_tool(tool, f"tools.{number}", marks) for number, tool in enumerate(chat.tools)]
    hidden = chat.use == "none" and bool(tools)
    lacks_content = any(message.get("content", "") is None for message in messages)
    num_none = text.count("None") if lacks_content else 0
    try:
        shown = tokenizer.render_chat(marked, tools=chat.tools if hidden else tools, variables=variables)
    except InvalidRequest:  # it takes no names but those that it knows, say
        return _Rendered(text, [], False, num_none)
    missing = [one for one in marks.missing(shown) if not (hidden and one[0].startswith("tools."))]
    writes_python = any("arguments" in marks.fields[mark][0] for mark in _QUOTED.findall(shown))
    return _Rendered(text, missing, writes_python, num_none)


# ---- the forms that templates take


def _forms(chat: ChatPrompt) -> Iterator[Messages]:
    """The messages in the forms that templates may want, first as they were sent."""
    has_calls = any("tool_calls" in message for message in chat.messages)
    for in_parts, as_text, nothing in itertools.product(
        (False, True), (False, True), ("as sent", None, "", "left out")
    ):
        if has_calls or not (as_text or nothing != "as sent"):
            yield [_in_form(dict(message), in_parts, as_text, nothing) for message in chat.messages]


def _in_form(message: dict[str, Any], in_parts: bool, as_text: bool, nothing: str | None) -> dict[str, Any]:
    if "tool_calls" in message:
        if not message["content"] and nothing == "left out":
            del message["content"]
        elif not message["content"] and nothing != "as sent":
            message["content"] = nothing
        if as_text:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].text}}
                for call in message["tool_calls"]
            ]
    if in_parts and message.get("content") is not None:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


# ---- marks


def _marked(message: Mapping[str, Any], path: str, marks: _Marks) -> dict[str, Any]:
    """A message with a mark in all that the model must see of it.

    Reasoning and names are left to the template, and so is what was said beside a call: models are trained without."""
    marked = dict(message)
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None and not calls:
        mark = marks.new(f"{path}.content", "Put its text into another message, or leave it out.")
        if isinstance(content, str):
            marked["content"] = content + mark
        else:
            marked["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    if calls:
        fix = f"Send the call without content. {_OTHER_TEMPLATE}" if content else _OTHER_TEMPLATE
        places = (
            [f"{path}.tool_calls.{number}" for number in range(len(calls))] if calls[1:] else [f"{path}.tool_calls"]
        )
        marked["tool_calls"] = [_marked_call(*one, fix, marks) for one in zip(calls, places, strict=True)]
    return marked


def _marked_call(call: Mapping[str, Any], path: str, fix: str, marks: _Marks) -> dict[str, Any]:
    function = call["function"]
    name = function["name"] + marks.new(path, fix)
    arguments, mark = function["arguments"], marks.new(f"{path}.function.arguments", fix)
    if isinstance(arguments, str):
        marked: Any = arguments + mark
    else:
        marked = {**arguments, f"{mark}k": mark}
    return {**call, "function": {**function, "name": name, "arguments": marked}}


def _marked_tool(tool: Mapping[str, Any], path: str, marks: _Marks) -> dict[str, Any]:
    function, fix = dict(tool["function"]), _OTHER_TEMPLATE
    function["name"] += marks.new(f"{path}.function.name", fix)
    if function.get("description"):
        function["description"] += marks.new(f"{path}.function.description", fix)
    parameters = function.get("parameters") or {}
    if isinstance(parameters.get("properties"), dict) and parameters["properties"]:
        mark = marks.new(f"{path}.function.parameters", fix)
        properties = {**parameters["properties"], mark: {"type": "string", "description": "text"}}
        function["parameters"] = {**parameters, "properties": properties}
    return {**tool, "function": function}
