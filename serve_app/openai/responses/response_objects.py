"""Responses of the Responses API: whole, and as typed events."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.backends.base import CallPart, ParsedDelta
from serve_app.errors import ErrorReply
from serve_app.openai.replies import (
    ChoiceDelta,
    ReplyHead,
    Usage,
    UsageNow,
    join,
    metadata_of,
    sse_event,
    token_logprobs,
)
from speculative.request import FinishReason

ID_PREFIX = "resp_"
_HEX = 32  # digits of a response's id

Fields = dict[str, Any]


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an item of a response, from which `response_of` finds the response again."""
    return f"{kind}_{response_id.removeprefix(ID_PREFIX)}{index:02d}"


def response_of(id_of_item: str) -> str:
    """The id of the response that an item belongs to, if it is one of ours."""
    return ID_PREFIX + id_of_item.partition("_")[2][:_HEX]


@dataclass(frozen=True, slots=True)
class ResponsesFormat:
    """The format of replies to one request."""

    settings: Mapping[str, Any]  # of the request, as the response repeats them
    stores: bool  # whether the response is to be kept
    keep: Callable[[Fields], Awaitable[bool]]  # keeps a response; returns whether it is kept
    count_tokens: Callable[[str], int]  # of a text
    id_prefix: ClassVar = ID_PREFIX
    operation: ClassVar = "chat"

    def stream(self, *, continuous_usage: bool) -> "ResponseEvents":
        """Return what writes one reply as a stream; its usage comes with its last event."""
        return ResponseEvents(self)

    async def whole(
        self, head: ReplyHead, choices: Sequence[ChoiceDelta], usage: Usage, reported: Fields | None
    ) -> Fields:
        """The whole response."""
        (piece,) = choices
        events = ResponseEvents(self)
        events.piece(head, piece, lambda: usage)
        _, response = await events.finish(head, reported, usage)
        return response

    async def finished(
        self, head: ReplyHead, piece: ChoiceDelta, items: list[Fields], usage: Usage, reported: Fields | None
    ) -> Fields:
        """The response that holds these items; it has been kept, where it was to be.

        Args:
            piece: all of the answer; its end and its weights are used.
            reported: None = a draft, which is not kept.
        """
        cut_off = piece.finish_reason == FinishReason.LENGTH.value
        if cut_off:
            items[-1]["status"] = "incomplete"
        reasoning = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
        about = metadata_of(version for version, _ in piece.weight_versions).get("metadata", {})
        fields = about | piece.version_fields() | piece.seed_fields() | (reported or {})
        response = self.response(
            head,
            "incomplete" if cut_off else "completed",
            output=items,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": self.count_tokens(reasoning) if reasoning else 0,
                    "accepted_prediction_tokens": usage.accepted_tokens,
                    "rejected_prediction_tokens": usage.rejected_tokens,
                },
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            incomplete_details={"reason": "max_output_tokens"} if cut_off else None,
            completed_at=None if cut_off else int(time.time()),
            **fields,
        )
        if self.stores and reported is not None:
            response["store"] = await self.keep(response)
        return response

    def response(self, head: ReplyHead, status: str, **fields: Any) -> Fields:
        """A response as far as it has come."""
        begun = {
            "id": head.reply_id,
            "object": "response",
            "created_at": head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "output": [],
            "usage": None,
            "store": self.stores,
        }
        return begun | dict(self.settings) | fields


class ResponseEvents:
    """Writes one response as typed events (a `ReplyStream`)."""

    def __init__(self, form: ResponsesFormat) -> None:
        self._form = form
        self._number = 0  # of the next event
        self._items: list[Fields] = []  # all of them; the last may still grow
        self._open: _OpenItem | None = None
        self._call = -1  # the index of the call that grows
        self._pieces: list[ChoiceDelta] = []  # without their text
        self._waiting: deque[Fields] = deque()  # logprobs of tokens whose text was not read yet
        # Of tokens that were read since the last message ended; the next one's own list.
        self._entries: list[Fields] = []
        self._num_sent = 0  # of these
        self._last: list[bytes] | None = None  # the events that end the last item

    def piece(self, head: ReplyHead, piece: ChoiceDelta, usage: UsageNow) -> bytes:
        """The events of one piece; before the first, those that begin the response."""
        events = self._begun(head)
        self._waiting.extend(token_logprobs(piece.logprobs or ()))
        all_of_it = ParsedDelta(piece.text, piece.reasoning, piece.calls)
        for num_tokens, said in piece.parts or ((len(piece.token_ids), all_of_it),):
            events += self._said(head, said, num_tokens)
        self._pieces.append(piece._replace(text="", token_ids=(), token_kinds=(), logprobs=None, calls=(), parts=()))
        return b"".join(events)

    def _said(self, head: ReplyHead, said: ParsedDelta, num_tokens: int) -> list[bytes]:
        """The events of a part of the text."""
        events: list[bytes] = []
        if said.reasoning:
            content = [{"type": "reasoning_text", "text": ""}]
            events += self._opened(head, "rs", {"type": "reasoning", "summary": [], "content": content})
            events += self._grown(said.reasoning)
        if said.content:
            self._take(num_tokens)
            num_tokens = 0
            events += self._opened(head, "msg", _message(self._entries))
            events += self._grown(said.content)
        for part in said.calls:
            events += self._called(head, part)
        self._take(num_tokens)
        return events

    def _take(self, num_tokens: int) -> None:
        """Count tokens as read: their logprobs belong to the message that grows, or to the next."""
        self._entries += [self._waiting.popleft() for _ in range(min(num_tokens, len(self._waiting)))]

    async def end(self, head: ReplyHead, reported: Fields | None, usage: UsageNow) -> bytes:
        """The events that end the last item and the response."""
        events, response = await self.finish(head, reported, usage())
        last = self._event(f"response.{response['status']}", response=response)
        if reported is None:
            self._number -= 1
        return b"".join((*events, last))

    async def finish(self, head: ReplyHead, reported: Fields | None, usage: Usage) -> tuple[list[bytes], Fields]:
        """The events that end the last item, and the response."""
        whole = join(self._pieces)
        if self._last is None:
            self._last = [] if self._items else self._opened(head, "msg", _message(self._entries))
            self._entries += self._waiting
            cut_off = whole.finish_reason == FinishReason.LENGTH.value
            self._last += self._closed("incomplete" if cut_off else "completed")
        return self._last, await self._form.finished(head, whole, self._items, usage, reported)

    def failure(self, head: ReplyHead, error: ErrorReply) -> bytes:
        """The event of a failure; the items that were finished before it are there."""
        done = self._items[:-1] if self._open else self._items
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        reported = {"code": code, "message": error.message}
        failed = self._form.response(head, "failed", output=done, error=reported)
        return b"".join([*self._begun(head), self._event("response.failed", response=failed)])

    def _begun(self, head: ReplyHead) -> list[bytes]:
        """The events that begin the response, if it has not begun."""
        if self._number:
            return []
        begun = self._form.response(head, "in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else self._open.kind

    def _event(self, name: str, /, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._number}
        self._number += 1
        return sse_event(numbered | fields, name)

    def _opened(self, head: ReplyHead, kind: str, item: Fields) -> list[bytes]:
        """The events that begin an item, if it is not the one that grows."""
        if self._kind == kind and kind != "fc":
            return []
        events = self._closed("completed")
        index = len(self._items)
        item = {"id": item_id(kind, head.reply_id, index), **item, "status": "in_progress"}
        self._items.append(item)
        self._open = _OpenItem(kind, index, item)
        begun = item if kind == "fc" else item | {"content": []}
        events.append(self._event("response.output_item.added", output_index=index, item=begun))
        if kind != "fc":
            part = item["content"][0] | ({"logprobs": []} if kind == "msg" else {})
            events.append(self._event("response.content_part.added", **self._open.place(), part=part))
        return events

    def _called(self, head: ReplyHead, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if part.index != self._call:
            self._call = part.index
            named = {"call_id": part.call_id, "name": part.name, "arguments": ""}
            events += self._opened(head, "fc", {"type": "function_call", **named})
        return events + (self._grown(part.arguments) if part.arguments else [])

    def _grown(self, text: str) -> list[bytes]:
        """The event of more text for the item that grows."""
        assert self._open is not None
        self._open.texts.append(text)
        more: Fields = {}
        if self._open.kind == "msg":
            more["logprobs"], self._num_sent = self._entries[self._num_sent :], len(self._entries)
        return [self._event(f"response.{self._open.stem}.delta", **self._open.place(), delta=text, **more)]

    def _closed(self, status: str) -> list[bytes]:
        """The events that end the item that grows, if there is one."""
        if self._open is None:
            return []
        unsent = self._kind == "msg" and self._num_sent < len(self._entries)
        events = self._grown("") if unsent else []  # tokens without text, such as the last one
        ending, self._open = self._open, None
        text, item = ending.finish(status), ending.item
        if ending.kind == "msg":
            self._entries, self._num_sent = [], 0
        name = f"response.{ending.stem}.done"
        if ending.kind == "fc":
            events += [self._event(name, **ending.place(), name=item["name"], arguments=text)]
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if ending.kind == "msg" else {}
            events += [
                self._event(name, **ending.place(), text=text, **logprobs),
                self._event("response.content_part.done", **ending.place(), part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=ending.index, item=item)]


_STEMS = {"rs": "reasoning_text", "msg": "output_text", "fc": "function_call_arguments"}  # of events' names


class _OpenItem:
    """The item that grows."""

    def __init__(self, kind: str, index: int, item: Fields) -> None:
        self.kind = kind
        self.index = index
        self.item = item
        self.stem = _STEMS[kind]
        self.texts: list[str] = []

    def place(self) -> Fields:
        """Return where an event belongs."""
        placed = {"item_id": self.item["id"], "output_index": self.index}
        return placed if self.kind == "fc" else placed | {"content_index": 0}

    def finish(self, status: str) -> str:
        """End the item; returns its text."""
        text = "".join(self.texts)
        self.item["status"] = status
        if self.kind == "fc":
            self.item["arguments"] = text
        else:
            self.item["content"][0]["text"] = text
        return text


def _message(logprobs: list[Fields]) -> Fields:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": logprobs}
    return {"type": "message", "role": "assistant", "content": [part]}
