"""Whatever can be found wrong has words for an operator, and a runbook that exists."""

from pathlib import Path
from typing import get_args

import pytest

from serve_app.page.words import CHECK_NAMES, RUNBOOKS, check_words, explained
from serve_app.referee.incidents import Incident, IncidentKind
from serve_app.telemetry.metric_names import REPLAY_ALARMS, TRIP_REASONS
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES

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


def test_an_alarm_of_a_watched_server_names_the_report_and_no_breaker() -> None:
    incident = Incident("replay", "support", "server", 1.0, 2.0, 3).to_wire()
    assert "breaker" in explained(incident)["effect"]
    watched = explained(incident, watched=True)["effect"]
    assert "report" in watched and "without speculation" in watched and "breaker" not in watched


def test_every_check_has_a_name_of_its_own() -> None:
    assert CHECK_NAMES.keys() == CHECKS.keys()
    assert len(set(CHECK_NAMES.values())) == len(CHECKS)
    assert check_words()["a"] == {"name": "accept step", "meaning": CHECKS["a"]}


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
