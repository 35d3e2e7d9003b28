"""The acceptance page: whether drafting pays off, and whether the verifier accepts what it should."""

from dashboards.panels import PAGE, VISIBLE, Page, Panel, Query, Row, Share, Stat, Steps
from dashboards.queries import (
    acceptance,
    acceptance_since_handoff,
    acceptance_z,
    conditional_acceptance_by_position,
    held_out_acceptance,
)

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
    title="Acceptance rate",
    description="Accepted / drafted tokens. A drop means that drafts fit the traffic less well (new kind of prompts, "
    "higher temperature, another drafter) or that something is broken: the panel with observed and expected acceptance "
    "shows which. A rise does not prove health.",
    unit="percentunit",
    queries=(Query(acceptance(PAGE), "acceptance rate"),),
    minimum=0,
    maximum=1,
    decimals=1,
)
ACCEPTED_LENGTH = Stat(
    title="Mean accepted length",
    description="Tokens per round: 1 + accepted / rounds with drafts. Near 1, drafting is wasted work: choose another "
    "drafter, fewer draft tokens or the dynamic length.",
    queries=(Query(f"1 + {PAGE.ratio('accepted_tokens_total', 'drafts_total')}", "tokens per round"),),
    minimum=1,
    decimals=2,
)

_OBSERVED_AND_EXPECTED = Share(
    title="Observed, expected and achievable acceptance",
    description="Observed must match expected, the verifier's own acceptance probability; otherwise the accept step is "
    "broken. Expected below achievable (the overlap of p and q, with the q that drafts were actually sampled from) "
    "means that the verifier did not get the drafter's q.",
    queries=(
        Query(acceptance(PAGE), "observed"),
        Query(PAGE.ratio("expected_accepted_tokens_total", "draft_tokens_total"), "expected"),
        Query(PAGE.ratio("achievable_accepted_tokens_total", "draft_tokens_total"), "achievable"),
    ),
)
_ACCEPTANCE_Z = Panel(
    title="Observed minus expected acceptance, in standard deviations",
    description="Beyond ±5 the difference is not chance: the verifier accepts more or fewer drafts than its own "
    "probabilities predict, and the output distribution is wrong. The scale is an upper bound on the standard "
    "deviation for any verifier, so healthy values stay well within it.",
    queries=(Query(acceptance_z(PAGE), "z"),),
    steps=Z_STEPS,
    interval="5m",
    decimals=1,
    minimum=None,
)
_POSITIONS = Share(
    title="Acceptance by position",
    description="Accepted at a position / rounds, as vLLM counts: these and 1 add up to the mean accepted length. A "
    "position near 0 gains nothing: draft fewer tokens. A position at 0 right after a healthy one points to drafter "
    "state lost within the round.",
    queries=(
        Query(
            f"{PAGE.rate('accepted_tokens_per_position_total', 'position')} / ignoring (position) group_left () "
            f"({PAGE.rate('drafts_total')} > 0)",
            "position {{position}}",
        ),
    ),
)
_CONDITIONAL_POSITIONS = Share(
    title="Conditional acceptance by position",
    description="Accepted / drafted at a position: also valid when the draft length varies. A sharp drop at one "
    "position, rather than a gentle slope, points to the drafter's state at that position. Held out: what training "
    "measured of the head. Below half of it, the head gets wrong inputs or does not belong to the model.",
    queries=(
        Query(conditional_acceptance_by_position(PAGE), "position {{position}}"),
        Query(held_out_acceptance(PAGE, "position", "sampling"), "held out, {{sampling}}, {{position}}", sparse=True),
    ),
)
_SINCE_HANDOFF = Share(
    title="Acceptance by rounds since the handoff",
    description="Accepted / drafted tokens of clients' requests. Lower right after the handoff than later: the "
    "drafter's keys and values did not come with it, or are wrong.",
    queries=(Query(acceptance_since_handoff(PAGE, "since_handoff"), "{{since_handoff}}"),),
)
_BY_WEIGHTS = Share(
    title="Acceptance by age of the weights",
    description="Accepted / drafted tokens of clients' requests. Current far below what it was before an update, which "
    "the annotations mark, or below previous: the drafter does not fit the new weights; update it with them.",
    queries=(Query(acceptance_since_handoff(PAGE, "weights"), "{{weights}}"),),
)
_LENGTHS = Panel(
    title="Draft length and accepted length",
    description="Draft tokens and accepted tokens per round. Long drafts with few accepted tokens cost time: shorten "
    "them or use the dynamic length. With the dynamic length, drafts that shrink to nothing do not pay off.",
    queries=(
        Query(PAGE.ratio("draft_tokens_total", "drafts_total"), "drafted"),
        Query(PAGE.ratio("accepted_tokens_total", "drafts_total"), "accepted"),
    ),
)
_WITH_LOGPROBS = Panel(
    title="Draft length of requests with logprobs",
    description="Draft tokens per round of requests that ask for logprobs. It must be close to that of all requests: 0 "
    "means that logprobs switch speculation off.",
    queries=(Query(PAGE.ratio("draft_tokens_with_logprobs_total", "rounds_with_logprobs_total"), "drafted"),),
)
_BY_DRAFTER = Share(
    title="Acceptance by drafter and model",
    description="If only one model or drafter drops, the fault is its own; if all drop together, look at the traffic "
    "first.",
    queries=(Query(_acceptance_by_drafter(), "{{drafter}} {{model_name}} {{pool}} {{namespace}}"),),
)
_TIME_A_TOKEN = Panel(
    title="Engine time per emitted token",
    description="Drafting and verification time per emitted token. It must be lower than with speculation off; if it "
    "is not, speculation costs more than it saves.",
    unit="s",
    queries=tuple(
        Query(PAGE.ratio("step_seconds_total", "emitted_tokens_total", over_where=f'phase="{phase}"'), phase)
        for phase in ("verify", "draft")
    ),
    stacked=True,
)
_TIME_SAVED = Share(
    title="Decoding time saved by drafts",
    description="Of the time that the same tokens would have taken without drafts, as estimated from timed steps. "
    "Below 0, drafts cost more than they gain. Known for drafts of dynamic length by our own engine; steps whose cost "
    "is not known yet are left out.",
    queries=(
        Query(
            f"1 - {PAGE.ratio('speculated_seconds_total', 'speculated_plain_seconds_total')}", "time saved", sparse=True
        ),
    ),
    steps=((None, "red"), (0, "green")),
    minimum=None,
)
_POSITIONS_VISIBLE = Share(
    title="Acceptance by position over the visible time range",
    description="Accepted / drafted at each position over the whole time range. Values near 0 at the end mean that "
    "drafts are too long.",
    queries=(Query(conditional_acceptance_by_position(VISIBLE), "position {{position}}", instant=True),),
    kind="stat",
    decimals=1,
)

ACCEPTANCE = Page(
    uid="truespec-acceptance",
    title="truespec / Acceptance",
    description="Whether drafting pays off, and whether the verifier accepts what its own probabilities predict.",
    rows=(
        Row("Rate", (ACCEPTANCE_RATE, ACCEPTED_LENGTH, _POSITIONS_VISIBLE, _OBSERVED_AND_EXPECTED, _ACCEPTANCE_Z)),
        Row(
            "Positions",
            (_POSITIONS, _CONDITIONAL_POSITIONS, _SINCE_HANDOFF, _BY_WEIGHTS, _LENGTHS, _WITH_LOGPROBS, _BY_DRAFTER),
        ),
        Row("Cost and benefit", (_TIME_SAVED, _TIME_A_TOKEN)),
    ),
)
