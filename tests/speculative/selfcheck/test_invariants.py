"""A broken invariant fails its request, is counted by its kind, and never becomes a token; the others go on."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculative.drafting.base import DraftOutput
from speculative.engine import EngineCore
from speculative.errors import EngineFault
from speculative.request import FinishReason, Request, SamplingParams
from speculative.sampling.draft_probs import Drawn
from speculative.sampling.probs import SamplingRows
from speculative.selfcheck.invariants import outside_filters
from speculative.state.batch import SequenceResult
from speculative.step import sampler
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.engines import Answer, answer_all
from tests.support.vocabulary import with_both_ops
from tools.faults.toy import table_engine

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, top_k=20, bad_words=((5,),))
Break = Callable[[EngineCore, pytest.MonkeyPatch], None]


def serve(engine: EngineCore) -> dict[str, Answer]:
    return answer_all(engine, [Request(f"r{number}", (number + 8,), PARAMS, seed=number + 1) for number in range(6)])


def in_drafts(change: Callable[[DraftOutput], DraftOutput]) -> Break:
    """Spoil the drafts of the second step that has any."""

    def install(engine: EngineCore, _: pytest.MonkeyPatch) -> None:
        propose, steps = engine.drafter.propose, []

        def proposing(batch: Any) -> Any:
            draft = propose(batch)
            steps.extend([draft] * bool(draft.token_ids.size))
            return change(draft) if len(steps) == 2 else draft

        engine.drafter.propose = proposing  # type: ignore[method-assign]

    return install


def in_first_row(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Break:
    """Spoil the first row of q, which is the oldest request's; `change` gets its draft, too."""

    def changed(draft: DraftOutput) -> DraftOutput:
        probs = draft.draft_probs.probs.clone()  # type: ignore[union-attr]
        probs[0] = change(probs[0], int(draft.token_ids[0]))
        return replace(draft, draft_probs=Drawn(probs))

    return in_drafts(changed)


def without(row: torch.Tensor, draft: int) -> torch.Tensor:
    others = row.index_fill(0, torch.tensor([draft]), 0.0)
    return others / others.sum()


def in_draws(change: Callable[[SequenceResult], SequenceResult]) -> Break:
    original = sampler.results_per_entry

    def changed(*args: Any) -> list[SequenceResult]:
        first, *others = original(*args)
        return [change(first), *others]

    return lambda engine, patch: patch.setattr(sampler, "results_per_entry", changed)


def rows_out_of_place(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine.parts.checked_sampler.sample

    def sampling_elsewhere(step_input: Any, *rest: Any) -> Any:
        positions = step_input.positions.copy()
        positions[0] += 1
        return sample(replace(step_input, positions=positions), *rest)

    engine.parts.checked_sampler.sample = sampling_elsewhere  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Break, str]] = {
    "q is no number": (in_first_row(lambda row, draft: row * torch.nan), "law"),
    "q of too much mass": (in_first_row(lambda row, draft: row * 1.1), "law"),
    "q without its draft": (in_first_row(without), "q_zero"),
    "q is lost": (in_drafts(lambda draft: replace(draft, draft_probs=None)), "q_missing"),  # type: ignore[arg-type]
    "q of one draft too few": (
        in_drafts(lambda draft: replace(draft, draft_probs=Drawn(draft.draft_probs.probs[1:]))),  # type: ignore[union-attr]
        "q_missing",
    ),
    "a token too few": (in_draws(lambda one: one._replace(num_accepted=one.num_accepted + 1)), "conservation"),
    "a bad word": (in_draws(lambda one: one._replace(token_ids=(*one.token_ids[:-1], 5))), "support"),
    "rows out of place": (rows_out_of_place, "positions"),
}


@with_both_ops
@pytest.mark.parametrize(("fault", "kind"), FAULTS.values(), ids=FAULTS)
def test_a_broken_invariant_fails_its_request(
    ops: VocabularyOps, fault: Break, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.assembly.choose_ops", lambda device: ops)
    engine = table_engine(64)
    sound = serve(engine)
    assert engine.take_stats().violations == {}
    engine = table_engine(64)
    fault(engine, monkeypatch)
    answers = serve(engine)
    failed = {name for name, answer in answers.items() if answer.finish_reason is FinishReason.ERROR}
    stats = engine.take_stats()
    assert set(stats.violations) == {kind}
    assert stats.violations[kind] == len(failed) > 0
    assert {one.request.request_id for one in stats.evidence} == failed
    for name, answer in answers.items():
        last = answer.deltas[-1]
        if name in failed:
            assert last.token_ids == ()
            assert "broke one of its invariants" in (last.error or "") and last.broken == kind
            assert answer.token_ids == sound[name].token_ids[: len(answer.token_ids)]
        else:
            assert answer.token_ids == sound[name].token_ids


def test_a_verification_is_never_begun_without_q() -> None:
    engine = table_engine(64)
    verified = []
    verify = engine.parts.sampler.verify_uncoupled
    engine.parts.sampler.verify_uncoupled = lambda step: verified.append(step) or verify(step)  # type: ignore[func-returns-value]
    serve(engine)
    step = next(step for step in verified if (step.drafts >= 0).any())
    for distribution in (None, Drawn(torch.empty(0, 64))):
        with pytest.raises(EngineFault, match=r"q is missing: \d+ drafts are to be verified"):
            replace(step, draft_probs=distribution)


def test_a_request_whose_rules_leave_no_token_is_reported_so() -> None:
    engine = table_engine(64)
    params = SamplingParams(max_tokens=4, allowed_token_ids=(7,), bad_words=((7,),))
    engine.add(Request("r", (3,), params))
    (delta,) = engine.step()
    assert delta.finish_reason is FinishReason.ERROR and "left no token" in (delta.error or "")
    assert engine.take_stats().violations == {}, "no invariant is broken"
    engine = table_engine(64)
    process = engine.parts.sampler.ops.process
    engine.parts.sampler.ops.process = lambda *of: process(*of).fill_(-math.inf)  # type: ignore[method-assign]
    engine.add(Request("r", (3,), SamplingParams(max_tokens=4)))
    (delta,) = engine.step()
    assert delta.broken == "not_finite" and engine.take_stats().violations == {"not_finite": 1}


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
