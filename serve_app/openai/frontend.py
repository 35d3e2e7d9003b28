"""From a checked wire request to engine requests, and from token deltas back to replies and SSE chunks.

The front end knows a tokenizer and a source of token deltas, nothing else: decode replicas, monoliths and the stream
router mount the same one.
"""

import dataclasses
import hashlib
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from serve_app.backends.base import ModelInfo, Parsers, TokenSource, is_taken_in
from serve_app.errors import ContextLengthExceeded, ModelNotFound, UnsupportedParameter, dead_end, reply_for
from serve_app.openai.chat.chat_preprocessor import ChatPreprocessor, ResponseParser
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.choice import ChoiceRun
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.completions.echo import EchoedPrompt, without_answer
from serve_app.openai.generation_span import GenerationSpan
from serve_app.openai.prepared_request import FORM, Limits, PreparedRequest, off_loop
from serve_app.openai.prompts import PromptEncoder
from serve_app.openai.replies import ChatFormat, ChoiceDelta, CompletionFormat, ReplyFormat, ReplyHead, join, to_json
from serve_app.openai.requests import LEGACY_MAX_TOKENS, WireRequest
from serve_app.openai.tokens.tokenization import Tokenization
from serve_app.openai.tools.forced_calls import forces_calls
from serve_app.referee.judge.verdicts import checks_of_all, worst
from serve_app.referee.records.receipts import receipt_of
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.records.signatures import SigningKey
from serve_app.streams.merge import merge
from serve_app.text.tokenizer import StopStrings, Tokenizer
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import Request, SamplingParams

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
        self._chats = ChatPreprocessor(tokenizer, parsers)
        self.checks = checks
        self._signing_key = signing_key
        self._tokenizer = tokenizer
        self.limits = limits or Limits()
        self._encoder = PromptEncoder(tokenizer, model, self.limits.special_tokens_in_text)
        self.tokenization = Tokenization(tokenizer, self._chats, self._encoder, model.max_model_len)
        self._model = model
        self._fingerprint = model.system_fingerprint  # of the weights that are served now
        self._names = (model.model_name, *(one.name for one in model.adapters))
        self._created = int(time.time())

    def weights_switched(self, model: ModelInfo) -> None:
        """Other weights of the model are served from now on."""
        self._model, self._fingerprint = model, model.system_fingerprint

    def models(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        return {"object": "list", "data": [self.model(name) for name in self._names]}

    @property
    def served_name(self) -> str:
        """The model's name, for requests that need name none."""
        return self._model.model_name

    def model(self, name: str) -> dict[str, Any]:
        """The body of GET /v1/models/{name}, as vLLM writes it, with the weights' quantization: an adapter's parent is
        the model, and its root the folder. Raises ModelNotFound: no such model is served here."""
        if name not in self._names:
            served = ", ".join(self._names)
            raise ModelNotFound("model", f"The model '{name[:100]}' does not exist here; served: {served}.")
        roots = {one.name: one.root for one in self._model.adapters}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "truespec",
            "root": roots.get(name, name),
            "parent": self._model.model_name if name in roots else None,
            "max_model_len": self._model.max_model_len,
            "quantization": self._model.quantization,
        }

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text has that goes on after others."""
        return len(self._tokenizer.encode_continuation(text))

    async def prepare(
        self,
        wire: CompletionRequest | ChatCompletionRequest,
        reply_format: ReplyFormat | None = None,
        *,
        timeout_s: float | None = None,
    ) -> PreparedRequest:
        """Check a wire request against the model, and tokenise it.

        Args:
            wire: the request.
            reply_format: of the reply, if it is not that of the request's endpoint.
            timeout_s: that is allowed beside what the body says.

        Raises:
            InvalidRequest: it can never be served; `field` names what is wrong.
        """
        self.model(wire.model)
        num_choices = wire.n or 1
        self._check_served(wire, num_choices)
        chat, answers, echoed = None, None, tuple[EchoedPrompt, ...]()
        if isinstance(wire, ChatCompletionRequest):
            name, reply_format = "messages", reply_format or ChatFormat()
            chat = self._chats.chat_prompt(wire)
            self._check_sequences(1, num_choices)
            prompts = await self._encoder.chat(wire, chat)
        else:
            name, reply_format = "prompt", reply_format or CompletionFormat()
            self._check_sequences(len(wire.prompts()), num_choices)
            prompts = await self._encoder.completion(wire)
            echoed = await self._encoder.echoed(wire, prompts)
        longest, most = max(map(len, prompts)), self.limits.max_prompt_tokens
        if most is not None and longest > most:
            raise ContextLengthExceeded(name, f"{name} has {longest} tokens; the limit is {most}. Shorten it.")
        if chat is not None:
            answers = self._chats.answers(chat, prompts[0], wire.structure)
        head = ReplyHead(
            reply_id=reply_format.id_prefix + uuid.uuid4().hex,
            created=int(time.time()),
            model=wire.model,
            system_fingerprint=self._fingerprint,
            prompts=tuple(prompts),
            num_choices=num_choices,
            with_token_ids=bool(wire.return_token_ids),
            with_scored=bool(wire.logprob_token_ids),
            with_usage=wire.include_usage,
            with_token_kinds=bool(wire.return_token_kinds),
            num_prompt_logprobs=wire.prompt_logprobs,
        )
        bad_words = await self._bad_words(wire)
        limit_s = min((limit for limit in (wire.timeout, timeout_s) if limit is not None), default=None)
        priority, adapter = wire.priority or 0, self._model.adapter_of(wire.model)
        groups = tuple(
            tuple(
                dataclasses.replace(
                    request, priority=priority, timeout_s=limit_s, adapter=adapter, cache_salt=wire.cache_salt or ""
                )
                for request in self._group(wire, head, index, bad_words, answers)
            )
            for index in range(len(prompts))
        )
        stops = StopStrings(wire.stop_strings)
        form_field = "tool_choice" if chat is not None and forces_calls(chat) else wire.structure_field
        return PreparedRequest(
            head,
            reply_format,
            groups,
            stops,
            wire.text_form,
            stream=bool(wire.stream),
            verify=bool(wire.verify),
            receipt=bool(wire.receipt),
            continuous_usage=wire.continuous_usage,
            echoed=echoed,
            prompt_only=wire.prompt_only,
            answers=answers,
            form_field=form_field,
            words=str if chat is None else lambda text: re.sub(r"^prompt\b", "messages", text),
            unrepeatable=None if wire.seed is None else self._unrepeatable(groups[0][0].params),
        )

    def _check_served(self, wire: WireRequest, num_choices: int) -> None:
        """Refuse what this server, as it is configured, serves to nobody."""
        if num_choices > self.limits.max_choices:
            raise InvalidRequest("n", f"n may be at most {self.limits.max_choices} here, got {num_choices}.")
        if wire.verify and self.checks is None:
            raise UnsupportedParameter(
                "verify", "verify needs a server whose logprobs_mode is raw_logprobs: only these are compared."
            )
        if wire.receipt and not self._model.computing.keeps_rounds:
            raise UnsupportedParameter(
                "receipt", "receipt needs engine.kind: torch; only its own service can make vLLM's draws again."
            )
        if wire.resume and self.limits.resumes is None:
            raise UnsupportedParameter(
                "resume", "resume needs a server with a stream router; set pools.router in its configuration."
            )

    def _unrepeatable(self, params: SamplingParams) -> str:
        """Return why a repeated request with a seed may get another text; "" = it gets the same."""
        computing = self._model.computing
        if computing.unrepeatable:
            return computing.unrepeatable
        shifted = computing.drafts_shift_draws and params.speculate
        if shifted and not (params.greedy or params.reproducible):
            return "reproducible is false: which text a seed gives depends on how many tokens were drafted, and when"
        return ""

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
            f"{most} at once. Send several requests, or raise limits.max_ongoing_requests.",
        )

    def _current(self, head: ReplyHead) -> ReplyHead:
        """The head, with the weights that are served by now: they may have changed since the request came."""
        now = self._fingerprint
        return head if head.system_fingerprint == now else dataclasses.replace(head, system_fingerprint=now)

    async def collect(self, job: PreparedRequest) -> dict[str, Any]:
        """Generate and give the whole reply. Raises TruespecError: the source refused the request or failed."""
        run = ChoiceRun(job, self._tokenizer)
        pieces: list[list[ChoiceDelta]] = [[] for _ in job.requests]
        with GenerationSpan(job, run) as span:
            with _settled(job, run):
                async with aclosing(self._pieces(job, run)) as arriving:
                    async for piece in arriving:
                        if piece is not None:
                            pieces[piece.index].append(piece)
            choices, head = [join(parts) for parts in pieces], self._current(job.head)
            for choice in choices:
                span.see(choice)
            if job.verify and job.tapped is not None:
                job.tapped.draft(to_json(await job.format.whole(head, choices, run.usage(), None)).encode())
            reported = await self._verdicts(job) | self._receipts(job, run)
        return await job.format.whole(head, choices, run.usage(), reported)

    async def events(self, job: PreparedRequest) -> AsyncGenerator[bytes, None]:
        """Generate and give server-sent events, one for each delta that has something to say.

        The first event is empty where every prompt was taken in before there was anything to say. What goes wrong
        before the first event is raised, so that it can still become an HTTP status; later it becomes the event of a
        failure, the stream's last.
        """
        run = ChoiceRun(job, self._tokenizer)
        stream = job.format.stream(continuous_usage=job.continuous_usage)
        drafted = job.tapped if job.verify else None
        begun, num_waiting = False, len(job.groups)
        try:
            with GenerationSpan(job, run) as span:
                with _settled(job, run):
                    async with aclosing(self._pieces(job, run)) as arriving:
                        async for piece in arriving:
                            if piece is None:
                                num_waiting -= 1
                                if num_waiting or begun:
                                    continue
                                yield b""
                            else:
                                span.see(piece)
                                event = stream.piece(self._current(job.head), piece, run.usage)
                                if drafted is not None:
                                    drafted.draft(event)
                                yield event
                            begun = True
                if drafted is not None:
                    drafted.draft(await stream.end(self._current(job.head), None, run.usage))
                reported = await self._verdicts(job) | self._receipts(job, run)
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

    async def _verdicts(self, job: PreparedRequest) -> dict[str, Any]:
        """The reply's verdict, those of its choices, and what was checked of all of them, where they were asked for."""
        if self.checks is None or not job.verify:
            return {}
        drafted = None if job.tapped is None else job.tapped.drafted(streamed=job.stream)
        checked = await self.checks.verdicts([request.request_id for request in job.requests], drafted)
        verdicts = [one.verdict for one in checked]
        return {
            "verdict": worst(verdicts).value,
            "verdicts": [verdict.value for verdict in verdicts],
            "checked": checks_of_all(checked),
        }

    def _receipts(self, job: PreparedRequest, run: ChoiceRun) -> dict[str, Any]:
        """The receipts of all choices, where they were asked for."""
        if not job.receipt:
            return {}
        made = [receipt_of(*known, self._model, job.head.created, self._signing_key) for known in run.records()]
        return {"receipts": [receipt.to_wire() for receipt in made]}

    async def _bad_words(self, wire: WireRequest) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, each as it begins a text and as it follows a space."""
        texts: list[str] = []
        for word in wire.bad_words or ():
            bare = word.lstrip()
            texts += [bare, " " + bare] if bare else [word]
        encode = self._tokenizer.encode_continuation
        sequences = await off_loop(sum(map(len, texts)), lambda: [tuple(encode(text)) for text in texts])
        return tuple(dict.fromkeys(sequences))

    def _group(
        self,
        wire: CompletionRequest | ChatCompletionRequest,
        head: ReplyHead,
        index: int,
        bad_words: tuple[tuple[int, ...], ...],
        answers: ResponseParser | None,
    ) -> tuple[Request, ...]:
        prompt = head.prompts[index]
        params = self._params(wire, len(prompt), bad_words)
        if answers is not None:
            params = dataclasses.replace(params, structure=answers.form)
        others = dataclasses.replace(params, prompt_logprobs=None)
        first = index * head.num_choices
        resume = bool(self.limits.resumes if wire.resume is None else wire.resume)
        seeds: list[dict[str, Any]] = [
            {} if wire.seed is None else {"seed": choice_seed(wire.seed, n), "chosen_seed": True}
            for n in range(head.num_choices)
        ]
        return tuple(
            Request(f"{head.reply_id}-{first + choice}", prompt, others if choice else params, resume=resume, **seed)
            for choice, seed in enumerate(seeds)
        )

    def _params(
        self, wire: CompletionRequest | ChatCompletionRequest, num_prompt: int, bad_words: tuple[tuple[int, ...], ...]
    ) -> SamplingParams:
        params = SamplingParams(
            max_tokens=self._max_tokens(wire, num_prompt),
            logprobs=wire.num_logprobs,
            prompt_logprobs=wire.num_prompt_logprobs,
            bad_words=bad_words,
            **wire.sampling_fields(),
        )
        if wire.reproducible is None and wire.seed is not None and self._model.computing.couples_seeds:
            params = dataclasses.replace(params, reproducible=not params.greedy)
        params.check_vocabulary(self._model.vocab_size)
        if params.allowed_token_ids is not None:
            forbidden = {word[0] for word in params.bad_words if len(word) == 1}
            if params.min_tokens:
                forbidden.update(params.stop_token_ids, () if params.ignore_eos else self._model.eos_token_ids)
            if forbidden.issuperset(params.allowed_token_ids):
                raise dead_end(params)
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
                f"The model's context is {longest} tokens; {num_prompt} of prompt and {asked} of output exceed it. "
                f"{name} may be at most {room} for this prompt.",
            )
        return max(asked, 1)  # the engine cannot generate nothing

    def _pieces(self, job: PreparedRequest, run: ChoiceRun) -> AsyncGenerator[ChoiceDelta | None, None]:
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


_NO_FIELDS = ("request", "request_id")  # what engines refuse that no client has sent


@contextmanager
def _settled(job: PreparedRequest, run: ChoiceRun) -> Iterator[None]:
    """Within it, the pieces of a request are taken.

    Raises:
        InvalidRequest: the source refused the request; it names the field that the client sent.
        EngineFault: the source ended before every choice did.
    """
    try:
        yield
    except InvalidRequest as error:
        refusal = None if job.answers is None else job.answers.refusal_of_tools(error)
        if refusal is None:
            field = "" if error.field in _NO_FIELDS else job.words(error.field.replace(FORM, job.form_field))
            refusal = type(error)(field, job.words(error.message.replace(FORM, job.form_field)))
        raise refusal from error
    if run.unfinished:
        raise EngineFault(f"The token stream ended before its requests did: {', '.join(sorted(run.unfinished))}.")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the request's own for choice 0, an independent one for each other.

    A negative seed stands for its two's complement in 64 bits, as OpenAI's seed is an int64.
    """
    seed %= 2**64
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
