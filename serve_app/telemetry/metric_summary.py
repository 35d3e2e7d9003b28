"""Read acceptance, drift and handoffs off a `/metrics` text: what a person asks of it first."""

from typing import TypedDict

from prometheus_client.parser import text_string_to_metric_families


class MetricSummary(TypedDict):
    """Figures of a whole app since it started; None where nothing was counted to make a ratio of.

    Acceptance follows vLLM's definitions: rate = accepted / drafted, and mean accepted length = 1 + accepted / drafts.
    """

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    emitted_tokens: float
    acceptance_rate: float | None
    mean_accepted_length: float | None
    replayed_tokens: float
    tme: float | None  # mean of exp|logprob given - logprob replayed|; 1 = no drift
    selfcheck_terms: float
    selfcheck_alarms: float  # the engine's and the referee's
    verdicts: dict[str, float]
    handoffs_by_result: dict[str, float]


def summarise(text: str) -> MetricSummary:
    """Sum a Prometheus text over models, pools and replicas, and make the ratios. Raises ValueError: the text is not in
    Prometheus' format."""
    families = text_string_to_metric_families(text)
    samples = [  # strata overlap: only `all` is counted
        sample for family in families for sample in family.samples if sample.labels.get("stratum", "all") == "all"
    ]

    def by(name: str, label: str = "") -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in samples:
            if sample.name == f"truespec_{name}_total":
                value = sample.labels.get(label, "")
                found[value] = found.get(value, 0.0) + sample.value
        return found

    def total(name: str) -> float:
        return sum(by(name).values())

    drafts, drafted, accepted = total("drafts"), total("draft_tokens"), total("accepted_tokens")
    replayed = total("replay_tokens")
    return MetricSummary(
        drafts=drafts,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        emitted_tokens=total("emitted_tokens"),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=1 + accepted / drafts if drafts else None,
        replayed_tokens=replayed,
        tme=1 + total("replay_tme_excess") / replayed if replayed else None,
        selfcheck_terms=total("selfcheck_terms"),
        selfcheck_alarms=total("selfcheck_alarms") + total("replay_alarms"),
        verdicts=by("verdicts", "verdict"),
        handoffs_by_result=by("handoffs", "result"),
    )
