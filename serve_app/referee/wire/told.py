"""What a client of our own service was told, off the bytes of its reply, whole or streamed: the same for every door."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.referee.wire.exchange import GENERATE, RESPONSES, Exchange
from serve_app.referee.wire.reply import EventReader, Json

_GROWS = ("text", "content", "reasoning", "arguments")  # texts that come in parts
_MOST_OBJECTS = 200  # of a text, that are looked at
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "input_tokens_details":
          "prompt_tokens_details", "output_tokens_details": "completion_tokens_details"}  # fmt: skip


@dataclass(slots=True)
class Told:
    """A reply.

    head: its fields but the choices.
    choices: by their index, each with the fields of its message; `calls` are the names and arguments of those of tools.
    usages: those that came, in their order.
    deltas: of the Responses API, the texts of a stream's events, by their kind; {} = it was none.
    """

    head: Json = field(default_factory=dict)
    choices: dict[int, Json] = field(default_factory=dict)
    usages: list[Json] = field(default_factory=list)
    deltas: dict[str, str] = field(default_factory=dict)


def told(exchange: Exchange) -> Told:
    """Read the reply of an exchange.

    Raises:
        Unreadable, ValueError, LookupError, TypeError, AttributeError: it is none of ours.
    """
    reply = Told()
    parts = [*EventReader().push(exchange.reply + b"\n")] if exchange.streamed else [json.loads(exchange.reply)]
    if exchange.path == RESPONSES:
        for part in parts[:-1]:
            if str(part.get("type")).endswith(".delta"):
                kind = part["type"].split(".")[1]
                reply.deltas[kind] = reply.deltas.get(kind, "") + part["delta"]
        parts = [_of_response(parts[-1].get("response") or parts[-1])]
    for part in parts:
        reply.usages += [part["usage"]] if part.get("usage") else []
        _add(reply.head, {name: value for name, value in part.items() if name != "choices"})
        for choice in part["choices"]:
            message = choice.get("message") or choice.get("delta") or {}
            own = {name: value for name, value in choice.items() if name not in ("message", "delta", "tool_calls")}
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            known = reply.choices.setdefault(choice["index"], {"calls": {}})
            _add(known, own | said)
            for number, call in enumerate(message.get("tool_calls") or ()):
                _add(known["calls"].setdefault(call.get("index", number), {}), call["function"])
    for choice in reply.choices.values():
        choice["calls"] = [(call["name"], call.get("arguments", "")) for _, call in sorted(choice["calls"].items())]
        if exchange.path == GENERATE:
            choice["text"] = None
    return reply


def _add(known: Json, more: Mapping[str, Any]) -> None:
    """Add what a part of a reply says: texts of an answer and lists grow, the rest is replaced."""
    for name, value in more.items():
        before = known.get(name)
        if isinstance(value, dict):
            known[name] = before if isinstance(before, dict) else {}
            _add(known[name], value)
        elif before is None or value is None:
            known[name] = before if value is None else value
        else:
            known[name] = before + value if isinstance(value, list) or name in _GROWS else value


def _of_response(response: Json) -> Json:
    """A response of the Responses API in the form of a chat's reply."""
    items = response["output"]
    contents = {kind: [part for item in items if item["type"] == kind for part in item["content"]] for kind in _KINDS}
    texts = {kind: "".join(part["text"] for part in parts) for kind, parts in contents.items()}
    choice = {
        "index": 0,
        "finish_reason": {"completed": "stop", "incomplete": "length"}.get(response["status"]),
        "logprobs": {"content": [entry for part in contents["message"] for entry in part["logprobs"]]},
        "message": {
            "content": texts["message"],
            "reasoning": texts["reasoning"],
            "tool_calls": [{"function": one} for one in items if one["type"] == "function_call"],
        },
    }
    usage = {_USAGE.get(name, name): value for name, value in response["usage"].items()}
    return {**response, "choices": [choice], "usage": usage}


_KINDS = ("message", "reasoning")


def lost_part(text: str, functions: Iterable[str], choice: Json, most: int | None) -> str:
    """Say which part of a text went out neither as a call nor as content, in words; "" = none, or nobody can tell.

    Args:
        text: of the answer.
        functions: that may be called.
        choice: as it went out.
        most: calls that may go out; None = any number.
    """
    names, said = set(functions), (choice.get("content") or "") + (choice.get("reasoning") or "")
    sent = [(name, _value(arguments)) for name, arguments in choice["calls"]]
    made = [(called, source) for called, source in _calls_in(text, names) if source not in said]
    due = [called for called, _ in made][:most]
    waiting = iter(sent)
    lost = [number for number, called in enumerate(due) if called not in waiting]
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


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
