"""Scored ids come from the matrix that everything else in their row comes from, in every mode, with drafts (F2)."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.errors import InvalidRequest
from speculative.request import Request, SamplingParams, TokenKind
from speculative.sampling.logprobs import gather_logprobs, mode_matrix
from tests.support.engines import NO_DRAFTS, Answer, run, teacher_forced, tiny_engine

MODES = get_args(LogprobsMode)
VOCAB = 64
EVERY_ID = tuple(reversed(range(VOCAB)))
PROMPT = (5, 6, 7, 8) * 5
LONG = {"max_tokens": 24, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=20, logprob_token_ids=EVERY_ID, **LONG),
    "filtered": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, logprobs=10, logprob_token_ids=EVERY_ID, **LONG),
    "min p": SamplingParams(temperature=0.9, min_p=0.05, logprobs=5, logprob_token_ids=EVERY_ID, **LONG),
    "penalised": SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias=((3, 4.0),),
        logprobs=20,
        logprob_token_ids=EVERY_ID,
        **LONG,
    ),
    "masked": SamplingParams(allowed_token_ids=tuple(range(5, 30)), logprobs=20, logprob_token_ids=EVERY_ID, **LONG),
    "scored only": SamplingParams(temperature=0.8, logprob_token_ids=(40, 2, 40), **LONG),
    "unscored": SamplingParams(temperature=0.8, logprobs=3, **LONG),
    "unasked": SamplingParams(temperature=0.8, **LONG),
}


@pytest.fixture(scope="module")
def answers_of(tiny_folder: Path) -> dict[str, dict[str, Answer]]:
    """Every request of PARAMS in one batch, by mode."""
    answers = {}
    for mode in MODES:
        engine = tiny_engine(tiny_folder, logprobs_mode=mode)
        for name, params in PARAMS.items():
            engine.add(Request(name, PROMPT, params, seed=11))
        answers[mode] = run(engine)
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_scored_values_are_those_of_every_other_report(answers_of: dict[str, dict[str, Answer]], mode: str) -> None:
    for name, answer in answers_of[mode].items():
        assert answer.error is None
        params = PARAMS[name]
        assert len(answer.logprobs) == (len(answer.token_ids) if params.returns_logprobs else 0)
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids[: len(answer.logprobs)]
        for entry in answer.logprobs:
            assert tuple(token for token, _ in entry.scored) == params.logprob_token_ids
            scored = dict(entry.scored)
            assert all(scored[token] == value for token, value in entry.top if token in scored)
            assert scored.get(entry.token_id, entry.logprob) == entry.logprob
            if params.logprob_token_ids == EVERY_ID:
                ranked = sorted(scored.values(), reverse=True)[: params.logprobs]
                assert [value for _, value in entry.top] == [value for value in ranked if value > -math.inf]
                assert entry.rank == 1 + sum(value > entry.logprob for value in scored.values())


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_scores_of_all_tokens_are_a_distribution(answers_of: dict[str, dict[str, Answer]], mode: str) -> None:
    for name, answer in answers_of[mode].items():
        if PARAMS[name].logprob_token_ids == EVERY_ID:
            for entry in answer.logprobs:
                assert math.isclose(sum(math.exp(value) for _, value in entry.scored), 1, abs_tol=1e-4)


def test_tokens_that_are_masked_score_minus_infinity_in_processed_modes_only(
    answers_of: dict[str, dict[str, Answer]],
) -> None:
    for mode in MODES:
        for entry in answers_of[mode]["masked"].logprobs:
            masked = {token for token, value in entry.scored if value == -math.inf}
            assert masked == ({*range(5), *range(30, VOCAB)} if mode.startswith("processed") else set())


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_its_own(tiny_folder: Path, answers_of: dict[str, dict[str, Answer]], mode: str) -> None:
    """For accepted, recovered and bonus tokens alike, in a batch whose requests score other sets."""
    engine = tiny_engine(tiny_folder)
    for name in ("greedy", "scored only", "filtered"):
        params, answer = PARAMS[name], answers_of[mode][name]
        raw = teacher_forced(engine, PROMPT, answer.token_ids)
        for row, entry in zip(raw, answer.logprobs, strict=True):
            scored = {token: value for token, value in entry.scored if value > -math.inf}
            reference = row / (params.temperature or 1) if mode.startswith("processed") else row
            least = min(scored, key=scored.__getitem__)
            for token, value in scored.items():  # differences: filters and logits have another zero
                assert abs((value - scored[least]) - float(reference[token] - reference[least])) < 2e-4
            if mode == "raw_logprobs":
                assert all(abs(value - float(row[token])) < 1e-4 for token, value in scored.items())


def test_every_kind_of_token_was_looked_at(answers_of: dict[str, dict[str, Answer]]) -> None:
    scored = [answer for name, answer in answers_of["raw_logprobs"].items() if PARAMS[name].logprob_token_ids]
    assert {kind for answer in scored for kind in answer.kinds} == set(TokenKind)
    assert all(answer.num_drafted > 0 for answer in scored), "speculation stays on"


def test_scoring_changes_no_token(tiny_folder: Path) -> None:
    for drafter in ({}, {"drafter": NO_DRAFTS}):
        texts = []
        for ids in ((), (3,), EVERY_ID):
            engine = tiny_engine(tiny_folder, **drafter)
            engine.add(Request("a", PROMPT, SamplingParams(logprob_token_ids=ids, **LONG), seed=5))
            texts.append(run(engine)["a"].token_ids)
        assert texts[0] == texts[1] == texts[2]


def test_an_id_that_is_no_token_is_refused_at_the_door(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder)
    with pytest.raises(InvalidRequest) as refused:
        engine.add(Request("a", PROMPT, SamplingParams(logprob_token_ids=(3, VOCAB))))
    assert refused.value.field == "logprob_token_ids"
    assert not engine.has_work


def test_all_is_gathered_from_the_one_matrix() -> None:
    logits, after = torch.randn(3, 7), torch.randn(3, 7)
    for mode in MODES:
        matrix = mode_matrix(mode, logits, after)
        host = gather_logprobs(matrix, torch.tensor([0, 4, 6]), 7, torch.tensor([[1, 2], [0, 0], [6, 5]])).to_host()
        for row, (own, ids) in enumerate(((0, (1, 2)), (4, ()), (6, (6,)))):
            entry = host.entry(row, own, 7, ids)
            assert entry.logprob == float(matrix[row, own])
            assert entry.scored == tuple((token, float(matrix[row, token])) for token in ids)
            assert dict(entry.top) == {token: float(matrix[row, token]) for token in range(7)}
