"""Reads replies with OpenAI's API, whole or event by event: of each choice its tokens, their logprobs and how it ended,
wherever a server reports them. The watch, the audit, the referee of our own replies, chaos and the demo read by it.
Standard library only.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.referee.wire.exchange import CHAT, RESPONSES, Exchange
from speculative.errors import TruespecError

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_LINE_END = re.compile(rb"[\r\n]")
_DONE = b"[DONE]"
_GROWS = ("text", "content", "reasoning", "reasoning_content", "arguments")  # texts that come in parts
_ONCE = ("prompt_token_ids", "prompt_logprobs")  # lists that do not
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "input_tokens_details":
          "prompt_tokens_details", "output_tokens_details": "completion_tokens_details"}  # fmt: skip

Json = dict[str, Any]


class Unreadable(TruespecError):
    """An exchange that cannot be judged; the message says why."""


class Candidate(NamedTuple):
    """A token that could have been emitted in a place: its text, its id where it is given, and its logprob, nats."""

    text: str
    token_id: int | None
    logprob: float


@dataclass(slots=True)
class Choice:
    """One choice of a reply.

    wire: all that was said of it, as it was; its message's fields are among its own.
    """

    index: int = 0
    token_ids: list[int] | None = None  # emitted, None = the server did not report them
    logprobs: list[float | None] | None = None  # of each of them, nats; None = not reported
    text: str = ""  # of the answer, without its reasoning and its calls
    has_text: bool = False  # it was reported, if only as an empty one
    reasoning: str = ""  # its text
    finish_reason: str | None = None  # as reported
    stopped_by: str | int | None = None  # the stop text or token that ended it, as far as the server says so
    prompt_token_ids: tuple[int, ...] | None = None  # None = not reported
    pieces: list[bytes | None] | None = None  # of the text, one a logprob, where they came with ids
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)  # of tools: their names and arguments, by index
    top_logprobs: list[Any] | None = None  # of each token, as reported; `candidates` reads them
    scored_logprobs: list[Any] | None = None  # of each token, as reported; `scored` reads them
    token_texts: list[Any] | None = None  # of each token that has a logprob, as reported
    prompt_logprobs: list[Any] | None = None  # as reported; `logprobs_of_prompt` reads them
    wire: Json = field(default_factory=dict)

    @property
    def called(self) -> bool:
        """Return whether it holds calls of tools, or reasoning: not all of its text is in `text`."""
        return bool(self.calls or self.reasoning)

    def candidates(self) -> list[list[Candidate]] | None:
        """Return the likeliest tokens in each token's place, in the order of the reply; None = not reported."""
        return None if self.top_logprobs is None else [_candidates(top or {}) for top in self.top_logprobs]

    def scored(self, ids: Iterable[int]) -> list[dict[int, float]] | None:
        """Return each token's logprobs of these ids, as far as they were reported; None = none were."""
        if self.scored_logprobs is not None:
            return [{int(token): float(value) for token, value in one.items()} for one in self.scored_logprobs]
        wanted, places = set(ids), self.candidates()
        if not wanted or not places:
            return None
        return [{one.token_id: one.logprob for one in place if one.token_id in wanted} for place in places]

    def logprobs_of_prompt(self, prompt: Any) -> list[float | None] | None:
        """Return the logprobs of the sent prompt's tokens but the first; None = not reported. Of a text, whose tokens
        are not known, the first entry of a place is its own token's."""
        if self.prompt_logprobs is None:
            return None
        places = [place or {} for place in self.prompt_logprobs[1:]]
        keys = [""] * len(places) if isinstance(prompt, str) else [str(token) for token in prompt[1:]]
        if len(keys) != len(places):
            return [None] * len(keys)
        pairs = zip(keys, places, strict=True)
        entries: list[Json] = [place.get(key) or next(iter(place.values()), {}) for key, place in pairs]
        return [_number(entry.get("logprob")) for entry in entries]

    def read(self, head: Json, *, is_chat: bool) -> None:
        """Read what was said of it, and of all choices together."""
        wire, logprobs = self.wire, self.wire.get("logprobs") or {}
        text = wire.get("content" if is_chat else "text")
        self.text, self.has_text = text or "", text is not None
        self.reasoning = wire.get("reasoning_content") or wire.get("reasoning") or ""
        calls = sorted((wire.get("tool_calls") or {}).items())
        self.calls = {at: (str(one.get("name") or ""), one.get("arguments", "")) for at, one in calls}
        self.finish_reason = wire.get("finish_reason")
        stopped_by = next((wire[name] for name in ("stop_reason", "matched_stop") if wire.get(name) is not None), None)
        self.stopped_by = stopped_by if isinstance(stopped_by, str | int) else None
        self.prompt_logprobs = wire.get("prompt_logprobs") or (None if self.index else head.get("prompt_logprobs"))
        entries: list[Json] | None = logprobs.get("content")  # a chat's, or llama.cpp's
        if entries is None:
            values, self.token_texts = logprobs.get("token_logprobs"), logprobs.get("tokens")
            self.logprobs = None if values is None else [*map(_number, values)]
            self.top_logprobs, self.scored_logprobs = logprobs.get("top_logprobs"), logprobs.get("scored_logprobs")
            known = [_id(None, one) for one in self.token_texts or ()]
        else:
            self.logprobs, self.token_texts = [*map(_logprob, entries)], [entry.get("token") for entry in entries]
            self.top_logprobs = [entry.get("top_logprobs") for entry in entries]
            if any("scored" in entry for entry in entries):  # truespec's
                self.scored_logprobs = [entry.get("scored") or {} for entry in entries]
            known = [_id(entry.get("id"), entry.get("token")) for entry in entries]
        own = head.get("sglext") or {}
        listed = dict(enumerate(own.get("output_ids") or ())).get(self.index)
        prompt = (listed and own.get("input_ids")) or wire.get("prompt_token_ids") or head.get("prompt_token_ids")
        self.prompt_token_ids = tuple(_ids(prompt)) if prompt else None
        named = (listed, wire.get("token_ids"), wire.get("response_token_ids"))  # the last of SGLang's chats
        ids = next((one for one in named if one is not None), None)
        if ids is None and known and None not in known:
            ids = known
            if entries is not None:
                own_bytes = (entry.get("bytes") if entry.get("id") is not None else None for entry in entries)
                self.pieces = [bytes(one) if one else None for one in own_bytes]
        self.token_ids = None if ids is None else _ids(ids)


@dataclass(slots=True)
class Reply:
    """A reply, as far as it has come."""

    is_chat: bool = False  # whether it is a chat's
    id: str = ""
    error: Any = None  # that the server reported in it
    num_prompt: int | None = None  # tokens of the prompt
    num_cached: int | None = None  # those of them that a cache had
    num_tokens: int | None = None  # emitted, of all choices together; None = not reported
    choices: dict[int, Choice] = field(default_factory=dict)
    head: Json = field(default_factory=dict)  # its fields but the choices
    usages: list[Json] = field(default_factory=list)  # those that came, in their order
    parts: list[Json] = field(default_factory=list)  # a whole reply, or the events of a stream, as they came

    @property
    def first(self) -> Choice:
        """The first choice; an empty one if there is none."""
        return next(iter(self.choices.values()), None) or Choice()

    def choice(self, index: int) -> Choice:
        """The choice of this index, a new one if there is none yet."""
        return self.choices.setdefault(index, Choice(index))

    def add(self, *parts: Json) -> None:
        """Add what a whole reply says, or events of a stream. Raises Unreadable: one is no part of a completion."""
        try:
            for part in parts:
                self._add(part)
            self._read()
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise Unreadable(_NO_COMPLETION) from error

    def _add(self, part: Json) -> None:
        self.usages += [part["usage"]] if part.get("usage") else []
        _add(self.head, {name: value for name, value in part.items() if name != "choices"})
        for choice in part.get("choices") or ():
            message = choice.get("message") or choice.get("delta") or {}
            known = self.choice(int(choice.get("index") or 0)).wire
            own = {name: value for name, value in choice.items() if name not in ("message", "delta", "tool_calls")}
            _add(known, own | {name: value for name, value in message.items() if name != "tool_calls"})
            calls = known.setdefault("tool_calls", {})
            for number, call in enumerate(message.get("tool_calls") or ()):
                function = {name: value for name, value in (call.get("function") or {}).items() if value}
                if not isinstance(function.get("arguments", ""), str):
                    function["arguments"] = json.dumps(function["arguments"])
                _add(calls.setdefault(call.get("index", number), {}), function)

    def _read(self) -> None:
        usage, timings, own = (self.head.get(name) or {} for name in ("usage", "timings", "sglext"))
        self.id, self.error = str(self.head.get("id") or ""), self.head.get("error")
        self.num_prompt = _whole(usage.get("prompt_tokens"))
        if self.num_prompt is None and "prompt_n" in timings:
            self.num_prompt = int(timings["prompt_n"]) + int(timings.get("cache_n") or 0)
        self.num_cached = _whole((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        # llama.cpp streams only its timings unasked
        self.num_tokens = _whole(usage.get("completion_tokens", timings.get("predicted_n")))
        for index in range(len(own.get("output_ids") or ())):  # SGLang's, of a stream in one event of its own
            self.choice(index)
        for choice in self.choices.values():
            choice.read(self.head, is_chat=self.is_chat)


_NO_COMPLETION = "the reply is not a completion in OpenAI's format"


class EventReader:
    """The JSON objects of a stream of server-sent events, as its bytes come."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[Json]:
        """The events that are whole once these bytes have come. Raises Unreadable: one is not a JSON object."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != _DONE:
                yield read_object(content)


def read_object(data: bytes, otherwise: str = _NO_COMPLETION) -> Json:
    """A JSON object. Raises Unreadable, which says what to say otherwise: it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(otherwise) from error
    if not isinstance(found, dict):
        raise Unreadable(otherwise)
    return found


def read_reply(exchange: Exchange) -> Reply:
    """The whole reply of an exchange. Raises Unreadable: it is no completion, or the stream ended early."""
    parts = [*EventReader().push(exchange.reply + b"\n")] if exchange.streamed else [read_object(exchange.reply)]
    if any(part.get("error") for part in parts):
        raise Unreadable("the server reported an error in the stream")
    reply = Reply(is_chat=exchange.path in (CHAT, RESPONSES), parts=parts)
    reply.add(*([_of_response(parts)] if exchange.path == RESPONSES else parts))
    if reply.is_chat:  # which has one prompt; truespec's streams name it once
        choices = reply.choices.values()
        known = next((choice.prompt_token_ids for choice in choices if choice.prompt_token_ids), None)
        for choice in choices:
            choice.prompt_token_ids = choice.prompt_token_ids or known
    if not reply.choices:
        raise Unreadable("the reply has no choices")
    if any(choice.finish_reason is None for choice in reply.choices.values()):
        raise Unreadable("the stream ended early")
    return reply


def _add(known: Json, more: Json) -> None:
    """Add what a part of a reply says: texts of an answer and lists grow, the rest is replaced."""
    for name, value in more.items():
        before = known.get(name)
        if isinstance(value, dict):
            known[name] = before if isinstance(before, dict) else {}
            _add(known[name], value)
        elif value is None or before is None:
            known[name] = before if value is None else [*value] if isinstance(value, list) else value
        elif isinstance(value, list) and name not in _ONCE:
            before += value  # in place: the lists of a stream may be long
        else:
            known[name] = before + value if name in _GROWS else value


def _of_response(parts: Sequence[Json]) -> Json:
    """A response of the Responses API, from all that came of it, in the form of a chat's reply. Raises Unreadable: it
    is none."""
    try:
        response = parts[-1].get("response") or parts[-1]
        items = response["output"]
        said, thought = (
            [part for one in items if one["type"] == kind for part in one["content"]]
            for kind in ("message", "reasoning")
        )
        choice = {
            "index": 0,
            "finish_reason": {"completed": "stop", "incomplete": "length"}.get(response["status"]),
            "logprobs": {"content": [entry for part in said for entry in part["logprobs"]]},
            "message": {
                "content": "".join(part["text"] for part in said),
                "reasoning": "".join(part["text"] for part in thought),
                "tool_calls": [{"function": one} for one in items if one["type"] == "function_call"],
            },
        }
        usage = {_USAGE.get(name, name): value for name, value in response["usage"].items()}
        return {**response, "choices": [choice], "usage": usage}
    except (LookupError, TypeError, AttributeError) as error:
        raise Unreadable(_NO_COMPLETION) from error


def _ids(values: Any) -> list[int]:
    ids = list(values)
    if any(type(one) is not int for one in ids):
        raise TypeError("token ids are whole numbers")
    return ids


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _logprob(entry: Json) -> float | None:
    made_up = entry.get("id") is not None and entry.get("logprob") == 0  # llama.cpp's, of accepted drafts
    return None if made_up and not entry.get("top_logprobs") else _number(entry.get("logprob"))


def _candidates(top: Any) -> list[Candidate]:
    """Return the candidates that come with a number."""
    if isinstance(top, dict):  # logprobs by text
        named = [(text, _id(None, text), value) for text, value in top.items()]
    else:
        entries = [one for one in top if isinstance(one, dict)]
        named = [(str(one.get("token")), _id(one.get("id"), one.get("token")), one.get("logprob")) for one in entries]
    return [Candidate(text, token, float(value)) for text, token, value in named if isinstance(value, int | float)]


def _id(given: Any, text: Any) -> int | None:
    if isinstance(given, int):
        return given
    found = _TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) if found else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
