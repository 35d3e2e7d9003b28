"""The alerts: when each fires, and its runbook. Thresholds match the panels."""

from dataclasses import dataclass
from typing import Any, Literal

from dashboards import queries, recordings, shell
from dashboards.queries import QueryScope
from dashboards.recordings import KEEP, model_sum
from dashboards.sanity import REPLAY_FAILURE_LIMIT, TME_LIMIT, UNTESTED_LIMIT
from dashboards.serving import HANDOFF_FAILURE_LIMIT, NOT_OK
from serve_app.telemetry.metric_names import (
    BREAKER_STATES,
    FIRST_TOKEN_LIMIT_S,
    KV_FULL,
    REPLAY_LAG_LIMIT_S,
    TURNED_AWAY_LIMIT,
)

RUNBOOKS = "docs/runbooks.md"

_MODEL = "{{ $labels.model_name }}"
_IN_NAMESPACE = "{{ with $labels.namespace }} in {{ . }}{{ end }}"
_OF_JOB = "{{ with $labels.job }} (job {{ . }}){{ end }}"
_15M, _30M, _1H = (QueryScope("", window, KEEP) for window in ("15m", "30m", "1h"))
_POOL = QueryScope("", "1h", (*KEEP, "pool"))
_REPLICA = QueryScope("", "1h", (*KEEP, "pool", "replica"))
_THRESHOLD, _MINIMUM = "$threshold", "$minimum"  # in an expression: what the chart's values may change


def _told(label: str, value: str, expr: str) -> str:
    """An expression whose series say in a label which part of an alert they are."""
    return f'label_replace({expr}, "{label}", "{value}", "", "")'


def _share(some: str, all_of_them: str, threshold: str = _THRESHOLD) -> str:
    """A share beyond the threshold, of at least the minimum of events."""
    return f"({some} / ({all_of_them} > 0) > {threshold} and {some} >= {_MINIMUM})"


# Acceptance
_EARLY, _LATE = 'since_handoff=~"0|1|2_3"', 'since_handoff="8_up"'
_SINCE = "draft_tokens_since_handoff_total"
_HALF = 0.5  # of what a head accepted in training, or accepts long after a handoff
_ACCEPTANCE_LOW = " or ".join(
    (
        _told(
            "than",
            "in the last hours",
            f"{recordings.ACCEPTANCE} < {_THRESHOLD} * avg_over_time({recordings.ACCEPTANCE}[6h] offset 30m) "
            f"and {recordings.DRAFT_TOKENS} > {_MINIMUM}",
        ),
        _told(
            "than",
            "in training",
            f"{queries.conditional_acceptance_by_position(_1H)} < "
            f"{_HALF} * {queries.held_out_acceptance(_1H, 'position')} "
            f"and {_1H.increase('draft_tokens_per_position_total', 'position')} > {_MINIMUM}",
        ),
        _told(
            "than",
            "long after handoffs",
            f"{queries.acceptance_since_handoff(_1H, where=_EARLY)} < "
            f"{_HALF} * {queries.acceptance_since_handoff(_1H, where=_LATE)} "
            f"and {_1H.increase(_SINCE, where=_EARLY)} > {_MINIMUM} "
            f"and {_1H.increase(_SINCE, where=_LATE)} > {_MINIMUM} "
            # Drafters without weights draft better as a text grows.
            f"and on ({', '.join(KEEP)}) "
            + _1H.gauge("build_info", where='drafter=~"draft_model|eagle3|mtp"', how="count"),
        ),
    )
)

# Replays
_NOT_REPLAYED, _ALL_REPLAYS = model_sum(f"{recordings.REPLAYS}{{{NOT_OK}}}"), model_sum(recordings.REPLAYS)
_RECENT_FAILURES = _1H.gauge("recent_replay_failures", "answered_by")
_WATCHED = "watched_requests_total"
_WATCHED_SERIES = _1H.series(_WATCHED)  # of a referee, from its start on
_LEFT_OUT, _SHOWN = 'result=~"dropped|failed"', 'result=~"captured|dropped|failed"'
_CHOSEN = 'result=~"captured|dropped|failed|refused|too_large|broken_off"'  # to be watched
_OF_WATCHED = "For a server that `truespec watch` watches: "

# Requests and replicas
_ALL_REQUESTS = model_sum(recordings.REQUESTS)
_ERROR, _SERVER_ERROR = 'outcome="error"', 'code=~"5..",code!="503"'  # 503 is TruespecRequestsTurnedAway's
_ROUTER = 'pool="router"'
_HAS_ROUTER = _1H.gauge("replicas_wanted", how="max", where=_ROUTER) + " > 0"
_LOST = (  # behind a router only its own: it resumes or fails what is lost elsewhere
    f"({_15M.events('requests_interrupted_total', where=_ROUTER)} "
    f"or {_15M.events('requests_interrupted_total')} unless {_HAS_ROUTER}) >= {_MINIMUM}"
)
_FAILED_PREFILLS = model_sum(f'{recordings.PREFILL_FAILURES}{{reason!="full"}}')  # a full pool's handoffs fail
_PREFILLS = f"({_FAILED_PREFILLS} + ({model_sum(recordings.HANDOFFS)} or 0 * {_FAILED_PREFILLS}))"
_FAILED_HANDOFFS = model_sum(f"{recordings.HANDOFFS}{{{NOT_OK}}}")
_BUILD, _WANTED_SERIES = _1H.series("build_info"), _1H.series("replicas_wanted")  # of replicas, and of the controller
_WANTED, _RUNNING = (_POOL.gauge(f"replicas_{which}", how="max") for which in ("wanted", "running"))
_BY_POOL = f"max by ({', '.join(_POOL.keep)})"
_RUNNING_SERIES = _POOL.series("replicas_running")
_LOADED = (  # a pool that is being installed loads its model: it has run within the hour, or has been there for longer
    f"({_BY_POOL} (max_over_time({_RUNNING_SERIES}[1h])) > 0 "
    f"or {_BY_POOL} (present_over_time({_RUNNING_SERIES}[1h] offset 1h)))"
)
_EXPORTS = (_BUILD, _WANTED_SERIES, _WATCHED_SERIES)  # one of these has whatever exports anything
_ANY = " or ".join(_EXPORTS)
_ANY_LATELY = " or ".join(f"present_over_time({series}[6h])" for series in _EXPORTS)
_NONE_LATELY = " and ".join(f"absent_over_time({series}[6h])" for series in _EXPORTS)
_NONE_NOW = f"count by (job, namespace) ({_ANY_LATELY}) unless count by (job, namespace) ({_ANY})"

# Ray's own, of the proxies before the replicas, and of Ray Serve's controller, which outlives all replicas. They know
# no model; jobs and namespaces are the releases'.
_RELEASE = ("job", "namespace")
_OF_RELEASE = f"by ({', '.join(_RELEASE)})"
_PROXIED = "ray_serve_num_http_requests_total"
_ALL_PROXIED = queries.events_of(_PROXIED, "15m", _RELEASE)
_BAD_GATEWAY = queries.events_of(f'{_PROXIED}{{status_code=~"5..",status_code!="503"}}', "15m", _RELEASE)
_IS_RELEASE = f"and count {_OF_RELEASE} (present_over_time({_WANTED_SERIES}[1h]))"  # ours come by the same proxies
_HAPROXIES = "ray_serve_haproxy_process_count"  # on one node; 0 once its process is dead
_PROXIES_GONE = f"count {_OF_RELEASE} (present_over_time({_HAPROXIES}[1h])) unless count {_OF_RELEASE} ({_HAPROXIES})"
_RUNS = 6  # Ray's number for an application that runs; lower: it starts, is deployed, or is unhealthy
_STATUS = "ray_serve_application_status"
_NO_REPLICA_ANSWERS = (
    f"count {_OF_RELEASE} (present_over_time({_WANTED_SERIES}[6h])) unless count {_OF_RELEASE} ({_WANTED_SERIES}) "
    f"and count {_OF_RELEASE} ({_STATUS} < {_RUNS})"
)
_FIRST_START = f"({_STATUS} < {_RUNS} unless present_over_time({_STATUS}[1h] offset 1h))"  # an hour to load a model
_PASSED, _READ = 'result="passed"', 'result="read"'
_FAILED = 'result="failed"'
_OPEN = BREAKER_STATES.index("open")


@dataclass(frozen=True, slots=True)
class Alert:
    """The condition of an alert, and what its reader needs to know.

    `summary` may quote the alert's labels; the namespace, if any, is appended to the model's name. `expr` may have
    `$threshold` and `$minimum` (how many events there must be at least), whose defaults are given here.
    """

    name: str
    expr: str
    hold: str  # how long it must hold
    severity: Literal["critical", "warning", "info"]
    summary: str
    means: str
    look: str
    do: str
    commands: tuple[str, ...]  # bash, after `shell.SETUP`
    threshold: float | None = None
    minimum: int | None = None

    @property
    def limits(self) -> dict[str, float]:
        """Those of threshold and minimum that it has."""
        limits = {"threshold": self.threshold, "minimum": self.minimum}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def default_expr(self) -> str:
        """The expression with its default limits."""
        expr = self.expr
        for name, value in self.limits.items():
            expr = expr.replace(f"${name}", f"{value:g}")
        return expr

    def as_dict(self) -> dict[str, Any]:
        """Return the form of a rule file."""
        summary = self.summary.replace(_MODEL, _MODEL + _IN_NAMESPACE)
        severity: str = self.severity
        if '"rehearsed"' in self.expr:  # what is rehearsed pages nobody
            severity = f"{{{{ if $labels.rehearsed }}}}info{{{{ else }}}}{severity}{{{{ end }}}}"
        return {
            "alert": self.name,
            "expr": self.default_expr,
            "for": self.hold,
            "labels": {"severity": severity},
            "annotations": {"summary": summary, "runbook": f"{RUNBOOKS}#{self.name.lower()}"},
        }

    def for_chart(self) -> dict[str, Any]:
        """Return the form that the chart reads: limits that its values may change stand beside the expression."""
        return self.as_dict() | {"expr": self.expr} | self.limits


ALERTS = (
    Alert(
        "TruespecAcceptanceLow",
        _ACCEPTANCE_LOW,
        "15m",
        "warning",
        "Acceptance of {{ $labels.model_name }}{{ with $labels.position }} at position {{ . }}{{ end }} is "
        "{{ $value | humanizePercentage }}, far below that {{ $labels.than }}.",
        "Fewer drafts are accepted than in the hours before (the threshold's share of it), than training found of the "
        "head on held-out answers, or right after handoffs than later on (half of it, both). Output stays correct, "
        "but is slower.",
        "The acceptance page. Observed departs from expected: treat it as TruespecSelfCheckAlarm. Low only after "
        "handoffs: the drafter's keys and values are lost or wrong there. Low since a weight update: the head belongs "
        "to other weights. Low throughout: the head gets wrong features, or the traffic is far from its training.",
        "Roll back what changed last, bring both pools to one version and one drafter, and update a head with the "
        "weights. If only the traffic changed, train the head on it, choose another drafter, or `drafter.length: "
        "dynamic`.",
        commands=(
            shell.promql("model:truespec_acceptance:ratio_rate10m{}"),
            shell.promql("model_position:truespec_acceptance:ratio_rate10m{}"),
            shell.promql("truespec_held_out_acceptance_ratio{}"),
            shell.promql(
                "sum by (since_handoff, weights) (increase(truespec_accepted_tokens_since_handoff_total{}[1h])) "
                "/ sum by (since_handoff, weights) (increase(truespec_draft_tokens_since_handoff_total{}[1h]))"
            ),
            shell.VERSIONS,
            shell.HISTORY,
        ),
        threshold=0.7,
        minimum=1000,
    ),
    Alert(
        "TruespecSelfCheckAlarm",
        _15M.events("selfcheck_alarms_total", "check") + " > 0",
        "0m",
        "critical",
        "Self-check {{ $labels.check }} of {{ $labels.model_name }} raised an alarm.",
        "A quantity whose mean is 0 in a correct sampler has another mean: the output does not follow the model's "
        "distribution. A false alarm has a probability of 1e-6 per check over a replica's life. Seeds that clients "
        "name take no part.",
        "The check that fired (docs/metrics.md lists what each covers), and since when. The acceptance page: which "
        "position.",
        "The breaker switches speculation off. Leave it off, keep the dump, roll back the last release, and mask "
        "answers from that window in training data.",
        commands=(
            shell.SPECULATION_OFF,
            shell.REPLICAS,
            shell.promql("model_check:truespec_selfcheck:z_increase1h{}"),
            shell.logged("tripped|self-check"),
            shell.HISTORY,
        ),
    ),
    Alert(
        "TruespecTmeHigh",
        f"{recordings.TME} > {_THRESHOLD} and {recordings.REPLAY_TOKENS} > {_MINIMUM}",
        "5m",
        "critical",
        "TME of {{ $labels.model_name }} is {{ $value | humanize }} in stratum {{ $labels.stratum }}.",
        "Served logprobs differ from those of a plain recomputation.",
        "The logprob sanity page: the stratum that stands out points to the fault (after a handoff, near the length "
        "limit, prefix-cached, drafted). The drift quantiles show whether only a few tokens are far off. If all "
        "strata are alike, suspect the model, its dtype, or different models in the two pools.",
        "Stop training and scoring on these logprobs, and switch speculation off. If that does not help, roll both "
        f"pools back to one version and restart the replicas, which clears the prefix cache. {_OF_WATCHED}give the "
        "referee the server's weights and dtype, and calibrate `--tolerance` on this model.",
        commands=(
            shell.SPECULATION_OFF,
            shell.promql("model_stratum:truespec_tme:mean_rate1h{}"),
            shell.LATEST_REPLAYS,
            shell.WATCH_FINDINGS,
            shell.VERSIONS,
            shell.HISTORY,
        ),
        threshold=TME_LIMIT,
        minimum=500,
    ),
    Alert(
        "TruespecReplayAlarm",
        _15M.events("replay_alarms_total", "alarm", "stratum") + " > 0",
        "0m",
        "critical",
        "Replays of {{ $labels.model_name }} raised the alarm {{ $labels.alarm }} in stratum {{ $labels.stratum }}.",
        "Replayed requests show, beyond chance, that logprobs are off (drift), that the text does not follow the "
        "model's distribution (probability, surprisal, support, greedy, impossible), that it is not what its seeds "
        "demand (draws), or that the reply is not what the request and the engine's tokens make of it (wire).",
        "The logprob sanity page, and the referee's dump: request ids, positions, served and replayed values. "
        f"{_OF_WATCHED}the referee's page, which says what to do about the test that fired; nothing is switched off "
        "for you.",
        "Check that the breaker has switched speculation off. Mask answers from that window whose verdict is "
        "suspect, and look for the fault in the dump. For wire, roll the front end back: its verdict's reason names "
        "what differs, and no draft is the cause.",
        commands=(
            shell.REPLICAS,
            shell.LATEST_REPLAYS,
            shell.WATCH_FINDINGS,
            shell.logged("is suspect|replays show"),
            shell.HISTORY,
        ),
    ),
    Alert(
        "TruespecIndependentRefereeDisagrees",
        _15M.events("independent_replays_total", where='result="disagrees"') + " > 0",
        "0m",
        "critical",
        "transformers does not find what {{ $labels.model_name }} answers.",
        "The engine's own replay verified an answer, and transformers computes another one from the same weights. "
        "Either something that all forward passes of the engine share is wrong (model code, kernels, a setting read "
        "from config.json), or rounding is larger than it should be.",
        "The referee's log and dump: the reason, the tokens, and how far their logprobs are off. `truespec verify "
        "--engine transformers` repeats the check from a receipt of any answer, on any machine.",
        "Roll back the last release, or the kernels that came with it, and mask answers since then for training. If "
        "all logprobs are a little off (FP8, a new GPU), only rounding is large: raise `replay.edge_nats`.",
        commands=(shell.logged("transformers|is suspect"), shell.LATEST_REPLAYS, shell.HISTORY),
    ),
    Alert(
        "TruespecRefereeMissesFaults",
        _15M.events("referee_controls_total", "change", where='result="missed"') + " > 0",
        "0m",
        "critical",
        "The referee of {{ $labels.model_name }} called an answer verified that was made wrong on purpose "
        "({{ $labels.change }}).",
        "One in fifty verified answers is judged again with a change that no sound referee overlooks, and this "
        "change was overlooked. For token or seed, replays come without each token's distribution. For logprobs, "
        "the tolerance is far too large. For alternatives or limit, other tokens' logprobs or the client's limits "
        "are no longer compared. What this referee verified since then may be wrong.",
        "The referee's log: `referee missed the change` names the answer and the replica that replayed it. The "
        "controls on the sanity page: since when, and whether all kinds are missed.",
        "Replace the replica that replays, or roll back the last release. Treat verified answers as unverified "
        "until controls are found again. If only logprobs are missed, look at `replay.max_tme`, `replay.edge_nats` "
        "or the file of `--tolerance`.",
        commands=(
            shell.promql("sum by (change, result) (increase(truespec_referee_controls_total{}[1h]))"),
            shell.logged("referee missed the change"),
            shell.watch_logged("referee", "referee missed the change"),
            shell.HISTORY,
        ),
    ),
    Alert(
        "TruespecRuleBroken",
        " or ".join(_15M.events(f"{of}_violations_total", "kind") + " > 0" for of in ("selfcheck", "logprob")),
        "0m",
        "critical",
        "A step of {{ $labels.model_name }} broke the rule {{ $labels.kind }}.",
        "The engine broke one of its own rules within a step, or logprobs broke their contract (not finite, above 0, "
        "not sorted, one token with two values). The request was failed; nothing wrong was delivered.",
        "The replica's log names the request; docs/metrics.md explains the kinds. not_finite on a single replica "
        "points to its GPU or memory.",
        "Remove the replica if only one is affected; roll back if it started with a release.",
        commands=(
            shell.promql("sum by (pool, kind) (increase(truespec_selfcheck_violations_total{}[1h])) > 0"),
            shell.promql("sum by (pool, kind) (increase(truespec_logprob_violations_total{}[1h])) > 0"),
            shell.logged("invariant|logprob"),
            shell.PODS,
        ),
    ),
    Alert(
        "TruespecUntestedShare",
        f"{queries.untested(_1H)} > {_THRESHOLD} and {_1H.increase('selfcheck_rounds_total')} > {_MINIMUM}",
        "30m",
        "info",
        "{{ $value | humanizePercentage }} of the rounds of {{ $labels.model_name }} add nothing to its self-checks.",
        "Nearly all requests name their seed. A seed may be chosen for what it gives, so the zero-mean checks get no "
        "evidence. Each draw is still checked against its random number.",
        "The logprob sanity page: rounds untested, and since when. Find the clients that send a seed.",
        "Ask clients to send a seed only where they need one. Rely on replays meanwhile.",
        commands=(
            shell.promql(
                "sum(rate(truespec_selfcheck_untested_rounds_total{}[1h])) "
                "/ sum(rate(truespec_selfcheck_rounds_total{}[1h]))"
            ),
        ),
        threshold=UNTESTED_LIMIT,
        minimum=1000,
    ),
    Alert(
        "TruespecBreakerOpen",
        f"{_REPLICA.gauge('breaker_state', how='max')} >= {_OPEN} or "
        + _told("rehearsed", "true", _15M.events("breaker_trips_total", "pool", where='reason="rehearsal"') + " > 0"),
        "1m",
        "critical",
        'The breaker of {{ or $labels.replica "a replica" }} ({{ $labels.model_name }}, {{ $labels.pool }}) '
        "{{ if $labels.rehearsed }}was{{ else }}is{{ end }} open{{ if $labels.rehearsed }} for a rehearsal{{ end }}.",
        "A fault was found on this replica. It serves without speculation, or is being taken out of service.",
        "Trips by reason on the logprob sanity page, and what fired just before.",
        "Answers are correct meanwhile, but slower. If canaries keep failing, the fault persists: replace the "
        "replica, or roll back if several breakers are open.",
        commands=(
            shell.REPLICAS,
            shell.promql("sum by (reason) (increase(truespec_breaker_trips_total{}[1h])) > 0"),
            shell.promql("sum by (result) (increase(truespec_canaries_total{}[1h]))"),
            shell.logged("tripped|canary"),
        ),
    ),
    Alert(
        "TruespecRefereeBehind",
        " or ".join(
            (
                _told("what", "answers late", f"{_1H.gauge('replay_lag_seconds', how='max')} > {_THRESHOLD}"),
                _told("what", "not all answers", _share(_NOT_REPLAYED, _ALL_REPLAYS, f"{REPLAY_FAILURE_LIMIT}")),
                _told(
                    "what",
                    "not all it is sent",
                    _share(_15M.events(_WATCHED, where=_LEFT_OUT), _15M.events(_WATCHED, where=_SHOWN), "0.2"),
                ),
            )
        ),
        "10m",
        "warning",
        "The referee of {{ $labels.model_name }} checks {{ $labels.what }}.",
        "A fault would be noticed late or not at all: the oldest answer has waited for its replay beyond the "
        "threshold, half of the replays do not complete, or a fifth of what the proxies of `truespec watch` capture "
        "is left out.",
        "Replays by result, lag, and how busy the prefill pool is. Skipped: the queue is full. Failed: two attempts "
        "did not compute them. Watched requests dropped: how busy the referee is; failed: it has another version than "
        "the proxies, or something else answers at its URL.",
        f"Lower `replay.sample_rate`, or add prefill replicas. {_OF_WATCHED}lower the share of its proxies, or give "
        "the referee more cores, a GPU or replicas. The log of a referee that fails says why.",
        commands=(
            shell.promql("truespec_replay_lag_seconds{}"),
            shell.promql("model_result:truespec_replays:increase15m{}"),
            shell.promql("sum by (pool) (truespec_requests_waiting{})"),
            shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[15m])) > 0"),
            shell.WATCH_COUNTS,
            shell.logged("replay of .* failed"),
            shell.watch_logged("referee", "replay of .* failed"),
        ),
        threshold=REPLAY_LAG_LIMIT_S,
        minimum=5,
    ),
    Alert(
        "TruespecReplaysOfOneReplicaFail",
        f"{_RECENT_FAILURES} / {_1H.gauge('recent_replays', 'answered_by')} > {_THRESHOLD} "
        f"and {_RECENT_FAILURES} >= {_MINIMUM}",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the replays of answers by {{ $labels.answered_by }} "
        "({{ $labels.model_name }}) failed twice.",
        "Answers of this replica cannot be replayed, so nothing checks them, and the answers may be the reason.",
        "The controller's log: `replay of ... failed` names the replica that replayed, and its error. If the error "
        "is always the same, reproduce it with one of these requests. If all replicas are alike, see "
        "TruespecRefereeBehind.",
        "Replace the replica if others' answers are replayed without errors. Treat its answers as unverified until "
        f"the cause is known. {_OF_WATCHED}see whether the referee has the server's longest length and vocabulary.",
        commands=(
            shell.promql("sum by (answered_by) (truespec_recent_replays{})"),
            shell.promql("sum by (answered_by) (truespec_recent_replay_failures{}) > 0"),
            shell.logged("replay of .* failed"),
            shell.watch_logged("referee", "replay of .* failed"),
            shell.SERVE_STATUS,
        ),
        threshold=REPLAY_FAILURE_LIMIT,
        minimum=5,
    ),
    Alert(
        "TruespecRefereeSilent",
        f"({_30M.events('replays_requested_total')} >= {_MINIMUM} unless {_30M.events('replays_total')} > 0) "
        f"or ({_1H.gauge('build_info', how='count')} unless {_1H.gauge('replay_lag_seconds', how='count')})",
        "10m",
        "critical",
        "Nothing replays the answers of {{ $labels.model_name }}.",
        "Answers are selected for a replay and none is replayed, or the controller, which has them replayed, "
        "exports nothing. Wrong logprobs would go unnoticed.",
        "Whether the controller runs, and what it logs; whether the prefill pool has replicas.",
        "Kill what is stuck: Ray Serve replaces it. Treat answers as unverified until replays are back.",
        commands=(
            shell.promql("sum(increase(truespec_replays_requested_total{}[30m]))"),
            shell.promql("sum by (result) (increase(truespec_replays_total{}[30m]))"),
            shell.SERVE_STATUS,
            shell.logged("referee|replay"),
        ),
        minimum=10,
    ),
    Alert(
        "TruespecHandoffsFail",
        _told("what", "handoffs", _share(_FAILED_HANDOFFS, model_sum(recordings.HANDOFFS)))
        + " or "
        + _told("what", "prefills", _share(_FAILED_PREFILLS, _PREFILLS)),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the {{ $labels.what }} of {{ $labels.model_name }} were refused or "
        "failed.",
        "Prefill replicas die, hang or fail on requests, or decode replicas cannot use what they send, and prompts are "
        "computed again. Answers are correct, but their first token comes late, and the work is paid for twice.",
        "The disaggregation page. Refusals: versions and fingerprints under Running versions. Failed prefills: "
        "timeout means that the pool is too slow for its prompts or a replica hangs, died that replicas restart, "
        "engine that one kind of request fails, which the replicas' logs name.",
        "Bring both pools to one version and one model. timeout: add prefill replicas, limit prompts, or raise "
        "`recovery.prefill_timeout_s`. died: see TruespecReplicasRestart. engine: follow the error in the log.",
        commands=(
            shell.promql("model_result:truespec_handoffs:increase15m{}"),
            shell.promql("sum by (reason) (increase(truespec_handoff_refusals_total{}[15m])) > 0"),
            shell.promql("model_reason:truespec_prefill_failures:increase15m{} > 0"),
            shell.logged("prefill of .* failed"),
            shell.VERSIONS,
            shell.PODS,
        ),
        threshold=HANDOFF_FAILURE_LIMIT,
        minimum=5,
    ),
    Alert(
        "TruespecTimeToFirstTokenHigh",
        f"{recordings.FIRST_TOKEN_P95} > {_THRESHOLD} and {recordings.FIRST_TOKENS} >= {_MINIMUM}",
        "10m",
        "warning",
        "p95 of the time to first token of {{ $labels.model_name }} is {{ $value | humanizeDuration }}.",
        "Clients wait long for the first token.",
        "The latency page: whether the queue or the prompts take the time; prefix cache hits; handoff times.",
        "Add prefill replicas (or replicas of a monolith), limit prompt lengths, or look for a lost replica.",
        commands=(
            shell.promql("model_pool:truespec_time_to_first_token_seconds:p95_rate5m{}"),
            shell.promql("sum by (pool) (truespec_requests_waiting{})"),
            shell.promql(
                "sum(rate(truespec_prefix_cache_hits_total{}[5m])) "
                "/ sum(rate(truespec_prefix_cache_queries_total{}[5m]))"
            ),
            shell.PODS,
        ),
        threshold=FIRST_TOKEN_LIMIT_S,
        minimum=20,
    ),
    Alert(
        "TruespecRequestErrors",
        " or ".join(
            (
                _share(model_sum(f"{recordings.REQUESTS}{{{_ERROR}}}"), _ALL_REQUESTS),
                _share(model_sum(f"{recordings.RESPONSES}{{{_SERVER_ERROR}}}"), model_sum(recordings.RESPONSES)),
                f"({_share(_BAD_GATEWAY, _ALL_PROXIED)} {_IS_RELEASE})",
            )
        ),
        "5m",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of the requests{{{{ with $labels.model_name }}}} of "
        f"{{{{ . }}}}{{{{ end }}}}{_IN_NAMESPACE} end in an error.",
        "Requests fail in the engine, miss their deadline, or are answered with a 5xx other than 503. Without a "
        "model's name: Ray Serve's proxy counts these; if no other series fires, the replica behind it died or could "
        "not be reached.",
        "The replicas' logs by request id; broken rules on the logprob sanity page; restarts of replicas; HAProxy's "
        "log.",
        "Follow the error in the logs. Missed deadlines call for more replicas or a higher "
        "`limits.request_timeout_s`. If the replicas are well, restart the pod whose proxy gives the errors.",
        commands=(
            shell.promql("model_code:truespec_http_responses:increase15m{}"),
            shell.promql("model_outcome:truespec_requests:increase15m{}"),
            shell.promql("sum by (status_code, application) (increase(ray_serve_num_http_requests_total[15m])) > 0"),
            shell.logged(' failed|" 5[0-9][0-9]|error'),
            shell.DEAD_ACTORS,
        ),
        threshold=0.01,
        minimum=5,
    ),
    Alert(
        "TruespecReplicasRestart",
        _told("what", "replicas", f"{_POOL.events('replica_restarts_total')} >= {_THRESHOLD}")
        + " or "
        + _told("what", "requests", _LOST),
        "0m",
        "warning",
        "{{ $value | humanize }} {{ $labels.what }} of {{ $labels.model_name }}{{ with $labels.pool }} in pool "
        "{{ . }}{{ end }} were lost.",
        "Replicas die or fail their health check, and Ray Serve starts others. Clients of their requests got an error "
        "without JSON from the proxy, or a stream that was cut, unless a router resumed it elsewhere. Requests: at "
        "least the minimum in 15 minutes; replicas: at least the threshold in an hour.",
        "The cause of their death: out of memory (the pod's last state), a CUDA error, an engine fault, or a "
        "breaker that is out (the replica's log). If it is always one node, suspect its hardware.",
        "Give replicas more memory or fewer sequences. Cordon a faulty node. Roll back if it began with a release. "
        "With `recovery.resume` a router (`pools.router`) continues such streams on another replica.",
        commands=(
            shell.promql("sum by (pool) (increase(truespec_replica_restarts_total{}[1h]))"),
            shell.promql("sum by (pool) (increase(truespec_requests_interrupted_total{}[15m]))"),
            shell.DEAD_ACTORS,
            shell.PODS,
            shell.logged("CUDA|out of memory|EngineFault|tripped"),
            shell.SERVE_STATUS,
        ),
        threshold=3,
        minimum=1,
    ),
    Alert(
        "TruespecProxyDown",
        f"(count {_OF_RELEASE} ({_HAPROXIES} == 0) or {_PROXIES_GONE}) {_IS_RELEASE}",
        "1m",
        "critical",
        f"Ray Serve's proxy is down on {{{{ $value }}}} nodes{_IN_NAMESPACE}{_OF_JOB}.",
        "HAProxy does not run there. Connections are refused, and get 404 while it comes back, although the "
        "replicas are well. With one decoding pod this is an outage.",
        "Ray Serve notices within half a minute and starts another. If none starts, its controller's log says why.",
        "Restart the pod if the proxy does not come back. `ray.haproxy: false` uses Serve's own proxy, which is "
        "slower.",
        commands=(
            shell.promql("ray_serve_haproxy_process_count > 0"),
            shell.promql("ray_serve_proxy_status > 0"),
            shell.SERVE_STATUS,
            shell.PODS,
        ),
    ),
    Alert(
        "TruespecRequestsTurnedAway",
        _share(recordings.TURNED_AWAY, model_sum(recordings.RESPONSES)),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} are turned away.",
        "Clients get 429 or 503 for want of room, not because of their own limits.",
        "The overview: refusals by reason. load, queued_tokens, time_to_first_token and deadline mean more traffic "
        "than the service is sized for. capacity with few requests running means that long answers hold the places. "
        "503 means that replicas stop or die. With no replica left Ray Serve's proxy refuses by itself, which is "
        "not counted here (TruespecPoolEmpty).",
        "Add replicas of the decoding pool, or of prefill if time_to_first_token leads. Raise a limit only if "
        "latency has room.",
        commands=(
            shell.promql("sum by (reason) (increase(truespec_refusals_total{}[15m])) > 0"),
            shell.promql("model_code:truespec_http_responses:increase15m{}"),
            shell.promql("truespec_replicas_running{} / truespec_replicas_wanted{}"),
            shell.promql("sum by (pool) (truespec_requests_running{})"),
        ),
        threshold=TURNED_AWAY_LIMIT,
        minimum=20,
    ),
    Alert(
        "TruespecPoolEmpty",
        f"{_RUNNING} == 0 and {_WANTED} > 0 and {_LOADED} or {_NO_REPLICA_ANSWERS}",
        "2m",
        "critical",
        "{{ with $labels.pool }}No replica of {{ $labels.model_name }} runs in pool {{ . }}.{{ else }}No replica "
        f"answers{_IN_NAMESPACE}{_OF_JOB}.{{{{ end }}}}",
        "Without a decoding replica nothing is served. Without a prefill replica decode replicas compute prompts "
        "themselves, and nobody replays answers, so a fault would go unnoticed. A pool that is installed has an "
        "hour to load its model. Without a pool's name: the metrics are gone with the last replica that answers HTTP, "
        "and Ray Serve says that the application does not run.",
        "`serve status` has the message of the last replica that failed to start. Pending pods lack GPUs or nodes.",
        "Fix what the message names, or give the pods their nodes. Roll back if it began with a release.",
        commands=(shell.SERVE_STATUS, shell.PODS, shell.EVENTS, shell.RAY_STATUS, shell.DEAD_ACTORS, shell.HISTORY),
    ),
    Alert(
        "TruespecReplicasMissing",
        f"{_WANTED} - {_RUNNING} > {_THRESHOLD}",
        "15m",
        "warning",
        "{{ $value }} of the replicas of {{ $labels.model_name }} in pool {{ $labels.pool }} have been missing for a "
        "while.",
        "Ray Serve wants more replicas than run: the pool has less room than it should.",
        "As for TruespecPoolEmpty. With autoscaling, see whether the cluster can still add nodes. While a "
        "configuration is rolled out, one replica is missing as long as each new one loads.",
        "Fix what `serve status` names, or want fewer replicas.",
        commands=(
            shell.promql("truespec_replicas_wanted{} - truespec_replicas_running{}"),
            shell.SERVE_STATUS,
            shell.PODS,
            shell.RAY_STATUS,
        ),
        threshold=0,
    ),
    Alert(
        "TruespecKvCacheFull",
        _told("what", "KV cache in use", f"min_over_time({recordings.KV_USAGE}[5m]) > {_THRESHOLD}")
        + " or "
        + _told("what", "preemptions a request", _share(_15M.events("preemptions_total"), _ALL_REQUESTS, "0.1")),
        "10m",
        "warning",
        "{{ $labels.model_name }} lacks KV memory{{ with $labels.pool }} in pool {{ . }}{{ end }}: "
        "{{ $value | humanizePercentage }} {{ $labels.what }}.",
        "A replica has no KV blocks left: drafts are cut, requests wait, and sequences lose their keys and values and "
        "are computed again. Answers are correct, but stall.",
        "KV cache in use on the overview, of one replica or all; preemptions on the latency page; the lengths of "
        "prompts.",
        "Add replicas of the pool, or limit prompts and answers (`limits.max_prompt_tokens`). Raise "
        "`engine.kv_cache_tokens` if the replica has memory left.",
        commands=(
            shell.promql("truespec_kv_cache_usage_ratio{}"),
            shell.promql("sum by (pool) (increase(truespec_preemptions_total{}[15m]))"),
            shell.promql("sum by (pool, replica) (truespec_requests_running{})"),
        ),
        threshold=KV_FULL,
        minimum=10,
    ),
    Alert(
        "TruespecWatchedServerUnreachable",
        _share(_15M.events(_WATCHED, where='result="unreachable"'), _15M.events(_WATCHED)),
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} find no server behind the "
        "proxy.",
        "The proxy of `truespec watch` answers 502: it cannot connect to the server, or loses the connection before "
        "an answer begins.",
        "Whether the watched server runs and is ready, whether the proxy's URL is its service's, and network "
        "policies between the two.",
        "Bring the server back. If it answers when asked directly, point clients past the proxy, and fix the "
        "proxy's URL.",
        commands=(
            shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[15m])) > 0"),
            shell.watch_logged("proxy", "reach|connect"),
            shell.PODS,
        ),
        threshold=0.05,
        minimum=5,
    ),
    Alert(
        "TruespecWatchBlind",
        f"({_30M.events(_WATCHED, where=_CHOSEN)} >= {_MINIMUM} or {_30M.events(_WATCHED, where=_PASSED)} "
        f">= 500 * {_MINIMUM}) unless {_30M.events('watched_answers_total', where=_READ)} > 0",
        "10m",
        "critical",
        "Requests for {{ $labels.model_name }} pass the proxy, and no answer can be judged.",
        "The server answers and nothing watches it: no request is chosen, the server does not report token ids and "
        "logprobs, its answers cannot be read, or none reaches the referee.",
        "Requests by result on the logprob sanity page. Passed only: the share is 0, or clients use other endpoints "
        "than completions. Refused: the server does not know the fields that the proxy adds, or may not report "
        "logprobs. Captured: the referee's report says why it cannot read them.",
        "Give the proxy a share above 0 and the server's `--dialect`. Start the server so that it may report "
        "logprobs (`--max-logprobs` of vLLM). Give the referee the model that is served.",
        commands=(
            shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[30m])) > 0"),
            shell.promql("sum by (result) (increase(truespec_watched_answers_total{}[30m])) > 0"),
            shell.WATCH_COUNTS,
            shell.watch_logged("proxy", "refus|dialect"),
        ),
        minimum=20,
    ),
    Alert(
        "TruespecKeysStale",
        f"{_15M.events('key_file_reloads_total', where=_FAILED)} > 0",
        "0m",
        "warning",
        "The changed API key file of {{ $labels.model_name }} is invalid.",
        "The previous keys stay in effect: a new key does not work yet, and a revoked one still does.",
        "The replicas' logs, which name the file, the field and the fix.",
        "Fix the file, or generate another with `truespec keys`. It is read again within a second.",
        commands=(shell.logged("key"), 'kubectl -n "$NAMESPACE" get secret -o name'),
    ),
    Alert(
        "TruespecNoTraffic",
        " or ".join(
            f"({_30M.events(counter)} == 0 and {model_sum(f'increase({_1H.series(counter)}[6h] offset 30m)')} > 0)"
            for counter in ("requests_total", _WATCHED)
        ),
        "5m",
        "info",
        "No request for {{ $labels.model_name }} has finished for half an hour.",
        "A model that had traffic has none: no requests are sent, or none get through. Of a watched server: or they "
        "go past the proxies, or the proxies cannot reach the referee.",
        "The path to the service (gateway, proxy, DNS); requests that run and never finish; what the proxies log.",
        "Send a request by hand, to a watched server through its proxy. If it is answered and counted, traffic has "
        "simply stopped.",
        commands=(
            'curl -sS -o /dev/null -w "%{http_code}\\n" "$HOST/healthz"',
            'curl -sS "$HOST/v1/models" | jq -c .',
            shell.SERVE_STATUS,
            shell.WATCH_COUNTS,
            shell.watch_logged("proxy", "referee"),
        ),
    ),
    Alert(
        "TruespecMetricsMissing",
        f"({_NONE_LATELY} unless on () {_FIRST_START}) or ({_NONE_NOW})",
        "10m",
        "critical",
        f"Prometheus has no metrics from truespec{_IN_NAMESPACE}{_OF_JOB}.",
        "A release that had metrics within the last six hours has none now, or no release has any. No replica "
        "answers HTTP, or none is scraped, and every other alert is blind.",
        "Prometheus' targets page, and whether the service answers /healthz. If the release was removed or its job "
        "renamed on purpose, the alert clears by itself after six hours.",
        "Fix the scrape configuration (the job; a key where `access.open_metrics` is false), or start the service.",
        commands=(
            shell.TARGETS,
            'curl -sS "$HOST/metrics" | grep -c ^truespec_',
            shell.PODS,
            'kubectl -n "$NAMESPACE" get podmonitor -l "$PODS" -o name',
        ),
    ),
)
