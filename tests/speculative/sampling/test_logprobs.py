"""One contract for logprobs in both modes: one entry a token, and no two reports that disagree."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.request import Request, SamplingParams, TokenKind
from speculative.sampling.logprobs import gather_logprobs, mode_matrix
from tests.support.engines import Answer, markov_engine, run, teacher_forced, tiny_engine

MODES = get_args(LogprobsMode)
PROMPT = (5, 6, 7, 8) * 5
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0, logprobs=5, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, temperature=0.6, logprobs=20, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=24, temperature=1.3, top_k=6, top_p=0.9, logprobs=10, ignore_eos=True),
    "emitted only": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.8, logprobs=0, ignore_eos=True),
    "unasked": SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True),
}


def answers(folder: Path, mode: str) -> dict[str, Answer]:
    engine = tiny_engine(folder, logprobs_mode=mode)
    for name, params in PARAMS.items():
        engine.add(Request(name, PROMPT, params, seed=11))
    return run(engine)


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
def test_every_entry_keeps_the_contract(tiny_folder: Path, mode: str) -> None:
    for name, answer in answers(tiny_folder, mode).items():
        params = PARAMS[name]
        if params.logprobs is None:
            assert answer.logprobs == []
            continue
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for entry in answer.logprobs:
            assert math.isfinite(entry.logprob)
            assert entry.rank >= 1
            assert len(entry.top) <= params.logprobs
            ids, values = [token for token, _ in entry.top], [value for _, value in entry.top]
            assert len(set(ids)) == len(ids)
            assert values == sorted(values, reverse=True)
            assert all(math.isfinite(value) for value in values), "masked tokens are left out"
            if entry.token_id in ids:
                assert dict(entry.top)[entry.token_id] == entry.logprob, "one matrix, one gather"
            if entry.rank <= len(entry.top):
                assert sum(value > entry.logprob for value in values) == entry.rank - 1
                assert values[entry.rank - 1] == entry.logprob
            distinct = dict(entry.top) | {entry.token_id: entry.logprob}
            assert entry.logprob <= 0
            assert sum(map(math.exp, distinct.values())) <= 1 + 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_of_teacher_forcing(tiny_folder: Path, mode: str) -> None:
    """For accepted, recovered and bonus tokens alike."""
    engine = tiny_engine(tiny_folder, logprobs_mode=mode)
    for name, answer in answers(tiny_folder, mode).items():
        raw = teacher_forced(engine, PROMPT, answer.token_ids)
        for row, entry in zip(raw, answer.logprobs, strict=False):
            reference = row.double() if mode == "raw_logprobs" else processed(row, PARAMS[name])
            reference = reference.log_softmax(-1)
            for token, value in ((entry.token_id, entry.logprob), *entry.top):
                assert abs(reference[token] - value) < 1e-4
            assert entry.rank == int((reference > reference[entry.token_id] + 1e-9).sum()) + 1


def test_every_kind_of_token_was_looked_at(tiny_folder: Path) -> None:
    kinds = {kind for answer in answers(tiny_folder, "raw_logprobs").values() for kind in answer.kinds}
    assert kinds == set(TokenKind)


def test_raw_logprobs_ignore_the_filters_and_processed_ones_follow_them(tiny_folder: Path) -> None:
    raw, filtered = (answers(tiny_folder, mode)["filtered"] for mode in ("raw_logprobs", "processed_logprobs"))
    assert raw.token_ids == filtered.token_ids
    assert all(len(entry.top) == 10 for entry in raw.logprobs)
    assert all(1 <= len(entry.top) <= 6 for entry in filtered.logprobs)
    assert raw.values != filtered.values


def test_asking_for_logprobs_changes_no_token(tiny_folder: Path) -> None:
    texts = []
    for logprobs in (None, 0, 20):
        engine = tiny_engine(tiny_folder)
        engine.add(Request("a", PROMPT, SamplingParams(max_tokens=24, logprobs=logprobs, ignore_eos=True), seed=5))
        answer = run(engine)["a"]
        texts.append(answer.token_ids)
        assert answer.num_drafted > 0, "speculation stays on"
    assert texts[0] == texts[1] == texts[2]


def test_more_likely_tokens_than_there_are_gives_them_all() -> None:
    engine = markov_engine(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]))
    engine.add(Request("a", (0, 1), SamplingParams(max_tokens=3, logprobs=20), seed=0))
    answer = run(engine)["a"]
    assert answer.error is None
    assert [len(entry.top) for entry in answer.logprobs] == [3, 3, 3]
    assert math.isclose(dict(answer.logprobs[0].top)[1], math.log(0.6), abs_tol=1e-5)


def test_matrices_are_made_again_and_never_in_place() -> None:
    logits, after = torch.randn(2, 5), torch.randn(2, 5)
    copies = logits.clone(), after.clone()
    for mode in MODES:
        gather_logprobs(mode_matrix(mode, logits, after), torch.tensor([0, 4]), 3)
    assert torch.equal(logits, copies[0])
    assert torch.equal(after, copies[1])


def test_ranks_count_the_strictly_likelier() -> None:
    rows = gather_logprobs(torch.tensor([[3.0, 1.0, 3.0, 2.0]]).expand(4, -1), torch.arange(4), 2)
    assert rows.ranks.tolist() == [1, 4, 1, 3]
    assert rows.values.tolist() == [3, 1, 3, 2]
    assert rows.top_values.tolist() == [[3, 3]] * 4
