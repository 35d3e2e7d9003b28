"""The values that cross every boundary: requests in, token deltas out. Frozen, picklable, free of torch."""

import enum
import math
import secrets
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from speculative.errors import InvalidRequest
from speculative.options import first_fault, option, options_of

MAX_LOGPROBS = 20  # as many as OpenAI's API takes
MAX_SCORED_IDS = 1024
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 100
SURPRISAL_CLIP_NATS = 10.0  # a bet on a mean needs bounded values, and surprisal has no bound
DEFAULT_VERSION = "default"
"""Version of the weights that an engine starts with."""


class FinishReason(enum.StrEnum):
    """Reason for the end of a request, in the words of the OpenAI API (plus `abort` and `error`)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenKind(enum.StrEnum):
    """The origin of an emitted token."""

    FIRST = "first"  # the first token after the prompt
    ACCEPTED = "accepted"  # a draft that passed verification
    RECOVERED = "recovered"  # drawn from the residual distribution after a rejected draft
    BONUS = "bonus"  # follows if every draft was accepted (or none was drafted)


class Round(NamedTuple):
    """The facts of one round that a referee needs, beside p and the request's seed, to make its draws again.

    verifier: that judged it; `vllm` = it had no drafts, and vLLM sampled its tokens on a CPU. num_tokens: emitted.
    num_drafted: all that were judged together. drafts: those accepted, and the first that was not. draft_probs: q of
    each of them, float32; None where they are deterministic. last_prob: q of the token that replaced a sampled draft.
    """

    verifier: Literal["token_wise", "coupled", "vllm"]
    num_tokens: int
    num_drafted: int = 0
    drafts: tuple[int, ...] = ()
    draft_probs: tuple[float, ...] | None = None
    last_prob: float = 0.0


class Draw(NamedTuple):
    """The draw of one token of a scoring request, to be made again.

    rule: `bonus` = from p by inverse CDF; `residual` = so from p without the rejected draft; `recovered` = so from
    (p - q)+, where the drafter that sampled the rejected draft is there to compute q again; `noise` = the largest
    log p + Gumbel noise; `vllm_noise` = the same with vLLM's noise (`selfcheck.vllm_draws`); `none` = it was not drawn
    here (an accepted draft), or not from p and q alone. round_start: tokens before its round; with the offset, the rule
    and the request's seed it names the random number. rejected: the draft that was rejected there, -1 = none.
    """

    rule: Literal["bonus", "residual", "recovered", "noise", "vllm_noise", "none"]
    round_start: int
    offset: int
    rejected: int = -1


class Speculation(enum.StrEnum):
    """The requests that may currently draft; no request's token distribution depends on it."""

    ON = "on"
    CANARY = "canary"  # only requests that are marked as canaries
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of an answer; `text` is a JSON schema, a regular expression, a Lark grammar, or a JSON list of
    choices."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request; checked on construction.

    A token's distribution is computed from the model's logits in this order: allowed ids, bad words, min_tokens,
    logit_bias and the structure; then repetition, frequency and presence penalty; temperature; min_p; top_k; top_p.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    max_tokens: int = option(16, "Most tokens to emit.", least=1)
    min_tokens: int = 0  # no stop token before this many tokens are emitted
    temperature: float = option(1.0, "Divides the logits; 0 = greedy.", least=0, most=100)
    top_k: int = option(0, "Most tokens to keep; 0 = all.", least=0)
    top_p: float = 1.0
    min_p: float = option(0.0, "Drops tokens less likely than this share of the likeliest.", least=0, most=1)
    presence_penalty: float = option(
        0.0, "Subtracted once from every token that was emitted.", least=-2, most=2, example=1.5
    )
    frequency_penalty: float = option(
        0.0, "Subtracted for each time a token was emitted.", least=-2, most=2, example=1.5
    )
    repetition_penalty: float = option(  # beyond its limits float32 logits need not stay finite
        1.0,
        "Divides the positive logits of tokens in prompt and output, and multiplies the others.",
        least=0.01,
        most=100,
        example=1.4,
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be emitted
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    structure: Structure | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = option(
        None, "Logprobs of the emitted token and so many of the most likely ones.", least=0, most=MAX_LOGPROBS
    )
    logprob_token_ids: tuple[int, ...] = ()  # further tokens whose logprobs are returned at every position
    prompt_logprobs: int | None = option(None, "The same for the prompt's tokens.", least=0, most=MAX_LOGPROBS)
    speculate: bool = True  # False = plain decoding for this request
    reproducible: bool = False  # coupled verifier: the text follows from seed, prompt and p, whatever is drafted

    def __post_init__(self) -> None:
        found = first_fault(_OPTIONS, self)
        if found is not None:
            raise InvalidRequest(found[0], " ".join(found))
        _require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        for _, bias in self.logit_bias:
            _require(-100 <= bias <= 100, "logit_bias", "must be between -100 and 100", bias)
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens})",
            self.min_tokens,
        )
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty", [])
        _require(all(self.bad_words), "bad_words", "must not hold an empty word", list(self.bad_words))
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            _require(all(token >= 0 for token in ids), name, "must not be negative", list(ids))
        _require(
            len(self.logprob_token_ids) <= MAX_SCORED_IDS,
            "logprob_token_ids",
            f"may hold at most {MAX_SCORED_IDS} ids",
            len(self.logprob_token_ids),
        )
        _require(
            self.structure is None or not (self.ignore_eos or self.min_tokens),
            "structure",
            "ends an answer by itself: it cannot be combined with ignore_eos or min_tokens",
            self.structure,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that every token id is one of the model's. Raises InvalidRequest: one is not; `field` names where it
        stands."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids,
            "logit_bias": [token for token, _ in self.logit_bias],
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, ids in named.items():
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            _require(wrong is None, name, f"may hold token ids from 0 to {vocab_size - 1}", wrong)

    @property
    def changed(self) -> frozenset[str]:
        """The fields that differ from their defaults."""
        return frozenset(name for name, default in _DEFAULTS.items() if getattr(self, name) != default)

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken each time."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Return whether top-k, top-p or min-p may change the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Return whether tokens that were emitted, or stand in the prompt, have other logits than before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def ruled(self) -> bool:
        """Return whether allowed or forbidden tokens, biases or penalties change the logits; a structure does so
        beside."""
        tokens = self.bad_words or self.min_tokens or self.logit_bias
        return self.allowed_token_ids is not None or bool(tokens) or self.penalised

    @property
    def returns_logprobs(self) -> bool:
        """Return whether every emitted token comes with a logprobs entry."""
        return self.logprobs is not None or bool(self.logprob_token_ids)


_OPTIONS = options_of(SamplingParams)
_DEFAULTS = {own.name: own.default for own in fields(SamplingParams)}
EXAMPLES = {name: own.example for name, own in _OPTIONS.items() if own.example is not None}
"""Parameters that audits try with any request, each with a value whose effect shows."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A request with n choices becomes n of these.

    seed: names the request's random streams; without one a fresh seed is drawn, so no two requests share a stream.
    chosen_seed: its client named it, and may have chosen what it gives. Draws are made again from it as from any other,
        and no statistic counts them.
    score_from: from this token on the request is teacher-forced: nothing is drawn, and its one delta carries the raw
        logprobs of prompt_token_ids[score_from:], and where they lie in the distribution that `params` make of the
        model's.
    canary: a request of the server's own, which also drafts while speculation is on trial.
    rehearsal: such a request, answered with a known fault where the service rehearses; no client can set it.
    priority: of two waiting requests the one with the lower value comes first; waiting makes up for a higher one.
    timeout_s: how long the client waits for the whole answer; not used by the engine.
    resume: continue elsewhere when the decode replica is lost; not used by the engine.
    gathers: deltas of several steps may be passed on together; not used by the engine.
    adapter: changes the model; engines without adapters refuse it.
    replay: a finished request that is computed again for the referee; no client waits for it.
    draws: of a replay, one a scored token: made again; () = none.
    scored_ids: of a teacher-forced request, one tuple a scored token: further tokens whose raw logprobs are returned in
        its place; () = none.
    edge_nats: tokens this near to an edge of the filters may be on either side of it when draws are made again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    chosen_seed: bool = field(default=False, kw_only=True)
    score_from: int | None = None
    canary: bool = False
    rehearsal: bool = False
    priority: int = 0  # -MAX_PRIORITY = the earliest
    timeout_s: float | None = None  # None = the server's own limit
    resume: bool = False  # if it is decoded behind a stream router
    gathers: bool = True
    adapter: str = ""  # its name; "" = the model itself
    cache_salt: str = ""  # the prefix cache is shared with requests of the same salt only
    replay: bool = False
    draws: tuple[Draw, ...] = ()
    scored_ids: tuple[tuple[int, ...], ...] = ()
    edge_nats: float = 0.25  # of a logit

    def __post_init__(self) -> None:
        _require(bool(self.prompt_token_ids), "prompt", "must hold at least one token", [])
        _require(0 <= self.seed <= MAX_SEED, "seed", "must be between 0 and 2**64 - 1", self.seed)
        _require(
            self.score_from is None or 1 <= self.score_from < len(self.prompt_token_ids),
            "score_from",
            "must leave a token before it and one to score",
            self.score_from,
        )
        _require(
            -MAX_PRIORITY <= self.priority <= MAX_PRIORITY,
            "priority",
            f"must be between -{MAX_PRIORITY} (first) and {MAX_PRIORITY}",
            self.priority,
        )
        _require(self.timeout_s is None or 0 < self.timeout_s < math.inf, "timeout", "must be above 0", self.timeout_s)
        num_scored = len(self.prompt_token_ids) - (self.score_from or len(self.prompt_token_ids))
        for name in ("draws", "scored_ids"):
            count = len(getattr(self, name))
            _require(count in (0, num_scored), name, "must be one for each scored token", count)

    def check_scored_ids(self, vocab_size: int) -> None:
        """Check that every one of `scored_ids` is one of the model's. Raises InvalidRequest: one is not."""
        wrong = next((token for ids in self.scored_ids for token in ids if not 0 <= token < vocab_size), None)
        _require(wrong is None, "scored_ids", f"may hold token ids from 0 to {vocab_size - 1}", wrong)

    @property
    def cache_scope(self) -> str:
        """Return what else than its tokens names the blocks of the prompt: blocks are shared within one scope only."""
        return f"{self.adapter}\0{self.cache_salt}" if self.cache_salt else self.adapter


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs entry of one token; all values come from one matrix, so they cannot disagree."""

    token_id: int
    logprob: float  # nats
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    scored: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of logprob_token_ids, in the request's order


class Redrawn(NamedTuple):
    """The result of a draw that is made again from replayed logits.

    miss: nats by which the logits would have to move for the draw to give this token, in standard deviations of 1 nat
    on each logit, before the temperature; 0 where it does. loose: the same where tokens near an edge of the filters may
    be on either side of it. rejected_probability: p of `Draw.rejected`. coin: the uniform in (0, 1) that decides on the
    draft at its offset. rejected_draft_probability: q of `Draw.rejected`, where q was computed again. bounds,
    rejected_bounds: the least and the most that p of the token and of `Draw.rejected` may be with the tokens near an
    edge on either side of it. temperature: the request's; a nat on a logit moves log p by its inverse.
    """

    miss: float = 0.0
    loose: float = 0.0
    rejected_probability: float = 0.0
    coin: float = 0.5
    rejected_draft_probability: float | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    rejected_bounds: tuple[float, float] = (0.0, 1.0)
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayedToken:
    """The place of one token in the distribution p of the request's parameters, as a teacher-forced pass finds it.

    Surprisals are nats, clipped at SURPRISAL_CLIP_NATS; `gap` and `outside` are nats of the logits before the
    temperature. For a greedy request only `gap` is informative. `redrawn` is of its draw, if the request names it.
    """

    probability: float  # p(y)
    expected_probability: float  # sum(p^2), its mean where y is drawn from p
    surprisal: float  # -log p(y)
    expected_surprisal: float  # its mean
    gap: float  # nats by which y's logit is below the likeliest token's
    outside: float  # nats by which it is outside the filters; 0 = inside, inf = forbidden by a rule or the structure
    redrawn: Redrawn | None = None


class TokenDelta(NamedTuple):
    """The tokens that a step, or several in a row, added to one request: accepted runs, each with the token after it. A
    tuple, since each step makes one a request, and a frozen dataclass takes far longer to make.

    `token_ids`, `kinds` and (when asked for) `logprobs` have one entry per emitted token. The last delta
    carries the finish reason; a delta may be empty when it only reports the end.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    kinds: tuple[TokenKind, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of prompt tokens 1.., with the first delta
    num_drafted: int = 0
    num_accepted: int = 0
    rounds: tuple[Round, ...] = ()  # that emitted its tokens, where the engine keeps them
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    queue_s: float = 0.0  # how long the request waited for its first blocks
    preempted: bool = False  # the request had lost its blocks and was recomputed
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that stopped it, when one did
    replayed: tuple[ReplayedToken, ...] | None = None  # of a teacher-forced request: one a scored token
    error: str | None = None  # set with FinishReason.ERROR
    broken: str | None = None  # which of `INVARIANTS` ended it, where one did, or `DEAD_END`
    weight_version: str = DEFAULT_VERSION  # of the weights that made it
    prefilled_by: str = ""  # the prefill replica that made it; "" = the one that answers
    gaps_s: tuple[float, ...] = ()  # where deltas of several steps were joined: from each step to the next

    @property
    def finished(self) -> bool:
        """Return whether this is the request's last delta."""
        return self.finish_reason is not None


def _require(holds: bool, field_name: str, rule: str, got: object) -> None:
    if not holds:
        raise InvalidRequest(field_name, f"{field_name} {rule}, got {got}.")
