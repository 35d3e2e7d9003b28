"""Generative scoring: how likely is each label as the continuation of each context?

Single-token labels share one request per context, whose first position scores them all; longer labels are
teacher-forced, one request each. Everything goes through the same token source as generation.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from serve_app.backends.base import ModelInfo, TokenSource
from serve_app.errors import ContextLengthExceeded, RequestAborted, UnsupportedParameter
from serve_app.openai.choice import refuse_failure
from serve_app.openai.prepared_request import NO_TERMS, Charge, RequestTerms, charge_nothing
from serve_app.openai.replies import Usage, metadata_of
from serve_app.openai.scoring.score_request import ScoreRequest
from serve_app.text.tokenizer import Tokenizer
from speculative.config import LogprobsMode
from speculative.errors import EngineFault, InvalidRequest, RequestTimeout
from speculative.request import MAX_SCORED_IDS, Request, SamplingParams, TokenDelta

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """Limits of scoring on a replica."""

    max_pairs: int = MAX_SCORED_IDS  # contexts x labels of one request body
    max_concurrent: int = 16  # engine requests at once, over all bodies
    timeout_s: float = 600.0  # the longest one body may take; it may ask for less
    max_prompt_tokens: int | None = None  # of a context with a label; None = the model's own


@dataclass(frozen=True, slots=True)
class _Ask:
    """One engine request, and which labels of which context it scores."""

    request: Request
    context: int
    labels: tuple[int, ...]
    num_tokens: int  # to charge: its labels', plus its context's if it is the first of that context


@dataclass(frozen=True, slots=True)
class _Reported:
    """An ask's result: the logprobs of its labels, and prompt tokens found in the prefix cache."""

    ask: _Ask
    logprobs: tuple[float, ...]
    num_cached: int
    weight_version: str


class Scorer:
    """Computes log-probabilities and normalised scores of labels after contexts.

    Args:
        source: where the tokens come from.
        tokenizer: of the model.
        model: what is served.
        logprobs_mode: the engine's; scores are made of the model's own log-probabilities only.
        limits: how much at once.
    """

    def __init__(
        self,
        source: TokenSource,
        tokenizer: Tokenizer,
        model: ModelInfo,
        *,
        logprobs_mode: LogprobsMode,
        limits: ScoreLimits | None = None,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._model = model
        self._mode = logprobs_mode
        self._limits = limits or ScoreLimits()
        self._room = asyncio.Semaphore(self._limits.max_concurrent)

    async def score(
        self, wire: ScoreRequest, terms: RequestTerms = NO_TERMS, charge: Charge = charge_nothing
    ) -> dict[str, Any]:
        """The reply: for each context, each label's token ids, logprob (nats, summed over its tokens) and score.

        A score is the label's share of its context's labels (softmax), or with normalize = false its probability.
        Running requests are aborted when this is cancelled or anything fails. `charge` is called with tokens
        as they are computed.

        Raises:
            InvalidRequest: it can never be served; `field` names what is wrong.
            RequestTimeout: it took too long.
            TruespecError: the source refused a request or failed.
        """
        self._check(wire)
        priority, limit_s = terms.priority(wire.priority), terms.time_limit_s(wire.timeout)
        contexts, labels = await asyncio.to_thread(self._encode, wire)
        for index, context in enumerate(contexts):
            length = len(context) + max(map(len, labels))
            terms.check_prompt(f"contexts.{index}", length, self._limits.max_prompt_tokens)
        score_id = f"score-{uuid.uuid4().hex}"
        asks = [ask for index in range(len(contexts)) for ask in _asks(score_id, index, contexts[index], labels)]
        adapter = self._model.adapter_of(wire.model)
        asks = [
            replace(ask, request=replace(ask.request, priority=priority, timeout_s=limit_s, adapter=adapter))
            for ask in asks
        ]
        limit_s = min(self._limits.timeout_s, limit_s or math.inf)
        try:
            async with asyncio.timeout(limit_s):
                reported = await self._all(asks, charge)
        except TimeoutError as error:
            raise RequestTimeout(f"Scoring took longer than the {limit_s:g} s it had; send fewer at once.") from error
        versions = {part.weight_version for part in reported}
        if len(versions) > 1:
            raise RequestAborted("The weights were replaced while this was scored; send it again.")
        rows = [[0.0] * len(labels) for _ in contexts]
        for part in reported:
            for label, logprob in zip(part.ask.labels, part.logprobs, strict=True):
                rows[part.ask.context][label] = logprob
        # Nothing is generated: each context counts once, and each label once after each of them.
        usage = Usage(
            prompt_tokens=sum(map(len, contexts)) + len(contexts) * sum(map(len, labels)),
            cached_tokens=sum(part.num_cached for part in reported),
        )
        return {
            "id": score_id,
            "object": "score",
            "created": int(time.time()),
            "model": wire.model,
            "data": [_rendered(index, labels, row, wire.normalize) for index, row in enumerate(rows)],
            "usage": usage.to_wire(),
            **metadata_of(versions),
        }

    def _check(self, wire: ScoreRequest) -> None:
        if self._mode != "raw_logprobs":
            raise UnsupportedParameter(
                "",
                f"/v1/score gives the model's own log-probabilities, and this server's logprobs_mode is {self._mode}; "
                "use a server whose logprobs_mode is raw_logprobs.",
            )
        pairs = len(wire.contexts) * len(wire.labels)
        if pairs > self._limits.max_pairs:
            raise InvalidRequest(
                "contexts",
                f"{len(wire.contexts)} contexts with {len(wire.labels)} labels are {pairs} pairs; at most "
                f"{self._limits.max_pairs} are scored at once. Send several requests.",
            )

    def _encode(self, wire: ScoreRequest) -> tuple[list[Ids], list[Ids]]:
        """Token ids of contexts and labels. A label's text is encoded by itself: its leading space is its own."""
        encode = self._tokenizer.encode
        contexts = [
            self._checked(encode(context) if isinstance(context, str) else context, f"contexts.{index}")
            for index, context in enumerate(wire.contexts)
        ]
        labels: list[Ids] = []
        for index, label in enumerate(wire.labels):
            ids = encode(label, continuation=True) if isinstance(label, str) else label
            checked = self._checked([ids] if isinstance(ids, int) else ids, f"labels.{index}")
            if checked in labels:
                first = labels.index(checked)
                raise InvalidRequest(
                    f"labels.{index}", f"labels.{index} and labels.{first} are the same tokens; send each label once."
                )
            labels.append(checked)
        self._check_lengths(contexts, max(map(len, labels)))
        return contexts, labels

    def _checked(self, ids: Sequence[int], name: str) -> Ids:
        if not ids:
            raise InvalidRequest(name, f"{name} must hold at least one token.")
        size = self._model.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise InvalidRequest(name, f"{name} holds the token id {wrong}; ids run from 0 to {size - 1}.")
        return tuple(ids)

    def _check_lengths(self, contexts: Sequence[Ids], longest_label: int) -> None:
        longest = self._model.max_model_len
        for index, context in enumerate(contexts):
            if len(context) + longest_label > longest:
                raise ContextLengthExceeded(
                    f"contexts.{index}",
                    f"The model's context is {longest} tokens; contexts.{index} has {len(context)}, and the longest "
                    f"label {longest_label}. Shorten it.",
                )

    async def _all(self, asks: Sequence[_Ask], charge: Charge) -> list[_Reported]:
        """All answers; when one fails, or the caller leaves, the others are aborted before this returns."""
        tasks = [asyncio.create_task(self._one(ask, charge)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, ask: _Ask, charge: Charge) -> _Reported:
        async with self._room, aclosing(self._source.stream((ask.request,))) as deltas:
            async for delta in deltas:
                refuse_failure(delta)
                if delta.logprobs is not None:
                    charge(ask.num_tokens)
                    return _Reported(ask, _label_logprobs(ask, delta), delta.num_cached_tokens, delta.weight_version)
        raise EngineFault(f"{ask.request.request_id} ended without its logprobs.")


def _asks(score_id: str, index: int, context: Ids, labels: Sequence[Ids]) -> list[_Ask]:
    """The engine requests of one context."""
    single = tuple(label for label, ids in enumerate(labels) if len(ids) == 1)
    asks = []
    if single:
        # One greedy token: nothing is sampled, and raw logprobs do not depend on the sampling parameters.
        params = SamplingParams(
            max_tokens=1, temperature=0, logprob_token_ids=tuple(labels[label][0] for label in single)
        )
        asks.append(_Ask(Request(f"{score_id}-{index}", context, params), index, single, len(single)))
    for label, ids in enumerate(labels):
        if len(ids) > 1:
            request = Request(f"{score_id}-{index}-{label}", context + ids, score_from=len(context))
            asks.append(_Ask(request, index, (label,), len(ids)))
    return [replace(asks[0], num_tokens=len(context) + asks[0].num_tokens), *asks[1:]]


def _label_logprobs(ask: _Ask, delta: TokenDelta) -> tuple[float, ...]:
    assert delta.logprobs is not None
    if ask.request.score_from is not None:
        return (math.fsum(entry.logprob for entry in delta.logprobs),)
    return tuple(logprob for _, logprob in delta.logprobs[0].scored)


def _rendered(index: int, labels: Sequence[Ids], logprobs: Sequence[float], normalize: bool) -> dict[str, Any]:
    best = max(logprobs) if normalize else 0.0
    weights = [math.exp(logprob - best) for logprob in logprobs]
    total = math.fsum(weights) if normalize else 1.0
    return {
        "index": index,
        "labels": [
            {"token_ids": list(ids), "logprob": logprob, "score": weight / total}
            for ids, logprob, weight in zip(labels, logprobs, weights, strict=True)
        ],
    }
