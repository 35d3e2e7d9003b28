"""Plain numbers of engine steps: what metrics are made of."""

from dataclasses import dataclass, field

LOGPROB_RULES = {
    "count": "not one entry a token, or not the candidates that were asked for",
    "token": "an entry is of another token",
    "not_finite": "a value is not finite",
    "positive": "a log-probability is above 0",
    "duplicate": "a candidate is there twice",
    "order": "the candidates are not sorted",
    "disagreement": "two values of one token differ",
    "rank": "a rank contradicts the values",
    "mass": "the probabilities add up to more than 1",
}
"""What a breach of each rule of the logprobs contract means."""


@dataclass(slots=True)
class StepStats:
    """Counts since the last time they were taken; `merge` adds two of them.

    Positions are counted from 0 for the first draft of a round. `expected_accepted` is the sum of the verifier's own
    acceptance probability over the positions it reached.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed while prefilling (recomputation after preemption included)
    num_emitted: int = 0
    num_drafts: int = 0  # rounds in which a sequence had at least one draft
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    expected_accepted: float = 0.0
    num_preemptions: int = 0
    logprob_violations: dict[str, int] = field(default_factory=dict)  # deltas that broke the contract, by rule
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    draft_s: float = 0.0
    verify_s: float = 0.0
    export_s: float = 0.0  # copying computed-token state out of the cache
    insert_s: float = 0.0  # and into it

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
                    mine[kind] = mine.get(kind, 0) + count
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What an engine holds right now."""

    num_running: int
    num_waiting: int
    num_held: int  # computed and waiting to be handed off
    num_free_blocks: int  # cached blocks nobody uses count as free
    num_blocks: int
    block_size: int  # tokens a block

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
