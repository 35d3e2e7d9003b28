"""The series of a long life: weights and replicas come and go by the thousand, and the page stays small."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.guard.referee_counts import RecentReplays, RefereeCounts
from serve_app.referee.replay_checker import ReplayResult
from serve_app.referee.strata import SERVED_STRATA, WATCHED_STRATA
from serve_app.referee.verdicts import Checked
from serve_app.streams.observed import WeightAges
from serve_app.telemetry.metric_names import MAX_ANSWERING
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink, RaySink
from speculative.stats import EngineUsage, StepStats
from tests.support.referees import Court, served

USAGE = EngineUsage(num_running=3, num_waiting=2, num_held=0, num_free_blocks=25, num_blocks=100, block_size=16)
Series = tuple[str, frozenset[tuple[str, str]]]


class RayAgent:
    """Has what Ray's agent has of our metrics: counters and histograms of all times, and the gauges of the last 20 s.

    Ray's own metrics are left to Ray: its threads outlive the tests that started them, and report theirs at any time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = pytest.importorskip("ray.util.metrics")
        self.now = 0.0
        self.set_at: dict[Series, float] = {}
        record_of_ray = library.Metric._record

        def record(metric: Any, value: float, tags: Any) -> None:
            if not metric._name.startswith("truespec_"):
                record_of_ray(metric, value, tags)
                return
            metric._validate_tags(tags)
            forgets = isinstance(metric, library.Gauge)
            self.set_at[metric._name, frozenset(tags.items())] = self.now if forgets else float("inf")

        monkeypatch.setattr(library.Metric, "_record", record)

    def exported(self) -> Counter[str]:
        """The number of series by metric."""
        return Counter(name for (name, _), at in self.set_at.items() if at > self.now - 20)


class Service:
    """A controller and a replica that answers HTTP, for the whole life; each second another replica, which dies."""

    def __init__(self, tmp_path: Path, ray: RayAgent) -> None:
        self.now, self.num, self.ray = 0.0, 0, ray
        self.page = PrometheusSink(source="controller", clock=lambda: self.now)
        controller = Metrics([RaySink(), self.page], model_name="m", pool="prefill")
        self.counts = RefereeCounts(controller, {*SERVED_STRATA, *WATCHED_STRATA}, lambda: self.now)
        self.checker, self.answer = Court(tmp_path).checker, served()
        self.buffer = BufferSink("front")
        self.front = Metrics([RaySink(), self.buffer], model_name="m", pool="decode")
        self.front.record_steps(StepStats(), USAGE)
        self.ages = WeightAges()
        self.build = {"version": "1", "fingerprint": "at first", "drafter": "ngram"}

    def live(self, seconds: int) -> None:
        """In each second new weights, and answers by a new replica."""
        for _ in range(seconds):
            self.num += 1
            self.now = self.ray.now = self.now + 1
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
        metrics = Metrics([buffer], model_name="m", pool="decode")
        metrics.count("truespec_drafts_total", 5)
        metrics.gauge("truespec_requests_running", 2)
        self.page.apply(buffer.drain())
        for result in get_args(ReplayResult):
            self.counts.ended(dataclasses.replace(self.answer, replica=name), result, Checked())

    def exported(self) -> Counter[str]:
        """The number of series by metric, on the page."""
        families = text_string_to_metric_families(self.page.exposition()[0].decode())
        return Counter(sample.name for family in families for sample in family.samples)


async def test_a_long_life_has_no_more_series_than_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = RayAgent(monkeypatch)
    service = Service(tmp_path, ray)
    service.live(110)
    page, agent = service.exported(), ray.exported()
    service.live(300)
    assert service.exported() == page
    assert ray.exported() == agent
    assert page["truespec_recent_replays"] == MAX_ANSWERING
    assert page["truespec_draft_tokens_since_handoff_total"] == agent["truespec_draft_tokens_since_handoff_total"] == 3
    assert page["truespec_build_info"] == 1
    assert page.total() < 1500
    assert agent.total() < 1500


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
