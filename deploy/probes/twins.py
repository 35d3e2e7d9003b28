"""Probes that send the same request twice: what must not affect the answer does not."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from deploy.exchange.dialect import Ask
from deploy.probes.lab import AT_ONCE, NUM_TOP, SEED, SETTINGS, Lab, ServedAnswer
from deploy.probes.probes import Need, Trial, probe
from deploy.probes.replay import check_greedy, check_logprobs
from deploy.probes.statistics import too_many
from serve_app.referee.judgement import processed_logprobs
from speculative.request import SamplingParams

_GREEDY = SETTINGS["greedy"]
_FLIPS = 0.01  # share of sampled tokens that rounding may change
_WARM = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True, logprobs=NUM_TOP)


def parting(lab: Lab, first: ServedAnswer, second: ServedAnswer) -> str:
    """Return where two greedy answers diverge without a near-tie; empty if they agree or need not."""
    pairs = list(zip(first.ids, second.ids, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        if len(first.ids) == len(second.ids):
            return ""
        return f"one answer has {len(first.ids)} tokens, the other {len(second.ids)}"
    margin = _margin(lab, first, place)
    if margin is None or margin <= lab.tolerance.edge_nats:
        return ""
    tokens = f"{first.ids[place]}, {second.ids[place]}"
    return f"they diverge at token {place} ({tokens}), where the top two are {margin:.2f} nats apart"


def _margin(lab: Lab, served: ServedAnswer, place: int) -> float | None:
    """Nats between the two most likely tokens; without a reference from served logprobs, None if those are missing."""
    if lab.reference is not None:
        context = (*served.ask.prompt, *served.ids[:place])
        likeliest, second = lab.reference.logits((*context, 0), len(context))[0].topk(2).values.tolist()
        return float(likeliest - second)
    tops = served.top
    if tops is None or len(tops) <= place or len(tops[place]) < 2:
        return None
    return tops[place][0] - tops[place][1]


@probe(
    "greedy twins",
    "Is a greedy answer the same alone, repeated, in a mixed batch, and without speculation?",
    Need.TOKEN_IDS,
)
def greedy_twins(lab: Lab, trial: Trial) -> None:
    """Compared up to a near-tie."""
    asks = [Ask(lab.prompt(number), _GREEDY) for number in range(lab.budget.twins)]
    alone = [lab.ask(ask, "twins") for ask in asks]
    ways: dict[str, tuple[Sequence[ServedAnswer], tuple[str, ...]]] = {
        "asked again alone": ([lab.ask(ask, "twins") for ask in asks], ("F5", "F14")),
        "among sampled requests": (_among_others(lab, asks), ("F5", "F9", "F10")),
    }
    if Need.BESIDE not in lab.missing:
        ways["without speculation"] = (lab.ask_plainly(asks), ("F8", "F12", "F1"))
    for way, (others, faults) in ways.items():
        for first, second in zip(alone, others, strict=True):
            if trial.answered(first.attempt) and trial.answered(second.attempt):
                reported = parting(lab, first, second)
                trial.check(not reported, faults, second.attempt.body, f"the same greedy answer {way}", reported)
    if Need.BESIDE in lab.missing:
        trial.reported = f"{trial.num_cases} pairs; none without speculation, which needs --beside"
    if lab.reference is not None:
        for served in alone:
            if served.ids:
                check_greedy(lab, trial, served, "alone", ("F8", "F12", "F5"))


def _among_others(lab: Lab, asks: Sequence[Ask]) -> list[ServedAnswer]:
    noise = [
        Ask(lab.prompt(50 + number), dataclasses.replace(SETTINGS[name], max_tokens=40), SEED + number)
        for number, name in enumerate(("temperature 1", "top_p", "min_p", "penalties") * 2)
        if name not in lab.refused
    ]
    mixed = [ask for pair in zip(asks, noise, strict=False) for ask in pair] + list(asks[len(noise) :])
    answered = lab.ask_all(mixed, "twins")
    return [one for ask in asks for one in answered if one.ask is ask]


@probe("streams", "Does a stream match a whole reply in tokens, logprobs and finish_reason?", Need.TOKEN_IDS)
def streams(lab: Lab, trial: Trial) -> None:
    """Greedy; the assembled stream against a whole reply."""
    for number in range(min(4, lab.budget.twins)):
        ask = Ask(lab.prompt(number), _GREEDY)
        whole = lab.ask(ask, "streams")
        streamed = ServedAnswer("streams", ask, lab.server.stream(lab.dialect.body(ask)))
        if not (trial.answered(whole.attempt) and trial.answered(streamed.attempt)):
            continue
        answer, body = streamed.answer, streamed.attempt.body
        if not streamed.ids:
            trial.unclear = "this server's streams carry no token ids"
            return
        reported = parting(lab, whole, streamed)
        trial.check(not reported, ("F10", "F21"), body, "the same tokens as a stream and as a whole", reported)
        if answer.logprobs:
            reported = f"{len(answer.logprobs)} logprobs for {len(streamed.ids)} tokens"
            trial.check(len(answer.logprobs) == len(streamed.ids), ("F10",), body, "one logprob per token", reported)
        reported = f"{answer.finish_reason}, in the whole reply {whole.answer.finish_reason}"
        trial.check(
            answer.finish_reason == whole.answer.finish_reason,
            ("F21",),
            body,
            "the same finish_reason",
            reported,
        )


@probe(
    "seeded twins",
    "Does the same seed reproduce a sampled answer, and another seed change it?",
    Need.TOKEN_IDS,
    tests=1,
)
def seeded_twins(lab: Lab, trial: Trial) -> None:
    """Sent one after the other on a warm prefix, so that all shapes are the same; rounding may still change a few."""
    same, pairs, different = 0, 0, 0
    example: ServedAnswer | None = None
    for number in range(2 * lab.budget.twins):
        ask = Ask(lab.prompt(20 + number), _WARM, seed=SEED + number)
        lab.ask(dataclasses.replace(ask, seed=None, params=dataclasses.replace(_WARM, max_tokens=1)), "twins")
        first, second = lab.ask(ask, "twins"), lab.ask(ask, "twins")
        if not (trial.answered(first.attempt) and trial.answered(second.attempt)):
            if first.attempt.refused:
                trial.unclear = f"seed is refused: {first.attempt.error}"
                return
            continue
        pairs, same, trial.num_cases = pairs + 1, same + (first.ids == second.ids), trial.num_cases + 1
        if first.ids != second.ids:
            example = second
        if number == 0:
            other = lab.ask(dataclasses.replace(ask, seed=SEED + 999), "twins")
            different += other.ids != first.ids
            reported = "both seeds gave the same answer"
            if _surprising(first):
                trial.check(
                    other.ids != first.ids,
                    ("F17", "seed"),
                    other.attempt.body,
                    "a different answer for another seed",
                    reported,
                )
    trial.figures["share reproduced"] = same / max(pairs, 1)
    trial.reported = f"{same} of {pairs} answers were reproduced"
    odds = 1 - (1 - _FLIPS) ** _WARM.max_tokens
    if example is not None and too_many(pairs, pairs - same, odds, trial.delta):
        trial.found(
            ("seed",), example.attempt.body, "the same answer for the same seed, prompt and parameters", trial.reported
        )


def _surprising(served: ServedAnswer, nats: float = 12.0) -> bool:
    """Return whether an answer is too unlikely to occur twice by chance."""
    values = served.values
    return len(values) > 0 and bool(np.isfinite(values).all()) and float(values.sum()) < -nats


@probe(
    "unseeded answers",
    "Do requests without a seed use different random numbers?",
    Need.TOKEN_IDS,
    Need.LOGPROBS,
    tests=1,
)
def unseeded_answers(lab: Lab, trial: Trial) -> None:
    """Equal answers to one prompt are a finding if they are too unlikely to coincide."""
    count = 2 * AT_ONCE
    ask = Ask(lab.passage(5, 24), dataclasses.replace(_WARM, temperature=1.0))
    answered = [one for one in lab.ask_all([ask] * count, "unseeded") if trial.answered(one.attempt)]
    trial.num_cases += len(answered)
    seen: dict[tuple[int, ...], ServedAnswer] = {}
    for one in answered:
        twin = seen.setdefault(one.ids, one)
        if twin is one or not one.ids or not np.isfinite(one.values).all():
            continue
        logprobs = processed_logprobs(lab.replayed(one)) if lab.reference is not None else one.values
        log_chance = float(np.sum(logprobs)) + math.log(count**2)
        reported = f"two of {len(answered)} answers are equal, which has probability below exp({log_chance:.0f})"
        trial.check(
            log_chance > math.log(trial.delta),
            ("F17",),
            one.attempt.body,
            "different answers without a seed",
            reported,
        )


@probe(
    "slots and crowds",
    "Are answers correct when slots are reused and more requests arrive than fit?",
    Need.TOKEN_IDS,
    Need.LOGPROBS,
    Need.REFERENCE,
)
def slots_and_crowds(lab: Lab, trial: Trial) -> None:
    """Greedy requests with penalties and staggered ends, four times the usual concurrency; each is replayed."""
    params = SETTINGS["greedy, penalties"] if "greedy, penalties" not in lab.refused else _GREEDY
    asks = [
        Ask(lab.prompt(80 + number), dataclasses.replace(params, max_tokens=4 + (11 * number) % 45))
        for number in range(5 * AT_ONCE)
    ]
    answered = lab.ask_all(asks, "crowd", at_once=4 * AT_ONCE)
    for one in answered:
        if not trial.answered(one.attempt):
            continue
        reported = f"{len(one.ids)} tokens"
        full = trial.check(
            len(one.ids) == one.ask.params.max_tokens,
            ("F12", "F21"),
            one.attempt.body,
            f"{one.ask.params.max_tokens} tokens",
            reported,
        )
        if full and one.ids:
            check_greedy(lab, trial, one, "in a crowd", ("F5", "F15", "F9"))
            check_logprobs(lab, trial, [one], "an answer in a crowd", ("F5", "F15", "F10", "F13"))
