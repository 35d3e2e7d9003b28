"""The contract of logprobs: each way to break it is seen and named, and breaks one request only."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import speculative.step.host_copy
from speculative.config import LogprobsMode
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprobs
from speculative.sampling.logprob_checks import LogprobContract, violation
from speculative.sampling.logprobs import LogprobRows, gather_logprobs
from speculative.stats import LOGPROB_RULES
from speculative.step import prompt_scorer
from tests.support.engines import assert_idle, run, tiny_engine

VOCAB = 32
ASKED = SamplingParams(logprobs=3, logprob_token_ids=(9, 4))
GOOD = TokenLogprobs(4, -1.25, 2, ((7, -0.75), (4, -1.25), (1, -3.0)), ((9, -5.0), (4, -1.25)))
INF = math.inf


def changed(**changes: Any) -> TokenLogprobs:
    return dataclasses.replace(GOOD, **changes)


def judge(entry: TokenLogprobs, mode: LogprobsMode = "raw_logprobs", asked: SamplingParams = ASKED) -> str | None:
    return violation(entry, mode, asked.logprobs or 0, asked.logprob_token_ids, vocab_size=VOCAB)


BROKEN = {
    "NaN": (changed(logprob=math.nan), "not_finite"),
    "the emitted token is masked": (changed(logprob=-INF), "not_finite"),
    "a candidate is masked": (changed(top=((7, -0.75), (4, -1.25), (1, -INF))), "not_finite"),
    "a scored token is NaN": (changed(scored=((9, math.nan), (4, -1.25))), "not_finite"),
    "a scored token is masked where nothing masks": (changed(scored=((9, -INF), (4, -1.25))), "not_finite"),
    "above 0": (changed(logprob=2e-6), "positive"),
    "a scored logit": (changed(scored=((9, 3.5), (4, -1.25))), "positive"),
    "twice in top": (changed(top=((7, -0.75), (7, -0.75), (4, -1.25))), "duplicate"),
    "not sorted": (changed(top=((4, -1.25), (7, -0.75), (1, -3.0))), "order"),
    "top says otherwise of the token": (changed(logprob=-1.26, scored=((9, -5.0), (4, -1.26))), "disagreement"),
    "scored says otherwise of the token": (changed(scored=((9, -5.0), (4, -1.5))), "disagreement"),
    "scored says otherwise of a candidate": (
        dataclasses.replace(GOOD, top=((7, -0.75), (4, -1.25), (9, -3.0))),
        "disagreement",
    ),
    "a scored token should have been a candidate": (changed(scored=((9, -2.0), (4, -1.25))), "disagreement"),
    "the token should have been a candidate": (
        changed(token_id=2, logprob=-2.0, rank=3, scored=((9, -5.0), (4, -1.25))),
        "disagreement",
    ),
    "rank too low": (changed(rank=1), "rank"),
    "rank too high": (changed(rank=3), "rank"),
    "rank 0": (changed(rank=0), "rank"),
    "rank within, token beyond": (changed(token_id=2, logprob=-9.0, rank=3, scored=GOOD.scored), "rank"),
    "too few candidates": (changed(top=GOOD.top[:2]), "count"),
    "too many candidates": (changed(top=(*GOOD.top, (3, -4.0))), "count"),
    "a scored token missing": (changed(scored=((4, -1.25),)), "count"),
    "scored tokens in another order": (changed(scored=((4, -1.25), (9, -5.0))), "count"),
    "more than all": (
        changed(top=((7, -0.3), (4, -0.9), (1, -3.0)), logprob=-0.9, scored=((9, -5.0), (4, -0.9))),
        "mass",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_breach_has_its_name(name: str) -> None:
    entry, kind = BROKEN[name]
    assert judge(entry) == kind


def test_what_keeps_the_contract_passes() -> None:
    assert judge(GOOD) is None
    assert judge(changed(token_id=2, logprob=-9.0, rank=4)) is None
    assert judge(TokenLogprobs(4, 5e-7, 1), asked=SamplingParams(logprobs=0)) is None, "rounding may exceed 0"
    assert judge(TokenLogprobs(4, -30.0, VOCAB), asked=SamplingParams(logprobs=0)) is None
    only_scored = SamplingParams(logprob_token_ids=(4, 4, 8))
    assert judge(TokenLogprobs(8, -2.0, 3, (), ((4, -1.0), (4, -1.0), (8, -2.0))), asked=only_scored) is None


def test_a_rank_may_not_contradict_scored_tokens() -> None:
    asked = SamplingParams(logprob_token_ids=(1, 2))
    entry = TokenLogprobs(5, -3.0, 2, (), ((1, -1.0), (2, -2.0)))
    assert judge(entry, asked=asked) == "rank"
    assert judge(dataclasses.replace(entry, rank=3), asked=asked) is None


def test_ties_are_no_breach() -> None:
    top = ((7, -1.5), (4, -1.5), (1, -1.5))
    for token, in_top in ((7, True), (1, True), (9, False)):
        entry = TokenLogprobs(token, -1.5, 1, top)
        assert (token in dict(top)) is in_top
        assert judge(entry, asked=SamplingParams(logprobs=3)) is None


def test_masked_tokens_leave_the_candidates_only_where_something_masks() -> None:
    asked = SamplingParams(logprobs=5, logprob_token_ids=(4, 9))
    half = math.log(0.5)
    entry = TokenLogprobs(4, half, 1, ((4, half), (7, half)), ((4, half), (9, -INF)))
    assert judge(entry, "processed_logprobs", asked) is None
    assert judge(entry, "raw_logprobs", asked) == "not_finite"
    finite = dataclasses.replace(entry, scored=((4, half), (9, -20.0)))
    assert judge(finite, "raw_logprobs", asked) == "count"
    third = math.log(1 / 3)
    lost = TokenLogprobs(4, third, 1, ((4, third), (7, third)), ((4, third), (9, -INF)))
    assert judge(lost, "processed_logprobs", asked) == "count", "a third of the mass went untold"
    absent = dataclasses.replace(entry, token_id=8, rank=3, logprob=-40.0)
    assert judge(absent, "processed_logprobs", asked) == "count", "the emitted token was not masked"


def test_fewer_tokens_than_asked_for_are_all_there_are() -> None:
    entry = TokenLogprobs(1, math.log(0.25), 2, ((0, math.log(0.75)), (1, math.log(0.25))))
    assert violation(entry, "raw_logprobs", 20, (), vocab_size=2) is None
    assert violation(entry, "raw_logprobs", 20, (), vocab_size=VOCAB) == "count"


# -- whole deltas ---------------------------------------------------------------------------------------------------

CONTRACT = LogprobContract("raw_logprobs", VOCAB)
PLAIN = SamplingParams(logprobs=0, prompt_logprobs=0)
PROMPT = (1, 2, 3)


def plain(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -1.0, 2) for token in token_ids)


@pytest.mark.parametrize(
    ("delta", "kind"),
    [
        (TokenDelta("a", (5, 6), logprobs=plain(5, 6)), None),
        (TokenDelta("a", (5, 6), logprobs=plain(5)), "count"),
        (TokenDelta("a", (5,), logprobs=plain(5, 6)), "count"),
        (TokenDelta("a", (5,)), "count"),
        (TokenDelta("a", (), logprobs=plain(5)), "count"),
        (TokenDelta("a", (5, 6), logprobs=plain(6, 5)), "token"),
        (TokenDelta("a", (), prompt_logprobs=plain(2, 3)), None),
        (TokenDelta("a", (5,), logprobs=plain(5), prompt_logprobs=plain(2, 3)), None),
        (TokenDelta("a", (5,), logprobs=plain(5), prompt_logprobs=plain(2)), "count"),
        (TokenDelta("a", (), prompt_logprobs=plain(3, 2)), "token"),
        (TokenDelta("a", (), prompt_logprobs=(*plain(2), TokenLogprobs(3, 0.1, 1))), "positive"),
        (TokenDelta("a", finish_reason=FinishReason.ERROR, error="broken before"), None),
        (TokenDelta("a", finish_reason=FinishReason.STOP), None),
    ],
)
def test_a_delta_has_one_entry_a_token(delta: TokenDelta, kind: str | None) -> None:
    assert CONTRACT.first_violation(delta, Request("a", PROMPT, PLAIN)) == kind


def test_a_replay_is_checked_as_raw_logprobs_whatever_the_mode() -> None:
    request = Request("a", PROMPT, score_from=1)
    contract = LogprobContract("processed_logprobs", VOCAB)
    assert contract.first_violation(TokenDelta("a", logprobs=plain(2, 3)), request) is None
    assert contract.first_violation(TokenDelta("a", logprobs=plain(3)), request) == "count"
    assert (
        contract.first_violation(TokenDelta("a", logprobs=(TokenLogprobs(2, 4.0, 1), *plain(3))), request) == "positive"
    )


# -- through the engine ---------------------------------------------------------------------------------------------

LOOP = (5, 6, 7, 8) * 4


def add_mixed(tiny: Path, **asked: Any) -> Any:
    """Three requests that draft; only the victim asks for what is going to be wrong."""
    engine = tiny_engine(tiny)
    for name, extra in (("plain", {}), ("victim", asked), ("reported", {"logprobs": 2})):
        engine.add(Request(name, LOOP, SamplingParams(max_tokens=20, ignore_eos=True, **extra), seed=3))
    return engine


def scored_from_logits(matrix: torch.Tensor, *args: Any) -> LogprobRows:
    """F2: what vLLM #43125 did. Scored tokens are read out of other numbers than the rest."""
    rows = gather_logprobs(matrix, *args)
    return dataclasses.replace(rows, scored=rows.scored + 3.0)


def test_a_broken_gather_fails_its_request_alone(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = run(add_mixed(tiny_folder, logprob_token_ids=(4, 9)))
    monkeypatch.setattr(speculative.step.host_copy, "gather_logprobs", scored_from_logits)
    engine = add_mixed(tiny_folder, logprob_token_ids=(4, 9))
    answers = run(engine)
    victim = answers.pop("victim")
    assert victim.finish_reason is FinishReason.ERROR
    assert "contract" in (victim.error or "")
    assert victim.token_ids == [], "nothing of a broken delta is emitted"
    for name, answer in answers.items():
        assert answer.token_ids == healthy[name].token_ids
        assert answer.values == pytest.approx(healthy[name].values, abs=1e-4)
        assert answer.error is None
    assert_idle(engine)
    assert sum(engine.stats.logprob_violations.values()) == 1
    assert [one.request.request_id for one in engine.stats.evidence] == ["victim"]
    assert engine.take_stats().logprob_violations.keys() <= LOGPROB_RULES.keys()
    assert engine.stats.logprob_violations == {}


@pytest.mark.parametrize("prefill_only_after", [None, 0])
def test_broken_prompt_logprobs_fail_the_request_too(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, prefill_only_after: int | None
) -> None:
    monkeypatch.setattr(prompt_scorer, "mode_matrix", lambda mode, logits, _: logits)
    engine = tiny_engine(tiny_folder)
    engine.add(
        Request("victim", LOOP, SamplingParams(prompt_logprobs=3), seed=1), prefill_only_after=prefill_only_after
    )
    engine.add(Request("other", LOOP, SamplingParams(max_tokens=4, ignore_eos=True), seed=1))
    answers = run(engine)
    assert answers["victim"].finish_reason is FinishReason.ERROR
    assert answers["other"].finish_reason is FinishReason.LENGTH
    assert_idle(engine)
    assert engine.stats.logprob_violations == {"positive": 1}
