"""PromQL over the metric catalogue: panels and rules are made of these, so that a figure is defined once.

Means and shares are ratios of counters. A ratio of nothing is left out and not NaN, which would spoil every average
taken over it. `job` and `namespace` are always kept apart, for the releases of one model; where nothing sets them, they
are empty and change nothing.
"""

import re
from dataclasses import dataclass

from serve_app.telemetry.metric_names import METRICS, PREFIX, REPLICA_LABEL

NOT_OK = 'result!="ok"'
_SIGNS = ("positive", "negative")  # a counter cannot go down, so a sum that can is kept as two
_STEP = "30s"  # at which new series are looked for
SCRAPED = ("truespec_replicas_wanted", "truespec_watched_requests_total")  # one of them is wherever we are scraped
_SAME_SCRAPE = "on (job, namespace, instance)"
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


@dataclass(frozen=True, slots=True)
class QueryScope:
    """The series that a query reads, how far back, and which labels stay. Names are the catalogue's without the
    prefix."""

    matchers: str  # label matchers that every series gets, comma-separated
    window: str  # of rates and increases
    keep: tuple[str, ...] = ()  # labels that every result keeps

    def series(self, name: str, where: str = "") -> str:
        """A selector.

        Raises:
            ValueError: the catalogue has no such metric, or the metric no such label.
        """
        metric = METRICS.get(PREFIX + name)
        if metric is None:
            raise ValueError(f"There is no metric {PREFIX + name!r}; serve_app.telemetry.metric_names lists them all.")
        known = {*metric.label_names, REPLICA_LABEL, *(["le"] if metric.kind == "histogram" else [])}
        unknown = set(_LABEL.findall(where)) - known
        if unknown:
            raise ValueError(f"{metric.name} has the labels {list(metric.label_names)}, not {sorted(unknown)}.")
        inside = ",".join(part for part in (self.matchers, where) if part)
        suffix = "_bucket" if metric.kind == "histogram" else ""
        return f"{metric.name}{suffix}{{{inside}}}" if inside else f"{metric.name}{suffix}"

    def rate(self, name: str, *by: str, where: str = "") -> str:
        """A counter's increase a second, summed."""
        return f"sum{self._by(by)} (rate({self.series(name, where)}[{self.window}]))"

    def increase(self, name: str, *by: str, where: str = "") -> str:
        """A counter's increase over the window, summed. What a series counted before its first scrape is left out."""
        return f"sum{self._by(by)} (increase({self.series(name, where)}[{self.window}]))"

    def gauge(self, name: str, *by: str, how: str = "sum", where: str = "") -> str:
        """A gauge over replicas: `how` is the aggregation."""
        return f"{how}{self._by(by)} ({self.series(name, where)})"

    def ratio(self, over: str, under: str, *by: str, over_where: str = "", under_where: str = "") -> str:
        """One counter's rate by another's. A counter with labels may start with its first event: a missing one is 0."""
        numerator, denominator = self.rate(over, *by, where=over_where), self.rate(under, *by, where=under_where)
        return f"({numerator} or 0 * {denominator}) / ({denominator} > 0)"

    def share(self, name: str, where: str, *by: str) -> str:
        """The part of a counter's events that has the given labels."""
        some, all_of_them = self.events(name, *by, where=where), self.events(name, *by)
        return f"({some} or 0 * {all_of_them}) / ({all_of_them} > 0)"

    def quantile(self, q: float, name: str, *by: str) -> str:
        """A histogram's quantile."""
        return f"histogram_quantile({q:g}, {self.rate(name, 'le', *by)})"

    def events(self, name: str, *by: str, where: str = "") -> str:
        """A counter's events within the window, summed: its increase, and what a new series began with.

        A counter with labels starts with its first event, where `increase` sees nothing happen. A series is new that
        an earlier scrape lacked. Without one, as in a new Prometheus or after a gap, it may be of any age.
        """
        return events_of(self.series(name, where), self.window, (*self.keep, *by))

    def _by(self, by: tuple[str, ...]) -> str:
        return _grouped((*self.keep, *by))


def events_of(series: str, window: str, by: tuple[str, ...], scraped: tuple[str, ...] = SCRAPED) -> str:
    """A counter's events within a window, as `QueryScope.events` counts them, of any selector; `scraped`: series of
    which the same scrape always has one."""
    before = " or ".join(f"{name} offset {_STEP}" for name in scraped)
    born = f"{series} unless last_over_time({series}[15m] offset {_STEP}) and {_SAME_SCRAPE} ({before})"
    return (
        f'sum{_grouped(by)} (label_replace(increase({series}[{window}]), "part", "rise", "", "") '
        f'or label_replace(max_over_time(({born})[{window}:{_STEP}]), "part", "birth", "", ""))'
    )


def _grouped(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def acceptance(scope: QueryScope, *by: str) -> str:
    """Accepted / drafted tokens (vLLM's definition)."""
    return scope.ratio("accepted_tokens_total", "draft_tokens_total", *by)


def conditional_acceptance_by_position(scope: QueryScope) -> str:
    """Accepted / drafted at a position: right when the draft length varies too."""
    return scope.ratio("accepted_tokens_per_position_total", "draft_tokens_per_position_total", "position")


def held_out_acceptance(scope: QueryScope, *by: str) -> str:
    """Return what training measured of a draft head, the least of sampled and greedy answers."""
    return scope.gauge("held_out_acceptance_ratio", *by, how="min")


def acceptance_since_handoff(scope: QueryScope, *by: str, where: str = "") -> str:
    """Accepted / drafted tokens of clients' requests."""
    counters = "accepted_tokens_since_handoff_total", "draft_tokens_since_handoff_total"
    return scope.ratio(*counters, *by, over_where=where, under_where=where)


def acceptance_z(scope: QueryScope) -> str:
    """Accepted minus expected in standard deviations, at least as many as they are.

    A round of K drafts accepts between 0 and K, so its variance is at most K² / 4 whatever the verifier.
    """
    accepted, expected = scope.increase("accepted_tokens_total"), scope.increase("expected_accepted_tokens_total")
    drafted, drafts = scope.increase("draft_tokens_total"), scope.increase("drafts_total")
    return f"({accepted} - {expected}) * 2 * sqrt({drafts}) / ({drafted} > 0)"


def selfcheck_z(scope: QueryScope) -> str:
    """Sum of a check's zero-mean terms in standard deviations."""
    positive, negative = (scope.increase(f"selfcheck_{sign}_total", "check") for sign in _SIGNS)
    return f"({positive} - {negative}) / sqrt({scope.increase('selfcheck_square_total', 'check')} > 0)"


def untested(scope: QueryScope) -> str:
    """The share of checked rounds that no term counts, because a client named their seed, or another request had it."""
    return scope.ratio("selfcheck_untested_rounds_total", "selfcheck_rounds_total")


def tme(scope: QueryScope, where: str = "") -> str:
    """Token multiplicative probability error by stratum: mean of exp|logprob given - logprob replayed|."""
    return f"1 + {replay_mean(scope, 'replay_tme_excess_total', where)}"


def replay_mean(scope: QueryScope, total: str, where: str = "") -> str:
    """A sum over replayed tokens, by token and stratum."""
    return scope.ratio(total, "replay_tokens_total", "stratum", over_where=where, under_where=where)
