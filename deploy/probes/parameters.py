"""Probes of parameters: each in a request where its effect is certain, at positions likely to be drafted."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from deploy.exchange.dialect import Ask
from deploy.probes.lab import SEED, SETTINGS, TOP_K, Lab, ServedAnswer
from deploy.probes.probes import Need, ProbeVerdict, Stopped, Trial, probe
from deploy.probes.replay import check_greedy
from speculative.request import EXAMPLES, SamplingParams

_GREEDY = dataclasses.replace(SETTINGS["greedy"], max_tokens=24)
_WARM = dataclasses.replace(_GREEDY, temperature=1.0)
_FAULT = ("F9",)
_COLD = 0.01  # some servers accept nothing lower
_UNLIKELY_NATS = 20.0


@probe(
    "sampling parameters",
    "Is each parameter applied at every position, including drafted ones?",
    Need.TOKEN_IDS,
    Need.REFERENCE,
)
def sampling_parameters(lab: Lab, trial: Trial) -> None:
    """Each in repetitive text; a parameter that a server rejects is no finding."""
    refused: dict[str, str] = {}
    for number in range(1, 2 * max(1, lab.budget.twins // 4) + 1, 2):
        prompt = lab.loop(number)
        whole = lab.ask(Ask(prompt, _GREEDY), "parameters")
        if not trial.answered(whole.attempt) or not whole.ids:
            continue
        common = [token for token, _ in Counter(whole.ids).most_common(3)]
        asks = _asks(lab, prompt, common)
        for name, one in zip(asks, lab.ask_all(list(asks.values()), "parameters"), strict=True):
            if one.attempt.refused:
                refused[name] = one.attempt.error
            elif trial.answered(one.attempt, (*_FAULT, "request fails")) and one.ids:
                _CHECKS.get(name, _check_likeliest)(lab, trial, name, one)
    lab.mixed_up |= bool(trial.findings())
    trial.reported = f"{trial.num_cases} answers"
    if refused:
        trial.reported += f"; refused: {', '.join(refused)}"


def _asks(lab: Lab, prompt: tuple[int, ...], common: list[int]) -> dict[str, Ask]:
    greedy: dict[str, dict[str, Any]] = {
        "logit_bias against the commonest": {"logit_bias": tuple((token, -100.0) for token in common[:2])},
        **{name: {name: value} for name, value in EXAMPLES.items()},
        "allowed_token_ids": {"allowed_token_ids": tuple(dict.fromkeys((*lab.passage(2, 30), *common[1:])))},
    }
    for number, bias in enumerate((12.0, 16.5, 21.0)):  # one token repeatedly, until the penalty outweighs the bias
        run = {"logit_bias": ((common[number % len(common)], bias),), "frequency_penalty": 1.9}
        greedy[f"frequency_penalty in run {number}"] = run
    warm: dict[str, dict[str, Any]] = {
        "logit_bias towards one": {"logit_bias": ((common[-1], 100.0),)},
        "top_p of almost 0": {"top_p": 1e-4},
        "min_p of almost 1": {"min_p": 0.999},
        "temperature of almost 0": {"temperature": _COLD},
    }
    asks = {name: Ask(prompt, dataclasses.replace(_GREEDY, **change)) for name, change in greedy.items()}
    asks |= {name: Ask(prompt, dataclasses.replace(_WARM, **change), SEED) for name, change in warm.items()}
    eos = lab.reference.eos_token_ids if lab.reference is not None else ()
    if eos:
        longing = SamplingParams(max_tokens=16, temperature=0, min_tokens=7, logit_bias=((eos[0], 100.0),), logprobs=0)
        asks["min_tokens"] = Ask(prompt, longing)
    word = _word(lab, common)
    if word is not None:
        token, text = word
        asks["bad_words"] = Ask(
            prompt, dataclasses.replace(_GREEDY, bad_words=((token,),)), None, {"bad_words": [text]}
        )
    return asks


def _word(lab: Lab, common: list[int]) -> tuple[int, str] | None:
    """A common token that is a whole word, with or without a leading space."""
    tokenizer = lab.reference.tokenizer if lab.reference is not None else None
    if tokenizer is None:
        return None
    for token in common:
        text = tokenizer.decode([token], continuation=True)
        if text.strip().isalpha() and tokenizer.encode(" " + text.strip(), continuation=True) == [token]:
            return token, text.strip()
    return None


def _check_likeliest(lab: Lab, trial: Trial, name: str, one: ServedAnswer) -> None:
    """Every token is the most likely one under the parameters, at any temperature."""
    check_greedy(lab, trial, one, name, _FAULT)


def _check_cold(lab: Lab, trial: Trial, name: str, one: ServedAnswer) -> None:
    gap = max(row.gap for row in lab.rows(one))
    most = lab.tolerance.edge_nats + _UNLIKELY_NATS * _COLD
    wanted = f"{name}: no token more than {most:g} nats below the most likely"
    trial.check(gap <= most, _FAULT, one.attempt.body, wanted, f"one is {gap:.2f} nats below")


def _check_towards(lab: Lab, trial: Trial, name: str, one: ServedAnswer) -> None:
    wanted = one.ask.params.logit_bias[0][0]
    others = sum(token != wanted for token in one.ids)
    reported = f"{others} of {len(one.ids)} tokens differ"
    trial.check(not others, _FAULT, one.attempt.body, f"{name}: only token {wanted}", reported)


def _check_min_tokens(lab: Lab, trial: Trial, name: str, one: ServedAnswer) -> None:
    assert lab.reference is not None
    eos, least = set(lab.reference.eos_token_ids), one.ask.params.min_tokens
    text = [token for token in one.ids if token not in eos]
    reported = f"{len(text)} tokens, finish_reason {one.answer.finish_reason}"
    right = len(text) == least and one.answer.finish_reason == "stop"
    trial.check(right, _FAULT, one.attempt.body, f"{name}: an end after exactly {least} tokens", reported)


def _check_bad_words(lab: Lab, trial: Trial, name: str, one: ServedAnswer) -> None:
    ((token,),) = one.ask.params.bad_words
    count = one.ids.count(token)
    trial.check(not count, _FAULT, one.attempt.body, f"{name}: never token {token}", f"it occurs {count} times")


_CHECKS: dict[str, Callable[[Lab, Trial, str, ServedAnswer], None]] = {
    "logit_bias towards one": _check_towards,
    "temperature of almost 0": _check_cold,
    "min_tokens": _check_min_tokens,
    "bad_words": _check_bad_words,
}

_COLOURS = ("red", "green", "blue")
_REGEX = f"({'|'.join(_COLOURS)})( and ({'|'.join(_COLOURS)})){{3}}"
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": list(_COLOURS)}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@probe("structured output", "Do answers match a regex, a choice and a JSON schema at every position?")
def structured_output(lab: Lab, trial: Trial) -> None:
    """Greedy and sampled; only answers that stopped by themselves are checked."""
    forms: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
        "regex": ({"structured_outputs": {"regex": _REGEX}}, lambda text: re.fullmatch(_REGEX, text) is not None),
        "choice": ({"structured_outputs": {"choice": list(_COLOURS)}}, lambda text: text in _COLOURS),
        "json_schema": (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}},
            _fits_schema,
        ),
    }
    unsupported = []
    text = "Four colours, joined by and: red and green and red and green. Again: "
    token_prompt = None if Need.TOKEN_IDS in lab.missing or Need.REFERENCE in lab.missing else lab.loop(3)
    for name, (extra, fits) in forms.items():
        asks = [
            Ask(token_prompt or text, SamplingParams(max_tokens=120, temperature=temperature), SEED + number, extra)
            for number, temperature in enumerate((0.0, 1.0, 1.0))
        ]
        for one in lab.ask_all(asks, "structure"):
            if one.attempt.refused:
                unsupported.append(name)
            elif trial.answered(one.attempt, (*_FAULT, "request fails")) and one.answer.finish_reason == "stop":
                reported = repr(one.answer.text[:80])
                trial.check(
                    fits(one.answer.text), _FAULT, one.attempt.body, f"an answer that matches the {name}", reported
                )
    if len(set(unsupported)) == len(forms):
        raise Stopped(ProbeVerdict.UNSUPPORTED, "the server accepts no form of structured output")
    trial.reported = f"{trial.num_cases} answers"


def _fits_schema(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"colour", "count"}:
        return False
    return found["colour"] in _COLOURS and isinstance(found["count"], int) and 0 <= found["count"] <= 99


_NONSENSE: dict[str, dict[str, Any]] = {
    "a negative temperature": {"temperature": -1},
    "top_p of 2": {"top_p": 2.0},
    "no room for an answer": {"max_tokens": -1},
    "logprobs of a million": {"logprobs": 1_000_000},
    "a bias on no token": {"logit_bias": {"no token": 1.0}},
    "a token id that there is not": {"prompt": [2**31 - 2]},
}


@probe("nonsense", "Are invalid requests rejected without harm to the server?")
def nonsense(lab: Lab, trial: Trial) -> None:
    """A rejection is an HTTP status of 4xx; accepting the request is no finding, failing on it is."""
    plain = lab.dialect.body(Ask("The", SamplingParams(max_tokens=2, temperature=0)))
    for name, change in _NONSENSE.items():
        attempt = lab.server.post(plain | change)
        fine = attempt.ok or attempt.refused
        trial.check(
            fine, ("request fails",), attempt.body, f"{name}: an answer or a rejection with 4xx", attempt.reported()
        )
    attempt = lab.server.post(plain)
    trial.check(attempt.ok, ("server dies",), attempt.body, "a server that still answers", attempt.reported())


@probe(
    "top_k",
    "Is top_k applied, and does the server survive? It has killed engines that mix up parameters.",
    Need.TOKEN_IDS,
    Need.REFERENCE,
)
def top_k(lab: Lab, trial: Trial) -> None:
    """top_k of 1 and of 8; runs last, and if other parameters are misapplied only with --destructive."""
    if lab.mixed_up and not lab.destructive:
        raise Stopped(
            ProbeVerdict.UNSUPPORTED,
            "parameters are misapplied here, and top_k has killed such servers; to run it anyway, use --destructive",
        )
    asks = [Ask(lab.loop(number), dataclasses.replace(_WARM, top_k=1)) for number in (1, 3)]
    asks += [Ask(lab.prompt(number), TOP_K, SEED + number) for number in range(lab.budget.answers)]
    for one in lab.ask_all(asks, "parameters"):
        if not trial.answered(one.attempt, (*_FAULT, "request fails")) or not one.ids:
            continue
        if one.ask.params.top_k == 1:
            check_greedy(lab, trial, one, "top_k of 1", _FAULT)
            continue
        beyond = len(lab.judge(one).misplaced)
        reported = f"{beyond} of {len(one.ids)} are not"
        trial.check(not beyond, _FAULT, one.attempt.body, "only tokens among the 8 most likely", reported)
