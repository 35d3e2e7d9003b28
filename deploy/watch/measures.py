"""Measures of the difference between served and replayed logprobs, as trainers of policies use them.

With g the served logprob of a token (the rollout's), t the replayed one (the trainer's) and r = exp(t - g):

    TME            mean exp|g - t|             NeMo-RL `token_mult_prob_error`
    k1             mean (g - t)                verl `rollout_corr/kl`, slime's k1
    k3             mean (r - log r - 1)        verl `rollout_corr/k3_kl`, NeMo-RL `gen_kl_error`, slime `k3`
    mean ratio     mean r                      NeMo-RL `sampling_importance_ratio`, verl `rollout_is_mean`
    abs            mean |g - t|                slime `train_rollout_logprob_abs_diff`
    chi2           mean r^2 - 1                verl `rollout_corr/chi2_token`
    ESS            (sum r)^2 / (n sum r^2)     verl `rollout_is_eff_sample_size`
    tails          share of r > 2, r < 1/2     verl `rollout_is_ratio_fraction_high`, `_low`

k1 and k3 estimate the KL divergence of the server's distribution from the reference's (Schulman 2020, "Approximating KL
Divergence"); |g - t| is clipped at 10 nats.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from serve_app.referee.judge.detectors import SeenToken

_FIRST_WINDOW_S = 10.0
_MOST_WINDOWS = 60
_HIGH = 2.0  # verl's default for truncation; the low tail is its reciprocal


@dataclass(slots=True)
class Measures:
    """Sums over tokens."""

    num_tokens: int = 0
    num_compared: int = 0  # that were served with a logprob
    log_ratio: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    absolute: float = 0.0
    excess: float = 0.0
    excess_squared: float = 0.0
    k3: float = 0.0
    largest_nats: float = 0.0
    num_high: int = 0
    num_low: int = 0
    num_terms: int = 0  # that were sampled, and whose distribution was computed
    probability: float = 0.0
    probability_squared: float = 0.0
    surprisal: float = 0.0
    surprisal_squared: float = 0.0

    def add(self, tokens: Iterable[SeenToken]) -> None:
        """Take in tokens."""
        for token in tokens:
            self.num_tokens += 1
            if (terms := token.distribution_terms) is not None:
                probability, surprisal = terms
                self.num_terms += 1
                self.probability += probability
                self.probability_squared += probability**2
                self.surprisal += surprisal
                self.surprisal_squared += surprisal**2
            if (drift := token.drift) is None:
                continue
            self.num_compared += 1
            self.log_ratio += math.log(drift.ratio)
            self.ratio += drift.ratio
            self.ratio_squared += drift.ratio**2
            self.absolute += drift.nats
            self.excess += drift.excess
            self.excess_squared += drift.excess**2
            self.k3 += drift.gen_kl
            self.largest_nats = max(self.largest_nats, drift.nats)
            self.num_high += drift.ratio > _HIGH
            self.num_low += drift.ratio < 1 / _HIGH

    def merge(self, other: "Measures") -> None:
        """Take in what another has taken in."""
        largest = max(self.largest_nats, other.largest_nats)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.largest_nats = largest

    def figures(self) -> dict[str, Any]:
        """Return what the report shows; None where there is nothing to compute it from. The z of a term, and the
        standard error of a mean, are those of terms with mean 0."""
        compared, terms = self.num_compared, self.num_terms
        drift = {
            "tme": 1 + _ratio(self.excess, compared),
            "tme_error": _ratio(math.sqrt(self.excess_squared), compared),
            "k1": -_ratio(self.log_ratio, compared),
            "k3": _ratio(self.k3, compared),
            "mean_ratio": _ratio(self.ratio, compared),
            "abs_nats": _ratio(self.absolute, compared),
            "max_nats": self.largest_nats,
            "chi2": _ratio(self.ratio_squared, compared) - 1,
            "ess": _ratio(self.ratio**2, compared * self.ratio_squared),
            "ratio_over_2": _ratio(self.num_high, compared),
            "ratio_under_half": _ratio(self.num_low, compared),
        }
        distribution = {
            "probability": _ratio(self.probability, terms),
            "probability_z": _ratio(self.probability, math.sqrt(self.probability_squared)),
            "surprisal": _ratio(self.surprisal, terms),
            "surprisal_z": _ratio(self.surprisal, math.sqrt(self.surprisal_squared)),
            "probability_error": _ratio(math.sqrt(self.probability_squared), terms),
            "surprisal_error": _ratio(math.sqrt(self.surprisal_squared), terms),
        }
        return {
            "tokens": self.num_tokens,
            "compared": compared,
            "drawn": terms,
            **(drift if compared else dict.fromkeys(drift)),
            **(distribution if terms else dict.fromkeys(distribution)),
        }


class Windows:
    """Measures by time; windows become twice as long when there are too many."""

    def __init__(self) -> None:
        self.seconds = _FIRST_WINDOW_S
        self._windows: dict[int, Measures] = {}
        self._origin: float | None = None

    def add(self, at: float, tokens: Iterable[SeenToken]) -> None:
        """Take in an answer's tokens; at: when it began, unix seconds."""
        if self._origin is None:
            self._origin = at
        while (place := max(0, int((at - self._origin) // self.seconds))) >= _MOST_WINDOWS:
            self.seconds *= 2
            old, self._windows = self._windows, {}
            for earlier, measures in old.items():
                self._windows.setdefault(earlier // 2, Measures()).merge(measures)
        self._windows.setdefault(place, Measures()).add(tokens)

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of windows with tokens, in order; `from` in unix seconds."""
        origin = self._origin or 0.0
        return [
            {"from": origin + place * self.seconds, "seconds": self.seconds, **measures.figures()}
            for place, measures in sorted(self._windows.items())
        ]


def _ratio(total: float, num: float) -> float:
    return total / num if num else 0.0
