"""What a scoring request says of the distribution: against a whole-sequence pass, and under every kind of parameter."""

from dataclasses import replace

import pytest
import torch

from speculative.request import ReplayedToken, Request, SamplingParams
from tests.support.engines import decoder_of, naive_logits, run
from tools.faults.toy import tiny_engine

PROMPT = tuple(3 + (7 * i) % 41 for i in range(20))


def answer(request: Request) -> tuple[int, ...]:
    engine = tiny_engine()
    engine.add(request)
    return tuple(run(engine)[request.request_id].token_ids)


def distribution_of(request: Request, output: tuple[int, ...]) -> tuple[ReplayedToken, ...]:
    engine = tiny_engine(max_batched_tokens=40)  # so that it takes several steps
    whole, num_prompt = (*request.prompt_token_ids, *output), len(request.prompt_token_ids)
    params = replace(request.params, prompt_logprobs=None)
    engine.add(replace(request, prompt_token_ids=whole, params=params, score_from=num_prompt))
    while engine.has_work:
        for delta in engine.step():
            assert delta.replayed is not None
            assert delta.logprobs is not None
            assert len(delta.replayed) == len(delta.logprobs) == len(output)
            return delta.replayed
    raise AssertionError


def test_rows_are_what_a_whole_pass_says() -> None:
    request = Request("r", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7), seed=1)
    output = answer(request)
    logits = naive_logits(decoder_of(tiny_engine()), torch.tensor([[*PROMPT, *output]]))[0, len(PROMPT) - 1 : -1]
    distribution = (logits / 0.7).softmax(-1).double()
    for row, p, y in zip(distribution_of(request, output), distribution, output, strict=True):
        assert row.probability == pytest.approx(float(p[y]), rel=1e-4)
        assert row.expected_probability == pytest.approx(float((p * p).sum()), rel=1e-4)
        assert row.surprisal == pytest.approx(float(-p[y].log()), abs=1e-4)
        assert row.expected_surprisal == pytest.approx(float(-(p * p.log().clamp(min=-10)).sum()), abs=1e-4)
        assert row.gap == pytest.approx(0.7 * float((p.max() / p[y]).log()), abs=1e-4), "of the logits"
        assert row.outside == 0


def test_a_token_outside_the_filters_and_a_forbidden_one_are_reported_apart() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, top_k=1, bad_words=((9,),))
    request = Request("r", PROMPT, params, seed=1)
    best = answer(request)
    (row, *_) = distribution_of(request, best)
    assert row.outside == 0
    other = next(token for token in range(3, 60) if token not in (best[0], 9))
    assert 0 < distribution_of(request, (other,))[0].outside < float("inf")
    assert distribution_of(request, (9,))[0].outside == float("inf")
