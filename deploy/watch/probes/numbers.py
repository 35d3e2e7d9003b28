"""Probes of what a server says beside its tokens: logprobs without contradictions, and counters that add up."""

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from deploy.exchange.client import Attempt
from deploy.watch.probes.desk import Desk, values_of
from deploy.watch.probes.trial import ProbeVerdict, Stopped, Trial, probe

_ROUNDING = 1e-4  # nats; a log-softmax may come out a little above 0
_MASS = 1e-3
_MASKED = -9000.0  # OpenAI writes -9999 for a token that cannot occur
_VARIED_FROM = 8  # tokens that cannot all be equally likely
_SETTLE_S = 12.0  # how long a server may take to publish its counts
_LEAST_DRAFTS = 60
_DEAD = 0.02  # acceptance below this in repetitive text means that the drafter does not work
_METRICS = {
    "truespec_": {
        "truespec_draft_tokens_total": "drafted",
        "truespec_drafts_total": "rounds",
        "truespec_accepted_tokens_total": "accepted",
        "truespec_accepted_tokens_per_position_total": "at",
        "truespec_emitted_tokens_total": "generated",
    },
    "vllm:": {
        "vllm:spec_decode_num_draft_tokens_total": "drafted",
        "vllm:spec_decode_num_drafts_total": "rounds",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": "at",
        "vllm:generation_tokens_total": "generated",
    },
}


@probe("contract", "Does every token have one valid logprob that agrees with the top logprobs?", needs_ids=False)
def contract(desk: Desk, trial: Trial) -> None:
    """Looks at every answer of the whole audit."""
    answers = [one for one in desk.answers if one.reply.first.logprobs is not None]
    if not answers:
        raise Stopped(ProbeVerdict.UNSUPPORTED, "the server reports no logprobs")
    for one in answers:
        for holds, expected, seen in (*_of_each_token(one), *_of_top(one)):
            trial.check(holds, one.body, expected, seen)
    trial.seen = f"{len(answers)} answers"


def _of_each_token(attempt: Attempt) -> Iterator[tuple[bool, str, str]]:
    answer, values, counted = attempt.reply.first, values_of(attempt), attempt.reply.num_tokens
    num, finite = len(values) if answer.token_ids is None else len(answer.token_ids), values[np.isfinite(values)]
    yield len(values) == num, "one logprob for each token", f"{len(values)} logprobs for {num} tokens"
    if len(attempt.reply.choices) == 1 and counted is not None and answer.finish_reason == "length":
        yield counted == num, "usage that agrees with the tokens", f"usage {counted}, {num} tokens"
    yield len(finite) == len(values), "a number for each token", f"{len(values) - len(finite)} are none"
    if len(finite):
        yield bool(finite.max() <= _ROUNDING), "logprobs of at most 0", f"{finite.max():.3g}"
    if len(finite) >= _VARIED_FROM and attempt.body["temperature"] == 1:
        varied = bool(finite.min() < finite.max())
        yield varied, "logprobs that differ from token to token", f"all {len(finite)} are {finite[0]:g}"


def _of_top(attempt: Attempt) -> Iterator[tuple[bool, str, str]]:
    values, tops = values_of(attempt), attempt.reply.first.candidates()
    if tops is None or not len(values):
        return
    yield len(tops) == len(values) and all(tops), "top logprobs for each token", f"{len(tops)} for {len(values)}"
    for own, top in zip(values.tolist(), tops, strict=False):
        known = np.array([one.logprob for one in {one.text: one for one in top}.values() if one.logprob > _MASKED])
        if len(known) and np.isfinite(own):
            mass = float(np.exp(known).sum())
            yield mass <= 1 + _MASS, "top probabilities that add up to at most 1", f"{mass:.4f}"
            seen = f"{own:.4f} is above the top logprob, {known.max():.4f}"
            yield bool(own <= known.max() + _ROUNDING), "no logprob above the top logprob", seen


Counts = Counter[str]
"""Rounds with drafts, tokens drafted, accepted and generated, and accepted `at` each position."""


@probe("counters", "Do the server's draft counters agree with each other and with the served tokens?")
def counters(desk: Desk, trial: Trial) -> None:
    """Greedy answers to repetitive prompts, with and without logprobs; identities that hold for any drafter."""
    if not _read(desk):
        raise Stopped(ProbeVerdict.UNSUPPORTED, "it has no /metrics of vLLM or truespec")
    found = []
    for change in ({"logprobs": None}, {}):
        bodies = [desk.body(desk.loop(2 * number + 1), max_tokens=48) | change for number in range(6)]
        before = _settled(desk, 0)
        tokens = sum(len(one.reply.first.token_ids or ()) for one in desk.ask_all(bodies) if trial.answered(one))
        counts = _settled(desk, before["generated"] + tokens)
        counts.subtract(before)
        if counts["generated"] > tokens:
            seen = f"it generated {counts['generated']:.0f} tokens while {tokens} were asked for: it has other clients"
            raise Stopped(ProbeVerdict.UNCLEAR, seen)
        body, accepted, rounds = bodies[0], counts["accepted"], counts["rounds"]
        seen = f"{counts['generated']:.0f} counted, {tokens} served"
        trial.check(counts["generated"] == tokens, body, "every generated token counted once", seen)
        seen = f"{accepted:.0f} accepted of {counts['drafted']:.0f} drafted"
        trial.check(accepted <= counts["drafted"], body, "no more accepted than drafted", seen)
        at = [value for name, value in sorted(counts.items()) if name.startswith("at ")]
        if at:
            seen = f"{', '.join(f'{value:.0f}' for value in at)}; {accepted:.0f} in all"
            falling = at == sorted(at, reverse=True)
            trial.check(falling and sum(at) == accepted, body, "accepted tokens by position that fall and add up", seen)
        slack = len(bodies) * max(len(at), 1)  # for a last round that max_tokens cuts
        seen = f"{accepted:.0f} accepted in {rounds:.0f} rounds, {tokens} tokens served"
        fits = accepted + rounds <= tokens + slack
        trial.check(fits, body, "one token for every accepted draft, and one more a round", seen)
        found.append(counts)
    plain, with_logprobs = found
    drafted, accepted = plain["drafted"], plain["accepted"]
    trial.seen = f"{accepted:.0f} of {drafted:.0f} drafts accepted in repetitive text"
    if drafted >= _LEAST_DRAFTS:
        seen = f"{with_logprobs['drafted']:.0f} drafts with logprobs, {drafted:.0f} without"
        trial.check(with_logprobs["drafted"] > 0, bodies[0], "drafts also when logprobs are asked for", seen)
        trial.check(accepted > _DEAD * drafted, bodies[0], "some drafts accepted in repetitive text", trial.seen)


def _read(desk: Desk) -> Counts:
    """The counters now, summed over replicas."""
    text, counts = desk.server.get("/metrics") or "", Counter[str]()
    names = next((names for prefix, names in _METRICS.items() if f"\n{prefix}" in text), {})
    lines = [line for line in text.splitlines() if line.startswith(tuple(names) or ("\n",))]  # all would take long
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            kind = names.get(sample.name)
            if kind is not None:
                counts[f"at {int(sample.labels.get('position', 0)):03}" if kind == "at" else kind] += sample.value  # type: ignore[assignment]
    return counts


def _settled(desk: Desk, generated: float) -> Counts:
    """The counts once they are stable and so many tokens were generated, or after a while."""
    deadline, last = time.monotonic() + _SETTLE_S, _read(desk)
    while time.monotonic() < deadline:
        time.sleep(desk.publishing_s)
        now = _read(desk)
        if now == last and now["generated"] >= generated:
            return now
        last = now
    return last
