"""The pages about serving: overview, disaggregation, latency."""

from dashboards import recordings, shell
from dashboards.alerts import (
    IN_1H,
    IN_15M,
    IN_30M,
    IN_NAMESPACE,
    MINIMUM,
    OF_JOB,
    POOLS,
    THRESHOLD,
    Alert,
    any_of,
    share,
)
from dashboards.panels import PAGE, REPLICA, Page, Panel, Query, Rates, Row, Share, Stat, Steps
from dashboards.queries import NOT_OK, QueryScope, events_of
from dashboards.recordings import KEEP, model_sum
from dashboards.sanity import ALARMS, BREAKER, EVENT_STEPS, TME, VIOLATIONS, WATCHED
from dashboards.speculation import ACCEPTANCE_RATE, ACCEPTED_LENGTH
from serve_app.telemetry.metric_names import FIRST_TOKEN_LIMIT_S, KV_FULL, TURNED_AWAY_LIMIT

HANDOFF_FAILURE_LIMIT = 0.01


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(PAGE.quantile(q, histogram), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))


_FIRST_TOKEN_STEPS: Steps = ((None, "green"), (FIRST_TOKEN_LIMIT_S, "red"))
_FULL_STEPS: Steps = ((None, "green"), (0.8, "yellow"), (KV_FULL, "red"))
FIRST_TOKEN = Panel(
    "Time to first token",
    f"From a request's arrival to its first token. Above {FIRST_TOKEN_LIMIT_S:g} s at p95 an alert fires: "
    "the prefill pool is too small, prompts have grown, or the queue is long.",
    _quantiles("time_to_first_token_seconds"),
    unit="s",
    steps=_FIRST_TOKEN_STEPS,
)

INTER_TOKEN = Panel(
    "Time between tokens",
    "Between two messages of a stream, per token of the later one. It rises with the load of the decode pool, with "
    "long contexts, and when acceptance falls.",
    _quantiles("inter_token_latency_seconds"),
    unit="s",
)

LOAD = Panel(
    "Requests running and waiting",
    "Client requests being computed, waiting for room in an engine, and by stage from admission to the last byte, plus "
    "replays. A waiting count that keeps growing means that the service is too small for its traffic.",
    (
        Query(REPLICA.gauge("requests_running", "pool"), "running {{pool}}"),
        Query(REPLICA.gauge("requests_waiting", "pool"), "waiting {{pool}}"),
        Query(REPLICA.gauge("replays_running", "pool"), "replayed {{pool}}"),
        Query(REPLICA.gauge("requests_in_flight", "pool", "stage"), "{{pool}} in {{stage}}"),
    ),
)

OVERVIEW = Page("Overview", "Correctness, speed and load.", (
    Row("Correctness", (
        ACCEPTANCE_RATE, TME, ALARMS, VIOLATIONS, BREAKER,
        Stat("Firing alerts",
            "Currently firing alerts of truespec's rules, regardless of the selection above; docs/runbooks.md "
            "describes what to do. Empty if the rules are not installed.",
            (Query('count by (alertname, namespace) (ALERTS{alertname=~"Truespec.+",alertstate="firing"})',
                 "{{alertname}} {{namespace}}", sparse=True),),
            steps=EVENT_STEPS),
        ACCEPTED_LENGTH,
        Stat("Running versions",
            "Version, drafter and model fingerprint of the replicas. More than one outside an upgrade means that "
            "replicas serve different models under one name and refuse each other's handoffs.",
            (Query(
                 PAGE.gauge("build_info", "namespace", "model_name", "version", "drafter", "fingerprint", how="count"),
                 "{{model_name}} {{version}} {{drafter}} {{fingerprint}} {{namespace}}"),),
            steps=((None, "text"),), shows_name=True))),
    Row("Speed", (
        Rates("Tokens per second",
            "Tokens emitted, by pool. A drop while requests wait means that replicas are lost or slow.",
            (Query(PAGE.rate("emitted_tokens_total", "pool"), "{{pool}}"),)),
        Rates("Requests per second",
            "Finished requests, by outcome. Error: the engine failed or the deadline passed. Rejected: there was no "
            "room; clients were sent a retry time. Abort: the client disconnected.",
            (Query(PAGE.rate("requests_total", "outcome"), "{{outcome}}"),), unit="reqps"),
        FIRST_TOKEN, INTER_TOKEN,
        Rates("Responses by status code",
            "Responses of the API. 429: a key's limits, or no room; 503: a replica stopped; other 5xx are faults. A "
            "stream that breaks off has begun with 200: see the outcome error of requests.",
            (Query(PAGE.rate("http_responses_total", "code"), "{{code}}"),), unit="reqps"))),
    Row("Load", (
        LOAD,
        Share("KV cache in use",
            "Share of the KV blocks that sequences hold, the fullest replica of each pool. Near 1, sequences are "
            "preempted and recomputed: add KV memory or replicas, or allow fewer concurrent sequences.",
            (Query(REPLICA.gauge("kv_cache_usage_ratio", "pool", how="max"), "{{pool}}"),), steps=_FULL_STEPS),
        Panel("Replicas wanted and running",
            "What Ray Serve is to run, and what runs. A gap that stays means that replicas do not start: `serve "
            "status` has the reason.",
            (Query(PAGE.gauge("replicas_running", "pool", how="max"), "running {{pool}}"),
             Query(PAGE.gauge("replicas_wanted", "pool", how="max"), "wanted {{pool}}"))),
        Panel("Replicas replaced, and requests lost with them",
            "Replicas that died or failed their health check, and what they had by their last report. Without a "
            "router that resumes them, clients got an error or a stream that was cut.",
            (Query(PAGE.events("replica_restarts_total", "pool"), "replicas {{pool}}"),
             Query(PAGE.events("requests_interrupted_total", "pool"), "requests {{pool}}")),
            steps=EVENT_STEPS),
        Share("Replicas with active kernels",
            "Share of replicas that compute with the kernels made for their device. Others are several times slower; "
            "the status page and their logs show why.",
            (Query(REPLICA.gauge("kernels_active", "pool", "kernels", how="avg"), "{{pool}} {{kernels}}"),),
            steps=((None, "red"), (1, "green"))))),
    Row("Refusals, keys and weights", (
        Rates("Refused requests",
            "Valid requests that were refused, by reason. Key concurrency: raise the key's limit; capacity, load, "
            "time to first token and deadline: add replicas; unauthenticated and forbidden: contact the sender.",
            (Query(PAGE.rate("refusals_total", "reason"), "{{reason}}", sparse=True),), unit="reqps"),
        Panel("Replicas with stale keys",
            "Replicas whose key file has become invalid: the previous keys stay in effect, revoked ones included.",
            (Query(PAGE.gauge("keys_stale", "pool"), "{{pool}}", sparse=True),), steps=EVENT_STEPS),
        Panel("Weight updates",
            "Replicas that loaded new weights or failed to. A failure cancels the update on all replicas; the reason "
            "is returned to the trainer and logged by the replica.",
            (Query(PAGE.events("weight_updates_total", "pool", "result"), "{{pool}} {{result}}"),))), collapsed=True),
))  # fmt: skip

DISAGGREGATION = Page("Disaggregation",
    "The handoff from prefill to decode, and the load of both pools. Empty in a monolith.", (
    Row("Handoff", (
        Rates("Handoffs per second",
            "Handoffs from prefill to decode, by result. Refused: the state belonged to another model or was "
            "damaged. Failed: no prefill replica answered. Both cost time, since the decode replica computes the "
            "prompt itself; neither affects correctness.",
            (Query(PAGE.rate("handoffs_total", "result"), "{{result}}"),)),
        Panel("Share of unsuccessful handoffs",
            f"Refused and failed handoffs. Above {HANDOFF_FAILURE_LIMIT:.0%} an alert fires: the pools run "
            "different models or versions, prefill replicas die, or the network corrupts data.",
            (Query(PAGE.share("handoffs_total", NOT_OK), "refused or failed"),), unit="percentunit",
            steps=((None, "green"), (HANDOFF_FAILURE_LIMIT, "red"))),
        Panel("Time per handoff",
            "Seconds per handoff, by phase: prefill is the whole call as decode sees it, transfer what it took "
            "beyond the prefill replica's own time; export and insert are the copies out of one cache and into the "
            "other. If these take a growing share of prefill, moving the state costs more than computing it: use a "
            "monolith or a faster link.",
            (Query(
                 f"{PAGE.rate('handoff_seconds_total', 'phase')} / ignoring (phase) group_left () "
                 f"({PAGE.rate('handoffs_total')} > 0)",
                 "{{phase}}"),),
            unit="s"),
        Panel("Refusals by reason",
            "Handoffs that the decode side refused. Manifest or version: two models or versions run under one name. "
            "Damaged: the state was corrupted in transit.",
            (Query(PAGE.events("handoff_refusals_total", "reason"), "{{reason}}", sparse=True),),
            stacked=True),
        Panel("Bytes handed off",
            "Bytes of computed-token state per second. Compare with the bandwidth between the pools: near its limit, "
            "the time to first token grows.",
            (Query(PAGE.rate("handoff_bytes_total"), "bytes"),), unit="Bps"))),
    Row("Recovery", (
        Panel("Failed prefills",
            "Failed prefill attempts, by reason; each is retried, finally on the decode replica. Died: replicas are "
            "lost. Timeout: they hang, or the pool is too small. Full: the pool is too small. An alert fires on the "
            "share of all but full.",
            (Query(PAGE.events("prefill_failures_total", "reason"), "{{reason}}", sparse=True),),
            stacked=True),
        Panel("Requests that lost their replica",
            "Requests whose decode replica was lost. Resumed: they continued elsewhere, and their clients saw a "
            "pause. Failed: they did not ask to be resumed, or were resumed too often.",
            (Query(PAGE.events("resumes_total", "result"), "{{result}}", sparse=True),), stacked=True))),
    Row("Pools", (
        LOAD,
        Panel("Running by replica",
            "Requests running on each replica. An outlier is unhealthy or badly routed; if one pool is at its limit "
            "while the other idles, change the ratio of replicas.",
            (Query(REPLICA.gauge("requests_running", "pool", "replica"), "{{pool}} {{replica}}"),)),
        Panel("Prompt tokens computed",
            "Prompt tokens per second, by pool. Many in the decode pool mean that handoffs fail or sequences are "
            "preempted, and decoding waits for prompts.",
            (Query(PAGE.rate("prompt_tokens_total", "pool"), "{{pool}}"),), unit="ops"))),
))  # fmt: skip

LATENCY = Page("Latency", "How long clients wait, and why.", (
    Row("First token", (
        FIRST_TOKEN,
        Panel("Time in the queue",
            "From a request's arrival to its first step. If this makes up most of the time to first token, the "
            "service is too small; if not, prompts are long.",
            _quantiles("queue_time_seconds"), unit="s"))),
    Row("Further tokens", (
        INTER_TOKEN,
        Panel("Whole requests",
            "From arrival to the last token, of requests that ended with stop or length. It grows with the length of "
            "answers; if it grows and they do not, look at the time between tokens.",
            _quantiles("request_duration_seconds"), unit="s"))),
    Row("Causes of latency", (
        Share("Prefix cache hits",
            "Share of prompt tokens found in the prefix cache. A drop makes prompts more expensive: prompts share "
            "less, routing scatters them, or the cache is too small.",
            (Query(PAGE.ratio("prefix_cache_hits_total", "prefix_cache_queries_total", "pool"), "{{pool}}"),)),
        Panel("Preemptions",
            "Sequences per second that lost their KV and were recomputed. More than a few: the KV cache is too small "
            "for that many concurrent sequences.",
            (Query(PAGE.rate("preemptions_total", "pool"), "{{pool}}"),), unit="ops"))),
))  # fmt: skip

_ALL_REQUESTS = model_sum(recordings.REQUESTS)
_ERROR, _SERVER_ERROR = 'outcome="error"', 'code=~"5..",code!="503"'  # 503 is TruespecRequestsTurnedAway's
_ROUTER, _PROXY, _NO_PROXY = 'pool="router"', 'pool="proxy"', 'pool!="proxy"'
_HAS_ROUTER = f"max_over_time({IN_15M.series('replicas_wanted', _ROUTER)}[15m]) > 0"  # whichever scrapes failed
_LOST = (  # behind a router only its own: it resumes or fails what is lost elsewhere
    f"({IN_15M.events('requests_interrupted_total', where=_ROUTER)} or {IN_15M.events('requests_interrupted_total')} "
    f"unless on ({', '.join(KEEP)}) {_HAS_ROUTER}) >= {MINIMUM}"
)
_FAILED_PREFILLS = model_sum(f'{recordings.PREFILL_FAILURES}{{reason!="full"}}')  # a full pool's handoffs fail
_PREFILLS = f"({_FAILED_PREFILLS} + ({model_sum(recordings.HANDOFFS)} or 0 * {_FAILED_PREFILLS}))"
_WANTED, _RUNNING = (POOLS.gauge(f"replicas_{which}", how="max", where=_NO_PROXY) for which in ("wanted", "running"))
_BY_POOL = f"max by ({', '.join(POOLS.keep)})"
_LOADED = (  # a pool that is being installed loads its model: it has run within the hour, or has been there for longer
    f"({_BY_POOL} (max_over_time({POOLS.series('replicas_running')}[1h])) > 0 "
    f"or {_BY_POOL} (present_over_time({POOLS.series('replicas_running')}[1h] offset 1h)))"
)
_WANTED_SERIES = IN_1H.series("replicas_wanted")  # of the controller
# Whatever exports anything has one of these.
_EXPORTS = (IN_1H.series("build_info"), _WANTED_SERIES, IN_1H.series(WATCHED))
_ANY = " or ".join(_EXPORTS)
_ANY_LATELY = " or ".join(f"present_over_time({series}[6h])" for series in _EXPORTS)
_NONE_LATELY = " and ".join(f"absent_over_time({series}[6h])" for series in _EXPORTS)
_NONE_NOW = f"count by (job, namespace) ({_ANY_LATELY}) unless count by (job, namespace) ({_ANY})"

# Ray's own, of the proxies before the replicas, and of Ray Serve's controller, which outlives all replicas. They know
# no model; jobs and namespaces are the releases'.
_RELEASE = ("job", "namespace")
_OF_RELEASE = f"by ({', '.join(_RELEASE)})"
_PROXIED = "ray_serve_num_http_requests_total"
_HAPROXIES = "ray_serve_haproxy_process_count"  # on one node; 0 once its process is dead
_ALL_PROXIED, _BAD_GATEWAY = (
    events_of(series, "15m", _RELEASE, scraped=(_PROXIED, _HAPROXIES))
    for series in (_PROXIED, f'{_PROXIED}{{status_code=~"5..",status_code!="503"}}')
)
_IS_RELEASE = f"and count {_OF_RELEASE} (present_over_time({_WANTED_SERIES}[1h]))"  # ours come by the same proxies
_PROXIES = QueryScope(_PROXY, "1h", _RELEASE)
_PROXIES_WANTED, _PROXIES_RUNNING = (_PROXIES.gauge(f"replicas_{which}", how="max") for which in ("wanted", "running"))
_RUNS = 6  # Ray's number for an application that runs; lower: it starts, is deployed, or is unhealthy
_STATUS = "ray_serve_application_status"
_NO_REPLICA_ANSWERS = (
    f"count {_OF_RELEASE} (present_over_time({_WANTED_SERIES}[6h])) unless count {_OF_RELEASE} ({_WANTED_SERIES}) "
    f"and count {_OF_RELEASE} ({_STATUS} < {_RUNS})"
)
_FIRST_START = f"({_STATUS} < {_RUNS} unless present_over_time({_STATUS}[1h] offset 1h))"  # an hour to load a model

_BY_MODEL = f"by ({', '.join(KEEP)})"
_BY_CLUSTER = f"by ({', '.join(KEEP)}, instance)"  # an upgrade has two for a while
_OFF = f"{IN_1H.series('speculation_enabled')} == 0 and {IN_1H.series('breaker_state')} == 0"
_WEIGHTS = f"count by ({', '.join(KEEP)}, instance, fingerprint) ({IN_1H.series('build_info')})"
_UPDATED, _NOT_UPDATED = (IN_1H.events("weight_updates_total", where=f'result="{one}"') for one in ("ok", "failed"))
_DEGRADED = {
    "speculation is off by hand": f"count {_BY_MODEL} ({_OFF})",
    "kernels are off": f"count by ({', '.join(POOLS.keep)}) ({POOLS.series('kernels_active')} == 0)",
    "replicas have different weights": f"max {_BY_MODEL} (count {_BY_CLUSTER} ({_WEIGHTS})) > 1",
    "every weight update fails": f"{_NOT_UPDATED} >= {MINIMUM} and {_UPDATED} == 0",
}


def _went_quiet(counter: str) -> str:
    """A counter that had events in the hours before, and has none in half an hour, throughout which it was scraped."""
    series = IN_30M.series(counter)
    scraped = f"max by ({', '.join(KEEP)}) (count_over_time({series}[30m:5m])) >= 5"
    return f"({IN_30M.events(counter)} == 0 and {model_sum(f'increase({series}[6h] offset 30m)')} > 0 and {scraped})"


ALERTS = (
    Alert("TruespecPoolEmpty", "critical", "2m", wrong="not served", note="or nothing is checked",
        expr=f"{_RUNNING} == 0 and {_WANTED} > 0 and {_LOADED} or {_NO_REPLICA_ANSWERS}",
        summary="{{ with $labels.pool }}No replica of {{ $labels.model_name }} runs in pool {{ . }}.{{ else }}"
        f"No replica answers{IN_NAMESPACE}{OF_JOB}.{{{{ end }}}}",
        means="Without a decoding replica nothing is served. Without a prefill replica decode replicas compute "
        "prompts themselves, and nobody replays answers, so a fault would go unnoticed. A pool that is installed has "
        "an hour to load its model. Without a pool's name: the metrics are gone with the last replica that answers "
        "HTTP, and Ray Serve says that the application does not run.",
        look="`serve status` has the message of the last replica that failed to start. Pending pods lack GPUs or "
        "nodes.",
        do="Fix what the message names, or give the pods their nodes. Roll back if it began with a release.",
        commands=(shell.SERVE_STATUS, shell.PODS, shell.EVENTS, shell.RAY_STATUS, shell.DEAD_ACTORS, shell.HISTORY)),
    Alert("TruespecProxyDown", "critical", "1m", wrong="not served", note="connections are refused",
        expr=f"count {_OF_RELEASE} ({_HAPROXIES} == 0) {_IS_RELEASE} or ({_PROXIES_WANTED} - {_PROXIES_RUNNING} > 0)",
        summary=f"Ray Serve's proxy is down on {{{{ $value }}}} nodes{IN_NAMESPACE}{OF_JOB}.",
        means="HAProxy does not run there, or Ray Serve finds that its proxy does not answer. Connections are refused, "
        "and get 404 while it comes back, although the replicas are well. With one decoding pod this is an outage.",
        look="Ray Serve notices within half a minute and starts another. If none starts, its controller's log says "
        "why.",
        do="Restart the pod if the proxy does not come back. `ray.haproxy: false` uses Serve's own proxy, which is "
        "slower.",
        commands=(shell.promql("ray_serve_haproxy_process_count > 0"), shell.promql("ray_serve_proxy_status > 0"),
            shell.SERVE_STATUS, shell.PODS)),
    Alert("TruespecMetricsMissing", "critical", "10m", wrong="unnoticed",
        expr=f"({_NONE_LATELY} unless on () {_FIRST_START}) or ({_NONE_NOW})",
        summary=f"Prometheus has no metrics from truespec{IN_NAMESPACE}{OF_JOB}.",
        means="A release that had metrics within the last six hours has none now, or no release has any. No replica "
        "answers HTTP, or none is scraped, and every other alert is blind.",
        look="Prometheus' targets page, and whether the service answers /healthz. If the release was removed or its "
        "job renamed on purpose, the alert clears by itself after six hours.",
        do="Fix the scrape configuration (the job; a key where `access.open_metrics` is false), or start the service.",
        commands=(shell.TARGETS, 'curl -sS "$HOST/metrics" | grep -c ^truespec_', shell.PODS,
            'kubectl -n "$NAMESPACE" get podmonitor -l "$PODS" -o name')),
    Alert("TruespecRequestErrors", "warning", "5m", wrong="failing", threshold=0.01, minimum=5,
        expr=" or ".join(
            (
                share(model_sum(f"{recordings.REQUESTS}{{{_ERROR}}}"), _ALL_REQUESTS),
                share(model_sum(f"{recordings.RESPONSES}{{{_SERVER_ERROR}}}"), model_sum(recordings.RESPONSES)),
                f"({share(_BAD_GATEWAY, _ALL_PROXIED)} {_IS_RELEASE})",
            )
        ),
        summary=f"{{{{ $value | humanizePercentage }}}} of the requests{{{{ with $labels.model_name }}}} of "
        f"{{{{ . }}}}{{{{ end }}}}{IN_NAMESPACE} end in an error.",
        means="Requests fail in the engine, miss their deadline, or are answered with a 5xx other than 503. Without "
        "a model's name: Ray Serve's proxy counts these; if no other series fires, the replica behind it died or "
        "could not be reached.",
        look="The replicas' logs by request id; broken rules on the logprob sanity page; restarts of replicas; "
        "HAProxy's log.",
        do="Follow the error in the logs. Missed deadlines call for more replicas or a higher "
        "`limits.request_timeout_s`. If the replicas are well, restart the pod whose proxy gives the errors.",
        commands=(shell.promql("model_code:truespec_http_responses:increase15m{}"),
            shell.promql("model_outcome:truespec_requests:increase15m{}"),
            shell.promql("sum by (status_code, application) (increase(ray_serve_num_http_requests_total[15m])) > 0"),
            shell.logged(' failed|" 5[0-9][0-9]|error'), shell.DEAD_ACTORS)),
    Alert("TruespecReplicasRestart", "warning", "0m", wrong="failing", note="streams broke off", threshold=3, minimum=1,
        expr=any_of("what", {
            "replicas": f"{POOLS.events('replica_restarts_total')} >= {THRESHOLD}", "requests": _LOST}),
        summary="{{ $value | humanize }} {{ $labels.what }} of {{ $labels.model_name }}{{ with $labels.pool }} in "
        "pool {{ . }}{{ end }} were lost.",
        means="Replicas die or fail their health check, and Ray Serve starts others. Clients of their requests got "
        "an error without JSON from the proxy, or a stream that was cut, unless a router resumed it elsewhere. "
        "Requests: at least the minimum in 15 minutes; replicas: at least the threshold in an hour.",
        look="The cause of their death: out of memory (the pod's last state), a CUDA error, an engine fault, or a "
        "breaker that is out (the replica's log). If it is always one node, suspect its hardware.",
        do="Give replicas more memory or fewer sequences. Cordon a faulty node. Roll back if it began with a "
        "release. With `recovery.resume` a router (`pools.router`) continues such streams on another replica.",
        commands=(shell.promql("sum by (pool) (increase(truespec_replica_restarts_total{}[1h]))"),
            shell.promql("sum by (pool) (increase(truespec_requests_interrupted_total{}[15m]))"), shell.DEAD_ACTORS,
            shell.PODS, shell.logged("CUDA|out of memory|EngineFault|tripped"), shell.SERVE_STATUS)),
    Alert("TruespecRequestsTurnedAway", "warning", "5m", wrong="failing", threshold=TURNED_AWAY_LIMIT, minimum=20,
        expr=share(recordings.TURNED_AWAY, model_sum(recordings.RESPONSES)),
        summary="{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} are turned away.",
        means="Clients get 429 or 503 for want of room, not because of their own limits.",
        look="The overview: refusals by reason. load, queued_tokens, time_to_first_token and deadline mean more "
        "traffic than the service is sized for. capacity with few requests running means that long answers hold the "
        "places. 503 means that replicas stop or die. With no replica left Ray Serve's proxy refuses by itself, "
        "which is not counted here (TruespecPoolEmpty).",
        do="Add replicas of the decoding pool, or of prefill if time_to_first_token leads. Raise a limit only if "
        "latency has room.",
        commands=(shell.promql("sum by (reason) (increase(truespec_refusals_total{}[15m])) > 0"),
            shell.promql("model_code:truespec_http_responses:increase15m{}"),
            shell.promql("truespec_replicas_running{} / truespec_replicas_wanted{}"),
            shell.promql("sum by (pool) (truespec_requests_running{})"))),
    Alert("TruespecHandoffsFail", "warning", "5m", wrong="slower", threshold=HANDOFF_FAILURE_LIMIT, minimum=5,
        expr=any_of("what", {
            "handoffs": share(model_sum(f"{recordings.HANDOFFS}{{{NOT_OK}}}"), model_sum(recordings.HANDOFFS)),
            "prefills": share(_FAILED_PREFILLS, _PREFILLS)}),
        summary="{{ $value | humanizePercentage }} of the {{ $labels.what }} of {{ $labels.model_name }} were "
        "refused or failed.",
        means="Prefill replicas die, hang or fail on requests, or decode replicas cannot use what they send, and "
        "prompts are computed again. Answers are correct, but their first token comes late, and the work is paid for "
        "twice.",
        look="The disaggregation page. Refusals: versions and fingerprints under Running versions. Failed prefills: "
        "timeout means that the pool is too slow for its prompts or a replica hangs, died that replicas restart, "
        "engine that one kind of request fails, which the replicas' logs name.",
        do="Bring both pools to one version and one model. timeout: add prefill replicas, limit prompts, or raise "
        "`recovery.prefill_timeout_s`. died: see TruespecReplicasRestart. engine: follow the error in the log.",
        commands=(shell.promql("model_result:truespec_handoffs:increase15m{}"),
            shell.promql("sum by (reason) (increase(truespec_handoff_refusals_total{}[15m])) > 0"),
            shell.promql("model_reason:truespec_prefill_failures:increase15m{} > 0"),
            shell.logged("prefill of .* failed"), shell.VERSIONS, shell.PODS)),
    Alert("TruespecTimeToFirstTokenHigh", "warning", "10m", wrong="slower", threshold=FIRST_TOKEN_LIMIT_S, minimum=20,
        expr=f"{recordings.FIRST_TOKEN_P95} > {THRESHOLD} and {recordings.FIRST_TOKENS} >= {MINIMUM}",
        summary="p95 of the time to first token of {{ $labels.model_name }} is {{ $value | humanizeDuration }}.",
        means="Clients wait long for the first token.",
        look="The latency page: whether the queue or the prompts take the time; prefix cache hits; handoff times.",
        do="Add prefill replicas (or replicas of a monolith), limit prompt lengths, or look for a lost replica.",
        commands=(shell.promql("model_pool:truespec_time_to_first_token_seconds:p95_rate5m{}"),
            shell.promql("sum by (pool) (truespec_requests_waiting{})"),
            shell.promql(
                "sum(rate(truespec_prefix_cache_hits_total{}[5m])) "
                "/ sum(rate(truespec_prefix_cache_queries_total{}[5m]))"
            ), shell.PODS)),
    Alert("TruespecKvCacheFull", "warning", "10m", wrong="slower", threshold=KV_FULL, minimum=10,
        expr=any_of("what", {
            "KV cache in use": f"min_over_time({recordings.KV_USAGE}[5m]) > {THRESHOLD}",
            "preemptions a request": share(IN_15M.events("preemptions_total"), _ALL_REQUESTS, "0.1")}),
        summary="{{ $labels.model_name }} lacks KV memory{{ with $labels.pool }} in pool {{ . }}{{ end }}: "
        "{{ $value | humanizePercentage }} {{ $labels.what }}.",
        means="A replica has no KV blocks left: drafts are cut, requests wait, and sequences lose their keys and "
        "values and are computed again. Answers are correct, but stall.",
        look="KV cache in use on the overview, of one replica or all; preemptions on the latency page; the lengths "
        "of prompts.",
        do="Add replicas of the pool, or limit prompts and answers (`limits.max_prompt_tokens`). Raise "
        "`engine.kv_cache_tokens` if the replica has memory left.",
        commands=(shell.promql("truespec_kv_cache_usage_ratio{}"),
            shell.promql("sum by (pool) (increase(truespec_preemptions_total{}[15m]))"),
            shell.promql("sum by (pool, replica) (truespec_requests_running{})"))),
    Alert("TruespecDegraded", "warning", "30m", wrong="slower", note="or of older weights", minimum=3,
        expr=any_of("what", _DEGRADED),
        summary="{{ $labels.model_name }} is not served as it could be"
        "{{ with $labels.pool }} in pool {{ . }}{{ end }}: {{ $labels.what }}.",
        means="An operator switched speculation off and left it so; replicas compute without the kernels made for "
        "their device, several times slower; replicas, or the two pools, serve different weights, so that handoffs are "
        "refused; or weight updates failed on at least the minimum of replicas within an hour and none succeeded, so "
        "that the old weights are served.",
        look="The status page: each replica's mode, and why its kernels are off. Running versions on the "
        "disaggregation page: the fingerprints of each pool. The reason of a failed update is returned to the trainer "
        "and logged.",
        do="Set speculation to `auto` again once the fault is gone for which it was switched off. Kernels: do what the "
        "reason says, and replace the replica. Weights: replace the replicas that have the older ones, or roll both "
        "pools to one version; correct what the updates lack.",
        commands=(shell.REPLICAS, shell.promql("truespec_kernels_active{}"), shell.VERSIONS,
            shell.promql("sum by (pool, result) (increase(truespec_weight_updates_total{}[1h])) > 0"),
            shell.logged("an operator has set|weights .* could not be loaded"))),
    Alert("TruespecReplicasMissing", "warning", "15m", wrong="slower", threshold=0,
        expr=f"{_WANTED} - {_RUNNING} > {THRESHOLD}",
        summary="{{ $value }} of the replicas of {{ $labels.model_name }} in pool {{ $labels.pool }} have been "
        "missing for a while.",
        means="Ray Serve wants more replicas than run: the pool has less room than it should.",
        look="As for TruespecPoolEmpty. With autoscaling, see whether the cluster can still add nodes. While a "
        "configuration is rolled out, one replica is missing as long as each new one loads.",
        do="Fix what `serve status` names, or want fewer replicas.",
        commands=(shell.promql("truespec_replicas_wanted{} - truespec_replicas_running{}"), shell.SERVE_STATUS,
            shell.PODS, shell.RAY_STATUS)),
    Alert("TruespecKeysStale", "warning", "0m", wrong="no", note="a revoked key still works",
        expr=IN_1H.gauge("keys_stale", how="max") + " > 0",
        summary="The changed API key file of {{ $labels.model_name }} is invalid.",
        means="The previous keys stay in effect: a new key does not work yet, and a revoked one still does.",
        look="The replicas' logs, which name the file, the field and the fix.",
        do="Fix the file, or generate another with `truespec keys`. It is read again within a second.",
        commands=(shell.logged("key"), 'kubectl -n "$NAMESPACE" get secret -o name')),
    Alert("TruespecNoTraffic", "info", "5m", wrong="no",
        expr=" or ".join(map(_went_quiet, ("requests_total", WATCHED))),
        summary="No request for {{ $labels.model_name }} has finished for half an hour.",
        means="A model that had traffic has none: no requests are sent, or none get through. Of a watched server: or "
        "they go past the proxies, or the proxies cannot reach the referee.",
        look="The path to the service (gateway, proxy, DNS); requests that run and never finish; what the proxies "
        "log.",
        do="Send a request by hand, to a watched server through its proxy. If it is answered and counted, traffic "
        "has simply stopped.",
        commands=('curl -sS -o /dev/null -w "%{http_code}\\n" "$HOST/healthz"', 'curl -sS "$HOST/v1/models" | jq -c .',
            shell.SERVE_STATUS, shell.WATCH_COUNTS, shell.watch_logged("proxy", "referee"))),
)  # fmt: skip
