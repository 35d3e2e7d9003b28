"""Reads exchanges: of each choice its tokens, their logprobs and how it ended, in whichever form they come."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploy.exchange.exchanges import CHAT, Exchange
from speculative.errors import TruespecError

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_DONE = b"[DONE]"

Json = dict[str, Any]


class Unreadable(TruespecError):
    """An exchange that cannot be judged; the message says why."""


@dataclass(slots=True)
class Choice:
    """One choice of a reply.

    token_ids: emitted, None = the server did not report them. logprobs: of each of them, nats; None = not reported.
    text: of the answer. finish_reason: as reported. stopped_by: whether a stop text of the server ended it, as
    far as it says so. prompt_token_ids: None = not reported.
    """

    index: int
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    text: str = ""
    finish_reason: str | None = None
    stopped_by: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    pieces: list[bytes | None] | None = None  # of the text, one a logprob, where they came with ids
    called: bool = False  # the answer is, or holds, calls of tools: its text is not in `text`


@dataclass(slots=True)
class Reply:
    """A whole reply.

    num_prompt: tokens of the prompt. num_cached: those of them that a cache had. num_tokens: emitted, of all choices
    together. None = not reported.
    """

    id: str = ""
    num_prompt: int | None = None
    num_cached: int | None = None
    num_tokens: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    def choice(self, index: int) -> Choice:
        """The choice of this index, a new one if there is none yet."""
        return self.choices.setdefault(index, Choice(index))


def read_reply(exchange: Exchange) -> Reply:
    """The reply of an exchange.

    Raises:
        Unreadable: it is no completion, or the stream ended early.
    """
    reply = Reply()
    is_chat = exchange.path == CHAT
    try:
        for part in _parts(exchange):
            if part.get("error"):
                raise Unreadable("the server reported an error in the stream")
            _add_part(reply, part, is_chat=is_chat)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable("the reply is no completion in OpenAI's format") from error
    if is_chat:  # which has one prompt; truespec's streams name it once
        _share_prompt(reply.choices.values())
    if not reply.choices:
        raise Unreadable("the reply has no choices")
    if any(choice.finish_reason is None for choice in reply.choices.values()):
        raise Unreadable("the stream ended early")
    return reply


def _parts(exchange: Exchange) -> Iterator[Json]:
    """The JSON objects of a reply: one, or one an event."""
    if not exchange.streamed:
        yield _object(exchange.reply)
        return
    for line in exchange.reply.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != _DONE:
            yield _object(data)


def _object(data: bytes) -> Json:
    read = json.loads(data)
    if not isinstance(read, dict):
        raise ValueError("not an object")
    return read


def _add_part(reply: Reply, part: Json, *, is_chat: bool) -> None:
    """Add what one part of a reply says."""
    reply.id = str(part.get("id") or reply.id)
    _add_usage(reply, part.get("usage") or {}, part.get("timings") or {})
    for wire in part.get("choices") or ():
        _add(reply.choice(int(wire.get("index") or 0)), wire, part, is_chat=is_chat)
    own = part.get("sglext") or {}  # SGLang's, of a stream in one event of its own
    for index, ids in enumerate(own.get("output_ids") or ()):
        reply.choice(index).token_ids = _ids(ids)
        if own.get("input_ids"):
            reply.choice(index).prompt_token_ids = tuple(_ids(own["input_ids"]))


def _share_prompt(choices: Collection[Choice]) -> None:
    known = next((choice.prompt_token_ids for choice in choices if choice.prompt_token_ids), None)
    for choice in choices:
        choice.prompt_token_ids = choice.prompt_token_ids or known


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
    choice.text += (message.get("content") if is_chat else wire.get("text")) or ""
    choice.called |= bool(message.get("tool_calls") or message.get("reasoning_content") or message.get("reasoning"))
    choice.finish_reason = wire.get("finish_reason") or choice.finish_reason
    choice.stopped_by |= isinstance(wire.get("stop_reason") or wire.get("matched_stop"), str)
    prompt = wire.get("prompt_token_ids") or part.get("prompt_token_ids")
    if prompt:
        choice.prompt_token_ids = tuple(_ids(prompt))
    entries = _entries(wire.get("logprobs") or {})
    if entries:
        choice.logprobs = [*(choice.logprobs or ()), *(entry.logprob for entry in entries)]
    ids = wire.get("token_ids")
    ids = wire.get("response_token_ids") if ids is None else ids  # SGLang's, of chats
    if ids is None and entries and all(entry.token_id is not None for entry in entries):
        ids = [entry.token_id for entry in entries]
        choice.pieces = [*(choice.pieces or ()), *(entry.piece for entry in entries)]
    if ids is not None:
        choice.token_ids = [*(choice.token_ids or ()), *_ids(ids)]


def _ids(values: Any) -> list[int]:
    ids = list(values)
    if any(type(one) is not int for one in ids):
        raise TypeError("token ids are whole numbers")
    return ids


class _Entry(NamedTuple):
    """What is reported of one token; None = it is not."""

    token_id: int | None
    logprob: float | None
    piece: bytes | None = None


def _entries(reported: Json) -> list[_Entry]:
    content = reported.get("content")
    if content is not None:  # a chat's, or llama.cpp's
        return [_read_entry(entry) for entry in content]
    values = reported.get("token_logprobs") or ()
    texts: Sequence[Any] = reported.get("tokens") or [None] * len(values)
    return [_Entry(_id(None, text), _number(value)) for text, value in zip(texts, values, strict=False)]


def _read_entry(entry: Json) -> _Entry:
    own = entry.get("id") is not None
    made_up = own and entry.get("logprob") == 0 and not entry.get("top_logprobs")  # llama.cpp's, of accepted drafts
    logprob = None if made_up else _number(entry.get("logprob"))
    piece = bytes(entry["bytes"]) if own and entry.get("bytes") else None
    return _Entry(_id(entry.get("id"), entry.get("token")), logprob, piece)


def _id(given: Any, text: Any) -> int | None:
    if isinstance(given, int):
        return given
    found = _TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) if found else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
