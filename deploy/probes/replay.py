"""Probes that recompute answers: whether logprobs are correct and tokens follow the distribution."""

import numpy as np

from deploy.exchange.dialect import Ask
from deploy.probes.lab import AT_ONCE, SEED, SETTINGS, Lab, ServedAnswer
from deploy.probes.probes import Need, Trial, probe
from deploy.probes.reference import AnswerDistribution
from deploy.probes.statistics import departs, mean_departs, not_uniform, too_many
from speculative.request import SURPRISAL_CLIP_NATS, SamplingParams
from speculative.selfcheck.eprocess import Floats

VERIFICATION = ("F6", "F7", "F8", "F12")
PARAMETERS = ("F9",)
STATE = ("F5", "F13")
ROWS = ("F10",)

_SAMPLED = [name for name, params in SETTINGS.items() if not params.greedy]
_FILTERED = ("top_p", "min_p")
_STRATA = {
    "the first two tokens": STATE,
    "the last token before max_tokens": ("F1", "F10"),
    "tokens in between": ("F10", *STATE),
}
"""Positions of a logprob in its answer, and the faults that errors there suggest."""

_TERMS = {
    "probability": "p(y) - sum(p^2)",
    "surprisal": "surprisal - entropy",
    "likeliest": "share of most likely tokens - its expectation",
    "copied": "share of tokens that repeat the text - its expectation",
}
_HOPELESS_NATS = 0.2  # a median drift beyond it is not rounding
_MANY = 2000  # points of a plot


@probe(
    "replayed logprobs",
    "Does every logprob match the model's for this token, however it was sampled?",
    Need.LOGPROBS,
    Need.TOKEN_IDS,
    Need.REFERENCE,
    tests=3,
)
def replayed_logprobs(lab: Lab, trial: Trial) -> None:
    """Logprobs of all traffic against the reference, by position in the answer."""
    traffic = lab.traffic
    for attempt in lab.failed:
        trial.answered(attempt)
    answers = [one for name in traffic for one in traffic[name] if one.ids and len(one.values) == len(one.ids)]
    drifts = lab.drifts(answers)
    reported = drifts[np.isfinite(drifts)]
    if not len(reported):
        trial.unclear = "no answer had a logprob for each of its tokens"
        return
    trial.num_cases = len(reported)
    clipped = np.minimum(reported, 10.0)
    trial.figures |= {
        "tokens": float(len(reported)),
        "TME": float(np.exp(clipped).mean()),
        "median nats": float(np.median(reported)),
        "largest nats": float(reported.max()),
        "share beyond tolerance": float((reported > lab.tolerance.nats).mean()),
    }
    trial.series["drift, nats"] = reported[:_MANY].tolist()
    trial.reported = f"TME {trial.figures['TME']:.4f} over {len(reported)} tokens, {lab.mode} logprobs"
    _check_modes(lab, trial)
    if np.median(reported) > _HOPELESS_NATS:
        worst = max(answers, key=lambda one: float(np.nanmax(lab.drifts([one]), initial=0.0)))
        trial.found(
            ROWS,
            worst.attempt.body,
            "logprobs of this model",
            f"the median error is {np.median(reported):.2f} nats",
        )
        return
    for where, faults in _STRATA.items():
        parts = [(one, _stratum(lab.drifts([one]), where, len(one.ids))) for one in answers]
        chosen = np.concatenate([part for _, part in parts])
        over = int((chosen > lab.tolerance.nats).sum())
        if too_many(len(chosen), over, lab.tolerance.rate, trial.delta):
            worst, part = max(parts, key=lambda each: float(np.nanmax(each[1], initial=0.0)))
            trial.found(
                faults,
                worst.attempt.body,
                f"logprobs of {where} within {lab.tolerance.nats:g} nats of the model's",
                f"{over} of {len(chosen)} are off, by up to {np.nanmax(part):.2f} nats",
            )


def _stratum(drifts: Floats, where: str, num_tokens: int) -> Floats:
    """The drifts of an answer in one stratum; there may be fewer drifts than tokens."""
    if where == "the first two tokens":
        return drifts[:2]
    last = num_tokens - 1
    return drifts[last:] if where == "the last token before max_tokens" else drifts[2:last]


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
    tests=1,
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
    pairs: list[tuple[float, ServedAnswer]] = []
    for one, again in zip(answers, back, strict=True):
        reported = again.prompt_logprobs
        if not trial.answered(again.attempt, ("F11", "request fails")) or reported is None:
            continue
        values = np.array([np.nan if value is None else value for value in reported[-len(one.ids) :]], float)
        if len(values) == len(one.values):
            pairs += [(float(drift), one) for drift in np.abs(values - one.values)]
    tolerance = lab.tolerance if lab.reference is not None else None
    nats, rate = (1.0, 0.02) if tolerance is None else (2 * tolerance.nats, 2 * tolerance.rate)
    over = [(drift, one) for drift, one in pairs if not drift <= nats]
    trial.num_cases += len(pairs)
    trial.figures["tokens"] = float(len(pairs))
    if pairs:
        trial.reported = (
            f"the largest difference is {max(drift for drift, _ in pairs):.3g} nats over {len(pairs)} tokens"
        )
    if pairs and too_many(len(pairs), len(over), rate, trial.delta):
        worst = max(over, key=lambda each: each[0])
        trial.found(
            ("F10", "F11", "F5"),
            worst[1].attempt.body,
            f"the same logprobs as when the answer is scored as a prompt, within {nats:g} nats",
            f"{len(over)} of {len(pairs)} differ, by up to {worst[0]:.2f} nats",
        )


@probe(
    "distribution of the tokens",
    "Do sampled tokens follow the model's distribution under the request's parameters, and greedy ones its argmax?",
    Need.TOKEN_IDS,
    Need.REFERENCE,
    tests=len(_SAMPLED) * (len(_TERMS) + 2) + 2,
)
def distribution_of_the_tokens(lab: Lab, trial: Trial) -> None:
    """Surprisal against entropy, probability against its mean, the most likely and the copied token, support, PIT."""
    random = np.random.default_rng(SEED)
    for name in _SAMPLED:
        answers = _answers(lab, name)
        if not answers:
            continue
        distributions = [lab.distribution(one) for one in answers]
        faults = PARAMETERS if name in _FILTERED or name == "penalties" else VERIFICATION
        body = max(answers, key=lambda one: float(lab.distribution(one).surprisal.sum())).attempt.body
        trial.num_cases += sum(map(len, distributions))
        outside = np.concatenate([distribution.outside for distribution in distributions])
        beyond = int((outside > lab.tolerance.edge).sum())
        if np.isinf(outside).any() or too_many(len(outside), beyond, lab.tolerance.rate, trial.delta):
            lab.mixed_up = True
            reported = f"{beyond} of {len(outside)} tokens are outside them"
            trial.found(PARAMETERS, body, f"only tokens within the filters of '{name}'", reported)
        for term, values in _terms(distributions, outside == 0).items():
            trial.figures[f"{name}: {term}"] = float(values.mean()) if len(values) else 0.0
            if mean_departs(np.clip(values, -1, 1), lab.tolerance.shift, trial.delta):
                reported = f"{_TERMS[term]} has mean {_scale(term) * values.mean():+.3f} over {len(values)} tokens"
                trial.found(faults, body, f"tokens of '{name}' that follow the distribution: a mean of 0", reported)
        places = np.concatenate(
            [distribution.below + random.random(len(distribution)) * distribution.own for distribution in distributions]
        )[outside == 0]
        trial.series[name] = places[:_MANY].tolist()
        distance = not_uniform(places, lab.tolerance.shift, trial.delta)
        if distance is not None:
            reported = f"its distance from uniform is {distance:.3f} over {len(places)} tokens"
            trial.found(faults, body, f"a uniform probability integral transform of the tokens of '{name}'", reported)
    _check_greedy(lab, trial, "greedy", ("F8", "F12", "F5"))
    _check_greedy(lab, trial, "greedy, penalties", ("F9", "F15"))
    trial.reported = f"{trial.num_cases} tokens"


def check_greedy(lab: Lab, trial: Trial, served: ServedAnswer, what: str, faults: tuple[str, ...]) -> bool:
    """Every token of one answer is the most likely up to a near-tie, and none is forbidden."""
    distribution = lab.distribution(served)
    wrong = np.flatnonzero((distribution.gap > lab.tolerance.edge) | np.isinf(distribution.outside))
    if not len(wrong):
        return trial.check(True, faults, served.attempt.body, "", "")
    place = int(wrong[0])
    if place == 1:  # the first token of a decoding step
        faults = (*STATE, *faults)
    elif place == len(distribution) - 1 and served.answer.finish_reason == "length":  # where drafts no longer fit
        faults = ("F1", *faults)
    faults = tuple(dict.fromkeys(faults))
    forbidden = np.isinf(distribution.outside[place])
    how = "is forbidden" if forbidden else f"is {distribution.gap[place]:.2f} nats below the most likely"
    reported = f"token {place} of {len(distribution)} ({served.ids[place]}) {how}; {len(wrong)} such tokens"
    return trial.check(
        False, faults, served.attempt.body, f"{what}: the most likely allowed token every time", reported
    )


def _check_greedy(lab: Lab, trial: Trial, name: str, faults: tuple[str, ...]) -> None:
    answers = _answers(lab, name)
    gaps = np.concatenate([lab.distribution(one).gap for one in answers] or [np.zeros(0)])
    if not len(gaps):
        return
    trial.num_cases += len(gaps)
    wrong = int((gaps > lab.tolerance.edge).sum())
    trial.figures[f"{name}: share of likeliest"] = float((gaps <= lab.tolerance.edge).mean())
    if too_many(len(gaps), wrong, lab.tolerance.rate, trial.delta):
        worst = max(answers, key=lambda one: float(lab.distribution(one).gap.max()))
        reported = f"{wrong} of {len(gaps)} tokens are not, by up to {gaps.max():.2f} nats"
        trial.found(faults, worst.attempt.body, f"'{name}': the most likely token every time", reported)


def _terms(distributions: list[AnswerDistribution], inside: Floats) -> dict[str, Floats]:
    def of(name: str) -> Floats:
        found: Floats = np.concatenate([getattr(distribution, name) for distribution in distributions])[inside]
        return found

    known = of("p_copied") >= 0
    return {
        "probability": of("p") - of("mean_p"),
        "surprisal": (of("surprisal") - of("mean_surprisal")) / SURPRISAL_CLIP_NATS,
        "likeliest": of("best") - of("p_best"),
        "copied": (of("copied") - of("p_copied"))[known],
    }


def _scale(term: str) -> float:
    return SURPRISAL_CLIP_NATS if term == "surprisal" else 1.0


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
            if departs(len(emitted), hits, share, lab.tolerance.shift, trial.delta / len(whole))
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
