"""Probes at boundaries: where answers end, lengths of prompts around blocks and up to the limit, and nonsense."""

from typing import Any

from deploy.watch.probes.desk import Desk, ids_of
from deploy.watch.probes.trial import Trial, probe

_LENGTHS = (2, 15, 16, 17, 33, 63, 65, 129, 257)
_LONGEST = 2048  # tokens of a limit that is tried
_ROOMS = (1, 2, 3, 4, 5, 8, 16)  # tokens that are left below it


@probe("ends", "Does an answer end exactly where it should: at max_tokens, a stop token or a stop string?")
def ends(desk: Desk, trial: Trial) -> None:
    """In repetitive text, where the end lies within a draft."""
    for number in (1, 3, 5):
        before = desk.ask(desk.body(desk.loop(number)))
        prompt = (*desk.loop(number), *ids_of(before))  # what follows mostly repeats what came before
        whole = desk.ask(desk.body(prompt))
        if not trial.answered(whole):
            continue
        spoke = bool(ids_of(whole)) or whole.reply.first.finish_reason == "stop"
        if not trial.check(spoke, whole.body, "tokens in an answer", "there are none") or not ids_of(whole):
            continue
        for one in desk.ask_all([whole.body | {"max_tokens": most} for most in (1, 2, 3, 5, 7)]):
            most, num = one.body["max_tokens"], len(ids_of(one))
            if trial.answered(one) and one.reply.first.finish_reason == "length":
                seen = f"{num} tokens, usage {one.reply.num_tokens}"
                right = num == most and one.reply.num_tokens in (None, most)
                trial.check(right, one.body, f"exactly {most} tokens", seen)
        stop_ids = list(dict.fromkeys(ids_of(whole)))[1:7]
        for one in desk.ask_all([whole.body | {"stop_token_ids": [stop]} for stop in stop_ids]):
            if not trial.answered(one):
                continue
            (stop,), ids, reason = one.body["stop_token_ids"], ids_of(one), one.reply.first.finish_reason
            if stop in ids:
                right = ids.index(stop) == len(ids) - 1
            else:  # a server may omit the stop token
                right = reason == "stop" or len(ids) == one.body["max_tokens"]
            seen = f"{len(ids)} tokens, finish_reason {reason}"
            trial.check(right, one.body, "an end at the first stop token", seen)
        text = whole.reply.first.text
        stops = [piece for piece in (text[3:6], text[9:13], text[20:22]) if piece.strip() and "\ufffd" not in piece]
        for one in desk.ask_all([whole.body | {"stop": [stop]} for stop in stops]):
            if trial.answered(one):
                (stop,), answer = one.body["stop"], one.reply.first
                seen = f"{answer.text[-40:]!r}, finish_reason {answer.finish_reason}"
                trial.check(stop not in answer.text, one.body, f"a text that ends before {stop!r}", seen)


@probe("lengths", "Are answers right at lengths around blocks and chunks, and up to the server's limit?")
def lengths(desk: Desk, trial: Trial) -> None:
    """Prompts in a busy batch, with the logprobs of their own tokens where the server has them; the referee judges."""
    limit = desk.limit if desk.limit is not None and desk.limit <= _LONGEST else None
    scored = {"prompt_logprobs": 0} if desk.scores_prompts else {}
    bodies = [
        desk.body(desk.passage(3, length), max_tokens=4, ignore_eos=True, **scored)
        for length in _LENGTHS
        if length + 4 < (desk.limit or length + 5)
    ]
    if limit is not None:
        text = desk.passage(9, limit)
        bodies += [desk.body(text[: limit - room], max_tokens=room, ignore_eos=True) for room in _ROOMS]
    busy = [desk.body(desk.loop(60 + number), max_tokens=48) for number in range(len(bodies))]
    mixed = [body for pair in zip(bodies, busy, strict=True) for body in pair]
    for one in desk.ask_all(mixed, at_once=6)[::2]:
        if trial.answered(one):
            most, num = one.body["max_tokens"], len(ids_of(one))
            seen = f"{num} tokens, finish_reason {one.reply.first.finish_reason}"
            trial.check(num == most, one.body, "as many tokens as were asked for", seen)
    if limit is not None:
        trial.answered(desk.ask(desk.body(text[: limit - 2], max_tokens=limit)))
    trial.seen = f"{trial.num_cases} lengths{'' if limit is None else f', up to the limit of {limit}'}"


_NONSENSE: dict[str, dict[str, Any]] = {
    "a negative temperature": {"temperature": -1},
    "top_p of 2": {"top_p": 2.0},
    "no room for an answer": {"max_tokens": -1},
    "logprobs of a million": {"logprobs": 1_000_000},
    "a bias on no token": {"logit_bias": {"no token": 1.0}},
    "a token id that there is not": {"prompt": [2**31 - 2]},
}


@probe("nonsense", "Are invalid requests refused without harm to the server?", needs_ids=False)
def nonsense(desk: Desk, trial: Trial) -> None:
    """To refuse is an HTTP status of 4xx; an answer is no finding, a failure is. Nothing goes to the referee."""
    plain = desk.body(desk.passage(1, 4), max_tokens=2)
    for name, change in _NONSENSE.items():
        attempt = desk.server.post(plain | change)
        fine = attempt.ok or attempt.refused
        trial.check(fine, attempt.body, f"{name}: an answer, or a refusal with 4xx", attempt.reported())
    attempt = desk.server.post(plain)
    trial.check(attempt.ok, attempt.body, "a server that still answers", attempt.reported())
