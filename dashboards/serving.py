"""The pages about serving: overview, disaggregation, latency."""

from dashboards.panels import PAGE, REPLICA, Page, Panel, Query, Rates, Row, Share, Stat, Steps
from dashboards.sanity import ALARMS, BREAKER, EVENT_STEPS, TME, VIOLATIONS
from dashboards.speculation import ACCEPTANCE_RATE, ACCEPTED_LENGTH
from serve_app.telemetry.metric_names import FIRST_TOKEN_LIMIT_S, KV_FULL

HANDOFF_FAILURE_LIMIT = 0.01
NOT_OK = 'result!="ok"'


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(PAGE.quantile(q, histogram), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))


_FIRST_TOKEN_STEPS: Steps = ((None, "green"), (FIRST_TOKEN_LIMIT_S, "red"))
_FULL_STEPS: Steps = ((None, "green"), (0.8, "yellow"), (KV_FULL, "red"))

_WEIGHT_UPDATES = Panel(
    title="Weight updates",
    description="Replicas that loaded new weights or failed to. A failure cancels the update on all replicas; the "
    "reason is returned to the trainer and logged by the replica.",
    queries=(Query(PAGE.events("weight_updates_total", "pool", "result"), "{{pool}} {{result}}"),),
)

_FIRING = Stat(
    title="Firing alerts",
    description="Currently firing alerts of truespec's rules, regardless of the selection above; docs/runbooks.md "
    "describes what to do. Empty if the rules are not installed.",
    queries=(
        Query(
            'count by (alertname, namespace) (ALERTS{alertname=~"Truespec.+",alertstate="firing"})',
            "{{alertname}} {{namespace}}",
            sparse=True,
        ),
    ),
    steps=EVENT_STEPS,
)
_RUNS = Stat(
    title="Running versions",
    description="Version, drafter and model fingerprint of the replicas. More than one outside an upgrade means that "
    "replicas serve different models under one name and refuse each other's handoffs.",
    queries=(
        Query(
            PAGE.gauge("build_info", "namespace", "model_name", "version", "drafter", "fingerprint", how="count"),
            "{{model_name}} {{version}} {{drafter}} {{fingerprint}} {{namespace}}",
        ),
    ),
    steps=((None, "text"),),
    shows_name=True,
)
_TOKENS = Rates(
    title="Tokens per second",
    description="Tokens emitted, by pool. A drop while requests wait means that replicas are lost or slow.",
    queries=(Query(PAGE.rate("emitted_tokens_total", "pool"), "{{pool}}"),),
)
_REQUESTS = Rates(
    title="Requests per second",
    description="Finished requests, by outcome. Error: the engine failed or the deadline passed. Rejected: there was "
    "no room; clients were sent a retry time. Abort: the client disconnected.",
    unit="reqps",
    queries=(Query(PAGE.rate("requests_total", "outcome"), "{{outcome}}"),),
)
_RESPONSES = Rates(
    title="Responses by status code",
    description="Responses of the API. 429: a key's limits, or no room; 503: a replica stopped; other 5xx are faults. "
    "A stream that breaks off has begun with 200: see the outcome error of requests.",
    unit="reqps",
    queries=(Query(PAGE.rate("http_responses_total", "code"), "{{code}}"),),
)
_FIRST_TOKEN = Panel(
    title="Time to first token",
    description=f"From a request's arrival to its first token. Above {FIRST_TOKEN_LIMIT_S:g} s at p95 an alert fires: "
    "the prefill pool is too small, prompts have grown, or the queue is long.",
    unit="s",
    queries=_quantiles("time_to_first_token_seconds"),
    steps=_FIRST_TOKEN_STEPS,
)
_INTER_TOKEN = Panel(
    title="Time between tokens",
    description="Between two messages of a stream, per token of the later one. It rises with the load of the decode "
    "pool, with long contexts, and when acceptance falls.",
    unit="s",
    queries=_quantiles("inter_token_latency_seconds"),
)
_LOAD = Panel(
    title="Requests running and waiting",
    description="Client requests being computed, waiting for room in an engine, and passed on by a router, over the "
    "chosen replicas, plus replays. A waiting count that keeps growing means that the service is too small for its "
    "traffic.",
    queries=(
        Query(REPLICA.gauge("requests_running", "pool"), "running {{pool}}"),
        Query(REPLICA.gauge("requests_waiting", "pool"), "waiting {{pool}}"),
        Query(REPLICA.gauge("replays_running", "pool"), "replayed {{pool}}"),
        Query(REPLICA.gauge("requests_routed", "pool"), "passed on by {{pool}}", sparse=True),
    ),
)
_REPLICAS = Panel(
    title="Replicas wanted and running",
    description="What Ray Serve is to run, and what runs. A gap that stays means that replicas do not start: "
    "`serve status` has the reason.",
    queries=(
        Query(PAGE.gauge("replicas_running", "pool", how="max"), "running {{pool}}"),
        Query(PAGE.gauge("replicas_wanted", "pool", how="max"), "wanted {{pool}}"),
    ),
)
_RESTARTS = Panel(
    title="Replicas replaced, and requests lost with them",
    description="Replicas that died or failed their health check, and what they had by their last report. Without a "
    "router that resumes them, clients got an error or a stream that was cut.",
    queries=(
        Query(PAGE.events("replica_restarts_total", "pool"), "replicas {{pool}}"),
        Query(PAGE.events("requests_interrupted_total", "pool"), "requests {{pool}}"),
    ),
    steps=EVENT_STEPS,
)
_KERNELS = Share(
    title="Replicas with active kernels",
    description="Share of replicas that compute with the kernels made for their device. Others are several times "
    "slower; the status page and their logs show why.",
    queries=(Query(REPLICA.gauge("kernels_active", "pool", "kernels", how="avg"), "{{pool}} {{kernels}}"),),
    steps=((None, "red"), (1, "green")),
)
_KV_USAGE = Share(
    title="KV cache in use",
    description="Share of the KV blocks that sequences hold, the fullest replica of each pool. Near 1, sequences are "
    "preempted and recomputed: add KV memory or replicas, or allow fewer concurrent sequences.",
    queries=(Query(REPLICA.gauge("kv_cache_usage_ratio", "pool", how="max"), "{{pool}}"),),
    steps=_FULL_STEPS,
)
_TURNED_AWAY = Rates(
    title="Refused requests",
    description="Valid requests that were refused, by reason. Key concurrency: raise the key's limit; capacity, load, "
    "time to first token and deadline: add replicas; unauthenticated and forbidden: contact the sender.",
    unit="reqps",
    queries=(Query(PAGE.rate("refusals_total", "reason"), "{{reason}}", sparse=True),),
)
_KEY_RELOADS = Panel(
    title="Key file reloads",
    description="Changed key files read by replicas, by result. Failed: the new file is invalid, and the previous keys "
    "stay in effect, revoked ones included.",
    queries=(Query(PAGE.events("key_file_reloads_total", "result"), "{{result}}", sparse=True),),
)

OVERVIEW = Page(
    uid="truespec-overview",
    title="truespec / Overview",
    description="Correctness, speed and load.",
    rows=(
        Row("Correctness", (ACCEPTANCE_RATE, TME, ALARMS, VIOLATIONS, BREAKER, _FIRING, ACCEPTED_LENGTH, _RUNS)),
        Row("Speed", (_TOKENS, _REQUESTS, _FIRST_TOKEN, _INTER_TOKEN, _RESPONSES)),
        Row("Load", (_LOAD, _KV_USAGE, _REPLICAS, _RESTARTS, _KERNELS)),
        Row("Refusals, keys and weights", (_TURNED_AWAY, _KEY_RELOADS, _WEIGHT_UPDATES), collapsed=True),
    ),
)

_HANDOFFS = Rates(
    title="Handoffs per second",
    description="Handoffs from prefill to decode, by result. Refused: the state belonged to another model or was "
    "damaged. Failed: no prefill replica answered. Both cost time, since the decode replica computes the prompt "
    "itself; neither affects correctness.",
    queries=(Query(PAGE.rate("handoffs_total", "result"), "{{result}}"),),
)
_HANDOFF_FAILURES = Panel(
    title="Share of unsuccessful handoffs",
    description=f"Refused and failed handoffs. Above {HANDOFF_FAILURE_LIMIT:.0%} an alert fires: the pools run "
    "different models or versions, prefill replicas die, or the network corrupts data.",
    unit="percentunit",
    queries=(Query(PAGE.share("handoffs_total", NOT_OK), "refused or failed"),),
    steps=((None, "green"), (HANDOFF_FAILURE_LIMIT, "red")),
)
_HANDOFF_TIME = Panel(
    title="Time per handoff",
    description="Seconds per handoff, by phase: prefill is the whole call as decode sees it, transfer what it took "
    "beyond the prefill replica's own time; export and insert are the copies out of one cache and into the other. If "
    "these take a growing share of prefill, moving the state costs more than computing it: use a monolith or a faster "
    "link.",
    unit="s",
    queries=(
        Query(
            f"{PAGE.rate('handoff_seconds_total', 'phase')} / ignoring (phase) group_left () "
            f"({PAGE.rate('handoffs_total')} > 0)",
            "{{phase}}",
        ),
    ),
)
_HANDOFF_BYTES = Panel(
    title="Bytes handed off",
    description="Bytes of computed-token state per second. Compare with the bandwidth between the pools: near its "
    "limit, the time to first token grows.",
    unit="Bps",
    queries=(Query(PAGE.rate("handoff_bytes_total"), "bytes"),),
)
_REFUSALS = Panel(
    title="Refusals by reason",
    description="Handoffs that the decode side refused. Manifest or version: two models or versions run under one "
    "name. Damaged: the state was corrupted in transit.",
    queries=(Query(PAGE.events("handoff_refusals_total", "reason"), "{{reason}}", sparse=True),),
    stacked=True,
)
_PREFILL_FAILURES = Panel(
    title="Failed prefills",
    description="Failed prefill attempts, by reason; each is retried, finally on the decode replica. Died: replicas "
    "are lost. Timeout: they hang, or the pool is too small. Full: the pool is too small. An alert fires on the "
    "share of all but full.",
    queries=(Query(PAGE.events("prefill_failures_total", "reason"), "{{reason}}", sparse=True),),
    stacked=True,
)
_RESUMES = Panel(
    title="Requests that lost their replica",
    description="Requests whose decode replica was lost. Resumed: they continued elsewhere, and their clients saw a "
    "pause. Failed: they did not ask to be resumed, or were resumed too often.",
    queries=(Query(PAGE.events("resumes_total", "result"), "{{result}}", sparse=True),),
    stacked=True,
)
_PROMPT_TOKENS = Panel(
    title="Prompt tokens computed",
    description="Prompt tokens per second, by pool. Many in the decode pool mean that handoffs fail or sequences are "
    "preempted, and decoding waits for prompts.",
    unit="ops",
    queries=(Query(PAGE.rate("prompt_tokens_total", "pool"), "{{pool}}"),),
)
_POOL_LOAD = Panel(
    title="Running by replica",
    description="Requests running on each replica. An outlier is unhealthy or badly routed; if one pool is at its "
    "limit while the other idles, change the ratio of replicas.",
    queries=(Query(REPLICA.gauge("requests_running", "pool", "replica"), "{{pool}} {{replica}}"),),
)

DISAGGREGATION = Page(
    uid="truespec-disaggregation",
    title="truespec / Disaggregation",
    description="The handoff from prefill to decode, and the load of both pools. Empty in a monolith.",
    rows=(
        Row("Handoff", (_HANDOFFS, _HANDOFF_FAILURES, _HANDOFF_TIME, _REFUSALS, _HANDOFF_BYTES)),
        Row("Recovery", (_PREFILL_FAILURES, _RESUMES)),
        Row("Pools", (_LOAD, _POOL_LOAD, _PROMPT_TOKENS)),
    ),
)

_QUEUE_TIME = Panel(
    title="Time in the queue",
    description="From a request's arrival to its first step. If this makes up most of the time to first token, the "
    "service is too small; if not, prompts are long.",
    unit="s",
    queries=_quantiles("queue_time_seconds"),
)
_DURATION = Panel(
    title="Whole requests",
    description="From arrival to the last token, of requests that ended with stop or length. It grows with the length "
    "of answers; if it grows and they do not, look at the time between tokens.",
    unit="s",
    queries=_quantiles("request_duration_seconds"),
)
_PREFIX_CACHE = Share(
    title="Prefix cache hits",
    description="Share of prompt tokens found in the prefix cache. A drop makes prompts more expensive: prompts share "
    "less, routing scatters them, or the cache is too small.",
    queries=(Query(PAGE.ratio("prefix_cache_hits_total", "prefix_cache_queries_total", "pool"), "{{pool}}"),),
)
_PREEMPTIONS = Panel(
    title="Preemptions",
    description="Sequences per second that lost their KV and were recomputed. More than a few: the KV cache is too "
    "small for that many concurrent sequences.",
    unit="ops",
    queries=(Query(PAGE.rate("preemptions_total", "pool"), "{{pool}}"),),
)

LATENCY = Page(
    uid="truespec-latency",
    title="truespec / Latency",
    description="How long clients wait, and why.",
    rows=(
        Row("First token", (_FIRST_TOKEN, _QUEUE_TIME)),
        Row("Further tokens", (_INTER_TOKEN, _DURATION)),
        Row("Causes of latency", (_PREFIX_CACHE, _PREEMPTIONS)),
    ),
)
