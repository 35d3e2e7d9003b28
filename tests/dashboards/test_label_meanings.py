"""docs/metrics.md says of every label value what it means: no value is counted that it does not know."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.label_meanings import meaning_of
from dashboards.reference import metrics_page
from serve_app.config.base import POOLS_OF_TOPOLOGY
from serve_app.referee.controls import CONTROL_CHANGES, CONTROL_RESULTS
from serve_app.referee.strata import STRATA
from serve_app.referee.verdicts import Verdict
from serve_app.telemetry.metric_names import (
    CATALOGUE,
    COMMON_LABELS,
    INDEPENDENT_RESULTS,
    METRICS,
    READ_RESULTS,
    REPLAY_ALARMS,
    TRIP_REASONS,
    WATCHED_RESULTS,
    Metric,
)
from speculative.request import FinishReason
from tests.support.loops import for_each

SOURCE = Path(__file__).parents[2] / "serve_app"
LABELS = [(metric, label) for metric in CATALOGUE for label in metric.labels]


@pytest.fixture(scope="module")
def page() -> str:
    return metrics_page()


@for_each(LABELS, lambda pair: f"{pair[1]} of {pair[0].name}")
def test_every_label_has_a_meaning_and_the_page_reports_it(pair: tuple[Metric, str], page: str) -> None:
    metric, label = pair
    meaning = meaning_of(metric, label)
    section = page.split(f"### `{label}`")[1].split("###")[0]
    others = [meaning_of(other, label) for other in CATALOGUE if label in other.labels]
    assert (f"`{metric.name}`" in section) == any(other is not meaning for other in others)
    if isinstance(meaning, str):
        assert meaning in section
    else:
        assert all(f"- `{value}`: {text}" in section for value, text in meaning.items())


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        ("breaker_trips_total", "reason", set(TRIP_REASONS)),
        ("replay_alarms_total", "alarm", set(REPLAY_ALARMS)),
        ("independent_replays_total", "result", set(INDEPENDENT_RESULTS)),
        ("referee_controls_total", "change", set(CONTROL_CHANGES)),
        ("referee_controls_total", "result", set(CONTROL_RESULTS)),
        ("replay_tokens_total", "stratum", set(STRATA)),
        ("verdicts_total", "verdict", {verdict.value for verdict in Verdict}),
        ("requests_total", "outcome", {reason.value for reason in FinishReason} | {"rejected"}),
        (
            "requests_total",
            "pool",
            {pool for pools in POOLS_OF_TOPOLOGY.values() for pool in pools} | {"router", "watched"},
        ),
        ("watched_requests_total", "result", set(WATCHED_RESULTS)),
        ("watched_answers_total", "result", set(READ_RESULTS)),
    ],
)
def test_values_that_are_named_elsewhere_are_all_there(metric: str, label: str, values: set[str]) -> None:
    meaning = meaning_of(METRICS[f"truespec_{metric}"], label)
    assert not isinstance(meaning, str)
    assert meaning.keys() == values


def counted() -> Iterator[tuple[str, str, str]]:
    """Metric, label and value of every call that counts with both written out, conditional values included."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            for keyword in node.keywords if node.args[0].value in METRICS else ():
                for part in ast.walk(keyword.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and keyword.arg:
                        yield str(node.args[0].value), keyword.arg, part.value


def test_what_the_code_counts_is_known() -> None:
    found = list(counted())
    assert len(found) > 15
    unknown = [
        (metric, label, value)
        for metric, label, value in found
        if label in METRICS[metric].label_names
        and not isinstance(meaning := meaning_of(METRICS[metric], label), str)
        and value not in meaning
    ]
    assert unknown == []
    assert {"model_name", "pool"} == set(COMMON_LABELS)
