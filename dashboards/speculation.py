"""The acceptance page: whether drafts pay, and whether the verifier accepts what it should."""

from dashboards.panels import PAGE, VISIBLE, Page, Panel, Query, Row, Steps
from dashboards.queries import (
    acceptance,
    acceptance_by_position,
    acceptance_z,
    accepted_length,
    achievable_acceptance,
    conditional_acceptance_by_position,
    expected_acceptance,
)

BEYOND_CHANCE = 5.0  # standard deviations: chance does it less than once in a million looks
Z_STEPS: Steps = ((None, "red"), (-BEYOND_CHANCE, "green"), (BEYOND_CHANCE, "red"))


def _acceptance_by_drafter() -> str:
    """Acceptance with the label `drafter`, which only build_info has. A pool that runs two is left out meanwhile."""
    by = ("namespace", "model_name", "pool")
    labels = ", ".join(by)
    drafter = PAGE.gauge("build_info", *by, "drafter", how="max")
    alone = f"({drafter} and on ({labels}) count by ({labels}) ({drafter}) == 1)"
    return f"{acceptance(PAGE, *by)} * on ({labels}) group_left (drafter) {alone}"


ACCEPTANCE_RATE = Panel(
    title="Acceptance rate",
    description="Accepted / drafted tokens. A fall means that drafts fit the traffic less than before (new kind of "
    "prompts, higher temperature, another drafter) or that something is broken: the panel with observed and expected "
    "acceptance says which. A rise is no proof of health.",
    unit="percentunit",
    queries=(Query(acceptance(PAGE), "acceptance rate"),),
    kind="stat",
    width=6,
    height=5,
    minimum=0,
    maximum=1,
    decimals=1,
)
ACCEPTED_LENGTH = Panel(
    title="Mean accepted length",
    description="Tokens a round: 1 + accepted / rounds with drafts. Near 1, drafting is wasted work: choose another "
    "drafter, fewer draft tokens or the dynamic length.",
    unit="none",
    queries=(Query(accepted_length(PAGE), "tokens a round"),),
    kind="stat",
    width=6,
    height=5,
    minimum=1,
    decimals=2,
)

_OBSERVED_AND_EXPECTED = Panel(
    title="Observed, expected and achievable acceptance",
    description="Observed must lie on expected, the verifier's own acceptance probability: apart, the accept step is "
    "broken. Expected below achievable (the overlap of p and q, with q as drafts were really drawn) means that the "
    "verifier did not get the drafter's q.",
    unit="percentunit",
    queries=(
        Query(acceptance(PAGE), "observed"),
        Query(expected_acceptance(PAGE), "expected"),
        Query(achievable_acceptance(PAGE), "achievable"),
    ),
    minimum=0,
    maximum=1,
)
_ACCEPTANCE_Z = Panel(
    title="Observed minus expected acceptance, in standard deviations",
    description="Beyond ±5 the difference is no chance: the verifier accepts more or less than its own probabilities "
    "say, and the output distribution is wrong. The scale is an upper bound of the standard deviation for any "
    "verifier, so "
    "healthy values stay well inside.",
    unit="none",
    queries=(Query(acceptance_z(PAGE), "z"),),
    steps=Z_STEPS,
    interval="5m",
    decimals=1,
)
_POSITIONS = Panel(
    title="Acceptance by position",
    description="Accepted at a position / rounds, as vLLM counts: these and 1 add up to the mean accepted length. A "
    "position near 0 earns nothing: draft fewer tokens. A position that is 0 beside a healthy one before it points to "
    "drafter state that is lost within the round.",
    unit="percentunit",
    queries=(Query(acceptance_by_position(PAGE), "position {{position}}"),),
    minimum=0,
    maximum=1,
)
_CONDITIONAL_POSITIONS = Panel(
    title="Acceptance by position, of the drafted",
    description="Accepted / drafted at a position: right also when the draft length varies. A step down at one "
    "position, and not a gentle slope, points to the drafter's state at that position.",
    unit="percentunit",
    queries=(Query(conditional_acceptance_by_position(PAGE), "position {{position}}"),),
    minimum=0,
    maximum=1,
)
_LENGTHS = Panel(
    title="Draft length and accepted length",
    description="Draft tokens and accepted tokens a round. Long drafts of which few are accepted cost time: shorten "
    "them or use the dynamic length. With the dynamic length, drafts that shrink to nothing say that they do not pay.",
    unit="none",
    queries=(
        Query(PAGE.ratio("draft_tokens_total", "drafts_total"), "drafted"),
        Query(PAGE.ratio("accepted_tokens_total", "drafts_total"), "accepted"),
    ),
    minimum=0,
)
_WITH_LOGPROBS = Panel(
    title="Draft length where logprobs are asked for",
    description="Draft tokens a round of requests that ask for logprobs. It must be about that of all requests: 0 "
    "means that logprobs switch speculation off.",
    unit="none",
    queries=(Query(PAGE.ratio("draft_tokens_with_logprobs_total", "rounds_with_logprobs_total"), "drafted"),),
    minimum=0,
)
_BY_DRAFTER = Panel(
    title="Acceptance by drafter and model",
    description="One model or drafter that falls while the others hold has a fault of its own; when all fall "
    "together, look at the traffic first.",
    unit="percentunit",
    queries=(Query(_acceptance_by_drafter(), "{{drafter}} {{model_name}} {{pool}} {{namespace}}"),),
    minimum=0,
    maximum=1,
)
_COST = Panel(
    title="Time in drafting and in verification",
    description="Seconds a second over all replicas. Drafting that takes more than a small part of verification eats "
    "what acceptance gains: a cheaper drafter or fewer draft tokens.",
    unit="s",
    queries=(
        Query(PAGE.rate("draft_seconds_total"), "drafting"),
        Query(PAGE.rate("verify_seconds_total"), "target and verification"),
    ),
    stacked=True,
    minimum=0,
)
_TIME_A_TOKEN = Panel(
    title="Engine time for an emitted token",
    description="Time in drafting and verification by emitted token. It must be lower than with speculation off; if "
    "it is not, speculation costs more than it saves.",
    unit="s",
    queries=(
        Query(PAGE.ratio("verify_seconds_total", "emitted_tokens_total"), "verification"),
        Query(PAGE.ratio("draft_seconds_total", "emitted_tokens_total"), "drafting"),
    ),
    stacked=True,
    minimum=0,
)
_POSITIONS_VISIBLE = Panel(
    title="Acceptance by position over the visible time",
    description="Accepted / drafted at each position over all that the page shows. Values near 0 at the end say that "
    "the drafts are longer than they are good.",
    unit="percentunit",
    queries=(Query(conditional_acceptance_by_position(VISIBLE), "position {{position}}", instant=True),),
    kind="bargauge",
    minimum=0,
    maximum=1,
    decimals=1,
)
_FROM_DRAFTS = Panel(
    title="Share of emitted tokens that were drafted",
    description="Accepted / emitted tokens. 0 with drafting on means that speculation does nothing: it is switched "
    "off by the breaker, or no draft is ever right.",
    unit="percentunit",
    queries=(Query(PAGE.ratio("accepted_tokens_total", "emitted_tokens_total"), "drafted"),),
    minimum=0,
    maximum=1,
)

ACCEPTANCE = Page(
    uid="truespec-acceptance",
    title="truespec / Acceptance",
    description="Whether drafts pay, and whether the verifier accepts what its own probabilities say.",
    rows=(
        Row("Rate", (ACCEPTANCE_RATE, ACCEPTED_LENGTH, _POSITIONS_VISIBLE, _OBSERVED_AND_EXPECTED, _ACCEPTANCE_Z)),
        Row("Positions", (_POSITIONS, _CONDITIONAL_POSITIONS, _LENGTHS, _WITH_LOGPROBS, _BY_DRAFTER)),
        Row("What it costs and brings", (_COST, _TIME_A_TOKEN, _FROM_DRAFTS)),
    ),
)
