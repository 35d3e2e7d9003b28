"""Replies without the fields that the proxy asked for and its client did not."""

import json
import re
from itertools import pairwise
from typing import Any

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_EVENT_DATA = re.compile(rb"(?:\A|[\r\n])data: ?(\{[^\r\n]*)")
_EMPTY_DELTAS: tuple[dict[str, str], ...] = ({}, {"content": ""})
# What an event may hold that only carried token ids: nothing is added, and nothing ends.
_NOTHING_NEW = {"index", "delta", "text", "finish_reason", "stop_reason", "logprobs"}


def plain_reply(data: bytes, keys: frozenset[str]) -> bytes:
    """Return a whole reply without `keys`; one that cannot be read stays as it came."""
    reply = _without(data, keys)
    return data if reply is None else _dumped(reply, data)


class PlainEvents:
    """Takes `keys` out of server-sent events; what is no JSON object stays as it came."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = keys
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        """Return the events that are whole once these bytes have come."""
        data = self._rest + data
        ends = [0, *(found.end() for found in _EVENT_END.finditer(data))]
        self._rest = data[ends[-1] :]
        return b"".join(self._event(data[start:end]) for start, end in pairwise(ends))

    def last(self) -> bytes:
        """Return what is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return self._event(rest)

    def _event(self, event: bytes) -> bytes:
        found = _EVENT_DATA.search(event)
        reply = _without(found[1], self._keys) if found else None
        if found is None or reply is None:
            return event
        if (choices := reply.get("choices")) and not reply.get("usage") and all(map(_says_nothing, choices)):
            return b""
        return event[: found.start(1)] + _dumped(reply, found[1]) + event[found.end(1) :]


def _without(data: bytes, keys: frozenset[str]) -> dict[str, Any] | None:
    try:
        reply: dict[str, Any] = json.loads(data.decode("utf-8"))
        parts = [reply, *(reply.get("choices") or ())]
    except (ValueError, RecursionError, AttributeError, TypeError):
        return None
    if not all(isinstance(part, dict) for part in parts):
        return None
    for part in parts:
        for key in keys & part.keys():
            if key == "logprobs":  # OpenAI's replies have null there, and some clients miss it
                part[key] = None
            else:
                del part[key]
    return reply


def _dumped(reply: dict[str, Any], as_it_came: bytes) -> bytes:
    try:
        return json.dumps(reply, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError):  # half a character, or a number beyond those of JSON's readers
        return as_it_came


def _says_nothing(choice: dict[str, Any]) -> bool:
    ended = any(choice.get(key) for key in ("finish_reason", "stop_reason", "logprobs", "text"))
    return not ended and choice.keys() <= _NOTHING_NEW and choice.get("delta", {}) in _EMPTY_DELTAS
