"""Probes that recompute answers: whether logprobs are correct and tokens follow the distribution."""

import math
from collections.abc import Sequence

import numpy as np

from deploy.exchange.dialect import Ask
from deploy.probes.lab import (
    AT_ONCE,
    BETWEEN,
    FIRST,
    LAST,
    SEED,
    SETTINGS,
    Lab,
    ServedAnswer,
    compared,
    copies,
    nan_for_none,
)
from deploy.probes.probes import Need, Trial, probe
from deploy.probes.statistics import departs, mean_departs
from serve_app.referee.detectors import ReplicaWatch, SeenToken, drifts_of
from serve_app.referee.measures import Measures
from speculative.request import SamplingParams
from speculative.sampling.probs import temperature_of
from speculative.selfcheck.eprocess import Floats

VERIFICATION = ("F6", "F7", "F8", "F12")
PARAMETERS = ("F9",)
STATE = ("F5", "F13")
ROWS = ("F10",)
OTHERS = ("F10", "F2")

_SAMPLED = [name for name, params in SETTINGS.items() if not params.greedy]
_FILTERED = ("top_p", "min_p")
_GREEDY = {"greedy": ("F8", "F12", "F5"), "greedy, penalties": ("F9", "F15")}
"""Settings, and what a token that is not the likeliest resembles there."""

_POSITIONS = {FIRST: STATE, LAST: ("F1", "F10"), BETWEEN: ("F10", *STATE)}
"""Places of a logprob in its answer, and the faults that errors there suggest."""

_ALARMS = {
    "support": "some are forbidden, or outside its filters",
    "unlikely": "some are all but impossible",
    "probability": "p(y) - sum(p^2) has mean {probability:+.3f}",
    "surprisal": "surprisal - entropy has mean {surprisal:+.3f}",
}
"""Terms of the calibration test, and what each has seen."""

_TERMS = {
    "likeliest": "share of most likely tokens - its expectation",
    "copied": "share of tokens that repeat the text - its expectation",
}

_HOPELESS_NATS = 0.2  # a median drift beyond it is not rounding
_MANY = 2000  # points of a plot


@probe(
    "replayed logprobs",
    "Does every logprob, of other tokens too, match the model's for its token, however it was sampled?",
    Need.LOGPROBS,
    Need.TOKEN_IDS,
    Need.REFERENCE,
)
def replayed_logprobs(lab: Lab, trial: Trial) -> None:
    """Logprobs of all traffic against the reference, by position in the answer."""
    for attempt in lab.failed:
        trial.answered(attempt)
    answers = [one for some in lab.traffic.values() for one in some if one.ids and len(one.values) == len(one.ids)]
    measures = Measures()
    for one in answers:
        measures.add(lab.judge(one).tokens)
    nats = [drift.nats for one in answers for drift in drifts_of(lab.judge(one).tokens)]
    if not nats:
        trial.unclear = "no answer had a logprob for each of its tokens"
        return
    trial.num_cases, tme = len(nats), measures.figures()["tme"]
    trial.figures |= {
        "tokens": float(len(nats)),
        "logprobs of other tokens": float(sum(lab.judge(one).checked.alternatives.num_compared for one in answers)),
        "TME": tme,
        "median nats": float(np.median(nats)),
        "largest nats": max(nats),
        "share beyond tolerance": float((np.array(nats) > lab.tolerance.jump_nats).mean()),
    }
    trial.series["drift, nats"] = nats[:_MANY]
    trial.reported = f"TME {tme:.4f} over {len(nats)} tokens, {lab.mode} logprobs"
    _check_modes(lab, trial)
    if np.median(nats) > _HOPELESS_NATS:
        reported = f"the median error is {np.median(nats):.2f} nats"
        trial.found(ROWS, max(answers, key=lab.largest_drift).attempt.body, "logprobs of this model", reported)
        return
    watch = ReplicaWatch(lab.tolerance)
    for one in answers:
        for alarm in lab.alarms(watch, one, lab.judge(one).tokens):
            if alarm.name == "drift" and alarm.stratum in _POSITIONS:
                _found_drift(lab, trial, one, alarm.stratum, _POSITIONS[alarm.stratum])
        reason = lab.judge(one).checked.reason
        if (stranger := lab.stranger(one)) is not None:
            trial.found(OTHERS, one.attempt.body, "logprobs of the model's tokens", f"{stranger} is none of them")
        if reason.startswith("drift"):
            _found_drift(lab, trial, one, "one answer", ROWS)
        elif reason.startswith("alternatives"):
            trial.found(OTHERS, one.attempt.body, "logprobs of other tokens that are the model's", reason)


def check_logprobs(
    lab: Lab, trial: Trial, answers: Sequence[ServedAnswer], where: str, faults: tuple[str, ...]
) -> bool:
    """The logprobs of these answers, one by one and together, are as near to the model's as the tolerance wants."""
    wrong = lab.drifted((one, lab.judge(one).tokens) for one in answers if one.ids)
    if wrong is None:
        return trial.check(True, faults, {}, "", "")
    _found_drift(lab, trial, wrong, where, faults)
    return False


def _found_drift(lab: Lab, trial: Trial, one: ServedAnswer, where: str, faults: tuple[str, ...]) -> None:
    drifts = drifts_of(lab.judge(one).compared)
    largest = lab.largest_drift(one)
    if drifts[-1].nats == largest and len(drifts) == len(one.ids):
        faults = tuple(dict.fromkeys(("F1", *faults)))
    expected = f"logprobs of {where} that the model's tolerance allows ({lab.tolerance.source})"
    over = sum(drift.nats > lab.tolerance.jump_nats for drift in drifts)
    reported = f"one of {len(drifts)} is off by {largest:.2f} nats; {over} by more than {lab.tolerance.jump_nats:g}"
    trial.found(faults, one.attempt.body, expected, reported)


def _check_modes(lab: Lab, trial: Trial) -> None:
    """All settings' logprobs belong to one kind of distribution: the model's or the request's."""
    modes = {name: mode for name, mode in lab.modes.items() if mode != "either"}
    odd = [name for name, mode in modes.items() if mode != lab.mode]
    if odd:
        example = lab.traffic[odd[0]][0].attempt.body
        reported = ", ".join(f"{name}: {mode}" for name, mode in modes.items())
        trial.found(
            ROWS, example, "logprobs of one kind in every request: the model's distribution or the request's", reported
        )


@probe(
    "own prompt logprobs",
    "Does the server return the same logprobs for an answer when it is sent back as a prompt?",
    Need.LOGPROBS,
    Need.TOKEN_IDS,
    Need.PROMPT_LOGPROBS,
)
def own_prompt_logprobs(lab: Lab, trial: Trial) -> None:
    """A replay without the weights: scoring a prompt involves no speculation."""
    answers = [one for name in ("greedy", "temperature 1") for one in _answers(lab, name)[: lab.budget.twins]]
    back = lab.ask_all(
        [
            Ask((*one.ask.prompt, *one.ids), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
            for one in answers
        ]
    )
    pairs: list[tuple[ServedAnswer, list[SeenToken]]] = []
    for one, again in zip(answers, back, strict=True):
        reported = again.prompt_logprobs
        if not trial.answered(again.attempt, ("F11", "request fails")) or reported is None:
            continue
        own = reported[-len(one.ids) :]
        if len(own) == len(one.values):
            pairs.append((one, compared((*one.ask.prompt, *one.ids), one.values, nan_for_none(own))))
    nats = [drift.nats for _, tokens in pairs for drift in drifts_of(tokens)]
    trial.num_cases += len(nats)
    trial.figures["tokens"] = float(len(nats))
    if not nats:
        return
    trial.reported = f"the largest difference is {max(nats):.3g} nats over {len(nats)} tokens"
    wrong = lab.drifted(pairs)
    if wrong is not None:
        over = sum(drift > lab.tolerance.jump_nats for drift in nats)
        trial.found(
            ("F10", "F11", "F5"),
            wrong.attempt.body,
            "the same logprobs as when the answer is scored as a prompt, up to rounding",
            f"{over} of {len(nats)} differ by more than {lab.tolerance.jump_nats:g} nats, one by {max(nats):.2f}",
        )


@probe(
    "distribution of the tokens",
    "Do sampled tokens follow the model's distribution under the request's parameters, and greedy ones its argmax?",
    Need.TOKEN_IDS,
    Need.REFERENCE,
    tests=len(_SAMPLED) * (1 + len(_TERMS)),
)
def distribution_of_the_tokens(lab: Lab, trial: Trial) -> None:
    """By the referee's calibration test; and whether tokens are the likeliest, or repeat the text, as often as they
    should."""
    for name in _SAMPLED:
        answers = _answers(lab, name)
        if not answers:
            continue
        faults = PARAMETERS if name in _FILTERED or name == "penalties" else VERIFICATION
        body = max(answers, key=lambda one: sum(row.surprisal for row in lab.rows(one))).attempt.body
        measures = Measures()
        for one in answers:
            measures.add(lab.judge(one).compared)
        trial.num_cases += measures.num_tokens
        figures = {term: measures.figures()[term] or 0.0 for term in ("probability", "surprisal")}
        trial.figures |= {f"{name}: {term}": mean for term, mean in figures.items()}
        test = lab.tolerance.calibration_test(trial.delta)
        for one in answers:
            test.add(lab.rows(one), greedy=False)
        alarms = {test.alarm, *(alarm for one in answers for alarm in lab.wrong_alone(one))} - {None}
        for alarm in sorted(map(str, alarms)):
            lab.mixed_up |= alarm == "support"
            reported = f"{_ALARMS[alarm].format(**figures)}, over {measures.num_tokens} tokens"
            own = PARAMETERS if alarm == "support" else faults
            trial.found(own, body, f"tokens of '{name}' that follow the distribution that the request makes", reported)
        for term, values in _terms(lab, answers).items():
            trial.figures[f"{name}: {term}"] = mean = float(np.mean(values)) if values else 0.0
            if mean_departs(np.array(values), lab.tolerance.distribution, trial.delta):
                reported = f"{_TERMS[term]} has mean {mean:+.3f} over {len(values)} tokens"
                trial.found(faults, body, f"tokens of '{name}' that follow the distribution: a mean of 0", reported)
        surprises = [row.surprisal - row.expected_surprisal for one in answers for row in lab.rows(one)]
        trial.series[name] = surprises[:_MANY]
    for name, resembled in _GREEDY.items():
        for one in _answers(lab, name):
            check_greedy(lab, trial, one, f"'{name}'", resembled)
    trial.reported = f"{trial.num_cases} tokens"


def _terms(lab: Lab, answers: Sequence[ServedAnswer]) -> dict[str, list[float]]:
    """Terms with mean 0 that the calibration test does not have: drafts are mostly the likeliest token, or a copy."""
    found: dict[str, list[float]] = {term: [] for term in _TERMS}
    for one in answers:
        temperature = temperature_of(one.ask.params)
        for copy, token, row in zip(copies(one), one.ids, lab.rows(one), strict=True):
            if row.outside > 0:
                continue
            found["likeliest"].append((row.gap == 0) - row.probability * math.exp(row.gap / temperature))
            if copy >= 0 and row.redrawn is not None:
                found["copied"].append((copy == token) - row.redrawn.rejected_probability)
    return found


def check_greedy(lab: Lab, trial: Trial, served: ServedAnswer, what: str, faults: tuple[str, ...]) -> bool:
    """Every token of one answer is the most likely up to a near-tie, and none is forbidden."""
    wrong = lab.judge(served).misplaced
    if not wrong:
        return trial.check(True, faults, served.attempt.body, "", "")
    place, _, nats, *_ = wrong[0]
    num_tokens = len(served.ids)
    if place == 1:  # the first token of a decoding step
        faults = (*STATE, *faults)
    elif place == num_tokens - 1 and served.answer.finish_reason == "length":  # where drafts no longer fit
        faults = ("F1", *faults)
    faults = tuple(dict.fromkeys(faults))
    how = "is forbidden" if np.isinf(nats) else f"is {nats:.2f} nats below the most likely"
    reported = f"token {place} of {num_tokens} ({served.ids[place]}) {how}; {len(wrong)} such tokens"
    return trial.check(
        False, faults, served.attempt.body, f"{what}: the most likely allowed token every time", reported
    )


def _answers(lab: Lab, name: str) -> list[ServedAnswer]:
    return [one for one in lab.traffic[name] if one.ids]


@probe(
    "first tokens",
    "Do the first two tokens of many answers to one prompt follow the model's distribution?",
    Need.TOKEN_IDS,
    Need.REFERENCE,
    tests=2,
)
def first_tokens(lab: Lab, trial: Trial) -> None:
    """The second is the first that may be drafted. Cell by cell, against the exact distribution."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt = min((lab.loop(number) for number in range(1, 8, 2)), key=lambda one: _uncertainty(lab, one))
    count = lab.budget.first_tokens
    asked = lab.ask_all([Ask(prompt, params, SEED + number) for number in range(count)], "first tokens", 2 * AT_ONCE)
    answered = [one for one in asked if trial.answered(one.attempt) and len(one.ids) > 1]
    if not answered:
        return
    firsts = [one.ids[0] for one in answered]
    common = max(set(firsts), key=firsts.count)
    seconds = [one.ids[1] for one in answered if one.ids[0] == common]
    for place, (context, emitted) in enumerate(((prompt, firsts), ((*prompt, common), seconds)), start=1):
        distribution = _next_distribution(lab, context)
        cells = np.flatnonzero(distribution * len(emitted) >= 2)
        cells = cells[np.argsort(-distribution[cells])][:24]
        counts = np.array([emitted.count(int(cell)) for cell in cells])
        trial.num_cases += len(emitted)
        trial.series[f"token {place}: observed"] = (counts / len(emitted)).tolist()
        trial.series[f"token {place}: expected"] = distribution[cells].tolist()
        rest = (len(emitted) - int(counts.sum()), float(1 - distribution[cells].sum()))
        whole = [*zip(counts.tolist(), distribution[cells].tolist(), cells.tolist(), strict=True), (*rest, -1)]
        off = [
            (hits, share, token)
            for hits, share, token in whole
            if departs(len(emitted), hits, share, lab.tolerance.distribution, trial.delta / len(whole))
        ]
        if off:
            hits, share, token = max(off, key=lambda each: abs(each[0] / len(emitted) - each[1]))
            name = "other tokens" if token < 0 else f"token {token}"
            reported = f"{name} {hits} times in {len(emitted)}, expected {share * len(emitted):.1f}"
            trial.found(
                VERIFICATION if place > 1 else (*STATE, "F17"),
                answered[0].attempt.body,
                f"token {place} of the answers as often as the model's distribution predicts",
                reported,
            )


def _next_distribution(lab: Lab, context: tuple[int, ...]) -> Floats:
    assert lab.reference is not None
    distribution: Floats = lab.reference.logits((*context, 0), len(context))[0].double().softmax(-1).numpy()
    return distribution


def _uncertainty(lab: Lab, prompt: tuple[int, ...]) -> float:
    """Distance of the most likely next token's probability from 0.5."""
    return abs(float(_next_distribution(lab, prompt).max()) - 0.5)
