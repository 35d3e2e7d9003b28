"""What the referee gets of a finished request, and how its tokens are grouped for the comparison.

A stratum names the circumstances under which tokens were made, because these point to the fault: drift right after a
handoff means a bad handoff. A token belongs to several strata, so their counts cannot be summed.
"""

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from speculative.errors import SequenceTooLong
from speculative.request import DEFAULT_VERSION, Request, Round, TokenDelta, TokenKind
from speculative.selfcheck.replayed_draws import Rounds

KNOWN_AFTERWARDS = frozenset({"speculative", "plain", "accepted", "recovered"})
"""Strata to which a token belongs because of what was drawn, there or after it. Accepted tokens follow min(p, q) and
recovered ones the residual, and only together do they follow p: here drift is tested, the distribution is not."""


class Verdict(enum.StrEnum):
    """What is known of one answer; later members outweigh earlier ones."""

    VERIFIED = "verified"  # recomputed, and found correct
    UNVERIFIED = "unverified"  # not checked, or the check did not complete
    SUSPECT = "suspect"  # found wrong, or made where a fault was found


class Distribution(enum.StrEnum):
    """What the replay of one answer shows about the distribution of its tokens."""

    TESTED = "tested"  # sampled with new random numbers: its tokens are evidence
    GREEDY = "greedy"  # nothing was drawn; each token was compared with the likeliest
    REPEATED_SEED = "repeated_seed"  # its random numbers were seen before: its tokens are no further evidence
    UNTESTED = "untested"  # no replay, or one that gives logprobs only


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a reply with several choices."""
    order = tuple(Verdict)
    return max(verdicts, key=order.index)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A finished request to check. The tuples of the output have one entry a token."""

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
        )

    @property
    def replicas(self) -> frozenset[str]:
        """All that took part in it."""
        return frozenset({self.replica, self.prefilled_by, *self.made_by} - {""})

    def strata(self, num_draft_tokens: int) -> Iterator[tuple[str, ...]]:
        """The strata of each compared token: first the prompt's, if its logprobs were returned, then the output's.

        Args:
            num_draft_tokens: the most tokens drafted in a round.
        """
        yield from (("prompt",) for _ in self.prompt_logprobs)
        params = self.request.params
        distribution = "greedy" if params.greedy else "filtered" if params.filtered else "sampled"
        common = (
            "all",
            "speculative" if self.num_drafted else "plain",
            "cached_prefix" if self.num_cached else "computed_prefix",
            distribution,
        )
        room = self.max_model_len - len(self.request.prompt_token_ids)
        for index, (kind, since) in enumerate(zip(self.kinds, self.rounds_since_handoff, strict=True)):
            near = ("near_limit",) if room - index <= num_draft_tokens + 1 else ()
            preempted = ("preempted",) if self.preempted[index] else ()
            yield (*common, kind.value, _since(since), *near, *preempted)


@dataclass(slots=True)
class Record:
    """What was served for one request, delta by delta."""

    request: Request
    replica: str
    began_at: float
    max_model_len: int
    prefilled_by: str = ""
    num_rounds: int | None = None  # since the handoff; None where there was none
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    rounds_since_handoff: list[int | None] = field(default_factory=list)
    preempted: list[bool] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_scored_by: str = ""
    num_drafted: int = 0
    num_cached: int = 0
    weight_versions: dict[str, None] = field(default_factory=dict)  # a set in order
    rounds: list[Round] = field(default_factory=list)

    @property
    def since_handoff(self) -> str:
        """The next round's, as the metrics name it."""
        rounds = self.num_rounds
        if rounds is None:
            return "none"
        return str(rounds) if rounds < 2 else "2_3" if rounds < 4 else "4_7" if rounds < 8 else "8_up"

    def skip(self, delta: TokenDelta) -> None:
        """Count a round of a request that is not replayed."""
        if self.num_rounds is not None and delta.token_ids:
            self.num_rounds += 1

    def take(self, delta: TokenDelta) -> None:
        """Add what one step emitted."""
        count, maker = len(delta.token_ids), delta.prefilled_by or self.replica
        self.prefilled_by = delta.prefilled_by or self.prefilled_by
        self.token_ids += delta.token_ids
        self.kinds += delta.kinds
        self.made_by += [maker] * count
        self.logprobs += [entry.logprob for entry in delta.logprobs or ()]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs += [entry.logprob for entry in delta.prompt_logprobs]
            self.prompt_scored_by = maker
        self.rounds_since_handoff += [self.num_rounds] * count
        self.preempted += [delta.preempted] * count
        self.num_drafted += delta.num_drafted
        self.rounds += [] if delta.round is None else [delta.round]
        self.weight_versions[delta.weight_version] = None
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        self.skip(delta)

    def job(self) -> ReplayJob | None:
        """The job for the referee; None if there is nothing to compare."""
        if not self.token_ids:
            return None
        complete = len(self.token_ids) == len(self.logprobs)
        return ReplayJob(
            request=self.request,
            replica=self.replica,
            prefilled_by=self.prefilled_by,
            began_at=self.began_at,
            max_model_len=self.max_model_len,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if complete else (),
            kinds=tuple(self.kinds),
            made_by=tuple(self.made_by),
            rounds_since_handoff=tuple(self.rounds_since_handoff),
            preempted=tuple(self.preempted),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_scored_by=self.prompt_scored_by,
            num_drafted=self.num_drafted,
            num_cached=self.num_cached,
            weight_versions=tuple(self.weight_versions),
            rounds=tuple(self.rounds),
        )


class Records:
    """What one replica is serving, by request id.

    Args:
        replica: its name.
        max_model_len: of its engine.
        clock: unix seconds.
    """

    def __init__(self, replica: str, max_model_len: int, clock: Callable[[], float] = time.time) -> None:
        self._replica = replica
        self._max_model_len = max_model_len
        self._clock = clock
        self._live: dict[str, Record] = {}

    def begin(self, request: Request) -> Record:
        """Record what is served for a request from now on."""
        record = Record(request, self._replica, self._clock(), self._max_model_len)
        self._live[request.request_id] = record
        return record

    def handed_off(self, request_id: str, prefilled_by: str) -> None:
        """The handoff of a request was accepted; the rounds after it come next."""
        record = self._live.get(request_id)
        if record is not None:
            record.prefilled_by, record.num_rounds = prefilled_by, 0

    def answered_by(self, request_id: str, replica: str) -> None:
        """What comes next is made by another replica than the recording one, or than before."""
        record = self._live.get(request_id)
        if record is not None and record.replica != replica:
            record.replica, record.prefilled_by, record.num_rounds = replica, "", None

    def end(self, request_id: str) -> None:
        """Nothing more follows."""
        self._live.pop(request_id, None)


def _since(rounds: int | None) -> str:
    if rounds is None:
        return "no_handoff"
    return f"handoff_{rounds}" if rounds < 2 else "handoff_2_7" if rounds < 8 else "handoff_8_up"
