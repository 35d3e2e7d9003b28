"""Answers during which the weights were updated: what came after the last update is computed again and judged."""

import dataclasses

import pytest

from serve_app.backends.base import Numerics, Replayed
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Checked, Distribution, Verdict
from serve_app.referee.records.records import Record
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.referees import TOLERANCE, EngineReplay
from tools.faults.toy import tiny_engine, tiny_weights

PROMPT = tuple(range(3, 23))
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
WISHES = {
    "sampled": SAMPLED,
    "greedy": dataclasses.replace(SAMPLED, temperature=0.0),
    "filtered": dataclasses.replace(SAMPLED, temperature=0.8, top_k=12, top_p=0.9),
    "penalties that count what came before the update": dataclasses.replace(
        SAMPLED, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "a least length that ends after the update": dataclasses.replace(
        SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(0, 64, 2)), min_tokens=20
    ),
}


def answer_with_updates(params: SamplingParams, versions: tuple[str, ...]) -> Answer:
    """What an engine answers whose weights are updated after every few tokens."""
    engine = tiny_engine()
    record, waiting = Record(Request("r-0", PROMPT, params, seed=5), "r1", 10.0, engine.max_model_len), list(versions)
    engine.add(record.request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            record.take(delta)
        if waiting and len(record.token_ids) >= 6 * (1 + len(versions) - len(waiting)):
            engine.switch(tiny_weights(seed=int(waiting[0])), waiting[0])
            waiting.pop(0)
    answer = record.answer()
    assert answer is not None and len(answer.token_ids) >= 20 and not waiting
    return answer


async def judged(answer: Answer, version: str) -> Checked:
    """By a referee whose replayer has these weights."""
    whole = EngineReplay(tiny_engine(seed=int(version)))

    async def replay(request: Request, avoid: object) -> Replayed:
        return dataclasses.replace(await whole(request), weight_version=version)

    checker = ReplayChecker(replay, Judge(TOLERANCE).judge, ReplicaBook(TOLERANCE))
    _, checked = await checker._result(answer)
    return checked


@pytest.mark.parametrize("versions", [("2",), ("2", "3"), ("2", "3", "2")], ids=" ".join)
@pytest.mark.parametrize("wish", WISHES)
async def test_what_the_last_weights_made_is_verified(wish: str, versions: tuple[str, ...]) -> None:
    answer = answer_with_updates(WISHES[wish], versions)
    assert answer.weight_versions[-1] == versions[-1] and answer.num_before_update >= 6 * len(versions)
    checked = await judged(answer, versions[-1])
    assert checked.verdict is Verdict.VERIFIED
    since = f"from token {answer.num_before_update} on, since when these weights made it"
    assert checked.reason == f"replayed ({since})"
    num_judged = len(answer.token_ids) - answer.num_before_update
    assert checked.num_tokens == num_judged and checked.checks[0] == "logprobs"
    if wish != "greedy":
        assert checked.draws.num_checked == num_judged and checked.distribution is Distribution.TESTED


def test_what_vllm_may_have_merged_with_tokens_of_older_weights_is_not_judged() -> None:
    """A slow reader finds what was made before and after a switch in one output."""
    record = Record(Request("r-0", PROMPT, SAMPLED), "r1", 10.0, 512, numerics=Numerics("vllm"))
    for version, tokens in (("1", (4, 5)), ("2", (6, 7, 8)), ("2", (9,))):
        record.take(TokenDelta("r-0", tokens, weight_version=version))
    assert record.num_before_update == 5
