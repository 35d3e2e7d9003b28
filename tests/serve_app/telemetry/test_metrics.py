"""The catalogue is well formed; what is recorded comes out by value, across processes, threads and dead replicas."""

import pickle
import re
import threading
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.telemetry.metric_names import CATALOGUE, REPLICA_LABEL, Metric
from serve_app.telemetry.metric_summary import summarise
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink, Sink
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES, CheckSums, EngineUsage, StepStats
from tests.support.loops import for_each

USAGE = EngineUsage(num_running=3, num_waiting=2, num_held=0, num_free_blocks=25, num_blocks=100, block_size=16)


def facade(sink: Sink, pool: str = "decode") -> Metrics:
    return Metrics(sink, model_name="tiny", pool=pool)


def samples(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and by labels other than the model's name."""
    families = text_string_to_metric_families(sink.exposition()[0].decode())
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in families
        for sample in family.samples
    }


def value(sink: PrometheusSink, name: str, **labels: str) -> float:
    return samples(sink)[name, frozenset({"pool": "decode", **labels}.items())]


def round_stats() -> StepStats:
    """Two rounds: three drafted, two accepted; then two drafted, none accepted."""
    stats = StepStats(num_emitted=4, num_prompt_tokens=7, expected_accepted=1.75, draft_s=0.5, verify_s=2.0)
    stats.achievable_accepted, stats.speculated_s, stats.speculated_plain_s = 1.5, 1.5, 2.5
    stats.export_s, stats.insert_s = 0.25, 0.125
    stats.count_round(3, 2)
    stats.count_round(2, 0)
    stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preemptions = 20, 16, 1
    return stats


# The catalogue


@for_each(CATALOGUE, lambda metric: metric.name)
def test_metric_follows_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"truespec_[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.count("_total") <= 1
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert len(set(metric.label_names)) == len(metric.label_names)
    assert not {"le", REPLICA_LABEL, "request_id"} & set(metric.label_names)
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(bound > 0 for bound in metric.buckets), "Ray takes positive bounds only"


# Recording


def test_steps_are_recorded_by_value_and_every_check_is_there_from_the_start() -> None:
    sink, stats = PrometheusSink(source="r1"), round_stats()
    stats.checks, stats.alarms = {"b": CheckSums(num=10, positive=2.0, negative=1.5, square=3.0)}, {"b": 1}
    stats.violations, stats.logprob_violations = {"p_zero": 2}, {"rank": 2}
    facade(sink).record_steps(stats, USAGE)
    of_checks = {"terms": 10, "positive": 2.0, "negative": 1.5, "square": 3.0, "alarms": 1}
    expected = {
        "drafts": 2, "draft_tokens": 5, "accepted_tokens": 2, "emitted_tokens": 4, "prompt_tokens": 7,
        "expected_accepted_tokens": 1.75, "achievable_accepted_tokens": 1.5, "speculated_seconds": 1.5,
        "speculated_plain_seconds": 2.5, "prefix_cache_queries": 20, "prefix_cache_hits": 16, "preemptions": 1,
        "draft_tokens_per_position": {"0": 2, "1": 2, "2": 1},
        "accepted_tokens_per_position": {"0": 1, "1": 1, "2": 0},
        "step_seconds": {"draft": 0.5, "verify": 2.0},
        "handoff_seconds": {"export": 0.25, "check": 0, "insert": 0.125},
        "selfcheck_violations": dict.fromkeys(INVARIANTS, 0) | {"p_zero": 2},
        "logprob_violations": dict.fromkeys(LOGPROB_RULES, 0) | {"rank": 2},
        **{f"selfcheck_{name}": dict.fromkeys(CHECKS, 0) | {"b": value} for name, value in of_checks.items()},
    }  # fmt: skip
    found = samples(sink)
    for name, values in expected.items():
        own = {labels: value for (metric, labels), value in found.items() if metric == f"truespec_{name}_total"}
        by_label = {next((text for key, text in labels if key != "pool"), ""): value for labels, value in own.items()}
        assert by_label == (values if isinstance(values, dict) else {"": values}), name
    for name, gauge in {"requests_running": 3, "requests_waiting": 2, "kv_cache_usage_ratio": 0.75}.items():
        assert value(sink, f"truespec_{name}", replica="r1") == gauge


def test_a_histogram_counts_each_value_up_to_its_bound_and_sums_exactly() -> None:
    sink = PrometheusSink()
    for seconds in (0.01, 0.011, 5.04, 1000.0):
        facade(sink).observe("truespec_queue_time_seconds", seconds)
    name = "truespec_queue_time_seconds"
    assert value(sink, f"{name}_bucket", le="0.01") == 1, "a value on a bound belongs below it"
    assert value(sink, f"{name}_bucket", le="0.025") == 2
    assert value(sink, f"{name}_bucket", le="10.0") == 3
    assert value(sink, f"{name}_bucket", le="+Inf") == value(sink, f"{name}_count") == 4
    assert value(sink, f"{name}_sum") == pytest.approx(1005.061)


@pytest.mark.parametrize(
    ("method", "name", "args", "labels", "message"),
    [
        ("count", "truespec_dratfs_total", (), {}, "no metric 'truespec_dratfs_total'"),
        ("count", "drafts_total", (), {}, "no metric 'drafts_total'"),
        ("count", "truespec_requests_running", (), {}, "is a gauge, not a counter"),
        ("gauge", "truespec_drafts_total", (1,), {}, "is a counter, not a gauge"),
        ("observe", "truespec_drafts_total", (1,), {}, "is a counter, not a histogram"),
        ("count", "truespec_handoffs_total", (), {}, r"takes the labels \['result'\], got \[\]"),
        ("count", "truespec_drafts_total", (), {"request_id": "x"}, r"takes the labels \[\], got \['request_id'\]"),
        ("count", "truespec_drafts_total", (-1,), {}, "cannot go down"),
        ("count", "truespec_drafts_total", (float("nan"),), {}, "finite"),
        ("observe", "truespec_queue_time_seconds", (float("inf"),), {}, "finite"),
    ],
)
def test_what_is_not_in_the_catalogue_is_refused(
    method: str, name: str, args: tuple[float, ...], labels: dict[str, str], message: str
) -> None:
    sink = PrometheusSink()
    before = samples(sink)
    with pytest.raises(ValueError, match=message):
        getattr(facade(sink), method)(name, *args, **labels)
    assert samples(sink) == before


# Batches


def drained(pool: str, source: str, durations: Iterable[float]) -> bytes:
    buffer = BufferSink(source)
    metrics = facade(buffer, pool=pool)
    metrics.record_steps(round_stats(), USAGE)
    for seconds in durations:
        metrics.observe("truespec_time_to_first_token_seconds", seconds)
    return pickle.dumps(buffer.drain())


def test_batches_of_replicas_add_up_and_gauges_stay_apart() -> None:
    sink = PrometheusSink()
    sink.apply(pickle.loads(drained("decode", "d1", [0.02])))
    sink.apply(pickle.loads(drained("decode", "d2", [0.02, 3.0])))
    sink.apply(pickle.loads(drained("prefill", "p1", [])))
    assert value(sink, "truespec_drafts_total") == 4
    assert value(sink, "truespec_drafts_total", pool="prefill") == 2
    assert value(sink, "truespec_time_to_first_token_seconds_bucket", le="0.025") == 2
    assert value(sink, "truespec_time_to_first_token_seconds_count") == 3
    assert value(sink, "truespec_time_to_first_token_seconds_sum") == pytest.approx(3.04)
    for replica in ("d1", "d2"):
        assert value(sink, "truespec_requests_running", replica=replica) == 3


def test_a_batch_that_was_not_delivered_goes_with_the_next() -> None:
    sink, buffer = PrometheusSink(), BufferSink("r")
    metrics = facade(buffer)
    metrics.count("truespec_drafts_total", 2)
    metrics.observe("truespec_queue_time_seconds", 0.25)
    metrics.gauge("truespec_requests_running", 1)
    lost = buffer.drain()
    metrics.count("truespec_drafts_total", 3)
    metrics.gauge("truespec_requests_running", 2)
    buffer.put_back(lost)
    sink.apply(buffer.drain())
    assert value(sink, "truespec_drafts_total") == 5
    assert value(sink, "truespec_queue_time_seconds_count") == 1
    assert value(sink, "truespec_requests_running", replica="r") == 2


def test_a_dead_replicas_gauges_vanish_and_its_counts_stay() -> None:
    now = [100.0]
    sink = PrometheusSink(gauge_lifetime_s=15, clock=lambda: now[0])
    sink.apply(pickle.loads(drained("decode", "dead", [])))
    now[0] += 10
    sink.apply(pickle.loads(drained("decode", "alive", [])))
    now[0] += 6
    replicas = {dict(labels)["replica"] for name, labels in samples(sink) if name == "truespec_requests_running"}
    assert replicas == {"alive"}
    assert value(sink, "truespec_drafts_total") == 4


def test_nothing_is_lost_between_threads() -> None:
    sink, buffer, done = PrometheusSink(), BufferSink("r"), threading.Event()
    recorded = facade(buffer), facade(sink)

    def record() -> None:
        for _ in range(500):
            for metrics in recorded:
                metrics.count("truespec_drafts_total")
                metrics.observe("truespec_queue_time_seconds", 1.0)

    def forward() -> None:
        while not done.is_set():
            sink.apply(buffer.drain())
            sink.exposition()

    recorders = [threading.Thread(target=record) for _ in range(4)]
    forwarder = threading.Thread(target=forward)
    for thread in (forwarder, *recorders):
        thread.start()
    for thread in recorders:
        thread.join()
    done.set()
    forwarder.join()
    sink.apply(buffer.drain())
    assert value(sink, "truespec_drafts_total") == 2 * 4 * 500  # once directly, once through the buffer
    assert value(sink, "truespec_queue_time_seconds_sum") == 2 * 4 * 500


# The summary


def test_the_summary_of_a_whole_app() -> None:
    sink = PrometheusSink()
    sink.apply(pickle.loads(drained("decode", "d1", [])))
    sink.apply(pickle.loads(drained("decode", "d2", [])))
    metrics = facade(sink)
    for stratum, tokens, excess in (("all", 50, 0.5), ("greedy", 30, 0.4), ("first", 10, 0.1)):
        metrics.count("truespec_replay_tokens_total", tokens, stratum=stratum)
        metrics.count("truespec_replay_tme_excess_total", excess, stratum=stratum)
    metrics.count("truespec_verdicts_total", 3, verdict="verified")
    metrics.count("truespec_breaker_trips_total", 2, reason="drift")
    metrics.count("truespec_selfcheck_alarms_total", 1, check="b")
    metrics.count("truespec_replay_alarms_total", 1, alarm="drift", stratum="all")
    metrics.count("truespec_replay_alarms_total", 1, alarm="drift", stratum="greedy")
    metrics.count("truespec_handoffs_total", 4, result="ok")
    metrics.count("truespec_handoffs_total", 1, result="refused")
    summary = summarise(sink.exposition()[0].decode())
    assert summary["drafts"] == 4
    assert (summary["draft_tokens"], summary["accepted_tokens"], summary["emitted_tokens"]) == (10, 4, 8)
    assert summary["acceptance_rate"] == 0.4
    assert summary["mean_accepted_length"] == 2.0
    assert summary["tme"] == pytest.approx(1.01)
    assert summary["replayed_tokens"] == 50, "strata overlap: all is the total"
    assert summary["verdicts"] == {"verified": 3}
    assert summary["selfcheck_alarms"] == 2
    assert summary["handoffs_by_result"] == {"ok": 4, "refused": 1}

    nothing = summarise(PrometheusSink().exposition()[0].decode())
    assert [nothing[name] for name in ("acceptance_rate", "mean_accepted_length", "tme")] == [None] * 3
    assert nothing["handoffs_by_result"] == {}
