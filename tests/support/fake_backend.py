"""A backend for tests: no model, no tensors, every token computable by hand.

The next token is `(previous * multiplier + position + seed) mod vocab_size`, where position is the token's own in the
whole sequence and greedy requests have seed 0; or whatever the `next_token` rule given says.
"""

import asyncio
import dataclasses
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from serve_app.backends.base import Handoff, ModelInfo, PauseMode, Prefilled, Replayed
from speculative.errors import ConfigError, EngineFault, EngineOverloaded, HandoffRefused
from speculative.request import (
    DEFAULT_VERSION,
    FinishReason,
    Request,
    SamplingParams,
    Speculation,
    TokenDelta,
    TokenKind,
    TokenLogprobs,
)
from speculative.stats import CheckState, EngineUsage, StepStats

NextToken = Callable[[Request, Sequence[int]], int]
"""Gives the token that follows prompt and output so far. May raise EngineFault."""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """What the fake engine is like."""

    model_name: str = "fake"
    fingerprint: str = "fake-fingerprint"
    folder: str = ""  # where a tokenizer lies
    vocab_size: int = 97
    max_model_len: int = 256
    eos_token_id: int = 0
    multiplier: int = 3
    run_length: int = 4  # tokens a step: all but the last are accepted drafts; one more draft is rejected
    step_s: float = 0.0
    max_num_seqs: int = 64
    num_cached_tokens: int = 0  # what every request reports as found in the prefix cache


class FakeBackend:
    """A deterministic stand-in for an engine, for tests only.

    `num_live` counts requests that hold something; it is back at 0 when nothing leaks. `aborted` lists requests that
    were aborted or closed before they finished.
    """

    def __init__(self, config: FakeConfig | None = None, next_token: NextToken | None = None) -> None:
        self.config = config or FakeConfig()
        self._next_token = next_token or self._by_formula
        self._stats = StepStats()
        self._started = False
        self._running: set[str] = set()  # ids of requests that decode
        self._ending: set[str] = set()  # those of them that were aborted
        self.speculation = Speculation.ON
        self.num_distrusted = 0
        self.num_cache_resets = 0
        self.loaded: str | None = None
        self.weight_version = DEFAULT_VERSION
        self.paused: PauseMode | None = None
        self.num_live = 0
        self.num_started = 0
        self.aborted: list[str] = []

    async def start(self) -> ModelInfo:
        self._started = True
        return self.info

    @property
    def info(self) -> ModelInfo:
        config = self.config
        return ModelInfo(
            model_name=config.model_name, max_model_len=config.max_model_len, vocab_size=config.vocab_size,
            fingerprint=config.fingerprint, folder=config.folder, eos_token_ids=(config.eos_token_id,),
            held_out_acceptance=((0.5, 0.4), (0.75,)),
        )  # fmt: skip

    async def stop(self) -> None:
        """Let go; requests that still run are their callers' to close."""
        self._started = False

    async def check(self, request: Request) -> None:
        """It takes whatever there is room for."""

    async def generate(self, request: Request, emitted: Sequence[int] = ()) -> AsyncGenerator[TokenDelta, None]:
        """Prefill and decode; `emitted` tokens are taken as said."""
        if request.score_from is not None:
            scored = tuple(self._entry(token, 0) for token in request.prompt_token_ids[request.score_from :])
            yield TokenDelta(request.request_id, logprobs=scored, finish_reason=FinishReason.STOP)
            return
        async with aclosing(self._decode(request, [*request.prompt_token_ids, *emitted])) as deltas:
            async for delta in deltas:
                yield delta

    async def prefill(self, request: Request, *, first_token: bool) -> Prefilled:
        """Compute the prompt: a handoff of JSON with a checksum in front."""
        tokens = list(request.prompt_token_ids)
        deltas: tuple[TokenDelta, ...] = ()
        self._admit()
        try:
            await asyncio.sleep(self.config.step_s)
            if first_token:
                deltas = (self._round(request, tokens),)
            elif request.params.prompt_logprobs is not None:
                deltas = (TokenDelta(request.request_id, prompt_logprobs=self._prompt_logprobs(request)),)
        finally:
            self.num_live -= 1
        if deltas and deltas[-1].finished:
            return Prefilled(deltas, None)
        return Prefilled(deltas, self._pack(tokens))

    async def resume(self, request: Request, handoff: Handoff) -> AsyncGenerator[TokenDelta, None]:
        """Go on from a handoff of another fake."""
        tokens = self._unpack(handoff)
        prompt = list(request.prompt_token_ids)
        if tokens[: len(prompt)] != prompt:
            raise HandoffRefused("request", f"The handoff is not of {request.request_id}: its prompt differs.")
        async with aclosing(self._decode(request, tokens)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str) -> None:
        """End a running request at its next step, with a last delta."""
        if request_id in self._running:
            self._ending.add(request_id)

    async def replay(self, request: Request) -> Replayed:
        """The same logprobs that generation reported."""
        await asyncio.sleep(self.config.step_s)
        return Replayed(tuple(fake_logprob(token) for token in request.prompt_token_ids[request.score_from :]))

    def set_speculation(self, speculation: Speculation) -> None:
        """Rounds of what must not draft emit one token."""
        self.speculation = speculation

    def invalidate_cache(self) -> None:
        """Nothing is computed that could be wrong; counts the calls."""
        self.num_distrusted += 1

    def reset_prefix_cache(self) -> None:
        """There is none; how often it was asked for is counted."""
        self.num_cache_resets += 1

    async def load_weights(self, source: str, drafter: str | None = None) -> str:
        """Any name will do, but `missing`; the fingerprint is made of it."""
        await asyncio.sleep(self.config.step_s)
        if source == "missing":
            raise ConfigError(f"No model {source!r}: there is no such folder.")
        self.loaded = f"{source} with {drafter}" if drafter else source
        return self.loaded

    async def switch_weights(self, version: str) -> ModelInfo:
        """Be called otherwise; the formula stays."""
        if self.loaded is None:
            raise EngineFault("There are no weights to switch to; load them first.")
        self.config = dataclasses.replace(self.config, fingerprint=self.loaded)
        self.weight_version, self.loaded = version, None
        return self.info

    def drop_weights(self) -> None:
        self.loaded = None

    async def pause(self, mode: PauseMode) -> None:
        """What runs is left alone; nothing new is stopped either."""
        self.paused = mode

    async def unpause(self) -> None:
        self.paused = None

    def usage(self) -> EngineUsage:
        """One block a live request."""
        num_blocks = self.config.max_num_seqs
        return EngineUsage(self.num_live, 0, 0, num_blocks - self.num_live, num_blocks, self.config.max_model_len)

    def cached_blocks(self, most: int) -> list[bytes]:
        return []

    def take_stats(self) -> StepStats:
        taken, self._stats = self._stats, StepStats()
        return taken

    def self_checks(self) -> tuple[CheckState, ...]:
        """None: what it says, it does not draw."""
        return ()

    def check_health(self) -> None:
        if not self._started:
            raise EngineFault("The fake backend is not running; start it first.")

    async def _decode(self, request: Request, tokens: list[int]) -> AsyncGenerator[TokenDelta, None]:
        self._admit()
        self._running.add(request.request_id)
        reason: FinishReason | None = None
        try:
            while reason is None:
                await asyncio.sleep(self.config.step_s)
                delta = self._round(request, tokens)
                reason = delta.finish_reason
                yield delta
        finally:
            self.num_live -= 1
            self._running.discard(request.request_id)
            self._ending.discard(request.request_id)
            if reason in (None, FinishReason.ABORT):
                self.aborted.append(request.request_id)

    def _admit(self) -> None:
        if self.num_live >= self.config.max_num_seqs:
            raise EngineOverloaded(f"All {self.config.max_num_seqs} slots are taken.", retry_after_s=2.0)
        self.num_live += 1
        self.num_started += 1

    def _round(self, request: Request, tokens: list[int]) -> TokenDelta:
        """One step: append a run to `tokens`, and tell of it."""
        if request.request_id in self._ending:
            return TokenDelta(request.request_id, finish_reason=FinishReason.ABORT)
        num_before = len(tokens)
        is_first = num_before == len(request.prompt_token_ids)
        drafting = self._drafts(request) and not is_first
        reason: FinishReason | None = None
        try:
            while reason is None and len(tokens) - num_before < (self.config.run_length if drafting else 1):
                tokens.append(self._next_token(request, tokens))
                reason = self._finish_reason(request, tokens)
        except EngineFault as fault:
            del tokens[num_before:]
            return TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=str(fault))
        emitted = tuple(tokens[num_before:])
        return self._delta(request, emitted, is_first, reason)

    def _delta(
        self, request: Request, emitted: tuple[int, ...], is_first: bool, reason: FinishReason | None
    ) -> TokenDelta:
        drafting = self._drafts(request) and not is_first
        num_accepted = len(emitted) - 1 if drafting else 0
        num_drafted = self.config.run_length if drafting else 0
        last = TokenKind.FIRST if is_first else TokenKind.RECOVERED if drafting else TokenKind.BONUS
        params = request.params
        self._count(num_drafted, num_accepted, len(emitted))
        return TokenDelta(
            request_id=request.request_id,
            token_ids=emitted,
            kinds=(TokenKind.ACCEPTED,) * (len(emitted) - 1) + (last,),
            logprobs=tuple(self._logprobs(token, params) for token in emitted) if params.returns_logprobs else None,
            prompt_logprobs=self._prompt_logprobs(request) if is_first else None,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_cached_tokens=self.config.num_cached_tokens if is_first else 0,
            finish_reason=reason,
            stop_token_id=emitted[-1] if reason is FinishReason.STOP else None,
            weight_version=self.weight_version,
        )

    def _drafts(self, request: Request) -> bool:
        on_trial = self.speculation is Speculation.CANARY and request.canary
        return request.params.speculate and (self.speculation is Speculation.ON or on_trial)

    def _count(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        self._stats.num_steps += 1
        self._stats.num_emitted += num_emitted
        self._stats.count_round(num_drafted, num_accepted)

    def _finish_reason(self, request: Request, tokens: list[int]) -> FinishReason | None:
        params, last = request.params, tokens[-1]
        is_eos = last == self.config.eos_token_id and not params.ignore_eos
        if is_eos or last in params.stop_token_ids:
            return FinishReason.STOP
        full = len(tokens) >= self.config.max_model_len
        done = len(tokens) - len(request.prompt_token_ids) >= params.max_tokens
        return FinishReason.LENGTH if done or full else None

    def _by_formula(self, request: Request, tokens: Sequence[int]) -> int:
        seed = 0 if request.params.greedy else request.seed
        return (tokens[-1] * self.config.multiplier + len(tokens) + seed) % self.config.vocab_size

    def _logprobs(self, token: int, params: SamplingParams) -> TokenLogprobs:
        scored = tuple((other, self._logprob(token, other)) for other in params.logprob_token_ids)
        return self._entry(token, params.logprobs or 0, scored)

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs, ...] | None:
        num_top = request.params.prompt_logprobs
        return None if num_top is None else tuple(self._entry(t, num_top) for t in request.prompt_token_ids[1:])

    def _entry(self, token: int, num_top: int, scored: tuple[tuple[int, float], ...] = ()) -> TokenLogprobs:
        best = [(token + rank) % self.config.vocab_size for rank in range(num_top)]
        top = tuple((other, self._logprob(token, other)) for other in best)
        return TokenLogprobs(token, fake_logprob(token), rank=1, top=top, scored=scored)

    def _logprob(self, token: int, other: int) -> float:
        """A token that is there is the most likely; each runner-up is the next id, half a nat less likely."""
        return fake_logprob(token) - 0.5 * ((other - token) % self.config.vocab_size)

    def _pack(self, tokens: Sequence[int]) -> Handoff:
        body = json.dumps(list(tokens)).encode()
        return np.frombuffer(zlib.crc32(body).to_bytes(4, "little") + body, dtype=np.uint8)

    def _unpack(self, handoff: Handoff) -> list[int]:
        raw = handoff.tobytes()
        if zlib.crc32(raw[4:]) != int.from_bytes(raw[:4], "little"):
            raise HandoffRefused("damaged", "The handoff's checksum does not match. Prefill again.")
        return [int(token) for token in json.loads(raw[4:])]


def fake_logprob(token: int) -> float:
    """The logprob that the fake engine gives a token, in nats."""
    return -(token % 16 + 1) / 16
