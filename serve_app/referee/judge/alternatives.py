"""Checks of the numbers that were reported beside the logprobs of an answer, against its replay.

A number is right if it is the logprob of its own token. The likeliest tokens are right if each is as likely as the
replay's in its place of the order, up to what rounding moves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.backends.base import Replayed
from serve_app.referee.judge.answer import Alternatives, Answer
from serve_app.referee.judge.draws import DrawResult, DrawTolerance
from serve_app.referee.judge.drift import TokenDrift, is_unmistakable, request_drifted
from speculative.request import TokenLogprobs
from speculative.selfcheck.replayed_draws import DrawCheck


@dataclass(frozen=True, slots=True)
class AlternativesFound:
    """The result of comparing one answer's.

    num_left_out: those that were reported and not compared, since there were too many, or since the replay knows
        nothing of their tokens.
    """

    num_compared: int = 0  # numbers
    num_left_out: int = 0
    max_drift_nats: float | None = None  # the largest |served - replayed|; None = none was compared


NOTHING_COMPARED = AlternativesFound()


@dataclass(frozen=True, slots=True)
class ComparedPlace:
    """One place.

    below: of each of the likeliest tokens, nats by which it is less likely than the replay's in its place of the order.
    """

    place: int
    drifts: tuple[tuple[int, TokenDrift], ...]  # of each number that was compared, with its token
    num_unknown: int  # numbers of tokens that the replay does not name
    below: tuple[tuple[int, float], ...]
    wrong_form: str  # what is wrong whatever the values, in words; "" = nothing

    @property
    def drift(self) -> TokenDrift | None:
        """Drift of the mean of what counts of |served - replayed|, as rounding moves all numbers of a place together;
        None = none was compared."""
        nats = [math.log1p(drift.counted) for _, drift in self.drifts]
        return TokenDrift.between(sum(nats) / len(nats), 0.0) if nats else None

    def misplaced(self, tolerance: DrawTolerance) -> tuple[int, float] | None:
        """A token that is none of the likeliest, and how far it is from them, nats; None = there is none."""
        apart = dict(self.drifts)
        for token, nats in self.below:
            check = DrawCheck(self.place, "alternatives", nats, nats)
            if nats > 0 and tolerance.judge(check, apart.get(token)) is DrawResult.WRONG:
                return token, nats
        return None


def compare_place(
    reported: Alternatives, replayed: TokenLogprobs, num_top: int = 0, scored_ids: Sequence[int] = ()
) -> ComparedPlace:
    """Compare what was reported in one place with the replay.

    Args:
        reported: in that place.
        replayed: of the same place.
        num_top: likeliest tokens that the request wants; 0 = not known.
        scored_ids: tokens that it names, in their order; () = not known.
    """
    known = dict((*replayed.top, *replayed.scored, (replayed.token_id, replayed.logprob)))
    most = replayed.top[-1][1] if replayed.top else 0.0  # of a token that the replay does not name
    of_each = [(token, value, known.get(token, min(value, most))) for token, value in reported.pairs]
    compared = [one for one in of_each if one[0] in known or one[1] > most]
    ids, num_wanted, wrong_form = [token for token, _ in reported.top], min(num_top, len(replayed.top)), ""
    if len(ids) < num_wanted:
        wrong_form = f"{len(ids)} of the {num_wanted} likeliest tokens were reported"
    elif len(set(ids)) < len(ids):
        wrong_form = "a token was reported twice among the likeliest"
    elif scored_ids and [token for token, _ in reported.scored] != list(scored_ids):
        wrong_form = "the tokens whose logprobs were reported are not those that the request names"
    return ComparedPlace(
        place=reported.place,
        drifts=tuple((token, TokenDrift.between(value, again)) for token, value, again in compared),
        num_unknown=len(of_each) - len(compared),
        below=tuple(
            (token, likeliest - known.get(token, most))
            for (token, _), (_, likeliest) in zip(reported.top, replayed.top, strict=False)
        ),
        wrong_form=wrong_form,
    )


@dataclass(frozen=True, slots=True)
class ComparedAlternatives:
    """All places of one answer."""

    places: tuple[ComparedPlace, ...] = ()
    num_left_out: int = 0
    num_prompt: int = 0  # tokens of its prompt
    found: AlternativesFound = field(init=False)

    def __post_init__(self) -> None:
        nats = [drift.nats for one in self.places for _, drift in one.drifts]
        left_out = self.num_left_out + sum(one.num_unknown for one in self.places)
        object.__setattr__(self, "found", AlternativesFound(len(nats), left_out, max(nats, default=None)))

    @classmethod
    def of(cls, answer: Answer, replayed: Replayed) -> "ComparedAlternatives":
        """Compare those of an answer with its replay."""
        num_prompt, params = len(answer.request.prompt_token_ids), answer.request.params
        if not replayed.entries:
            left_out = answer.num_left_out + sum(len(one.pairs) for one in answer.alternatives)
            return cls((), left_out, num_prompt)
        start = answer.num_tokens - len(replayed.logprobs)
        places, left_out = [], answer.num_left_out
        for one in answer.alternatives:
            if one.place < start:  # a referee that computes no prompts
                left_out += len(one.pairs)
                continue
            of_answer = params.logprobs or 0, params.logprob_token_ids
            asked = of_answer if one.place >= num_prompt else (params.prompt_logprobs or 0, ())
            places.append(compare_place(one, replayed.entries[one.place - answer.num_tokens], *asked))
        return cls(tuple(places), left_out, num_prompt)

    def drift_at(self, start: int, stop: int) -> list[TokenDrift | None]:
        """Return the drifts of tokens start..stop of prompt and answer; None = nothing was compared there."""
        known = {one.place: one.drift for one in self.places}
        return [known.get(place) for place in range(start, stop)]

    def wrong(self, placement: DrawTolerance, drift_tolerance: float, jump_nats: float) -> str:
        """Say what is wrong with them, in words; "" = nothing.

        Args:
            placement: what rounding moves a logit by.
            drift_tolerance, jump_nats: as of `request_drifted`.
        """
        for one in self.places:
            if one.wrong_form:
                return f"alternatives: {self._name(one.place)}: {one.wrong_form}"
            if (misplaced := one.misplaced(placement)) is not None:
                token, nats = misplaced
                return (
                    f"alternatives: {self._name(one.place)}: {token} was reported among the likeliest, and is "
                    f"{nats:.3g} nats below its place"
                )
        drifts = [drift for one in self.places if (drift := one.drift) is not None]
        every = [(one.place, token, drift) for one in self.places for token, drift in one.drifts]
        if not any(is_unmistakable(drift, jump_nats) for _, _, drift in every) and not request_drifted(
            drifts, drift_tolerance, jump_nats
        ):
            return ""
        place, token, drift = max(every, key=lambda one: one[2].nats)
        return f"alternatives: {self._name(place)}: the logprob reported of {token} is {drift.nats:.3g} nats off"

    def _name(self, place: int) -> str:
        return f"prompt token {place}" if place < self.num_prompt else f"token {place - self.num_prompt}"
