"""What everything that computes answers again does: one kit of tests for our engine, `transformers`, vLLM and Ray.

A test runs each of `CHECKS` on a `Trial` of a loaded replayer that takes at most `MAX_MODEL_LEN` tokens.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.run.replayers import Replayer
from serve_app.backends.base import ModelInfo
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Verdict
from speculative.errors import InvalidRequest, SequenceTooLong
from speculative.request import Request, SamplingParams
from tests.support.engines import NGRAM, tiny_engine
from tests.support.referees import serve

MAX_MODEL_LEN = 128
TOKENS = tuple(5 + 7 * index % 90 for index in range(40))
SAMPLED = SamplingParams(temperature=0.7, top_k=20, logprobs=0)
GREEDY = SamplingParams(temperature=0, logprobs=0)
ANSWER = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, logprobs=0)

NATS = 1e-3  # that rounding moves a figure by at most


@dataclass(frozen=True)
class Trial:
    """A replayer, what it says of its model, the model's folder, and whether it says where tokens lie in their
    distribution."""

    replayer: Replayer
    info: ModelInfo
    folder: Path
    gives_rows: bool


@asynccontextmanager
async def on_trial(replayer: Replayer, folder: Path, *, gives_rows: bool = True) -> AsyncIterator[Trial]:
    """A replayer, loaded until the block ends."""
    try:
        yield Trial(replayer, await replayer.start(), folder, gives_rows)
    finally:
        await replayer.stop()


@functools.cache
def logits_of(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """[n, V] by `transformers` itself; row i predicts tokens[i + 1]."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.inference_mode():
        rows: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return rows


@functools.cache
def answers(folder: Path) -> tuple[Answer, ...]:
    """Of our engine with drafts."""
    engine = tiny_engine(folder, drafter=NGRAM)
    prompt = (9, 17, 33, 5) * 5
    return tuple(serve(engine, Request(f"cmpl-{seed}-0", prompt, ANSWER, seed=seed)) for seed in range(4))


def of_each(values: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    return values.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


async def each_token_has_its_raw_logprob_whatever_the_parameters(trial: Trial) -> None:
    for start in (1, 17, len(TOKENS) - 1):
        expected = of_each(logits_of(trial.folder, TOKENS)[start - 1 : -1].log_softmax(-1), TOKENS[start:])
        for number, params in enumerate((SAMPLED, GREEDY)):
            request = Request(f"raw-{start}-{number}", TOKENS, params, score_from=start)
            assert (await trial.replayer.replay(request)).logprobs == pytest.approx(expected, abs=NATS)


async def beside_each_token_it_gives_the_likeliest_and_those_that_are_named(trial: Trial) -> None:
    params, named = replace(SAMPLED, prompt_logprobs=3), tuple((7 + place, 90, 3) for place in range(len(TOKENS) - 8))
    request = Request("beside", TOKENS, params, score_from=8, scored_ids=named)
    entries = (await trial.replayer.replay(request)).entries
    expected = logits_of(trial.folder, TOKENS)[7:-1].log_softmax(-1)
    best = expected.topk(3)
    assert [[value for _, value in one.top] for one in entries] == [
        pytest.approx(row, abs=NATS) for row in best.values.tolist()
    ]
    for entry, ids, row in zip(entries, named, expected, strict=True):
        assert [row[token].item() for token, _ in entry.top] == pytest.approx([v for _, v in entry.top], abs=NATS)
        if trial.gives_rows:  # vLLM gives the likeliest only
            assert [token for token, _ in entry.scored] == list(ids)
            assert [v for _, v in entry.scored] == pytest.approx(row[list(ids)].tolist(), abs=NATS)


async def a_sampled_token_lies_where_its_parameters_place_it(trial: Trial) -> None:
    rows = (await trial.replayer.replay(Request("sampled", TOKENS, SAMPLED, score_from=8))).replayed
    if not trial.gives_rows:
        assert rows is None
        return
    scaled = logits_of(trial.folder, TOKENS)[7:-1] / SAMPLED.temperature
    probs = scaled.masked_fill(scaled < scaled.topk(SAMPLED.top_k).values[:, -1:], -torch.inf).softmax(-1)
    own = of_each(probs, TOKENS[8:])
    assert rows is not None
    assert [row.expected_probability for row in rows] == pytest.approx((probs**2).sum(-1).tolist(), abs=NATS)
    assert [row.outside > NATS for row in rows] == [value == 0 for value in own]
    inside = [(row.probability, value) for row, value in zip(rows, own, strict=True) if value > 0]
    assert 0 < len(inside) < len(own), "some are inside the filter, some outside"
    assert [found for found, _ in inside] == pytest.approx([value for _, value in inside], abs=NATS)


async def a_greedy_token_is_so_far_below_the_likeliest(trial: Trial) -> None:
    logits = logits_of(trial.folder, TOKENS)[7:]
    tokens = (*TOKENS, int(logits[-1].argmax()))
    rows = (await trial.replayer.replay(Request("greedy", tokens, GREEDY, score_from=8))).replayed
    if trial.gives_rows:
        gaps = [most - own for most, own in zip(logits.amax(-1).tolist(), of_each(logits, tokens[8:]), strict=True)]
        assert gaps[-1] == 0 < gaps[0]
        assert rows is not None and [row.gap for row in rows] == pytest.approx(gaps, abs=NATS)


async def answers_that_are_right_are_verified_and_others_are_not(trial: Trial) -> None:
    judge = Judge(Tolerance.against_float32("float32"))
    for answer in answers(trial.folder):
        name, place = answer.request.request_id, len(answer.token_ids) // 2
        other = (answer.token_ids[place] + 1) % 500
        wrong = replace(answer, token_ids=(*answer.token_ids[:place], other, *answer.token_ids[place + 1 :]))
        checked = judge.judge(answer, await trial.replayer.replay(answer.scored(f"right {name}"))).checked
        compares_tokens = trial.gives_rows or answer.request.params.greedy
        assert checked.verdict is (Verdict.VERIFIED if compares_tokens else Verdict.LOGPROBS_ONLY)
        assert ("draws" in checked.checks) == trial.gives_rows
        checked = judge.judge(wrong, await trial.replayer.replay(wrong.scored(f"wrong {name}"))).checked
        assert checked.verdict is Verdict.SUSPECT


async def requests_at_once_do_not_mix(trial: Trial) -> None:
    requests = [Request(f"mixed-{start}", TOKENS[start:], SAMPLED, score_from=5) for start in range(6)]
    together = await asyncio.gather(*map(trial.replayer.replay, requests))
    for request, found in zip(requests, together, strict=True):
        alone = await trial.replayer.replay(replace(request, request_id=f"alone {request.request_id}"))
        assert found.logprobs == pytest.approx(alone.logprobs, abs=NATS)


async def what_is_no_token_is_refused_and_the_next_is_computed(trial: Trial) -> None:
    for token in (-1, trial.info.vocab_size, 10**30):
        with pytest.raises(InvalidRequest) as caught:
            await trial.replayer.replay(Request(f"bad-{token}", (5, 6, token), score_from=1))
        assert caught.value.field == "prompt"
        good = await trial.replayer.replay(Request(f"good-{token}", (5, 6, 7), score_from=1))
        assert len(good.logprobs) == 2


async def it_takes_as_many_tokens_as_it_says_and_no_more(trial: Trial) -> None:
    assert trial.info.max_model_len == MAX_MODEL_LEN
    longest = (TOKENS * 4)[:MAX_MODEL_LEN]
    whole = await trial.replayer.replay(Request("longest", longest, score_from=4))
    assert len(whole.logprobs) == MAX_MODEL_LEN - 4
    with pytest.raises(SequenceTooLong):
        await trial.replayer.replay(Request("longer", (*longest, 5), score_from=4))


CHECKS = (
    each_token_has_its_raw_logprob_whatever_the_parameters,
    beside_each_token_it_gives_the_likeliest_and_those_that_are_named,
    a_sampled_token_lies_where_its_parameters_place_it, a_greedy_token_is_so_far_below_the_likeliest,
    answers_that_are_right_are_verified_and_others_are_not, requests_at_once_do_not_mix,
    what_is_no_token_is_refused_and_the_next_is_computed, it_takes_as_many_tokens_as_it_says_and_no_more,
)  # fmt: skip
Check = Callable[[Trial], Coroutine[Any, Any, None]]
