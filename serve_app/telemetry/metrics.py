"""Record a metric once, and it reaches the application's `/metrics`, which Prometheus scrapes.

A replica records into a `BufferSink`. About once a second it drains the buffer and sends the batch to the one place
that keeps a `PrometheusSink`, whose exposition is the sum over the whole app and outlives a dead replica. A batch is
bounded by the number of series, never by the number of requests.

The exporter is a collector of its own and not prometheus_client's metric objects: those cannot take in counts per
bucket that another process made. It writes no `_created` series.
"""

import itertools
import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from serve_app.telemetry.metric_names import CATALOGUE, METRICS, REPLICA_LABEL, Kind, Metric
from speculative.stats import EngineUsage, StepStats

_logger = logging.getLogger(__name__)

LabelValues = tuple[str, ...]  # in the order of Metric.label_names
Series = tuple[str, LabelValues]  # (metric name, label values)


class Sink:
    """A process's batch, and the lock under which it is recorded into, from any thread.

    Args:
        source: the process that records, as the gauges' labels name it.
    """

    def __init__(self, source: str = "") -> None:
        self.lock = threading.Lock()
        self.batch = MetricBatch(source)


class Metrics:
    """The one way to record a metric.

    Names are those of the catalogue, in full (`truespec_drafts_total`). A name, kind, label or value that does not fit
    the catalogue is a mistake in the program and raises ValueError.
    """

    def __init__(self, sink: Sink, *, model_name: str, pool: str) -> None:
        self._sink = sink
        self._common: LabelValues = (model_name, pool)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value` to a counter. 0 is allowed, and makes the series appear."""
        series = self._resolve(name, "counter", value, labels)
        if value < 0:
            raise ValueError(f"{name} is a counter and cannot go down, got {value}.")
        with self._sink.lock:
            self._sink.batch.count(series, value)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        series = self._resolve(name, "gauge", value, labels)
        with self._sink.lock:
            self._sink.batch.gauges[series] = value

    def observe(self, name: str, *values: float) -> None:
        """Put observations into a histogram."""
        series = self._resolve(name, "histogram", sum(values), {})
        with self._sink.lock:
            self._sink.batch.observe(series, METRICS[name].buckets, *values)

    def forget(self, name: str, **labels: str) -> None:
        """Export one series of a gauge no longer, until it is set again."""
        series = self._resolve(name, "gauge", 0, labels)
        with self._sink.lock:
            self._sink.batch.gauges.pop(series, None)

    def record_steps(self, stats: StepStats, usage: EngineUsage) -> None:
        """Record what an engine counted since the last time, and what it holds now."""
        for metric in CATALOGUE:
            if metric.steps is None:
                continue
            counted = metric.steps(stats)
            if isinstance(counted, Mapping):
                (label,) = metric.meanings
                for value, number in counted.items():
                    self.count(metric.name, number, **{label: value})
            else:
                self.count(metric.name, counted)
        self.gauge("truespec_requests_running", usage.num_running)
        self.gauge("truespec_requests_waiting", usage.num_waiting)
        self.gauge("truespec_replays_running", usage.num_replays)
        self.gauge("truespec_kv_cache_usage_ratio", usage.kv_usage)

    def begin(self, *names: str) -> None:
        """Have counters there with 0 from the start, for each value that their labels are known to have."""
        for name in names:
            meanings = METRICS[name].meanings
            for values in itertools.product(*meanings.values()):
                self.count(name, 0, **dict(zip(meanings, values, strict=True)))

    def _resolve(self, name: str, kind: Kind, value: float, labels: Mapping[str, str]) -> Series:
        metric = METRICS.get(name)
        if metric is None:
            raise ValueError(f"There is no metric {name!r}; serve_app.telemetry.metric_names lists them all.")
        if metric.kind != kind:
            raise ValueError(f"{name} is a {metric.kind}, not a {kind}.")
        if labels.keys() != metric.meanings.keys():
            raise ValueError(f"{name} takes the labels {list(metric.meanings)}, got {sorted(labels)}.")
        if not math.isfinite(value):
            raise ValueError(f"{name} takes finite numbers, got {value}.")
        return name, self._common + tuple(labels[label] for label in metric.meanings)


@dataclass(slots=True)
class BucketCounts:
    """A histogram: counts per bucket (not cumulative; the last ends at +Inf) and the sum of what was observed."""

    counts: list[int]
    total: float = 0.0

    def add(self, other: "BucketCounts") -> None:
        """Add another histogram of the same buckets."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class MetricBatch:
    """Counts of one replica since its last batch, and its gauges now. Plain and picklable."""

    source: str
    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, BucketCounts] = field(default_factory=dict)
    gauges: dict[Series, float] = field(default_factory=dict)

    def count(self, series: Series, value: float) -> None:
        """Add to a counter."""
        self.counters[series] = self.counters.get(series, 0.0) + value

    def observe(self, series: Series, buckets: tuple[float, ...], *values: float) -> None:
        """Put observations into a histogram with these upper bounds; a value on a bound belongs below it."""
        histogram = self.histograms.get(series)
        if histogram is None:
            histogram = self.histograms[series] = BucketCounts([0] * (len(buckets) + 1))
        for value in values:
            histogram.counts[bisect_left(buckets, value)] += 1
            histogram.total += value

    def add(self, other: "MetricBatch") -> None:
        """Add another batch's counters and histograms. Gauges do not add up and stay as they are."""
        for series, value in other.counters.items():
            self.count(series, value)
        for series, histogram in other.histograms.items():
            mine = self.histograms.setdefault(series, BucketCounts([0] * len(histogram.counts)))
            mine.add(histogram)


class BufferSink(Sink):
    """Keeps what was recorded until it is drained as a batch."""

    def drain(self) -> MetricBatch:
        """Take the counts since the last drain, and all gauges: each batch alone says how the replica stands."""
        with self.lock:
            batch = self.batch
            self.batch = MetricBatch(batch.source, gauges=dict(batch.gauges))
        return batch

    def put_back(self, batch: MetricBatch) -> None:
        """Return a batch that could not be delivered; it goes with the next one."""
        with self.lock:
            self.batch.add(batch)


class Sample(NamedTuple):
    """One value of a counter or a gauge."""

    name: str
    labels: Mapping[str, str]
    value: float


class PrometheusSink(Sink, Collector):
    """Sums what it is given and writes it in Prometheus' text format.

    Counters and histograms live on; gauges of a replica vanish when no batch has come from it for `gauge_lifetime_s`.
    """

    def __init__(
        self, *, source: str = "", gauge_lifetime_s: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(source)  # its batch has the sums of the whole app, and this process's own gauges
        self._gauges: dict[str, tuple[float, dict[Series, float]]] = {}  # source -> (heard at, gauges)
        self._observed: dict[str, dict[str, BucketCounts]] = {}  # source -> histogram -> over all its labels
        self._gauge_lifetime_s = gauge_lifetime_s
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def apply(self, batch: MetricBatch) -> None:
        """Take in what another process drained."""
        with self.lock:
            self.batch.add(batch)
            self._gauges[batch.source] = (self._clock(), dict(batch.gauges))
            observed = self._observed.setdefault(batch.source, {})
            for (name, _), histogram in batch.histograms.items():
                observed.setdefault(name, BucketCounts([0] * len(histogram.counts))).add(histogram)

    def samples(self) -> list[Sample]:
        """Every counter, and every gauge of every replica that is heard of; a gauge's labels name it."""
        return [
            Sample(sample.name, sample.labels, sample.value)
            for family in self.collect()
            if family.type != "histogram"
            for sample in family.samples
        ]

    def histogram(self, name: str) -> BucketCounts:
        """A histogram's counts and sum, over all its labels."""
        added = BucketCounts([0] * (len(METRICS[name].buckets) + 1))
        with self.lock:
            for (own, _), histogram in self.batch.histograms.items():
                if own == name:
                    added.add(histogram)
        return added

    def histogram_by_source(self, name: str) -> dict[str, BucketCounts]:
        """The same of each process that is heard of and has observed anything."""
        with self.lock:
            self._forget_silent_replicas()
            found = {source: own[name] for source, own in self._observed.items() if name in own}
            return {source: BucketCounts(own.counts, own.total) for source, own in found.items()}

    def exposition(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterable[MetricFamily]:
        """Every metric of the catalogue, with or without samples."""
        with self.lock:
            self._forget_silent_replicas()
            return [self._family(metric) for metric in CATALOGUE]

    def _forget_silent_replicas(self) -> None:
        oldest = self._clock() - self._gauge_lifetime_s
        self._gauges = {source: entry for source, entry in self._gauges.items() if entry[0] >= oldest}
        self._observed = {source: own for source, own in self._observed.items() if source in self._gauges}

    def _family(self, metric: Metric) -> MetricFamily:
        about = metric.name, metric.help
        if metric.kind == "counter":
            counters = CounterMetricFamily(*about, labels=metric.label_names)
            for (name, labels), value in self.batch.counters.items():
                if name == metric.name:
                    counters.add_metric(labels, value)
            return counters
        if metric.kind == "histogram":
            histograms = HistogramMetricFamily(*about, labels=metric.label_names)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for (name, labels), histogram in self.batch.histograms.items():
                if name == metric.name:
                    cumulative = list(zip(bounds, accumulate(histogram.counts), strict=True))
                    histograms.add_metric(labels, cumulative, histogram.total)
            return histograms
        gauges = GaugeMetricFamily(*about, labels=(*metric.label_names, REPLICA_LABEL))
        known = {source: values for source, (_, values) in self._gauges.items()}
        for source, values in (known | {self.batch.source: self.batch.gauges}).items():
            for (name, labels), value in values.items():
                if name == metric.name:
                    gauges.add_metric((*labels, source), value)
        return gauges
