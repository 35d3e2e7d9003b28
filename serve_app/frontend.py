"""From a checked wire request to engine requests, and from token deltas back to replies and SSE chunks.

The front end knows a tokenizer and a source of token deltas, nothing else: decode replicas, monoliths and the stream
router mount the same one.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from serve_app.answers import Answers, ChatDesk
from serve_app.backends.base import ModelInfo, Parsers, Said, Talk
from serve_app.checks import Checks
from serve_app.errors import (
    ContextLengthExceeded,
    ModelNotFound,
    PriorityForbidden,
    RequestAborted,
    UnsupportedParameter,
    reply_for,
)
from serve_app.protocol import (
    LEGACY_MAX_TOKENS,
    ChatCompletionRequest,
    ChatFormat,
    CompletionFormat,
    CompletionRequest,
    Piece,
    RankedEntry,
    ReplyFormat,
    ReplyHead,
    TokenEntry,
    TopEntry,
    Usage,
    WireRequest,
    finite_logprob,
    join,
    model_card,
)
from serve_app.replays import worst
from serve_app.tokenizer import StopMatcher, StopStrings, Tokenizer
from serve_app.tools import forces_calls, put_together
from speculative.errors import EngineFault, InvalidRequest, RequestTimeout
from speculative.request import (
    MAX_PRIORITY,
    FinishReason,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Spend = Callable[[int], None]
"""Told of so many more tokens."""


def free(num_tokens: int) -> None:
    """For who need not pay."""


_LONG_TEXT = 4096  # characters; encoding more than this leaves the event loop
_FORM = "response_format"  # how an engine names the form of an answer, whichever field asked for it
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class TokenSource(Protocol):
    """Where tokens come from: a local engine, or replicas behind handles."""

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Generate for requests that share one prompt and its parameters, each with a seed of its own.

        Only the first may ask for prompt_logprobs, which then come with its first delta.

        The deltas of all requests come interleaved, each request's in order. Closing the generator (`aclose`, or
        cancelling the task that waits in it) aborts every request that still runs.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one of the requests; the others go on. What it still emits is ignored. It may have ended already."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one HTTP request may ask for."""

    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 64
    max_choices: int = 64  # of each prompt
    max_sequences: int | None = None  # choices of all prompts; None = as many as the others allow
    max_prompt_tokens: int | None = None  # None = the model's own
    default_max_tokens: int | None = None  # chat without max_tokens; None = all that fits
    resumes: bool | None = None  # whether a request that does not say is resumed; None = none can be
    stream_interval_s: float = 0.0  # between two messages of a stream


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for one HTTP request beside its body: what who sent it may ask for."""

    max_prompt_tokens: int | None = None
    earliest_priority: int = -MAX_PRIORITY
    timeout_s: float | None = None  # as the header asks

    def check_prompt(self, name: str, num_tokens: int, longest: int | None) -> None:
        """Refuse a prompt of more tokens than these terms or the server (`longest`) allow.

        Raises:
            ContextLengthExceeded: it has more.
        """
        most = min((limit for limit in (self.max_prompt_tokens, longest) if limit is not None), default=num_tokens)
        if num_tokens > most:
            raise ContextLengthExceeded(name, f"{name} has {num_tokens} tokens, and may have {most} here. Shorten it.")

    def priority(self, asked: int | None) -> int:
        """The priority of a request: what it asks for, or 0 where that is allowed.

        Raises:
            PriorityForbidden: it asks for an earlier one than it may.
        """
        if asked is not None and asked < self.earliest_priority:
            raise PriorityForbidden("priority", f"priority must be at least {self.earliest_priority} for this key.")
        return max(0, self.earliest_priority) if asked is None else asked

    def time_limit_s(self, asked: float | None) -> float | None:
        """The stricter of body and header; None where neither asks."""
        return min((limit for limit in (asked, self.timeout_s) if limit is not None), default=None)


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, checked and tokenised: what to generate and how to answer."""

    head: ReplyHead
    format: ReplyFormat
    groups: tuple[tuple[Request, ...], ...]  # one group a prompt, one request a choice
    stops: StopStrings
    stream: bool
    verify: bool
    answers: Answers | None = None  # None: all text is content
    form_field: str = _FORM  # that asks for the form of the answers

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests; their order gives the choices' indices."""
        return tuple(request for group in self.groups for request in group)


class FrontEnd:
    """An OpenAI-compatible front end over one model.

    Everything that can be refused is refused in `prepare`, before a token is generated. `collect` and `events` free
    what the engine holds however they end: finished, closed or cancelled.
    """

    def __init__(
        self,
        source: TokenSource,
        tokenizer: Tokenizer,
        model: ModelInfo,
        limits: Limits | None = None,
        *,
        aliases: Sequence[str] = (),
        checks: Checks | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        """`aliases` are further names of the model; without `checks`, `verify` is refused; without `parsers` nobody
        reads reasoning, or calls that the model makes as it likes."""
        self._source = source
        self._chats = ChatDesk(tokenizer, parsers)
        self._checks = checks
        self._tokenizer = tokenizer
        self._model = model
        self.limits = limits or Limits()
        self._names = tuple(dict.fromkeys((model.model_name, *aliases, *(one.name for one in model.adapters))))
        self._created = int(time.time())

    def weights_switched(self, model: ModelInfo) -> None:
        """Other weights of the model are served from now on."""
        self._model = model

    def models(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        return {"object": "list", "data": [self.model(name) for name in self._names]}

    def model(self, name: str) -> dict[str, Any]:
        """The body of GET /v1/models/{name}.

        Raises:
            ModelNotFound: no such model is served here.
        """
        if name not in self._names:
            served = ", ".join(self._names)
            raise ModelNotFound("model", f"The model '{name[:100]}' does not exist here; served: {served}.")
        roots = {one.name: one.root for one in self._model.adapters}
        parent = self._model.model_name if name in roots else None
        return model_card(name, self._created, self._model.max_model_len, root=roots.get(name, name), parent=parent)

    async def prepare(self, wire: CompletionRequest | ChatCompletionRequest, terms: Terms = NO_TERMS) -> Job:
        """Check a wire request against the model and the terms of who sent it, and tokenise it.

        Raises:
            InvalidRequest: it can never be served; `field` names what is wrong.
        """
        self.model(wire.model)
        num_choices = wire.n or 1
        if num_choices > self.limits.max_choices:
            raise InvalidRequest("n", f"n may be at most {self.limits.max_choices} here, got {num_choices}.")
        if wire.verify and self._checks is None:
            raise UnsupportedParameter(
                "verify", "verify needs a server whose logprobs_mode is raw_logprobs: only these are compared."
            )
        if wire.resume and self.limits.resumes is None:
            raise UnsupportedParameter(
                "resume", "resume needs a server with a stream router; set pools.router in its configuration."
            )
        priority = terms.priority(wire.priority)
        talk = self._chats.talk(wire) if isinstance(wire, ChatCompletionRequest) else None
        prompts = await self._prompts(wire, talk)
        self._check_sequences(len(prompts), num_choices)
        for prompt in prompts:
            name = "messages" if isinstance(wire, ChatCompletionRequest) else "prompt"
            terms.check_prompt(name, len(prompt), self.limits.max_prompt_tokens)
        answers = None if talk is None else self._chats.answers(talk, prompts[0], wire.structure)
        reply_format: ReplyFormat = ChatFormat() if isinstance(wire, ChatCompletionRequest) else CompletionFormat()
        head = ReplyHead(
            reply_id=f"{reply_format.id_prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=wire.model,
            system_fingerprint=self._fingerprint,
            prompts=tuple(prompts),
            num_choices=num_choices,
            with_token_ids=bool(wire.return_token_ids),
            with_scored=bool(wire.logprob_token_ids),
            with_usage=wire.include_usage,
            with_token_kinds=bool(wire.return_token_kinds),
        )
        bad_words = await self._bad_words(wire)
        limit_s, adapter = terms.time_limit_s(wire.timeout), self._model.adapter_of(wire.model)
        groups = tuple(
            tuple(
                dataclasses.replace(request, priority=priority, timeout_s=limit_s, adapter=adapter)
                for request in self._group(wire, head, index, bad_words, answers)
            )
            for index in range(len(prompts))
        )
        stops = StopStrings(wire.stop_strings)
        form_field = "tools" if talk is not None and forces_calls(talk) else wire.structure_field
        return Job(head, reply_format, groups, stops, bool(wire.stream), bool(wire.verify), answers, form_field)

    def _check_sequences(self, num_prompts: int, num_choices: int) -> None:
        """Refuse what the server could not run at once if it had nothing else to do: to try again would not help."""
        most, asked = self.limits.max_sequences, num_prompts * num_choices
        if most is None or asked <= most:
            return
        if num_prompts == 1:
            raise InvalidRequest("n", f"n asks for {asked} choices; this server runs at most {most} at once.")
        raise InvalidRequest(
            "prompt",
            f"{num_prompts} prompts with {num_choices} choices each are {asked} sequences; this server runs at most "
            f"{most} at once. Send several requests.",
        )

    @property
    def _fingerprint(self) -> str:
        return f"fp_{self._model.fingerprint[:12]}"

    def _current(self, head: ReplyHead) -> ReplyHead:
        """The head, with the weights that are served by now: they may have changed since the request came."""
        now = self._fingerprint
        return head if head.system_fingerprint == now else dataclasses.replace(head, system_fingerprint=now)

    async def collect(self, job: Job, spend: Spend = free) -> dict[str, Any]:
        """Generate and give the whole reply. `spend` is told of tokens as they are emitted.

        Raises:
            TruespecError: the source refused the request or failed.
        """
        run = _Run(job, self._tokenizer, streams=False)
        pieces: list[list[Piece]] = [[] for _ in job.requests]
        with self._expecting(job):
            async with aclosing(self._pieces(job, run, spend)) as arriving:
                async for piece in arriving:
                    pieces[piece.index].append(piece)
            verdicts = await self._verdicts(job)
        choices = [await _read(join(parts), job.answers) for parts in pieces]
        return job.format.whole(self._current(job.head), choices, run.usage()) | verdicts

    async def events(self, job: Job, spend: Spend = free) -> AsyncGenerator[bytes, None]:
        """Generate and give server-sent events, one for each delta that has something to say. `spend` is told of tokens
        as they are emitted.

        What goes wrong before the first event is raised, so that it can still become an HTTP status; later it becomes
        an error event, and the stream ends without `[DONE]`.
        """
        run = _Run(job, self._tokenizer, streams=True)
        begun = False
        try:
            with self._expecting(job):
                async with aclosing(self._pieces(job, run, spend)) as arriving:
                    async for piece in arriving:
                        head = self._current(job.head)
                        event = _event(job.format.chunk(head, piece))
                        yield event if begun else b"".join(map(_event, job.format.opening(head))) + event
                        begun = True
                told = await self._verdicts(job)
        except Exception as error:
            if not begun:
                raise
            logger.error("%s failed while streaming: %r", job.head.reply_id, error, exc_info=error)
            yield _event(reply_for(error).body())
            return
        if job.head.with_usage:
            told["usage"] = run.usage().to_wire()
        closing = _event(job.format.closing_chunk(self._current(job.head), told)) if told else b""
        yield closing + b"data: [DONE]\n\n"

    def _expecting(self, job: Job) -> AbstractContextManager[None]:
        if self._checks is None or not job.verify:
            return nullcontext()
        return self._checks.expecting([request.request_id for request in job.requests])

    async def _verdicts(self, job: Job) -> dict[str, Any]:
        """The reply's verdict and those of its choices, where they were asked for."""
        if self._checks is None or not job.verify:
            return {}
        checked = await self._checks.verdicts([request.request_id for request in job.requests])
        verdicts = [one.verdict for one in checked]
        return {"verdict": worst(verdicts).value, "verdicts": [verdict.value for verdict in verdicts]}

    async def _prompts(
        self, wire: CompletionRequest | ChatCompletionRequest, talk: Talk | None
    ) -> list[tuple[int, ...]]:
        if isinstance(wire, ChatCompletionRequest):
            assert talk is not None
            encode_chat, messages = self._tokenizer.encode_chat, talk.messages
            ids = await _off_loop(
                _size((messages, talk.tools, talk.variables)),
                lambda: encode_chat(messages, tools=talk.tools, variables=talk.variables),
            )
            return [self._checked(tuple(ids), "messages")]
        prompts = wire.prompts()
        if len(prompts) > self.limits.max_prompts:
            raise InvalidRequest("prompt", f"prompt may hold at most {self.limits.max_prompts} prompts here.")
        return [self._checked(await self._encode(prompt), "prompt") for prompt in prompts]

    async def _encode(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(await _off_loop(len(prompt), lambda: self._tokenizer.encode(prompt)))
        size = self._model.vocab_size
        if min(prompt) < 0 or max(prompt) >= size:
            wrong = next(token for token in prompt if not 0 <= token < size)
            raise InvalidRequest("prompt", f"prompt holds the token id {wrong}; ids run from 0 to {size - 1}.")
        return tuple(prompt)

    def _checked(self, ids: tuple[int, ...], name: str) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest(name, f"{name} must hold at least one token.")
        longest = self._model.max_model_len
        if len(ids) + 1 > longest:
            raise ContextLengthExceeded(
                name,
                f"The model's context is {longest} tokens, and {name} has {len(ids)}, which leaves no room for an "
                "answer. Shorten it.",
            )
        return ids

    async def _bad_words(self, wire: WireRequest) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, each as it begins a text and as it follows a space."""
        texts: list[str] = []
        for word in wire.bad_words or ():
            bare = word.lstrip()
            texts += [bare, " " + bare] if bare else [word]
        encode = self._tokenizer.encode
        sequences = await _off_loop(
            sum(map(len, texts)), lambda: [tuple(encode(text, continuation=True)) for text in texts]
        )
        return tuple(dict.fromkeys(sequences))

    def _group(
        self,
        wire: CompletionRequest | ChatCompletionRequest,
        head: ReplyHead,
        index: int,
        bad_words: tuple[tuple[int, ...], ...],
        answers: Answers | None,
    ) -> tuple[Request, ...]:
        prompt = head.prompts[index]
        params = self._params(wire, len(prompt), bad_words)
        if answers is not None:
            params = dataclasses.replace(params, structure=answers.form)
        others = dataclasses.replace(params, prompt_logprobs=None)
        first = index * head.num_choices
        resume = bool(self.limits.resumes if wire.resume is None else wire.resume)
        seeds: list[dict[str, Any]] = [
            {} if wire.seed is None else {"seed": choice_seed(wire.seed, n)} for n in range(head.num_choices)
        ]
        return tuple(
            Request(f"{head.reply_id}-{first + choice}", prompt, others if choice else params, resume=resume, **seed)
            for choice, seed in enumerate(seeds)
        )

    def _params(
        self,
        wire: CompletionRequest | ChatCompletionRequest,
        num_prompt: int,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> SamplingParams:
        params = SamplingParams(
            max_tokens=self._max_tokens(wire, num_prompt),
            logprobs=wire.num_logprobs,
            bad_words=bad_words,
            **wire.sampling_fields(),
        )
        params.check_vocabulary(self._model.vocab_size)
        _refuse_dead_end(params, self._model.eos_token_ids)
        return params

    def _max_tokens(self, wire: CompletionRequest | ChatCompletionRequest, num_prompt: int) -> int:
        name, asked = wire.token_budget
        longest = self._model.max_model_len
        room = longest - num_prompt
        if asked is None:
            default = LEGACY_MAX_TOKENS if isinstance(wire, CompletionRequest) else self.limits.default_max_tokens
            return room if default is None else min(default, room)
        if asked > room:
            raise ContextLengthExceeded(
                name,
                f"The model's context is {longest} tokens, and {num_prompt} of prompt with {asked} of output are "
                f"more. {name} may be at most {room} for this prompt.",
            )
        return asked

    async def _pieces(self, job: Job, run: "_Run", spend: Spend) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come; ends when every choice has ended."""
        try:
            async with aclosing(merge([self._group_pieces(group, run, spend) for group in job.groups])) as arriving:
                async for piece in arriving:
                    yield piece
        except InvalidRequest as error:
            refusal = None if job.answers is None else job.answers.refusal_of_tools(error)
            if refusal is None and error.field == _FORM:
                refusal = InvalidRequest(job.form_field, error.message)
            if refusal is None:
                raise
            raise refusal from error
        except (asyncio.CancelledError, GeneratorExit, RequestTimeout):  # or who never waits would never pay
            spend(run.num_unpaid)
            raise
        if run.unfinished:
            raise EngineFault(f"The token stream ended before its requests did: {', '.join(sorted(run.unfinished))}.")

    async def _group_pieces(self, group: Sequence[Request], run: "_Run", spend: Spend) -> AsyncGenerator[Piece, None]:
        """The pieces of one prompt's choices. The source hears of a choice that ended here before it is asked for more:
        how a request ended is counted when its stream ends."""
        names = {request.request_id for request in group}
        async with aclosing(self._source.stream(group)) as deltas:
            async for delta in deltas:
                if delta.request_id not in run.unfinished:
                    continue
                piece = run.push(delta)
                spend(run.price(delta))
                if run.ended_here(delta.request_id):
                    await self._source.abort(delta.request_id)
                if piece is not None:
                    yield piece
                if run.unfinished.isdisjoint(names):
                    return


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the request's own for choice 0, an independent one for each other.

    A negative seed stands for its two's complement in 64 bits, as OpenAI's seed is an int64.
    """
    seed %= 2**64
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of several async generators as they come, each generator's in order.

    An error of one ends all. Closing closes all of them; at most one item of each waits to be taken.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    arrived: asyncio.Queue[_Arrival[T]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            arrival = await arrived.get()
            if arrival.error is not None:
                raise arrival.error
            for item in arrival.items:
                yield item
            running -= not arrival.items
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Arrival(Generic[T]):
    items: tuple[T, ...] = ()  # none: the stream ended
    error: Exception | None = None


async def _pump(stream: AsyncGenerator[T, None], arrived: "asyncio.Queue[_Arrival[T]]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await arrived.put(_Arrival((item,)))
    except Exception as error:
        await arrived.put(_Arrival(error=error))
    else:
        await arrived.put(_Arrival())


class _Choice:
    """One choice of a reply while it is generated."""

    def __init__(self, index: int, request: Request, job: Job, tokenizer: Tokenizer, *, streams: bool) -> None:
        self._index = index
        self._request = request
        self._with_logprobs = request.params.tells_logprobs
        self._with_tokens = self._with_logprobs or job.head.with_token_ids or job.head.with_token_kinds
        self._tokenizer = tokenizer
        keeps_special = job.answers is not None and job.answers.keeps_special
        self._detokenizer = tokenizer.detokenizer(skip_special=not keeps_special, continuation=True)
        self._reader = _StreamReader(job.answers) if streams and job.answers is not None else None
        self._matcher = StopMatcher(job.stops)
        self._text_offset = 0
        self._begun = False
        self._held: list[Piece] = []  # tokens that had nothing to say; the next piece has them too
        self._prompt_entries: tuple[tuple[RankedEntry, ...], ...] | None = None
        self.num_delivered = 0
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_cached = 0

    @property
    def ended_here(self) -> bool:
        """Whether a stop string ended it, of which the source knows nothing."""
        return self._matcher.stopped

    def push(self, delta: TokenDelta) -> Piece | None:
        """Take in a delta; None when it has nothing to tell the client.

        Raises:
            EngineFault: the engine failed on this request.
            RequestAborted: the engine let go of it.
        """
        refuse_failure(delta)
        self._take_prompt_logprobs(delta)
        texts, released, offsets = self._release(delta)
        reason = self._end(delta, released)
        num_delivered = len(offsets)
        ids, kinds = delta.token_ids[:num_delivered], tuple(delta.kinds[:num_delivered])
        self._count(delta, num_delivered)
        text = "".join(released)
        said = Said(text)
        if self._reader is not None:
            said, reason = self._reader.push(ids, texts[:num_delivered], text, reason)
        tokens = Piece(
            self._index, token_ids=ids, token_kinds=kinds, weight_versions=((delta.weight_version, num_delivered),)
        )
        if reason is None and said == Said() and not (self._with_tokens and num_delivered):
            self._held.append(tokens)
            return None
        if self._held:
            tokens, self._held = join([*self._held, tokens]), []
        first, self._begun = not self._begun, True
        entries = self._entries(delta, offsets) if self._with_logprobs else None
        prompt_entries = self._prompt_entries if first else None
        return Piece(
            self._index,
            said.content,
            tokens.token_ids,
            tokens.token_kinds,
            entries,
            reason,
            first,
            prompt_entries,
            tokens.weight_versions,
            said.reasoning,
            said.calls,
        )

    def _take_prompt_logprobs(self, delta: TokenDelta) -> None:
        """Keep them for the first piece; they must have come when the first token does."""
        due = self._request.params.prompt_logprobs is not None and self._prompt_entries is None
        if not due or (delta.prompt_logprobs is None and not delta.token_ids):
            return
        told, num_prompt = delta.prompt_logprobs or (), len(self._request.prompt_token_ids)
        if len(told) != num_prompt - 1:
            raise EngineFault(f"{delta.request_id}: a prompt of {num_prompt} tokens came with {len(told)} logprobs.")
        self._prompt_entries = tuple(self._ranked(entry) for entry in told)

    def _ranked(self, entry: TokenLogprobs) -> tuple[RankedEntry, ...]:
        own = (entry.token_id, entry.logprob, entry.rank)
        top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
        return tuple(
            RankedEntry(token, self._tokenizer.token_text(token), finite_logprob(logprob), rank)
            for token, logprob, rank in (own, *(each for each in top if each[0] != entry.token_id))
        )

    def _release(self, delta: TokenDelta) -> tuple[list[str], list[str], list[int]]:
        """Each token's text, the text that may go out, and each delivered token's offset; a token that completes a
        stop string is last."""
        ids = delta.token_ids
        stopped_by_token = bool(ids) and delta.stop_token_id == ids[-1]  # such a token has no text
        texts = [*self._detokenizer.push(ids[:-1]), ""] if stopped_by_token else self._detokenizer.push(ids)
        released: list[str] = []
        offsets: list[int] = []
        for number, text in enumerate(texts, start=self.num_delivered):
            offsets.append(self._text_offset)
            self._text_offset += len(text)
            # No stop before min_tokens: what was said until then is not searched for stop strings either.
            may_stop = number >= self._request.params.min_tokens
            released.append(self._matcher.push(text) if may_stop else text)
            if self._matcher.stopped:
                break
        return texts, released, offsets

    def _end(self, delta: TokenDelta, released: list[str]) -> str | None:
        """The finish reason, if the choice ends here; the text held back until now is added to `released`."""
        if delta.finished and not self._matcher.stopped:
            released.append(self._matcher.push(self._detokenizer.finish()))
        if self._matcher.stopped:
            return FinishReason.STOP.value
        if delta.finish_reason is None:
            return None
        released.append(self._matcher.finish())
        return delta.finish_reason.value

    def _count(self, delta: TokenDelta, num_delivered: int) -> None:
        self.num_delivered += num_delivered
        self.num_accepted += min(delta.num_accepted, num_delivered)  # accepted drafts come first
        self.num_rejected += delta.num_drafted - delta.num_accepted
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)

    def _entries(self, delta: TokenDelta, offsets: list[int]) -> tuple[TokenEntry, ...]:
        logprobs = delta.logprobs or ()
        if len(logprobs) != len(delta.token_ids):
            raise EngineFault(f"{delta.request_id}: {len(delta.token_ids)} tokens came with {len(logprobs)} logprobs.")
        asked = self._request.params.logprob_token_ids
        if any(tuple(token for token, _ in entry.scored) != asked for entry in logprobs):
            raise EngineFault(f"{delta.request_id}: a token came without the logprobs of logprob_token_ids.")
        return tuple(self._entry(entry, offset) for entry, offset in zip(logprobs, offsets, strict=False))

    def _entry(self, entry: TokenLogprobs, offset: int) -> TokenEntry:
        names = self._tokenizer
        top = tuple(
            TopEntry(names.token_text(token), names.token_bytes(token), finite_logprob(logprob))
            for token, logprob in entry.top
        )
        scored = tuple((token, finite_logprob(logprob)) for token, logprob in entry.scored)
        return TokenEntry(
            names.token_text(entry.token_id),
            names.token_bytes(entry.token_id),
            finite_logprob(entry.logprob),
            top,
            offset,
            scored,
        )


class _Run:
    """One job while it is generated: its choices by request id."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, streams: bool) -> None:
        self._job = job
        self._choices = {
            request.request_id: _Choice(index, request, job, tokenizer, streams=streams)
            for index, request in enumerate(job.requests)
        }
        self.unfinished = set(self._choices)
        self._group_of = {one.request_id: number for number, group in enumerate(job.groups) for one in group}
        self._unpaid = dict(enumerate(map(len, job.head.prompts)))  # tokens of prompts of which nothing came yet

    def push(self, delta: TokenDelta) -> Piece | None:
        """Take in a delta of an unfinished choice."""
        piece = self._choices[delta.request_id].push(delta)
        if piece is not None and piece.finish_reason is not None:
            self.unfinished.discard(delta.request_id)
        return piece

    def ended_here(self, request_id: str) -> bool:
        """Whether a choice was ended by its front end."""
        return self._choices[request_id].ended_here

    def price(self, delta: TokenDelta) -> int:
        """Tokens to pay for: those of the delta, and those of its prompt where it is the first that came of it."""
        return len(delta.token_ids) + self._unpaid.pop(self._group_of[delta.request_id], 0)

    @property
    def num_unpaid(self) -> int:
        """Tokens of prompts of which nothing came yet."""
        return sum(self._unpaid.values())

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


class _StreamReader:
    """Reads one answer as it grows. The parser gets each token by itself, with all of its text, so that what is said
    does not depend on how many come at once."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = answers.parser()
        self._waiting: deque[tuple[int, str]] = deque()  # tokens whose text has not gone out yet
        self._text = ""  # that has gone out, and is not read yet
        self._called = False

    def push(
        self, ids: Sequence[int], texts: Sequence[str], released: str, reason: str | None
    ) -> tuple[Said, str | None]:
        """What newly delivered tokens say, of whose text some may go out, and why the answer ends if it does."""
        self._waiting.extend(zip(ids, texts, strict=True))
        self._text += released
        parts: list[tuple[tuple[int, ...], str]] = []
        while self._waiting and len(self._waiting[0][1]) <= len(self._text):
            token, text = self._waiting.popleft()
            parts.append(((token,), self._text[: len(text)]))
            self._text = self._text[len(text) :]
        if reason is not None and (self._waiting or self._text or not parts):
            parts.append((tuple(token for token, _ in self._waiting), self._text))
        said = [
            self._parser.push(text, tokens, last=reason is not None and number == len(parts))
            for number, (tokens, text) in enumerate(parts, start=1)
        ]
        calls = self._answers.allowed(put_together(part for one in said for part in one.calls))
        self._called = self._called or bool(calls)
        told = Said("".join(one.content for one in said), "".join(one.reasoning for one in said), calls)
        return told, self._answers.reason(reason, called=self._called)


async def _read(piece: Piece, answers: Answers | None) -> Piece:
    """A whole answer, its text read."""
    if answers is None:
        return piece
    parser = answers.parser()
    said = await _off_loop(len(piece.text), lambda: parser.whole(piece.text, piece.token_ids))
    calls = answers.allowed(said.calls)
    reason = answers.reason(piece.finish_reason, called=bool(calls))
    return dataclasses.replace(piece, text=said.content, reasoning=said.reasoning, calls=calls, finish_reason=reason)


def refuse_failure(delta: TokenDelta) -> None:
    """Raise what a last delta tells of a request that failed.

    Raises:
        EngineFault: the engine failed on this request.
        RequestAborted: the engine let go of it.
    """
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineFault(f"{delta.request_id}: {delta.error or 'the engine gave no reason'}")
    if delta.finish_reason is FinishReason.ABORT:
        raise RequestAborted(f"{delta.request_id} was aborted by the engine.")


def _refuse_dead_end(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Refuse parameters that together allow no first token."""
    if params.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids",
            "allowed_token_ids leaves nothing to say: bad_words and min_tokens forbid every one of them.",
        )


def _size(rendered: Any) -> int:
    """Characters and values of what a template is given, counted only until they are too many for the event loop."""
    size, waiting = 0, [rendered]
    while waiting and size <= _LONG_TEXT:
        value = waiting.pop()
        if isinstance(value, Mapping):
            value = [*value, *value.values()]
        size += len(value) if isinstance(value, Sequence) else 1
        if not isinstance(value, str) and isinstance(value, Sequence):
            waiting += value
    return size


async def _off_loop(num_characters: int, work: Callable[[], T]) -> T:
    """Do long text work on a thread, so that other streams keep flowing; short work at once."""
    return await asyncio.to_thread(work) if num_characters > _LONG_TEXT else work()


def _event(payload: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII only: some clients take U+2028 for the end of a line."""
    return b"data: " + _to_json(payload).encode("ascii") + b"\n\n"
