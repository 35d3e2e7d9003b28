"""Probes of the logprob contract: one entry per token, no contradictions, the requested ids."""

import dataclasses

import numpy as np

from deploy.exchange.dialect import Ask
from deploy.probes.lab import NUM_TOP, SEED, SETTINGS, Lab, ServedAnswer
from deploy.probes.probes import Need, ProbeVerdict, Stopped, Trial, probe

_ROUNDING = 1e-4  # nats; a log-softmax may come out a little above 0
_MASS = 1e-3
_CONSTANT_FROM = 8  # tokens that cannot all be certain at temperature 1


@probe(
    "logprob contract",
    "Does every token have one valid logprob that is consistent with the top logprobs?",
    Need.LOGPROBS,
)
def logprob_contract(lab: Lab, trial: Trial) -> None:
    """Inspects every answer of the whole audit."""
    lab.traffic  # noqa: B018 -- generates the traffic if no probe has yet
    for served in lab.gathered:
        for holds, faults, expected, observed in _rules(served):
            trial.check(holds, faults, served.attempt.body, expected, observed)
    trial.reported = f"{len(lab.gathered)} answers"


def _rules(served: ServedAnswer) -> list[tuple[bool, tuple[str, ...], str, str]]:
    answer, values, tops, counts = served.answer, served.values, served.top, served.attempt.reply.num_tokens
    given, finite = answer.logprobs or (), values[np.isfinite(values)]
    num = len(answer.token_ids) if answer.token_ids is not None else len(given)
    counted = num if counts is None else counts
    rules = [
        (len(given) == num, ("F10",), "one logprob per token", f"{len(given)} logprobs for {num} tokens"),
        (counted == num, ("F21", "F18"), "usage that matches the number of tokens", f"usage {counted}, {num} tokens"),
        (None not in given, ("F10", "F16"), "a number for every token", f"{sum(v is None for v in given)} are null"),
        (
            not len(finite) or finite.max() <= _ROUNDING,
            ("F10", "F2"),
            "logprobs of at most 0",
            f"{finite.max(initial=-1):.3g}",
        ),
    ]
    sampled = not served.ask.params.greedy and served.ask.params.temperature >= 1
    if sampled and len(finite) >= _CONSTANT_FROM and served.setting == "temperature 1":
        reported = f"all {len(finite)} are {finite[0]:g}"
        rules.append(
            (bool(finite.min() < finite.max()), ("F10",), "logprobs that differ from token to token", reported)
        )
    for place, top in enumerate(tops or ()):
        if place >= len(values) or not top or not np.isfinite(values[place]):
            continue
        mass, own = float(np.exp(top).sum()), float(values[place])
        rules.append((mass <= 1 + _MASS, ("F10", "F2"), "top probabilities that add up to at most 1", f"{mass:.4f}"))
        reported = f"{own:.4f} exceeds the top logprob, {top[0]:.4f}, at token {place}"
        rules.append((own <= top[0] + _ROUNDING, ("F10",), "no logprob above the top logprob", reported))
    if tops is not None and given:
        reported = f"{len(tops)} lists for {num} tokens"
        rules.append((len(tops) == num and all(tops), ("F10",), "top logprobs for every token", reported))
    return rules


@probe(
    "scored ids",
    "Are logprobs of requested token ids returned, and correct?",
    Need.LOGPROBS,
    Need.TOKEN_IDS,
)
def scored_ids(lab: Lab, trial: Trial) -> None:
    """`logprob_token_ids` together with ordinary top logprobs in the same request; one request at a time."""
    ids = _ids_to_score(lab)
    extra = {"logprob_token_ids": list(ids)}
    settings = [dataclasses.replace(SETTINGS[name], max_tokens=12) for name in ("greedy", "temperature 1", "top_p")]
    asks = [Ask(lab.prompt(number), params, SEED, extra) for number, params in enumerate(settings, start=30)]
    answered = [lab.ask(ask, "scored") for ask in asks]
    if all(one.attempt.refused for one in answered):
        raise Stopped(ProbeVerdict.UNSUPPORTED, f"logprob_token_ids is refused: {answered[0].attempt.error}")
    for one in answered:
        if trial.answered(one.attempt, ("F2", "request fails")):
            _check_scores(lab, trial, one, ids)
    lab.scores_wrongly = bool(trial.findings())


def _ids_to_score(lab: Lab) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*lab.passage(1, 6), 5, 11)))


def _check_scores(lab: Lab, trial: Trial, one: ServedAnswer, ids: tuple[int, ...]) -> None:
    body, scored = one.attempt.body, one.scored or ()
    present = bool(one.ids) and len(scored) == len(one.ids) and all(set(each) >= set(ids) for each in scored)
    reported = f"{len(scored)} of {len(one.ids)} tokens have scores"
    if not trial.check(present, ("F2",), body, f"{len(ids)} scored ids for every token", reported):
        return
    table = np.array([[each[token] for token in ids] for each in scored])
    trial.check(
        bool((table <= _ROUNDING).all()), ("F2",), body, "scores that are log-probabilities", f"up to {table.max():.2f}"
    )
    mass = float(np.exp(np.minimum(table, 50)).sum(axis=1).max())
    trial.check(
        mass <= 1 + _MASS, ("F2",), body, "probabilities of distinct ids that add up to at most 1", f"{mass:.3g}"
    )
    own = [
        abs(each[token] - value)
        for each, token, value in zip(scored, one.ids, one.values, strict=False)
        if token in each
    ]
    if own:
        reported = f"they differ by {max(own):.3g} nats"
        trial.check(
            max(own) <= 1e-3, ("F2",), body, "the same logprob for a token as scored id and as emitted token", reported
        )
    if lab.reference is not None:
        reported_distribution = lab.reference.logits((*one.ask.prompt, *one.ids), len(one.ask.prompt)).log_softmax(-1)[
            :, list(ids)
        ]
        off = float(np.nanmedian(np.abs(table - reported_distribution.numpy())))
        if lab.mode == "raw":
            wanted = f"scores within {lab.tolerance.edge_nats:g} nats of the model's"
            trial.check(off <= lab.tolerance.edge_nats, ("F2",), body, wanted, f"the median error is {off:.2f} nats")


@probe(
    "neighbours of scored ids",
    "Are other requests' answers unchanged next to requests that score ids? Those have killed faulty engines.",
    Need.LOGPROBS,
    Need.TOKEN_IDS,
)
def neighbours_of_scored_ids(lab: Lab, trial: Trial) -> None:
    """Top logprobs of greedy requests, alone and in a batch with scoring ones.

    Runs last; if scores were found wrong, only with --destructive.
    """
    if lab.scores_wrongly and not lab.destructive:
        raise Stopped(
            ProbeVerdict.UNSUPPORTED,
            "scores are wrong here, and mixed batches have killed such servers; to run it anyway, use --destructive",
        )
    extra = {"logprob_token_ids": list(_ids_to_score(lab))}
    plain = dataclasses.replace(SETTINGS["greedy"], max_tokens=24)
    asks = [Ask(lab.prompt(40 + number), plain) for number in range(3)]
    alone = [lab.ask(ask, "neighbours") for ask in asks]
    scoring = [Ask(lab.prompt(44 + number), plain, None, extra) for number in range(3)]
    answered = lab.ask_all([*scoring, *asks], "neighbours")
    if all(one.attempt.refused for one in answered if one.ask.extra):
        raise Stopped(ProbeVerdict.UNSUPPORTED, f"logprob_token_ids is refused: {answered[0].attempt.error}")
    mixed = [one for one in answered if not one.ask.extra]
    for first, second in zip(alone, mixed, strict=True):
        if not (trial.answered(first.attempt) and trial.answered(second.attempt, ("F2", "request fails"))):
            continue
        pairs = list(zip(first.top or (), second.top or (), first.ids, second.ids, strict=False))
        agreed = next((i for i, (_, _, a, b) in enumerate(pairs) if a != b), len(pairs))
        worst = max((_difference(a, b) for a, b, _, _ in pairs[:agreed]), default=0.0)
        wanted = "the same top logprobs next to requests that score ids"
        reported = f"their logprobs differ by {worst:.2f} nats, or some are missing"
        trial.check(worst <= 2 * lab.tolerance.edge_nats, ("F2",), second.attempt.body, wanted, reported)


def _difference(first: list[float], second: list[float]) -> float:
    """Largest difference between the top logprobs; infinite if the second has fewer."""
    num = min(NUM_TOP, len(first))
    if len(second) < num:
        return float("inf")
    return max((abs(a - b) for a, b in zip(first[:num], second[:num], strict=True)), default=0.0)
