"""Drift between served and replayed logprobs, and the point at which it is too much.

With g the logprob that was served and t the replayed one, TME (token multiplicative probability error, NeMo-RL) is the
mean of exp|g - t|: 1.00 in float32, up to 1.03 in bfloat16.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["", "hotter", "colder", "low", "high"]
"""Side of an alarm: tokens as at a higher or a lower temperature than the request's, or served logprobs that are too
low or too high on average; "" = it has none."""

_CLIP_NATS = 10.0  # a single larger drift would dominate the sum
_HALF_AT = 10.0  # surprisal at which a nat counts half: rounding moves what is all but excluded further
_UNMISTAKABLE = 4.0  # no rounding moves a logprob by so many times `Tolerance.jump_nats`
_LEANS = 3.0  # standard deviations of a sum without side
_REQUEST_FACTOR = 4.0  # a single request may drift so many times the tolerance: it is an average over few tokens


def counted_nats(served: float, replayed: float) -> float:
    """Return how far a replayed logprob is above the served one, the less the further both are below 0; within +-10.
    What is no number is so without bound."""
    apart = replayed - served
    if math.isnan(apart):
        return _CLIP_NATS
    return max(-_CLIP_NATS, min(_CLIP_NATS, apart)) / (1 + max(0.0, -max(served, replayed)) / _HALF_AT)


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """One token's, with |g - t| clipped at 10 nats; what is no number has drifted without bound."""

    nats: float  # |g - t|
    counted: float  # exp|g - t| - 1, of the nats that count
    excess: float  # exp|g - t| - 1; TME - 1 is its mean
    ratio: float  # exp(t - g), the importance ratio; its mean is 1 where nothing is wrong
    gen_kl: float  # exp(t - g) - (t - g) - 1

    @classmethod
    def between(cls, served: float, replayed: float) -> "TokenDrift":
        """Compare one token's two logprobs, in nats."""
        apart = replayed - served
        signed = _CLIP_NATS if math.isnan(apart) else max(-_CLIP_NATS, min(_CLIP_NATS, apart))
        ratio = math.exp(signed)
        return cls(
            nats=abs(signed),
            counted=math.expm1(abs(counted_nats(served, replayed))),
            excess=math.expm1(abs(signed)),
            ratio=ratio,
            gen_kl=math.expm1(signed) - signed,
        )


def tme_of(drifts: Sequence[TokenDrift]) -> float | None:
    """Return the mean of exp|g - t|; None where there is nothing."""
    return 1 + sum(drift.excess for drift in drifts) / len(drifts) if drifts else None


@dataclass(slots=True)
class Cusum:
    """Notices when a mean rises above what is tolerated: a one-sided cumulative sum (Page 1954).

    A value counts at most 1, so that no single token raises an alarm, and the sum never falls below 0, so that a long
    good time does not make it slow.
    """

    bound: float = 3.0  # the sum that raises the alarm; above 1
    _sum: float = 0.0
    _zero_at: float | None = None
    evidence_since: float = 0.0  # seconds at which the sum of the last alarm began to rise

    def add(self, values: Iterable[float], tolerance: float, at: float = 0.0) -> bool:
        """Take in values of that time, in their order; whether the alarm was raised. It starts again then."""
        raised = False
        for value in values:
            if self._sum == 0.0 or self._zero_at is None:
                self._zero_at = at
            self._sum = max(0.0, self._sum + min(value, 1.0) - tolerance)
            if self._sum >= self.bound:
                raised, self._sum, self.evidence_since = True, 0.0, self._zero_at
        return raised


class Lean:
    """The side to which served logprobs lie from replayed ones on average, beyond chance."""

    def __init__(self) -> None:
        self._sum = self._squares = 0.0

    def add(self, drifts: Iterable[TokenDrift]) -> None:
        """Take in tokens."""
        apart = [math.log(drift.ratio) for drift in drifts]
        self._sum += math.fsum(apart)
        self._squares += math.fsum(one * one for one in apart)

    @property
    def side(self) -> Side:
        """Return where they lie; "" = on neither."""
        if abs(self._sum) < _LEANS * math.sqrt(self._squares) or not self._squares:
            return ""
        return "low" if self._sum > 0 else "high"


class NoiseFloor:
    """The mean drift that counts of tokens for which nothing was drafted, once there are enough of them."""

    def __init__(self, min_tokens: int = 256) -> None:
        self._min_tokens = min_tokens
        self._num_tokens, self._counted = 0, 0.0

    def add(self, drifts: Sequence[TokenDrift]) -> None:
        """Take in the output tokens of a request for which nothing was drafted."""
        self._num_tokens += len(drifts)
        self._counted += sum(drift.counted for drift in drifts)

    @property
    def is_known(self) -> bool:
        """Return whether there are enough."""
        return self._num_tokens >= self._min_tokens

    def tolerance(self, max_tme: float) -> float:
        """The mean of exp|g - t| - 1 above which something is wrong: max_tme - 1 above the floor.

        The floor counts at most max_tme - 1 itself: an engine that is wrong without drafts too must not teach the
        referee that this is noise. It is 0 while too little is known.
        """
        allowed = max_tme - 1
        return allowed + min(self._counted / self._num_tokens if self.is_known else 0.0, allowed)


def is_unmistakable(drift: TokenDrift, jump_nats: float) -> bool:
    """Return whether one logprob is further off than rounding moves any; jump_nats: as of `request_drifted`."""
    return drift.nats > _UNMISTAKABLE * jump_nats


def request_drifted(drifts: Sequence[TokenDrift], tolerance: float, jump_nats: float = 1.0) -> bool:
    """Return whether one request's own tokens are enough to call it wrong.

    Args:
        tolerance: of the mean excess.
        jump_nats: rounding moves all but one logprob of a thousand by less.
    """
    if any(is_unmistakable(drift, jump_nats) for drift in drifts):
        return True
    if Cusum().add((drift.counted for drift in drifts), tolerance):
        return True
    jump = math.expm1(jump_nats)  # one of its tokens may be the one in a thousand
    return sum(drift.counted for drift in drifts) > jump + _REQUEST_FACTOR * tolerance * len(drifts)
