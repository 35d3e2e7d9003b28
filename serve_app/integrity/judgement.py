"""What a replay shows about one answer: how far its logprobs are from the replay's, and whether its tokens follow the
replay's distributions."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.backends.base import Replayed
from serve_app.integrity.detectors import Rounding, SeenToken, by_stratum, distribution_alarm
from serve_app.integrity.drift import DriftSums, NoiseFloor, TokenDrift, request_drifted
from serve_app.integrity.replays import KNOWN_AFTERWARDS, Distribution, ReplayJob, Verdict
from serve_app.integrity.verdicts import Checked
from serve_app.telemetry.metric_names import DRIFT_THRESHOLDS_NATS, STRATA
from serve_app.telemetry.metrics import Metrics
from speculative.request import Request

_SEEDS_KEPT = 65_536  # of the requests replayed last


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of one answer.

    checked: the verdict, and what it rests on.
    tokens: each compared token, the prompt's first, for the detectors of the replicas that made them.
    drift_tolerance: the mean of exp|g - t| - 1 above which something is wrong.
    """

    checked: Checked
    tokens: tuple[SeenToken, ...]
    drift_tolerance: float


class Judge:
    """Compares answers with their replays, and counts the differences by stratum.

    Args:
        metrics: drift and terms of the calibration test, by stratum.
        rounding: how far rounding may change a distribution.
        max_tme: tolerated, above the noise floor.
        num_draft_tokens: the most drafted in a round.
    """

    def __init__(
        self, metrics: Metrics, rounding: Rounding | None = None, max_tme: float = 1.05, num_draft_tokens: int = 0
    ) -> None:
        self._metrics = metrics
        self._rounding = rounding or Rounding()
        self._max_tme = max_tme
        self._num_draft_tokens = num_draft_tokens
        self._floor = NoiseFloor()
        self._seeds: OrderedDict[int, None] = OrderedDict()
        for stratum in STRATA:
            self._record_stratum(stratum, ())

    def judge(self, job: ReplayJob, replayed: Replayed) -> Judgement:
        """Compare an answer with its replay.

        Raises:
            ValueError: the replay has not one logprob for each of the answer's.
        """
        served = (*job.prompt_logprobs, *job.logprobs)
        drifts = [TokenDrift.between(*pair) for pair in zip(served, replayed.logprobs, strict=True)]
        for drift in drifts:
            self._metrics.observe("truespec_replay_drift_nats", drift.nats)
        seen = self._seen(job, drifts, replayed)
        for stratum, tokens in by_stratum(seen).items():
            self._record_stratum(stratum, tokens)
        greedy, tolerance = job.request.params.greedy, self._floor.tolerance(self._max_tme)
        output = [token for token in seen if "all" in token.strata]
        alarm = distribution_alarm(output, greedy, self._rounding)
        drifted = request_drifted(drifts, tolerance)
        distribution = self._distribution(job.request, output)
        checked = Checked(
            verdict=Verdict.SUSPECT if drifted or alarm else Verdict.VERIFIED,
            reason="drift" if drifted else f"distribution: {alarm}" if alarm else "replayed",
            num_tokens=len(seen),
            tme=DriftSums(drifts).tme,
            max_drift_nats=max((drift.nats for drift in drifts), default=0.0),
            replayed_by=replayed.replica,
            checks=_checks(distribution, greedy=greedy),
            distribution=distribution,
        )
        if job.num_drafted == 0:
            self._floor.add([token.drift for token in output])
        if distribution is Distribution.REPEATED_SEED:
            seen = [dataclasses.replace(token, row=None) for token in seen]
        return Judgement(checked, tuple(seen), tolerance)

    def _seen(self, job: ReplayJob, drifts: Sequence[TokenDrift], replayed: Replayed) -> list[SeenToken]:
        num_prompt = len(job.prompt_logprobs)
        rows = [*[None] * num_prompt, *(replayed.replayed or [None] * len(job.token_ids))]
        made_by = [*[job.prompt_scored_by] * num_prompt, *job.made_by]
        strata = job.strata(self._num_draft_tokens)
        return [SeenToken(*parts) for parts in zip(strata, drifts, rows, made_by, strict=True)]

    def _distribution(self, request: Request, output: Sequence[SeenToken]) -> Distribution:
        """What its replayed tokens can show about their distribution."""
        if all(token.row is None for token in output):
            return Distribution.UNTESTED
        if request.params.greedy:
            return Distribution.GREEDY
        if request.canary:  # whose seeds are its replica's own
            return Distribution.TESTED
        return Distribution.TESTED if self._is_new(request.seed) else Distribution.REPEATED_SEED

    def _is_new(self, seed: int) -> bool:
        """Whether no answer of late had this seed: with the same seed come the same random numbers."""
        new = seed not in self._seeds
        self._seeds[seed] = None
        if len(self._seeds) > _SEEDS_KEPT:
            self._seeds.popitem(last=False)
        return new

    def _record_stratum(self, stratum: str, tokens: Sequence[SeenToken]) -> None:
        sums = DriftSums(token.drift for token in tokens)
        count = self._metrics.count
        count("truespec_replay_tokens_total", sums.num_tokens, stratum=stratum)
        count("truespec_replay_tme_excess_total", sums.sums["excess"], stratum=stratum)
        count("truespec_replay_gen_kl_total", sums.sums["gen_kl"], stratum=stratum)
        count("truespec_replay_importance_ratio_total", sums.sums["ratio"], stratum=stratum)
        count("truespec_replay_probability_drift_total", sums.sums["probability"], stratum=stratum)
        for threshold in DRIFT_THRESHOLDS_NATS:
            over = sum(token.drift.nats > threshold for token in tokens)
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


def _checks(distribution: Distribution, *, greedy: bool) -> tuple[str, ...]:
    """The checks that the replayed tokens of an answer went through, as `Checked.checks` names them."""
    checks = ["logprobs"]
    if distribution is not Distribution.UNTESTED:
        checks.append("likeliest" if greedy else "support")
    if distribution is Distribution.TESTED:
        checks.append("distribution")
    return tuple(checks)
