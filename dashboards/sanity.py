"""The logprob sanity page: whether the logprobs that were served are right, and the output follows the model's
distribution."""

from dashboards.panels import PAGE, VISIBLE, Page, Panel, Query, Row, Steps
from dashboards.queries import distribution_mean, replay_mean, selfcheck_z, tme
from dashboards.speculation import Z_STEPS
from serve_app.telemetry.metric_names import BREAKER_STATES

ALL = 'stratum="all"'  # strata overlap, so their sum means nothing
TME_LIMIT = 1.05  # NeMo-RL's: beyond it the inference engine is at fault
TME_STEPS: Steps = ((None, "green"), (1.03, "yellow"), (TME_LIMIT, "red"))
EVENT_STEPS: Steps = ((None, "green"), (1, "red"))
_QUANTILES = (0.5, 0.9, 0.99, 0.999)
_STATE_STEPS: Steps = ((None, "green"), (1, "orange"), (2, "red"))

TME = Panel(
    title="TME",
    description="Mean of exp|logprob served - logprob replayed| over replayed tokens: 1.00 in float32, up to 1.03 in "
    "bfloat16. Above 1.05 the served logprobs are not those of the model: do not train or score on them. One token "
    "that is far off is enough, so look at the quantiles beside it.",
    unit="none",
    queries=(Query(tme(VISIBLE, ALL), "TME", instant=True),),
    kind="stat",
    width=6,
    height=5,
    steps=TME_STEPS,
    decimals=4,
)
ALARMS = Panel(
    title="Alarms",
    description="Alarms of the engine's self-checks and of the replays in the visible time. A clean engine raises "
    "none in its life (chance below one in a million a check): any alarm is a fault to be followed up.",
    unit="none",
    queries=(
        Query(VISIBLE.events("selfcheck_alarms_total"), "self-checks", instant=True, sparse=True),
        Query(VISIBLE.events("replay_alarms_total"), "replays", instant=True, sparse=True),
    ),
    kind="stat",
    width=6,
    height=5,
    steps=EVENT_STEPS,
    decimals=0,
)
VIOLATIONS = Panel(
    title="Broken rules",
    description="Requests that were failed in the visible time because a step broke an invariant, or because logprobs "
    "broke their contract. Each is a fault of the engine; none became a wrong answer.",
    unit="none",
    queries=(
        Query(VISIBLE.events("selfcheck_violations_total"), "invariants", instant=True, sparse=True),
        Query(VISIBLE.events("logprob_violations_total"), "logprobs", instant=True, sparse=True),
    ),
    kind="stat",
    width=6,
    height=5,
    steps=EVENT_STEPS,
    decimals=0,
)
BREAKER = Panel(
    title="Breaker",
    description="The worst state of any replica's breaker. Open or canary: that replica serves without speculation "
    "because something was found wrong. Out: it has left service and is being replaced.",
    unit="none",
    queries=(Query(PAGE.gauge("breaker_state", how="max"), "worst replica"),),
    kind="stat",
    width=6,
    height=5,
    steps=_STATE_STEPS,
    names=BREAKER_STATES,
)

_TME_BY_STRATUM = Panel(
    title="TME by stratum",
    description="The stratum that stands out names the fault: after a handoff, near the length limit, prefix-cached, "
    "at drafted positions. Strata overlap and do not add up. Above 1.05 the logprobs of that stratum are wrong.",
    unit="none",
    queries=(Query(tme(PAGE), "{{stratum}}"),),
    steps=((None, "green"), (TME_LIMIT, "red")),
    interval="5m",
    decimals=4,
)
_DRIFT_QUANTILES = Panel(
    title="Drift of replayed tokens",
    description="Quantiles of |logprob served - logprob replayed|. Rounding in bfloat16 stays below some tenths of a "
    "nat at the far end; a median above 0.01 or a tail above 1 nat is a fault.",
    unit="none",
    queries=tuple(Query(PAGE.quantile(q, "replay_drift_nats"), f"p{100 * q:g} nats") for q in _QUANTILES),
    log_scale=True,
)
_DRIFT_HEATMAP = Panel(
    title="Distribution of drift",
    description="Replayed tokens by how far their logprob was off, in nats. Healthy: one band at the bottom that does "
    "not move. A second band higher up is a fault that hits some tokens only.",
    unit="none",
    queries=(Query(PAGE.increase("replay_drift_nats", "le"), "{{le}}"),),
    kind="heatmap",
)
_DRIFT_OVER = Panel(
    title="Share of tokens that drifted far",
    description="Replayed tokens whose logprob was off by more than 0.1, 1 and 5 nats. More than 1 nat is never "
    "rounding.",
    unit="percentunit",
    queries=(
        Query(
            f"{PAGE.events('replay_drift_over_total', 'nats', where=ALL)} / ignoring (nats) group_left () "
            f"({PAGE.events('replay_tokens_total', where=ALL)} > 0)",
            "over {{nats}} nats",
        ),
    ),
    minimum=0,
)
_IMPORTANCE = Panel(
    title="Importance ratio",
    description="Mean of exp(replayed - served), 1 where nothing is wrong. Away from 1 by more than a percent, "
    "importance sampling in training is biased.",
    unit="none",
    queries=(Query(replay_mean(PAGE, "replay_importance_ratio_total", ALL), "importance ratio"),),
    interval="5m",
    decimals=4,
)
_KL = Panel(
    title="Generation KL and probability drift",
    description="Means over replayed tokens. Generation KL is healthy below 0.001 nats; a mean probability difference "
    "above 0.01 is a fault of the engine.",
    unit="none",
    queries=(
        Query(replay_mean(PAGE, "replay_gen_kl_total", ALL), "generation KL, nats"),
        Query(replay_mean(PAGE, "replay_probability_drift_total", ALL), "probability difference"),
    ),
    interval="5m",
)
_CALIBRATION = Panel(
    title="Distribution test",
    description="Whether replayed tokens are as likely as the model's distribution says: p(y) minus its mean, and "
    "surprisal "
    "minus its mean. Both are 0 within rounding; away from 0 the text does not follow the model, even where its "
    "logprobs are right.",
    unit="none",
    queries=(Query(distribution_mean(PAGE, ALL), "{{term}}"),),
    interval="5m",
)
_REPLAYS = Panel(
    title="Replays",
    description="Replays of finished requests a second, by result. Skipped: the queue was full, lower the share or "
    "add prefill replicas. Failed: nobody could compute them. Without replays, wrong logprobs go unseen.",
    unit="ops",
    queries=(Query(PAGE.rate("replays_total", "result"), "{{result}}"),),
    stacked=True,
    minimum=0,
)
_REPLAY_TOKENS = Panel(
    title="Tokens replayed",
    description="Tokens compared a second, by stratum. A stratum without tokens is not watched. Strata overlap.",
    unit="ops",
    queries=(Query(PAGE.rate("replay_tokens_total", "stratum"), "{{stratum}}"),),
    minimum=0,
)
_QUEUE = Panel(
    title="Replay queue",
    description="Finished requests that wait to be replayed. A queue that stays full skips replays: lower the share.",
    unit="none",
    queries=(Query(PAGE.gauge("replay_queue_length"), "waiting"),),
    minimum=0,
    width=6,
)
_SELFCHECK_Z = Panel(
    title="Self-check terms, in standard deviations",
    description="Each term has mean 0 while the sampler is right. Beyond ±5 over the visible time the part of the "
    "sampler that the check watches is wrong; docs/metrics.md says which that is.",
    unit="none",
    queries=(Query(selfcheck_z(VISIBLE), "{{check}}", instant=True),),
    kind="bargauge",
    steps=Z_STEPS,
    minimum=-8,
    maximum=8,
    decimals=1,
)
_SELFCHECK_TERMS = Panel(
    title="Self-check terms a second",
    description="How much evidence each check gathers. 0 means that it sees nothing: greedy requests have no terms, "
    "and some checks need drafts that were drawn.",
    unit="ops",
    queries=(Query(PAGE.rate("selfcheck_terms_total", "check"), "{{check}}"),),
    minimum=0,
)
_REPEATED_SEEDS = Panel(
    title="Requests with a seed that was seen before",
    description="They draw the same numbers again, so no self-check counts them. Where all clients send one seed, the "
    "self-checks see nothing: replays still do.",
    unit="reqps",
    queries=(Query(PAGE.rate("repeated_seeds_total"), "repeated"),),
    minimum=0,
)
_ALARMS_BY_CHECK = Panel(
    title="Alarms by check",
    description="Alarms of the self-checks and of the replays. Any is a fault; which one fired names the part that is "
    "wrong (docs/runbooks.md).",
    unit="none",
    queries=(
        Query(PAGE.events("selfcheck_alarms_total", "check"), "self-check {{check}}", sparse=True),
        Query(PAGE.events("replay_alarms_total", "alarm", "stratum"), "replay {{alarm}} {{stratum}}", sparse=True),
    ),
    minimum=0,
)
_VIOLATIONS_BY_KIND = Panel(
    title="Broken rules by kind",
    description="Requests that were failed because an invariant or the logprob contract was broken. Any is a fault of "
    "the engine.",
    unit="none",
    queries=(
        Query(PAGE.events("selfcheck_violations_total", "kind"), "invariant {{kind}}", sparse=True),
        Query(PAGE.events("logprob_violations_total", "kind"), "logprobs {{kind}}", sparse=True),
    ),
    minimum=0,
)
_BREAKER_BY_REPLICA = Panel(
    title="Breaker by replica",
    description="Closed is healthy. A replica that opens alone has a fault of its own; all opening together points to "
    "the model, the settings or a release.",
    unit="none",
    queries=(Query(PAGE.gauge("breaker_state", "replica", how="max"), "{{replica}}"),),
    steps=_STATE_STEPS,
    names=BREAKER_STATES,
    minimum=0,
    maximum=3,
)
_TRIPS = Panel(
    title="Trips, canaries and dumps",
    description="Trips of the breaker by what was found wrong, trials of speculation by result, and files written for "
    "a post-mortem. Failed canaries: the fault is still there, and a second trip takes the replica out.",
    unit="none",
    queries=(
        Query(PAGE.events("breaker_trips_total", "reason"), "trip: {{reason}}", sparse=True),
        Query(PAGE.events("canaries_total", "result"), "canary {{result}}", sparse=True),
        Query(PAGE.events("dumps_total"), "dumps", sparse=True),
    ),
    minimum=0,
)
_VERDICTS = Panel(
    title="Verdicts",
    description="Verdicts on answers a second. Suspect: the answer was given in a window in which something was found "
    "wrong; trainers mask it. Unverified: it was not replayed.",
    unit="ops",
    queries=(Query(PAGE.rate("verdicts_total", "verdict"), "{{verdict}}"),),
    stacked=True,
    minimum=0,
)
_DISTRIBUTION = Panel(
    title="What replays say of the distribution",
    description="Replayed answers a second. Tested: their tokens are evidence on whether tokens follow the model's "
    "distribution. Where nearly all are repeated_seed, clients send one seed again and again, and nothing is tested.",
    unit="ops",
    queries=(Query(PAGE.rate("replay_distributions_total", "distribution"), "{{distribution}}"),),
    stacked=True,
    minimum=0,
)
_SPECULATION = Panel(
    title="Replicas that speculate",
    description="Share of replicas whose requests may speculate. Below 1, the breaker or an operator has switched it "
    "off somewhere: right, but slower.",
    unit="percentunit",
    queries=(Query(PAGE.gauge("speculation_enabled", how="avg"), "speculating"),),
    minimum=0,
    maximum=1,
    width=6,
)

LOGPROB_SANITY = Page(
    uid="truespec-logprob-sanity",
    title="truespec / Logprob sanity",
    description="Whether the logprobs that were served are right, and the output follows the model's distribution.",
    rows=(
        Row("At a glance", (TME, ALARMS, VIOLATIONS, BREAKER)),
        Row("Replay", (_TME_BY_STRATUM, _DRIFT_QUANTILES, _DRIFT_HEATMAP, _DRIFT_OVER, _IMPORTANCE, _KL, _CALIBRATION)),
        Row("How much is replayed", (_REPLAYS, _REPLAY_TOKENS, _QUEUE, _SPECULATION, _VERDICTS, _DISTRIBUTION)),
        Row(
            "Self-checks",
            (_SELFCHECK_Z, _SELFCHECK_TERMS, _ALARMS_BY_CHECK, _VIOLATIONS_BY_KIND, _REPEATED_SEEDS),
        ),
        Row("Breaker", (_BREAKER_BY_REPLICA, _TRIPS)),
    ),
)
