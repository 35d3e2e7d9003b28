"""The contract of logprobs, checked on everything an engine reports before it leaves.

One entry per token, and no two reports about one row that disagree. A violation is the engine's fault, never the
request's: what would have been returned is discarded.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from speculative.config import LogprobsMode
from speculative.request import Request, TokenDelta, TokenLogprobs

_ROUNDING = 1e-6  # nats by which a float32 log-softmax may exceed 0
_MASS_ROUNDING = 1e-4


def violation(
    entry: TokenLogprobs, mode: LogprobsMode, num_top: int, scored_ids: Tokens[int], *, vocab_size: int
) -> str | None:
    """Return which rule of the contract one entry violates, one of `LOGPROB_RULES`; None if none.

    Args:
        entry: what is reported of one emitted token.
        mode: what its values mean.
        num_top: how many of the most likely tokens were requested beside it.
        scored_ids: which further ones, in order.
        vocab_size: no more candidates can be reported.
    """
    checks: Tokens[tuple[str, Callable[[], bool]]] = (
        ("not_finite", lambda: _not_finite(entry, masked=mode == "processed_logprobs")),
        ("positive", lambda: max(_values(entry)) > _ROUNDING),
        ("duplicate", lambda: len(dict(entry.top)) < len(entry.top)),
        ("order", lambda: any(left < right for (_, left), (_, right) in zip(entry.top, entry.top[1:], strict=False))),
        ("disagreement", lambda: _disagree(entry)),
        ("rank", lambda: _misranked(entry)),
        ("count", lambda: _miscounted(entry, min(num_top, vocab_size), scored_ids, mode)),
        ("mass", lambda: _mass(entry) > 1 + _MASS_ROUNDING),
    )
    return next((kind for kind, broken in checks if broken()), None)


@dataclass(frozen=True, slots=True)
class LogprobContract:
    """The contract of every delta of one engine."""

    mode: LogprobsMode
    vocab_size: int

    def first_violation(self, delta: TokenDelta, request: Request) -> str | None:
        """Return which of `LOGPROB_RULES` a delta violates; None if none, or if it reports no logprobs."""
        if delta.error is not None:
            return None
        params, prompt = request.params, request.prompt_token_ids
        if request.score_from is not None:
            scored = prompt[request.score_from :]
            return self._first(delta.logprobs, scored, "raw_logprobs", params.prompt_logprobs, request.scored_ids)
        kind = None
        if params.returns_logprobs and (delta.token_ids or delta.logprobs):
            scored_ids = (params.logprob_token_ids,) * len(delta.token_ids)
            kind = self._first(delta.logprobs, delta.token_ids, self.mode, params.logprobs, scored_ids)
        if kind is None and delta.prompt_logprobs is not None:
            kind = self._first(delta.prompt_logprobs, prompt[1:], self.mode, params.prompt_logprobs)
        return kind

    def _first(
        self,
        entries: Tokens[TokenLogprobs] | None,
        token_ids: Tokens[int],
        mode: LogprobsMode,
        num_top: int | None,
        scored_ids: Tokens[Tokens[int]] = (),
    ) -> str | None:
        if entries is None or len(entries) != len(token_ids):
            return "count"
        if any(entry.token_id != token for entry, token in zip(entries, token_ids, strict=True)):
            return "token"
        each = zip(entries, scored_ids or ((),) * len(entries), strict=True)
        kinds = (violation(entry, mode, num_top or 0, ids, vocab_size=self.vocab_size) for entry, ids in each)
        return next((kind for kind in kinds if kind is not None), None)


def _values(entry: TokenLogprobs) -> list[float]:
    return [entry.logprob, *(value for _, value in entry.top), *(value for _, value in entry.scored)]


def _not_finite(entry: TokenLogprobs, *, masked: bool) -> bool:
    """Only a scored token may be -inf, and only where a request's own parameters may have masked it."""
    reported = [entry.logprob, *(value for _, value in entry.top)]
    scored = [value for _, value in entry.scored if not (masked and value == -math.inf)]
    return not all(map(math.isfinite, (*reported, *scored)))


def _disagree(entry: TokenLogprobs) -> bool:
    """Two values of one token differ, or a token that is not among the most likely is likelier than the last of them.

    All were read from one matrix, so equal means bitwise equal.
    """
    known = dict(entry.top)
    least = entry.top[-1][1] if entry.top else math.inf
    others = ((entry.token_id, entry.logprob), *entry.scored)
    if any(known.get(token, value) != value or (token not in known and value > least) for token, value in others):
        return True
    return any(value != entry.logprob for token, value in entry.scored if token == entry.token_id)


def _misranked(entry: TokenLogprobs) -> bool:
    """A rank is 1 + the tokens that are strictly likelier."""
    likelier = sum(value > entry.logprob for _, value in entry.top)
    scored_likelier = sum(value > entry.logprob for value in dict(entry.scored).values())
    if likelier != min(entry.rank - 1, len(entry.top)) or scored_likelier > entry.rank - 1:
        return True
    return entry.rank <= len(entry.top) and entry.top[entry.rank - 1][1] != entry.logprob


def _miscounted(entry: TokenLogprobs, num_top: int, scored_ids: Tokens[int], mode: LogprobsMode) -> bool:
    """Fewer candidates than requested are valid only if the others are masked; then all possible ones are there."""
    if [token for token, _ in entry.scored] != list(scored_ids) or len(entry.top) > num_top:
        return True
    if len(entry.top) == num_top:
        return False
    return mode == "raw_logprobs" or entry.token_id not in dict(entry.top) or _mass(entry) < 1 - _MASS_ROUNDING


def _mass(entry: TokenLogprobs) -> float:
    distinct = dict((*entry.top, *entry.scored, (entry.token_id, entry.logprob)))
    return sum(map(math.exp, distinct.values()))
