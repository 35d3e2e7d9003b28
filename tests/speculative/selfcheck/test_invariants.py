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


def change_propose(engine: EngineCore, change: Callable[[DraftOutput], DraftOutput]) -> None:
    """Spoil the drafts of the second step that has any."""
    propose, steps = engine.drafter.propose, []

    def proposing(batch: Any) -> Any:
        draft = propose(batch)
        steps.extend([draft] * bool(draft.token_ids.size))
        return change(draft) if len(steps) == 2 else draft

    engine.drafter.propose = proposing  # type: ignore[method-assign]


def change_first_row(engine: EngineCore, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Spoil the first row of q, which is the oldest request's; `change` gets its draft, too."""

    def changed(draft: DraftOutput) -> DraftOutput:
        probs = draft.draft_probs.probs.clone()  # type: ignore[union-attr]
        probs[0] = change(probs[0], int(draft.token_ids[0]))
        return replace(draft, draft_probs=Dense(probs))

    change_propose(engine, changed)


def corrupt_q(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_first_row(engine, lambda row, draft: row * torch.nan)


def q_of_too_much_mass(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_first_row(engine, lambda row, draft: row * 1.1)


def q_without_its_draft(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(row: torch.Tensor, draft: int) -> torch.Tensor:
        others = row.index_fill(0, torch.tensor([draft]), 0.0)
        return others / others.sum()

    change_first_row(engine, without)


def q_that_is_lost(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    change_propose(engine, lambda draft: replace(draft, draft_probs=None))  # type: ignore[arg-type]


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


@with_both_ops
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (corrupt_q, "law"),
        (q_of_too_much_mass, "law"),
        (q_without_its_draft, "q_zero"),
        (q_that_is_lost, "q_missing"),
        (q_of_one_draft_too_few, "q_missing"),
        (a_token_too_few, "conservation"),
        (a_bad_word, "support"),
        (rows_out_of_place, "positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_invariant_fails_its_request(
    ops: VocabularyOps, fault: Break, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.engine.choose_ops", lambda device: ops)
    engine = table_engine(64)
    sound = serve(engine)
    assert engine.take_stats().violations == {}
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
            assert "broke one of its invariants" in (deltas[-1].error or "") and deltas[-1].broken == kind
            assert said == expected[: len(said)]
        else:
            assert said == expected


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


def test_a_request_whose_rules_leave_no_token_is_reported_so() -> None:
    engine = table_engine(64)
    params = SamplingParams(max_tokens=4, allowed_token_ids=(7,), bad_words=((7,),))
    engine.add(Request("r", (3,), params))
    (delta,) = engine.step()
    assert delta.finish_reason is FinishReason.ERROR and "left no token" in (delta.error or "")
    assert engine.take_stats().violations == {"no_token": 1}


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
