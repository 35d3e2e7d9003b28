"""A broken invariant fails its request, is counted by its kind, and never becomes a token; the others go on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculative.drafting.base import DraftOutput
from speculative.engine import EngineCore
from speculative.errors import EngineFault
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta
from speculative.sampling.probs import SamplingRows
from speculative.selfcheck.invariants import outside_filters
from speculative.state.batch import SequenceResult
from speculative.step import sampler
from speculative.verification.draft_probs import Dense
from speculative.vocabulary.ops import VocabularyOps
from tests.support.vocabulary import with_both_ops
from tools.faults.toy import table_engine

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, top_k=20, bad_words=((5,),))
Break = Callable[[EngineCore, pytest.MonkeyPatch], None]


def serve(engine: EngineCore) -> dict[str, list[TokenDelta]]:
    for number in range(6):
        engine.add(Request(f"r{number}", (number + 8,), PARAMS, seed=number + 1))
    answers: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            answers.setdefault(delta.request_id, []).append(delta)
    return answers


def change_distribution(engine: EngineCore, change: Callable[[torch.Tensor], None]) -> None:
    """Spoil the first row of q, which is the oldest request's, once."""
    propose, spoiled = engine.drafter.propose, []

    def proposing(batch: Any) -> Any:
        draft = propose(batch)
        if not spoiled and draft.token_ids.size:
            spoiled.append(True)
            probs = draft.draft_probs.probs.clone()
            change(probs[0])
            draft = replace(draft, draft_probs=Dense(probs))
        return draft

    engine.drafter.propose = proposing  # type: ignore[method-assign]


def corrupt_q(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_distribution(engine, lambda row: row.fill_(torch.nan))


def q_of_too_much_mass(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_distribution(engine, lambda row: row.mul_(1.1))


def q_without_its_draft(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = engine.drafter.propose

    def proposing(batch: Any) -> Any:
        draft = propose(batch)
        if draft.token_ids.size:
            probs = draft.draft_probs.probs.clone()
            probs[0, draft.token_ids[0]] = 0
            draft = replace(draft, draft_probs=Dense(probs / probs.sum(-1, keepdim=True)))
        return draft

    engine.drafter.propose = proposing  # type: ignore[method-assign]


def change_propose(engine: EngineCore, change: Callable[[DraftOutput], DraftOutput]) -> None:
    """Spoil the drafts of the second step that has any, for all requests in it."""
    propose, steps = engine.drafter.propose, []

    def proposing(batch: Any) -> Any:
        draft = propose(batch)
        steps.extend([draft] * bool(draft.token_ids.size))
        return change(draft) if len(steps) == 2 else draft

    engine.drafter.propose = proposing  # type: ignore[method-assign]


def q_that_is_lost(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_propose(engine, lambda draft: replace(draft, draft_probs=None))  # type: ignore[arg-type]


def q_without_a_row(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_propose(engine, lambda draft: replace(draft, draft_probs=Dense(draft.draft_probs.probs[:0])))  # type: ignore[union-attr]


def q_of_one_draft_too_few(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_propose(engine, lambda draft: replace(draft, draft_probs=Dense(draft.draft_probs.probs[1:])))  # type: ignore[union-attr]


def change_drawn(monkeypatch: pytest.MonkeyPatch, change: Callable[[SequenceResult], SequenceResult]) -> None:
    original = sampler.results_per_entry

    def changed(*args: Any) -> list[SequenceResult]:
        first, *others = original(*args)
        return [change(first), *others]

    monkeypatch.setattr(sampler, "results_per_entry", changed)


def a_token_too_few(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_drawn(monkeypatch, lambda one: one._replace(num_accepted=one.num_accepted + 1))


def a_bad_word(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_drawn(monkeypatch, lambda one: one._replace(token_ids=(*one.token_ids[:-1], 5)))


def rows_out_of_place(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine.checked_sampler.sample

    def sampling_elsewhere(step_input: Any, *rest: Any) -> Any:
        positions = step_input.positions.copy()
        positions[0] += 1
        return sample(replace(step_input, positions=positions), *rest)

    engine.checked_sampler.sample = sampling_elsewhere  # type: ignore[method-assign]


def logits_of_nan(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = engine.runner.logits
    engine.runner.logits = lambda hidden: logits(hidden).index_fill(  # type: ignore[method-assign]
        0, torch.tensor([0]), torch.nan
    )


@with_both_ops
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (corrupt_q, "law"),
        (q_of_too_much_mass, "law"),
        (q_without_its_draft, "q_zero"),
        (q_that_is_lost, "q_missing"),
        (q_without_a_row, "q_missing"),
        (q_of_one_draft_too_few, "q_missing"),
        (a_token_too_few, "conservation"),
        (a_bad_word, "support"),
        (rows_out_of_place, "positions"),
        (logits_of_nan, "not_finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_invariant_fails_its_request(
    ops: VocabularyOps, fault: Break, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.engine.choose_ops", lambda device: ops)
    sound = serve(table_engine(64))
    engine = table_engine(64)
    fault(engine, monkeypatch)
    answers = serve(engine)
    failed = {name for name, deltas in answers.items() if deltas[-1].finish_reason is FinishReason.ERROR}
    stats = engine.take_stats()
    assert set(stats.violations) == {kind}
    assert stats.violations[kind] == len(failed) > 0
    for name, deltas in answers.items():
        said = [token for delta in deltas for token in delta.token_ids]
        expected = [token for delta in sound[name] for token in delta.token_ids]
        if name in failed:
            assert deltas[-1].token_ids == ()
            assert ("left no token" if kind == "no_token" else "broke one of its invariants") in (
                deltas[-1].error or ""
            )
            assert deltas[-1].broken == kind
            assert said == expected[: len(said)]
        else:
            assert said == expected


def test_one_token_beyond_the_longest_sequence_is_never_emitted() -> None:
    """Whatever reckons where an answer ends, the commit looks at what it comes to."""
    engine = table_engine(64, max_model_len=20)
    until_stop = engine.scheduler._until_stop

    def one_too_many(sequence: Any, token_ids: tuple[int, ...]) -> Any:
        engine.scheduler._max_model_len += 1
        try:
            return until_stop(sequence, token_ids)
        finally:
            engine.scheduler._max_model_len -= 1

    for limit in (20, 21):
        engine.add(Request("r", (9,), SamplingParams(max_tokens=40, ignore_eos=True), seed=3))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        said = sum(len(delta.token_ids) for delta in deltas)
        if limit == 20:
            assert (said, deltas[-1].finish_reason) == (19, FinishReason.LENGTH)
        else:
            assert said < 20
            assert (deltas[-1].finish_reason, deltas[-1].broken) == (FinishReason.ERROR, "length")
            assert "maximum sequence length" in (deltas[-1].error or "")
            assert engine.take_stats().violations == {"length": 1}
        engine.scheduler._until_stop = one_too_many  # type: ignore[method-assign]


def test_a_verification_is_never_begun_without_q() -> None:
    engine = table_engine(64)
    verified = []
    verify = engine.sampler.verify
    engine.sampler.verify = lambda step: verified.append(step) or verify(step)  # type: ignore[func-returns-value]
    serve(engine)
    step = next(step for step in verified if (step.drafts >= 0).any())
    for distribution in (None, Dense(torch.empty(0, 64))):
        with pytest.raises(EngineFault, match=r"q is missing: \d+ drafts are to be verified"):
            replace(step, draft_probs=distribution)


def test_filters_that_let_everything_through_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = table_engine(64)
    process = engine.ops.process
    monkeypatch.setattr(engine.ops, "process", lambda logits, rows: process(logits / 50, replace(rows, filters=None)))
    answers = serve(engine)
    assert {deltas[-1].finish_reason for deltas in answers.values()} == {FinishReason.ERROR}
    assert engine.take_stats().violations == {"support": len(answers)}


def test_a_request_whose_rules_leave_no_token_is_reported_so() -> None:
    engine = table_engine(64)
    params = SamplingParams(max_tokens=4, allowed_token_ids=(7,), bad_words=((7,),))
    engine.add(Request("r", (3,), params))
    (delta,) = engine.step()
    assert delta.finish_reason is FinishReason.ERROR
    assert engine.take_stats().violations == {"no_token": 1}


def test_the_sound_engine_breaks_none() -> None:
    engine = table_engine(64)
    assert all(deltas[-1].error is None for deltas in serve(engine).values())
    assert engine.take_stats().violations == {}


@with_both_ops
@pytest.mark.parametrize("vocab_size", [49_152, 151_936, 262_144])
@pytest.mark.parametrize("top_p", [0.9, 0.99, 0.999])
def test_what_a_filter_kept_of_a_large_vocabulary_is_not_called_outside(
    ops: VocabularyOps, vocab_size: int, top_p: float
) -> None:
    """The distribution of a large vocabulary adds up to 1 only within what float32 loses."""
    params = SamplingParams(temperature=0.3, top_p=top_p)
    rows = SamplingRows.build([params], vocab_size, torch.device("cpu"))
    assert rows.filters is not None
    source = torch.Generator().manual_seed(vocab_size)
    for _ in range(12):
        logits = torch.randn(1, vocab_size, generator=source)  # T = 0.3: a spread of 3.3 nats
        distribution = ops.target_probs(ops.process(logits.clone(), rows), rows)[0]
        kept = (distribution > 0).nonzero()[:, 0]
        edge = kept[distribution[kept].argsort()[:30]]
        for token in edge:
            assert not outside_filters(logits, rows, token[None]).any()
        left_out = logits[0].argmin()
        assert outside_filters(logits, rows, left_out[None]).all()
