"""Counts the referee's results in metrics: whoever runs the referee connects its callbacks to these."""

import time
from collections.abc import Callable, Iterable, Sequence

from serve_app.backends.base import Replayed
from serve_app.referee.book.controls import ControlChange, ControlResult
from serve_app.referee.book.independent_checks import IndependentResult
from serve_app.referee.book.replay_checker import ReplayChecker, ReplayResult
from serve_app.referee.book.replica_book import Case
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import Alarm, SeenToken, by_stratum, drifts_of
from serve_app.referee.judge.judgement import Judgement, Judging
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.telemetry.metric_names import MAX_ANSWERING, REPLAY_ALARMS
from serve_app.telemetry.metrics import Metrics

_MINUTES = 60  # that recent replays go back


class RecentReplays:
    """The replays of each replica's answers in the last hour, by minutes, and how many of them failed.

    What is kept of a replica ends with its answers, or when `MAX_ANSWERING` others have answered since: what names the
    replicas of a watched server may be a header that never names one twice.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._minutes: dict[str, dict[int, tuple[int, int]]] = {}  # by replica, the one that answered last at the end

    def ended(self, replica: str, *, failed: bool) -> None:
        """Count one replay."""
        minutes = self._minutes.pop(replica, {})
        num, num_failed = minutes.get(self._now, (0, 0))
        minutes[self._now] = num + 1, num_failed + failed
        self._minutes[replica] = minutes
        if len(self._minutes) > MAX_ANSWERING:
            del self._minutes[next(iter(self._minutes))]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the replays and failures of each replica that has any."""
        oldest, added = self._now - _MINUTES, dict[str, tuple[int, int]]()
        for replica, minutes in list(self._minutes.items()):
            recent = {minute: counted for minute, counted in minutes.items() if minute > oldest}
            if not recent:
                del self._minutes[replica]
                continue
            self._minutes[replica] = recent
            added[replica] = sum(num for num, _ in recent.values()), sum(failed for _, failed in recent.values())
        return added

    @property
    def _now(self) -> int:
        return int(self._clock() // 60)


class RefereeCounts:
    """Counts what it is told.

    Args:
        metrics: where.
        strata: those of the answers; each is there with 0 from the start.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: Metrics, strata: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._recent = RecentReplays(clock)
        self._exported: set[str] = set()  # replicas
        for stratum in strata:
            self._count_stratum(stratum, ())
            for alarm in REPLAY_ALARMS:
                metrics.count("truespec_replay_alarms_total", 0, alarm=alarm, stratum=stratum)
        metrics.begin("truespec_verdicts_total", "truespec_replay_distributions_total")

    def counting(self, judge: Judging) -> Judging:
        """A judge whose judgements are counted: drift by stratum."""

        def counted(answer: Answer, replayed: Replayed) -> Judgement:
            judgement = judge(answer, replayed)
            for drift in drifts_of(judgement.compared):
                self._metrics.observe("truespec_replay_drift_nats", drift.nats)
            for stratum, tokens in by_stratum(judgement.compared).items():
                self._count_stratum(stratum, tokens)
            return judgement

        return counted

    def ended(self, answer: Answer, result: ReplayResult, checked: Checked) -> None:
        """A replay came to its end."""
        self._metrics.count("truespec_replays_total", result=result)
        self._recent.ended(answer.replica, failed=result == "failed")
        is_recorded = result in ("ok", "refused") and not answer.request.canary
        if is_recorded:
            self._metrics.count("truespec_replay_distributions_total", distribution=checked.distribution.value)
        if is_recorded or result in ("outdated", "failed"):
            self._metrics.count("truespec_verdicts_total", verdict=checked.verdict.value)

    def alarmed(self, alarm: Alarm, replica: str, case: Case | None = None) -> None:
        """Replays show that a replica is wrong."""
        self._metrics.count("truespec_replay_alarms_total", alarm=alarm.name, stratum=alarm.stratum)

    def tripped(self, num_suspect: int) -> None:
        """A trip made so many answers suspect."""
        self._metrics.count("truespec_verdicts_total", num_suspect, verdict=Verdict.SUSPECT.value)

    def set_gauges(self, checker: ReplayChecker) -> None:
        """Set the gauges of a checker's lag and of its recent replays; call this about once a second."""
        self._metrics.gauge("truespec_replay_lag_seconds", checker.lag_s)
        recent = self._recent.counts()
        for replica, (num, num_failed) in recent.items():
            self._metrics.gauge("truespec_recent_replays", num, answered_by=replica)
            self._metrics.gauge("truespec_recent_replay_failures", num_failed, answered_by=replica)
        for replica in self._exported - recent.keys():
            self._metrics.forget("truespec_recent_replays", answered_by=replica)
            self._metrics.forget("truespec_recent_replay_failures", answered_by=replica)
        self._exported = set(recent)

    def _count_stratum(self, stratum: str, tokens: Sequence[SeenToken]) -> None:
        drifts, count = drifts_of(tokens), self._metrics.count
        count("truespec_replay_tokens_total", len(drifts), stratum=stratum)
        count("truespec_replay_tme_excess_total", sum(drift.excess for drift in drifts), stratum=stratum)
        count("truespec_replay_gen_kl_total", sum(drift.gen_kl for drift in drifts), stratum=stratum)


def count_independent(metrics: Metrics) -> Callable[[IndependentResult], None]:
    """A counter of the results of independent checks; each is there with 0 from the start."""

    def ended(result: IndependentResult) -> None:
        metrics.count("truespec_independent_replays_total", result=result)
        if result == "disagrees":
            metrics.count("truespec_verdicts_total", verdict=Verdict.SUSPECT.value)

    metrics.begin("truespec_independent_replays_total")
    return ended


def count_controls(metrics: Metrics) -> Callable[[ControlChange, ControlResult], None]:
    """A counter of what became of controls; each is there with 0 from the start."""

    def ended(change: ControlChange, result: ControlResult) -> None:
        metrics.count("truespec_referee_controls_total", change=change, result=result)

    metrics.begin("truespec_referee_controls_total")
    return ended
