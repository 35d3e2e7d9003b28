"""What each alert is tested on: series, the time at which it is looked at, and what fires then.

Series are promtool's: `a+bxn` is a, then n values each b more, one a minute; `_xn` is n minutes without a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dashboards.build import ALERTS

_STATUS = "ray_serve_application_status application=truespec"
_PROXY = "ray_serve_haproxy_process_count node_id="
_HTTP = "ray_serve_num_http_requests_total status_code="
_COMMON = {"job": "truespec", "model_name": "tiny"}


@dataclass(frozen=True)
class Fires:
    """An alert that is expected, with the labels it has beside the common ones."""

    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    common: bool = True


@dataclass(frozen=True)
class Case:
    """One situation."""

    alert: str
    what: str
    series: dict[str, str]
    at: str
    fires: Fires | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a test file of promtool has it."""
        alert = next(alert for alert in ALERTS if alert.name == self.alert).as_dict()
        series, expected = self.series, []
        if not any("replicas_wanted" in name for name in series) and self.alert != "TruespecMetricsMissing":
            series = {f"replicas_wanted {of}".strip(): "0x700" for of in _namespaces(series)} | series
        if self.fires is not None:
            labels = alert["labels"] | (_COMMON if self.fires.common else {}) | self.fires.labels
            annotations = alert["annotations"] | {"summary": self.fires.summary}
            expected.append({"exp_labels": labels, "exp_annotations": annotations})
        return {
            "name": f"{self.alert}: {self.what}",
            "interval": "1m",
            "input_series": [{"series": _selector(name), "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": self.at, "alertname": self.alert, "exp_alerts": expected}],
        }


def _namespaces(series: dict[str, str]) -> set[str]:
    """The labels that name the namespaces of series; the controller of each release is scraped throughout."""
    return {next((pair for pair in name.split() if pair.startswith("namespace=")), "") for name in series}


def _selector(name: str) -> str:
    """`accepted_tokens_total` or `handoffs_total result=ok`, with the prefix and the common labels; Ray's own series
    have their whole names, and of the labels the job."""
    metric, *pairs = name.split()
    if metric.startswith("ray_"):
        own = {"job": "truespec"} | dict(pair.split("=", 1) for pair in pairs)
        inside = ",".join(f'{key}="{value}"' for key, value in own.items())
        return f"{metric}{{{inside}}}"
    labels = {**_COMMON, "pool": "decode", **dict(pair.split("=", 1) for pair in pairs)}
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"truespec_{metric}{{{inside}}}"


def _acceptance(drafted: str, accepted: str) -> dict[str, str]:
    return {"draft_tokens_total": drafted, "accepted_tokens_total": accepted}


def _held_out(accepted: float, drafted: float = 100, position: int = 0) -> dict[str, str]:
    """Two hours of so many tokens a minute at a position of a head that has .49 and .65 at the first, and .09 and .21
    at the third."""
    sampled, greedy = {0: (0.49, 0.65), 2: (0.09, 0.21)}[position]
    return {
        f"held_out_acceptance_ratio position={position} sampling=sampled replica=r1": f"{sampled}x120",
        f"held_out_acceptance_ratio position={position} sampling=greedy replica=r1": f"{greedy}x120",
        f"draft_tokens_per_position_total position={position}": f"0+{drafted}x120",
        f"accepted_tokens_per_position_total position={position}": f"0+{accepted}x120",
    }


def _replicas(wanted: str, running: str, controller: str = "c") -> dict[str, str]:
    return {f"replicas_wanted replica={controller}": wanted, f"replicas_running replica={controller}": running}


def _recent_replays(answered_by: str, replays: str, failures: str) -> dict[str, str]:
    of = f"answered_by={answered_by} replica=c"
    return {f"recent_replays {of}": replays, f"recent_replay_failures {of}": failures}


def _proxies(wanted: str, running: str) -> dict[str, str]:
    """Ray Serve's proxies, as its controller counts them."""
    return {"replicas_wanted pool=proxy": wanted, "replicas_running pool=proxy": running}


def _weights(prefill: str, decode: str, cluster: str = "") -> dict[str, str]:
    """The fingerprints of two pools, of which the second may be in another cluster."""
    builds = f"fingerprint={prefill} pool=prefill", f"fingerprint={decode} pool=decode instance={cluster}"
    return {f"build_info {build}": "1x70" for build in builds}


def _speculation(enabled: str, breaker: str) -> dict[str, str]:
    return {"speculation_enabled replica=r1": enabled, "breaker_state replica=r1": breaker}


def _updates(succeed: str) -> dict[str, str]:
    return {"weight_updates_total result=failed": "0+0.1x99", "weight_updates_total result=ok": succeed}


def _since_handoff(early: float, late: float, drafted: float = 100, drafter: str = "eagle3") -> dict[str, str]:
    """Two hours; tokens a minute that are accepted of so many at each age."""
    series = {f"build_info drafter={drafter} replica=r1": "1x120"}
    for age, accepted in (("0", early), ("1", early), ("2_3", early), ("4_7", late), ("8_up", late)):
        labels = f"since_handoff={age} weights=current"
        series[f"draft_tokens_since_handoff_total {labels}"] = f"0+{drafted}x120"
        series[f"accepted_tokens_since_handoff_total {labels}"] = f"0+{accepted}x120"
    return series


def _replayed(tokens: float, excess: float) -> dict[str, str]:
    return {
        "replay_tokens_total stratum=handoff_0": f"0+{tokens}x120",
        "replay_tme_excess_total stratum=handoff_0": f"0+{excess}x120",
    }


def _results(metric: str, **a_minute: float) -> dict[str, str]:
    return {f"{metric} {label.replace('__', '=')}": f"0+{rate}x60" for label, rate in a_minute.items()}


def _first_tokens(within_1_s: int, within_5_s: int, within_10_s: int) -> dict[str, str]:
    counts = {"1": within_1_s, "5": within_5_s, "10": within_10_s, "+Inf": within_10_s}
    return {f"time_to_first_token_seconds_bucket le={le}": f"0+{count}x60" for le, count in counts.items()}


def _watched(pool: str = "watched", **a_minute: float) -> dict[str, str]:
    """An hour and a half of so many requests and answers a minute, by result."""
    names = {result: "answers" if result in ("read", "unreadable") else "requests" for result in a_minute}
    return {
        f"watched_{names[result]}_total result={result} pool={pool}": f"0+{rate}x90"
        for result, rate in a_minute.items()
    }


def _of(alert: str, *rows: tuple[Any, ...]) -> Iterator[Case]:
    """Cases of one alert: what, series, time, and what fires."""
    return (Case(f"Truespec{alert}", *row) for row in rows)


def _event(series: str, summary: str, **labels: str) -> Iterator[tuple[Any, ...]]:
    """Rows of an alert on a single event; that a rule counts each event, and none twice, is tested apart."""
    yield "the first event of a series", {series: "_x30 1x60"}, "35m", Fires(summary, labels)
    yield "an event of long ago", {series: "1x90"}, "35m"


def _low(than: str, share: str, position: str = "") -> Fires:
    at, labels = (f" at position {position}", {"position": position}) if position else ("", {})
    return Fires(f"Acceptance of tiny{at} is {share}, far below that {than}.", {"than": than} | labels)


def _told(what: str, summary: str, **labels: str) -> Fires:
    return Fires(summary, {"what": what} | labels)


_REPLAYED = {
    "build_info replica=r1": "1x90",
    "replay_lag_seconds replica=c": "0x90",
    "replays_requested_total": "0+1x90",
}
_ROUNDS = {"selfcheck_rounds_total": "0+100x120"}
_ROUTER = {"replicas_wanted pool=router": "1x60"}
_TME = Fires("TME of tiny is 1.1 in stratum handoff_0.", {"stratum": "handoff_0"})
_OPEN = Fires("The breaker of r1 (tiny, decode) is open.", {"pool": "decode", "replica": "r1", "severity": "critical"})
_REHEARSED = Fires(
    "The breaker of a replica (tiny, decode) was open for a rehearsal.",
    {"pool": "decode", "rehearsed": "true", "severity": "info"},
)
_LATE = _told("answers late", "The referee of tiny checks answers late.")
_SOME = _told("not all answers", "The referee of tiny checks not all answers.")
_DROPPED = _told("not all it is sent", "The referee of tiny checks not all it is sent.")
_HANDOFFS = _told("handoffs", "5% of the handoffs of tiny were refused or failed.")
_PREFILLS = _told("prefills", "100% of the prefills of tiny were refused or failed.")
_UNTESTED = Fires("95% of the rounds of tiny add nothing to its self-checks.")
_SLOW = Fires("p95 of the time to first token of tiny is 9.722s.", {"pool": "decode"})
_ONE_MISSING = Fires("1 of the replicas of tiny in pool decode have been missing for a while.", {"pool": "decode"})
_RESTARTED = _told("replicas", "3 replicas of tiny in pool decode were lost.", pool="decode")
_NO_SERVER = Fires("50% of the requests for tiny find no server behind the proxy.")
_NOBODY = Fires("No replica answers (job truespec).", {"job": "truespec"}, common=False)
_MASS = Fires("A step of tiny broke the rule mass.", {"kind": "mass"})
_EMPTY = Fires("No replica of tiny runs in pool decode.", {"pool": "decode"})
_QUIET = Fires("No request for tiny has finished for half an hour.")
_STALE = Fires("The changed API key file of tiny is invalid.")
_UNJUDGED = _told("none that passes the proxy can be judged",
    "Nothing checks the answers of tiny: none that passes the proxy can be judged.")  # fmt: skip
_LOST = _told("requests", "6 requests of tiny were lost.")
_ERRORS = Fires("5% of the requests of tiny end in an error.")
_PROXY_DOWN = Fires("Ray Serve's proxy is down on 1 nodes (job truespec).", {"job": "truespec"}, common=False)


def _silent(what: str) -> Fires:
    return _told(what, f"Nothing checks the answers of tiny: {what}.")


def _degraded(what: str, **pool: str) -> Fires:
    of = f" in pool {pool['pool']}" if pool else ""
    return _told(what, f"tiny is not served as it could be{of}: {what}.", **pool)


def _missing(where: str, **labels: str) -> Fires:
    return Fires(f"Prometheus has no metrics from truespec{where}.", labels, common=False)


_GONE = _missing(" (job truespec)", job="truespec")

CASES: tuple[Case, ...] = (
    *_of("ReplayAlarm", *_event("replay_alarms_total alarm=drift stratum=bonus",
        "Replays of tiny raised the alarm drift in stratum bonus.", alarm="drift", stratum="bonus")),
    *_of("IndependentRefereeDisagrees", *_event("independent_replays_total result=disagrees",
        "transformers does not find what tiny answers.")),
    *_of("RefereeMissesFaults", *_event("referee_controls_total change=token result=missed",
        "The referee of tiny called an answer verified that was made wrong on purpose (token).", change="token")),
    *_of("RuleBroken", *_event("selfcheck_violations_total kind=q_zero", "A step of tiny broke the rule q_zero.",
        kind="q_zero")),
    *_of("SelfCheckAlarm", *_event("selfcheck_alarms_total check=f", "Self-check f of tiny raised an alarm.",
        check="f")),
    *_of("AcceptanceLow",
        ("from 60 % to 10 %", _acceptance("0+400x600", "0+240x420 100840+40x180"), "7h40m",
         _low("in the last hours", "10%")),
        ("from 60 % to 50 %", _acceptance("0+400x600", "0+240x420 101000+200x180"), "7h40m"),
        ("too few drafts to tell", _acceptance("0+10x600", "0+6x420 2521+1x180"), "7h40m"),
        ("no past", _acceptance("0+400x60", "0+4x60"), "1h"),
        ("without the drafter's keys and values", _held_out(accepted=13), "1h50m", _low("in training", "13%", "0")),
        ("as in training", _held_out(accepted=41), "1h50m"),
        ("as in training at the third", _held_out(accepted=9, position=2), "1h50m"),
        ("right after handoffs", _since_handoff(early=10, late=40), "1h50m", _low("long after handoffs", "10%")),
        ("as later", _since_handoff(early=35, late=40), "1h50m"),
        ("n-grams, which need a text first", _since_handoff(early=10, late=40, drafter="ngram"), "1h50m"),
        ("too few after handoffs", _since_handoff(early=1, late=4, drafted=10), "1h50m")),
    *_of("SelfCheckAlarm",
        ("a quarter more accepted than expected, as seeds can have it",
         _acceptance("0+400x120", "0+200x120")
         | {"drafts_total": "0+100x120", "expected_accepted_tokens_total": "0+160x120"}, "1h30m")),
    *_of("TmeHigh",
        ("a tenth too high", _replayed(tokens=20, excess=2), "1h30m", _TME),
        ("the floor of bfloat16", _replayed(tokens=20, excess=0.5), "1h30m"),
        ("too few tokens to tell", _replayed(tokens=5, excess=2), "1h30m")),
    *_of("RuleBroken",
        ("logprobs", {"logprob_violations_total kind=mass": "_x30 1x60"}, "35m", _MASS)),
    *_of("BreakerOpen",
        ("open", {"breaker_state replica=r1": "0x10 2x20"}, "15m", _OPEN),
        ("being tried", {"breaker_state replica=r1": "0x10 1x20"}, "15m"),
        ("rehearsed", {"breaker_trips_total reason=rehearsal": "0x10 1x20"}, "15m", _REHEARSED)),
    *_of("RefereeBehind",
        ("a quarter of an hour", {"replay_lag_seconds replica=c": "0+60x15 900x60"}, "30m", _LATE),
        ("a minute", {"replay_lag_seconds replica=c": "60x60"}, "30m"),
        ("three in four", _results("replays_total", result__ok=1, result__skipped=2, result__failed=1), "50m", _SOME),
        ("one in five", _results("replays_total", result__ok=4, result__skipped=1), "50m"),
        ("too few to count", {"replays_total result=failed": "0x20 3x40"}, "45m"),
        ("the proxies drop two in five", _watched(captured=6, dropped=3, failed=1, passed=90), "60m", _DROPPED),
        ("one in ten is dropped", _watched(captured=9, dropped=1, passed=90), "60m")),
    *_of("ReplaysOfOneReplicaFail",
        ("those of one of two",
         _recent_replays("r1", "0+1x60", failures="0x60") | _recent_replays("r2", "0x50 5x10", "0x50 5x10"), "57m",
         Fires("100% of the replays of answers by r2 (tiny) failed twice.", {"answered_by": "r2"})),
        ("four", _recent_replays("r1", "4x60", failures="4x60"), "57m")),
    *_of("RefereeSilent",
        ("the server refuses", _watched(refused=2, passed=20, read=0), "70m", _UNJUDGED),
        ("none can be read", _watched(captured=2, passed=20, read=0, unreadable=2), "70m", _UNJUDGED),
        ("a share of 0", _watched(passed=1000, captured=0, read=0), "70m", _UNJUDGED),
        ("few are chosen of many", _watched(passed=20, captured=0, read=0), "70m"),
        ("some can be read", _watched(refused=20, captured=1, passed=20, read=1), "70m"),
        ("no selected one is replayed", _REPLAYED | {"replays_total result=ok": "0+1x20 20x70"}, "80m",
         _silent("none is replayed")),
        ("the controller is gone", {"build_info replica=r1": "1x90", "replay_lag_seconds replica=c": "0x20"}, "50m",
         _silent("their controller is silent")),
        ("few answers are selected", _REPLAYED | {"replays_requested_total": "0+0.1x90"}, "80m")),
    *_of("HandoffsFail",
        ("one in twenty", _results("handoffs_total", result__ok=19, result__refused=1), "40m", _HANDOFFS),
        ("four", {"handoffs_total result=ok": "0+1x60", "handoffs_total result=failed": "_x30 4x30"}, "40m"),
        ("no prefill is answered", _results("prefill_failures_total", reason__died=1), "40m", _PREFILLS),
        ("the pool was full now and then",
         _results("handoffs_total", result__ok=998, result__failed=2)
         | _results("prefill_failures_total", reason__full=2), "40m")),
    *_of("UntestedShare",
        ("everybody sends one seed", _ROUNDS | {"selfcheck_untested_rounds_total": "0+95x120"}, "100m", _UNTESTED),
        ("every other one does", _ROUNDS | {"selfcheck_untested_rounds_total": "0+50x120"}, "100m")),
    *_of("TimeToFirstTokenHigh",
        ("nine in ten beyond 5 s", _first_tokens(0, 1, 10), "40m", _SLOW),
        ("few requests, all late", _first_tokens(0, 1, 3), "40m"),
        ("all within 1 s", _first_tokens(10, 10, 10), "40m")),
    *_of("RequestErrors",
        ("one in twenty", _results("requests_total", outcome__stop=19, outcome__error=1), "40m", _ERRORS),
        ("before they begin", _results("http_responses_total", code__200=19, code__500=1), "40m", _ERRORS),
        ("clients that leave", _results("requests_total", outcome__stop=1, outcome__abort=9), "40m"),
        ("refused", _results("http_responses_total", code__200=1, code__503=9), "40m"),
        ("replicas die behind HAProxy",
         {f"{_HTTP}200": "0+10x60", f"{_HTTP}502": "_x20 6x40", "replicas_wanted": "2x60"}, "26m",
         Fires("3.846% of the requests end in an error.", {"job": "truespec"}, common=False)),
        ("another service of Ray's",
         {f"{_HTTP}200": "0+10x60", f"{_HTTP}500": "0+10x60", "replicas_wanted job=other": "2x60"}, "26m")),
    *_of("RequestsTurnedAway",
        ("one in five, for want of room and because replicas stop",
         _results("refusals_total", reason__load=4)
         | _results("http_responses_total", code__200=24, code__429=4, code__503=2), "40m",
         Fires("20% of the requests for tiny are turned away.")),
        ("keys at their limits",
         _results("refusals_total", reason__key_concurrency=9)
         | _results("http_responses_total", code__200=1, code__429=9), "40m")),
    *_of("PoolEmpty",
        ("the last one is gone", _replicas("1x60", "1x10 0x50"), "15m", _EMPTY),
        ("gone for hours, with another controller now",
         _replicas("1x60", "1x10 0x50") | _replicas("_x65 1x200", "_x65 0x200", controller="d"), "240m", _EMPTY),
        ("never came up", _replicas("1x90", "0x90"), "70m", _EMPTY),
        ("the model is loaded for the first time", _replicas("1x90", "0x40 1x50"), "35m"),
        ("scaled to nothing", _replicas("0x60", "0x60"), "15m"),
        ("gone with the metrics", {"replicas_wanted replica=c": "1x10", _STATUS: "6x10 2x50"}, "20m", _NOBODY),
        ("it runs, and is not scraped", {"replicas_wanted replica=c": "1x10", _STATUS: "6x60"}, "20m")),
    *_of("ReplicasMissing",
        ("one of two", _replicas("2x60", "2x10 1x50"), "30m", _ONE_MISSING),
        ("one is replaced", _replicas("2x60", "2x10 1x5 2x45"), "30m")),
    *_of("ReplicasRestart",
        ("three within an hour", {"replica_restarts_total": "0x10 1x10 2x10 3x30"}, "35m", _RESTARTED),
        ("two", {"replica_restarts_total": "0x10 1x10 2x40"}, "35m"),
        ("a replica died with six requests", {"requests_interrupted_total": "0x10 6x30"}, "15m", _LOST),
        ("a router counts them", _ROUTER | {"requests_interrupted_total": "0x10 6x30"}, "15m"),
        ("the router died", _ROUTER | {"requests_interrupted_total pool=router": "0x10 6x30"}, "15m", _LOST)),
    *_of("ProxyDown",
        ("one process of two is dead",
         {f"{_PROXY}a": "1x60", f"{_PROXY}b": "1x10 0x50", "replicas_wanted": "2x60"}, "13m", _PROXY_DOWN),
        ("one node of two has lost it", _proxies("2x60", "2x10 1x50") | {f"{_PROXY}a": "1x60", f"{_PROXY}b": "1x10"},
         "20m", _PROXY_DOWN),
        ("one node of two is gone", _proxies("2x10 1x50", "2x10 1x50") | {f"{_PROXY}b": "1x10"}, "20m"),
        ("dead before our metrics", {f"{_PROXY}a": "1x10 0x50", "replicas_wanted": "2x10"}, "20m", _PROXY_DOWN)),
    *_of("Degraded",
        ("speculation was switched off", _speculation("1x10 0x60", breaker="0x70"), "60m",
         _degraded("speculation is off by hand")),
        ("a breaker has opened", _speculation("0x70", breaker="2x70"), "60m"),
        ("one replica has no compiler", {f"kernels_active kernels=cpu replica={one}": f"{one}x70" for one in (0, 1)},
         "60m", _degraded("kernels are off", pool="decode")),
        ("the pools have different weights", _weights("a", "b"), "60m", _degraded("replicas have different weights")),
        ("they have the same", _weights("a", "a"), "60m"),
        ("an upgrade has other weights", _weights("a", "b", cluster="new"), "60m"),
        ("no update succeeds", _updates("0x99"), "95m", _degraded("every weight update fails")),
        ("one in three does", _updates("0+0.05x99"), "95m")),
    *_of("KvCacheFull",
        ("one replica of two",
         {"kv_cache_usage_ratio replica=r1": "0.98x60", "kv_cache_usage_ratio replica=r2": "0.2x60"}, "40m",
         _told("KV cache in use", "tiny lacks KV memory in pool decode: 98% KV cache in use.", pool="decode")),
        ("now and then", {"kv_cache_usage_ratio replica=r1": "1 0.9 1 1 0.9 1 1 0.9 1 1"}, "9m"),
        ("one preemption in four requests", {"preemptions_total": "0+5x60", "requests_total outcome=stop": "0+20x60"},
         "40m", _told("preemptions a request", "tiny lacks KV memory: 25% preemptions a request.")),
        ("one in forty", {"preemptions_total": "0+1x60", "requests_total outcome=stop": "0+40x60"}, "40m")),
    *_of("KeysStale",
        ("for an hour", {"keys_stale replica=r1": "0x10 1x60", "keys_stale replica=r2": "0x70"}, "70m", _STALE),
        ("it was mended", {"keys_stale replica=r1": "0x10 1x20 0x20"}, "35m")),
    *_of("NoTraffic",
        ("it stopped", {"requests_total outcome=stop": "0+5x120 600x100"}, "2h45m", _QUIET),
        (
            "one request of a new replica",
            {
                "requests_total outcome=stop replica=r1": "0+5x120 600x100",
                "requests_total outcome=stop replica=r2": "_x150 1x60",
            },
            "2h45m",
        ),
        ("Prometheus was away", {"requests_total outcome=stop": "0+1x120 _x75 600x60"}, "3h28m"),
        ("no proxy reports any", {"watched_requests_total result=passed": "0+5x120 600x100"}, "2h45m", _QUIET),
        ("proxies do", {"watched_requests_total result=passed": "0+5x220"}, "2h45m")),
    *_of("MetricsMissing",
        ("nothing is scraped", {}, "15m", _missing("")),
        ("they are gone", {"build_info replica=r1": "1x30"}, "50m", _GONE),
        ("those of one namespace are gone", {"build_info namespace=ill": "1x30", "build_info namespace=well": "1x90"},
         "50m", _missing(" in ill (job truespec)", job="truespec", namespace="ill")),
        ("those of one job are gone", {"build_info job=blue": "1x30", "build_info job=green": "1x90"}, "50m",
         _missing(" (job blue)", job="blue")),
        ("those of a referee are gone", {"watched_requests_total result=passed": "0x30"}, "50m", _GONE),
        ("only a server is watched", {"watched_requests_total result=passed": "0x60"}, "50m"),
        ("replicas load their model", {"replicas_wanted replica=c": "2x60"}, "50m"),
        ("the first replica loads its model", {_STATUS: "5x60"}, "50m"),
        ("it has loaded for hours", {_STATUS: "5x150"}, "140m", _missing(""))),
    *_of("WatchedServerUnreachable",
        ("every other", _watched(passed=4, captured=1, unreachable=5), "60m", _NO_SERVER),
        ("one in fifty", _watched(passed=49, unreachable=1), "60m"),
        ("four", {"watched_requests_total result=unreachable": "0x30 4x30"}, "40m")),
)  # fmt: skip


def in_two_namespaces(alert: str) -> Case:
    """The model of an alert's first case that fires, beside a healthy release of it in another namespace."""
    ill = next(case for case in CASES if case.alert == alert and case.fires is not None)
    well = next(case for case in CASES if case.alert == alert and case.fires is None)
    assert ill.fires is not None
    series = {f"{name} namespace=ill": values for name, values in ill.series.items()}
    series |= {f"{name} namespace=well": values for name, values in well.series.items()}
    summary = ill.fires.summary.replace("tiny", "tiny in ill")
    if not ill.fires.common:  # it knows no model
        summary = ill.fires.summary.replace(" (job truespec)", " in ill (job truespec)")
    fires = Fires(summary, ill.fires.labels | {"namespace": "ill"}, ill.fires.common)
    return Case(alert, "in one of two namespaces", series, ill.at, fires)
