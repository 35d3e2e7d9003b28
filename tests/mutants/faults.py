"""Faults that real systems shipped, each put back into an engine by `install(engine)`.

Ids are those of the fault catalogue. A mutant changes one behaviour of one engine instance and nothing else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from speculative import drawing, outcome
from speculative.batch import Batch, Layout
from speculative.draft_law import Dense, PointMass
from speculative.drafting import DraftOutput
from speculative.engine import EngineCore
from speculative.request import FinishReason, Request, TokenDelta, TokenLogprobs
from speculative.rng import Purpose, uniforms
from speculative.sampling import draw
from speculative.scheduler import Scheduler
from speculative.sequence import Sequence
from speculative.verification.base import VerifyInput, VerifyOutput
from speculative.verification.block import verify_block
from speculative.verification.token_wise import verify_token_wise

Install = Callable[[EngineCore], None]
MUTANTS: dict[str, Install] = {}


def mutant(name: str) -> Callable[[Install], Install]:
    def register(install: Install) -> Install:
        MUTANTS[name] = install
        return install

    return register


def _change_layout(engine: EngineCore, change: Callable[[Layout, Batch], Layout]) -> None:
    """Have the forward pass of this engine see another layout than the rest of the step."""
    forward = engine.runner.forward
    batches: list[Batch] = []
    propose = engine.drafter.propose

    def remember(batch: Batch) -> DraftOutput:
        batches[:] = [batch]
        return propose(batch)

    engine.drafter.propose = remember  # type: ignore[method-assign]
    engine.runner.forward = lambda layout: forward(change(layout, batches[0]))  # type: ignore[method-assign]


def _change_step(engine: EngineCore, change: Callable[[VerifyInput], VerifyInput], verify: Any = None) -> None:
    original = verify or engine.drawer.verify
    engine.drawer.verify = lambda step: original(change(step))


# -- state that crosses a boundary ---------------------------------------------------------------------------------


@mutant("F1 stale drafts near the length limit")
def _stale_drafts_at_the_limit(engine: EngineCore) -> None:
    """Where drafts no longer fit, the step runs on the last draft of the step before instead of the pending token."""
    last_draft: dict[str, int] = {}

    def change(layout: Layout, batch: Batch) -> Layout:
        ids = layout.input_ids.copy()
        counts = iter(layout.draft_counts.tolist())
        for entry, row in zip(batch.entries, layout.row_starts.tolist(), strict=False):
            count = next(counts) if entry.draws else 0
            name = entry.sequence.request.request_id
            if count:
                last_draft[name] = int(ids[row + count])
            elif entry.sequence.decoding and entry.max_drafts == 0 and name in last_draft:
                ids[row] = last_draft[name]
        return replace(layout, input_ids=ids)

    _change_layout(engine, change)


@mutant("F5 a reused slot's last token after a handoff")
def _stale_slot_after_handoff(engine: EngineCore) -> None:
    """The first step after a handoff reads the last token of whoever finished before."""
    previous: list[int] = []
    fresh: set[str] = set()
    insert, commit = engine.insert, engine.scheduler.commit

    def inserting(request: Request, blob: Any) -> None:
        insert(request, blob)
        fresh.add(request.request_id)

    def committing(batch: Batch, result: Any) -> list[TokenDelta]:
        deltas = commit(batch, result)
        previous.extend(delta.token_ids[-1] for delta in deltas if delta.finished and delta.token_ids)
        return deltas

    def change(layout: Layout, batch: Batch) -> Layout:
        ids = layout.input_ids.copy()
        for entry, row in zip(batch.entries, layout.row_starts.tolist(), strict=False):
            if entry.sequence.request.request_id in fresh:
                fresh.discard(entry.sequence.request.request_id)
                ids[row] = previous[-1] if previous else ids[row]
        return replace(layout, input_ids=ids)

    engine.insert = inserting  # type: ignore[method-assign]
    engine.scheduler.commit = committing  # type: ignore[method-assign]
    _change_layout(engine, change)


@mutant("F15 penalties forget what was said before a preemption")
def _preemption_loses_penalties(engine: EngineCore) -> None:
    preempt = engine.scheduler._preempt

    def preempting(sequence: Sequence) -> None:
        preempt(sequence)
        if sequence.rules is not None:
            sequence.rules = _Amnesic(sequence.rules, sequence.num_output)  # type: ignore[assignment]

    engine.scheduler._preempt = preempting  # type: ignore[method-assign]


class _Amnesic:
    """Rules that see the output without its first tokens."""

    def __init__(self, rules: Any, forgotten: int) -> None:
        self._rules, self._forgotten = rules, forgotten

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._rules, name)
        if not callable(value):
            return value
        return lambda output, *rest: value(output[self._forgotten :], *rest)


# -- verification --------------------------------------------------------------------------------------------------


@mutant("F4 draft probabilities in another order")
def _q_in_another_order(engine: EngineCore) -> None:
    def change(step: VerifyInput) -> VerifyInput:
        return replace(step, law=Dense(step.law.probs.roll(1, 0))) if isinstance(step.law, Dense) else step

    _change_step(engine, change)


@mutant("F4 draft probabilities never reach the verifier")
def _q_is_lost(engine: EngineCore) -> None:
    _change_step(engine, lambda step: replace(step, law=PointMass()))


@mutant("F6 draft and residual share their noise")
def _shared_noise(engine: EngineCore) -> None:
    def change(step: VerifyInput) -> VerifyInput:
        seeds = step.seeds.numpy().astype(np.uint64)
        starts = (step.positions - step.offsets).numpy().astype(np.uint64)
        offsets = step.offsets.numpy().astype(np.uint64)
        noise = torch.from_numpy(uniforms(seeds, starts, offsets, np.full_like(seeds, Purpose.DRAFT)))
        return replace(step, finals=torch.where(step.judged, noise, step.finals))

    _change_step(engine, change)


@mutant("F6 the coin is used again for the residual")
def _coin_for_residual(engine: EngineCore) -> None:
    _change_step(engine, lambda step: replace(step, finals=step.coins))


@mutant("F6 block verification with coins keyed by position")
def _coins_by_position(engine: EngineCore) -> None:
    def change(step: VerifyInput) -> VerifyInput:
        seeds, positions = (x.numpy().astype(np.uint64) for x in (step.seeds, step.positions))
        zeros = np.zeros_like(seeds)
        coins = uniforms(seeds, positions, zeros, zeros + np.uint64(Purpose.COIN))
        return replace(step, coins=torch.from_numpy(coins))

    _change_step(engine, change, verify_block)


@mutant("F7 q at another temperature")
def _q_at_another_temperature(engine: EngineCore) -> None:
    def change(step: VerifyInput) -> VerifyInput:
        if not isinstance(step.law, Dense):
            return step
        sharper = step.law.probs**1.3
        return replace(step, law=Dense(sharper / sharper.sum(-1, keepdim=True)))

    _change_step(engine, change)


@mutant("F8 argmax match at T > 0")
def _argmax_match(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        accepted = step.leading(step.drafts == step.probs.argmax(-1))
        rows = step.first_rows + accepted
        return VerifyOutput(accepted, draw(step.probs[rows], step.finals[rows]), accepted.float())

    engine.drawer.verify = verify


@mutant("F8 the residual is drawn from p")
def _residual_from_p(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        output = verify_token_wise(step)
        rows = step.first_rows + output.num_accepted
        return replace(output, token_ids=draw(step.probs[rows], step.finals[rows]))

    engine.drawer.verify = verify


@mutant("F12 the first draft is committed unverified")
def _first_draft_unverified(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        surely = step.probs.scatter(1, step.drafts.clamp(min=0)[:, None], 1.0)
        first = (step.judged & (step.offsets == 0))[:, None]
        return verify_token_wise(replace(step, probs=torch.where(first, surely, step.probs), law=PointMass()))

    engine.drawer.verify = verify


# -- sampling parameters, logprobs, ends ---------------------------------------------------------------------------


def _patch_module(engine: EngineCore, module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a module, but only while this engine steps."""
    step = engine.step
    original = getattr(module, name)

    def stepping() -> list[TokenDelta]:
        setattr(module, name, make(original))
        try:
            return step()
        finally:
            setattr(module, name, original)

    engine.step = stepping  # type: ignore[method-assign]


@mutant("F9 sampling parameters skipped on drafted positions")
def _parameters_on_first_row_only(engine: EngineCore) -> None:
    def make(adjust: Any) -> Any:
        def adjusting(logits: Any, contexts: Any, *rest: Any) -> Any:
            adjusted = adjust(logits, contexts, *rest)
            first = torch.tensor([not context.drafts for context in contexts])
            return torch.where(first[:, None], adjusted, logits)

        return adjusting

    _patch_module(engine, drawing, "adjust", make)


@mutant("F9 penalties blind to the round's own drafts")
def _penalties_blind_to_drafts(engine: EngineCore) -> None:
    def make(adjust: Any) -> Any:
        def adjusting(logits: Any, contexts: Any, *rest: Any) -> Any:
            return adjust(logits, [replace(context, drafts=()) for context in contexts], *rest)

        return adjusting

    _patch_module(engine, drawing, "adjust", make)


@mutant("F2 scored ids gathered from the logits")
def _scores_from_logits(engine: EngineCore) -> None:
    def make(gather: Any) -> Any:
        def gathering(matrix: Any, token_ids: Any, num_top: int, scored_ids: Any = None) -> Any:
            rows = gather(matrix, token_ids, num_top, scored_ids)
            return replace(rows, scored=rows.scored + 9.0)

        return gathering

    _patch_module(engine, outcome, "gather_logprobs", make)


def _change_entries(
    engine: EngineCore, change: Callable[[tuple[TokenLogprobs, ...]], tuple[TokenLogprobs, ...]]
) -> None:
    def make(drawn_per_entry: Any) -> Any:
        def drawing_entries(*args: Any) -> Any:
            return [
                one if one.logprobs is None else replace(one, logprobs=change(one.logprobs))
                for one in drawn_per_entry(*args)
            ]

        return drawing_entries

    _patch_module(engine, drawing, "drawn_per_entry", make)


@mutant("F10 logprob 0 for every token")
def _zero_logprobs(engine: EngineCore) -> None:
    _change_entries(engine, lambda entries: tuple(replace(entry, logprob=0.0) for entry in entries))


@mutant("F10 logprobs for the first token of a run only")
def _first_logprob_only(engine: EngineCore) -> None:
    _change_entries(engine, lambda entries: entries[:1])


@mutant("F10 logprobs of another row")
def _logprobs_of_another_row(engine: EngineCore) -> None:
    def make(gather: Any) -> Any:
        return lambda matrix, *rest: gather(matrix.roll(1, 0), *rest)

    _patch_module(engine, outcome, "gather_logprobs", make)


@mutant("F10 logits modified in place")
def _logits_modified_in_place(engine: EngineCore) -> None:
    def make(process: Any) -> Any:
        def processing(logits: Any, rows: Any) -> Any:
            logits.copy_(process(logits, rows))
            return logits

        return processing

    _patch_module(engine, drawing, "process", make)


@mutant("F11 prompt logprobs damaged at chunk borders")
def _prompt_logprobs_at_chunk_borders(engine: EngineCore) -> None:
    score = engine._score

    def scoring(entry: Any, row_start: int, hidden: Any) -> Any:
        later_chunk = entry.sequence.num_computed > 0
        return score(entry, row_start, hidden.roll(1, 0) if later_chunk else hidden)

    engine._score = scoring  # type: ignore[method-assign]


@mutant("F16 a row of NaN becomes a token")
def _nan_becomes_a_token(engine: EngineCore) -> None:
    def make(copy_to_host: Any) -> Any:
        return lambda verified, finite: copy_to_host(verified, torch.ones_like(finite))

    _patch_module(engine, drawing, "copy_to_host", make)


@mutant("F17 unseeded requests share a stream")
def _shared_seed(engine: EngineCore) -> None:
    add = engine.add
    engine.add = lambda request, **rest: add(replace(request, seed=0), **rest)  # type: ignore[method-assign]


@mutant("F21 a stop inside an accepted run is overlooked")
def _stop_inside_a_run(engine: EngineCore) -> None:
    until_stop = Scheduler._until_stop

    def last_only(sequence: Sequence, token_ids: tuple[int, ...]) -> Any:
        kept, reason = until_stop(engine.scheduler, sequence, token_ids)
        if reason is FinishReason.STOP and kept < len(token_ids):
            return until_stop(engine.scheduler, sequence, (*(-1 for _ in token_ids[:-1]), token_ids[-1]))
        return kept, reason

    engine.scheduler._until_stop = last_only  # type: ignore[method-assign]


@mutant("F22 speculation silently off while logprobs are asked for")
def _no_drafts_with_logprobs(engine: EngineCore) -> None:
    fit = engine.scheduler._fit_drafts
    engine.scheduler._fit_drafts = (  # type: ignore[method-assign]
        lambda sequence, budget: 0 if sequence.params.logprobs is not None else fit(sequence, budget)
    )
