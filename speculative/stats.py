"""Plain counts of engine steps, from which metrics are computed."""

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import zip_longest

from speculative.request import Request

LOGPROB_RULES = {
    "count": "not one entry per token, or not the requested candidates",
    "token": "an entry belongs to another token",
    "not_finite": "a value is not finite",
    "positive": "a log-probability is above 0",
    "duplicate": "a candidate occurs twice",
    "order": "the candidates are not sorted",
    "disagreement": "two values for one token differ",
    "rank": "a rank contradicts the values",
    "mass": "the probabilities add up to more than 1",
}
"""Meaning of a violation, by rule of the logprob contract."""

CHECKS = {
    "a": "accepted or not, minus the expected acceptance: the whole accept step",
    "a_prime": "acceptance probability of each draft, minus its mean: whether drafts come from the distribution they "
    "claim",
    "b": "accepted or not, minus that draft's acceptance probability: the random accept decision",
    "c": "the drafter's probability of emitted tokens, minus its mean: whether the output follows the model where "
    "there were drafts",
    "d": "the model's probability of emitted tokens, minus its mean: whether the output follows the model",
    "e": "the drafter's probability of draft tokens, minus its mean: whether drafts come from its distribution",
    "f": "the drafter's probability of recovered tokens, minus its mean: the residual distribution and its noise",
    "g": "the rank of a round's last token within its distribution, minus its mean: the noise it is sampled with",
    "r": "residual probability of recovered tokens after a deterministic draft, minus its mean",
    "lag_b": "the accept decision times the sign of the request's previous one at that offset: accept uniforms used "
    "again in a later round",
    "lag_g": "the sampling noise times the sign of the request's previous one at that offset: sample uniforms used "
    "again in a later round",
    "coin": "the accept uniform behind a round's last draft, which decides nothing, minus its mean: whether the number "
    "of drafts depends on accept uniforms",
    "coupled_a_prime": "acceptance probability of each draft, minus its mean, of reproducible requests",
    "coupled_c": "the drafter's probability of emitted tokens, minus its mean, of reproducible requests",
    "coupled_d": "the model's probability of emitted tokens, minus its mean, of reproducible requests",
    "coupled_e": "the drafter's probability of draft tokens, minus its mean, of reproducible requests",
}
"""The self-checks: terms whose mean is 0 as long as an engine samples from the distributions it claims to."""

INVARIANTS = {
    "not_finite": "the logits were not finite",
    "law": "the distribution of a draft was invalid: not finite, negative, or not of mass 1",
    "q_missing": "drafts came without the distribution they were sampled from",
    "q_zero": "a draft has probability 0 under its own distribution",
    "p_zero": "a token of probability 0 would have been emitted",
    "support": "a token that the request forbids would have been emitted",
    "draw": "a draft was sampled, accepted or rejected, or a token drawn, against its random number",
    "resolution": "the random numbers of a round end with the same bits: they were cut short",
    "greedy": "the token of a greedy request was not the likeliest",
    "positions": "rows of drafts are at the wrong positions",
    "conservation": "tokens, keys and values do not add up",
    "length": "more tokens than the model's maximum sequence length would have been emitted",
    "stop": "tokens after the one that ends the answer would have been emitted",
    "isolation": "cached keys and values of another cache_salt or adapter would have been read",
    "metrics": "drafts that did not exist were counted, or drafts were not counted",
}
"""Meaning of a violation, by invariant."""

SAMPLED_INVARIANTS = frozenset({"draw", "resolution", "greedy"})
"""Those that are checked only in the steps whose self-check terms are taken; all others are in every step."""

DEAD_END = "no_token"
"""Why a row is no token's that a request's own rules leave none: its client's mistake, and no broken invariant."""


@dataclass(frozen=True, slots=True)
class CheckSums:
    """Sums over the terms of one self-check: how many, their positive and negative parts (both >= 0), their squares."""

    num: int = 0
    positive: float = 0.0
    negative: float = 0.0
    square: float = 0.0

    def __add__(self, other: "CheckSums") -> "CheckSums":
        return CheckSums(
            self.num + other.num,
            self.positive + other.positive,
            self.negative + other.negative,
            self.square + other.square,
        )

    @property
    def mean(self) -> float:
        """Mean of the terms; 0 where there is none."""
        return (self.positive - self.negative) / self.num if self.num else 0.0

    @property
    def z(self) -> float:
        """The sum of the terms in standard deviations; 0 where they never differ from 0."""
        return (self.positive - self.negative) / math.sqrt(self.square) if self.square else 0.0


@dataclass(frozen=True, slots=True)
class CheckState:
    """State of one self-check over an engine's life."""

    check: str
    num: int  # terms so far
    mean: float  # of the terms
    z: float  # their mean in standard errors
    log_e: float  # nats, of the e-process closest to an alarm
    log_threshold: float  # nats at which that one raises it
    num_alarms: int  # so far
    evidence_since: float = 0.0  # unix seconds at which the evidence of the last alarm began; 0 = there was none


@dataclass(frozen=True, slots=True)
class Evidence:
    """A request of the step in which an engine found itself at fault, for a post-mortem."""

    request: Request
    token_ids: tuple[int, ...] = ()  # of its answer so far, as far as they are known
    refused: tuple[int, ...] = ()  # what the step would have added


@dataclass(slots=True)
class StepStats:
    """Counts since they were last taken; `merge` adds two of them.

    Positions are counted from 0 for the first draft of a round. `expected_accepted` is the sum of the verifier's own
    acceptance probability over the positions it reached, `achievable_accepted` that of sum(min(p, q)) there, with the q
    the drafts were sampled from, estimated from the steps that the self-checks cover: a verifier that was given
    another q falls short of it.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed while prefilling (recomputation after preemption included)
    num_emitted: int = 0
    num_drafts: int = 0  # rounds in which a sequence had at least one draft
    num_rounds_with_logprobs: int = 0  # of requests that ask for logprobs
    num_drafted_with_logprobs: int = 0  # drafts in them: 0 would mean that speculation is off there
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    expected_accepted: float = 0.0
    achievable_accepted: float = 0.0
    num_preemptions: int = 0
    logprob_violations: dict[str, int] = field(default_factory=dict)  # deltas that broke the contract, by rule
    violations: dict[str, int] = field(default_factory=dict)  # broken invariants, by kind
    checks: dict[str, CheckSums] = field(default_factory=dict)  # terms of the self-checks
    alarms: dict[str, int] = field(default_factory=dict)  # self-checks that found the engine at fault
    evidence: tuple[Evidence, ...] = ()  # of the steps in which any of these three was found
    num_repeated_seeds: int = 0  # requests whose seed an earlier one had
    num_checked_rounds: int = 0  # of requests that sample, in the steps whose terms are taken
    num_untested_rounds: int = 0  # of these, whose random numbers another request had: no term counts them
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    draft_s: float = 0.0
    verify_s: float = 0.0
    speculated_s: float = 0.0  # of steps that decode with drafts, where their cost without is known
    speculated_plain_s: float = 0.0  # estimated: the same tokens without drafts
    export_s: float = 0.0  # copying computed-token state out of the cache
    check_s: float = 0.0  # checking received handoffs
    insert_s: float = 0.0  # copying them into the cache

    @property
    def num_found(self) -> int:
        """How often the engine found itself at fault."""
        return sum(sum(one.values()) for one in (self.violations, self.logprob_violations, self.alarms))

    @property
    def num_drafted(self) -> int:
        """Draft tokens over all positions."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens over all positions."""
        return sum(self.accepted_per_position)

    def count_round(self, num_drafted: int, num_accepted: int, times: int = 1) -> None:
        """Count one sequence's round, or `times` such rounds, position by position."""
        if num_drafted == 0:
            return
        self.num_drafts += times
        for counts, number in ((self.drafted_per_position, num_drafted), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            for position in range(number):
                counts[position] += times

    def count_violation(self, kind: str, number: int = 1) -> None:
        """Count a broken invariant."""
        self.violations[kind] = self.violations.get(kind, 0) + number

    def take(self) -> "StepStats":
        """Return what was counted since the last call; all counts start again."""
        taken = dataclasses.replace(self)
        self.__init__()  # type: ignore[misc]
        return taken

    def merge(self, other: "StepStats") -> None:
        """Add `other`'s counts to this one."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                mine[:] = [sum(counts) for counts in zip_longest(mine, theirs, fillvalue=0)]
            elif isinstance(mine, dict):
                mine |= {kind: mine[kind] + count if kind in mine else count for kind, count in theirs.items()}
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """The requests and memory that an engine holds right now. Replays, for which no client waits, are counted
    separately."""

    num_running: int
    num_waiting: int
    num_held: int  # computed and waiting to be handed off
    num_free_blocks: int  # unused cached blocks count as free
    num_blocks: int
    block_size: int  # tokens per block
    num_replays: int = 0  # running or waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks
