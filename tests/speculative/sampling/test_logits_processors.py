"""Masks, biases and penalties against the loop one would write first, alone and inside the engine."""

from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.request import Request, SamplingParams
from speculative.sampling.logits_processors import adjust
from speculative.state.batch import RowContext
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from tests.support.engines import answer_all, decoder_of, naive_logits, tiny_engine

V = 12
EOS = (2, 9)


def naive_adjust(
    logits: Tokens[float], params: SamplingParams, prompt: Tokens[int], said: Tokens[int], mask: Bools | None
) -> list[float]:
    """One row, one token at a time, in double precision; `said` is the output with the row's drafts."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    adjusted = []
    for token, logit in enumerate(logits):
        value = float(logit) + sum(bias for biased, bias in params.logit_bias if biased == token)
        completes = any(
            word[-1] == token and list(word[:-1]) == list(said[len(said) - len(word) + 1 :])
            for word in params.bad_words
            if len(word) - 1 <= len(said)
        )
        outside = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        too_soon = token in stops and len(said) < params.min_tokens
        if completes or outside or too_soon or (mask is not None and not mask[token]):
            value = -np.inf
        if token in prompt or token in said:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * said.count(token) + params.presence_penalty * (token in said)
        adjusted.append(value)
    return adjusted


tokens = st.integers(0, V - 1)
some_params = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    min_tokens=st.integers(0, 6),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100)), max_size=4).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=V).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


@st.composite
def entries(draw: st.DrawFn) -> tuple[Sequence, list[list[int]], list[Bools] | None]:
    """A sequence, its rounds (each: what it drafts, and for the next round emits), and masks for a few drafts."""
    params = draw(st.just(SamplingParams()) | some_params)
    prompt = draw(st.lists(tokens, min_size=1, max_size=5))
    rounds = draw(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=3, max_size=3))
    masks = draw(st.none() | st.lists(st.lists(st.booleans(), min_size=V, max_size=V), min_size=5, max_size=5))
    arrays = None if masks is None else [np.array(mask) for mask in masks]
    return Sequence(Request("r", tuple(prompt), params)), rounds, arrays


@given(st.lists(entries(), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_every_row_is_as_the_naive_loop_has_it_round_after_round(batch: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number in range(3):
        contexts, owners = [], []
        for sequence, rounds, masks in batch:
            contexts += contexts_of(sequence, rounds[number], masks)
            owners += [sequence] * (len(rounds[number]) + 1)
        logits = 5 * torch.randn((len(contexts), V), generator=generator)
        given_logits = logits.clone()
        adjusted = adjust(logits, contexts, EOS)
        assert torch.equal(logits, given_logits)
        expected = [
            naive_adjust(
                row.tolist(),
                sequence.params,
                sequence.request.prompt_token_ids,
                [*sequence.tokens[sequence.num_prompt :], *context.drafts],
                context.allowed,
            )
            for row, context, sequence in zip(logits, contexts, owners, strict=True)
        ]
        assert adjusted.dtype == torch.float32
        torch.testing.assert_close(adjusted.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-4)
        for sequence, rounds, _ in batch:
            sequence.advance(len(sequence.tokens), rounds[number])


def contexts_of(sequence: Sequence, drafts: Tokens[int] = (), masks: list[Bools] | None = None) -> list[RowContext]:
    rules, output = sequence.rules, sequence.tokens[sequence.num_prompt :]
    return [
        RowContext(rules, output, tuple(drafts[:offset]), None if masks is None else masks[offset])
        for offset in range(len(drafts) + 1)
    ]


def rows_of(params: SamplingParams, drafts: Tokens[int] = (), prompt: Tokens[int] = (1, 2)) -> list[RowContext]:
    return contexts_of(Sequence(Request("r", tuple(prompt), params)), drafts)


def test_nobody_pays_when_nobody_asks() -> None:
    logits = torch.randn(3, V)
    assert adjust(logits, rows_of(SamplingParams(temperature=0.3, top_p=0.5), (4, 5)), EOS) is logits


# ---- through the engine, with n-gram drafts

PARAMETERS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": (3, 5, 8, 13, 21, 34, 55)},
    "bad_words": {"bad_words": ((9,), (16, 16, 16), (5, 29), (19, 38, 53))},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": tuple(range(20, 64))},
    "logit_bias": {"logit_bias": ((7, 3.5), (9, 3.0), (11, -100.0))},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "frequency_bonus": {"frequency_penalty": -0.6},
    "repetition_penalty": {"repetition_penalty": 1.25},
    "repetition_bonus": {"repetition_penalty": 0.7},
}
TOGETHER: dict[str, Any] = {
    "allowed_token_ids": tuple(range(0, 64, 2)),
    "bad_words": ((6,), (8, 10), (10, 10, 10)),
    "min_tokens": 25,
    "logit_bias": ((12, 1.5), (14, 1.0)),
    "presence_penalty": -0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 0.8,
    "stop_token_ids": (20, 30, 40),
}
PROMPTS = [(3, 5, 8, 3, 5, 8, 3), (21, 34, 55, 21, 34), (7, 9, 7, 9, 7, 9, 11), (1,)]


def test_processed_logprobs_are_those_of_the_naive_distribution_at_every_position(tiny_folder: Path) -> None:
    """Requests side by side: without parameters, with each alone, and with all together."""
    engine = tiny_engine(tiny_folder, logprobs_mode="processed_logprobs")
    asked = {"max_tokens": 50, "temperature": 0.5, "logprobs": 0, "ignore_eos": True}
    requests = [
        Request(str(index), PROMPTS[index % len(PROMPTS)], SamplingParams(**asked | own), index)
        for index, own in enumerate(({}, *PARAMETERS.values(), TOGETHER))
    ]
    answers = answer_all(engine, requests)
    assert all(answer.num_drafted > 0 for answer in answers.values())
    assert sum(answer.num_accepted for answer in answers.values()) > 0
    for request in requests:
        said, prompt, params = answers[request.request_id].token_ids, request.prompt_token_ids, request.params
        logits = naive_logits(decoder_of(engine), torch.tensor([[*prompt, *said]]))[0, len(prompt) - 1 : -1]
        adjusted = [naive_adjust(row.tolist(), params, prompt, said[:at], None) for at, row in enumerate(logits)]
        expected = (torch.tensor(adjusted) / params.temperature).log_softmax(-1)[range(len(said)), said]
        assert answers[request.request_id].values == pytest.approx(expected.tolist(), abs=1e-3)
