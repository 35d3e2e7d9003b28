"""The referee replays finished requests, without speculation and on fresh KV, and compares.

It compares logprobs (drift) and, since a replay has the whole distribution at each position, it tests whether the
tokens follow that distribution. Each replica has its own detectors, one per stratum; their findings go to the replica's
breaker with the answer to its next report."""

import asyncio
import dataclasses
import hashlib
import logging
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from serve_app.backends.base import Computing, Replayed
from serve_app.integrity.breaker import Mode, Trip
from serve_app.integrity.detectors import ReplicaWatch, Rounding, SeenToken, distribution_alarm
from serve_app.integrity.drift import DriftSums, NoiseFloor, TokenDrift, Tolerance, request_drifted
from serve_app.integrity.dumps import DumpFolder
from serve_app.integrity.heartbeat import Finding, Orders, ReplicaStatus, Report
from serve_app.integrity.replays import KNOWN_AFTERWARDS, Distribution, ReplayJob, Verdict
from serve_app.integrity.verdicts import Checked, VerdictBook
from serve_app.telemetry.metric_names import DRIFT_THRESHOLDS_NATS, REPLAY_ALARMS, STRATA
from serve_app.telemetry.metrics import Metrics
from speculative.errors import InvalidRequest, SequenceTooLong
from speculative.request import Request
from speculative.stats import CheckState

_logger = logging.getLogger("truespec.referee")

_SEEDS_KEPT = 65_536  # of the requests replayed last
_KEPT_CASES = 8  # of each replica, for a dump
_KEPT_LATEST = 12
_FORGOTTEN_AFTER_S = 60.0  # a replica that has not reported for so long is gone

Replay = Callable[[Request], Awaitable[Replayed]]
"""Computes a teacher-forced request on a replica."""

_Queued = tuple[ReplayJob, asyncio.Future[Checked], Context]
"""A job, the future it settles, and its context, which identifies the client's request and trace."""


@dataclass(frozen=True, slots=True)
class RefereeSettings:
    """The referee's tolerances and limits."""

    max_queue: int = 64
    max_running: int = 2  # replays at once
    max_tme: float = 1.05  # above the noise floor
    rounding: Rounding = dataclasses.field(default_factory=Rounding)
    num_draft_tokens: int = 0  # maximum drafted in a round
    keep_verdicts: int = 10_000


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is in the replayed share: a function of its id alone, so that every replica agrees."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def _is_impossible(job: ReplayJob, error: Exception) -> bool:
    """Whether a replay was refused because of the answer: it is too long, or its ids are no tokens of the model.

    An engine with a shorter limit than the one that answered may refuse a correct answer; and a replica that is busy,
    gone, or cannot do what the request asks for has not checked the answer.
    """
    if not isinstance(error, InvalidRequest) or error.field != "prompt":
        return False
    return not isinstance(error, SequenceTooLong) or job.num_tokens > job.max_model_len


@dataclass(frozen=True, slots=True)
class _Case:
    """One complete replay; `replayed` is None if the answer was refused."""

    job: ReplayJob
    replayed: Replayed | None
    checked: Checked

    def to_dump(self) -> dict[str, Any]:
        """Everything about it."""
        return {
            "served": dataclasses.asdict(self.job),
            "replayed": None if self.replayed is None else dataclasses.asdict(self.replayed),
            "checked": dataclasses.asdict(self.checked),
        }


@dataclass(slots=True)
class _Replica:
    """What the referee knows of a replica."""

    watch: ReplicaWatch
    status: ReplicaStatus | None = None
    heard_at: float = 0.0
    findings: deque[Finding] = dataclasses.field(default_factory=lambda: deque(maxlen=16))
    cases: deque[_Case] = dataclasses.field(default_factory=lambda: deque(maxlen=_KEPT_CASES))
    ordered: Mode | None = None
    checks: tuple[CheckState, ...] = ()  # of its engine
    computing: Computing = dataclasses.field(default_factory=Computing)

    def trusts(self, began_at: float) -> bool:
        """Whether a request of that time is evidence about the replica as it is now."""
        return self.status is None or began_at >= self.status.since


class Referee:
    """Replays jobs from a bounded queue, a few at a time; a job that finds it full is skipped and counted.

    Args:
        replay: recomputes a request.
        metrics: drift, alarms, verdicts.
        settings: tolerances and limits.
        dumps: where a post-mortem is written.
        clock: unix seconds.
    """

    def __init__(
        self,
        replay: Replay,
        metrics: Metrics,
        settings: RefereeSettings,
        dumps: DumpFolder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._replay = replay
        self._metrics = metrics
        self._settings = settings
        self._tolerance = Tolerance(settings.max_tme)
        self._dumps = dumps or DumpFolder(None, 0, 0)
        self._clock = clock
        self._floor = NoiseFloor()
        self._seeds: OrderedDict[int, None] = OrderedDict()
        self._book = VerdictBook(settings.keep_verdicts)
        self._replicas: dict[str, _Replica] = {}
        self._mode: Mode | None = None  # ordered for all replicas, including future ones
        self._urgent: deque[_Queued] = deque()
        self._queue: deque[_Queued] = deque()
        self._latest: deque[dict[str, Any]] = deque(maxlen=_KEPT_LATEST)  # results of the latest replays
        self._wake = asyncio.Semaphore(0)  # one permit per job in either queue
        for result in ("ok", "failed", "skipped", "outdated", "refused"):
            metrics.count("truespec_replays_total", 0, result=result)
        for verdict in Verdict:
            metrics.count("truespec_verdicts_total", 0, verdict=verdict.value)
        for distribution in Distribution:
            metrics.count("truespec_replay_distributions_total", 0, distribution=distribution.value)
        for stratum in STRATA:
            self._record_stratum(stratum, ())
            for alarm in REPLAY_ALARMS:
                metrics.count("truespec_replay_alarms_total", 0, alarm=alarm, stratum=stratum)
        metrics.count("truespec_dumps_total", 0)

    # -- replays ------------------------------------------------------------------------------------------------

    def submit(self, job: ReplayJob) -> None:
        """Queue a job for replay when there is time; returns at once."""
        self._enqueue(self._queue, job)

    async def check(self, job: ReplayJob) -> Checked:
        """Replay a job before those that nobody waits for, and return the result."""
        settled = self._enqueue(self._urgent, job)
        return await settled if settled is not None else Checked(reason="skipped: too many wait to be replayed")

    def _enqueue(self, queue: deque[_Queued], job: ReplayJob) -> asyncio.Future[Checked] | None:
        if len(queue) >= self._settings.max_queue:
            self._metrics.count("truespec_replays_total", result="skipped")
            return None
        settled: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        queue.append((job, settled, copy_context()))
        self._wake.release()
        return settled

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._settings.max_running):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._wake.acquire()
            job, settled, context = (self._urgent or self._queue).popleft()
            checked = await asyncio.get_running_loop().create_task(self._check(job), context=context)
            if not settled.done():
                settled.set_result(checked)

    async def _check(self, job: ReplayJob) -> Checked:
        try:
            replayed = await self._replayed(job)
            if set(job.weight_versions) != {replayed.weight_version}:
                return self._outdated(job, replayed)
            served = (*job.prompt_logprobs, *job.logprobs)
            drifts = [TokenDrift.between(*pair) for pair in zip(served, replayed.logprobs, strict=True)]
            seen = self._seen(job, drifts, replayed)
            self._record(seen)
            checked = self._settle(job, seen, replayed)
            _logger.debug("%s is %s: %s", job.request.request_id, checked.verdict.value, checked.reason)
            return checked
        except Exception as error:  # a replica died, or was too busy: the check is lost, the referee is not
            if _is_impossible(job, error):
                return self._refused(job, error)
            self._metrics.count("truespec_replays_total", result="failed")
            self._metrics.count("truespec_verdicts_total", verdict=Verdict.UNVERIFIED.value)
            _logger.warning("replay of %s failed: %s", job.request.request_id, error)
            return Checked(reason="the replay failed")

    async def _replayed(self, job: ReplayJob) -> Replayed:
        """The replay of what was served, including the prompt if its logprobs were returned."""
        prompt = job.request.prompt_token_ids
        adapter, seed = job.request.adapter, job.request.seed
        params = dataclasses.replace(job.request.params, prompt_logprobs=None, logprob_token_ids=())
        name = f"replay-{uuid.uuid4().hex}"
        if job.num_tokens > job.max_model_len:
            limit = f"longer than the longest sequence of {job.replica}, {job.max_model_len} tokens"
            raise SequenceTooLong("prompt", f"Prompt and answer have {job.num_tokens} tokens, {limit}.")
        forced = Request(
            name, (*prompt, *job.token_ids), params, seed, score_from=len(prompt), adapter=adapter, replay=True
        )
        replayed = await self._replay(forced)
        if not job.prompt_logprobs:
            return replayed
        reported = await self._replay(Request(f"{name}-prompt", prompt, score_from=1, adapter=adapter, replay=True))
        version = replayed.weight_version if reported.weight_version == replayed.weight_version else ""
        return dataclasses.replace(replayed, logprobs=(*reported.logprobs, *replayed.logprobs), weight_version=version)

    def _outdated(self, job: ReplayJob, replayed: Replayed) -> Checked:
        """A replay by other weights proves nothing about the answer."""
        self._metrics.count("truespec_replays_total", result="outdated")
        self._metrics.count("truespec_verdicts_total", verdict=Verdict.UNVERIFIED.value)
        made, now = ", ".join(job.weight_versions), replayed.weight_version
        _logger.info("%s was made with weights %s, and was replayed with %s", job.request.request_id, made, now)
        return Checked(reason="the weights that made it are no longer served")

    def _refused(self, job: ReplayJob, error: Exception) -> Checked:
        """No engine takes the answer: whoever made it is wrong."""
        checked = Checked(verdict=Verdict.SUSPECT, reason=f"impossible: {error}")
        self._metrics.count("truespec_replays_total", result="refused")
        if job.request.canary:
            return checked
        case = _Case(job, None, checked)
        for name in sorted(set(job.made_by)):
            replica = self._known(name)
            replica.cases.append(case)
            if replica.trusts(job.began_at):
                self._alarm(name, replica, ("impossible", "all"), job.began_at)
        return self._report(job, case)

    def _seen(self, job: ReplayJob, drifts: Sequence[TokenDrift], replayed: Replayed) -> list[SeenToken]:
        num_prompt = len(job.prompt_logprobs)
        rows = [*[None] * num_prompt, *(replayed.replayed or [None] * len(job.token_ids))]
        made_by = [*[job.prompt_scored_by] * num_prompt, *job.made_by]
        strata = job.strata(self._settings.num_draft_tokens)
        return [SeenToken(*parts) for parts in zip(strata, drifts, rows, made_by, strict=True)]

    def _record(self, seen: Sequence[SeenToken]) -> None:
        by_stratum: dict[str, list[SeenToken]] = {}
        for token in seen:
            self._metrics.observe("truespec_replay_drift_nats", token.drift.nats)
            for stratum in token.strata:
                by_stratum.setdefault(stratum, []).append(token)
        for stratum, tokens in by_stratum.items():
            self._record_stratum(stratum, tokens)
        self._metrics.count("truespec_replays_total", result="ok")

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

    # -- judgement ----------------------------------------------------------------------------------------------

    def _settle(self, job: ReplayJob, seen: Sequence[SeenToken], replayed: Replayed) -> Checked:
        tolerance = self._tolerance.excess(self._floor)
        output = [token for token in seen if "all" in token.strata]
        drifts = [token.drift for token in seen]
        alarm = distribution_alarm(output, job.request.params.greedy, self._settings.rounding)
        drifted = request_drifted(drifts, tolerance)
        distribution = self._distribution(job.request, output)
        checked = Checked(
            verdict=Verdict.SUSPECT if drifted or alarm else Verdict.VERIFIED,
            reason="drift" if drifted else f"distribution: {alarm}" if alarm else "replayed",
            num_tokens=len(seen),
            tme=DriftSums(drifts).tme,
            max_drift_nats=max((drift.nats for drift in drifts), default=0.0),
            replayed_by=replayed.replica,
            checks=_checks(output, distribution, greedy=job.request.params.greedy),
            distribution=distribution,
        )
        if job.num_drafted == 0:
            self._floor.add([token.drift for token in output])
        if job.request.canary:  # its own replica judges by it; clients never saw it
            return checked
        case = _Case(job, replayed, checked)
        self._watch(case, seen, tolerance)
        return self._report(job, case)

    def _report(self, job: ReplayJob, case: _Case) -> Checked:
        """Record the verdict; returns what to report of the answer."""
        checked = case.checked
        self._metrics.count("truespec_replay_distributions_total", distribution=checked.distribution.value)
        reported = self._book.record(job, checked, self._clock())
        self._latest.appendleft({"at": self._clock(), "replica": job.replica, **reported.to_wire()})
        self._metrics.count("truespec_verdicts_total", verdict=reported.verdict.value)
        if checked.verdict is Verdict.SUSPECT:
            _logger.warning("%s of %s is suspect: %s", job.request.request_id, job.replica, checked.reason)
            self._dump(checked.reason, case.to_dump)
        return reported

    def _watch(self, case: _Case, seen: Sequence[SeenToken], tolerance: float) -> None:
        """Show the tokens to the detectors of the replicas that made them.

        What a prefill replica made is its own. What a decode replica makes from a handoff may be wrong because of
        either, if speculation cannot be the cause: nothing at all was drafted there.
        """
        job = case.job
        if case.checked.distribution is Distribution.REPEATED_SEED:
            seen = [dataclasses.replace(token, row=None) for token in seen]
        makers: dict[str, list[SeenToken]] = {}
        for token, since in zip(seen, [*[None] * len(job.prompt_logprobs), *job.rounds_since_handoff], strict=True):
            makers.setdefault(token.made_by, []).append(token)
            if since is not None and self._decoded_plainly(token.made_by, job.began_at):
                makers.setdefault(job.prefilled_by, []).append(token)
        for name, tokens in makers.items():
            replica = self._known(name)
            replica.cases.append(case)
            if not replica.trusts(job.began_at):
                continue
            greedy = job.request.params.greedy
            for found in replica.watch.see(tokens, greedy=greedy, drift_tolerance=tolerance):
                self._alarm(name, replica, found, job.began_at)

    def _alarm(self, name: str, replica: _Replica, found: tuple[str, str], began_at: float) -> None:
        """Count an alarm in a stratum, and notify the replica with the answer to its next report."""
        alarm, stratum = found
        self._metrics.count("truespec_replay_alarms_total", alarm=alarm, stratum=stratum)
        _logger.warning("replays show that %s is wrong: %s in stratum %s", name, alarm, stratum)
        replica.findings.append(Finding(name, alarm, stratum, began_at))

    def _decoded_plainly(self, name: str, began_at: float) -> bool:
        """Whether a replica drafted nothing at all for what began then (unix seconds)."""
        status = self._known(name).status
        return status is not None and status.decodes_plainly and began_at > status.since

    def _distribution(self, request: Request, output: Sequence[SeenToken]) -> Distribution:
        """What its replayed tokens can show about their distribution."""
        if all(token.row is None for token in output):
            return Distribution.UNTESTED
        if request.params.greedy:
            return Distribution.GREEDY
        if request.canary:  # whose seeds are its replica's own
            return Distribution.TESTED
        return Distribution.TESTED if self._draws_again(request.seed) else Distribution.REPEATED_SEED

    def _draws_again(self, seed: int) -> bool:
        """Whether these random numbers are new: a repeated seed repeats its draws."""
        again = seed not in self._seeds
        self._seeds[seed] = None
        if len(self._seeds) > _SEEDS_KEPT:
            self._seeds.popitem(last=False)
        return again

    def _known(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._replicas[name] = _Replica(
                ReplicaWatch(self._settings.rounding), heard_at=self._clock(), ordered=self._mode
            )
        return self._replicas[name]

    # -- reports and queries --------------------------------------------------------------------------------------

    def hear(self, report: Report) -> Orders:
        """Process a replica's report, and answer it."""
        now, name = self._clock(), report.status.replica
        replica = self._known(name)
        if replica.status is not None and replica.status.since != report.status.since:
            replica.watch = ReplicaWatch(self._settings.rounding)
            replica.findings.clear()
        replica.status, replica.heard_at, replica.checks = report.status, now, report.checks
        replica.computing = report.computing
        for finished in report.finished:
            self._book.note(name, finished)
        for trip in report.trips:
            self._on_trip(name, replica, trip)
        self._replicas = {key: one for key, one in self._replicas.items() if one.heard_at > now - _FORGOTTEN_AFTER_S}
        self._metrics.gauge("truespec_replay_queue_length", len(self._urgent) + len(self._queue))
        findings, mode = tuple(replica.findings), replica.ordered
        replica.findings.clear()
        replica.ordered = None
        return Orders(findings, mode)

    def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """What is known of a reply; None if nothing is."""
        return self._book.reply(reply_id)

    def order(self, mode: Mode, name: str | None) -> list[dict[str, object]] | None:
        """Set who decides about speculation, for one replica, or for all including future ones.

        Returns every replica's status; None if there is no such replica.
        """
        if name is not None and name not in self._replicas:
            return None
        if name is None:
            self._mode = mode
        for key, replica in self._replicas.items():
            if name in (None, key):
                replica.ordered = mode
        return self.statuses()

    def statuses(self) -> list[dict[str, object]]:
        """Every replica's status."""
        return [one.status.to_wire() for _, one in sorted(self._replicas.items()) if one.status is not None]

    def overview(self) -> dict[str, Any]:
        """Replicas with their kernels and their engines' self-checks, and the latest replays' results, newest first."""
        return {
            "replicas": [
                one.status.to_wire()
                | {"checks": [dataclasses.asdict(check) for check in one.checks]}
                | {"kernels": one.computing.kernels, "kernels_off": one.computing.kernels_off}
                for _, one in sorted(self._replicas.items())
                if one.status is not None
            ],
            "latest": list(self._latest),
        }

    def _on_trip(self, name: str, replica: _Replica, trip: Trip) -> None:
        num_suspect = self._book.trip(name, trip)
        self._metrics.count("truespec_verdicts_total", num_suspect, verdict=Verdict.SUSPECT.value)
        _logger.error("%s tripped (%s); %d of its answers are suspect", name, trip.reason, num_suspect)
        status, cases = replica.status, tuple(replica.cases)

        def content() -> dict[str, Any]:
            return {
                "trip": dataclasses.asdict(trip),
                "replica": None if status is None else status.to_wire(),
                "replays": [case.to_dump() for case in cases],
            }

        self._dump(f"trip {trip.reason}", content)

    def _dump(self, reason: str, content: Callable[[], dict[str, Any]]) -> None:
        if self._dumps.enabled:
            asyncio.get_running_loop().run_in_executor(None, self._write, reason, content)

    def _write(self, reason: str, content: Callable[[], dict[str, Any]]) -> None:
        if self._dumps.write(reason, content()) is not None:
            self._metrics.count("truespec_dumps_total")


def _checks(output: Sequence[SeenToken], distribution: Distribution, *, greedy: bool) -> tuple[str, ...]:
    """The checks that the replayed tokens of an answer went through, as `Checked.checks` names them."""
    checks = ["logprobs"]
    if distribution is not Distribution.UNTESTED:
        checks.append("likeliest" if greedy else "support")
    if distribution is Distribution.TESTED:
        checks.append("distribution")
    return tuple(checks)
