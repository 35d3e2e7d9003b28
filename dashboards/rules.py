"""Recording and alert rules of Prometheus, and the runbook of each alert.

Thresholds match the panels. Recorded names follow `level:metric:operation`, where the level lists the labels kept
besides the job.
"""

from dataclasses import dataclass
from typing import Any, Literal

from dashboards import queries
from dashboards.queries import Scope
from dashboards.sanity import TME_LIMIT
from dashboards.serving import FIRST_TOKEN_LIMIT_S, HANDOFF_FAILURE_LIMIT, NOT_OK
from dashboards.speculation import BEYOND_CHANCE
from serve_app.telemetry.metric_names import BREAKER_STATES

RUNBOOKS = "docs/runbooks.md"

_KEEP = ("job", "namespace", "model_name")
_MODEL = "{{ $labels.model_name }}"
_IN_NAMESPACE = "{{ with $labels.namespace }} in {{ . }}{{ end }}"
_OF_JOB = "{{ with $labels.job }} (job {{ . }}){{ end }}"
_5M, _10M, _15M, _1H = (Scope("", window, _KEEP) for window in ("5m", "10m", "15m", "1h"))
_POOL_5M = Scope("", "5m", (*_KEEP, "pool"))
_ERROR = 'outcome="error"'
_FAILED = 'result="failed"'
_BUILD = _5M.series("build_info")
_MIN_FAILED_REPLAYS = 5
_MIN_DRAFTS = 1000
_EARLY, _LATE = 'since_handoff=~"0|1|2_3"', 'since_handoff="8_up"'
_WITH_WEIGHTS = 'drafter=~"draft_model|eagle3|mtp"'  # others draft better as a text grows
_OPEN = BREAKER_STATES.index("open")


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus precomputes."""

    name: str
    expr: str

    def as_dict(self) -> dict[str, Any]:
        """As a rule file has it."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    """When an alert fires, and what its reader needs to know.

    `summary` may quote the alert's labels; the namespace, if any, is appended to the model's name.
    """

    name: str
    expr: str
    hold: str  # how long it must hold
    severity: Literal["critical", "warning", "info"]
    summary: str
    means: str
    look: str
    do: str

    def as_dict(self) -> dict[str, Any]:
        """As a rule file has it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary.replace(_MODEL, _MODEL + _IN_NAMESPACE),
                "description": f"{self.means} {self.do}",
                "runbook": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


def _recorded_share(name: str, where: str) -> str:
    """The share of recorded events with the given labels, by release and model."""
    by = ", ".join(_KEEP)
    some, all_of_them = f"sum by ({by}) ({name}{{{where}}})", f"sum by ({by}) ({name})"
    return f"({some} or 0 * {all_of_them}) / ({all_of_them} > 0)"


_HANDOFFS = "model_result:truespec_handoffs:increase15m"
_REPLAYS = "model_result:truespec_replays:increase15m"
_REQUESTS = "model_outcome:truespec_requests:increase15m"

RECORDINGS = (
    Recording("model:truespec_acceptance:ratio_rate10m", queries.acceptance(_10M)),
    Recording("model:truespec_expected_acceptance:ratio_rate10m", queries.expected_acceptance(_10M)),
    Recording("model:truespec_achievable_acceptance:ratio_rate10m", queries.achievable_acceptance(_10M)),
    Recording("model:truespec_accepted_length:mean_rate10m", queries.accepted_length(_10M)),
    Recording("model_position:truespec_acceptance:ratio_rate10m", queries.conditional_acceptance_by_position(_10M)),
    Recording("model:truespec_draft_tokens:increase10m", _10M.increase("draft_tokens_total")),
    Recording("model:truespec_acceptance:z_increase1h", queries.acceptance_z(_1H)),
    Recording("model_check:truespec_selfcheck:z_increase1h", queries.selfcheck_z(_1H)),
    Recording("model_stratum:truespec_tme:mean_rate1h", queries.tme(_1H)),
    Recording("model_stratum:truespec_replay_tokens:increase1h", _1H.increase("replay_tokens_total", "stratum")),
    Recording("model:truespec_emitted_tokens:rate5m", _5M.rate("emitted_tokens_total")),
    Recording("model_outcome:truespec_requests:rate5m", _5M.rate("requests_total", "outcome")),
    Recording(
        "model_pool:truespec_time_to_first_token_seconds:p95_rate5m",
        _POOL_5M.quantile(0.95, "time_to_first_token_seconds"),
    ),
    Recording("model_pool:truespec_requests_waiting:sum", _POOL_5M.gauge("requests_waiting")),
    Recording(_HANDOFFS, _15M.events("handoffs_total", "result")),
    Recording(_REPLAYS, _15M.events("replays_total", "result")),
    Recording(_REQUESTS, _15M.events("requests_total", "outcome")),
    Recording("model:truespec_handoff_failures:ratio_increase15m", _recorded_share(_HANDOFFS, NOT_OK)),
)

_ACCEPTANCE = "model:truespec_acceptance:ratio_rate10m"
_WAITING = "model_pool:truespec_requests_waiting:sum"

ALERTS = (
    Alert(
        "TruespecAcceptanceBelowItsRecentLevel",
        f"{_ACCEPTANCE} < 0.7 * avg_over_time({_ACCEPTANCE}[6h] offset 30m) "
        "and model:truespec_draft_tokens:increase10m > 1000",
        "15m",
        "warning",
        "Acceptance of {{ $labels.model_name }} fell to {{ $value | humanizePercentage }}, below 70 % of its level "
        "over the last hours.",
        "Fewer drafts are accepted than in the previous hours; output stays correct, but is slower.",
        "The acceptance page. Observed still matches expected: the traffic (kind of prompts, temperature, structured "
        "output) or the drafter changed. Only one position fell: the drafter's state. Only one pool fell: a release.",
        "Compare with the last release and with the traffic; choose another drafter or the dynamic length; if observed "
        "departs from expected, treat it as TruespecAcceptanceNotAsExpected.",
    ),
    Alert(
        "TruespecAcceptanceBelowHeldOut",
        f"{queries.conditional_acceptance_by_position(_1H)} < "
        f"0.5 * {queries.held_out_acceptance(_1H, 'position')} "
        f"and {_1H.increase('draft_tokens_per_position_total', 'position')} > {_MIN_DRAFTS}",
        "15m",
        "warning",
        "Acceptance of {{ $labels.model_name }} at position {{ $labels.position }} is "
        "{{ $value | humanizePercentage }}, below half of what training measured.",
        "The draft head drafts far worse than on held-out answers; output stays correct, but is slower.",
        "Acceptance by rounds since the handoff and by weight version on the acceptance page: low only after handoffs, "
        "the drafter's keys and values are lost there; low since a weight update, the head belongs to other weights; "
        "low throughout, the head gets wrong features, or the traffic is far from its training (temperature above 1).",
        "Roll back what changed, or update the head with the weights; if only the traffic differs, train the head on "
        "it.",
    ),
    Alert(
        "TruespecAcceptanceLowAfterHandoffs",
        f"{queries.acceptance_since_handoff(_1H, where=_EARLY)} < "
        f"0.5 * {queries.acceptance_since_handoff(_1H, where=_LATE)} "
        f"and {_1H.increase('draft_tokens_since_handoff_total', where=_EARLY)} > {_MIN_DRAFTS} "
        f"and {_1H.increase('draft_tokens_since_handoff_total', where=_LATE)} > {_MIN_DRAFTS} "
        f"and on ({', '.join(_KEEP)}) {_1H.gauge('build_info', where=_WITH_WEIGHTS, how='count')}",
        "15m",
        "warning",
        "Acceptance of {{ $labels.model_name }} right after handoffs is {{ $value | humanizePercentage }}, below half "
        "of that later on.",
        "The drafter starts without its keys and values, or with wrong ones, after each handoff; output stays correct, "
        "but is slower.",
        "Acceptance by rounds since the handoff on the acceptance page; versions and drafters of both pools.",
        "Bring both pools to one version and one drafter; roll back the last release if it changed the handoff.",
    ),
    Alert(
        "TruespecAcceptanceNotAsExpected",
        f"abs(model:truespec_acceptance:z_increase1h) > {BEYOND_CHANCE:g} and abs("
        f"{_1H.increase('accepted_tokens_total')} / ({_1H.increase('expected_accepted_tokens_total')} > 0) - 1) > 0.01",
        "5m",
        "critical",
        "Acceptance of {{ $labels.model_name }} departs from the verifier's own probabilities (z = {{ $value | "
        "humanize }}).",
        "The verifier accepts more or fewer drafts than its own acceptance probabilities predict: the accept step is "
        "wrong, and so is the output distribution.",
        "The logprob sanity page: which self-check is beyond ±5, and since when; acceptance by position on the "
        "acceptance page.",
        "Switch speculation off for the model, keep the dumps, and roll back the last release; mask answers from that "
        "window in training data.",
    ),
    Alert(
        "TruespecTmeHigh",
        f"model_stratum:truespec_tme:mean_rate1h > {TME_LIMIT:g} "
        "and model_stratum:truespec_replay_tokens:increase1h > 500",
        "5m",
        "critical",
        "TME of {{ $labels.model_name }} is {{ $value | humanize }} in stratum {{ $labels.stratum }}.",
        "Served logprobs differ from those of a plain recomputation.",
        "The logprob sanity page: the stratum that stands out points to the fault (after a handoff, near the length "
        "limit, prefix-cached, drafted). Only a few tokens far off: see the drift quantiles. All strata alike: the "
        "model, its dtype, or different models in the two pools.",
        "Stop training and scoring on these logprobs; switch speculation off; if that does not help, roll the prefill "
        "and decode pools back to one version and clear the prefix cache by restarting the replicas.",
    ),
    Alert(
        "TruespecReplayAlarm",
        _15M.events("replay_alarms_total", "alarm", "stratum") + " > 0",
        "0m",
        "critical",
        "Replays of {{ $labels.model_name }} raised the alarm {{ $labels.alarm }} in stratum {{ $labels.stratum }}.",
        "Replayed requests show, beyond chance, that logprobs are off (drift) or that the text does not follow the "
        "model's distribution (probability, surprisal, support, greedy, impossible), or is not what its seeds demand "
        "(draws).",
        "The logprob sanity page, and the dump that the referee wrote: request ids, positions, served and replayed "
        "values.",
        "Check that the breaker has switched speculation off where it should. Mask answers from that window whose "
        "verdict is suspect, and look for the fault in the dump.",
    ),
    Alert(
        "TruespecIndependentRefereeDisagrees",
        _15M.events("independent_replays_total", where='result="disagrees"') + " > 0",
        "0m",
        "critical",
        "transformers does not find what {{ $labels.model_name }} answers.",
        "An answer that the engine's own replay verified is not what transformers computes with the same weights: what "
        "both forward passes of the engine share is wrong (model code, kernels, a setting read from config.json), or "
        "rounding is larger than this model's should be.",
        "The log of the referee and the dump it wrote: the reason, the tokens and how far their logprobs are off. "
        "`truespec verify --engine transformers` repeats the check from a receipt of any answer, on any machine.",
        "Roll back the last release, or the kernels that came with it; mask answers since then for training. If only "
        "rounding is large (all logprobs a little off, FP8 or a new GPU), raise replay.edge_nats to what it is.",
    ),
    Alert(
        "TruespecLogprobViolations",
        _15M.events("logprob_violations_total", "kind") + " > 0",
        "0m",
        "critical",
        "Logprobs of {{ $labels.model_name }} broke the rule {{ $labels.kind }}.",
        "A request was failed because its logprobs broke the contract (not finite, above 0, not sorted, one token with "
        "two values); the answer was not delivered.",
        "The replica's log names the request and the rule; the metric's kind is listed in docs/metrics.md.",
        "The engine or memory is faulty: keep the log, remove the replica if only one is affected, roll back if it "
        "started with a release.",
    ),
    Alert(
        "TruespecInvariantViolations",
        _15M.events("selfcheck_violations_total", "kind") + " > 0",
        "0m",
        "critical",
        "A step of {{ $labels.model_name }} broke the invariant {{ $labels.kind }}.",
        "The engine broke one of its own rules within a step; the request was failed rather than answered wrongly.",
        "The replica's log names the request; docs/metrics.md lists the kinds. not_finite on a single replica: its GPU "
        "or its memory.",
        "Remove the replica if only one is affected; roll back if it started with a release.",
    ),
    Alert(
        "TruespecSelfCheckAlarm",
        _15M.events("selfcheck_alarms_total", "check") + " > 0",
        "0m",
        "critical",
        "Self-check {{ $labels.check }} of {{ $labels.model_name }} raised an alarm.",
        "A term whose mean is 0 in a correct sampler has another mean: the output does not follow the model's "
        "distribution. The false-alarm rate is below 1e-6 per check over an engine's lifetime.",
        "Which check fired (docs/metrics.md lists what each covers), and whether expected acceptance moved with it.",
        "The breaker switches speculation off and reports it; leave it off, keep the dump, and look for what changed.",
    ),
    Alert(
        "TruespecUntestedShare",
        f"{queries.untested(_1H)} > 0.9 and {_1H.increase('selfcheck_rounds_total')} > 1000",
        "30m",
        "warning",
        "{{ $value | humanizePercentage }} of the rounds of {{ $labels.model_name }} add nothing to its self-checks.",
        "Nearly all requests repeat random numbers: their clients send the same few seeds. The zero-mean terms have no "
        "new evidence; whether each draw is the one that its random number gives is checked all the same.",
        "The logprob sanity page: rounds untested, and since when; which clients send a constant seed.",
        "Ask clients to send no seed, or one of their own for each request; rely on replays meanwhile.",
    ),
    Alert(
        "TruespecBreakerOpen",
        f"{Scope('', '5m', (*_KEEP, 'pool', 'replica')).gauge('breaker_state', how='max')} >= {_OPEN}",
        "1m",
        "critical",
        "The breaker of {{ $labels.replica }} ({{ $labels.model_name }}, {{ $labels.pool }}) is open.",
        "A fault was found on this replica: it serves without speculation, or is being taken out of service.",
        "Trips by reason on the logprob sanity page, and what fired just before.",
        "Answers stay correct meanwhile, but are slower. If canaries keep failing, the fault persists: replace the "
        "replica, or roll back if several breakers are open.",
    ),
    Alert(
        "TruespecReplaysFail",
        f"{_recorded_share(_REPLAYS, NOT_OK)} > 0.5 "
        f"and sum by ({', '.join(_KEEP)}) ({_REPLAYS}) >= {_MIN_FAILED_REPLAYS}",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the replays of {{ $labels.model_name }} did not complete.",
        "The logprob check covers less than half of what it should: wrong logprobs may go unnoticed.",
        "Replays by result: skipped means the queue is full, failed means that two attempts did not compute them.",
        "Lower `replay.sample_rate`, or add prefill replicas.",
    ),
    Alert(
        "TruespecReplaysOfOneReplicaFail",
        f"{_1H.share('replays_total', _FAILED, 'answered_by')} > 0.5 "
        f"and {_1H.events('replays_total', 'answered_by', where=_FAILED)} >= {_MIN_FAILED_REPLAYS}",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the replays of answers by {{ $labels.answered_by }} "
        "({{ $labels.model_name }}) failed twice.",
        "Answers of this replica cannot be replayed, so nothing checks them, and the answers may be the reason.",
        "The controller's log: `replay of ... failed` names the replica that replayed, and its error. The same error "
        "each time: reproduce it with one of these requests. All replicas alike: TruespecReplaysFail.",
        "Replace the replica if others' answers are replayed without errors; until the cause is known, treat its "
        "answers as unverified.",
    ),
    Alert(
        "TruespecHandoffsFail",
        f"model:truespec_handoff_failures:ratio_increase15m > {HANDOFF_FAILURE_LIMIT:g}",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the handoffs of {{ $labels.model_name }} were refused or failed.",
        "Decode replicas compute prompts themselves: answers are correct, but slower.",
        "The disaggregation page: refusals by reason; prefill replicas that restart; versions and fingerprints under "
        "Running versions.",
        "Bring both pools to one version and one model; replace prefill replicas that do not answer.",
    ),
    Alert(
        "TruespecTimeToFirstTokenHigh",
        f"model_pool:truespec_time_to_first_token_seconds:p95_rate5m > {FIRST_TOKEN_LIMIT_S:g}",
        "10m",
        "warning",
        "p95 of the time to first token of {{ $labels.model_name }} is {{ $value | humanizeDuration }}.",
        "Clients wait long for the first token.",
        "The latency page: is it the queue, or the prompts themselves; prefix cache hits; handoff times.",
        "Add prefill replicas (or replicas of a monolith); limit prompt lengths; look for a lost replica.",
    ),
    Alert(
        "TruespecQueueGrows",
        f"min_over_time({_WAITING}[10m]) > 0 and delta({_WAITING}[10m]) >= 4",
        "5m",
        "warning",
        "Requests of {{ $labels.model_name }} queue up in pool {{ $labels.pool }}, and the queue grows.",
        "More requests arrive than this pool finishes.",
        "The disaggregation page: which pool is waiting; KV cache in use; missing replicas.",
        "Add replicas of the pool, or more KV memory if the cache is full; otherwise requests will be rejected.",
    ),
    Alert(
        "TruespecRequestErrors",
        f"{_recorded_share(_REQUESTS, _ERROR)} > 0.01",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} end in an error.",
        "Requests fail in the engine or miss their deadline.",
        "The replicas' logs by request id; broken rules on the logprob sanity page; restarts of replicas.",
        "Follow the error in the logs; deadline errors call for more replicas or a higher `limits.request_timeout_s`.",
    ),
    Alert(
        "TruespecKeysStale",
        f"{_15M.events('key_file_reloads_total', where=_FAILED)} > 0",
        "0m",
        "warning",
        "The changed API key file of {{ $labels.model_name }} is invalid.",
        "The previous keys stay in effect: a new key does not work yet, and a revoked one still does.",
        "The replicas' logs, which name the file, the field and the fix.",
        "Fix the file, or generate another with `truespec keys`; it is reread within a second.",
    ),
    Alert(
        "TruespecNoTraffic",
        f"{Scope('', '30m', _KEEP).events('requests_total')} == 0 and "
        f"sum by ({', '.join(_KEEP)}) (increase({_5M.series('requests_total')}[6h] offset 30m)) > 0",
        "5m",
        "info",
        "No request for {{ $labels.model_name }} has finished for half an hour.",
        "A model that had traffic has none: no requests are sent, or none get through.",
        "The path to the service (gateway, proxy, DNS); requests that run and never finish.",
        "Send a request by hand. If it is answered, traffic has simply stopped.",
    ),
    Alert(
        "TruespecMetricsMissing",
        f"absent_over_time({_BUILD}[6h]) or (count by (job, namespace) (present_over_time({_BUILD}[6h])) "
        f"unless count by (job, namespace) ({_BUILD}))",
        "10m",
        "critical",
        f"Prometheus has no metrics from truespec{_IN_NAMESPACE}{_OF_JOB}.",
        "A release that had metrics within the last six hours has none now, or no release has any: the service is down "
        "or not scraped. Every other alert is blind meanwhile.",
        "Prometheus' targets page; whether the service answers /healthz; whether the release was removed, or its job "
        "renamed, on purpose: in that case the alert clears by itself after six hours.",
        "Fix the scrape configuration (job, relabelling of `ray_truespec_`), or start the service.",
    ),
)

# vLLM's names, for public dashboards that expect them; truespec itself never exports these.
_VLLM_NAMES = {
    "vllm:spec_decode_num_drafts_total": "drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "accepted_tokens_per_position_total",
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}


def rule_file() -> dict[str, Any]:
    """Recording rules first, so that the alerts after them use values of the same evaluation."""
    return {
        "groups": [
            {"name": "truespec-recording", "interval": "30s", "rules": [rule.as_dict() for rule in RECORDINGS]},
            {"name": "truespec-alerts", "interval": "30s", "rules": [alert.as_dict() for alert in ALERTS]},
        ]
    }


def vllm_rule_file() -> dict[str, Any]:
    """Optional rules that also record our counters under vLLM's names."""
    rules = [{"record": name, "expr": _5M.series(ours)} for name, ours in _VLLM_NAMES.items()]
    return {"groups": [{"name": "truespec-vllm-names", "interval": "30s", "rules": rules}]}
