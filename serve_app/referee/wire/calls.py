"""Calls of tools in the text of an answer, as one that reads it without the service's parsers finds them."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from serve_app.referee.wire.reply import Choice

_MOST_OBJECTS = 200  # of a text, that are looked at


def lost_part(text: str, functions: Iterable[str], choice: Choice, most: int | None) -> str:
    """Say which part of a text went out neither as a call nor as content, in words; "" = none, or nobody can tell.

    Args:
        text: of the answer.
        functions: that may be called.
        choice: as it went out.
        most: calls that may go out; None = any number.
    """
    names, said = set(functions), choice.text + choice.reasoning
    sent = [(name, value_of(arguments)) for name, arguments in choice.calls.values()]
    made = [(called, source) for called, source in _calls_in(text, names) if source not in said]
    due = [called for called, _ in made][:most]
    waiting = iter(sent)
    lost = [number for number, called in enumerate(due) if called not in waiting]
    if lost and len(sent) == most and "{" in text.partition(made[0][1])[0]:
        return ""  # before them may be a call of a form that is not read here
    if lost:
        return f"call {lost[0]} of its text"
    if len(due) == most:  # what follows may be a part of a call that may not go out
        return ""
    for _, source in made:
        text = text.replace(source, "", 1)
    return "its content" if due == sent and _letters(text) != _letters(said) else ""


_MARKS = re.compile(r"</?tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]")


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, _MARKS.sub("", text)))


def _calls_in(text: str, names: set[str]) -> Iterator[tuple[tuple[str, Any], str]]:
    """The calls that a text holds as objects of JSON, each with its part of the text."""
    at, decoder = text.find("{"), json.JSONDecoder()
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            return
        end = at + 1
        try:
            value, end = decoder.raw_decode(text, at)
            name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
            if isinstance(name, str) and name in names and isinstance(arguments, dict):
                yield (name, arguments), text[at:end]
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def value_of(text: str) -> Any:
    """Return what JSON says; a text that is none itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
