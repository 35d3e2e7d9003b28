"""Plain numbers of engine steps: what metrics are made of."""

import math
from dataclasses import dataclass, field

LOGPROB_RULES = {
    "count": "not one entry a token, or not the candidates that were asked for",
    "token": "an entry is of another token",
    "not_finite": "a value is not finite",
    "positive": "a log-probability is above 0",
    "duplicate": "a candidate occurs twice",
    "order": "the candidates are not sorted",
    "disagreement": "two values of one token differ",
    "rank": "a rank contradicts the values",
    "mass": "the probabilities add up to more than 1",
}
"""What a breach of each rule of the logprobs contract means."""

CHECKS = {
    "a": "accepted or not, against the chance to be: the whole accept step",
    "a_prime": "the chance of each draft, against its mean: whether drafts come from q",
    "b": "accepted or not, against the chance of the very draft: the coin",
    "c": "q of what is emitted, against its mean: whether the output follows p where something was drafted",
    "d": "p of what is emitted, against its mean: whether the output follows p",
    "e": "q of what is drafted, against its mean: whether drafts come from q",
    "f": "q of what replaces a draft, against its mean: the residual distribution and its noise",
    "g": "the place of a round's last token in the order of its distribution, against the middle: the noise it is "
    "drawn with",
    "r": "the residual distribution of what replaces a draft, against its mean",
    "coupled_a_prime": "a_prime of reproducible requests",
    "coupled_c": "c of reproducible requests",
    "coupled_d": "d of reproducible requests",
    "coupled_e": "e of reproducible requests",
}
"""The self-checks: numbers whose mean is 0 while an engine samples what it says it samples."""

INVARIANTS = {
    "not_finite": "the logits were not finite",
    "no_token": "the request's own rules left no token to draw",
    "law": "the distribution of a draft was no distribution: not finite, negative, or not of mass 1",
    "q_missing": "drafts came without the distribution they were drawn from",
    "q_zero": "a draft has probability 0 under the distribution it is said to come from",
    "p_zero": "a token of probability 0 was to be emitted",
    "support": "a token that the request forbids was to be emitted",
    "positions": "rows of drafts do not stand where they belong",
    "conservation": "tokens, keys and values do not add up",
    "length": "more tokens were to be emitted than the model's longest sequence holds",
    "stop": "tokens behind the one that ends the answer were to be emitted",
    "metrics": "drafts were counted that there were not, or not counted",
}
"""What a breach of each invariant means."""

CLIENTS_FAULT = "no_token"
"""The one of them that a client's own parameters bring about: it fails the request, and says nothing of the engine."""


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
    """How one self-check stands over an engine's life.

    log_e, log_threshold: nats, of the e-process that stands closest to an alarm.
    """

    check: str
    num: int
    mean: float
    z: float
    log_e: float
    log_threshold: float
    num_alarms: int


@dataclass(slots=True)
class StepStats:
    """Counts since the last time they were taken; `merge` adds two of them.

    Positions are counted from 0 for the first draft of a round. `expected_accepted` is the sum of the verifier's own
    acceptance probability over the positions it reached, `achievable_accepted` that of sum(min(p, q)) there, with the q
    the drafts were drawn from, estimated from the steps that the self-checks looked at: a verifier that was told
    another q falls short of it.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed while prefilling (recomputation after preemption included)
    num_emitted: int = 0
    num_drafts: int = 0  # rounds in which a sequence had at least one draft
    num_rounds_with_logprobs: int = 0  # of requests that ask for logprobs
    num_drafted_with_logprobs: int = 0  # drafts in them: none at all would mean that speculation is off there
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    expected_accepted: float = 0.0
    achievable_accepted: float = 0.0
    num_preemptions: int = 0
    logprob_violations: dict[str, int] = field(default_factory=dict)  # deltas that broke the contract, by rule
    violations: dict[str, int] = field(default_factory=dict)  # broken invariants, by kind
    checks: dict[str, CheckSums] = field(default_factory=dict)  # terms of the self-checks
    alarms: dict[str, int] = field(default_factory=dict)  # self-checks that found the engine at fault
    num_repeated_seeds: int = 0  # requests that share random numbers with an earlier one; no term counts them
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    draft_s: float = 0.0
    verify_s: float = 0.0
    export_s: float = 0.0  # copying computed-token state out of the cache
    check_s: float = 0.0  # checking handoffs that came
    insert_s: float = 0.0  # copying them into the cache

    @property
    def num_drafted(self) -> int:
        """Draft tokens over all positions."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens over all positions."""
        return sum(self.accepted_per_position)

    def count_round(self, num_drafted: int, num_accepted: int) -> None:
        """Count one sequence's round, position by position."""
        if num_drafted == 0:
            return
        self.num_drafts += 1
        _grow(self.drafted_per_position, num_drafted)
        _grow(self.accepted_per_position, num_drafted)
        for position in range(num_drafted):
            self.drafted_per_position[position] += 1
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def count_violation(self, kind: str) -> None:
        """Count a broken invariant."""
        self.violations[kind] = self.violations.get(kind, 0) + 1

    def clear(self) -> None:
        """Count from nothing again."""
        fresh = StepStats()
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def merge(self, other: "StepStats") -> None:
        """Add `other`'s counts to this one."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                _grow(mine, len(theirs))
                for position, count in enumerate(theirs):
                    mine[position] += count
            elif isinstance(mine, dict):
                for kind, count in theirs.items():
                    mine[kind] = mine[kind] + count if kind in mine else count
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What an engine holds right now. Replays, for which no client waits, are counted by themselves."""

    num_running: int
    num_waiting: int
    num_held: int  # computed and waiting to be handed off
    num_free_blocks: int  # cached blocks nobody uses count as free
    num_blocks: int
    block_size: int  # tokens a block
    num_replays: int = 0  # running or waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
