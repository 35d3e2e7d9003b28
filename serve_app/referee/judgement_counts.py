"""What judgements add up to in the metrics: drift, terms of the calibration test and draws, by stratum."""

import math
from collections.abc import Iterable, Sequence

from serve_app.referee.detectors import SeenToken, by_stratum, drifts_of
from serve_app.referee.draws import DrawResult
from serve_app.referee.drift import DriftSums
from serve_app.referee.judgement import Judgement
from serve_app.referee.strata import KNOWN_AFTERWARDS
from serve_app.telemetry.metric_names import DRIFT_THRESHOLDS_NATS
from serve_app.telemetry.metrics import Metrics
from speculative.stats import DRAW_CHECKS


class JudgementCounts:
    """Counts every judgement it is shown.

    Args:
        metrics: where.
        strata: those of the answers; each is there with 0 from the start.
    """

    def __init__(self, metrics: Metrics, strata: Iterable[str]) -> None:
        self._metrics = metrics
        for stratum in strata:
            self._count_stratum(stratum, ())
        for check in DRAW_CHECKS:
            for result in DrawResult:
                metrics.count("truespec_replay_draws_total", 0, check=check, result=result.value)

    def add(self, judgement: Judgement) -> None:
        """Count one."""
        for drift in drifts_of(judgement.compared):
            self._metrics.observe("truespec_replay_drift_nats", drift.nats)
        for stratum, tokens in by_stratum(judgement.compared).items():
            self._count_stratum(stratum, tokens)
        for check, result in judgement.draws:
            self._metrics.count("truespec_replay_draws_total", check=check, result=result.value)

    def _count_stratum(self, stratum: str, tokens: Sequence[SeenToken]) -> None:
        drifts = drifts_of(tokens)
        sums = DriftSums(drifts)
        count = self._metrics.count
        count("truespec_replay_tokens_total", sums.num_tokens, stratum=stratum)
        count("truespec_replay_tme_excess_total", sums.sums["excess"], stratum=stratum)
        count("truespec_replay_gen_kl_total", sums.sums["gen_kl"], stratum=stratum)
        count("truespec_replay_importance_ratio_total", sums.sums["ratio"], stratum=stratum)
        count("truespec_replay_probability_drift_total", sums.sums["probability"], stratum=stratum)
        for threshold in DRIFT_THRESHOLDS_NATS:
            over = sum(drift.nats > threshold for drift in drifts)
            count("truespec_replay_drift_over_total", over, nats=f"{threshold:g}", stratum=stratum)
        if stratum in KNOWN_AFTERWARDS:
            return
        terms = [terms for token in tokens if (terms := token.distribution_terms) is not None]
        count("truespec_replay_law_terms_total", len(terms), stratum=stratum)
        for index, name in enumerate(("probability", "surprisal")):
            values = [term[index] for term in terms]
            positive = math.fsum(value for value in values if value > 0)
            negative = math.fsum(-value for value in values if value < 0)
            count("truespec_replay_law_positive_total", positive, term=name, stratum=stratum)
            count("truespec_replay_law_negative_total", negative, term=name, stratum=stratum)
