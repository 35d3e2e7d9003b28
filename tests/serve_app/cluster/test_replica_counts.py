"""How many replicas there are, should be, and were lost: by what Ray Serve reported, look by look."""

from typing import Any

import pytest

from serve_app.cluster.replica_counts import PoolState, ReplicaCounts
from serve_app.telemetry.metrics import Metrics, PrometheusSink


def pool(wanted: int, running: str, moving: str = "", **changes: Any) -> PoolState:
    """Replicas are named by single letters."""
    return PoolState(wanted, frozenset(running), frozenset(moving), **changes)


def counted(*looks: PoolState, name: str = "decode") -> dict[str, float]:
    """The metrics of the pool after these looks at it, interrupted requests by their stage; replica a had one that
    waited for its prompt, b two, and so on, and each one that decoded."""
    sink = PrometheusSink(source="c")
    counts = ReplicaCounts(
        lambda name: Metrics(sink, model_name="tiny", pool=name), lambda one: {"prefill": ord(one) - 96, "decode": 1}
    )
    for look in looks:
        counts.note({name: look})
    return {
        sample.labels.get("stage", sample.name.removeprefix("truespec_replica")): sample.value
        for sample in sink.samples()
    }


def test_gauges_are_those_of_the_last_look() -> None:
    gauges = {"s_wanted": 3, "s_running": 2, "_restarts_total": 0}
    assert counted(pool(2, "ab"), pool(3, "ab")) == gauges | dict.fromkeys(("prefill", "decode", "reply"), 0)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        ([pool(2, "")], 0),  # it starts
        ([pool(2, "ab"), pool(2, "b"), pool(2, "bc")], 1),  # one died and was replaced
        ([pool(2, "ab"), pool(2, "bc")], 1),  # within one look
        ([pool(2, "ab"), pool(2, ""), pool(2, "cd"), pool(2, "c")], 3),
        ([pool(2, "ab"), pool(1, "a")], 0),  # scaled down
        ([pool(2, "ab"), pool(2, "abc", changing=True), pool(2, "cd")], 0),  # deployed
        ([pool(2, "ab"), pool(2, "ac", changing=True)], 0),
        ([pool(2, "ab"), pool(2, "ab", moving="a"), pool(2, "bc")], 0),  # its node was drained
        ([pool(2, "ab"), pool(2, "ab")], 0),
    ],
)
def test_a_replica_that_is_gone_without_a_reason_was_lost(looks: list[PoolState], lost: int) -> None:
    assert counted(*looks)["_restarts_total"] == lost


def test_requests_of_lost_replicas_are_counted_but_for_prompts_that_are_asked_for_again() -> None:
    looks = [pool(3, "abc"), pool(3, "bc"), pool(3, "bde")]
    found = counted(*looks)
    assert (found["prefill"], found["decode"], found["reply"]) == (1 + 3, 2, 0)
    assert counted(pool(2, "ab"), pool(1, "a"))["prefill"] == 0, "it was stopped in order"
    assert "prefill" not in counted(*looks, name="prefill")
