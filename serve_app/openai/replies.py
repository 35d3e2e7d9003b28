"""Replies of /v1/completions and /v1/chat/completions: whole ones, chunks, usage and logprobs as OpenAI writes them.

Replies are built as plain dictionaries, one `ChoiceDelta` at a time. A whole reply is rendered from the joined deltas
of its choices by the same code as a streamed chunk.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from serve_app.backends.base import CallPart, ParsedDelta
from serve_app.errors import ErrorReply


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """The logprobs entry of one delivered token, or of one that could have stood in its place."""

    token_id: int
    text: str
    raw: bytes
    logprob: float | None  # None: the first token of an echoed prompt, which nothing comes before
    top: tuple["TokenEntry", ...] = ()  # most likely first
    text_offset: int = 0  # characters of the choice before this token
    scored: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of logprob_token_ids


class ChoiceDelta(NamedTuple):
    """The part that one step adds to one choice of a reply."""

    index: int  # type: ignore[assignment]  # tuples' own `index` finds an item, which nobody wants here
    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_kinds: tuple[str, ...] = ()  # each token's TokenKind
    logprobs: tuple[TokenEntry, ...] | None = None
    finish_reason: str | None = None
    first: bool = False  # the choice's first piece
    # of prompt tokens 1.., as vLLM writes them; in the first piece of a prompt's choice 0
    prompt_logprobs: tuple[dict[str, Any], ...] | None = None
    weight_versions: tuple[tuple[str, int], ...] = ()  # which weights made so many tokens, in order
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    unrepeatable: str | None = None  # of the last piece: why its seed may give a different text; "" = it gives the same
    stop_reason: str | int | None = None  # of the last piece: the stop string or stop token that ended the choice
    # of a text that is read: numbers of tokens, and what they say, in order; () = all of it as above
    parts: tuple[tuple[int, ParsedDelta], ...] = ()

    def seed_fields(self) -> dict[str, Any]:
        """`reproducible`, if a seed was sent: whether it gives this text again; if not, why not."""
        if self.unrepeatable is None:
            return {}
        if self.unrepeatable == "":
            return {"reproducible": True}
        return {"reproducible": False, "reproducible_reason": self.unrepeatable}

    def version_fields(self) -> dict[str, Any]:
        """`weight_versions`, if the weights changed midway."""
        if len(self.weight_versions) < 2:
            return {}
        return {"weight_versions": [{"version": name, "tokens": count} for name, count in self.weight_versions]}

    def prompt_fields(self) -> dict[str, Any]:
        """`prompt_logprobs` if requested, in vLLM's form: null for the first token."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": [None, *self.prompt_logprobs]}


def join(pieces: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """All pieces of a choice merged into one."""
    asked = pieces[0].logprobs is not None
    return ChoiceDelta(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        token_kinds=tuple(kind for piece in pieces for kind in piece.token_kinds),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs or ()) if asked else None,
        finish_reason=pieces[-1].finish_reason,
        first=True,
        prompt_logprobs=pieces[0].prompt_logprobs,
        weight_versions=_runs(piece.weight_versions for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=put_together(part for piece in pieces for part in piece.calls),
        unrepeatable=pieces[-1].unrepeatable,
        stop_reason=pieces[-1].stop_reason,
        parts=tuple(part for piece in pieces for part in piece.parts),
    )


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


def _runs(parts: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    """Counts of tokens by version, adjacent runs of one version merged; parts without tokens are ignored."""
    runs: list[tuple[str, int]] = []
    for version, count in (run for part in parts for run in part):
        if runs and (runs[-1][0] == version or count == 0):
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        elif runs and runs[-1][1] == 0:
            runs[-1] = (version, count)
        else:
            runs.append((version, count))
    return tuple(runs)


def metadata_of(versions: Iterable[str]) -> dict[str, Any]:
    """`metadata` with the weights' version, as SGLang's OpenAI endpoints have it: the newest, and all if there are
    several."""
    names = list(dict.fromkeys(versions))
    if not names:
        return {}
    several = {"weight_versions": names} if len(names) > 1 else {}
    return {"metadata": {"weight_version": names[-1], **several}}


@dataclass(slots=True)
class Usage:
    """Tokens of one reply: what was delivered, and how much of it came from drafts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def to_wire(self) -> dict[str, Any]:
        """OpenAI's usage object; draft tokens stand where OpenAI counts predicted outputs."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Shared by all chunks of one reply."""

    reply_id: str
    created: int  # unix seconds
    model: str
    system_fingerprint: str
    prompts: tuple[tuple[int, ...], ...]  # token ids
    num_choices: int  # of each prompt
    with_token_ids: bool
    with_scored: bool  # logprobs of logprob_token_ids
    with_usage: bool  # streams only
    with_token_kinds: bool = False
    num_prompt_logprobs: int | None = None  # most likely tokens at each of the prompt's positions; None = not requested

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A reply object or a chunk."""
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream; it has `usage: null` if a usage chunk follows, as OpenAI does."""
        envelope = self.envelope(kind, choices)
        if self.with_usage:
            envelope["usage"] = None
        return envelope

    def token_fields(self, piece: ChoiceDelta) -> dict[str, Any]:
        """`token_ids` and plain `token_logprobs`, and `token_kinds`, if requested."""
        fields: dict[str, Any] = {"token_kinds": list(piece.token_kinds)} if self.with_token_kinds else {}
        if not self.with_token_ids:
            return fields
        fields["token_ids"] = list(piece.token_ids)
        if piece.logprobs is not None:
            fields["token_logprobs"] = [entry.logprob for entry in piece.logprobs]
        return fields


UsageNow = Callable[[], Usage]
"""The tokens up to now."""


class ReplyStream(Protocol):
    """Writes one reply as server-sent events."""

    def piece(self, head: ReplyHead, piece: ChoiceDelta, usage: UsageNow) -> bytes:
        """The events of one piece; before the first, those that begin the reply."""
        ...

    async def end(self, head: ReplyHead, reported: dict[str, Any] | None, usage: UsageNow) -> bytes:
        """The events after the last piece; `reported` is what there is to say of the whole reply. None = a draft, of
        which nothing is kept: the end itself follows."""
        ...

    def failure(self, head: ReplyHead, error: ErrorReply) -> bytes:
        """The event that ends a reply which failed."""
        ...


class ReplyFormat(Protocol):
    """The format of one endpoint's replies: the beginning of their ids, and OpenTelemetry's name of the operation."""

    id_prefix: ClassVar[str]
    operation: ClassVar[str]

    def stream(self, *, continuous_usage: bool) -> ReplyStream:
        """Return what writes one reply as a stream."""
        ...

    async def whole(
        self, head: ReplyHead, choices: Sequence[ChoiceDelta], usage: Usage, reported: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The whole reply; `reported` as in `ReplyStream.end`."""
        ...


class _ChunkFormat(ReplyFormat, ABC):
    """A format whose streams are chunks, which look like the whole reply."""

    chunk_kind: ClassVar[str]

    def stream(self, *, continuous_usage: bool) -> ReplyStream:
        """Return what writes one reply as a stream."""
        return ChunkStream(self, continuous_usage=continuous_usage)

    def opening(self, head: ReplyHead) -> list[dict[str, Any]]:
        """The chunks before the first piece."""
        return []

    @abstractmethod
    def chunk(self, head: ReplyHead, piece: ChoiceDelta) -> dict[str, Any]:
        """The chunk of one piece."""


class ChunkStream:
    """Writes a reply as chunks, and `[DONE]`; an error ends it without."""

    def __init__(self, chunks: _ChunkFormat, *, continuous_usage: bool) -> None:
        self._chunks = chunks
        self._continuous_usage = continuous_usage
        self._begun = False

    def piece(self, head: ReplyHead, piece: ChoiceDelta, usage: UsageNow) -> bytes:
        """The chunk of one piece."""
        chunks = [*([] if self._begun else self._chunks.opening(head)), self._chunks.chunk(head, piece)]
        self._begun = True
        counted = {"usage": usage().to_wire()} if self._continuous_usage else {}
        return b"".join(sse_event(chunk | counted) for chunk in chunks)

    async def end(self, head: ReplyHead, reported: dict[str, Any] | None, usage: UsageNow) -> bytes:
        """The closing chunk, where there is something to say, and the end."""
        reported = (reported or {}) | ({"usage": usage().to_wire()} if head.with_usage else {})
        closing = sse_event(head.envelope(self._chunks.chunk_kind, []) | reported) if reported else b""
        return closing + b"data: [DONE]\n\n"

    def failure(self, head: ReplyHead, error: ErrorReply) -> bytes:
        """The error."""
        return sse_event(error.body())


to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def sse_event(payload: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event. ASCII only: some clients take U+2028 for the end of a line."""
    named = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return named + b"data: " + to_json(payload).encode("ascii") + b"\n\n"


class CompletionFormat(_ChunkFormat):
    """Replies of /v1/completions. Chunks and whole replies share one shape."""

    id_prefix = "cmpl-"
    operation = chunk_kind = "text_completion"

    def chunk(self, head: ReplyHead, piece: ChoiceDelta) -> dict[str, Any]:
        """The chunk of one piece."""
        return head.chunk(self.chunk_kind, [self._choice(head, piece)]) | _metadata([piece])

    async def whole(
        self, head: ReplyHead, choices: Sequence[ChoiceDelta], usage: Usage, reported: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The whole reply."""
        rendered = [self._choice(head, piece) for piece in choices]
        return (
            head.envelope(self.chunk_kind, rendered)
            | {"usage": usage.to_wire()}
            | _metadata(choices)
            | (reported or {})
        )

    def _choice(self, head: ReplyHead, piece: ChoiceDelta) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else _legacy_logprobs(piece.logprobs, head.with_scored),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if head.with_token_ids and piece.first:
            choice["prompt_token_ids"] = list(head.prompts[piece.index // head.num_choices])
        reported = piece.version_fields() | piece.seed_fields() | piece.prompt_fields()
        return choice | head.token_fields(piece) | reported


class ChatFormat(_ChunkFormat):
    """Replies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    operation = "chat"
    chunk_kind = "chat.completion.chunk"

    def opening(self, head: ReplyHead) -> list[dict[str, Any]]:
        """One chunk per choice, with the role."""
        empty = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [head.chunk(self.chunk_kind, [{"index": index, **empty}]) for index in range(head.num_choices)]
        chunks[0] |= self._prompt_fields(head)
        return chunks

    def chunk(self, head: ReplyHead, piece: ChoiceDelta) -> dict[str, Any]:
        """The chunk of one piece."""
        says_other = piece.finish_reason is not None or piece.reasoning or piece.calls
        delta: dict[str, Any] = {"content": piece.text} if piece.text or not says_other else {}
        if piece.reasoning:
            delta["reasoning"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [_call_delta(part) for part in piece.calls]
        chunk = head.chunk(self.chunk_kind, [self._choice(head, piece, "delta", delta)])
        return chunk | _metadata([piece]) | piece.prompt_fields()

    async def whole(
        self, head: ReplyHead, choices: Sequence[ChoiceDelta], usage: Usage, reported: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The whole reply."""
        rendered = [self._choice(head, piece, "message", _message(piece)) for piece in choices]
        prompt = self._prompt_fields(head) | choices[0].prompt_fields()
        counted = {"usage": usage.to_wire()} | _metadata(choices)
        return head.envelope("chat.completion", rendered) | counted | prompt | (reported or {})

    def _choice(self, head: ReplyHead, piece: ChoiceDelta, name: str, said: dict[str, Any]) -> dict[str, Any]:
        entries = piece.logprobs
        logprobs = None if entries is None else {"content": token_logprobs(entries), "refusal": None}
        choice = {"index": piece.index, name: said, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        ended = {} if piece.finish_reason is None else {"stop_reason": piece.stop_reason}
        return choice | ended | head.token_fields(piece) | piece.version_fields() | piece.seed_fields()

    def _prompt_fields(self, head: ReplyHead) -> dict[str, Any]:
        return {"prompt_token_ids": list(head.prompts[0])} if head.with_token_ids else {}


def _metadata(pieces: Sequence[ChoiceDelta]) -> dict[str, Any]:
    return metadata_of(version for piece in pieces for version, _ in piece.weight_versions)


def _message(piece: ChoiceDelta) -> dict[str, Any]:
    says_other = piece.reasoning or piece.calls
    content = None if says_other and not piece.text else piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if piece.reasoning:
        message["reasoning"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = [
            {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in piece.calls
        ]
    return message


def _call_delta(part: CallPart) -> dict[str, Any]:
    """A part of a call, as OpenAI streams it: the first names the call."""
    reported: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.name is not None:
        reported |= {"id": part.call_id, "type": "function"}
        reported["function"] = {"name": part.name, "arguments": part.arguments}
    return reported


def _legacy_logprobs(entries: Sequence[TokenEntry], with_scored: bool) -> dict[str, Any]:
    """The parallel arrays of the old completions API; the emitted token is always among the top ones."""
    scored = {"scored_logprobs": [_scored(entry) for entry in entries]} if with_scored else {}
    top_logprobs: list[dict[str, float | None] | None] = []
    for entry in entries:
        top: dict[str, float | None] = {}
        for candidate in entry.top:
            top.setdefault(candidate.text, candidate.logprob)
        if entry.logprob is not None:
            top.setdefault(entry.text, entry.logprob)
        top_logprobs.append(None if entry.logprob is None else top)
    return scored | {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top_logprobs,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _scored(entry: TokenEntry) -> dict[str, float]:
    return {str(token): logprob for token, logprob in entry.scored}


def token_logprobs(entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
    """The logprobs of tokens, with the most likely ones at each position."""

    def render(entry: TokenEntry) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.raw)}

    content = []
    for entry in entries:
        scored = {"scored": _scored(entry)} if entry.scored else {}
        content.append(render(entry) | {"top_logprobs": [render(candidate) for candidate in entry.top]} | scored)
    return content


def finite_logprob(logprob: float) -> float:
    """A logprob that JSON can hold: OpenAI writes -9999.0 for a token that cannot occur."""
    return -9999.0 if logprob == -math.inf else logprob
