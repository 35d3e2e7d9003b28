"""The answer to one request, as it was served: what the referee judges."""

import sys
from dataclasses import dataclass, replace

from serve_app.backends.base import UNKNOWN_NUMERICS, Numerics
from serve_app.referee.tolerance import reach_of
from speculative.errors import SequenceTooLong
from speculative.request import DEFAULT_VERSION, Request, Round, TokenKind
from speculative.selfcheck.replayed_draws import Rounds


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
    weight_versions: tuple[str, ...] = (DEFAULT_VERSION,)  # that made its tokens
    rounds: tuple[Round, ...] = ()  # that made its tokens; fewer where the engine does not keep them
    strata: tuple[tuple[str, ...], ...] = ()  # `strata.shared`, so that they add little to a message
    broken_limit: str = ""  # of its request, in words; "" = it keeps to all
    numerics: Numerics = UNKNOWN_NUMERICS  # of the engine that decoded it
    untested: str = ""  # why its tokens cannot be compared with a distribution; "" = they can

    @classmethod
    def reported(
        cls,
        request: Request,
        replica: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[float | None, ...],
        strata: tuple[tuple[str, ...], ...],
    ) -> "Answer":
        """The answer of a server that does not say how its tokens came about."""
        return cls(
            request=request,
            replica=replica,
            prefilled_by="",
            began_at=0.0,
            max_model_len=sys.maxsize,  # the server's is not known
            token_ids=token_ids,
            logprobs=logprobs,
            kinds=(),
            made_by=(replica,) * len(token_ids),
            rounds_since_handoff=(None,) * len(token_ids),
            preempted=(False,) * len(token_ids),
            num_drafted=1,  # not known: what it shows does not count as the noise of rounding
            strata=strata,
        )

    @property
    def drawn(self) -> Rounds | None:
        """Its draws, to be made again; None where nothing was drawn, or how is not known."""
        rounds = Rounds(len(self.request.prompt_token_ids), self.rounds, self.token_ids, self.kinds)
        return None if self.request.params.greedy or not rounds.complete else rounds

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def scored(self, name: str) -> Request:
        """The request that computes its tokens again.

        Raises:
            SequenceTooLong: no engine like the one that answered takes so many tokens.
        """
        if self.num_tokens > self.max_model_len:
            limit = f"longer than the longest sequence of {self.replica}, {self.max_model_len} tokens"
            raise SequenceTooLong("prompt", f"Prompt and answer have {self.num_tokens} tokens, {limit}.")
        request = self.request
        return Request(
            name,
            (*request.prompt_token_ids, *self.token_ids),
            replace(request.params, prompt_logprobs=None, logprob_token_ids=()),
            request.seed,
            score_from=len(request.prompt_token_ids),
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            replay=True,
            draws=() if self.drawn is None else self.drawn.draws(),
            edge_nats=reach_of(self.numerics.precision),
        )

    @property
    def replicas(self) -> frozenset[str]:
        """All that took part in it."""
        return frozenset({self.replica, self.prefilled_by, *self.made_by} - {""})
