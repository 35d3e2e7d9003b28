"""Test helper: an app that was at work for a while, made up of real counts in the controller's own books."""

import copy
import copyreg
import functools
import math
import threading
from typing import Any
from unittest import mock

from serve_app.backends.base import Computing
from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.heartbeat import Placed, ReplicaStatus, Report
from serve_app.guard.referee_counts import RefereeCounts
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.http.page.history import EVERY_S
from serve_app.http.page.status import StatusBook
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.strata import SERVED_STRATA, STRATA
from serve_app.referee.judge.verdicts import Trip
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from speculative.stats import CHECKS, CheckState, CheckSums, EngineUsage, StepStats
from tests.support.clock import Clock
from tests.support.referees import TOLERANCE

ABOUT = {
    "model": "fake",
    "topology": "disaggregated",
    "drafter": "eagle3",
    "max_num_seqs": 64,
    "shares": {"replay.sample_rate": 0.1, "self_check_sample_rate": 0.25},
    "max_tme": 1.05,
}
POOLS = {"app#DecodeServer#a1b2": "decode", "app#DecodeServer#c3d4": "decode", "app#PrefillServer#e5f6": "prefill"}
STARTED_AT = 1_790_000_000.0


class MadeUpApp:
    """Replicas that report to a controller's books as time passes."""

    def __init__(self) -> None:
        self.clock = Clock(STARTED_AT)
        self.sink = PrometheusSink(clock=self.clock)
        self._own = Metrics(self.sink, model_name="fake", pool="prefill")
        counts = RefereeCounts(self._own, SERVED_STRATA)
        self.replicas = ReplicaRegistry(ReplicaBook(TOLERANCE, clock=self.clock), counts, clock=self.clock)
        self.book = StatusBook(ABOUT | {"verifies": False}, self.sink, self.clock)
        self.buffers = {name: BufferSink(name) for name in POOLS}
        self.states = dict.fromkeys(POOLS, BreakerState.CLOSED)
        self.since = dict.fromkeys(POOLS, STARTED_AT)
        self.reasons = dict.fromkeys(POOLS, "")

    def metrics(self, replica: str) -> Metrics:
        return Metrics(self.buffers[replica], model_name="fake", pool=POOLS[replica])

    def serve(self, replica: str, num: int, *, first_token_s: float = 0.2, per_token_s: float = 0.012) -> None:
        """Count some answers of 40 tokens, 30 % of whose drafts are accepted."""
        metrics = self.metrics(replica)
        stats = StepStats(num_emitted=40 * num, expected_accepted=15.8 * num, achievable_accepted=17.0 * num)
        for accepted in (0, 0, 1, 3):
            stats.count_round(3, accepted, times=4 * num)
        stats.speculated_s, stats.speculated_plain_s = 0.6 * num, 0.8 * num
        stats.prefix_cache_queries, stats.prefix_cache_hits = 100 * num, 25 * num
        stats.checks = {check: CheckSums(12 * num, 3.0, 3.0, 6.0) for check in CHECKS}
        metrics.record_steps(stats, EngineUsage(3, 1, 0, 60, 100, 16))
        metrics.count("truespec_requests_total", num, outcome="stop")
        for index in range(num):
            metrics.observe("truespec_time_to_first_token_seconds", first_token_s * (1 + index % 3))
            for _ in range(5):
                metrics.observe("truespec_inter_token_latency_seconds", per_token_s * (1 + index % 2))
        for position, rates in enumerate(((0.49, 0.65), (0.22, 0.38), (0.09, 0.21))):
            for sampling, rate in zip(("sampled", "greedy"), rates, strict=True):
                metrics.gauge("truespec_held_out_acceptance_ratio", rate, sampling=sampling, position=str(position))

    def report(self, replica: str, *trips: Trip, log_e: float = 0.0) -> None:
        """A replica's report, with evidence of its self-checks around this many nats."""
        checks = tuple(
            CheckState(check, 900, 0.0, 0.4, log_e + index / 2 - 6.0, 14.3, 0) for index, check in enumerate(CHECKS)
        )
        self.reasons[replica] = trips[-1].reason if trips else self.reasons[replica]
        status = ReplicaStatus(
            replica, POOLS[replica], self.states[replica], Mode.AUTO, self.since[replica], self.reasons[replica]
        )
        batch = self.buffers[replica].drain()
        self.sink.apply(batch)
        computing = Computing("cpu", device="AMD EPYC 9654 96-Core Processor")
        placed = Placed("0.1.0", "node-a", "3f2a", STARTED_AT)
        self.replicas.on_heartbeat(
            Report(status, batch, trips=trips, checks=checks, computing=computing, placed=placed)
        )

    def pass_time(self, seconds: float) -> None:
        """Time with traffic: every tenth second all replicas report."""
        for _ in range(int(seconds / EVERY_S)):
            self.clock.now += EVERY_S
            wave = math.sin(self.clock.now / 300)
            for replica in POOLS:
                self.serve(replica, round(14 + 6 * wave), first_token_s=0.2 + 0.1 * wave)
                closed = self.states[replica] is BreakerState.CLOSED
                self.metrics(replica).gauge("truespec_speculation_enabled", int(closed))
                self.report(replica)
            self._replay(20)
            self.book.note()

    def _replay(self, num: int) -> None:
        self._own.count("truespec_verdicts_total", num, verdict="verified")
        self._own.count("truespec_replays_total", num, result="ok")
        for rank, stratum in enumerate(STRATA, start=1):
            self._own.count("truespec_replay_tokens_total", 40 * num / rank, stratum=stratum)
            self._own.count("truespec_replay_tme_excess_total", 4e-5 * num, stratum=stratum)

    def refuse(self, num: int, reason: str = "load") -> None:
        self.metrics("app#DecodeServer#a1b2").count("truespec_refusals_total", num, reason=reason)

    def fail(self, num: int) -> None:
        self.metrics("app#DecodeServer#a1b2").count("truespec_requests_total", num, outcome="error")

    def fail_prefills(self, num: int, reason: str = "timeout") -> None:
        """Prompts that a prefill replica did not compute, so that the decode replica had to."""
        metrics = self.metrics("app#DecodeServer#a1b2")
        metrics.count("truespec_prefill_failures_total", 2 * num, reason=reason)
        metrics.count("truespec_handoffs_total", num, result="failed")
        metrics.count("truespec_handoffs_total", 9 * num, result="ok")

    def trip(self, replica: str, check: str = "a") -> None:
        """A self-check raises its alarm on a replica, whose breaker opens."""
        self.metrics(replica).count("truespec_selfcheck_alarms_total", 1, check=check)
        self.states[replica], self.since[replica] = BreakerState.OPEN, self.clock.now
        self.metrics(replica).gauge("truespec_speculation_enabled", 0)
        self.report(replica, Trip("selfcheck", self.clock.now, self.clock.now - 90), log_e=20.0)

    def status(self) -> dict[str, Any]:
        replayed = {"at": self.clock.now - 20, "replica": "app#DecodeServer#a1b2"}
        replayed |= {"replayed_by": "app#PrefillServer#e5f6", "verdict": "verified", "reason": "replayed"}
        replayed |= {"num_tokens": 80, "tme": 1.0001, "max_drift_nats": 2e-4, "distribution": "tested"}
        replayed |= {"checked": ["logprobs", "support", "distribution", "draws"]}
        return self.book.render(self.replicas.overview() | {"latest": [replayed] * 4})


def app_at_work(seconds: float) -> MadeUpApp:
    """An app after so much time with traffic, which is made once and copied, its locks as new ones."""
    with mock.patch.dict(copyreg.dispatch_table, {type(threading.Lock()): lambda _: (threading.Lock, ())}):
        return copy.deepcopy(_app_to_copy(seconds))


@functools.cache
def _app_to_copy(seconds: float) -> MadeUpApp:
    app = MadeUpApp()
    app.pass_time(seconds)
    return app
