"""Reads replies with OpenAI's API, whole or event by event: of each choice its tokens, their logprobs and how it ended,
wherever a server reports them. The watch, the audit, chaos, the demo and the bench read by it. Standard library only.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.referee.wire.exchange import CHAT, Exchange
from speculative.errors import TruespecError

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_LINE_END = re.compile(rb"[\r\n]")
_DONE = b"[DONE]"

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

    token_ids: emitted, None = the server did not report them.
    logprobs: of each of them, nats; None = not reported.
    text: of the answer, without its reasoning and its calls.
    reasoning: its text.
    finish_reason: as reported.
    stopped_by: the stop text or token that ended it, as far as the server says so.
    prompt_token_ids: None = not reported.
    """

    index: int = 0
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    text: str = ""
    has_text: bool = False  # it was reported, if only as an empty one
    reasoning: str = ""
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    pieces: list[bytes | None] | None = None  # of the text, one a logprob, where they came with ids
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)  # of tools: their names and arguments, by index
    top_logprobs: list[Any] | None = None  # of each token, as reported; `candidates` reads them
    scored_logprobs: list[Any] | None = None  # of each token, as reported; `scored` reads them
    token_texts: list[Any] | None = None  # of each token that has a logprob, as reported
    prompt_logprobs: list[Any] | None = None  # as reported; `logprobs_of_prompt` reads them

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


@dataclass(slots=True)
class Reply:
    """A reply, as far as it has come.

    is_chat: whether it is a chat's.
    error: that the server reported in it.
    num_prompt: tokens of the prompt.
    num_cached: those of them that a cache had.
    num_tokens: emitted, of all choices together. None = not reported.
    """

    is_chat: bool = False
    id: str = ""
    error: Any = None
    num_prompt: int | None = None
    num_cached: int | None = None
    num_tokens: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def first(self) -> Choice:
        """The first choice; an empty one if there is none."""
        return next(iter(self.choices.values()), None) or Choice()

    def choice(self, index: int) -> Choice:
        """The choice of this index, a new one if there is none yet."""
        return self.choices.setdefault(index, Choice(index))

    def add(self, part: Json) -> None:
        """Add what a whole reply says, or one event of a stream.

        Raises:
            Unreadable: it is no part of a completion.
        """
        try:
            self._add(part)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(_NO_COMPLETION) from error

    def _add(self, part: Json) -> None:
        self.id = str(part.get("id") or self.id)
        self.error = self.error or part.get("error")
        _add_usage(self, part.get("usage") or {}, part.get("timings") or {})
        for wire in part.get("choices") or ():
            _add(self.choice(int(wire.get("index") or 0)), wire, part, is_chat=self.is_chat)
        own = part.get("sglext") or {}  # SGLang's, of a stream in one event of its own
        for index, ids in enumerate(own.get("output_ids") or ()):
            self.choice(index).token_ids = _ids(ids)
            if own.get("input_ids"):
                self.choice(index).prompt_token_ids = tuple(_ids(own["input_ids"]))


_NO_COMPLETION = "the reply is not a completion in OpenAI's format"


class EventReader:
    """The JSON objects of a stream of server-sent events, as its bytes come."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[Json]:
        """The events that are whole once these bytes have come.

        Raises:
            Unreadable: one is not a JSON object.
        """
        *lines, self._rest = _LINE_END.split(self._rest + data)
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != _DONE:
                yield _object(content)


def _object(data: bytes) -> Json:
    """A JSON object.

    Raises:
        Unreadable: it is none.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(_NO_COMPLETION) from error
    if not isinstance(found, dict):
        raise Unreadable(_NO_COMPLETION)
    return found


def read_reply(exchange: Exchange) -> Reply:
    """The whole reply of an exchange.

    Raises:
        Unreadable: it is no completion, or the stream ended early.
    """
    reply = Reply(is_chat=exchange.path == CHAT)
    for part in EventReader().push(exchange.reply + b"\n") if exchange.streamed else [_object(exchange.reply)]:
        if part.get("error"):
            raise Unreadable("the server reported an error in the stream")
        reply.add(part)
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


def _add_usage(reply: Reply, usage: Json, timings: Json) -> None:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    tokens = usage.get("completion_tokens", timings.get("predicted_n"))  # llama.cpp streams only the latter unasked
    prompt = usage.get("prompt_tokens")
    if prompt is None and "prompt_n" in timings:
        prompt = int(timings["prompt_n"]) + int(timings.get("cache_n") or 0)
    reply.num_prompt = reply.num_prompt if prompt is None else int(prompt)
    reply.num_cached = reply.num_cached if cached is None else int(cached)
    reply.num_tokens = reply.num_tokens if tokens is None else int(tokens)


def _add(choice: Choice, wire: Json, part: Json, *, is_chat: bool) -> None:
    """Add what one part of a reply says of a choice."""
    message = wire.get("message") or wire.get("delta") or {}
    text = message.get("content") if is_chat else wire.get("text")
    choice.text, choice.has_text = choice.text + (text or ""), choice.has_text or text is not None
    choice.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    for number, call in enumerate(message.get("tool_calls") or ()):
        index, function = call.get("index", number), call.get("function") or {}
        name, arguments = choice.calls.get(index, ("", ""))
        more = function.get("arguments") or ""
        more = more if isinstance(more, str) else json.dumps(more)
        choice.calls[index] = name or str(function.get("name") or ""), arguments + more
    choice.finish_reason = wire.get("finish_reason") or choice.finish_reason
    stopped_by = next((wire[name] for name in ("stop_reason", "matched_stop") if wire.get(name) is not None), None)
    choice.stopped_by = stopped_by if isinstance(stopped_by, str | int) else choice.stopped_by
    prompt = wire.get("prompt_token_ids") or part.get("prompt_token_ids")
    if prompt:
        choice.prompt_token_ids = tuple(_ids(prompt))
    if wire.get("prompt_logprobs") is not None:
        choice.prompt_logprobs = list(wire["prompt_logprobs"])
    own_ids, pieces = _add_logprobs(choice, wire.get("logprobs") or {})
    ids = wire.get("token_ids")
    ids = wire.get("response_token_ids") if ids is None else ids  # SGLang's, of chats
    if ids is None and own_ids and None not in own_ids:
        ids, choice.pieces = own_ids, _longer(choice.pieces, pieces)
    choice.token_ids = _longer(choice.token_ids, None if ids is None else _ids(ids))


def _add_logprobs(choice: Choice, reported: Json) -> tuple[list[int | None], list[bytes | None] | None]:
    """Add what is reported of each token. Returns the ids that stand beside the logprobs, None = there is none, and the
    pieces of text, where a form has them."""
    content, values = reported.get("content"), reported.get("token_logprobs")
    if content is None:
        choice.logprobs = _longer(choice.logprobs, None if values is None else map(_number, values))
        choice.top_logprobs = _longer(choice.top_logprobs, reported.get("top_logprobs"))
        choice.scored_logprobs = _longer(choice.scored_logprobs, reported.get("scored_logprobs"))
        choice.token_texts = _longer(choice.token_texts, reported.get("tokens"))
        return [_id(None, text) for text in reported.get("tokens") or ()], None
    entries = [_read_entry(entry) for entry in content]  # a chat's, or llama.cpp's
    choice.logprobs = _longer(choice.logprobs, (entry.logprob for entry in entries))
    choice.top_logprobs = _longer(choice.top_logprobs, (entry.get("top_logprobs") for entry in content))
    if any("scored" in entry for entry in content):  # truespec's
        choice.scored_logprobs = _longer(choice.scored_logprobs, (entry.get("scored") or {} for entry in content))
    choice.token_texts = _longer(choice.token_texts, (entry.get("token") for entry in content))
    return [entry.token_id for entry in entries], [entry.piece for entry in entries]


def _longer(known: list[Any] | None, more: Iterable[Any] | None) -> list[Any] | None:
    """With more at its end; None = nothing was reported."""
    return known if more is None else [*(known or ()), *more]


def _ids(values: Any) -> list[int]:
    ids = list(values)
    if any(type(one) is not int for one in ids):
        raise TypeError("token ids are whole numbers")
    return ids


class _Entry(NamedTuple):
    """The entry of one token; None = it is not reported."""

    token_id: int | None
    logprob: float | None
    piece: bytes | None


def _read_entry(entry: Json) -> _Entry:
    own = entry.get("id") is not None
    made_up = own and entry.get("logprob") == 0 and not entry.get("top_logprobs")  # llama.cpp's, of accepted drafts
    logprob = None if made_up else _number(entry.get("logprob"))
    piece = bytes(entry["bytes"]) if own and entry.get("bytes") else None
    return _Entry(_id(entry.get("id"), entry.get("token")), logprob, piece)


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
