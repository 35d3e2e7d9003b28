"""Marks that a chat template writes around messages, and the end of the assistant's turn."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Mapping[str, Any]]], str]
"""The prompt of a conversation with tools; raises whatever the template raises."""

# What no model reads as plain text unless its own template has it so; [INST] and "### Instruction:" may well be.
_MARK = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|<(?:start|end)_of_turn>|</?s>|<(?:bos|eos)>")
_ANSWER = "An-answer-of-71-letters"
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}
_SAID = {"role": "assistant", "content": _ANSWER}
_ID = "c4a11b0b5"  # some templates take no other length
_CALL = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "probe", "description": "A test.", "parameters": _PARAMETERS}}
CALLED = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "probe", "tool_call_id": _ID, "content": "done"},
)
"""A conversation in which the function of `TOOL` was called."""
PLAIN: tuple[Messages, ...] = ((_USER,), (_USER, _SAID, _USER), (_SYSTEM, _USER), (_SYSTEM, _USER, _SAID, _USER))
"""Conversations without tools, of which a template takes at least one."""


def rendered(render: Render) -> Iterator[str | None]:
    """The prompts of `PLAIN` and of conversations with tools; None of those that the template refuses."""
    for messages, tools in (*((one, ()) for one in PLAIN), ((_USER,), (TOOL,)), (CALLED, (TOOL,))):
        try:
            yield render(messages, tools)
        except Exception:  # a template may raise anything
            yield None


def marks(texts: Sequence[str | None]) -> list[str]:
    """The marks in prompts, each once."""
    return list(dict.fromkeys(mark for text in texts if text is not None for mark in _MARK.findall(text)))


def behind_answer(render: Render) -> str:
    """Return what follows an answer before the next question; "" where that is unknown."""
    for messages in PLAIN[1::2]:
        try:
            text = render(messages, ())
        except Exception:  # a template may raise anything
            continue
        return text.partition(_ANSWER)[2].lstrip()
    return ""
