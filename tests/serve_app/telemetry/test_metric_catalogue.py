"""What the catalogue says of every label's values: none is counted that it does not know."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from serve_app.config.base import POOLS_OF_TOPOLOGY
from serve_app.referee.book.controls import CONTROL_CHANGES, CONTROL_RESULTS
from serve_app.referee.judge.verdicts import Verdict
from serve_app.telemetry.metric_names import CATALOGUE, COMMON_MEANINGS, METRICS
from speculative.request import FinishReason
from speculative.stats import StepStats

SOURCE = Path(__file__).parents[3] / "serve_app"


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        ("referee_controls_total", "change", set(CONTROL_CHANGES)),
        ("referee_controls_total", "result", set(CONTROL_RESULTS)),
        ("verdicts_total", "verdict", {verdict.value for verdict in Verdict}),
        ("requests_total", "outcome", {reason.value for reason in FinishReason} | {"rejected"}),
    ],
)
def test_values_that_are_named_elsewhere_are_all_there(metric: str, label: str, values: set[str]) -> None:
    assert set(METRICS[f"truespec_{metric}"].meanings[label]) == values


def test_every_pool_is_explained() -> None:
    served = {pool for pools in POOLS_OF_TOPOLOGY.values() for pool in pools}
    assert set(COMMON_MEANINGS["pool"]) == served | {"router", "proxy", "watched"}


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
    for metric in CATALOGUE:
        of_steps = metric.steps(StepStats()) if metric.steps else 0
        if isinstance(of_steps, Mapping):
            found += [(metric.name, *metric.meanings, value) for value in of_steps]
    assert len(found) > 50
    unknown = [
        (name, label, value)
        for name, label, value in found
        if label in METRICS[name].meanings
        and not isinstance(meaning := METRICS[name].meanings[label], str)
        and value not in meaning
    ]
    assert unknown == []


def test_only_a_gauge_may_name_what_comes_and_goes() -> None:
    """The controller never forgets a counter's series."""
    open_labels = {
        label
        for metric in CATALOGUE
        for label, meaning in metric.meanings.items()
        if metric.kind != "gauge" and isinstance(meaning, str)
    }
    bounded = {"check", "stratum", "since_handoff", "weights"}  # whose values are listed elsewhere
    assert open_labels - bounded == {"position", "code"}
