"""What a replay shows about one answer: how far its logprobs are from the replay's, and whether its tokens follow the
replay's distributions."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.backends.base import Replayed
from serve_app.referee.detectors import SeenToken, by_stratum, distribution_alarm, drifts_of
from serve_app.referee.draws import DrawResult, DrawsChecked, DrawTolerance, check_draws
from serve_app.referee.drift import DriftSums, NoiseFloor, TokenDrift, request_drifted
from serve_app.referee.records import KNOWN_AFTERWARDS, Distribution, ReplayJob, Verdict
from serve_app.referee.tolerance import Tolerance
from serve_app.referee.verdicts import Checked
from serve_app.telemetry.metric_names import DRIFT_THRESHOLDS_NATS, SERVED_STRATA
from serve_app.telemetry.metrics import Metrics
from speculative.request import Request
from speculative.stats import DRAW_CHECKS

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
        tolerance: between the engines that answer and those that replay; its `max_tme` is above the noise floor.
        num_draft_tokens: the most drafted in a round.
        strata: those of the jobs.
    """

    def __init__(
        self,
        metrics: Metrics,
        tolerance: Tolerance,
        num_draft_tokens: int = 0,
        strata: Iterable[str] = SERVED_STRATA,
    ) -> None:
        self._metrics = metrics
        self._tolerance = tolerance
        self._num_draft_tokens = num_draft_tokens
        self._floor = NoiseFloor()
        self._draw_tolerance = DrawTolerance(tolerance.edge_nats)
        self._seeds: OrderedDict[int, None] = OrderedDict()
        for stratum in strata:
            self._record_stratum(stratum, ())
        for check in DRAW_CHECKS:
            for result in DrawResult:
                metrics.count("truespec_replay_draws_total", 0, check=check, result=result.value)

    def judge(self, job: ReplayJob, replayed: Replayed) -> Judgement:
        """Compare an answer with its replay.

        Raises:
            ValueError: the replay has not one logprob for each of the answer's tokens.
        """
        of_each = _drift_of_each(job, replayed)
        drifts = [drift for drift in of_each if drift is not None]
        for drift in drifts:
            self._metrics.observe("truespec_replay_drift_nats", drift.nats)
        draws = self._draws(job, replayed, of_each[len(job.prompt_logprobs) :])
        seen = self._seen(job, of_each, replayed, draws)
        for stratum, tokens in by_stratum(seen).items():
            self._record_stratum(stratum, tokens)
        greedy, drift_tolerance = job.request.params.greedy, self._floor.tolerance(self._tolerance.max_tme)
        output = [token for token in seen if "all" in token.strata]
        alarm = distribution_alarm(output, greedy, self._tolerance)
        drifted = request_drifted(drifts, drift_tolerance, self._tolerance.jump_nats)
        distribution = self._distribution(job.request, output)
        checks = _checks(distribution, draws, greedy=greedy, logprobs=bool(job.logprobs))
        reason = "drift" if drifted else f"distribution: {alarm}" if alarm else _wrong_draw(draws, job)
        checked = Checked(
            verdict=Verdict.SUSPECT if reason else Verdict.VERIFIED if checks else Verdict.UNVERIFIED,
            reason=reason or ("replayed" if checks else "its replay gives nothing to compare it with"),
            num_tokens=len(seen) if checks else len(drifts),
            tme=DriftSums(drifts).tme if drifts else None,
            max_drift_nats=max((drift.nats for drift in drifts), default=None),
            replayed_by=replayed.replica,
            checks=checks,
            distribution=distribution,
            draws=draws,
        )
        if job.num_drafted == 0:
            self._floor.add(drifts_of(output))
            self._draw_tolerance.add(drifts_of(output))
        if distribution is Distribution.REPEATED_SEED:
            seen = [dataclasses.replace(token, row=None, draw=_without_rounding(token.draw)) for token in seen]
        return Judgement(checked, tuple(seen), drift_tolerance)

    def _draws(self, job: ReplayJob, replayed: Replayed, drifts: Sequence[TokenDrift | None]) -> DrawsChecked:
        """Make the draws of an answer again; drifts: of its tokens."""
        if job.request.params.greedy:
            return DrawsChecked(reason="nothing was drawn")
        if job.drawn is None or replayed.replayed is None:
            return DrawsChecked(reason="the engine did not report how it drew")
        checks = job.drawn.check(replayed.replayed)
        checked = check_draws(len(job.token_ids), checks, drifts, self._draw_tolerance)
        for check in checks:
            result = self._draw_tolerance.judge(check, drifts[check.token_index])
            self._metrics.count("truespec_replay_draws_total", check=check.kind, result=result.value)
        self._draw_tolerance.add_drafts(checks)
        return checked

    def _seen(
        self, job: ReplayJob, drifts: Sequence[TokenDrift | None], replayed: Replayed, draws: DrawsChecked
    ) -> list[SeenToken]:
        num_prompt = len(job.prompt_logprobs)
        rows = [*[None] * num_prompt, *(replayed.replayed or [None] * len(job.token_ids))]
        results = [*[None] * num_prompt, *(draws.results or [None] * len(job.token_ids))]
        made_by = [*[job.prompt_scored_by] * num_prompt, *job.made_by]
        strata = job.strata(self._num_draft_tokens)
        return [SeenToken(*parts) for parts in zip(strata, drifts, rows, made_by, results, strict=True)]

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


def _drift_of_each(job: ReplayJob, replayed: Replayed) -> list[TokenDrift | None]:
    """One a token, the prompt's first; None where it was served without a logprob."""
    served = (*job.prompt_logprobs, *(job.logprobs or [None] * len(job.token_ids)))
    return [
        None if logprob is None else TokenDrift.between(logprob, again)
        for logprob, again in zip(served, replayed.logprobs, strict=True)
    ]


def _wrong_draw(draws: DrawsChecked, job: ReplayJob) -> str:
    """What is wrong with the draws of an answer; "" = nothing."""
    if draws.wrong is None:
        return ""
    return f"draws: token {draws.wrong} ({job.kinds[draws.wrong].value}) is not the one that the request's seed demands"


def _without_rounding(result: DrawResult | None) -> DrawResult | None:
    """The same random numbers come near an edge again: that is no further evidence."""
    return DrawResult.FOLLOWS if result is DrawResult.NEAR else result


def _checks(distribution: Distribution, draws: DrawsChecked, *, greedy: bool, logprobs: bool) -> tuple[str, ...]:
    """The checks that the replayed tokens of an answer went through, as `Checked.checks` names them."""
    checks = ["logprobs"] if logprobs else []
    if distribution is not Distribution.UNTESTED:
        checks.append("likeliest" if greedy else "support")
    if distribution is Distribution.TESTED:
        checks.append("distribution")
    if draws.num_checked:
        checks.append("draws")
    return tuple(checks)
