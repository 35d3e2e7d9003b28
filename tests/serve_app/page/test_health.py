"""What is wrong is said as soon as a counter knows it, and no longer than it lasts; a healthy service says nothing.
Whatever can be found wrong has words for an operator, and a runbook that exists."""

from pathlib import Path
from typing import Any, get_args

import pytest

from dashboards.alerts import ALERTS
from serve_app.page.health import troubles
from serve_app.page.words import CHECK_NAMES, RUNBOOKS, check_words, explained
from serve_app.referee.incidents import Incident, IncidentKind
from serve_app.telemetry.metric_names import REPLAY_ALARMS, TRIP_REASONS
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES
from tests.serve_app.page.test_history import Watched

ROOT = Path(__file__).parents[3]
NAMES: dict[IncidentKind, list[str]] = {
    "trip": [*TRIP_REASONS],
    "canary": ["canary"],
    "selfcheck": [*CHECKS],
    "invariant": [*INVARIANTS],
    "logprobs": [*LOGPROB_RULES],
    "replay": [*REPLAY_ALARMS],
    "independent": ["disagrees"],
}


class Service(Watched):
    def said(self, max_first_token_s: float | None = None) -> dict[str, str]:
        """Sentences by the alert whose runbook they lead to."""
        self.sink.apply(self.buffer.drain())
        found = troubles(self.history, self.sink.samples(), max_first_token_s)
        assert all(one["tone"] in ("bad", "warn") and one["title"] for one in found)
        return {one["runbook"]["name"].removeprefix("Truespec"): one["text"] for one in found}

    def serve(self, num: int = 100, first_token_s: float = 0.2) -> None:
        self.metrics.count("truespec_requests_total", num, outcome="stop")
        self.metrics.count("truespec_http_responses_total", num, code="200")
        self.metrics.count("truespec_handoffs_total", num, result="ok")
        for _ in range(num):
            self.metrics.observe("truespec_time_to_first_token_seconds", first_token_s)


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_healthy_service_and_an_idle_one_have_nothing_to_say(service: Service) -> None:
    assert service.said() == {}
    service.metrics.gauge("truespec_replicas_wanted", 2)
    service.metrics.gauge("truespec_replicas_running", 2)
    service.metrics.gauge("truespec_kv_cache_usage_ratio", 0.7)
    service.metrics.gauge("truespec_replay_lag_seconds", 20.0)
    for name, label in (("prefill_failures", "reason"), ("requests", "outcome"), ("refusals", "reason")):
        service.metrics.count(f"truespec_{name}_total", 0, **{label: {"requests": "error"}.get(name, "timeout")})
    service.serve()
    service.metrics.count("truespec_refusals_total", 50, reason="key_concurrency")  # their owner's, and no want of room
    service.pass_time(1200)
    assert service.said() == {}


def test_a_prefill_that_was_computed_twice_is_said_though_no_request_failed(service: Service) -> None:
    service.serve()
    service.metrics.count("truespec_prefill_failures_total", 1, reason="timeout")
    said = service.said()
    assert said == {
        "HandoffsFail": "1 prefill failed in the last 15 minutes (1 timeout) and had to be computed again: those "
        "answers came late."
    }
    service.pass_time(880)
    assert service.said().keys() == {"HandoffsFail"}
    service.pass_time(60)
    assert service.said() == {}


def test_each_reason_of_a_handoff_that_fell_back_is_named(service: Service) -> None:
    service.serve(97)
    service.metrics.count("truespec_handoffs_total", 2, result="failed")
    service.metrics.count("truespec_handoffs_total", 1, result="refused")
    service.metrics.count("truespec_prefill_failures_total", 2, reason="full")
    said = service.said()
    assert said.keys() == {"HandoffsFail"}  # a full pool is no failure of a prefill
    for part in ("3 of 100 handoffs", "2 failed", "1 refused", "2 because the prefill pool was full"):
        assert part in said["HandoffsFail"]


@pytest.mark.parametrize(
    ("limit", "seconds", "late"), [(None, 4.0, False), (None, 8.0, True), (2.0, 4.0, True), (30.0, 8.0, False)]
)
def test_first_tokens_are_held_against_the_services_own_limit_or_the_alerts(
    service: Service, limit: float | None, seconds: float, late: bool
) -> None:
    service.serve(94)
    service.serve(6, first_token_s=seconds)
    assert ("TimeToFirstTokenHigh" in service.said(limit)) is late
    service.pass_time(320)
    assert service.said(limit) == {}


def test_all_else_that_alerts_know_is_said(service: Service) -> None:
    service.serve(80)
    service.metrics.count("truespec_refusals_total", 20, reason="load")
    service.metrics.count("truespec_http_responses_total", 20, code="429")
    service.metrics.count("truespec_http_responses_total", 3, code="500")
    service.metrics.count("truespec_requests_total", 2, outcome="error")
    service.metrics.gauge("truespec_kv_cache_usage_ratio", 0.99)
    service.metrics.gauge("truespec_replay_lag_seconds", 1200.0)
    service.metrics.gauge("truespec_replicas_wanted", 2)
    service.metrics.gauge("truespec_replicas_running", 1)
    assert "KvCacheFull" not in service.said()  # it may be over in a second
    service.pass_time(300)
    said: dict[str, Any] = service.said()
    assert said == {
        "ReplicasMissing": "Pool decode runs 1 of 2 replicas.",
        "RequestErrors": "2 answers ended in an error and 3 responses had a status of 5xx in the last 15 minutes.",
        "RequestsTurnedAway": "20 of 103 requests in the last 15 minutes were turned away for want of room (429 or "
        "503).",
        "KvCacheFull": "The KV cache of a replica was at least 99% full throughout the last 5 minutes.",
        "RefereeBehind": "The oldest answer has waited 20 minutes for its replay: a fault would be noticed late.",
    }
    service.metrics.gauge("truespec_replicas_running", 0)
    first = next(iter(service.said().items()))
    assert first == ("PoolEmpty", "Pool decode runs 0 of 2 replicas.")  # what is worst comes first
    runbooks = (ROOT / RUNBOOKS).read_text(encoding="utf-8")
    names = {alert.name for alert in ALERTS}
    for name in (*said, "PoolEmpty", "HandoffsFail", "TimeToFirstTokenHigh"):
        assert f"Truespec{name}" in names and f"## Truespec{name}\n" in runbooks


def test_an_alarm_of_a_watched_server_names_the_report_and_no_breaker() -> None:
    incident = Incident("replay", "support", "server", 1.0, 2.0, 3).to_wire()
    assert "breaker" in explained(incident)["effect"]
    watched = explained(incident, watched=True)["effect"]
    assert "report" in watched and "without speculation" in watched and "breaker" not in watched


@pytest.mark.parametrize("kind", get_args(IncidentKind))
def test_every_incident_says_what_it_means_and_where_its_runbook_is(kind: IncidentKind) -> None:
    runbooks = (ROOT / RUNBOOKS).read_text(encoding="utf-8")
    for name in NAMES[kind]:
        incident = Incident(kind, name, "r1", 1.0, 2.0, 3, strata=("all", "first") if kind == "replay" else ())
        said = explained(incident.to_wire())
        assert said["title"] and said["effect"]
        assert said["meaning"] not in ("", name)
        assert ("every emitted token, first tokens after a prompt" in said["meaning"]) == (kind == "replay")
        assert f"## {said['runbook']['name']}\n" in runbooks
    assert CHECK_NAMES.keys() == CHECKS.keys() and len(set(CHECK_NAMES.values())) == len(CHECKS)
    assert check_words()["a"] == {"name": "accept step", "meaning": CHECKS["a"]}
