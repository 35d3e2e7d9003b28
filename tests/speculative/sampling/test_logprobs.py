"""Logprobs in both modes, with drafts: values are the model's own, and no two reports disagree (F2)."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.request import Request, SamplingParams, TokenKind
from speculative.sampling.logprobs import gather_logprobs, mode_matrix
from tests.support.engines import NO_DRAFTS, Answer, markov_engine, run, teacher_forced, tiny_engine

MODES = get_args(LogprobsMode)
VOCAB = 64
EVERY_ID = tuple(reversed(range(VOCAB)))
PROMPT = (5, 6, 7, 8) * 5
LONG = {"max_tokens": 24, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=20, logprob_token_ids=EVERY_ID, **LONG),
    "sampled": SamplingParams(temperature=0.6, logprobs=20, **LONG),
    "filtered": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, logprobs=10, logprob_token_ids=EVERY_ID, **LONG),
    "emitted only": SamplingParams(temperature=0.8, top_p=0.8, logprobs=0, **LONG),
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


def processed(raw: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """A naive float64 version of what temperature and filters make of log-probabilities [V]."""
    logits = raw.double() / (params.temperature or 1)
    if params.temperature and params.top_k:
        logits = logits.masked_fill(logits < logits.sort(descending=True).values[params.top_k - 1], -torch.inf)
    if params.temperature and params.top_p < 1:
        ranked = logits.softmax(-1).sort(descending=True).values
        floor = ranked[(ranked.cumsum(-1) - ranked < params.top_p).sum() - 1]
        logits = logits.masked_fill(logits.softmax(-1) < floor, -torch.inf)
    return logits


@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_of_teacher_forcing(
    tiny_folder: Path, answers_of: dict[str, dict[str, Answer]], mode: str
) -> None:
    """For tokens of every kind alike."""
    engine, found = tiny_engine(tiny_folder), answers_of[mode]
    assert {kind for answer in found.values() for kind in answer.kinds} == set(TokenKind)
    for name in ("greedy", "sampled", "filtered", "emitted only"):
        raw = teacher_forced(engine, PROMPT, found[name].token_ids)
        for row, entry in zip(raw, found[name].logprobs, strict=True):
            reference = row.double() if mode == "raw_logprobs" else processed(row, PARAMS[name])
            reference = reference.log_softmax(-1)
            assert len(entry.top) == min(PARAMS[name].logprobs or 0, int((reference > -torch.inf).sum()))
            for token, value in ((entry.token_id, entry.logprob), *entry.top):
                assert abs(reference[token] - value) < 1e-4
            assert entry.rank == int((reference > reference[entry.token_id] + 1e-9).sum()) + 1


def test_more_likely_tokens_than_there_are_gives_them_all() -> None:
    engine = markov_engine(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]))
    engine.add(Request("a", (0, 1), SamplingParams(max_tokens=3, logprobs=20), seed=0))
    answer = run(engine)["a"]
    assert answer.error is None
    assert [len(entry.top) for entry in answer.logprobs] == [3, 3, 3]
    assert math.isclose(dict(answer.logprobs[0].top)[1], math.log(0.6), abs_tol=1e-5)


def test_ranks_count_the_strictly_likelier() -> None:
    rows = gather_logprobs(torch.tensor([[3.0, 1.0, 3.0, 2.0]]).expand(4, -1), torch.arange(4), 2)
    assert rows.ranks.tolist() == [1, 4, 1, 3]
    assert rows.values.tolist() == [3, 1, 3, 2]
    assert rows.top_values.tolist() == [[3, 3]] * 4


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


def test_tokens_that_are_masked_score_minus_infinity_in_processed_modes_only(
    answers_of: dict[str, dict[str, Answer]],
) -> None:
    for mode in MODES:
        for entry in answers_of[mode]["masked"].logprobs:
            masked = {token for token, value in entry.scored if value == -math.inf}
            assert masked == ({*range(5), *range(30, VOCAB)} if mode.startswith("processed") else set())


def test_asking_for_logprobs_or_scores_changes_no_token(tiny_folder: Path) -> None:
    for drafter in ({}, {"drafter": NO_DRAFTS}):
        texts = []
        for asked in (
            {},
            {"logprobs": 0},
            {"logprobs": 20},
            {"logprob_token_ids": (3,)},
            {"logprob_token_ids": EVERY_ID},
        ):
            engine = tiny_engine(tiny_folder, **drafter)
            engine.add(Request("a", PROMPT, SamplingParams(**asked, **LONG), seed=5))
            answer = run(engine)["a"]
            texts.append(answer.token_ids)
            assert drafter or answer.num_drafted > 0, "speculation stays on"
        assert texts == texts[:1] * 5


def test_all_is_gathered_from_the_one_matrix() -> None:
    logits, after = torch.randn(3, 7), torch.randn(3, 7)
    copies = logits.clone(), after.clone()
    for mode in MODES:
        matrix = mode_matrix(mode, logits, after)
        host = gather_logprobs(matrix, torch.tensor([0, 4, 6]), 7, torch.tensor([[1, 2], [0, 0], [6, 5]])).to_host()
        for row, (own, ids) in enumerate(((0, (1, 2)), (4, ()), (6, (6,)))):
            entry = host.entry(row, own, 7, ids)
            assert entry.logprob == float(matrix[row, own])
            assert entry.scored == tuple((token, float(matrix[row, token])) for token in ids)
            assert dict(entry.top) == {token: float(matrix[row, token]) for token in range(7)}
    assert torch.equal(logits, copies[0]) and torch.equal(after, copies[1]), "nothing is changed in place"
