"""Every metric truespec exports, as data: dashboards, alerts, docs and the exporter read this list and nothing else.

Counters end in `_total` and count from 0 at the start of the process that keeps them. Compute means and shares
from counters, and quantiles from histograms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES, SAMPLED_INVARIANTS, CheckSums, StepStats

PREFIX = "truespec_"
COMMON_LABELS = ("model_name", "pool")
REPLICA_LABEL = "replica"  # gauges carry it besides the common labels, since they do not add up
BREAKER_STATES = ("closed", "canary", "open", "out")  # in the order of the gauge's values
TRIP_REASONS = {  # and what each means
    "selfcheck": "a zero-mean check of the engine raised its alarm",
    "invariant": "a step broke a rule that holds in every step",
    "logprobs": "logprobs broke their contract",
    "drift": "replayed logprobs differed from those served",
    "law": "replays show that tokens do not follow the distribution they should",
    "rehearsal": "a rehearsed fault was found; no answer is suspect",
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
STAGES = {  # of a client's request
    "prefill": "it waits for its first token",
    "decode": "it has one, and gets more",
    "reply": "it has all: its verdict is awaited, or its client takes the rest",
}
WEIGHT_AGES = {
    "current": "drafted and verified with the newest weights that the replica has served",
    "previous": "with those before the last update, which requests that were running may still use",
    "older": "with weights before those",
}
INDEPENDENT_RESULTS = {
    "agrees": "`transformers` finds what was served",
    "disagrees": "it does not, though the engine's own replay did: the engine's model code or its weights are wrong",
    "skipped": "not tried: others were waiting, or it has more than 4096 tokens",
    "outdated": "not comparable: the weights have been changed since",
    "unsupported": "`transformers` cannot have the weights that are served (the log says why)",
    "failed": "not computed: its process died, or no replica could start it",
}
REPLY_BYTES = {
    "agrees": "compared with the request and the engine's tokens, as they went out: all that both know is equal",
    "differs": "compared so: something is not equal, and the answer is suspect",
    "unread": "they could not be read: a fault of the referee",
    "ended_early": "not all went out: its client left, or it failed",
    "too_large": "there was no room for them",
    "not_kept": "it was not selected, and breaks a limit of its request",
}
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
    "wire": "a reply that is not what its client's request and the engine's own record make of it",
    "draws": "tokens that are not those which the request's seed demands",
    "alternatives": "logprobs reported of other tokens than the emitted ones that are not these tokens' own",
    "missing": "answers that were selected for a replay, and were not handed in",
    "numerics": "a replica says that it rounds more than its configuration does; it is judged by the latter",
}


@dataclass(frozen=True, slots=True)
class Detector:
    """A thing that raises alarms, by how much it looks at: what an alarm means for answers follows from that."""

    name: str
    looks_at: str  # steps, or answers
    setting: str = ""  # of the share of them; "" = it looks at all

    def means_for_answers(self, share: float | None = None) -> str:
        """Say what an alarm of it means for answers. share: what the setting is; None = name the setting."""
        if not self.setting:
            sent = "What broke the rule was not sent, except by vLLM; what else the same fault did may have been."
            return f"{self.name} looks at all {self.looks_at}. {sent}"
        looked_at = f"the share `{self.setting}`" if share is None else f"{share:.0%}"
        sent = "wrong answers may have been sent before the alarm."
        return f"{self.name} looks at {looked_at} of the {self.looks_at}: {sent}"


DETECTORS = {  # by the kind of what they find
    "selfcheck": Detector("This check", "steps", "self_check_sample_rate"),
    "sampled": Detector(f"The check of {', '.join(sorted(SAMPLED_INVARIANTS))}", "steps", "self_check_sample_rate"),
    "invariant": Detector("The check of other rules", "steps"),
    "logprobs": Detector("The check of logprobs", "steps"),
    "replay": Detector("The referee", "answers", "replay.sample_rate"),
    "independent": Detector("This referee", "replayed answers", "replay.independent_rate"),
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
REPLAY_RESULTS = {
    "ok": "computed and compared",
    "failed": "could not be submitted, or two attempts did not compute it: the answer stays unverified",
    "skipped": "not tried: too many were waiting",
    "outdated": "not comparable: the weights have been changed since",
    "refused": "not computed: no sound engine gives that answer (it breaks a limit of its request, is too "
    "long, or has invalid token ids)",
}
DISTRIBUTIONS = {
    "tested": "sampled with random numbers not seen before: evidence on the distribution of the tokens",
    "greedy": "nothing was sampled; each token was compared with the most likely one",
    "chosen_seed": "its client named its seed, or it was seen before, so its tokens are no evidence on the "
    "distribution; its draws are made again",
    "untested": "the replay returned logprobs only",
}
VERDICTS = {
    "verified": "recomputed; no fault found in its tokens, nor in the logprobs that it came with",
    "logprobs_only": "recomputed; its logprobs agree, and the replay could not compare its tokens",
    "unverified": "the check did not take place",
    "suspect": "found wrong, or generated in a window in which a fault was found",
}
MAX_ANSWERING = 100  # replicas whose recent replays are exported
READ_RESULTS = {
    "read": "with all that a replay needs",
    "unreadable": "not to be computed again (the referee's report has the reasons)",
}
FIRST_TOKEN_LIMIT_S = 5.0  # p95; beyond it the status page and an alert say so, unless a limit of another length is set
KV_FULL = 0.95  # share of a replica's blocks, likewise
TURNED_AWAY_LIMIT = 0.05  # share of requests, likewise
REPLAY_LAG_LIMIT_S = 600.0  # likewise

_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DURATION_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_DRIFT_NATS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0, 10.0)

Kind = Literal["counter", "gauge", "histogram"]
Meaning = Mapping[str, str] | str
"""Meaning of a label: each value with its own; one text where the set of values is open."""
StepCounts = Callable[[StepStats], float | Mapping[str, float]]
"""Reads a counter from an engine's steps: a number, or one for each value of its label."""

_POOLS = {
    "prefill": "computes prompts and replays; the referee's counts are reported here, too",
    "decode": "decodes, and answers HTTP where there is no router",
    "monolith": "both in one",
    "router": "answers HTTP in front of replicas that may die",
    "proxy": "Ray Serve's proxies, one on each node",
    "watched": "a server of any make, watched by `truespec watch`",
}
COMMON_MEANINGS: dict[str, Meaning] = {"model_name": "the name that clients use", "pool": _POOLS}
_POSITION = "of the draft token in its round, 0 = first"
_CHECK = "a self-check; truespec_selfcheck_alarms_total lists them"
_STRATUM = "a kind of tokens; they overlap, so that the total is `all` and never the sum"
_ANSWERED_BY = "Ray Serve's name of the replica; of a watched server the name in its header, or `server`"
_SINCE_HANDOFF = {
    "none": "computed where the prompt was",
    "0": "the first round after the handoff",
    "1": "the second",
    "2_3": "the next two",
    "4_7": "the next four",
    "8_up": "all later rounds",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue; its name ends in the unit of its values, except counts."""

    name: str
    kind: Kind
    text: str
    meanings: Mapping[str, Meaning] = field(default_factory=dict)  # of its labels besides the common ones
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, ascending and positive; +Inf is implied
    steps: StepCounts | None = None  # of a counter that engines keep, who know no metrics

    @property
    def label_names(self) -> tuple[str, ...]:
        """The common labels and its own, in the order of kept values."""
        return (*COMMON_LABELS, *self.meanings)

    @property
    def help(self) -> str:
        """The text that Prometheus shows: what is counted, and what its labels mean."""
        return " ".join([self.text, *(f"{label}: {_listed(meaning)}." for label, meaning in self.meanings.items())])


def _listed(meaning: Meaning) -> str:
    return meaning if isinstance(meaning, str) else "; ".join(f"{value} = {text}" for value, text in meaning.items())


def _counter(name: str, text: str, steps: StepCounts | None = None, /, **labels: Meaning) -> Metric:
    return Metric(PREFIX + name, "counter", text, labels, steps=steps)


def _gauge(name: str, text: str, **labels: Meaning) -> Metric:
    return Metric(PREFIX + name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(PREFIX + name, "histogram", text, {}, buckets)


def _positions(counts: Sequence[float]) -> Mapping[str, float]:
    return {str(position): count for position, count in enumerate(counts)}


def _of_checks(part: str) -> StepCounts:
    return lambda s: {check: getattr(s.checks.get(check, CheckSums()), part) for check in CHECKS}


CATALOGUE: tuple[Metric, ...] = (
    # Speculation
    _counter("drafts_total", "Rounds in which a sequence had at least one draft token.", lambda s: s.num_drafts),
    _counter("draft_tokens_total", "Draft tokens proposed.", lambda s: s.num_drafted),
    _counter("accepted_tokens_total", "Draft tokens accepted by the verifier.", lambda s: s.num_accepted),
    _counter("emitted_tokens_total",
        "Tokens emitted: accepted drafts, and the recovered or bonus token of each round.", lambda s: s.num_emitted),
    _counter("prompt_tokens_total", "Prompt tokens computed, recomputation after preemption included.",
        lambda s: s.num_prompt_tokens),
    _counter("draft_tokens_per_position_total", "Draft tokens proposed.",
        lambda s: _positions(s.drafted_per_position), position=_POSITION),
    _counter("accepted_tokens_per_position_total", "Draft tokens accepted.",
        lambda s: _positions(s.accepted_per_position), position=_POSITION),
    _gauge("held_out_acceptance_ratio",
        "Share of a draft head's drafts at a position that training found accepted on held-out answers, given that "
        "all before it are accepted. Exported for heads that come with it.",
        position=_POSITION, sampling={"sampled": "temperature 1, without filters", "greedy": "temperature 0"}),
    _counter("draft_tokens_since_handoff_total",
        "Draft tokens proposed for clients' requests, by rounds since the handoff.", since_handoff=_SINCE_HANDOFF,
        weights=WEIGHT_AGES),
    _counter("accepted_tokens_since_handoff_total", "Those of them that were accepted.", since_handoff="as above",
        weights="as above"),
    _counter("expected_accepted_tokens_total",
        "Sum of the verifier's own acceptance probabilities over the positions it reached. Accepted tokens must match "
        "it.", lambda s: s.expected_accepted),
    _counter("achievable_accepted_tokens_total",
        "Sum of sum(min(p, q)) over the positions reached, with the q that drafts were sampled from: the most that a "
        "verifier can accept that knows q.", lambda s: s.achievable_accepted),
    _counter("step_seconds_total", "Time of the engine's steps.",
        lambda s: {"draft": s.draft_s, "verify": s.verify_s}, phase={
        "draft": "drafting",
        "verify": "the target's forward pass and verification",
    }),
    _counter("speculated_seconds_total",
        "Time of steps that decode with drafts, where it is known what they cost without: drafts of dynamic length by "
        "truespec's engine. A step that took far longer than such steps do counts as a slow one.",
        lambda s: s.speculated_s),
    _counter("speculated_plain_seconds_total",
        "The time that the tokens of these steps would have taken without drafts, estimated from timed steps.",
        lambda s: s.speculated_plain_s),
    # Handoff and recovery
    _counter("handoffs_total", "Handoffs from prefill to decode.", result={
        "ok": "accepted by the decode engine",
        "refused": "not accepted; the decode engine computed the prompt",
        "failed": "no prefill replica supplied one; the decode engine computed the prompt",
    }),
    _counter("handoff_bytes_total", "Bytes of computed-token state handed off."),
    _counter("handoff_seconds_total", "Time spent on handoffs.",
        lambda s: {"export": s.export_s, "check": s.check_s, "insert": s.insert_s}, phase={
        "prefill": "from the request for a prefill to its answer, as the decode replica sees it",
        "export": "copying keys and values out of the prefill engine's cache",
        "pack": "preparing the handoff for its transport",
        "transfer": "the call's way to the prefill replica, and the handoff's way back",
        "unpack": "receiving it from its transport, on the decode replica",
        "check": "verifying its checksum and manifest",
        "insert": "copying keys and values into the decode engine's cache",
    }),
    _counter("handoff_refusals_total", "Handoffs that the decode side refused.", reason={
        "request": "it was computed for another prompt",
        "manifest": "it was computed with another model, dtype, drafter or layout",
        "version": "it was computed by a build that uses another wire format",
        "damaged": "it was truncated or altered in transit, or contradicts itself",
        "drafter": "the drafter's state is missing from it, or has another shape",
        "lost": "vLLM could not read it through NIXL, or it was no longer there",
    }),
    _counter("prefill_failures_total",
        "Prefills that failed and were retried or computed by the decode replica.", reason={
        "died": "the replica was lost, or could not be reached",
        "timeout": "it took longer than `recovery.prefill_timeout_s` and twice its estimated time",
        "full": "the pool accepts no more work",
        "engine": "its engine failed on the request",
    }),
    _counter("resumes_total", "Requests whose decode replica was lost.", result={
        "resumed": "continues on another replica",
        "failed": "ended with an error",
    }),
    # Requests
    _counter("requests_total", "Finished requests.", outcome={
        "stop": "ended with a stop token or a stop string",
        "length": "reached its max_tokens, or the model's longest length",
        "abort": "its connection ended: its client left, or the proxy between died, which looks the same from here. "
        "Ray Serve's proxy counts the former as `ray_serve_num_http_requests_total` with status_code 499",
        "error": "the engine or the service failed, or the deadline passed",
        "rejected": "was not started: too much was in flight, or it asks for something that cannot be served",
    }),
    _counter("refusals_total", "Valid requests that were refused.", reason=REFUSALS),
    _counter("http_responses_total",
        "Responses under /v1 and /inference. A stream that breaks off later has begun with 200. Replies of Ray "
        "Serve's proxy, for want of a replica, are not counted.",
        code="the HTTP status; 499 if the client left before its answer began"),
    _gauge("keys_stale", "1 while a replica's API key file is invalid and the keys before it are in effect; else 0."),
    _gauge("requests_in_flight",
        "Client requests from admission to the last byte, where they are answered or decoded.", stage=STAGES),
    _gauge("requests_running", "Client requests being computed."),
    _gauge("requests_waiting", "Client requests waiting for room in the engine."),
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _REQUEST_S),
    _histogram("inter_token_latency_seconds", "Between two messages of a stream, per token of the later.", _TOKEN_S),
    _histogram("queue_time_seconds", "From a request's arrival to its first step.", _REQUEST_S),
    _histogram(  # a request with n choices counts n times
        "request_duration_seconds",
        "From a request's arrival to its last token, of requests that ended with stop or length.",
        _DURATION_S,
    ),
    # KV cache
    _gauge("kv_cache_usage_ratio", "Share of the KV blocks that sequences hold, 0 to 1."),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    _counter("preemptions_total", "Sequences that lost their KV and were recomputed.", lambda s: s.num_preemptions),
    # Self-checks of the engine
    _counter("selfcheck_alarms_total",
        "Alarms of the engine's self-checks, whose terms have mean 0 as long as it samples from the distributions it "
        "claims to. A healthy engine raises none.", lambda s: dict.fromkeys(CHECKS, 0) | s.alarms, check=CHECKS),
    _counter("selfcheck_terms_total",
        "Zero-mean terms evaluated; z = (positive - negative) / sqrt(square) is of order 1.", _of_checks("num"),
        check=_CHECK),
    _counter("selfcheck_positive_total", "Sum of the terms' positive parts.", _of_checks("positive"), check=_CHECK),
    _counter("selfcheck_negative_total", "Sum of the terms' negative parts, each above 0.", _of_checks("negative"),
        check=_CHECK),
    _counter("selfcheck_square_total", "Sum of the terms' squares.", _of_checks("square"), check=_CHECK),
    _counter("selfcheck_violations_total",
        "Requests failed because a step broke an invariant. With vLLM also steps that verified sampled drafts without "
        "q (q_missing), and tokens (greedy, draw).",
        lambda s: dict.fromkeys(INVARIANTS, 0) | s.violations, kind=INVARIANTS),
    _counter("selfcheck_rounds_total",
        "Rounds of requests that sample, in the steps whose self-check terms are taken.",
        lambda s: s.num_checked_rounds),
    _counter("selfcheck_untested_rounds_total",
        "Those of them whose random numbers their client named by a seed, or another request with the same seed had "
        "used. No term counts them.", lambda s: s.num_untested_rounds),
    _counter("rounds_with_logprobs_total", "Rounds of requests that ask for logprobs.",
        lambda s: s.num_rounds_with_logprobs),
    _counter("draft_tokens_with_logprobs_total",
        "Draft tokens in rounds of requests that ask for logprobs; 0 would mean that logprobs switch speculation off.",
        lambda s: s.num_drafted_with_logprobs),
    _counter("logprob_violations_total", "Requests failed because their logprobs broke the contract.",
        lambda s: dict.fromkeys(LOGPROB_RULES, 0) | s.logprob_violations, kind=LOGPROB_RULES),
    # Replay
    _counter("replays_total", "Replays of finished requests.", result=REPLAY_RESULTS),
    _gauge(
        "recent_replays",
        f"Replays of a replica's answers that ended in the last hour, for the {MAX_ANSWERING} replicas that "
        "answered last.",
        answered_by=_ANSWERED_BY,
    ),
    _gauge("recent_replay_failures", "Those of them that failed (twice).", answered_by=_ANSWERED_BY),
    _counter("replays_requested_total",
        "Finished requests that were selected for a replay, by what became of the bytes of their replies.",
        bytes=REPLY_BYTES),
    _counter("independent_replays_total", "Answers that an independent referee checked again.",
        result=INDEPENDENT_RESULTS),
    _counter("referee_controls_total",
        "Verified answers that were judged again with a change that the referee must find.", change={
        "logprobs": "each logprob is a nat too high",
        "token": "the surest tokens are replaced by others",
        "seed": "the seed is another",
        "alternatives": "the logprobs beside the tokens' own are 20 nats too low",
        "limit": "max_tokens is one less than the number of tokens",
    }, result={
        "found": "the referee called it suspect, as it must",
        "missed": "it did not: verdicts of this referee cannot be trusted",
        "failed": "not replayed",
    }),
    _gauge("replay_lag_seconds", "Age of the oldest request that waits for its replay."),
    _gauge("replays_running", "Replays that a replica is computing, or that wait for room in its engine."),
    _counter("replay_tokens_total", "Tokens whose logprob was compared with a replay's.", stratum=_STRATUM),
    _counter("replay_tme_excess_total",
        "Sum of exp|d| - 1 over replayed tokens, d = served minus replayed logprob, |d| clipped at 10 nats; TME = 1 + "
        "this / replay tokens.", stratum=_STRATUM),
    _counter("replay_gen_kl_total",
        "Sum of exp(-d) + d - 1 in nats over replayed tokens; a healthy mean is below 0.001.", stratum=_STRATUM),
    _histogram("replay_drift_nats", "|served - replayed logprob| of a token.", _DRIFT_NATS),
    _counter("replay_alarms_total", "Alarms over replayed tokens.", alarm=REPLAY_ALARMS, stratum=_STRATUM),
    _counter("replay_distributions_total", "Replayed requests, by their evidence about the distribution.",
        distribution=DISTRIBUTIONS),
    _counter("verdicts_total", "Verdicts on answers.", verdict=VERDICTS),
    # A watched server
    _counter("watched_requests_total", "Requests through the proxy of `truespec watch`.", result=WATCHED_RESULTS),
    _counter("watched_answers_total", "Answers of a watched server that reached the referee.", result=READ_RESULTS),
    # Breaker
    _gauge(
        "breaker_state",
        f"State of a replica's breaker: {', '.join(f'{value} {name}' for value, name in enumerate(BREAKER_STATES))}.",
    ),
    _gauge("speculation_enabled", "1 if client requests may speculate, according to breaker and operator."),
    _counter("breaker_trips_total", "Breaker trips.", reason=TRIP_REASONS),
    _counter("canaries_total", "Canary trials of speculation.", result={
        "passed": "no fault was found: speculation is re-enabled",
        "failed": "a fault was found: speculation stays off for longer",
        "inconclusive": "too little was drafted, or the trial could not be run; it is repeated",
    }),
    # Replicas, as Ray Serve counts them
    _gauge("replicas_wanted", "Replicas of the pool that Ray Serve is to run."),
    _gauge("replicas_running", "Replicas of the pool that serve."),
    _counter("replica_restarts_total",
        "Replicas that Ray Serve replaced because they died or failed their health check, not for a deployment, "
        "scaling or a drain."),
    _counter("requests_interrupted_total",
        "Clients' requests that a replica had, by its last report, when it was lost. Their clients got an error or a "
        "cut stream, or went on elsewhere with `recovery.resume`. No other metric counts them behind HAProxy.",
        stage=STAGES),
    # Weights and build
    _counter("weight_updates_total", "Weight updates of a replica.", result={
        "ok": "the new weights are served",
        "failed": "the old weights are still served",
    }),
    _gauge(
        "kernels_active",
        "1 if a replica computes with the kernels made for its device; 0 if it runs without them, slowly.",
        kernels={"cpu": "our own, for AVX-512 or AVX2", "triton": "on a GPU, by Triton"},
    ),
    _gauge("build_info", "1, for what a replica is.", version="truespec's",
        fingerprint="of the model's configuration and weights", drafter="`drafter.kind` of the configuration"),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}
