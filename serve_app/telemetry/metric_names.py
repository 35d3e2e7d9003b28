"""Every metric truespec exports, as data: dashboards, alerts and both exporters read this list and nothing else.

Counters end in `_total` and count from 0 at the start of the process that keeps them. Compute means and shares
from counters; use histograms for quantiles (Ray's agent only estimates a histogram's sum).
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "truespec_"
COMMON_LABELS = ("model_name", "pool")
REPLICA_LABEL = "replica"  # gauges carry it besides the common labels, since they do not add up
DRIFT_THRESHOLDS_NATS = (0.1, 1.0, 5.0)
BREAKER_STATES = ("closed", "canary", "open", "out")  # in the order of the gauge's values
TRIP_REASONS = {  # and what each means
    "selfcheck": "a zero-mean check of the engine raised its alarm",
    "invariant": "a step broke a rule that holds in every step",
    "logprobs": "logprobs broke their contract",
    "drift": "replayed logprobs differed from those served",
    "law": "replays show that tokens do not follow the distribution they should",
}
REFUSALS = {  # why a valid request is refused, and what each reason means
    "unauthenticated": "no valid API key was sent",
    "forbidden": "the key is not allowed to do this",
    "key_concurrency": "the key has reached its limit of concurrent requests",
    "capacity": "the replica has reached its limit of concurrent requests",
    "load": "as many requests as `limits.max_load` allows are running or waiting",
    "queued_tokens": "too many prompt tokens are queued",
    "time_to_first_token": "the requests ahead would keep it waiting longer than the service allows",
    "deadline": "the requests ahead would keep it waiting past its own deadline",
}
NO_ROOM = ("capacity", "load", "queued_tokens", "time_to_first_token", "deadline")  # a key's limits are its owner's
WEIGHT_AGES = ("current", "previous", "older")
INDEPENDENT_RESULTS = ("agrees", "disagrees", "skipped", "outdated", "unsupported", "failed")
REPLAY_ALARMS = {  # what replays show to be wrong, and what each finding means
    "drift": "served logprobs differ from replayed ones",
    "probability": "tokens are more, or less, likely than tokens sampled from the model's distribution",
    "surprisal": "tokens are more, or less, surprising than tokens sampled from the model's distribution",
    "unlikely": "tokens that the model's distribution all but excludes, more often than sampling from it gives",
    "support": "tokens that the request's rules or filters exclude",
    "greedy": "tokens of greedy requests that are not the most likely ones",
    "impossible": (
        "an answer that no sound engine gives: it breaks a limit of its request, is too long, or has invalid token ids"
    ),
    "draws": "tokens that are not those which the request's seed demands",
    "alternatives": "logprobs reported of other tokens than the emitted ones that are not these tokens' own",
}
WATCHED_RESULTS = {  # what becomes of requests to a watched server, and of what is captured
    "passed": "not in the share that is watched",
    "unwatchable": "in the share, but nothing can be asked for without changing the answer",
    "captured": "handed to the referee",
    "dropped": "captured, and left out because the referee lags behind",
    "failed": "captured, and lost on the way to the referee",
    "refused": "the server refused to report token ids or logprobs, and was asked again without",
    "unreadable": "its body could not be read: passed",
    "too_large": "left out because of its size",
    "not_ok": "answered with an error",
    "left": "its client left before the end",
    "broken_off": "the server broke the reply off",
    "unreachable": "answered with 502 because the server could not be reached",
}
MAX_ANSWERING = 100  # replicas whose recent replays are exported
READ_RESULTS = ("read", "unreadable")
FIRST_TOKEN_LIMIT_S = 5.0  # p95; beyond it the status page and an alert say so, unless a limit of another length is set
KV_FULL = 0.95  # share of a replica's blocks, likewise
TURNED_AWAY_LIMIT = 0.05  # share of requests, likewise
REPLAY_LAG_LIMIT_S = 600.0  # likewise

_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DURATION_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = tuple(float(2**power) for power in range(4, 18))
_DRIFT_NATS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0, 10.0)

_SERVED = ", of requests that ended with stop or length."

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue. `labels` follow the common ones; `unit` is the unit of its values."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, ascending and positive; +Inf is implied

    @property
    def label_names(self) -> tuple[str, ...]:
        """The common labels and the metric's own, in the order in which values are kept."""
        return COMMON_LABELS + self.labels


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "gauge", unit, text, labels)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(PREFIX + name, "histogram", unit, text, (), buckets)


CATALOGUE: tuple[Metric, ...] = (
    # Speculation
    _counter("drafts_total", "rounds", "Rounds in which a sequence had at least one draft token."),
    _counter("draft_tokens_total", "tokens", "Draft tokens proposed."),
    _counter("accepted_tokens_total", "tokens", "Draft tokens accepted by the verifier."),
    _counter(
        "emitted_tokens_total",
        "tokens",
        "Tokens emitted: accepted drafts, and the recovered or bonus token of each round.",
    ),
    _counter("prompt_tokens_total", "tokens", "Prompt tokens computed, recomputation after preemption included."),
    _counter("draft_tokens_per_position_total", "tokens", "Draft tokens proposed, by position, 0 = first.", "position"),
    _counter(
        "accepted_tokens_per_position_total", "tokens", "Draft tokens accepted, by position, 0 = first.", "position"
    ),
    _gauge(
        "held_out_acceptance_ratio",
        "ratio",
        "Share of a draft head's drafts at a position that training found accepted on held-out answers, given "
        "that all before it are accepted. Exported for heads that come with it.",
        "position",
        "sampling",
    ),
    _counter(
        "draft_tokens_since_handoff_total",
        "tokens",
        "Draft tokens proposed for clients' requests, by the rounds since the handoff and the age of the weights.",
        "since_handoff",
        "weights",
    ),
    _counter(
        "accepted_tokens_since_handoff_total",
        "tokens",
        "Draft tokens accepted in clients' requests, by the rounds since the handoff and the age of the weights.",
        "since_handoff",
        "weights",
    ),
    _counter(
        "expected_accepted_tokens_total",
        "tokens",
        "Sum of the verifier's own acceptance probabilities over the positions it reached. Accepted tokens must "
        "match it.",
    ),
    _counter("draft_seconds_total", "seconds", "Time spent drafting."),
    _counter("verify_seconds_total", "seconds", "Time spent in the target's forward pass and in verification."),
    _counter(
        "speculated_seconds_total",
        "seconds",
        "Time of steps that decode with drafts, where it is known what they cost without: drafts of dynamic "
        "length by truespec's engine. A step that took far longer than such steps do counts as a slow one.",
    ),
    _counter(
        "speculated_plain_seconds_total",
        "seconds",
        "The time that the tokens of these steps would have taken without drafts, estimated from timed steps.",
    ),
    # Handoff
    _counter("handoffs_total", "handoffs", "Handoffs from prefill to decode, by result.", "result"),
    _counter("handoff_bytes_total", "bytes", "Bytes of computed-token state handed off."),
    _counter(
        "handoff_seconds_total",
        "seconds",
        "Time spent on handoffs, by phase: prefill, export, pack, transfer, unpack, check, insert.",
        "phase",
    ),
    _counter("handoff_refusals_total", "handoffs", "Handoffs that the decode side refused, by reason.", "reason"),
    # Recovery
    _counter(
        "prefill_failures_total",
        "prefills",
        "Prefills that failed and were retried or computed by the decode replica, by reason.",
        "reason",
    ),
    _counter(
        "resumes_total",
        "requests",
        "Requests whose decode replica was lost, by result.",
        "result",
    ),
    # Requests
    _counter(
        "requests_total",
        "requests",
        "Finished requests, by outcome.",
        "outcome",
    ),
    _counter(
        "refusals_total",
        "requests",
        "Valid requests that were refused, by reason.",
        "reason",
    ),
    _counter(
        "http_responses_total",
        "responses",
        "Responses under /v1 and /inference, by status code. A stream that breaks off later has begun with 200. "
        "Replies of Ray Serve's proxy, for want of a replica, are not counted.",
        "code",
    ),
    _counter(
        "key_file_reloads_total",
        "reloads",
        "Reloads of a changed API key file, by result.",
        "result",
    ),
    _gauge("requests_running", "requests", "Client requests being computed."),
    _gauge("requests_waiting", "requests", "Client requests waiting for room in the engine."),
    _gauge("requests_routed", "requests", "Client requests whose streams a router passes on."),
    _histogram("time_to_first_token_seconds", "seconds", "From a request's arrival to its first token.", _REQUEST_S),
    _histogram(
        "inter_token_latency_seconds", "seconds", "Between two messages of a stream, per token of the later.", _TOKEN_S
    ),
    _histogram("queue_time_seconds", "seconds", "From a request's arrival to its first step.", _REQUEST_S),
    # One with n choices counts n times
    _histogram(
        "request_duration_seconds", "seconds", f"From a request's arrival to its last token{_SERVED}", _DURATION_S
    ),
    _histogram(
        "prefill_time_seconds", "seconds", f"From a request's first step to its first token{_SERVED}", _REQUEST_S
    ),
    _histogram("decode_time_seconds", "seconds", f"From a request's first token to its last{_SERVED}", _DURATION_S),
    _histogram(
        "time_per_output_token_seconds",
        "seconds",
        f"Decode time divided by the number of tokens after the first{_SERVED}",
        _TOKEN_S,
    ),
    _histogram("request_prompt_tokens", "tokens", f"Tokens of the prompt{_SERVED}", _TOKENS),
    _histogram("request_answer_tokens", "tokens", f"Tokens generated{_SERVED}", _TOKENS),
    # KV cache
    _gauge("kv_cache_usage_ratio", "ratio", "Share of the KV blocks that sequences hold, 0 to 1."),
    _counter("prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "tokens", "Prompt tokens found in the prefix cache."),
    _counter("preemptions_total", "preemptions", "Sequences that lost their KV and were recomputed."),
    # Self-checks of the engine
    _counter(
        "achievable_accepted_tokens_total",
        "tokens",
        "Sum of sum(min(p, q)) over the positions reached, with the q that drafts were sampled from: the most "
        "that a verifier can accept that knows q.",
    ),
    _counter(
        "selfcheck_terms_total",
        "terms",
        "Zero-mean terms evaluated, by check; z = (positive - negative) / sqrt(square) is of order 1.",
        "check",
    ),
    _counter("selfcheck_positive_total", "terms", "Sum of the terms' positive parts.", "check"),
    _counter("selfcheck_negative_total", "terms", "Sum of the absolute values of the terms' negative parts.", "check"),
    _counter("selfcheck_square_total", "terms", "Sum of the terms' squares.", "check"),
    _counter(
        "selfcheck_alarms_total",
        "alarms",
        "Alarms of the engine's self-checks, by check. A healthy engine raises none.",
        "check",
    ),
    _counter(
        "selfcheck_violations_total",
        "requests",
        "Requests failed because a step broke an invariant, by kind. With vLLM also steps that verified sampled "
        "drafts without q (q_missing), and tokens (greedy, draw).",
        "kind",
    ),
    _counter(
        "repeated_seeds_total",
        "requests",
        "Requests whose seed the engine had seen before. At positions that an earlier one used, they reuse its "
        "random numbers.",
    ),
    _counter(
        "selfcheck_rounds_total",
        "rounds",
        "Rounds of requests that sample, in the steps whose self-check terms are taken.",
    ),
    _counter(
        "selfcheck_untested_rounds_total",
        "rounds",
        "Those of them whose random numbers another request with the same seed had used. No term counts them.",
    ),
    _counter("rounds_with_logprobs_total", "rounds", "Rounds of requests that ask for logprobs."),
    _counter(
        "draft_tokens_with_logprobs_total",
        "tokens",
        "Draft tokens in rounds of requests that ask for logprobs; 0 would mean that logprobs switch speculation off.",
    ),
    _counter(
        "logprob_violations_total",
        "requests",
        "Requests failed because their logprobs broke the contract, by kind.",
        "kind",
    ),
    # Replay. Strata overlap: the total is stratum="all", never the sum.
    _counter(
        "replays_total",
        "replays",
        "Replays of finished requests, by result.",
        "result",
    ),
    _gauge(
        "recent_replays",
        "replays",
        f"Replays of a replica's answers that ended in the last hour, for the {MAX_ANSWERING} replicas that "
        "answered last.",
        "answered_by",
    ),
    _gauge("recent_replay_failures", "replays", "Those of them that failed (twice).", "answered_by"),
    _counter("replays_requested_total", "replays", "Finished requests that were selected for a replay."),
    _counter(
        "independent_replays_total",
        "replays",
        "Answers that an independent referee checked again, by result.",
        "result",
    ),
    _counter(
        "referee_controls_total",
        "replays",
        "Verified answers that were judged again with a change that the referee must find, by change and result.",
        "change",
        "result",
    ),
    _gauge("replay_queue_length", "replays", "Finished requests waiting to be replayed."),
    _gauge("replay_lag_seconds", "seconds", "Age of the oldest request that waits for its replay."),
    _gauge("replays_running", "replays", "Replays that a replica is computing, or that wait for room in its engine."),
    _counter("replay_tokens_total", "tokens", "Tokens whose logprob was compared with a replay's.", "stratum"),
    _counter(
        "replay_tme_excess_total",
        "ratio",
        "Sum of exp|d| - 1 over replayed tokens, d = served minus replayed logprob, |d| clipped at 10 nats; TME = 1 + "
        "this / replay tokens.",
        "stratum",
    ),
    _counter(
        "replay_gen_kl_total",
        "nats",
        "Sum of exp(-d) + d - 1 over replayed tokens; a healthy mean is below 0.001.",
        "stratum",
    ),
    _counter(
        "replay_importance_ratio_total",
        "ratio",
        "Sum of exp(-d), the sampling importance ratio, over replayed tokens; a healthy mean is 1.",
        "stratum",
    ),
    _counter(
        "replay_probability_drift_total",
        "probability",
        "Sum of |served - replayed probability| over replayed tokens; a mean above 0.01 is a problem.",
        "stratum",
    ),
    _histogram("replay_drift_nats", "nats", "|served - replayed logprob| of a token.", _DRIFT_NATS),
    _counter(
        "replay_drift_over_total", "tokens", "Replayed tokens that drifted by more than `nats`.", "nats", "stratum"
    ),
    _counter(
        "replay_law_terms_total",
        "tokens",
        "Replayed tokens that entered the calibration test, for strata that are known before a token is sampled.",
        "stratum",
    ),
    _counter(
        "replay_law_positive_total",
        "ratio",
        "Sum of the positive parts of the calibration test's terms, by term.",
        "term",
        "stratum",
    ),
    _counter(
        "replay_law_negative_total",
        "ratio",
        "Sum of the absolute values of the negative parts of the calibration test's terms, by term.",
        "term",
        "stratum",
    ),
    _counter(
        "replay_draws_total",
        "checks",
        "Draws of replayed answers that were made again with the request's seed, by check and result.",
        "check",
        "result",
    ),
    _counter(
        "replay_alarms_total",
        "alarms",
        "Alarms over replayed tokens, by finding.",
        "alarm",
        "stratum",
    ),
    _counter(
        "replay_distributions_total",
        "requests",
        "Replayed requests, by their evidence about the distribution.",
        "distribution",
    ),
    _counter(
        "replay_alternatives_total",
        "logprobs",
        "Logprobs that replayed answers report of other tokens than the emitted ones: `top_logprobs`, "
        "`logprob_token_ids`, `prompt_logprobs`.",
        "result",
    ),
    _counter(
        "verdicts_total",
        "requests",
        "Verdicts on answers.",
        "verdict",
    ),
    # A watched server
    _counter(
        "watched_requests_total",
        "requests",
        "Requests through the proxy of `truespec watch`, by result.",
        "result",
    ),
    _counter(
        "watched_answers_total",
        "answers",
        "Answers of a watched server that reached the referee, by result.",
        "result",
    ),
    # Breaker
    _gauge(
        "breaker_state",
        "state",
        f"State of a replica's breaker: {', '.join(f'{value} {name}' for value, name in enumerate(BREAKER_STATES))}.",
    ),
    _gauge("speculation_enabled", "state", "1 if client requests may speculate, according to breaker and operator."),
    _counter(
        "breaker_trips_total",
        "trips",
        "Breaker trips, by reason.",
        "reason",
    ),
    _counter("canaries_total", "canaries", "Canary trials of speculation, by result.", "result"),
    _counter("dumps_total", "dumps", "Dumps written for a post-mortem."),
    # Replicas, as Ray Serve counts them
    _gauge("replicas_wanted", "replicas", "Replicas of the pool that Ray Serve is to run."),
    _gauge("replicas_running", "replicas", "Replicas of the pool that serve."),
    _counter(
        "replica_restarts_total",
        "restarts",
        "Replicas that Ray Serve replaced because they died or failed their health check, not for a deployment, "
        "scaling or a drain.",
    ),
    _counter(
        "requests_interrupted_total",
        "requests",
        "Clients' requests that a replica had, by its last report, when it was lost. Their clients got an error "
        "or a cut stream, or went on elsewhere with `recovery.resume`. No other metric counts them behind "
        "HAProxy.",
    ),
    # Weights
    _counter(
        "weight_updates_total",
        "updates",
        "Weight updates of a replica, by result.",
        "result",
    ),
    _counter(
        "weight_update_seconds_total",
        "seconds",
        "Time spent on weight updates, by phase.",
        "phase",
    ),
    # Build
    _gauge(
        "kernels_active",
        "state",
        "1 if a replica computes with the kernels made for its device; 0 if it runs without them, slowly.",
        "kernels",
    ),
    _gauge(
        "untested_engine",
        "state",
        "1 if a replica runs a version of vLLM whose faults have not been looked for (`vllm.allow_untested`).",
        "engine",
    ),
    _gauge(
        "build_info",
        "info",
        "1, labelled with version, model fingerprint and kind of drafter.",
        "version",
        "fingerprint",
        "drafter",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}
