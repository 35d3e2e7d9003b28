"""Probes that ask the same twice: what must not affect an answer does not."""

import math
import random
from collections.abc import Sequence

import numpy as np

from deploy.exchange.client import Attempt
from deploy.watch.probes.desk import AT_ONCE, SEED, Desk, ids_of, parting, values_of
from deploy.watch.probes.trial import Trial, probe

_PAIRS = 6
_SEEDED = 8  # pairs; of these rounding may part some, but not all
_CHANCE = -15.0  # log of the chance below which two equal answers are no coincidence


@probe("twins", "Is an answer the same again, in a batch and without drafts, and do seeds mean what they say?")
def twins(desk: Desk, trial: Trial) -> None:
    """Greedy requests alone, again, among sampled ones, and without speculation; then seeds, and their absence."""
    bodies = [desk.body(desk.prompt(number)) for number in range(_PAIRS)]
    alone = [desk.ask(body) for body in bodies]
    noise = [desk.body(desk.prompt(50 + number), temperature=1, max_tokens=40) for number in range(_PAIRS)]
    mixed = desk.ask_all([body for pair in zip(bodies, noise, strict=True) for body in pair])[::2]
    ways = {"asked again": [desk.ask(body) for body in bodies], "among sampled requests": mixed}
    if desk.dialect == "truespec":
        ways["without speculation"] = desk.ask_all([body | {"speculate": False} for body in bodies])
    for way, others in ways.items():
        _compare(desk, trial, alone, others, f"the same greedy answer {way}")
    _seeded(desk, trial)
    _unseeded(desk, trial)


def _compare(desk: Desk, trial: Trial, firsts: Sequence[Attempt], seconds: Sequence[Attempt], expected: str) -> None:
    for first, second in zip(firsts, seconds, strict=True):
        if trial.answered(first) and trial.answered(second):
            parted = parting(desk, first, second)
            trial.check(not parted, second.body, expected, parted)


def _seeded(desk: Desk, trial: Trial) -> None:
    bodies = [
        desk.body(desk.prompt(20 + number), temperature=1, max_tokens=16, seed=SEED + number)
        for number in range(_SEEDED)
    ]
    pairs = [(desk.ask(body), desk.ask(body)) for body in bodies]
    if not all(trial.answered(one) for pair in pairs for one in pair):
        return
    same = sum(ids_of(first) == ids_of(second) for first, second in pairs)
    seen = f"{same} of {_SEEDED} answers came again"
    trial.check(same > 1, bodies[0], "the same answer for the same seed, prompt and parameters", seen)
    other = desk.ask(bodies[0] | {"seed": SEED + 999})
    if trial.answered(other) and _is_surprising(pairs[0][0]):
        trial.check(
            ids_of(other) != ids_of(pairs[0][0]), other.body, "another answer for another seed", "it is the same one"
        )


def _unseeded(desk: Desk, trial: Trial) -> None:
    body = desk.body(desk.passage(5, 24), temperature=1)
    seen: set[tuple[int, ...]] = set()
    for one in desk.ask_all([body] * 2 * AT_ONCE):
        if trial.answered(one) and ids_of(one):
            again = ids_of(one) in seen and _is_surprising(one)
            trial.check(not again, body, "different answers to requests without a seed", "two of them are equal")
            seen.add(ids_of(one))


def _is_surprising(attempt: Attempt) -> bool:
    """Return whether an answer is too unlikely to come twice by chance among all pairs that are looked at."""
    values = values_of(attempt)
    pairs = math.log(2 * AT_ONCE**2)
    return bool(len(values)) and bool(np.isfinite(values).all()) and float(values.sum()) + pairs < _CHANCE


@probe("streams", "Does a stream match a whole reply in tokens, text, logprobs and finish_reason?")
def streams(desk: Desk, trial: Trial) -> None:
    """Greedy; the assembled stream against a whole reply."""
    for number in range(4):
        body = desk.body(desk.prompt(number))
        whole, stream = desk.ask(body), desk.ask(body, streamed=True)
        if not (trial.answered(whole) and trial.answered(stream)):
            continue
        one, other = whole.reply.first, stream.reply.first
        if other.token_ids is None and other.text:
            trial.seen = "its streams carry no token ids"
        else:
            parted = parting(desk, whole, stream)
            trial.check(not parted, stream.body, "the same tokens as a stream and as a whole", parted)
        if one.token_ids == other.token_ids:
            seen = f"{other.text[-40:]!r}, in the whole reply {one.text[-40:]!r}"
            trial.check(one.text == other.text, stream.body, "the same text as a stream and as a whole", seen)
        if one.logprobs is not None and other.token_ids is not None:
            seen = f"{len(other.logprobs or ())} logprobs for {len(other.token_ids)} tokens"
            whole_row = len(other.logprobs or ()) == len(other.token_ids)
            trial.check(whole_row, stream.body, "one logprob for each token of a stream", seen)
        seen = f"{other.finish_reason}, in the whole reply {one.finish_reason}"
        trial.check(other.finish_reason == one.finish_reason, stream.body, "the same finish_reason", seen)


@probe("warm prefix", "Is an answer the same when all or part of its prompt is cached?")
def warm_prefix(desk: Desk, trial: Trial) -> None:
    """Prompts that no cache has, asked again; with other beginnings and ends, the referee judges."""
    draw = random.Random()
    for number in range(4):
        shared = (*desk.passage(draw.randrange(10_000), 5), *desk.passage(200 + number, 92))
        body = desk.body(shared, max_tokens=12)
        cold = desk.ask(body)
        _compare(desk, trial, [cold] * 2, [desk.ask(body), desk.ask(body)], "the same answer on a warm prefix")
        longer = [(*shared, *desk.passage(300 + number, length)) for length in (3, 20)]
        moved = (*desk.passage(draw.randrange(10_000), 5), *shared[5:])  # blocks with equal tokens behind other ones
        for one in desk.ask_all([desk.body(prompt, max_tokens=12) for prompt in (*longer, moved)]):
            trial.answered(one)
