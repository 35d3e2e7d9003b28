"""Probes at boundaries: prompt lengths around blocks and chunks, the length limit, warm prefixes, stops."""

import dataclasses

import numpy as np

from deploy.exchange.dialect import Ask
from deploy.probes.lab import SETTINGS, Lab, ServedAnswer, compared, nan_for_none
from deploy.probes.probes import Need, Trial, probe
from deploy.probes.replay import check_greedy, check_logprobs
from serve_app.referee.detectors import drifts_of
from speculative.request import SamplingParams

_GREEDY = SETTINGS["greedy"]
_SCORE = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
_ROOMS = (*range(1, 10), 12, 16)


@probe(
    "prompt logprobs",
    "Are prompt logprobs correct at lengths around blocks, chunks and captured sizes, in a busy batch?",
    Need.PROMPT_LOGPROBS,
    Need.TOKEN_IDS,
    Need.REFERENCE,
)
def prompt_logprobs(lab: Lab, trial: Trial) -> None:
    """Prefixes of one text, so that one pass of the reference covers them all; sent next to greedy requests."""
    limit = lab.dialect.max_model_len or 2**20
    lengths = [length for length in lab.budget.lengths if length + 2 < limit]
    prompts = [lab.passage(3, length) for length in lengths]
    assert lab.reference is not None
    expected = lab.reference.scores(prompts[-1])
    asks = [Ask(prompt, _SCORE) for prompt in prompts]
    busy = [
        Ask(lab.loop(60 + number), dataclasses.replace(_GREEDY, max_tokens=48, logprobs=None)) for number in range(6)
    ]
    mixed = [ask for pair in zip(asks, (busy * len(asks))[: len(asks)], strict=True) for ask in pair]
    answered = [one for one in lab.ask_all(mixed, "prompt", at_once=6) if one.ask.params.prompt_logprobs is not None]
    largest = []
    for length, prompt, one in zip(lengths, prompts, answered, strict=True):
        if not trial.answered(one.attempt, ("F11", "request fails")):
            continue
        values = one.prompt_logprobs or []
        reported = f"{len(values)} logprobs, {sum(value is None for value in values)} of them null"
        whole = len(values) == length - 1 and None not in values
        if not trial.check(whole, ("F11",), one.attempt.body, f"{length - 1} logprobs for {length} tokens", reported):
            continue
        tokens = compared(prompt, nan_for_none(values), np.array(expected)[: len(values)])
        nats = [drift.nats for drift in drifts_of(tokens)]
        largest.append(max(nats))
        trial.num_cases += len(nats)
        if lab.drifted([(one, tokens)]) is not None:
            worst = nats.index(max(nats))
            reported = f"the logprob of token {worst + 1} of {length} is off by {nats[worst]:.2f} nats"
            wanted = f"the prompt's logprobs within the tolerance ({lab.tolerance.source})"
            trial.found(("F11",), one.attempt.body, wanted, reported)
    trial.series["largest difference by length, nats"] = largest
    trial.figures["lengths"] = float(len(lengths))
    if largest:
        trial.reported = (
            f"{len(lengths)} lengths up to {lengths[-1]}; the largest difference is {max(largest):.3g} nats"
        )


@probe(
    "length limit",
    "Are tokens and logprobs correct up to the server's length limit, and does the answer stop there?",
    Need.TOKEN_IDS,
    Need.LOGPROBS,
    Need.REFERENCE,
    Need.LIMIT,
)
def length_limit(lab: Lab, trial: Trial) -> None:
    """Greedy, so that drafting goes on until drafts no longer fit."""
    limit = lab.dialect.max_model_len
    assert limit is not None
    base = (*lab.passage(9, max(0, limit - 41)), *lab.loop(9, 40))[-limit:]
    answers = []
    for room in _ROOMS:
        ask = Ask(base[: limit - room], dataclasses.replace(_GREEDY, max_tokens=room))
        one = lab.ask(ask, "limit")
        if not trial.answered(one.attempt, ("F1", "request fails")):
            continue
        reported = f"{len(one.ids)} tokens, finish_reason {one.answer.finish_reason}"
        trial.check(
            len(one.ids) == room,
            ("F1", "F21"),
            one.attempt.body,
            f"{room} tokens, up to the limit of {limit}",
            reported,
        )
        if not one.ids:
            continue
        check_greedy(lab, trial, one, "at the length limit", ("F1",))
        answers.append(one)
    check_logprobs(lab, trial, answers, "answers near the length limit", ("F1",))
    total, largest = sum(len(one.ids) for one in answers), max(map(lab.largest_drift, answers), default=0.0)
    trial.reported = f"{total} tokens before the limit of {limit}, off by at most {largest:.3g} nats"
    beyond = lab.ask(Ask(base[: limit - 2], dataclasses.replace(_GREEDY, max_tokens=limit)), "limit")
    trial.answered(beyond.attempt, ("F1", "request fails"))


@probe(
    "warm prefixes",
    "Is an answer the same when all or part of its prompt is cached?",
    Need.TOKEN_IDS,
    Need.LOGPROBS,
    Need.REFERENCE,
)
def warm_prefixes(lab: Lab, trial: Trial) -> None:
    """Cold, warm, and warm with another suffix; each is replayed."""
    for number in range(max(3, lab.budget.twins // 2)):
        shared = lab.passage(200 + number, 97)
        params = dataclasses.replace(_GREEDY, max_tokens=12)
        ends = [(), (), lab.passage(300 + number, 3), lab.passage(400 + number, 20)]
        for turn, end in enumerate(ends):
            one = lab.ask(Ask((*shared, *end), params), "prefix")
            if not trial.answered(one.attempt, ("F14", "request fails")) or not one.ids:
                continue
            way = "on a cold prefix" if turn == 0 else "on a warm prefix"
            faults = ("F14",) if turn else ("F5", "F14")
            if check_greedy(lab, trial, one, way, faults):
                check_logprobs(lab, trial, [one], f"an answer {way}", faults)


@probe(
    "ends",
    "Does an answer end exactly where it should: at max_tokens, a stop token or a stop string?",
    Need.TOKEN_IDS,
)
def ends(lab: Lab, trial: Trial) -> None:
    """In repetitive text, where the end lies within a draft."""
    for number in range(1, 2 * max(2, lab.budget.twins // 3), 2):
        before = lab.ask(Ask(lab.loop(number), _GREEDY), "ends")
        prompt = (*lab.loop(number), *before.ids)  # the continuation mostly repeats earlier text
        whole = lab.ask(Ask(prompt, _GREEDY), "ends")
        if not trial.answered(whole.attempt):
            continue
        reported = f"none, finish_reason {whole.answer.finish_reason}"
        spoke = bool(whole.ids) or whole.answer.finish_reason == "stop"
        if not trial.check(spoke, ("no tokens",), whole.attempt.body, "tokens in an answer", reported) or not whole.ids:
            continue
        asks = [Ask(prompt, dataclasses.replace(_GREEDY, max_tokens=most)) for most in (1, 2, 3, 4, 5, 7)]
        for one in lab.ask_all(asks, "ends"):
            most = one.ask.params.max_tokens
            reported = f"{len(one.ids)} tokens, usage {one.attempt.reply.num_tokens}"
            right = len(one.ids) == most and one.attempt.reply.num_tokens in (None, most)
            if trial.answered(one.attempt):
                trial.check(right, ("F21", "F12"), one.attempt.body, f"exactly {most} tokens", reported)
        _check_stop_tokens(lab, trial, prompt, whole)
        _check_stop_strings(lab, trial, prompt, whole)


def _check_stop_tokens(lab: Lab, trial: Trial, prompt: tuple[int, ...], whole: ServedAnswer) -> None:
    stops = list(dict.fromkeys(whole.ids))[1:7]
    asks = [Ask(prompt, dataclasses.replace(_GREEDY, stop_token_ids=(stop,))) for stop in stops]
    for stop, one in zip(stops, lab.ask_all(asks, "ends"), strict=True):
        if not trial.answered(one.attempt):
            continue
        place = one.ids.index(stop) if stop in one.ids else None
        reported = f"{len(one.ids)} tokens, finish_reason {one.answer.finish_reason}"
        if place is None:  # a server may omit the stop token
            right = one.answer.finish_reason == "stop" or len(one.ids) == one.ask.params.max_tokens
        else:
            right, reported = place == len(one.ids) - 1, f"{reported}, the stop token at position {place}"
        trial.check(right, ("F21",), one.attempt.body, "an end at the first stop token", reported)


def _check_stop_strings(lab: Lab, trial: Trial, prompt: tuple[int, ...], whole: ServedAnswer) -> None:
    text = whole.answer.text
    stops = [piece for piece in (text[3:6], text[9:13], text[20:22]) if piece.strip() and "\ufffd" not in piece]
    asks = [Ask(prompt, _GREEDY, extra={"stop": [stop]}) for stop in stops]
    for stop, one in zip(stops, lab.ask_all(asks, "ends"), strict=True):
        if trial.answered(one.attempt):
            reported = f"{one.answer.text[-40:]!r}, finish_reason {one.answer.finish_reason}"
            trial.check(
                stop not in one.answer.text, ("F21",), one.attempt.body, f"a text that ends before {stop!r}", reported
            )
