"""The acceptance page: whether drafting pays off, and whether the verifier accepts what it should."""

from dashboards import recordings, shell
from dashboards.alerts import IN_1H, MINIMUM, THRESHOLD, Alert, any_of
from dashboards.panels import PAGE, VISIBLE, Page, Panel, Query, Row, Share, Stat, Steps
from dashboards.queries import (
    acceptance,
    acceptance_since_handoff,
    acceptance_z,
    conditional_acceptance_by_position,
    held_out_acceptance,
)
from dashboards.recordings import KEEP

BEYOND_CHANCE = 5.0  # standard deviations: exceeded by chance less than once in a million evaluations
Z_STEPS: Steps = ((None, "red"), (-BEYOND_CHANCE, "green"), (BEYOND_CHANCE, "red"))


def _acceptance_by_drafter() -> str:
    """Acceptance with the label `drafter`, which only build_info has. A pool that runs two is omitted meanwhile."""
    by = ("namespace", "model_name", "pool")
    labels = ", ".join(by)
    drafter = PAGE.gauge("build_info", *by, "drafter", how="max")
    alone = f"({drafter} and on ({labels}) count by ({labels}) ({drafter}) == 1)"
    return f"{acceptance(PAGE, *by)} * on ({labels}) group_left (drafter) {alone}"


ACCEPTANCE_RATE = Stat(
    "Acceptance rate",
    "Accepted / drafted tokens. A drop means that drafts fit the traffic less well (new kind of prompts, higher "
    "temperature, another drafter) or that something is broken: the panel with observed and expected acceptance "
    "shows which. A rise does not prove health.",
    (Query(acceptance(PAGE), "acceptance rate"),),
    unit="percentunit",
    minimum=0,
    maximum=1,
    decimals=1,
)

ACCEPTED_LENGTH = Stat(
    "Mean accepted length",
    "Tokens per round: 1 + accepted / rounds with drafts. Near 1, drafting is wasted work: choose another drafter, "
    "fewer draft tokens or the dynamic length.",
    (Query(f"1 + {PAGE.ratio('accepted_tokens_total', 'drafts_total')}", "tokens per round"),),
    minimum=1,
    decimals=2,
)

ACCEPTANCE = Page("Acceptance",
    "Whether drafting pays off, and whether the verifier accepts what its own probabilities predict.", (
    Row("Rate", (
        ACCEPTANCE_RATE, ACCEPTED_LENGTH,
        Share("Acceptance by position over the visible time range",
            "Accepted / drafted at each position over the whole time range. Values near 0 at the end mean that "
            "drafts are too long.",
            (Query(conditional_acceptance_by_position(VISIBLE), "position {{position}}", instant=True),),
            kind="stat", decimals=1),
        Share("Observed, expected and achievable acceptance",
            "Observed must match expected, the verifier's own acceptance probability; otherwise the accept step is "
            "broken. Expected below achievable (the overlap of p and q, with the q that drafts were actually sampled "
            "from) means that the verifier did not get the drafter's q.",
            (Query(acceptance(PAGE), "observed"),
             Query(PAGE.ratio("expected_accepted_tokens_total", "draft_tokens_total"), "expected"),
             Query(PAGE.ratio("achievable_accepted_tokens_total", "draft_tokens_total"), "achievable"))),
        Panel("Observed minus expected acceptance, in standard deviations",
            "Beyond ±5 the difference is not chance: the verifier accepts more or fewer drafts than its own "
            "probabilities predict, and the output distribution is wrong. The scale is an upper bound on the "
            "standard deviation for any verifier, so healthy values stay well within it.",
            (Query(acceptance_z(PAGE), "z"),), steps=Z_STEPS, interval="5m", decimals=1, minimum=None))),
    Row("Positions", (
        Share("Acceptance by position",
            "Accepted at a position / rounds, as vLLM counts: these and 1 add up to the mean accepted length. A "
            "position near 0 gains nothing: draft fewer tokens. A position at 0 right after a healthy one points to "
            "drafter state lost within the round.",
            (Query(
                 f"{PAGE.rate('accepted_tokens_per_position_total', 'position')} / ignoring (position) group_left () "
                 f"({PAGE.rate('drafts_total')} > 0)",
                 "position {{position}}"),)),
        Share("Conditional acceptance by position",
            "Accepted / drafted at a position: also valid when the draft length varies. A sharp drop at one "
            "position, rather than a gentle slope, points to the drafter's state at that position. Held out: what "
            "training measured of the head. Below half of it, the head gets wrong inputs or does not belong to the "
            "model.",
            (Query(conditional_acceptance_by_position(PAGE), "position {{position}}"),
             Query(held_out_acceptance(PAGE, "position", "sampling"),
                 "held out, {{sampling}}, {{position}}", sparse=True))),
        Share("Acceptance by rounds since the handoff",
            "Accepted / drafted tokens of clients' requests. Lower right after the handoff than later: the drafter's "
            "keys and values did not come with it, or are wrong.",
            (Query(acceptance_since_handoff(PAGE, "since_handoff"), "{{since_handoff}}"),)),
        Share("Acceptance by age of the weights",
            "Accepted / drafted tokens of clients' requests. Current far below what it was before an update, which "
            "the annotations mark, or below previous: the drafter does not fit the new weights; update it with them.",
            (Query(acceptance_since_handoff(PAGE, "weights"), "{{weights}}"),)),
        Panel("Draft length and accepted length",
            "Draft tokens and accepted tokens per round. Long drafts with few accepted tokens cost time: shorten "
            "them or use the dynamic length. With the dynamic length, drafts that shrink to nothing do not pay off.",
            (Query(PAGE.ratio("draft_tokens_total", "drafts_total"), "drafted"),
             Query(PAGE.ratio("accepted_tokens_total", "drafts_total"), "accepted"))),
        Panel("Draft length of requests with logprobs",
            "Draft tokens per round of requests that ask for logprobs. It must be close to that of all requests: 0 "
            "means that logprobs switch speculation off.",
            (Query(PAGE.ratio("draft_tokens_with_logprobs_total", "rounds_with_logprobs_total"), "drafted"),)),
        Share("Acceptance by drafter and model",
            "If only one model or drafter drops, the fault is its own; if all drop together, look at the traffic "
            "first.",
            (Query(_acceptance_by_drafter(), "{{drafter}} {{model_name}} {{pool}} {{namespace}}"),)))),
    Row("Cost and benefit", (
        Share("Decoding time saved by drafts",
            "Of the time that the same tokens would have taken without drafts, as estimated from timed steps. Below "
            "0, drafts cost more than they gain. Known for drafts of dynamic length by our own engine; steps whose "
            "cost is not known yet are left out.",
            (Query(f"1 - {PAGE.ratio('speculated_seconds_total', 'speculated_plain_seconds_total')}",
                 "time saved", sparse=True),),
            steps=((None, "red"), (0, "green")), minimum=None),
        Panel("Engine time per emitted token",
            "Drafting and verification time per emitted token. It must be lower than with speculation off; if it is "
            "not, speculation costs more than it saves.",
            tuple(
                Query(PAGE.ratio("step_seconds_total", "emitted_tokens_total", over_where=f'phase="{phase}"'), phase)
                for phase in ("verify", "draft")
            ),
            unit="s", stacked=True))),
))  # fmt: skip

_EARLY, _LATE = 'since_handoff=~"0|1|2_3"', 'since_handoff="8_up"'
_SINCE = "draft_tokens_since_handoff_total"
_HALF = 0.5  # of what a head accepted in training, or accepts long after a handoff
_LATELY, _FURTHER = (acceptance_since_handoff(IN_1H, where=where) for where in (_EARLY, _LATE))
_ACCEPTANCE_LOW = {
    "in the last hours": f"{recordings.ACCEPTANCE} < {THRESHOLD} * "
    f"avg_over_time({recordings.ACCEPTANCE}[6h] offset 30m) and {recordings.DRAFT_TOKENS} > {MINIMUM}",
    "in training": f"{conditional_acceptance_by_position(IN_1H)} < {_HALF} * {held_out_acceptance(IN_1H, 'position')} "
    f"and {IN_1H.increase('draft_tokens_per_position_total', 'position')} > {MINIMUM}",
    # Of drafters with weights: others draft better as a text grows.
    "long after handoffs": f"{_LATELY} < {_HALF} * {_FURTHER} and {IN_1H.increase(_SINCE, where=_EARLY)} > {MINIMUM} "
    f"and {IN_1H.increase(_SINCE, where=_LATE)} > {MINIMUM} and on ({', '.join(KEEP)}) "
    + IN_1H.gauge("build_info", where='drafter=~"draft_model|eagle3|mtp"', how="count"),
}


ALERTS = (
    Alert("TruespecAcceptanceLow", "warning", "15m", wrong="slower", threshold=0.7, minimum=1000,
        expr=any_of("than", _ACCEPTANCE_LOW),
        summary="Acceptance of {{ $labels.model_name }}{{ with $labels.position }} at position {{ . }}{{ end }} is "
        "{{ $value | humanizePercentage }}, far below that {{ $labels.than }}.",
        means="Fewer drafts are accepted than in the hours before (the threshold's share of it), than training found "
        "of the head on held-out answers, or right after handoffs than later on (half of it, both). Output stays "
        "correct, but is slower.",
        look="The acceptance page. Observed departs from expected: treat it as TruespecSelfCheckAlarm. Low only "
        "after handoffs: the drafter's keys and values are lost or wrong there. Low since a weight update: the head "
        "belongs to other weights. Low throughout: the head gets wrong features, or the traffic is far from its "
        "training.",
        do="Roll back what changed last, bring both pools to one version and one drafter, and update a head with the "
        "weights. If only the traffic changed, train the head on it, choose another drafter, or `drafter.length: "
        "dynamic`.",
        commands=(shell.promql("model:truespec_acceptance:ratio_rate10m{}"),
            shell.promql("model_position:truespec_acceptance:ratio_rate10m{}"),
            shell.promql("truespec_held_out_acceptance_ratio{}"),
            shell.promql(
                "sum by (since_handoff, weights) (increase(truespec_accepted_tokens_since_handoff_total{}[1h])) "
                "/ sum by (since_handoff, weights) (increase(truespec_draft_tokens_since_handoff_total{}[1h]))"
            ), shell.VERSIONS, shell.HISTORY)),
)  # fmt: skip
