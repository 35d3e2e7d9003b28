"""Troubles are on the page as soon as a counter knows them, and no longer than they last; a healthy service has none.
Whatever can be found wrong has words for an operator, and a runbook that exists."""

from dataclasses import asdict
from typing import get_args

import pytest

from dashboards.build import ALERTS
from serve_app.http.page.health import troubles
from serve_app.http.page.words import CHECK_NAMES, explained, runbooks
from serve_app.referee.book.incidents import Incident, IncidentKind
from serve_app.referee.judge.detectors import LOOK_AT
from serve_app.telemetry.metric_names import REPLAY_ALARMS, TRIP_REASONS
from serve_app.telemetry.metrics import Metrics
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES, SAMPLED_INVARIANTS
from tests.serve_app.http.page.test_history import Watched

MEANINGS = {alert.name.removeprefix("Truespec"): alert.means.replace("`", "") for alert in ALERTS}
NAMES: dict[IncidentKind, list[str]] = {
    "trip": [*TRIP_REASONS], "canary": ["canary"], "selfcheck": [*CHECKS], "invariant": [*INVARIANTS],
    "logprobs": [*LOGPROB_RULES], "replay": [*REPLAY_ALARMS], "independent": ["disagrees"],
}  # fmt: skip


class Service(Watched):
    def said(self, max_first_token_s: float | None = None) -> dict[str, str]:
        """Figures by the alert whose meaning follows them, and to whose runbook they lead."""
        self.sink.apply(self.buffer.drain())
        found = troubles(self.history, self.sink.samples(), max_first_token_s)
        assert all(one["tone"] in ("bad", "warn") and one["title"] for one in found)
        said = {one["runbook"].removeprefix("Truespec"): one["text"] for one in found}
        assert all(text.endswith(f". {MEANINGS[alert]}") for alert, text in said.items())
        return {alert: text.removesuffix(f". {MEANINGS[alert]}") for alert, text in said.items()}

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
    service.metrics.count("truespec_prefill_failures_total", 2, reason="full")  # no failure by itself
    service.metrics.count("truespec_refusals_total", 50, reason="key_concurrency")  # their owner's, and no want of room
    assert service.said() == {}
    service.pass_time(1200)
    assert service.said() == {}


def test_each_reason_of_a_handoff_that_fell_back_is_named_for_as_long_as_its_alert_looks_back(service: Service) -> None:
    service.serve(97)
    service.metrics.count("truespec_handoffs_total", 2, result="failed")
    service.metrics.count("truespec_handoffs_total", 1, result="refused")
    service.metrics.count("truespec_prefill_failures_total", 2, reason="full")
    reasons = "Handoffs failed: 2, handoffs refused: 1, prefills full: 2, in the last 15 minutes"
    assert service.said() == {"HandoffsFail": reasons}
    service.pass_time(880)
    service.metrics.count("truespec_prefill_failures_total", 1, reason="timeout")  # though no request failed
    assert service.said() == {"HandoffsFail": reasons.replace("2, in", "2, prefills timeout: 1, in")}
    service.pass_time(960)
    assert service.said() == {}


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
    assert service.said() == {
        "ReplicasMissing": "Pool decode runs 1 of 2 replicas",
        "RequestErrors": "Failed answers: 2, responses of 5xx: 3, in the last 15 minutes",
        "RequestsTurnedAway": "20 of 103 requests in the last 15 minutes",
        "KvCacheFull": "At least 99% in the last 5 minutes",
        "RefereeBehind": "The oldest answer has waited 20 minutes",
    }
    service.metrics.gauge("truespec_replicas_running", 0)
    first = next(iter(service.said().items()))
    assert first == ("PoolEmpty", "Pool decode runs 0 of 2 replicas")  # what is worst comes first
    proxies = Metrics(service.buffer, model_name="tiny", pool="proxy")
    proxies.gauge("truespec_replicas_wanted", 2)
    proxies.gauge("truespec_replicas_running", 1)
    assert service.said()["ProxyDown"] == "Pool proxy runs 1 of 2 replicas"


def test_every_alert_is_read_back_from_its_runbook() -> None:
    assert list(runbooks()) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        said = runbooks()[alert.name]
        assert (said.meaning, said.effect) == (alert.means.replace("`", ""), alert.do.replace("`", ""))
        assert (said.tone == "bad") is (alert.severity == "critical")
    assert runbooks()["TruespecHandoffsFail"].title == "Handoffs fail"


@pytest.mark.parametrize("kind", get_args(IncidentKind))
def test_every_incident_says_what_it_means_and_where_its_runbook_is(kind: IncidentKind) -> None:
    for name in NAMES[kind]:
        incident = Incident(kind, name, "r1", 1.0, 2.0, 3, strata=("all", "first") if kind == "replay" else ())
        said = explained(asdict(incident), {"self_check_sample_rate": 0.25})
        is_sampled = kind == "selfcheck" or (kind == "invariant" and name in SAMPLED_INVARIANTS)
        assert ("looks at 25% of the steps" in said["unseen"]) == is_sampled
        assert ("sent" in said["unseen"]) == (kind not in ("trip", "canary"))
        assert said["effect"] == runbooks()[said["runbook"]].effect
        assert kind != "replay" or LOOK_AT[name] in said["look"], "the advice is the alarm's own"
        assert said["meaning"] not in ("", name)
        assert ("every emitted token, first tokens after a prompt" in said["meaning"]) == (kind == "replay")
    assert CHECK_NAMES.keys() == CHECKS.keys() and len(set(CHECK_NAMES.values())) == len(CHECKS)
