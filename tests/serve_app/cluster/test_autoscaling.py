"""How many replicas a pool needs: tables of loads, and what a replica says of its own."""

from types import SimpleNamespace

import pytest

from serve_app.cluster.autoscaling import LoadPolicy, PrefillBacklog, loads, wanted_replicas

KV = {"kv_usage": 0.7, "running_share": 0.8}


@pytest.mark.parametrize(
    ("replica_loads", "current", "wanted"),
    [
        ([], 3, 3),  # nobody has said anything yet
        ([0.0], 1, 1),
        ([1.0], 1, 1),
        ([1.01], 1, 2),
        ([1.2, 1.2], 2, 3),
        ([5.0, 0.0, 0.0, 0.0, 0.0], 5, 5),  # one's backlog does not move to the others
        ([0.5, 0.5], 2, 2),  # one alone would be at 1.0: not calm
        ([0.8, 0.8, 0.0], 3, 2),
        ([0.0, 0.0, 0.0], 3, 1),
        ([0.7], 2, 1),  # one of two has said something
        ([1.5], 2, 2),
    ],
)
def test_replicas_wanted(replica_loads: list[float], current: int, wanted: int) -> None:
    assert wanted_replicas(dict(enumerate(replica_loads)), current) == wanted


@pytest.mark.parametrize("current", range(1, 6))
def test_what_is_wanted_is_stable_once_it_is_there(current: int) -> None:
    for total in (x / 7 for x in range(60)):
        wanted = wanted_replicas(dict.fromkeys(range(current), total / current), current)
        again = wanted_replicas(dict.fromkeys(range(wanted), total / wanted), wanted)
        assert again == wanted, f"{total} over {current} replicas goes to {wanted}, then to {again}"


def test_the_worst_of_what_a_replica_recorded_is_its_load() -> None:
    metrics = {"kv_usage": {"a": 0.7, "b": 0.07}, "running_share": {"a": 0.2, "b": 1.6}, "backlog_s": {"a": 99.0}}
    assert loads(metrics, KV) == {"a": pytest.approx(1.0), "b": pytest.approx(2.0)}


def test_the_policy_reads_what_ray_serve_collects() -> None:
    policy = LoadPolicy({"backlog_s": 2.0})
    context = SimpleNamespace(aggregated_metrics={"backlog_s": {"r1": 5.0, "r2": 1.0}}, target_num_replicas=2)
    assert policy(context) == (3, {})
    assert policy(SimpleNamespace(aggregated_metrics={}, target_num_replicas=2)) == (2, {})


def test_a_backlog_is_as_long_as_it_takes_to_compute() -> None:
    backlog = PrefillBacklog()
    with backlog.holding(3000):
        assert backlog.seconds == 0, "nothing was measured yet"
        backlog.observe(1000, 2.0)
        assert backlog.seconds == pytest.approx(6.0)
        with backlog.holding(1000):
            assert backlog.seconds == pytest.approx(8.0)
        for _ in range(40):
            backlog.observe(2000, 1.0)
        assert backlog.seconds == pytest.approx(1.5, rel=0.01)
        backlog.observe(0, 1.0)
        backlog.observe(500, 0.0)
        assert backlog.seconds == pytest.approx(1.5, rel=0.01)
    assert backlog.num_tokens == 0 and backlog.seconds == 0
