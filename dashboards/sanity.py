"""The logprob sanity page: whether served logprobs are right and the output follows the model's distribution."""

from dashboards.panels import PAGE, REPLICA, VISIBLE, Page, Panel, Query, Rates, Row, Share, Stat, Steps
from dashboards.queries import replay_mean, selfcheck_z, tme, untested
from dashboards.speculation import Z_STEPS
from serve_app.telemetry.metric_names import BREAKER_STATES, REPLAY_LAG_LIMIT_S

ALL = 'stratum="all"'  # strata overlap, so their sum is meaningless
TME_LIMIT = 1.05  # NeMo-RL's limit: beyond it the inference engine is at fault
TME_STEPS: Steps = ((None, "green"), (1.03, "yellow"), (TME_LIMIT, "red"))
REPLAY_FAILURE_LIMIT = 0.5
UNTESTED_LIMIT = 0.9
EVENT_STEPS: Steps = ((None, "green"), (1, "red"))
_QUANTILES = (0.5, 0.9, 0.99, 0.999)
_STATE_STEPS: Steps = ((None, "green"), (1, "orange"), (2, "red"))

TME = Stat(
    title="TME",
    description="Mean of exp|served - replayed logprob| over replayed tokens: 1.00 in float32, up to 1.03 in bfloat16. "
    "Above 1.05 the served logprobs are not those of the model: do not train or score on them. A single token far off "
    "is enough, so check the quantiles as well.",
    queries=(Query(tme(VISIBLE, ALL), "TME", instant=True),),
    steps=TME_STEPS,
    decimals=4,
)
ALARMS = Stat(
    title="Alarms",
    description="Alarms of the engine's self-checks and of the replays in the visible time range. The false-alarm rate "
    "is 1e-6 per check over a replica's life: treat any alarm as a fault.",
    queries=(
        Query(VISIBLE.events("selfcheck_alarms_total"), "self-checks", instant=True, sparse=True),
        Query(VISIBLE.events("replay_alarms_total"), "replays", instant=True, sparse=True),
    ),
    steps=EVENT_STEPS,
    decimals=0,
)
VIOLATIONS = Stat(
    title="Broken rules",
    description="Requests that were failed in the visible time range because a step broke an invariant, or because "
    "logprobs broke their contract. Each is an engine fault; none was answered wrongly.",
    queries=(
        Query(VISIBLE.events("selfcheck_violations_total"), "invariants", instant=True, sparse=True),
        Query(VISIBLE.events("logprob_violations_total"), "logprobs", instant=True, sparse=True),
    ),
    steps=EVENT_STEPS,
    decimals=0,
)
BREAKER = Stat(
    title="Breaker",
    description="The worst state of any replica's breaker. Open or canary: that replica serves without speculation "
    "because a fault was found. Out: it has left service and is being replaced.",
    queries=(Query(PAGE.gauge("breaker_state", how="max"), "worst replica"),),
    steps=_STATE_STEPS,
    names=BREAKER_STATES,
)

_TME_BY_STRATUM = Panel(
    title="TME by stratum",
    description="Means over the hour before, which is what the limit is for: of fewer tokens one may pass it by "
    "chance. The stratum that stands out points to the fault: after a handoff, near the length limit, prefix-cached, "
    "at drafted positions. Strata overlap and do not add up. Above 1.05 the logprobs of that stratum are wrong.",
    queries=(Query(tme(PAGE), "{{stratum}}"),),
    steps=((None, "green"), (TME_LIMIT, "red")),
    interval="1h",
    decimals=4,
    minimum=None,
)
_DRIFT_QUANTILES = Panel(
    title="Drift of replayed tokens",
    description="Quantiles of |served - replayed logprob|. Rounding in bfloat16 stays below a few tenths of a nat in "
    "the tail; a median above 0.01 or a tail above 1 nat indicates a fault.",
    queries=tuple(Query(PAGE.quantile(q, "replay_drift_nats"), f"p{100 * q:g} nats") for q in _QUANTILES),
    log_scale=True,
    minimum=None,
)
_KL = Panel(
    title="Generation KL",
    description="Mean over replayed tokens, in nats; healthy below 0.001. Above it, training is biased.",
    queries=(Query(replay_mean(PAGE, "replay_gen_kl_total", ALL), "generation KL"),),
    interval="5m",
    minimum=None,
)
_REPLAYS = Panel(
    title="Replays",
    description="Replays of finished requests per second, by result. Skipped: the queue was full; lower the share or "
    "add prefill replicas. Failed: two attempts did not compute them. Without replays of what is selected, wrong "
    "logprobs go unnoticed.",
    unit="ops",
    queries=(
        Query(PAGE.rate("replays_total", "result"), "{{result}}"),
        Query(PAGE.rate("replays_requested_total", "bytes"), "selected, bytes {{bytes}}"),
    ),
)
_INDEPENDENT = Rates(
    title="Independent replays",
    description="Answers that `transformers` checked after the engine's own replay had verified them, per second. "
    "Disagrees: the engine's model code is wrong everywhere. Unsupported: it cannot have the weights that are served, "
    "and nothing would notice such a fault.",
    queries=(Query(PAGE.rate("independent_replays_total", "result"), "{{result}}"),),
)
_CONTROLS = Rates(
    title="Controls of the referee",
    description="Verified answers that were judged again with a change, per second, by change and result. Each must "
    "be found: a referee that misses one verifies wrong answers, too.",
    queries=(Query(PAGE.rate("referee_controls_total", "change", "result"), "{{change}} {{result}}"),),
)
_FAILED_REPLAYS = Share(
    title="Replays that failed, by the replica that answered",
    description="Share of a replica's answers of the last hour whose replay failed twice. One replica far above the "
    "others: what it answers cannot be replayed, so nothing checks it, and its answers may be wrong.",
    queries=(
        Query(
            f"{PAGE.gauge('recent_replay_failures', 'answered_by')} / {PAGE.gauge('recent_replays', 'answered_by')}",
            "{{answered_by}}",
        ),
    ),
    steps=((None, "green"), (REPLAY_FAILURE_LIMIT, "red")),
)
_REPLAY_TOKENS = Panel(
    title="Tokens replayed",
    description="Tokens compared per second, by stratum. A stratum without tokens is not monitored. Strata overlap.",
    unit="ops",
    queries=(Query(PAGE.rate("replay_tokens_total", "stratum"), "{{stratum}}"),),
)
_LAG = Panel(
    title="Replay lag",
    description="How long the oldest request that is not replayed yet has waited: how late a fault would be noticed. "
    f"Above {REPLAY_LAG_LIMIT_S:g} s an alert fires.",
    unit="s",
    queries=(Query(PAGE.gauge("replay_lag_seconds", how="max"), "lag"),),
    steps=((None, "green"), (REPLAY_LAG_LIMIT_S, "red")),
    width=6,
)
_SELFCHECK_Z = Stat(
    title="Self-check terms, in standard deviations",
    description="Each term has mean 0 while the sampler is correct. Beyond ±5 over the visible time range, the part of "
    "the sampler that the check covers is wrong; docs/metrics.md lists what each covers.",
    queries=(Query(selfcheck_z(VISIBLE), "{{check}}", instant=True),),
    steps=Z_STEPS,
    decimals=1,
    width=12,
    height=8,
)
_SELFCHECK_TERMS = Panel(
    title="Self-check terms per second",
    description="How much evidence each check gathers. 0 means that it sees nothing: greedy requests have no terms, "
    "and some checks need sampled drafts.",
    unit="ops",
    queries=(Query(PAGE.rate("selfcheck_terms_total", "check"), "{{check}}"),),
)
_UNTESTED = Share(
    title="Rounds untested",
    description="Share of checked rounds whose random numbers a client named by its seed, or another request had used, "
    "so that no term counts them. Near 1 all clients send seeds: each draw is still checked against its random number, "
    "and replays still work.",
    queries=(Query(untested(PAGE), "untested"),),
    steps=((None, "green"), (UNTESTED_LIMIT, "red")),
)
_ALARMS_BY_CHECK = Panel(
    title="Alarms by check",
    description="Alarms of the self-checks and of the replays. Each is a fault; the check that fired names the faulty "
    "part (docs/runbooks.md).",
    queries=(
        Query(PAGE.events("selfcheck_alarms_total", "check"), "self-check {{check}}", sparse=True),
        Query(PAGE.events("replay_alarms_total", "alarm", "stratum"), "replay {{alarm}} {{stratum}}", sparse=True),
    ),
    steps=EVENT_STEPS,
)
_VIOLATIONS_BY_KIND = Panel(
    title="Broken rules by kind",
    description="Requests that were failed because an invariant or the logprob contract was broken. Each is an engine "
    "fault.",
    queries=(
        Query(PAGE.events("selfcheck_violations_total", "kind"), "invariant {{kind}}", sparse=True),
        Query(PAGE.events("logprob_violations_total", "kind"), "logprobs {{kind}}", sparse=True),
    ),
    steps=EVENT_STEPS,
)
_BREAKER_BY_REPLICA = Panel(
    title="Breaker by replica",
    description="Closed is healthy. A single open breaker points to that replica; all opening together point to the "
    "model, the settings or a release.",
    queries=(Query(REPLICA.gauge("breaker_state", "replica", how="max"), "{{replica}}"),),
    steps=_STATE_STEPS,
    names=BREAKER_STATES,
    maximum=3,
)
_TRIPS = Panel(
    title="Trips and canaries",
    description="Breaker trips by reason, and canary trials of speculation by result. "
    "Failed canaries: the fault persists, and a second trip takes the replica out.",
    queries=(
        Query(PAGE.events("breaker_trips_total", "reason"), "trip: {{reason}}", sparse=True),
        Query(PAGE.events("canaries_total", "result"), "canary {{result}}", sparse=True),
    ),
)
_VERDICTS = Rates(
    title="Verdicts",
    description="Verdicts on answers per second. Suspect: the answer was generated in a window in which a fault was "
    "found; trainers mask it. Logprobs only: the replay could not compare its tokens. Unverified: it was not replayed.",
    queries=(Query(PAGE.rate("verdicts_total", "verdict"), "{{verdict}}"),),
)
_DISTRIBUTION = Rates(
    title="Replays as evidence on the distribution",
    description="Replayed answers per second. Tested: their tokens count as evidence on whether tokens follow the "
    "model's distribution. If nearly all are chosen_seed, clients name their seeds: each answer's draws are made "
    "again, the distribution of all together is not tested.",
    queries=(Query(PAGE.rate("replay_distributions_total", "distribution"), "{{distribution}}"),),
)
_SPECULATION = Share(
    title="Speculating replicas",
    description="Share of replicas whose requests may speculate. Below 1, the breaker or an operator has switched it "
    "off somewhere: output is correct, but slower.",
    queries=(Query(PAGE.gauge("speculation_enabled", how="avg"), "speculating"),),
    width=6,
)
_WATCHED = Rates(
    title="Watched requests",
    description="Requests through the proxies of `truespec watch` per second, by result. Dropped: the referee lags "
    "behind. Refused: the server reports neither token ids nor logprobs, and nothing can be checked. Unreachable: the "
    "watched server is down. Without captured ones nothing is watched.",
    unit="reqps",
    queries=(Query(PAGE.rate("watched_requests_total", "result"), "{{result}}", sparse=True),),
)
_WATCHED_ANSWERS = Share(
    title="Watched answers that could be read",
    description="Share of the answers at the referee that hold all that a replay needs. Below 1, the referee's "
    "report has the reasons: no token ids, prompts with images, a stream that broke off.",
    queries=(Query(PAGE.share("watched_answers_total", 'result="read"'), "read", sparse=True),),
)

LOGPROB_SANITY = Page(
    uid="truespec-logprob-sanity",
    title="truespec / Logprob sanity",
    description="Whether served logprobs are right and the output follows the model's distribution.",
    rows=(
        Row("At a glance", (TME, ALARMS, VIOLATIONS, BREAKER)),
        Row("Replay", (_TME_BY_STRATUM, _DRIFT_QUANTILES, _KL)),
        Row(
            "Replay volume",
            (
                _REPLAYS,
                _INDEPENDENT,
                _CONTROLS,
                _FAILED_REPLAYS,
                _REPLAY_TOKENS,
                _LAG,
                _SPECULATION,
                _VERDICTS,
                _DISTRIBUTION,
            ),
            collapsed=True,
        ),
        Row("Self-checks", (_SELFCHECK_Z, _SELFCHECK_TERMS, _ALARMS_BY_CHECK, _VIOLATIONS_BY_KIND, _UNTESTED)),
        Row("Breaker", (_BREAKER_BY_REPLICA, _TRIPS)),
        Row("A watched server", (_WATCHED, _WATCHED_ANSWERS), collapsed=True),
    ),
)
