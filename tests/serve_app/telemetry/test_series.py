"""The series of a long life: weights and replicas come and go by the thousand, and the page stays small."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from serve_app.guard.referee_counts import RecentReplays, RefereeCounts
from serve_app.referee.book.replay_checker import ReplayResult
from serve_app.referee.judge.strata import SERVED_STRATA, WATCHED_STRATA
from serve_app.referee.judge.verdicts import Checked
from serve_app.streams.observed import WeightAges
from serve_app.telemetry.metric_names import MAX_ANSWERING
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from speculative.stats import EngineUsage, StepStats
from tests.support.referees import Court, served

USAGE = EngineUsage(num_running=3, num_waiting=2, num_held=0, num_free_blocks=25, num_blocks=100, block_size=16)


class Service:
    """A controller and a replica that answers HTTP, for the whole life; each second another replica, which dies."""

    def __init__(self, tmp_path: Path) -> None:
        self.now, self.num = 0.0, 0
        self.page = PrometheusSink(source="controller", clock=lambda: self.now)
        controller = Metrics(self.page, model_name="m", pool="prefill")
        self.counts = RefereeCounts(controller, {*SERVED_STRATA, *WATCHED_STRATA}, lambda: self.now)
        self.checker, self.answer = Court(tmp_path).checker, served()
        self.buffer = BufferSink("front")
        self.front = Metrics(self.buffer, model_name="m", pool="decode")
        self.front.record_steps(StepStats(), USAGE)
        self.ages = WeightAges()
        self.build = {"version": "1", "fingerprint": "at first", "drafter": "ngram"}

    def live(self, seconds: int) -> None:
        """In each second new weights, and answers by a new replica."""
        for _ in range(seconds):
            self.num += 1
            self.now += 1
            self._front()
            self._replica(f"replica-{self.num}")
            if self.num % 10 == 0:
                self.counts.set_gauges(self.checker)

    def _front(self) -> None:
        self.front.forget("truespec_build_info", **self.build)
        self.build["fingerprint"] = f"weights-{self.num}"
        self.front.gauge("truespec_build_info", 1, **self.build)
        for version in range(max(0, self.num - 4), self.num):
            labels = {"since_handoff": "0", "weights": self.ages.age(f"v{version}")}
            self.front.count("truespec_draft_tokens_since_handoff_total", 3, **labels)
        self.page.apply(self.buffer.drain())

    def _replica(self, name: str) -> None:
        buffer = BufferSink(name)
        metrics = Metrics(buffer, model_name="m", pool="decode")
        metrics.count("truespec_drafts_total", 5)
        metrics.gauge("truespec_requests_running", 2)
        self.page.apply(buffer.drain())
        for result in get_args(ReplayResult):
            self.counts.ended(dataclasses.replace(self.answer, replica=name), result, Checked())

    def exported(self) -> Counter[str]:
        """The number of series by metric, on the page."""
        families = text_string_to_metric_families(self.page.exposition()[0].decode())
        return Counter(sample.name for family in families for sample in family.samples)


async def test_a_long_life_has_no_more_series_than_half_of_it(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.live(110)
    page = service.exported()
    service.live(300)
    assert service.exported() == page
    assert page["truespec_recent_replays"] == MAX_ANSWERING
    assert page["truespec_draft_tokens_since_handoff_total"] == 3
    assert page["truespec_build_info"] == 1
    assert page.total() < 1500


def test_recent_replays_are_those_of_an_hour() -> None:
    now = [0.0]
    recent = RecentReplays(lambda: now[0])
    for _ in range(3):
        recent.ended("early", failed=True)
    now[0] = 1800.0
    recent.ended("early", failed=False)
    recent.ended("late", failed=False)
    assert recent.counts() == {"early": (4, 3), "late": (1, 0)}
    now[0] = 3700.0
    assert recent.counts() == {"early": (1, 0), "late": (1, 0)}
    now[0] = 5500.0
    assert recent.counts() == {}
