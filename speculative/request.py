"""What crosses every boundary: requests in, token deltas out. Frozen, picklable, free of torch."""

import dataclasses
import enum
import math
import secrets
from dataclasses import dataclass, field

from speculative.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API (plus `abort` and `error`)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenKind(enum.StrEnum):
    """How a token came to be emitted."""

    FIRST = "first"  # the first token after the prompt
    ACCEPTED = "accepted"  # a draft that survived verification
    RECOVERED = "recovered"  # drawn from the residual law after a rejected draft
    BONUS = "bonus"  # follows when every draft survived (or when nothing was drafted)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; checked on construction.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, 0 = the emitted token only, k = and the k most likely
    speculate: bool = True  # False = plain decoding for this request

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _require(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            "must lie between 0 (greedy) and 100",
            self.temperature,
        )
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or positive", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]", self.top_p)
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"must lie between 0 and {MAX_LOGPROBS}",
            self.logprobs,
        )
        _require(
            all(token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            "must not be negative",
            list(self.stop_token_ids),
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A request with n choices becomes n of these.

    `seed` names the request's random streams; without one a fresh seed is drawn, so two unseeded requests
    never share a stream. With `score_from` the request is teacher-forced: nothing is drawn, and its one delta carries
    the raw logprobs of prompt_token_ids[score_from:].
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    score_from: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.prompt_token_ids), "prompt", "must hold at least one token", [])
        _require(0 <= self.seed <= MAX_SEED, "seed", "must lie between 0 and 2**64 - 1", self.seed)
        _require(
            self.score_from is None or 1 <= self.score_from < len(self.prompt_token_ids),
            "score_from",
            "must leave a token before it and one to score",
            self.score_from,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs entry of one token; all values come from one matrix, so they cannot disagree."""

    token_id: int
    logprob: float  # nats
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one request: the accepted run and the token after it.

    `token_ids`, `kinds` and (when asked for) `logprobs` have one entry per emitted token. The last delta
    carries the finish reason; a delta may be empty when only the end is to be told.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    kinds: tuple[TokenKind, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    queue_s: float = 0.0  # how long the request waited for its first blocks
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that stopped it, when one did
    error: str | None = None  # set with FinishReason.ERROR

    @property
    def finished(self) -> bool:
        """Whether this is the request's last delta."""
        return self.finish_reason is not None

    def replace(self, **changes: object) -> "TokenDelta":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _require(holds: bool, field_name: str, rule: str, got: object) -> None:
    if not holds:
        raise InvalidRequest(field_name, f"{field_name} {rule}, got {got}.")
