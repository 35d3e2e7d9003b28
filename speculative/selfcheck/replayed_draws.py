"""The draws of one answer, made again: which of its tokens follow from the request's seed.

    Round      what the engine that answers reports of a round: its verifier, the drafts that were judged, their q
    Draw       how a replay draws one token of the answer again: by which rule, with which random numbers
    Redrawn    what the replay reports of it: by how much its logits miss the token; its coin, p of the rejected draft
    DrawCheck  one decision about the token, and the nats by which it misses

`Rounds` makes the draws of the rounds, `selfcheck.draw_margins` makes them again from the replayed logits, and
`Rounds.check` makes the checks; what rounding may explain of a miss is decided by the referee.

Every random number is a function of (seed, round start, offset, purpose), so whoever knows the rounds and p can repeat
each decision. With p replayed, u and coin recomputed, x a draft and q what it was sampled from:

    interval   F(y - 1) < u <= F(y)                   first, bonus and undrafted tokens; F of p
    residual   the same, F of p without x              what replaced a deterministic draft
    support    p(y) > q(y)                             what replaced a sampled draft
    recovered  F(y - 1) < u <= F(y), F of (p - q)+     the same, where q was computed again
    draft      y is the draft that was accepted, or is not the one that was rejected (deterministic drafts, coupled)
    accepted   coin <= p(x) / q(x)                     token-wise
    rejected   coin > p(x) / q(x)                      token-wise
    choice     y = argmax(log p + noise)               coupled, and vLLM without drafts

Sources: the verifiers (`speculative.sampling`). A check that fails misses by so many nats, which are those of the
logits before the temperature: what rounding moves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from speculative.request import Draw, Redrawn, ReplayedToken, Round, TokenKind

_NOISE: dict[str, Literal["noise", "vllm_noise"]] = {"coupled": "noise", "vllm": "vllm_noise"}  # by verifier


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of an answer.

    first_start: tokens before the first of them.
    tokens: of the answer.
    kinds: one for each token.
    """

    first_start: int
    rounds: tuple[Round, ...]
    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]

    @property
    def complete(self) -> bool:
        """Return whether every token belongs to one of them, and every draft that was judged is there, with its q."""
        if not self.kinds or not sum(one.num_tokens for one in self.rounds) == len(self.kinds) == len(self.tokens):
            return False
        if any(one.num_tokens < 1 for one in self.rounds):
            return False
        return all(
            len(place.round.drafts) > place.offset
            and (place.round.draft_probs is None or len(place.round.draft_probs) > place.offset)
            for place in self._places()
            if place.kind in (TokenKind.ACCEPTED, TokenKind.RECOVERED)
        )

    def draws(self) -> tuple[Draw, ...]:
        """Return what a replay must draw again, one a token."""
        return tuple(_draw(place) for place in self._places())

    def wrong_drafts(self, *, greedy: bool) -> Iterator[int]:
        """The tokens that contradict their drafts, whatever p; greedy: whether the likeliest were taken."""
        return (place.token_index for place in self._places() if _contradicts_draft(place, greedy=greedy))

    def check(self, rows: Sequence[ReplayedToken]) -> "list[DrawCheck]":
        """Every check of the answer's tokens, in their order; rows: its replayed tokens, with `redrawn`. Raises
        ValueError: there is not one row a token."""
        if len(rows) != len(self.kinds):
            raise ValueError(f"{len(self.kinds)} tokens were served, and {len(rows)} replayed.")
        return [check for place in self._places() for check in _checks_of(place, rows)]

    def _places(self) -> "Iterator[_Place]":
        ends = accumulate(one.num_tokens for one in self.rounds)
        for end, one in zip(ends, self.rounds, strict=True):
            start = end - one.num_tokens
            for offset in range(one.num_tokens):
                index = start + offset
                yield _Place(index, self.tokens[index], self.kinds[index], one, self.first_start + start, offset)


class DrawCheck(NamedTuple):
    """One check.

    token_index: of its token in the answer.
    miss: nats by which it fails, 0 = it holds.
    loose: the same where a token near a filter's edge may be on either side of it.
    draft_drift: nats between log q of the rejected draft as it was served, and computed again; None where it was not.
    """

    token_index: int
    kind: str
    miss: float
    loose: float
    draft_drift: float | None = None


class _Place(NamedTuple):
    """A token in its round.

    start: tokens before the round.
    """

    token_index: int
    token: int
    kind: TokenKind
    round: Round
    start: int
    offset: int

    @property
    def rejected(self) -> int:
        """The draft that was rejected here; -1 = none."""
        return self.round.drafts[self.offset] if self.kind is TokenKind.RECOVERED else -1


def _draw(place: _Place) -> Draw:
    if place.round.verifier in _NOISE:
        return Draw(_NOISE[place.round.verifier], place.start, place.offset)
    if place.kind is TokenKind.RECOVERED:
        known = place.round.draft_probs
        if known is None:
            return Draw("residual", place.start, place.offset, place.rejected)
        return Draw("recovered", place.start, place.offset, place.rejected)
    return Draw("none" if place.kind is TokenKind.ACCEPTED else "bonus", place.start, place.offset)


def _checks_of(place: _Place, rows: Sequence[ReplayedToken]) -> Iterator[DrawCheck]:
    row, one = rows[place.token_index], place.round
    again = row.redrawn
    if again is None:
        return
    if _contradicts_draft(place):
        yield DrawCheck(place.token_index, "draft", math.inf, math.inf)
    if one.verifier in _NOISE:
        yield DrawCheck(place.token_index, "choice", again.miss, again.loose)
        return
    if place.kind is TokenKind.ACCEPTED:
        if not _contradicts_draft(place):
            log_q, log_coin = _log_q(one, place.offset), math.log(again.coin)
            # No draft that p excludes is accepted, whatever q is said to be.
            ratios = (_log(p) - log_q if p > 0 else -math.inf for p in (_probability(row), again.bounds[1]))
            yield _checked(place, again, "accepted", *(ratio - log_coin for ratio in ratios))
        return
    if place.kind is TokenKind.RECOVERED:
        reserve = math.log(again.coin) + _log_q(one, place.offset)
        rejected = again.rejected_probability, again.rejected_bounds[0]
        yield _checked(place, again, "rejected", *(reserve - _log(p) for p in rejected))
    if place.kind is TokenKind.RECOVERED and one.draft_probs is not None:
        strict, loose = _log(_probability(row)), _log(again.bounds[1])
        yield _checked(place, again, "support", strict - _log(one.last_prob), loose - _log(one.last_prob))
        if (q := again.rejected_draft_probability) is not None:
            served = _log_q(one, place.offset)
            drift = 0.0 if served == _log(q) else abs(served - _log(q)) * again.temperature
            yield DrawCheck(place.token_index, "recovered", again.miss, again.loose, drift)
    else:
        kind = "residual" if place.kind is TokenKind.RECOVERED else "interval"
        yield DrawCheck(place.token_index, kind, again.miss, again.loose)


def _contradicts_draft(place: _Place, *, greedy: bool = False) -> bool:
    """Return whether the token was accepted and is another than the draft, or replaced a draft and is the same where
    only another can: a residual without it, or another choice."""
    if place.kind is TokenKind.ACCEPTED:
        return place.token != place.round.drafts[place.offset]
    by_another = greedy or place.round.verifier == "coupled" or place.round.draft_probs is None
    return by_another and place.token == place.rejected


def _checked(place: _Place, again: Redrawn, kind: str, strict: float, loose: float) -> DrawCheck:
    """A check that holds while `strict`, in nats of log p, is not below 0; `loose`: the same with the tokens near an
    edge of the filters on the side that helps."""
    missed = [math.inf if math.isnan(one) else max(0.0, -one) * again.temperature for one in (strict, loose)]
    return DrawCheck(place.token_index, kind, missed[0], min(missed))


def _probability(row: ReplayedToken) -> float:
    """p of the token; 0 where it is filtered out."""
    return row.probability if row.outside == 0 else 0.0


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _log_q(one: Round, offset: int) -> float:
    return 0.0 if one.draft_probs is None else _log(one.draft_probs[offset])
