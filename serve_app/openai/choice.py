"""One choice of a response while its tokens arrive."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from serve_app.backends.base import ParsedDelta
from serve_app.errors import RequestAborted
from serve_app.openai.chat.chat_preprocessor import ResponseParser
from serve_app.openai.completions.echo import Echo
from serve_app.openai.plan import Planned
from serve_app.openai.replies import (
    ChoiceDelta,
    TokenEntry,
    Usage,
    finite_logprob,
    join,
    put_together,
)
from serve_app.referee.records.receipts import Ending
from serve_app.referee.records.records import Record
from serve_app.text.answer_text import AnswerText
from serve_app.text.tokenizer import StopMatcher, Tokenizer
from speculative.errors import EngineFault
from speculative.request import FinishReason, Request, TokenDelta, TokenKind, TokenLogprobs


class _Choice:
    """One choice of a reply while it is generated."""

    def __init__(self, index: int, request: Request, job: Planned, tokenizer: Tokenizer, echo: Echo | None) -> None:
        self._index = index
        self._request = request
        self._echo = echo
        self._num_ranked = job.head.num_prompt_logprobs
        wire, answers = job.asked.wire, job.prompted.answers
        self._tokens_as_ids = bool(wire.return_tokens_as_token_ids)
        self._with_logprobs = request.params.returns_logprobs
        self._with_tokens = self._with_logprobs or job.head.with_token_ids or job.head.with_token_kinds
        self._tokenizer = tokenizer
        keeps_special = wire.skip_special_tokens is False or (answers is not None and answers.keeps_special)
        markers = () if answers is None else answers.markers
        self._reader = None if answers is None else _Reader(answers)
        detokenizer = tokenizer.detokenizer(skip_special=not keeps_special, shown=markers, continuation=True)
        includes = bool(wire.include_stop_str_in_output)
        matcher = StopMatcher(job.stops, includes)
        self._text = AnswerText(detokenizer, matcher, include_stop=includes, min_tokens=request.params.min_tokens)
        self.ending = Ending("length", job.stops, includes, None if keeps_special else tuple(markers))
        self._text_offset = 0 if echo is None else len(echo.prompt.text)
        self._begun = False
        self._versions: dict[str, None] = {}  # of the weights that made its tokens
        self._job_unrepeatable = job.unrepeatable
        self._held: list[ChoiceDelta] = []  # tokens that had nothing to say; the next piece has them too
        self._prompt_due = request.params.prompt_logprobs is not None  # its logprobs are still to come
        self._prompt_entries: tuple[dict[str, Any], ...] | None = None
        self._parts: list[tuple[int, ParsedDelta]] = []  # of what was read in it, for the next piece
        self.record = Record(request, "", 0.0, 0, keeps_alternatives=False) if job.asked.wire.receipt else None
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_cached = 0

    @property
    def ended_here(self) -> bool:
        """Return whether a stop string ended it, of which the source knows nothing."""
        return self._text.stopped

    def push(self, delta: TokenDelta) -> ChoiceDelta | None:
        """Take in a delta; None when it has nothing to tell the client.

        Raises:
            EngineFault: the engine failed on this request.
            RequestAborted: the engine let go of it.
        """
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineFault(f"{delta.request_id}: {delta.error or 'the engine gave no reason'}")
        if delta.finish_reason is FinishReason.ABORT:
            raise RequestAborted(f"{delta.request_id} was aborted by the engine.")
        if self.record is not None:
            self.record.take(delta)
        if self._prompt_due:
            self._take_prompt_logprobs(delta)
        texts, released = self._text.push(delta.token_ids, delta.stop_token_id)
        num_delivered = len(released)
        ends = delta.finish_reason is not None or self._text.stopped
        reason = self._end(delta, released) if ends else None
        ids: tuple[int, ...] = delta.token_ids[:num_delivered]
        kinds: tuple[str, ...] = delta.kinds[:num_delivered]
        if delta.num_drafted:
            ended = num_delivered < len(delta.token_ids)  # within the delta, at a stop string
            self.num_accepted += kinds.count(TokenKind.ACCEPTED) if ended else delta.num_accepted
            self.num_rejected += delta.num_drafted - delta.num_accepted
        if delta.num_cached_tokens > self.num_cached:
            self.num_cached = delta.num_cached_tokens
        said = ParsedDelta("".join(released))
        if self._reader is not None:
            said, parts, reason = self._reader.push(ids, texts[:num_delivered], said.content, reason)
            self._parts += parts
        version = delta.weight_version if num_delivered else next(reversed(self._versions), delta.weight_version)
        self._versions[version] = None
        versions: tuple[tuple[str, int], ...] = ((version, num_delivered),)
        has_news = reason is not None or said.content or said.reasoning or said.calls
        waits = not (has_news or (self._with_tokens and num_delivered))
        if waits or self._held:
            self._held.append(ChoiceDelta(self._index, token_ids=ids, token_kinds=kinds, weight_versions=versions))
            if waits:
                return None
            held, self._held = join(self._held), []
            ids, kinds, versions = held.token_ids, held.token_kinds, held.weight_versions
        first, self._begun = not self._begun, True
        in_order, self._parts = tuple(self._parts), []
        entries = self._entries(delta, texts[:num_delivered]) if self._with_logprobs else None
        prompt_entries = self._prompt_entries if first else None
        stop_reason: str | int | None = None  # as vLLM has it: not the tokenizer's own end of text
        if reason is not None:
            of_itself = delta.stop_token_id == self._tokenizer.eos_token_id and not self._request.params.ignore_eos
            stop_reason = self._text.found if self._text.stopped else None if of_itself else delta.stop_token_id
        return ChoiceDelta(
            self._index,
            said.content,
            ids,
            kinds,
            entries,
            reason,
            first,
            prompt_entries,
            versions,
            said.reasoning,
            said.calls,
            None if reason is None else self._unrepeatable(),
            stop_reason,
            in_order,
        )

    def _unrepeatable(self) -> str | None:
        """Return `Planned.unrepeatable` of the finished choice."""
        if self._job_unrepeatable == "" and len(self._versions) > 1:
            return "the weights were changed while it was generated"
        return self._job_unrepeatable

    def _take_prompt_logprobs(self, delta: TokenDelta) -> None:
        """Keep them for the first piece; they must have come when the first token does."""
        if delta.prompt_logprobs is None and not (delta.token_ids or delta.finished):
            return
        reported, num_prompt = delta.prompt_logprobs or (), len(self._request.prompt_token_ids)
        if len(reported) != num_prompt - 1:
            raise EngineFault(
                f"{delta.request_id}: a prompt of {num_prompt} tokens came with {len(reported)} logprobs."
            )
        self._prompt_due = False
        if self._num_ranked is not None:
            self._prompt_entries = tuple(self._ranked(entry, self._num_ranked) for entry in reported)
        if self._echo is not None and self._echo.entries is None:
            self._echo.entries = self._echoed(reported, self._echo.prompt.offsets)

    def _ranked(self, entry: TokenLogprobs, most: int) -> dict[str, Any]:
        """A token of the prompt, and then the likeliest in its place, by their ids, as vLLM writes them."""
        top = [(*one, rank) for rank, one in enumerate(entry.top[:most], start=1) if one[0] != entry.token_id]
        name = self._tokenizer.token_text
        return {
            str(token): {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": name(token)}
            for token, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *top)
        }

    def _echoed(self, reported: Sequence[TokenLogprobs], offsets: Sequence[int]) -> tuple[TokenEntry, ...]:
        """Entries of the prompt's tokens; nothing comes before the first, so it has no logprob."""
        first, num_top = self._request.prompt_token_ids[0], self._request.params.logprobs or 0
        rest = (dataclasses.replace(entry, top=entry.top[:num_top]) for entry in reported)
        return (
            TokenEntry(first, self._name(first), self._tokenizer.token_bytes(first), None, (), offsets[0]),
            *(self._entry(entry, offset) for entry, offset in zip(rest, offsets[1:], strict=True)),
        )

    def _end(self, delta: TokenDelta, released: list[str]) -> str:
        """The finish reason of a choice that ends here; the text held back until now is added to `released`."""
        if delta.finished:
            released.append(self._text.end())
        stops = self._text.stopped or delta.finish_reason is FinishReason.STOP
        self.ending = dataclasses.replace(self.ending, finish_reason="stop" if stops else "length")
        return self.ending.finish_reason

    @property
    def num_delivered(self) -> int:
        """Tokens of the answer up to now."""
        return self._text.num_delivered

    def _entries(self, delta: TokenDelta, texts: Sequence[str]) -> tuple[TokenEntry, ...]:
        """The entries of tokens that are delivered with these texts."""
        logprobs = delta.logprobs or ()
        *offsets, self._text_offset = accumulate(map(len, texts), initial=self._text_offset)
        if len(logprobs) != len(delta.token_ids):
            raise EngineFault(f"{delta.request_id}: {len(delta.token_ids)} tokens came with {len(logprobs)} logprobs.")
        asked = self._request.params.logprob_token_ids
        if any(tuple(token for token, _ in entry.scored) != asked for entry in logprobs):
            raise EngineFault(f"{delta.request_id}: a token came without the logprobs of logprob_token_ids.")
        return tuple(self._entry(entry, offset) for entry, offset in zip(logprobs, offsets, strict=False))

    def _entry(self, entry: TokenLogprobs, offset: int) -> TokenEntry:
        raw = self._tokenizer.token_bytes
        top = tuple(
            TokenEntry(token, self._name(token), raw(token), finite_logprob(logprob)) for token, logprob in entry.top
        )
        scored = tuple((token, finite_logprob(logprob)) for token, logprob in entry.scored)
        own = entry.token_id
        return TokenEntry(own, self._name(own), raw(own), finite_logprob(entry.logprob), top, offset, scored)

    def _name(self, token: int) -> str:
        """A token as logprobs show it: its text, or (as vLLM has it) its id."""
        return f"token_id:{token}" if self._tokens_as_ids else self._tokenizer.token_text(token)


class ChoiceRun:
    """One job while it is generated: its choices by request id."""

    def __init__(self, job: Planned, tokenizer: Tokenizer) -> None:
        self._job = job
        self.prompt_only = job.asked.wire.prompt_only
        with_logprobs = job.requests[0].params.logprobs is not None
        self._echoes = [Echo(prompt, with_logprobs=with_logprobs) for prompt in job.prompted.echoed]
        self._group_of = {one.request_id: number for number, group in enumerate(job.groups) for one in group}
        self._choices = {
            request.request_id: _Choice(index, request, job, tokenizer, self._echo_of(request.request_id))
            for index, request in enumerate(job.requests)
        }
        self.unfinished = set(self._choices)

    def push(self, delta: TokenDelta) -> list[ChoiceDelta]:
        """Take in a delta of an unfinished choice; returns what may go out."""
        piece = self._choices[delta.request_id].push(delta)
        if piece is not None and piece.finish_reason is not None:
            self.unfinished.discard(delta.request_id)
        echo = self._echo_of(delta.request_id)
        if echo is not None:
            return echo.prepend(piece)
        return [] if piece is None else [piece]

    def _echo_of(self, request_id: str) -> Echo | None:
        return self._echoes[self._group_of[request_id]] if self._echoes else None

    def ended_here(self, request_id: str) -> bool:
        """Return whether a choice was ended by its front end."""
        return self._choices[request_id].ended_here

    def records(self) -> list[tuple[Record, int, Ending]]:
        """Return record, number of delivered tokens and ending of each choice that gets a receipt."""
        choices = self._choices.values()
        return [(one.record, one.num_delivered, one.ending) for one in choices if one.record is not None]

    def usage(self) -> Usage:
        """Tokens up to now. A prompt and its cached part count once, however many choices it has."""
        choices = list(self._choices.values())
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._job.head.prompts),
            completion_tokens=sum(choice.num_delivered for choice in choices),
            cached_tokens=sum(choice.num_cached for choice in choices[:: self._job.head.num_choices]),
            accepted_tokens=sum(choice.num_accepted for choice in choices),
            rejected_tokens=sum(choice.num_rejected for choice in choices),
        )


class _Reader:
    """Reads one answer as it grows. The parser gets each token by itself, with all of its text, so that what is said
    does not depend on how many come at once."""

    def __init__(self, answers: ResponseParser) -> None:
        self._answers = answers
        self._parser = answers.parser()
        self._waiting: deque[tuple[int, str]] = deque()  # tokens whose text has not gone out yet
        self._text = ""  # that has gone out, and is not read yet
        self._called = False

    def push(
        self, ids: Sequence[int], texts: Sequence[str], released: str, reason: str | None
    ) -> tuple[ParsedDelta, list[tuple[int, ParsedDelta]], str | None]:
        """Take in newly delivered tokens, of whose text some may go out.

        Returns what they say; the same in order, each part with its number of tokens; and why the answer ends if it
        does.
        """
        self._waiting.extend(zip(ids, texts, strict=True))
        self._text += released
        parts: list[tuple[tuple[int, ...], str]] = []
        while self._waiting and len(self._waiting[0][1]) <= len(self._text):
            token, text = self._waiting.popleft()
            parts.append(((token,), self._text[: len(text)]))
            self._text = self._text[len(text) :]
        if reason is not None and (self._waiting or self._text or not parts):
            parts.append((tuple(token for token, _ in self._waiting), self._text))
        said: list[tuple[int, ParsedDelta]] = []
        for number, (tokens, text) in enumerate(parts, start=1):
            found = self._parser.push(text, tokens, last=reason is not None and number == len(parts))
            counts = itertools.chain((len(tokens),), itertools.repeat(0))
            said += [
                (count, one._replace(calls=self._answers.allowed(one.calls)))
                for count, one in zip(counts, found.parts or (found,), strict=False)
            ]
        calls = put_together(part for _, one in said for part in one.calls)
        self._called = self._called or bool(calls)
        content, reasoning = "".join(one.content for _, one in said), "".join(one.reasoning for _, one in said)
        return ParsedDelta(content, reasoning, calls), _merged(said), self._answers.reason(reason, called=self._called)


def _merged(said: Sequence[tuple[int, ParsedDelta]]) -> list[tuple[int, ParsedDelta]]:
    """Parts that follow each other and say the same kind of thing, as one."""

    def kind(one: tuple[int, ParsedDelta]) -> object:
        kinds = [name for name, value in one[1]._asdict().items() if value]
        return kinds if len(kinds) < 2 else one

    merged: list[tuple[int, ParsedDelta]] = []
    for _, group in itertools.groupby(said, kind):
        counts, parts = zip(*group, strict=True)
        content, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
        calls = put_together(call for part in parts for call in part.calls)
        merged.append((sum(counts), ParsedDelta(content, reasoning, calls)))
    return merged
