"""Sound answers, replayed by an engine whose logits are off by noise of the size that bfloat16 rounds: none is accused,
whatever was filtered, however cold, whoever drafted; and a token that is wrong is still found."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deploy.faults.toy import LikeliestDrafter, TableDrafter, engine_over
from deploy.faults.traffic import PLAIN, sampling
from serve_app.backends.base import Numerics, Replayed
from serve_app.referee.answer import Answer
from serve_app.referee.detectors import ReplicaWatch
from serve_app.referee.judgement import Judge
from serve_app.referee.records import Records
from serve_app.referee.tolerance import Tolerance
from serve_app.referee.verdicts import Verdict
from speculative.drafting.base import Drafter, DraftOutput, WeightlessDrafter
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams, TokenDelta
from speculative.state.batch import Batch
from speculative.verification.draft_probs import PointMass

VOCAB = 256
NOISE_NATS = 0.02  # of a logit, between a batch of drafts in bfloat16 and the same tokens in one prefill
TOLERANCE = Tolerance.between_equals("bfloat16")
MOST_DRAFTS = 3
EACH = 75  # answers of each setting, verifier and drafter in the long run
FILTERS: Mapping[str, Mapping[str, float]] = {
    "nothing": {},
    "top_k 1": {"top_k": 1},
    "top_p 0.05": {"top_p": 0.05},
    "Qwen's": {"top_k": 20, "top_p": 0.8},
    "min_p 0.1": {"min_p": 0.1},
}
SETTINGS = {
    f"{name} at {temperature}": replace(PLAIN, temperature=temperature, logprobs=0, **filters)  # type: ignore[arg-type]
    for temperature in (0.01, 0.05, 0.3, 0.7, 1.0, 1.5)
    for name, filters in FILTERS.items()
}


class RunnerUpDrafter(WeightlessDrafter):
    """Drafts the likeliest token and the second by turns: where both are nearly alike, filters keep either."""

    def __init__(self, table: Tensor) -> None:
        self._two = table.topk(2, dim=-1).indices.tolist()

    def propose(self, batch: Batch) -> DraftOutput:
        drafts = []
        for entry in batch.entries:
            start, chain = len(entry.sequence.tokens), [entry.sequence.tokens[-1]]
            while len(chain) <= min(entry.max_drafts, MOST_DRAFTS):
                chain.append(self._two[chain[-1]][(start + len(chain)) % 2])
            drafts.append(chain[1:])
        return DraftOutput.pack(drafts, PointMass())


def engine(drafted: str, verifier: str, nats: float = 0.0, *, heavy: bool = False) -> EngineCore:
    """One whose target's and drafter's logits are off by noise of this size; heavy: with tails of a t distribution."""
    chance = torch.Generator().manual_seed(1)
    table, of_drafter, noise, more_noise = (torch.randn(VOCAB, VOCAB, generator=chance) for _ in range(4))
    if heavy:  # Student's t with 5 degrees of freedom, of variance 1
        squares = torch.randn(2, 5, VOCAB, VOCAB, generator=chance).square().sum(1)
        noise, more_noise = noise * (3 / squares[0]).sqrt(), more_noise * (3 / squares[1]).sqrt()
    target = 3 * table + nats * noise
    near = 3 * table + of_drafter + nats * more_noise
    drafters: Mapping[str, Callable[[], Drafter]] = {
        "sampled": lambda: TableDrafter(near.softmax(-1), MOST_DRAFTS),
        "likeliest": lambda: LikeliestDrafter(target),
        "runner-up": lambda: RunnerUpDrafter(target),
    }
    return engine_over(target, drafters[drafted](), verifier=verifier, kv_cache_tokens=65536)


def engines(drafted: str, verifier: str) -> tuple[EngineCore, EngineCore]:
    """One that answers, and one that replays with noise."""
    return engine(drafted, verifier), engine(drafted, verifier, NOISE_NATS)


def run(engine: EngineCore, requests: Sequence[Request]) -> Iterator[TokenDelta]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            yield delta


def answers(engine: EngineCore, settings: Mapping[str, SamplingParams], each: int) -> dict[str, list[Answer]]:
    """By setting."""
    records = Records("r1", 512, MOST_DRAFTS)
    requests = {
        name: list(itertools.islice(sampling(VOCAB, params, number), each))
        for number, (name, params) in enumerate(settings.items())
    }
    kept = {one.request_id: records.begin(one) for asked in requests.values() for one in asked}
    for delta in run(engine, [one for asked in requests.values() for one in asked]):
        kept[delta.request_id].take(delta)
    served = {name: [kept[one.request_id].answer() for one in asked] for name, asked in requests.items()}
    return {name: [answer for answer in own if answer is not None] for name, own in served.items()}


def replayed(engine: EngineCore, served: Sequence[Answer]) -> list[Replayed]:
    found = {}
    for delta in run(engine, [one.scored(one.request.request_id) for one in served]):
        assert delta.logprobs is not None
        logprobs = tuple(entry.logprob for entry in delta.logprobs)
        found[delta.request_id] = Replayed(logprobs, delta.replayed, "p1")
    return [found[one.request.request_id] for one in served]


@pytest.mark.parametrize("drafted", ["sampled", "likeliest", "runner-up"])
@pytest.mark.parametrize("verifier", ["token_wise", "block", "coupled"])
def test_no_sound_answer_is_accused_because_logits_are_rounded(verifier: str, drafted: str) -> None:
    served, replaying = engines(drafted, verifier)
    for name, given in answers(served, SETTINGS, 3).items():
        judge, watch = Judge(TOLERANCE), ReplicaWatch(TOLERANCE)
        for answer, again in zip(given, replayed(replaying, given), strict=True):
            judgement = judge.judge(answer, again)
            assert judgement.checked.verdict is Verdict.VERIFIED, f"{name}: {judgement.checked}"
            assert judgement.checked.draws.num_checked or verifier == "block"
            limit = judgement.drift_tolerance
            assert not watch.see(judgement.tokens, greedy=False, drift_tolerance=limit), name


PAIRS: Mapping[str, tuple[str, Callable[[str], Tolerance], float]] = {
    "float32, another engine": ("float32", Tolerance.against_float32, 1.5e-5),
    "bfloat16, the same engine": ("bfloat16", Tolerance.between_equals, 0.02),
    "bfloat16 and float32": ("bfloat16", Tolerance.against_float32, 0.015),
    "four bits and bfloat16": ("bfloat16", Tolerance.against_float32, 0.025),
    "w4a8 and float32": ("int8", Tolerance.against_float32, 0.1),
}
"""Pairs of engines, and the standard deviation of the noise between their logits; docs/watch.md has measurements."""


@pytest.mark.slow  # an hour on a core: 101,250 answers in all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("drafted", ["sampled", "likeliest", "runner-up"])
@pytest.mark.parametrize("verifier", ["token_wise", "block", "coupled"])
def test_of_a_hundred_thousand_sound_answers_none_is_suspect(verifier: str, drafted: str, pair: str) -> None:
    precision, between, nats = PAIRS[pair]
    tolerance, numerics = between(precision), Numerics("truespec", precision)
    replaying = engine(drafted, verifier, nats, heavy=True)
    accused: list[tuple[str, str]] = []
    for name, served in answers(engine(drafted, verifier), SETTINGS, EACH).items():
        judge, watch = Judge(tolerance), ReplicaWatch(tolerance)
        own = [replace(answer, numerics=numerics) for answer in served]
        assert len(own) == EACH
        for answer, again in zip(own, replayed(replaying, own), strict=True):
            judgement = judge.judge(answer, again)
            accused += [(name, judgement.checked.reason)] * (judgement.checked.verdict is not Verdict.VERIFIED)
            whole = [replace(token, strata=("all",)) for token in judgement.tokens]
            found = watch.see(whole, greedy=False, drift_tolerance=judgement.drift_tolerance)
            accused += [(name, f"alarm: {alarm.name}") for alarm in found]
    assert not accused, accused[:20]


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_a_wrong_token_is_found_although_logits_are_rounded(verifier: str) -> None:
    served, replaying = engines("sampled", verifier)
    chance = random.Random(2)
    settings = {name: one for name, one in SETTINGS.items() if "0.7" in name or "1.0" in name}
    wrong = []
    for answer in itertools.chain(*answers(served, settings, 4).values()):
        tokens = list(answer.token_ids)
        index = chance.randrange(len(tokens))
        tokens[index] = chance.choice([token for token in range(VOCAB) if token != tokens[index]])
        wrong.append(replace(answer, token_ids=tuple(tokens), logprobs=()))
    judge = Judge(TOLERANCE)
    judged = [judge.judge(one, again).checked for one, again in zip(wrong, replayed(replaying, wrong), strict=True)]
    assert sum(one.verdict is Verdict.SUSPECT for one in judged) >= 0.95 * len(wrong)
