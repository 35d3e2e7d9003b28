"""The logprob sanity page: whether served logprobs are right and the output follows the model's distribution."""

from dashboards import recordings, shell
from dashboards.alerts import IN_1H, IN_15M, IN_30M, MINIMUM, REPLICAS, THRESHOLD, Alert, any_of, share
from dashboards.panels import PAGE, REPLICA, VISIBLE, Page, Panel, Query, Rates, Row, Share, Stat, Steps
from dashboards.queries import NOT_OK, replay_mean, selfcheck_z, tme, untested
from dashboards.recordings import model_sum
from dashboards.speculation import Z_STEPS
from serve_app.telemetry.metric_names import BREAKER_STATES, DETECTORS, REPLAY_LAG_LIMIT_S

ALL = 'stratum="all"'  # strata overlap, so their sum is meaningless
TME_LIMIT = 1.05  # NeMo-RL's limit: beyond it the inference engine is at fault
TME_STEPS: Steps = ((None, "green"), (1.03, "yellow"), (TME_LIMIT, "red"))
REPLAY_FAILURE_LIMIT = 0.5
UNTESTED_LIMIT = 0.9
EVENT_STEPS: Steps = ((None, "green"), (1, "red"))
_QUANTILES = (0.5, 0.9, 0.99, 0.999)
_STATE_STEPS: Steps = ((None, "green"), (1, "orange"), (2, "red"))
TME = Stat(
    "TME",
    "Mean of exp|served - replayed logprob| over replayed tokens: 1.00 in float32, up to 1.03 in bfloat16. Above "
    "1.05 the served logprobs are not those of the model: do not train or score on them. A single token far off is "
    "enough, so check the quantiles as well.",
    (Query(tme(VISIBLE, ALL), "TME", instant=True),),
    steps=TME_STEPS,
    decimals=4,
)

ALARMS = Stat(
    "Alarms",
    "Alarms of the engine's self-checks and of the replays in the visible time range. The false-alarm rate is 1e-6 "
    "per check over a replica's life: treat any alarm as a fault.",
    (
        Query(VISIBLE.events("selfcheck_alarms_total"), "self-checks", instant=True, sparse=True),
        Query(VISIBLE.events("replay_alarms_total"), "replays", instant=True, sparse=True),
    ),
    steps=EVENT_STEPS,
    decimals=0,
)

VIOLATIONS = Stat(
    "Broken rules",
    "Requests that were failed in the visible time range because a step broke an invariant, or because logprobs "
    "broke their contract. Each is an engine fault, of which others may have been sent wrong tokens.",
    (
        Query(VISIBLE.events("selfcheck_violations_total"), "invariants", instant=True, sparse=True),
        Query(VISIBLE.events("logprob_violations_total"), "logprobs", instant=True, sparse=True),
    ),
    steps=EVENT_STEPS,
    decimals=0,
)

BREAKER = Stat(
    "Breaker",
    "The worst state of any replica's breaker. Open or canary: that replica serves without speculation because a "
    "fault was found. Out: it has left service and is being replaced.",
    (Query(PAGE.gauge("breaker_state", how="max"), "worst replica"),),
    steps=_STATE_STEPS,
    names=BREAKER_STATES,
)

LOGPROB_SANITY = Page("Logprob sanity",
    "Whether served logprobs are right and the output follows the model's distribution.", (
    Row("At a glance", (
        TME, ALARMS, VIOLATIONS, BREAKER)),
    Row("Replay", (
        Panel("TME by stratum",
            "Means over the hour before, which is what the limit is for: of fewer tokens one may pass it by chance. "
            "The stratum that stands out points to the fault: after a handoff, near the length limit, prefix-cached, "
            "at drafted positions. Strata overlap and do not add up. Above 1.05 the logprobs of that stratum are "
            "wrong.",
            (Query(tme(PAGE), "{{stratum}}"),), steps=((None, "green"), (TME_LIMIT, "red")), interval="1h", decimals=4,
            minimum=None),
        Panel("Drift of replayed tokens",
            "Quantiles of |served - replayed logprob|. Rounding in bfloat16 stays below a few tenths of a nat in the "
            "tail; a median above 0.01 or a tail above 1 nat indicates a fault.",
            tuple(Query(PAGE.quantile(q, "replay_drift_nats"), f"p{100 * q:g} nats") for q in _QUANTILES),
            log_scale=True, minimum=None),
        Panel("Generation KL",
            "Mean over replayed tokens, in nats; healthy below 0.001. Above it, training is biased.",
            (Query(replay_mean(PAGE, "replay_gen_kl_total", ALL), "generation KL"),), interval="5m", minimum=None))),
    Row("Replay volume", (
        Panel("Replays",
            "Replays of finished requests per second, by result. Skipped: the queue was full; lower the share or add "
            "prefill replicas. Failed: two attempts did not compute them. Without replays of what is selected, wrong "
            "logprobs go unnoticed.",
            (Query(PAGE.rate("replays_total", "result"), "{{result}}"),
             Query(PAGE.rate("replays_requested_total", "bytes"), "selected, bytes {{bytes}}")),
            unit="ops"),
        Rates("Independent replays",
            "Answers that `transformers` checked after the engine's own replay had verified them, per second. "
            "Disagrees: the engine's model code is wrong everywhere. Unsupported: it cannot have the weights that "
            "are served, and nothing would notice such a fault.",
            (Query(PAGE.rate("independent_replays_total", "result"), "{{result}}"),)),
        Rates("Controls of the referee",
            "Verified answers that were judged again with a change, per second, by change and result. Each must be "
            "found: a referee that misses one verifies wrong answers, too.",
            (Query(PAGE.rate("referee_controls_total", "change", "result"), "{{change}} {{result}}"),)),
        Share("Replays that failed, by the replica that answered",
            "Share of a replica's answers of the last hour whose replay failed twice. One replica far above the "
            "others: what it answers cannot be replayed, so nothing checks it, and its answers may be wrong.",
            (Query(f"{PAGE.gauge('recent_replay_failures', 'answered_by')} / "
                 f"{PAGE.gauge('recent_replays', 'answered_by')}", "{{answered_by}}"),),
            steps=((None, "green"), (REPLAY_FAILURE_LIMIT, "red"))),
        Panel("Tokens replayed",
            "Tokens compared per second, by stratum. A stratum without tokens is not monitored. Strata overlap.",
            (Query(PAGE.rate("replay_tokens_total", "stratum"), "{{stratum}}"),), unit="ops"),
        Panel("Replay lag",
            "How long the oldest request that is not replayed yet has waited: how late a fault would be noticed. "
            f"Above {REPLAY_LAG_LIMIT_S:g} s an alert fires.",
            (Query(PAGE.gauge("replay_lag_seconds", how="max"), "lag"),), unit="s",
            steps=((None, "green"), (REPLAY_LAG_LIMIT_S, "red")), width=6),
        Share("Speculating replicas",
            "Share of replicas whose requests may speculate. Below 1, the breaker or an operator has switched it off "
            "somewhere: it decodes without drafts, slower.",
            (Query(PAGE.gauge("speculation_enabled", how="avg"), "speculating"),), width=6),
        Rates("Verdicts",
            "Verdicts on answers per second. Suspect: the answer was generated in a window in which a fault was "
            "found; trainers mask it. Logprobs only: the replay could not compare its tokens. Unverified: it was not "
            "replayed.",
            (Query(PAGE.rate("verdicts_total", "verdict"), "{{verdict}}"),)),
        Rates("Replays as evidence on the distribution",
            "Replayed answers per second. Tested: their tokens count as evidence on whether tokens follow the "
            "model's distribution. If nearly all are chosen_seed, clients name their seeds: each answer's draws are "
            "made again, the distribution of all together is not tested.",
            (Query(PAGE.rate("replay_distributions_total", "distribution"), "{{distribution}}"),))), collapsed=True),
    Row("Self-checks", (
        Stat("Self-check terms, in standard deviations",
            "Each term has mean 0 while the sampler is correct. Beyond ±5 over the visible time range, the part of "
            "the sampler that the check covers is wrong; docs/metrics.md lists what each covers.",
            (Query(selfcheck_z(VISIBLE), "{{check}}", instant=True),), steps=Z_STEPS, decimals=1, width=12, height=8),
        Panel("Self-check terms per second",
            "How much evidence each check gathers. 0 means that it sees nothing: greedy requests have no terms, and "
            "some checks need sampled drafts.",
            (Query(PAGE.rate("selfcheck_terms_total", "check"), "{{check}}"),), unit="ops"),
        Panel("Alarms by check",
            "Alarms of the self-checks and of the replays. Each is a fault; the check that fired names the faulty "
            "part (docs/runbooks.md).",
            (Query(PAGE.events("selfcheck_alarms_total", "check"), "self-check {{check}}", sparse=True),
             Query(PAGE.events("replay_alarms_total", "alarm", "stratum"),
                 "replay {{alarm}} {{stratum}}", sparse=True)),
            steps=EVENT_STEPS),
        Panel("Broken rules by kind",
            "Requests that were failed because an invariant or the logprob contract was broken. Each is an engine "
            "fault.",
            (Query(PAGE.events("selfcheck_violations_total", "kind"), "invariant {{kind}}", sparse=True),
             Query(PAGE.events("logprob_violations_total", "kind"), "logprobs {{kind}}", sparse=True)),
            steps=EVENT_STEPS),
        Share("Rounds untested",
            "Share of checked rounds whose random numbers a client named by its seed, or another request had used, "
            "so that no term counts them. Near 1 all clients send seeds: each draw is still checked against its "
            "random number, and replays still work.",
            (Query(untested(PAGE), "untested"),), steps=((None, "green"), (UNTESTED_LIMIT, "red"))))),
    Row("Breaker", (
        Panel("Breaker by replica",
            "Closed is healthy. A single open breaker points to that replica; all opening together point to the "
            "model, the settings or a release.",
            (Query(REPLICA.gauge("breaker_state", "replica", how="max"), "{{replica}}"),), steps=_STATE_STEPS,
            names=BREAKER_STATES, maximum=3),
        Panel("Trips and canaries",
            "Breaker trips by reason, and canary trials of speculation by result. Failed canaries: the fault "
            "persists, and a second trip takes the replica out.",
            (Query(PAGE.events("breaker_trips_total", "reason"), "trip: {{reason}}", sparse=True),
             Query(PAGE.events("canaries_total", "result"), "canary {{result}}", sparse=True))))),
    Row("A watched server", (
        Rates("Watched requests",
            "Requests through the proxies of `truespec watch` per second, by result. Dropped: the referee lags "
            "behind. Refused: the server reports neither token ids nor logprobs, and nothing can be checked. "
            "Unreachable: the watched server is down. Without captured ones nothing is watched.",
            (Query(PAGE.rate("watched_requests_total", "result"), "{{result}}", sparse=True),),
            unit="reqps"),
        Share("Watched answers that could be read",
            "Share of the answers at the referee that hold all that a replay needs. Below 1, the referee's report "
            "has the reasons: no token ids, prompts with images, a stream that broke off.",
            (Query(PAGE.share("watched_answers_total", 'result="read"'), "read", sparse=True),))), collapsed=True),
))  # fmt: skip

WATCHED = "watched_requests_total"
_NOT_REPLAYED = model_sum(f"{recordings.REPLAYS}{{{NOT_OK}}}")
_RECENT_FAILURES = IN_1H.gauge("recent_replay_failures", "answered_by")
_LEFT_OUT, _SHOWN = 'result=~"dropped|failed"', 'result=~"captured|dropped|failed"'
_CHOSEN = 'result=~"captured|dropped|failed|refused|too_large|broken_off"'  # to be watched
_PASSED, _READ = 'result="passed"', 'result="read"'
_UNSEEN = {kind: detector.means_for_answers() for kind, detector in DETECTORS.items()}
_MASK = "Drop answers of the replica since it was last known to be sound from training data, all but verified ones."
_OF_WATCHED = "For a server that `truespec watch` watches: "
_REHEARSED = 'reason="rehearsal"'
_OPEN = BREAKER_STATES.index("open")


ALERTS = (
    Alert("TruespecTmeHigh", "critical", "5m", wrong="yes", note="their logprobs", threshold=TME_LIMIT, minimum=500,
        expr=f"{recordings.TME} > {THRESHOLD} and {recordings.REPLAY_TOKENS} > {MINIMUM}",
        summary="TME of {{ $labels.model_name }} is {{ $value | humanize }} in stratum {{ $labels.stratum }}.",
        means="Served logprobs differ from those of a plain recomputation.",
        look="The logprob sanity page: the stratum that stands out points to the fault (after a handoff, near the "
        "length limit, prefix-cached, drafted). The drift quantiles show whether only a few tokens are far off. If "
        "all strata are alike, suspect the model, its dtype, or different models in the two pools.",
        do="Stop training and scoring on these logprobs, and switch speculation off. If that does not help, roll both "
        f"pools back to one version and restart the replicas, which clears the prefix cache. {_OF_WATCHED}give the "
        "referee the server's weights and dtype, and calibrate `--tolerance` on this model.",
        commands=(shell.SPECULATION_OFF, shell.promql("model_stratum:truespec_tme:mean_rate1h{}"), shell.LATEST_REPLAYS,
            shell.WATCH_FINDINGS, shell.VERSIONS, shell.HISTORY)),
    Alert("TruespecReplayAlarm", "critical", "0m", wrong="yes", note="also those that were not replayed",
        expr=IN_15M.events("replay_alarms_total", "alarm", "stratum") + " > 0",
        summary="Replays of {{ $labels.model_name }} raised the alarm {{ $labels.alarm }} in stratum "
        "{{ $labels.stratum }}.",
        means="Replayed requests show, beyond chance, that logprobs are off (drift), that the text does not follow "
        "the model's distribution (probability, surprisal, support, greedy, impossible), that it is not what its "
        "seeds demand (draws), or that the reply is not what the request and the engine's tokens make of it (wire). "
        + _UNSEEN["replay"],
        look="The logprob sanity page, and the referee's dump: request ids, positions, served and replayed values. "
        f"{_OF_WATCHED}the referee's page, which says what to do about the test that fired; nothing is switched off "
        "for you.",
        do=f"Check that the breaker has switched speculation off. {_MASK} Look for the fault in the dump. For wire, "
        "roll the front end back: its verdict's reason names what differs, and no draft is the cause.",
        commands=(shell.REPLICAS, shell.LATEST_REPLAYS, shell.DOUBTFUL, shell.WATCH_FINDINGS,
            shell.logged("is suspect|replays show"),
            shell.HISTORY)),
    Alert("TruespecSelfCheckAlarm", "critical", "0m", wrong="yes", note="those before the trip",
        expr=IN_15M.events("selfcheck_alarms_total", "check") + " > 0",
        summary="Self-check {{ $labels.check }} of {{ $labels.model_name }} raised an alarm.",
        means="A quantity whose mean is 0 in a correct sampler has another mean: the output does not follow the "
        "model's distribution. A false alarm has a probability of 1e-6 per check over a replica's life. Seeds that "
        f"clients name take no part. {_UNSEEN['selfcheck']}",
        look="The check that fired (docs/metrics.md lists what each covers), and since when. The acceptance page: "
        "which position.",
        do="The breaker switches speculation off. Leave it off, keep the dump, and roll back the last release. "
        + _MASK,
        commands=(shell.SPECULATION_OFF, shell.REPLICAS, shell.promql("model_check:truespec_selfcheck:z_increase1h{}"),
            shell.DOUBTFUL, shell.logged("tripped|self-check"), shell.HISTORY)),
    Alert("TruespecIndependentRefereeDisagrees", "critical", "0m", wrong="yes", note="all of them",
        expr=IN_15M.events("independent_replays_total", where='result="disagrees"') + " > 0",
        summary="transformers does not find what {{ $labels.model_name }} answers.",
        means="The engine's own replay verified an answer, and transformers computes another one from the same "
        "weights. Either something that all forward passes of the engine share is wrong (model code, kernels, a "
        "setting read from config.json), or rounding is larger than it should be. "
        + _UNSEEN["independent"],
        look="The referee's log and dump: the reason, the tokens, and how far their logprobs are off. `truespec "
        "verify --engine transformers` repeats the check from a receipt of any answer, on any machine.",
        do="Roll back the last release, or the kernels that came with it, and mask answers since then for training. "
        "If all logprobs are a little off (FP8, a new GPU), only rounding is large: raise `replay.edge_nats`.",
        commands=(shell.logged("transformers|is suspect"), shell.LATEST_REPLAYS, shell.HISTORY)),
    Alert("TruespecRefereeMissesFaults", "critical", "0m", wrong="perhaps", note="the referee overlooks faults",
        expr=IN_15M.events("referee_controls_total", "change", where='result="missed"') + " > 0",
        summary="The referee of {{ $labels.model_name }} called an answer verified that was made wrong on purpose "
        "({{ $labels.change }}).",
        means="One in fifty verified answers is judged again with a change that no sound referee overlooks, and this "
        "change was overlooked. For token or seed, replays come without each token's distribution. For logprobs, the "
        "tolerance is far too large. For alternatives or limit, other tokens' logprobs or the client's limits are no "
        "longer compared. What this referee verified since then may be wrong.",
        look="The referee's log: `referee missed the change` names the answer and the replica that replayed it. The "
        "controls on the sanity page: since when, and whether all kinds are missed.",
        do="Replace the replica that replays, or roll back the last release. Treat verified answers as unverified "
        "until controls are found again. If only logprobs are missed, look at `replay.max_tme`, `replay.edge_nats` "
        "or the file of `--tolerance`.",
        commands=(shell.promql("sum by (change, result) (increase(truespec_referee_controls_total{}[1h]))"),
            shell.logged("referee missed the change"), shell.watch_logged("referee", "referee missed the change"),
            shell.HISTORY)),
    Alert("TruespecReplaysOfOneReplicaFail", "critical", "5m", wrong="perhaps", note="nobody can check that replica's",
        threshold=REPLAY_FAILURE_LIMIT, minimum=5,
        expr=f"{_RECENT_FAILURES} / {IN_1H.gauge('recent_replays', 'answered_by')} > {THRESHOLD} "
        f"and {_RECENT_FAILURES} >= {MINIMUM}",
        summary="{{ $value | humanizePercentage }} of the replays of answers by {{ $labels.answered_by }} "
        "({{ $labels.model_name }}) failed twice.",
        means="Answers of this replica cannot be replayed, so nothing checks them, and the answers may be the reason.",
        look="The controller's log: `replay of ... failed` names the replica that replayed, and its error. If the "
        "error is always the same, reproduce it with one of these requests. If all replicas are alike, see "
        "TruespecRefereeBehind.",
        do="Replace the replica if others' answers are replayed without errors. Treat its answers as unverified until "
        f"the cause is known. {_OF_WATCHED}see whether the referee has the server's longest length and vocabulary.",
        commands=(shell.promql("sum by (answered_by) (truespec_recent_replays{})"),
            shell.promql("sum by (answered_by) (truespec_recent_replay_failures{}) > 0"),
            shell.logged("replay of .* failed"), shell.watch_logged("referee", "replay of .* failed"),
            shell.SERVE_STATUS)),
    Alert("TruespecRefereeSilent", "critical", "10m", wrong="unnoticed", minimum=10,
        expr=any_of("what", {
            "none is replayed": f"{IN_30M.events('replays_requested_total')} >= {MINIMUM} "
            f"unless {IN_30M.events('replays_total')} > 0",
            "their controller is silent": f"{IN_1H.gauge('build_info', how='count')} "
            f"unless {IN_1H.gauge('replay_lag_seconds', how='count')}",
            "none that passes the proxy can be judged": f"({IN_30M.events(WATCHED, where=_CHOSEN)} >= 2 * {MINIMUM} "
            f"or {IN_30M.events(WATCHED, where=_PASSED)} >= 1000 * {MINIMUM}) "
            f"unless {IN_30M.events('watched_answers_total', where=_READ)} > 0"}),
        summary="Nothing checks the answers of {{ $labels.model_name }}: {{ $labels.what }}.",
        means="Answers are selected for a replay and none is replayed, or the controller, which has them replayed, "
        f"exports nothing. Wrong logprobs would go unnoticed. {_OF_WATCHED}no request is chosen, the server does not "
        "report token ids and logprobs, its answers cannot be read, or none reaches the referee.",
        look="Whether the controller runs, and what it logs; whether the prefill pool has replicas. "
        f"{_OF_WATCHED}requests by result on the logprob sanity page. Passed only: the share is 0, or clients use "
        "other endpoints than completions. Refused: the server does not know the fields that the proxy adds, or may "
        "not report logprobs. Captured: the referee's report says why it cannot read them.",
        do="Kill what is stuck: Ray Serve replaces it. Treat answers as unverified until replays are back. "
        f"{_OF_WATCHED}give the proxy a share above 0 and the server's `--dialect`, let the server report logprobs "
        "(`--max-logprobs` of vLLM), and give the referee the model that is served.",
        commands=(shell.promql("sum(increase(truespec_replays_requested_total{}[30m]))"),
            shell.promql("sum by (result) (increase(truespec_replays_total{}[30m]))"), shell.SERVE_STATUS,
            shell.logged("referee|replay"),
            shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[30m])) > 0"),
            shell.promql("sum by (result) (increase(truespec_watched_answers_total{}[30m])) > 0"), shell.WATCH_COUNTS,
            shell.watch_logged("proxy", "refus|dialect"))),
    Alert("TruespecRuleBroken", "critical", "0m", wrong="yes", note="but for what broke the rule",
        expr=" or ".join(IN_15M.events(f"{of}_violations_total", "kind") + " > 0" for of in ("selfcheck", "logprob")),
        summary="A step of {{ $labels.model_name }} broke the rule {{ $labels.kind }}.",
        means="The engine broke one of its own rules within a step, or logprobs broke their contract (not finite, "
        "above 0, not sorted, one token with two values). The request was failed; tokens before that were sent. "
        f"{_UNSEEN['sampled']} {_UNSEEN['invariant']}",
        look="The dump has the request; docs/metrics.md explains the kinds. not_finite on a single replica points to "
        "its GPU or memory.",
        do=f"Remove the replica if only one is affected; roll back if it started with a release. {_MASK}",
        commands=(shell.promql("sum by (pool, kind) (increase(truespec_selfcheck_violations_total{}[1h])) > 0"),
            shell.promql("sum by (pool, kind) (increase(truespec_logprob_violations_total{}[1h])) > 0"),
            shell.DOUBTFUL, shell.logged("invariant|logprob"), shell.PODS)),
    Alert("TruespecBreakerOpen", "critical", "1m", wrong="perhaps", note="those from before it opened",
        expr=f"{REPLICAS.gauge('breaker_state', how='max')} >= {_OPEN} or "
        + any_of("rehearsed", {"true": IN_15M.events("breaker_trips_total", "pool", where=_REHEARSED) + " > 0"}),
        summary='The breaker of {{ or $labels.replica "a replica" }} ({{ $labels.model_name }}, {{ $labels.pool }}) '
        "{{ if $labels.rehearsed }}was{{ else }}is{{ end }} open{{ if $labels.rehearsed }} for a rehearsal{{ end }}.",
        means="A fault was found on this replica. It serves without speculation, or is being taken out of service. "
        "Answers from before may be wrong, and those since then if the fault is not in speculation.",
        look="Trips by reason on the logprob sanity page, and what fired just before.",
        do=f"{_MASK} If canaries keep failing, the fault persists: replace the replica, or roll back if several "
        "breakers are open.",
        commands=(shell.REPLICAS, shell.promql("sum by (reason) (increase(truespec_breaker_trips_total{}[1h])) > 0"),
            shell.promql("sum by (result) (increase(truespec_canaries_total{}[1h]))"), shell.DOUBTFUL,
            shell.logged("tripped|canary"))),
    Alert("TruespecRefereeBehind", "warning", "10m", wrong="unnoticed", threshold=REPLAY_LAG_LIMIT_S, minimum=5,
        expr=any_of("what", {
            "answers late": f"{IN_1H.gauge('replay_lag_seconds', how='max')} > {THRESHOLD}",
            "not all answers": share(_NOT_REPLAYED, model_sum(recordings.REPLAYS), f"{REPLAY_FAILURE_LIMIT}"),
            "not all it is sent": share(
                IN_15M.events(WATCHED, where=_LEFT_OUT), IN_15M.events(WATCHED, where=_SHOWN), "0.2")}),
        summary="The referee of {{ $labels.model_name }} checks {{ $labels.what }}.",
        means="A fault would be noticed late or not at all: the oldest answer has waited for its replay beyond the "
        "threshold, half of the replays do not complete, or a fifth of what the proxies of `truespec watch` capture "
        "is left out.",
        look="Replays by result, lag, and how busy the prefill pool is. Skipped: the queue is full. Failed: two "
        "attempts did not compute them. Watched requests dropped: how busy the referee is; failed: it has another "
        "version than the proxies, or something else answers at its URL.",
        do=f"Lower `replay.sample_rate`, or add prefill replicas. {_OF_WATCHED}lower the share of its proxies, or give "
        "the referee more cores, a GPU or replicas. The log of a referee that fails says why.",
        commands=(shell.promql("truespec_replay_lag_seconds{}"),
            shell.promql("model_result:truespec_replays:increase15m{}"),
            shell.promql("sum by (pool) (truespec_requests_waiting{})"),
            shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[15m])) > 0"),
            shell.WATCH_COUNTS, shell.logged("replay of .* failed"),
            shell.watch_logged("referee", "replay of .* failed"))),
    Alert("TruespecUntestedShare", "info", "30m", wrong="unnoticed", note="some of it", threshold=UNTESTED_LIMIT,
        minimum=1000,
        expr=f"{untested(IN_1H)} > {THRESHOLD} and {IN_1H.increase('selfcheck_rounds_total')} > {MINIMUM}",
        summary="{{ $value | humanizePercentage }} of the rounds of {{ $labels.model_name }} add nothing to its "
        "self-checks.",
        means="Nearly all requests name their seed. A seed may be chosen for what it gives, so the zero-mean checks "
        "get no evidence. Each draw is still checked against its random number.",
        look="The logprob sanity page: rounds untested, and since when. Find the clients that send a seed.",
        do="Ask clients to send a seed only where they need one. Rely on replays meanwhile.",
        commands=(shell.promql(
                "sum(rate(truespec_selfcheck_untested_rounds_total{}[1h])) "
                "/ sum(rate(truespec_selfcheck_rounds_total{}[1h]))"
            ),)),
    Alert("TruespecWatchedServerUnreachable", "critical", "5m", wrong="not served", threshold=0.05, minimum=5,
        expr=share(IN_15M.events(WATCHED, where='result="unreachable"'), IN_15M.events(WATCHED)),
        summary="{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} find no server "
        "behind the proxy.",
        means="The proxy of `truespec watch` answers 502: it cannot connect to the server, or loses the connection "
        "before an answer begins.",
        look="Whether the watched server runs and is ready, whether the proxy's URL is its service's, and network "
        "policies between the two.",
        do="Bring the server back. If it answers when asked directly, point clients past the proxy, and fix the "
        "proxy's URL.",
        commands=(shell.promql("sum by (result) (increase(truespec_watched_requests_total{}[15m])) > 0"),
            shell.watch_logged("proxy", "reach|connect"), shell.PODS)),
)  # fmt: skip
