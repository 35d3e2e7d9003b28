"""Recording rules of Prometheus: series that panels, alerts and people share.

Names follow `level:metric:operation`, where the level lists the labels kept besides the release's.
"""

from dashboards import queries
from dashboards.queries import QueryScope
from serve_app.telemetry.metric_names import NO_ROOM

KEEP = ("job", "namespace", "model_name")
_10M, _15M, _1H = (QueryScope("", window, KEEP) for window in ("10m", "15m", "1h"))
_POOL = QueryScope("", "5m", (*KEEP, "pool"))
_REASONS = "|".join(NO_ROOM)
_NO_ROOM = f'reason=~"{_REASONS}"'
_UNAVAILABLE = 'code="503"'

ACCEPTANCE = "model:truespec_acceptance:ratio_rate10m"
DRAFT_TOKENS = "model:truespec_draft_tokens:increase10m"
FIRST_TOKEN_P95 = "model_pool:truespec_time_to_first_token_seconds:p95_rate5m"
FIRST_TOKENS = "model_pool:truespec_time_to_first_token_seconds:increase5m"
HANDOFFS = "model_result:truespec_handoffs:increase15m"
KV_USAGE = "model_pool:truespec_kv_cache_usage:max"
PREFILL_FAILURES = "model_reason:truespec_prefill_failures:increase15m"
REPLAYS = "model_result:truespec_replays:increase15m"
REPLAY_TOKENS = "model_stratum:truespec_replay_tokens:increase1h"
REQUESTS = "model_outcome:truespec_requests:increase15m"
RESPONSES = "model_code:truespec_http_responses:increase15m"
TME = "model_stratum:truespec_tme:mean_rate1h"
TURNED_AWAY = "model:truespec_turned_away:increase15m"


def model_sum(series: str) -> str:
    """A recorded series summed by release and model."""
    return f"sum by ({', '.join(KEEP)}) ({series})"


RECORDINGS = {
    ACCEPTANCE: queries.acceptance(_10M),
    "model_position:truespec_acceptance:ratio_rate10m": queries.conditional_acceptance_by_position(_10M),
    DRAFT_TOKENS: _10M.increase("draft_tokens_total"),
    "model:truespec_acceptance:z_increase1h": queries.acceptance_z(_1H),
    "model_check:truespec_selfcheck:z_increase1h": queries.selfcheck_z(_1H),
    TME: queries.tme(_1H),
    REPLAY_TOKENS: _1H.increase("replay_tokens_total", "stratum"),
    FIRST_TOKEN_P95: _POOL.quantile(0.95, "time_to_first_token_seconds"),
    FIRST_TOKENS: _POOL.increase("time_to_first_token_seconds", where='le="+Inf"'),
    KV_USAGE: _POOL.gauge("kv_cache_usage_ratio", how="max"),
    HANDOFFS: _15M.events("handoffs_total", "result"),
    PREFILL_FAILURES: _15M.events("prefill_failures_total", "reason"),
    REPLAYS: _15M.events("replays_total", "result"),
    REQUESTS: _15M.events("requests_total", "outcome"),
    RESPONSES: _15M.events("http_responses_total", "code"),
    TURNED_AWAY: model_sum(
        f"{_15M.events('refusals_total', 'reason', where=_NO_ROOM)} "
        f"or {_15M.events('http_responses_total', 'code', where=_UNAVAILABLE)}"
    )
    + f" or 0 * {model_sum(RESPONSES)}",
}
"""PromQL of each series that Prometheus precomputes, by its name."""
