"""From a checked wire request to engine requests, and from token deltas back to replies and SSE chunks.

The front end knows a tokenizer and a source of token deltas, nothing else: decode replicas, monoliths and the stream
router mount the same one.
"""

import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from serve_app.backends.base import ModelInfo, Parsers, TokenSource, is_taken_in
from serve_app.errors import reply_for
from serve_app.openai.asked import Asked, Limits, check_served
from serve_app.openai.chat.chat_preprocessor import ChatPreprocessor
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.choice import ChoiceRun
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.completions.echo import without_answer
from serve_app.openai.generation_span import generation_span
from serve_app.openai.off_loop import off_loop
from serve_app.openai.parsing import in_words
from serve_app.openai.plan import Planned, Planner
from serve_app.openai.prompts import PromptEncoder
from serve_app.openai.replies import ChatFormat, ChoiceDelta, CompletionFormat, ReplyFormat, ReplyHead, join, to_json
from serve_app.openai.tokens.tokenization import Tokenization
from serve_app.referee.judge.verdicts import checks_of_all, worst
from serve_app.referee.records.receipts import receipt_of
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.records.signatures import SigningKey
from serve_app.streams.merge import merge
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import Request

logger = logging.getLogger(__name__)


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
        checks: Checks | None = None,
        parsers: Parsers | None = None,
        signing_key: SigningKey | None = None,
    ) -> None:
        """Without `checks`, `verify` is refused; without `parsers` nobody reads reasoning, or calls that the model
        makes as it likes; without `signing_key` receipts are not signed."""
        self._source = source
        self.checks = checks
        self._signing_key = signing_key
        self._tokenizer = tokenizer
        self.limits = limits or Limits()
        self._chats = ChatPreprocessor(tokenizer, parsers)
        self._encoder = PromptEncoder(tokenizer, model, self.limits, self._chats)
        self.tokenization = Tokenization(tokenizer, self._chats, self._encoder, model.max_model_len)
        self._planner = Planner(tokenizer, model, self.limits)
        self._created = int(time.time())

    def weights_switched(self, model: ModelInfo) -> None:
        """Other weights of the model are served from now on."""
        self._planner.model = model

    def models(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        return {"object": "list", "data": [self.model(name) for name in self._planner.model.names]}

    @property
    def served_name(self) -> str:
        """The model's name, for requests that need name none."""
        return self._planner.model.model_name

    def model(self, name: str) -> dict[str, Any]:
        """The body of GET /v1/models/{name}, as vLLM writes it, with the weights' quantization: an adapter's parent is
        the model, and its root the folder. Raises ModelNotFound: no such model is served here."""
        model = self._planner.model
        check_served(name, model)
        roots = {one.name: one.root for one in model.adapters}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "truespec",
            "root": roots.get(name, name),
            "parent": model.model_name if name in roots else None,
            "max_model_len": model.max_model_len,
            "quantization": model.quantization,
        }

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text has that goes on after others."""
        return len(self._tokenizer.encode_continuation(text))

    async def prepare(
        self,
        wire: CompletionRequest | ChatCompletionRequest,
        reply_format: ReplyFormat | None = None,
        words: Callable[[str], str] = str,
        *,
        timeout_s: float | None = None,
    ) -> Planned:
        """Check a wire request against the model, and tokenise it.

        Args:
            wire: the request.
            reply_format: of the reply, if it is not that of the request's endpoint.
            words: gives a field, or a message, with the names of the API that the client uses.
            timeout_s: that is allowed beside what the body says.

        Raises:
            InvalidRequest: it can never be served; `field` names what is wrong.
        """
        own = ChatFormat() if isinstance(wire, ChatCompletionRequest) else CompletionFormat()
        limit_s = min((limit for limit in (wire.timeout, timeout_s) if limit is not None), default=None)
        asked = Asked(wire, reply_format or own, words, limit_s)

        def plan() -> Planned:
            with in_words(words):
                asked.check(self._planner.model, self.limits, can_verify=self.checks is not None)
                return self._planner.planned(self._encoder.prompted(asked))

        return await off_loop(wire, plan)

    def _current(self, head: ReplyHead) -> ReplyHead:
        """The head, with the weights that are served by now: they may have changed since the request came."""
        now = self._planner.model.system_fingerprint
        return head if head.system_fingerprint == now else dataclasses.replace(head, system_fingerprint=now)

    async def collect(self, job: Planned) -> dict[str, Any]:
        """Generate and give the whole reply. Raises TruespecError: the source refused the request or failed."""
        run = ChoiceRun(job, self._tokenizer)
        pieces: list[list[ChoiceDelta]] = [[] for _ in job.requests]
        with generation_span(job, run) as see:
            with _settled(job, run):
                async with aclosing(self._pieces(job, run)) as arriving:
                    async for piece in arriving:
                        if piece is not None:
                            pieces[piece.index].append(piece)
            choices, head = [join(parts) for parts in pieces], self._current(job.head)
            for choice in choices:
                see(choice)
            if job.asked.wire.verify and job.tapped is not None:
                job.tapped.preview(to_json(await job.asked.format.whole(head, choices, run.usage(), None)).encode())
            reported = await self._reported(job, run)
        return await job.asked.format.whole(head, choices, run.usage(), reported)

    async def events(self, job: Planned) -> AsyncGenerator[bytes, None]:
        """Generate and give server-sent events, one for each delta that has something to say.

        The first event is empty where every prompt was taken in before there was anything to say. What goes wrong
        before the first event is raised, so that it can still become an HTTP status; later it becomes the event of a
        failure, the stream's last.
        """
        run = ChoiceRun(job, self._tokenizer)
        stream = job.asked.format.stream(continuous_usage=job.asked.wire.continuous_usage)
        tapped = job.tapped if job.asked.wire.verify else None
        begun, num_waiting = False, len(job.groups)
        try:
            with generation_span(job, run) as see:
                with _settled(job, run):
                    async with aclosing(self._pieces(job, run)) as arriving:
                        async for piece in arriving:
                            if piece is None:
                                num_waiting -= 1
                                if num_waiting or begun:
                                    continue
                                yield b""
                            else:
                                see(piece)
                                event = stream.piece(self._current(job.head), piece, run.usage)
                                if tapped is not None:
                                    tapped.preview(event)
                                yield event
                            begun = True
                if tapped is not None:
                    tapped.preview(await stream.end(self._current(job.head), None, run.usage))
                reported = await self._reported(job, run)
        except Exception as error:
            if not begun:
                raise
            reply = reply_for(error)
            if reply.status >= 500:
                logger.error("%s failed while streaming: %r", job.head.reply_id, error, exc_info=error)
            if job.tapped is not None:
                job.tapped.fail()
            yield stream.failure(self._current(job.head), reply)
            return
        yield await stream.end(self._current(job.head), reported, run.usage)

    async def _reported(self, job: Planned, run: ChoiceRun) -> dict[str, Any]:
        """The reply's verdict, those of its choices and what was checked of all of them, and the receipts of all, where
        they were asked for."""
        reported: dict[str, Any] = {}
        if self.checks is not None and job.asked.wire.verify:
            preview = None if job.tapped is None else job.tapped.previewed(streamed=bool(job.asked.wire.stream))
            checked = await self.checks.verdicts([request.request_id for request in job.requests], preview)
            verdicts = [one.verdict for one in checked]
            reported["verdict"] = worst(verdicts).value
            reported |= {"verdicts": [one.value for one in verdicts], "checked": checks_of_all(checked)}
        if job.asked.wire.receipt:
            about = self._planner.model, job.head.created, self._signing_key
            reported["receipts"] = [receipt_of(*known, *about).to_wire() for known in run.records()]
        return reported

    def _pieces(self, job: Planned, run: ChoiceRun) -> AsyncGenerator[ChoiceDelta | None, None]:
        """The pieces of all choices as they come; None for each prompt that was taken in."""
        return merge([self._group_pieces(group, run) for group in job.groups])

    async def _group_pieces(self, group: Sequence[Request], run: ChoiceRun) -> AsyncGenerator[ChoiceDelta | None, None]:
        """The pieces of one prompt's choices, and None once it was taken in. The source hears of a choice that ended
        here before it is asked for more: how a request ended is counted when its stream ends."""
        names = {request.request_id for request in group}
        async with aclosing(self._source.stream(group)) as deltas:
            async for delta in deltas:
                if delta.request_id not in run.unfinished:
                    continue
                if is_taken_in(delta):
                    yield None
                    continue
                pieces = run.push(without_answer(delta) if run.prompt_only else delta)
                ended = delta.request_id not in run.unfinished
                if ended and run.ended_here(delta.request_id):
                    await self._source.abort(delta.request_id)
                for piece in pieces:
                    yield piece
                if ended and run.unfinished.isdisjoint(names):
                    return


@contextmanager
def _settled(job: Planned, run: ChoiceRun) -> Iterator[None]:
    """Within it, the pieces of a request are taken.

    Raises:
        InvalidRequest: the source refused the request; it names the field that the client sent.
        EngineFault: the source ended before every choice did.
    """
    try:
        yield
    except InvalidRequest as error:
        raise job.refusal(error) from error
    if run.unfinished:
        raise EngineFault(f"The token stream ended before its requests did: {', '.join(sorted(run.unfinished))}.")
