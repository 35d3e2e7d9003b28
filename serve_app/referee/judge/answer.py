"""The answer to one request, as it was served: what the referee judges."""

import sys
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from serve_app.backends.base import UNKNOWN_NUMERICS, Numerics
from serve_app.referee.judge.tolerance import reach_of
from speculative.errors import SequenceTooLong
from speculative.request import DEFAULT_VERSION, MAX_LOGPROBS, Request, Round, SamplingParams, TokenKind
from speculative.selfcheck.replayed_draws import Rounds

MOST_ALTERNATIVES = 16_384
"""Numbers that are kept of one answer and its prompt. Of more, every second place is left out, or every fourth, and so
on."""


class Alternatives(NamedTuple):
    """Logprobs that were reported in one place. Pairs of a token id and its logprob, nats."""

    place: int  # the index of the place's own token in prompt and answer
    top: tuple[tuple[int, float], ...] = ()  # the likeliest first
    scored: tuple[tuple[int, float], ...] = ()  # of the ids that the request names

    @property
    def pairs(self) -> tuple[tuple[int, float], ...]:
        """Return all reported alternatives."""
        return (*self.top, *self.scored)


@dataclass(slots=True)
class KeptAlternatives:
    """Alternatives of one answer while it grows."""

    most: int = MOST_ALTERNATIVES
    kept: list[Alternatives] = field(default_factory=list)
    num_left_out: int = 0  # numbers that were reported and are not kept
    _every: int = 1
    _num_kept: int = 0

    def add(self, one: Alternatives) -> None:
        """Add what was reported in the next place."""
        if one.place % self._every:
            self.num_left_out += len(one.pairs)
            return
        self.kept.append(one)
        self._num_kept += len(one.pairs)
        while self._num_kept > self.most and len(self.kept) > 1:
            self._every *= 2
            left_out = sum(len(one.pairs) for one in self.kept if one.place % self._every)
            if left_out:
                self.kept = [one for one in self.kept if one.place % self._every == 0]
                self.num_left_out += left_out
                self._num_kept -= left_out


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a finished request. The tuples of the output have one entry a token."""

    request: Request
    replica: str  # that answered
    prefilled_by: str  # the prefill replica that reported part of it, or whose handoff was used; "" = none
    began_at: float  # unix seconds, by the clock of `replica`
    max_model_len: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # as served, nats, None where one is missing; () if none was asked for
    kinds: tuple[TokenKind, ...]  # () where they are not known
    made_by: tuple[str, ...]  # the replica that emitted it
    rounds_since_handoff: tuple[int | None, ...]  # None = computed where the prompt was
    preempted: tuple[bool, ...]
    prompt_logprobs: tuple[float, ...] = ()  # as served, of prompt tokens 1..; () if not requested
    prompt_scored_by: str = ""  # the replica that gave them
    num_drafted: int = 0
    num_cached: int = 0  # prompt tokens found in a prefix cache
    weight_versions: tuple[str, ...] = (DEFAULT_VERSION,)  # that made its tokens, the latest last
    num_before_update: int = 0  # of its tokens, made by earlier versions than the latest
    rounds: tuple[Round, ...] = ()  # that made its tokens; fewer where the engine does not keep them
    strata: tuple[tuple[str, ...], ...] = ()  # `strata.shared`, so that they add little to a message
    broken_limit: str = ""  # of its request, in words; "" = it keeps to all
    numerics: Numerics = UNKNOWN_NUMERICS  # of the engine that decoded it
    untested: str = ""  # why its tokens cannot be compared with a distribution; "" = they can
    alternatives: tuple[Alternatives, ...] = ()  # reported beside the logprobs, in the order of their places
    num_left_out: int = 0  # numbers that were reported beside them and are not kept
    wire: Literal["", "agrees", "differs"] = ""  # its exchange, with what the engine emitted; "" = not compared

    @classmethod
    def reported(
        cls,
        request: Request,
        replica: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[float | None, ...],
        strata: tuple[tuple[str, ...], ...],
        **known: Any,
    ) -> "Answer":
        """The answer of a server that does not say how its tokens came about; known: further fields."""
        unknown: dict[str, Any] = {"began_at": 0.0, "num_drafted": 1}  # whose noise does not count as that of rounding
        return cls(
            request=request,
            replica=replica,
            prefilled_by="",
            max_model_len=sys.maxsize,  # the server's is not known
            token_ids=token_ids,
            logprobs=logprobs,
            kinds=(),
            made_by=(replica,) * len(token_ids),
            rounds_since_handoff=(None,) * len(token_ids),
            preempted=(False,) * len(token_ids),
            strata=strata,
            **unknown | known,
        )

    @property
    def replayable_rounds(self) -> Rounds | None:
        """Its rounds, whose draws can be made again; None for a greedy answer, and where rounds are missing."""
        rounds = Rounds(len(self.request.prompt_token_ids), self.rounds, self.token_ids, self.kinds)
        return None if self.request.params.greedy or not rounds.complete else rounds

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def scored_prompt(self, name: str) -> Request:
        """The request that computes the logprobs of its prompt again."""
        request, num_tokens = self.request, len(self.request.prompt_token_ids)
        num_top, scored_ids = self._looked_up(request.params.prompt_logprobs, 1, num_tokens)
        return Request(
            name,
            request.prompt_token_ids,
            SamplingParams(prompt_logprobs=num_top),
            score_from=1,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            replay=True,
            scored_ids=scored_ids,
        )

    def _looked_up(self, asked: int | None, start: int, stop: int) -> tuple[int | None, tuple[tuple[int, ...], ...]]:
        """Return how many of the likeliest tokens a replay is to report in places start..stop of prompt and answer,
        None = none are needed; and the tokens whose logprobs it is to look up. asked: by the client."""
        there = {one.place: one for one in self.alternatives if start <= one.place < stop}
        if not there:
            return None, ()
        num_top = max(asked or 0, *(len(one.top) for one in there.values()))
        nothing = Alternatives(0)
        ids = tuple(tuple(token for token, _ in there.get(place, nothing).pairs) for place in range(start, stop))
        return min(num_top, MAX_LOGPROBS), ids

    def scored(self, name: str) -> Request:
        """The request that computes its tokens again. Raises SequenceTooLong: no engine like the one that answered
        takes so many tokens."""
        if self.num_tokens > self.max_model_len:
            limit = f"longer than the longest sequence of {self.replica}, {self.max_model_len} tokens"
            raise SequenceTooLong("prompt", f"Prompt and answer have {self.num_tokens} tokens, {limit}.")
        request, num_prompt = self.request, len(self.request.prompt_token_ids)
        num_top, scored_ids = self._looked_up(request.params.logprobs, num_prompt, self.num_tokens)
        return Request(
            name,
            (*request.prompt_token_ids, *self.token_ids),
            replace(request.params, prompt_logprobs=num_top, logprob_token_ids=()),
            request.seed,
            score_from=num_prompt,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            replay=True,
            draws=() if self.replayable_rounds is None else self.replayable_rounds.draws(),
            scored_ids=scored_ids,
            edge_nats=reach_of(self.numerics.precision),
        )

    def since_update(self) -> "Answer":
        """Return what the latest version of the weights made, behind a prompt of all before it; itself if that made it
        all."""
        start, request = self.num_before_update, self.request
        if len(self.weight_versions) == 1:
            return self
        ends = accumulate(one.num_tokens for one in self.rounds)
        return replace(
            self,
            request=replace(request, prompt_token_ids=(*request.prompt_token_ids, *self.token_ids[:start])),
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            kinds=self.kinds[start:],
            made_by=self.made_by[start:],
            rounds_since_handoff=self.rounds_since_handoff[start:],
            preempted=self.preempted[start:],
            prompt_logprobs=(),
            weight_versions=self.weight_versions[-1:],
            num_before_update=0,
            rounds=tuple(one for one, end in zip(self.rounds, ends, strict=True) if end > start),
            strata=self.strata[start:],
            alternatives=tuple(one for one in self.alternatives if one.place >= len(request.prompt_token_ids) + start),
        )

    @property
    def replicas(self) -> frozenset[str]:
        """Return all replicas that took part in it."""
        return frozenset({self.replica, self.prefilled_by, *self.made_by} - {""})
