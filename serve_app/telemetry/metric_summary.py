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
    totals: dict[str, float] = {}
    by_result: dict[str, float] = {}
    verdicts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("stratum", "all") != "all":
                continue  # strata overlap
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            if sample.name == "truespec_handoffs_total":
                result = sample.labels["result"]
                by_result[result] = by_result.get(result, 0.0) + sample.value
            elif sample.name == "truespec_verdicts_total":
                verdict = sample.labels["verdict"]
                verdicts[verdict] = verdicts.get(verdict, 0.0) + sample.value
    drafts = totals.get("truespec_drafts_total", 0.0)
    drafted = totals.get("truespec_draft_tokens_total", 0.0)
    accepted = totals.get("truespec_accepted_tokens_total", 0.0)
    replayed = totals.get("truespec_replay_tokens_total", 0.0)
    excess = totals.get("truespec_replay_tme_excess_total", 0.0)
    return MetricSummary(
        drafts=drafts,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        emitted_tokens=totals.get("truespec_emitted_tokens_total", 0.0),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=1 + accepted / drafts if drafts else None,
        replayed_tokens=replayed,
        tme=1 + excess / replayed if replayed else None,
        selfcheck_terms=totals.get("truespec_selfcheck_terms_total", 0.0),
        selfcheck_alarms=totals.get("truespec_selfcheck_alarms_total", 0.0)
        + totals.get("truespec_replay_alarms_total", 0.0),
        verdicts=verdicts,
        handoffs_by_result=by_result,
    )
