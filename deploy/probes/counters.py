"""Probes of a server's counters: identities that hold for any drafter, and findings of the server's own checks."""

import dataclasses
import threading
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from deploy.exchange.dialect import Ask
from deploy.probes.lab import SETTINGS, Lab
from deploy.probes.probes import Need, ProbeVerdict, Stopped, Trial, probe

_GREEDY = SETTINGS["greedy"]
_SETTLE_S = 12.0  # how long a server may take to publish its counts
_LEAST_DRAFTS = 60
_DEAD = 0.02  # acceptance below this in repetitive text means that the drafter does not work
_ONE_LEFT = 129  # prompt tokens of which a cache of whole blocks leaves one to compute, for blocks of up to 128 tokens
_LOST = 0.75  # share of the acceptance that must remain next to an unrelated request

_NAMES = {
    "truespec_": {
        "drafts": "truespec_drafts_total",
        "drafted": "truespec_draft_tokens_total",
        "accepted": "truespec_accepted_tokens_total",
        "per_position": "truespec_accepted_tokens_per_position_total",
        "generated": "truespec_emitted_tokens_total",
    },
    "vllm:": {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "generated": "vllm:generation_tokens_total",
    },
}

_OWN_CHECKS: dict[str, dict[str, tuple[str, ...]]] = {
    "truespec_logprob_violations_total": {"positive": ("F2", "F10"), "": ("F10", "F2")},
    "truespec_selfcheck_violations_total": {
        "support": ("F9",),
        "conservation": ("F12",),
        "length": ("F25",),
        "q_missing": ("F26",),
        "stop": ("F21",),
        "metrics": ("F18",),
        "q_zero": ("F3", "F4", "F7", "F16"),
        "positions": ("F1", "F5"),
        "resolution": ("F33",),
        "": ("F16",),
    },
    "truespec_selfcheck_alarms_total": {"coin": ("F32",), "": ("F3", "F4", "F6", "F7", "F8", "F12")},
    "truespec_replay_alarms_total": {"": ("F1", "F5", "F10", "F11", "F13", "F14", "F15", "F34")},
}
"""Metrics of truespec's own checks and the faults they suggest, by the value of `kind`, `check` or `alarm`."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCounts:
    """A server's counters, summed over replicas.

    per_position: accepted at each.
    """

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    generated: float = 0.0
    per_position: tuple[float, ...] = ()

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """The counts since an earlier reading."""
        num = max(len(self.per_position), len(earlier.per_position))
        pad = [0.0] * num
        later, before = [*self.per_position, *pad][:num], [*earlier.per_position, *pad][:num]
        return DraftCounts(
            self.drafts - earlier.drafts,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            self.generated - earlier.generated,
            tuple(b - a for a, b in zip(before, later, strict=True)),
        )

    @property
    def acceptance(self) -> float:
        """Accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def read_counts(lab: Lab) -> DraftCounts:
    """Read them now."""
    names = _NAMES[lab.dialect.can.metrics or "vllm:"]
    kinds = {name: kind for kind, name in names.items()}
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    text = lab.server.get("/metrics") or ""
    reported = [
        line for line in text.splitlines() if line.startswith(tuple(kinds))
    ]  # the rest would take long to parse
    for family in text_string_to_metric_families("\n".join(reported) + "\n"):
        for sample in family.samples:
            kind = kinds.get(sample.name)
            if kind == "per_position":
                place = int(sample.labels.get("position", 0))
                positions[place] = positions.get(place, 0.0) + sample.value
            elif kind is not None:
                sums[kind] = sums.get(kind, 0.0) + sample.value
    return DraftCounts(**sums, per_position=tuple(positions[place] for place in sorted(positions)))


def counted(lab: Lab, work: Callable[[], int]) -> tuple[DraftCounts, int]:
    """Return what the server counted while `work` ran, and the tokens that `work` received; waits until it is
    published."""
    before = _settled(lab, lambda _: True)
    tokens = work()
    after = _settled(lab, lambda now: now.since(before).generated >= tokens)
    return after.since(before), tokens


def _settled(lab: Lab, enough: Callable[[DraftCounts], bool]) -> DraftCounts:
    """The counts once they are stable, or after `_SETTLE_S`."""
    deadline, last = time.monotonic() + _SETTLE_S, read_counts(lab)
    while time.monotonic() < deadline:
        time.sleep(lab.publishing_s)
        now = read_counts(lab)
        if now == last and enough(now):
            return now
        last = now
    return last


@probe(
    "counters",
    "Are the server's draft counters consistent with each other and with the served tokens?",
    Need.METRICS,
    Need.TOKEN_IDS,
)
def counters(lab: Lab, trial: Trial) -> None:
    """Greedy answers to repetitive prompts, with and without logprobs; identities that hold for any drafter."""
    found: dict[bool, DraftCounts] = {}
    for with_logprobs in (False, True):
        params = dataclasses.replace(_GREEDY, max_tokens=48, logprobs=3 if with_logprobs else None)
        asks = [Ask(lab.loop(2 * number + 1), params) for number in range(lab.budget.twins)]
        counts, tokens = counted(lab, lambda asks=asks: _serve(lab, trial, asks))  # type: ignore[misc]
        found[with_logprobs] = counts
        body = lab.dialect.body(asks[0])
        if counts.generated > tokens:
            trial.unclear = (
                f"the server generated {counts.generated:.0f} tokens while {tokens} were requested: it has other "
                "clients"
            )
            return
        reported = f"{counts.generated:.0f} counted, {tokens} served"
        trial.check(counts.generated == tokens, ("F18",), body, "every generated token counted once", reported)
        _check_identities(trial, counts, tokens, len(asks), body)
    plain, reported_logprobs = found[False], found[True]
    trial.figures |= {"acceptance": plain.acceptance, "drafted": plain.drafted}
    trial.reported = f"{plain.accepted:.0f} of {plain.drafted:.0f} drafts accepted in repetitive text"
    if plain.drafted >= _LEAST_DRAFTS:
        body = lab.dialect.body(Ask(lab.loop(1), dataclasses.replace(_GREEDY, max_tokens=48)))
        reported = f"{reported_logprobs.drafted:.0f} drafts with logprobs, {plain.drafted:.0f} without"
        trial.check(reported_logprobs.drafted > 0, ("F22",), body, "drafts also when logprobs are requested", reported)
        reported = f"{plain.acceptance:.1%} of {plain.drafted:.0f} drafts accepted"
        trial.check(plain.acceptance > _DEAD, ("F19", "F20"), body, "some drafts accepted in repetitive text", reported)


def _serve(lab: Lab, trial: Trial, asks: list[Ask]) -> int:
    """Send the requests; returns the number of tokens received."""
    return sum(len(one.ids) for one in lab.ask_all(asks, "counters") if trial.answered(one.attempt))


def _check_identities(
    trial: Trial, counts: DraftCounts, tokens: int, num_requests: int, body: dict[str, object]
) -> None:
    reported = f"{counts.accepted:.0f} accepted of {counts.drafted:.0f} drafted"
    trial.check(counts.accepted <= counts.drafted, ("F18",), body, "no more accepted than drafted", reported)
    if counts.per_position:
        reported = f"{sum(counts.per_position):.0f} over positions, {counts.accepted:.0f} in all"
        trial.check(
            sum(counts.per_position) == counts.accepted, ("F18",), body, "positions that add up to the total", reported
        )
        falling = all(a >= b for a, b in zip(counts.per_position, counts.per_position[1:], strict=False))
        reported = ", ".join(f"{value:.0f}" for value in counts.per_position)
        trial.check(falling, ("F18",), body, "no position accepted more often than the one before", reported)
    slack = num_requests * max(len(counts.per_position), 1)  # for a last round cut by max_tokens
    least = counts.accepted + counts.drafts
    reported = (
        f"{counts.accepted:.0f} accepted in {counts.drafts:.0f} rounds make {least:.0f} tokens, {tokens} were served"
    )
    fits = least <= tokens + slack
    trial.check(fits, ("F18", "F12"), body, "one token for every accepted draft plus one per round", reported)


@probe(
    "drafts of one token",
    "Does a request for one token with a cached prompt count no drafts?",
    Need.METRICS,
    Need.TOKEN_IDS,
)
def drafts_of_one_token(lab: Lab, trial: Trial) -> None:
    """Its only token comes from the prompt, so any counted draft is wrong."""
    params = dataclasses.replace(_GREEDY, max_tokens=1, logprobs=None)
    ask = Ask(lab.passage(11, _ONE_LEFT), params)
    long = Ask(ask.prompt, dataclasses.replace(params, max_tokens=6))
    lab.ask(ask)
    counts, tokens = counted(lab, lambda: _serve(lab, trial, [ask] * 12))
    if not tokens:
        return
    reported = f"{counts.drafted:.0f} drafted, {counts.accepted:.0f} accepted in {counts.drafts:.0f} rounds"
    wanted = "no drafts for requests of one token"
    trial.check(counts.drafted == 0, ("placeholder drafts", "F18"), lab.dialect.body(ask), wanted, reported)
    counts, tokens = counted(lab, lambda: _serve(lab, trial, [long] * 12))
    most = counts.generated - 12  # the first token of each also comes from its prompt
    reported = f"{counts.drafts:.0f} rounds with drafts, {tokens} tokens in 12 requests"
    wanted = "no more rounds with drafts than tokens after the first of each request"
    trial.check(counts.drafts <= most, ("placeholder drafts", "F18"), lab.dialect.body(long), wanted, reported)


@probe(
    "neighbours of a long request",
    "Are drafts accepted as often next to a request that is about to reach the length limit?",
    Need.METRICS,
    Need.TOKEN_IDS,
    Need.LIMIT,
)
def neighbours_of_a_long_request(lab: Lab, trial: Trial) -> None:
    """Greedy answers to repetitive prompts, alone and again next to requests at the length limit."""
    limit = lab.dialect.max_model_len
    assert limit is not None
    params = dataclasses.replace(_GREEDY, max_tokens=64, logprobs=None)
    asks = [Ask(lab.loop(2 * number + 1), params) for number in range(6)]
    near = Ask(lab.passage(9, limit - 4), dataclasses.replace(params, max_tokens=4))
    lab.ask_all([*asks, near])  # warms the caches, so that both runs compute the same
    alone, _ = counted(lab, lambda: _serve(lab, trial, asks))
    if alone.drafted < _LEAST_DRAFTS or alone.accepted < _LEAST_DRAFTS / 2:
        raise Stopped(
            ProbeVerdict.INCONCLUSIVE,
            f"only {alone.accepted:.0f} of {alone.drafted:.0f} drafts are accepted even alone",
        )
    over = threading.Event()
    others: list[int] = []

    def disturb() -> None:
        while not over.is_set():
            others.append(len(lab.ask(near).ids))

    def work() -> int:
        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            served = _serve(lab, trial, asks)
        finally:
            over.set()
            disturber.join()
        return served + sum(others)

    beside, _ = counted(lab, work)
    lost = beside.accepted < _LOST * alone.accepted and beside.drafted > alone.drafted
    reported = (
        f"{alone.accepted:.0f} of {alone.drafted:.0f} accepted alone, {beside.accepted:.0f} of {beside.drafted:.0f} "
        f"next to {len(others)} such requests"
    )
    trial.figures |= {"acceptance alone": alone.acceptance, "acceptance beside": beside.acceptance}
    trial.reported = reported
    wanted = "the same drafts accepted next to a request near the length limit"
    trial.check(not lost, ("neighbour zeroes drafts", "F1"), lab.dialect.body(near), wanted, reported)


@probe("own alarms", "Did the server's own checks find anything during the audit?", Need.METRICS)
def own_alarms(lab: Lab, trial: Trial) -> None:
    """Counters of a truespec server's self-checks and replays."""
    if lab.dialect.can.metrics != "truespec_":
        raise Stopped(ProbeVerdict.UNSUPPORTED, "this server has no checks of its own")
    time.sleep(2 * lab.publishing_s)
    for family in text_string_to_metric_families(lab.server.get("/metrics") or ""):
        for sample in family.samples:
            known: dict[str, tuple[str, ...]] | None = _OWN_CHECKS.get(sample.name)
            if known is None:
                continue
            kind = next((sample.labels[name] for name in ("kind", "check", "alarm") if name in sample.labels), "")
            if sample.labels.get("stratum", "all") != "all":
                continue
            reported = f"{sample.value:.0f} times{f' of kind {kind}' if kind else ''}"
            faults = known.get(kind, known[""])
            name = sample.name.removeprefix("truespec_").removesuffix("_total").replace("_", " ")
            trial.check(sample.value == 0, faults, {}, f"no {name}", reported)
    trial.num_cases += 1
