"""An hour of figures from sums of counts: rates, latencies, what is kept, and replicas that come and go."""

import json

import pytest

from serve_app.http.page.history import EVERY_S, History, quantile
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from tests.support.clock import Clock

BOUNDS = (0.1, 0.5, 1.0)


class Watched:
    def __init__(self) -> None:
        self.clock = Clock()
        self.sink = PrometheusSink(clock=self.clock)
        self.history = History(self.sink, self.clock)
        self.restart("r1")

    def restart(self, name: str) -> None:
        self.buffer = BufferSink(name)
        self.metrics = Metrics(self.buffer, model_name="m", pool="decode")

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self.metrics.count(name, value, **labels)

    def pass_time(self, seconds: float = EVERY_S) -> None:
        """The replica reports, and the controller notes, each second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.sink.apply(self.buffer.drain())
            self.history.note()

    def figure(self, name: str) -> list[float | None]:
        points: dict[str, list[float | None]] = self.history.columns()["points"]
        return points[name]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_point_covers_the_minute_before_it(watched: Watched) -> None:
    watched.count("truespec_requests_total", 120, outcome="stop")
    watched.pass_time(130)
    assert watched.figure("at") == [1000.0 + EVERY_S * step for step in range(1, 14)]
    rates = watched.figure("requests_per_s")
    assert rates[:6] == [12.0, 6.0, 4.0, 3.0, 2.4, 2.0]  # less than a minute is known
    assert rates[6:] == [0.0] * 7
    for _ in range(100):
        watched.history.note()
    assert len(watched.figure("at")) == 13, "they are ten seconds apart however often it is asked"


def test_what_happened_since_the_last_point_is_in_the_newest_figures(watched: Watched) -> None:
    watched.pass_time(65)
    watched.count("truespec_emitted_tokens_total", 550)
    watched.sink.apply(watched.buffer.drain())
    assert watched.figure("tokens_per_s")[-1] == 0.0
    assert watched.history.newest()["now"]["tokens_per_s"] == 10.0  # in the 55 s since the first point
    assert watched.history.newest()["totals"]["emitted"] == 550


def test_a_replica_that_restarts_makes_no_rate_negative_or_huge(watched: Watched) -> None:
    for life in range(4):
        for _ in range(9):
            watched.count("truespec_requests_total", 20, outcome="stop")
            watched.metrics.observe("truespec_time_to_first_token_seconds", 0.2)
            watched.pass_time()
        watched.restart("r1" if life % 2 else f"r{life + 2}")
    assert set(watched.figure("requests_per_s")) == {2.0}
    assert set(watched.figure("first_token_p50_s")) == {0.175}


def test_an_hour_is_kept_and_no_more(watched: Watched) -> None:
    for step in range(500):
        watched.count("truespec_emitted_tokens_total", step)
        watched.clock.now += EVERY_S
        watched.sink.apply(watched.buffer.drain())
        watched.history.note()
    at = watched.figure("at")
    assert len(at) == 360
    assert (at[0], at[-1]) == (1000.0 + 141 * EVERY_S, 1000.0 + 500 * EVERY_S)
    assert len(json.dumps(watched.history.columns())) < 60_000


def test_a_clock_that_is_set_back_stops_nothing(watched: Watched) -> None:
    watched.pass_time(60)
    watched.clock.now -= 3600
    watched.count("truespec_requests_total", 5, outcome="stop")
    watched.pass_time(30)
    rates = watched.figure("requests_per_s")
    assert len(rates) > 7
    assert all(rate is not None and 0 <= rate <= 5 for rate in rates)


def test_refusals_with_429_and_failures_are_counted_by_the_minute(watched: Watched) -> None:
    for reason in ("capacity", "key_concurrency", "deadline", "unauthenticated", "forbidden"):
        watched.count("truespec_refusals_total", 2, reason=reason)
    watched.count("truespec_requests_total", 6, outcome="rejected")
    watched.count("truespec_requests_total", 3, outcome="error")
    watched.count("truespec_requests_total", 7, outcome="length")
    watched.pass_time(70)
    assert watched.figure("refused") == [6.0] * 6 + [0.0]  # 401 and 403 are no overload
    assert watched.figure("failed") == [3.0] * 6 + [0.0]
    assert watched.figure("requests_per_s")[0] == 1.0  # an error is an end, a refusal no beginning


def test_latencies_are_those_of_the_minute_and_unknown_without_tokens(watched: Watched) -> None:
    assert watched.history.newest()["now"]["per_token_p95_s"] is None
    for value in (0.02, 0.02, 0.02, 0.02):
        watched.metrics.observe("truespec_inter_token_latency_seconds", value)
    watched.pass_time()
    watched.pass_time(50)
    for _ in range(4):
        watched.metrics.observe("truespec_inter_token_latency_seconds", 0.7)
    watched.pass_time(70)
    median = watched.figure("per_token_p50_s")
    assert median[:6] == [pytest.approx(0.0175)] * 6
    assert median[6:12] == [pytest.approx(0.75)] * 6  # the fast ones are no longer in it
    assert median[12:] == [None]


def test_acceptance_is_that_of_the_minute_and_positions_those_of_the_hour(watched: Watched) -> None:
    for name, value in (("draft_tokens", 90), ("accepted_tokens", 30), ("expected_accepted_tokens", 31.5)):
        watched.count(f"truespec_{name}_total", value)
    watched.count("truespec_draft_tokens_per_position_total", 60, position="0")
    watched.count("truespec_accepted_tokens_per_position_total", 30, position="0")
    watched.count("truespec_draft_tokens_per_position_total", 30, position="1")
    watched.pass_time(70)
    assert watched.figure("acceptance") == [0.3333] * 6 + [None]
    assert watched.figure("expected_acceptance")[0] == 0.35
    both = [{"drafted": 60, "accepted": 30}, {"drafted": 30, "accepted": 0}]
    assert watched.history.newest()["positions"] == both
    watched.pass_time(3600)
    assert watched.history.newest()["positions"] == [{"drafted": 0, "accepted": 0}] * 2


def test_cache_and_preemptions_and_what_drafts_gain_are_those_of_the_minute(watched: Watched) -> None:
    for name in ("kv_usage", "cache_hit_rate", "tokens_per_round", "time_saved"):
        assert watched.history.newest()["now"][name] is None
    for name, value in (("prefix_cache_queries", 400), ("prefix_cache_hits", 100), ("preemptions", 3)):
        watched.count(f"truespec_{name}_total", value)
    for name, value in (("drafts", 40), ("accepted_tokens", 30), ("speculated_seconds", 6), ("draft_tokens", 90)):
        watched.count(f"truespec_{name}_total", value)
    watched.count("truespec_speculated_plain_seconds_total", 8)
    other = BufferSink("r2")
    Metrics(other, model_name="m", pool="decode").gauge("truespec_kv_cache_usage_ratio", 0.9)
    watched.metrics.gauge("truespec_kv_cache_usage_ratio", 0.3)
    watched.sink.apply(other.drain())
    watched.pass_time(10)
    now = watched.history.newest()["now"]
    assert (now["kv_usage"], now["cache_hit_rate"], now["preemptions"]) == (0.9, 0.25, 3)  # the fullest, and no sum
    assert (now["tokens_per_round"], now["time_saved"]) == (1.75, 0.25)
    watched.pass_time(70)
    now = watched.history.newest()["now"]
    assert (now["kv_usage"], now["cache_hit_rate"], now["time_saved"]) == (0.3, None, None)


def test_latencies_of_a_replica_are_its_own_and_of_the_last_minutes(watched: Watched) -> None:
    other = BufferSink("r2")
    slow = Metrics(other, model_name="m", pool="decode")
    for _ in range(10):
        watched.metrics.observe("truespec_time_to_first_token_seconds", 0.2)
        slow.observe("truespec_time_to_first_token_seconds", 2.0)
    watched.sink.apply(other.drain())
    watched.pass_time(10)
    found = watched.history.latencies_by_replica()
    assert found["r1"]["first_token_p50_s"] == 0.175 and found["r2"]["first_token_p50_s"] == 1.75
    assert "per_token_p50_s" not in found["r1"]  # nothing is known of it
    watched.pass_time(30)
    assert watched.history.latencies_by_replica().keys() == {"r1"}  # nothing has been heard of the other
    watched.pass_time(300)
    assert watched.history.latencies_by_replica()["r1"]["first_token_p50_s"] is None


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, [0, 0, 0, 0], None),
        (0.5, [2, 0, 0, 0], 0.05),
        (0.5, [1, 2, 1, 0], 0.3),
        (0.95, [0, 0, 10, 0], 0.975),
        (0.5, [1, 0, 1, 0], 0.1),  # on the border of a bucket, as Prometheus has it
        (0.95, [1, 0, 0, 9], 1.0),  # beyond the highest bound
    ],
)
def test_quantiles_are_those_of_prometheus(share: float, counts: list[int], expected: float | None) -> None:
    assert quantile(share, counts, BOUNDS) == (None if expected is None else pytest.approx(expected))
