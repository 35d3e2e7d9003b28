"""Faults that real systems shipped, each put back into an engine by `install(engine)`. For audits and tests only.

Ids are those of the fault catalogue. A mutant changes one behaviour of one engine instance and nothing else.
"""

import copy
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from serve_app.backends.base import ChatPrompt
from serve_app.openai.choice import ChoiceRun
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.plan import Planned
from serve_app.openai.replies import ChoiceDelta, TokenEntry, Usage
from speculative.config import DrafterConfig
from speculative.drafting.base import DraftOutput
from speculative.engine import EngineCore
from speculative.kernels.bindings import Kernels
from speculative.request import FinishReason, Request, SamplingParams, Structure, TokenDelta, TokenLogprobs
from speculative.sampling.draft_probs import Drawn, PointMass
from speculative.sampling.probs import draw
from speculative.sampling.rng import Purpose, uniforms
from speculative.sampling.token_wise import verify_token_wise
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.sampling.verify_rows import VerifyRows
from speculative.scheduling.scheduler import Scheduler
from speculative.selfcheck import terms
from speculative.state import sequence as sequence_module
from speculative.state.batch import Batch, StepInput
from speculative.state.prefix import hash_block
from speculative.state.sequence import Sequence
from speculative.state.tree_input import TreeInput
from speculative.stats import StepStats
from speculative.step import host_copy, sampler
from tools.faults.traffic import WARM

Install = Callable[[EngineCore], None]
FrontInstall = Callable[[FrontEnd], None]
FRONT_END = "front end"
"""The traffic of faults between a client's request and the engine."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, and the traffic in which it shows.

    install: takes the engine; of `FRONT_END` the front end before it.
    traffic: one of `TABLES` or `DECODERS`, or `FRONT_END`.
    settings: of the engine, where the fault needs some.
    place: "referee" = the engine that replays has the fault, too; "self-checks" = they have it, and the engine is
        sound.
    """

    name: str
    install: Callable[[Any], None]
    traffic: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: Literal["engine", "referee", "self-checks"] = "engine"

    @property
    def fault(self) -> str:
        """Its id in the catalogue."""
        return self.name.split()[0]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str,
    traffic: str = "sampled",
    *,
    place: Literal["engine", "referee", "self-checks"] = "engine",
    **settings: Any,
) -> Callable[[Install], Install]:
    """Register a mutant."""

    def register(install: Install) -> Install:
        MUTANTS[name] = Mutant(name, install, traffic, settings, place)
        return install

    return register


def front_mutant(name: str) -> Callable[[FrontInstall], FrontInstall]:
    """Register a mutant of the front end."""

    def register(install: FrontInstall) -> FrontInstall:
        MUTANTS[name] = Mutant(name, install, FRONT_END)
        return install

    return register


def _wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Have another function called for a method of this object; it gets the method before the arguments."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def _change_input(engine: EngineCore, change: Callable[[StepInput, Batch], StepInput]) -> None:
    """Have the forward pass of this engine see another input than the rest of the step."""
    forward = engine.runner.forward_with_features
    batches: list[Batch] = []
    propose = engine.drafter.propose

    def remember(batch: Batch) -> DraftOutput:
        batches[:] = [batch]
        return propose(batch)

    engine.drafter.propose = remember  # type: ignore[method-assign]
    engine.runner.forward_with_features = (  # type: ignore[method-assign]
        lambda step_input, capture: forward(change(step_input, batches[0]), capture)
    )


def _change_draft(engine: EngineCore, change: Callable[[DraftOutput], DraftOutput]) -> None:
    """Have the drafter say something else than it did."""
    _wrap(engine.drafter, "propose", lambda propose, batch: change(propose(batch)))


def _change_distribution(engine: EngineCore, change: Callable[[Tensor], Tensor]) -> None:
    """Have the drafter tell other probabilities [D, V] than it drew from."""

    def changed(draft: DraftOutput) -> DraftOutput:
        return (
            replace(draft, draft_probs=Drawn(change(draft.draft_probs.probs)))
            if isinstance(draft.draft_probs, Drawn)
            else draft
        )

    _change_draft(engine, changed)


def _change_step(engine: EngineCore, change: Callable[[VerifyInput], VerifyInput]) -> None:
    """Have the verifier see something else than the rest of the step."""
    original = engine.parts.sampler.verify_uncoupled
    engine.parts.sampler.verify_uncoupled = lambda step: original(change(step))


def _zero_imported(engine: EngineCore, name: str, places: Any) -> None:
    """Have zeros stand in these places of what a handoff brings."""

    def inserting(insert: Any, request: Request, blob: Any) -> None:
        insert(request, blob)
        sequence = engine.scheduler.find(request.request_id)
        if sequence is not None and sequence.imported is not None:
            sections = {"kv": sequence.imported.kv, **sequence.imported.extra}
            if name in sections:
                sections[name][places] = 0

    _wrap(engine, "insert", inserting)


# -- state that crosses a boundary ---------------------------------------------------------------------------------


@mutant("F1 stale drafts near the length limit", "requests", max_model_len=96)
def _stale_drafts_at_the_limit(engine: EngineCore) -> None:
    """A step in which drafts no longer fit reads the last draft of the step before instead of the pending token."""
    last_draft: dict[str, int] = {}

    def change(step_input: StepInput, batch: Batch) -> StepInput:
        ids = step_input.input_ids.copy()
        counts = iter(step_input.draft_counts.tolist())
        for entry, row in zip(batch.entries, step_input.row_starts.tolist(), strict=False):
            count = next(counts) if entry.samples else 0
            name = entry.sequence.request.request_id
            if count:
                last_draft[name] = int(ids[row + count])
            elif entry.sequence.decoding and entry.max_drafts == 0 and name in last_draft:
                ids[row] = last_draft[name]
        return replace(step_input, input_ids=ids)

    _change_input(engine, change)


@mutant("F5 a reused slot's last token after a handoff", "handoffs")
def _stale_slot_after_handoff(engine: EngineCore) -> None:
    """The first step after a handoff reads the last token of whoever finished before."""
    previous: list[int] = []
    fresh: set[str] = set()

    def inserting(insert: Any, request: Request, blob: Any) -> None:
        insert(request, blob)
        fresh.add(request.request_id)

    def committing(commit: Any, batch: Batch, result: Any) -> list[TokenDelta]:
        deltas: list[TokenDelta] = commit(batch, result)
        previous.extend(delta.token_ids[-1] for delta in deltas if delta.finished and delta.token_ids)
        return deltas

    def change(step_input: StepInput, batch: Batch) -> StepInput:
        ids = step_input.input_ids.copy()
        for entry, row in zip(batch.entries, step_input.row_starts.tolist(), strict=False):
            if entry.sequence.request.request_id in fresh:
                fresh.discard(entry.sequence.request.request_id)
                ids[row] = previous[-1] if previous else ids[row]
        return replace(step_input, input_ids=ids)

    _wrap(engine, "insert", inserting)
    _wrap(engine.scheduler, "commit", committing)
    _change_input(engine, change)


@mutant("F13 the handoff's last position is not computed", "handoffs")
def _handoff_without_last_position(engine: EngineCore) -> None:
    _zero_imported(engine, "kv", np.s_[-1:])


@mutant("F13 the handoff drops the drafter's keys and values", "drafted handoffs")
def _handoff_without_drafter_kv(engine: EngineCore) -> None:
    _zero_imported(engine, "drafter_kv", np.s_[:])


@mutant("F14 blocks of the prefix cache lack the drafter's keys and values", "drafted requests")
def _cached_blocks_without_drafter_kv(engine: EngineCore) -> None:
    """Shared rows of the target are right; the drafter believes that its own are there."""
    drafter: Any = engine.drafter

    def state_of(find: Any, sequence: Sequence) -> Any:
        known = drafter._states.get(sequence.request.request_id)
        if (state := find(sequence)) is not known:
            drafter.cache.data[:, :, engine._slots(sequence, 0, sequence.num_shared)] = 0
        return state

    _wrap(drafter, "_state", state_of)


@mutant("F14 a block of the prefix cache holds other tokens", "requests")
def _wrong_cached_block(engine: EngineCore) -> None:
    def finding(find: Any, hashes: Any) -> list[int]:
        found = find(hashes)
        return found if len(found) < 2 else [*found[:-1], found[0]]

    _wrap(engine.scheduler.pool, "find", finding)


@mutant("F14 a block's name leaves out what stands before it", "requests")
def _name_without_the_prefix(engine: EngineCore) -> None:
    def names(_: Any, sequence: Sequence, num_tokens: int, block_size: int) -> list[bytes]:
        ends = range(block_size, num_tokens + 1, block_size)
        return [hash_block(b"", sequence.tokens[end - block_size : end]) for end in ends]

    _patch_module(engine, Sequence, "block_hashes", names)


@mutant("F14 blocks of the prefix cache are shared with requests of another cache_salt", "salted requests")
def _name_without_the_salt(engine: EngineCore) -> None:
    """No answer shows it: the keys and values are those that the request would have computed."""
    _patch_module(engine, sequence_module, "chain_root", lambda chain_root, scope: chain_root(""))


@mutant("F14 a block is shared before its last token is computed", "conversations")
def _block_shared_too_soon(engine: EngineCore) -> None:
    """Harmless as long as the sequence goes on: its next step computes the token. After an abort there is none."""

    def publishing(publish: Any, sequence: Sequence) -> None:
        known = min(len(sequence.tokens), len(sequence.blocks) * engine.config.block_size)
        computed, sequence.num_computed = sequence.num_computed, known
        publish(sequence)
        sequence.num_computed = computed

    _wrap(engine.scheduler, "publish", publishing)


@mutant("F5 the step after an abort reads the last token of the request that left", "drafted requests")
def _stale_slot_after_an_abort(engine: EngineCore) -> None:
    left: list[int] = []

    def aborting(abort: Callable[[str], bool], request_id: str) -> bool:
        sequence = engine.scheduler.find(request_id)
        left.extend([] if sequence is None else sequence.tokens[-1:])
        return abort(request_id)

    def change(step_input: StepInput, batch: Batch) -> StepInput:
        ids = step_input.input_ids.copy()
        for entry, row in zip(batch.entries, step_input.row_starts.tolist(), strict=False):
            if left and entry.sequence.decoding:
                ids[row] = left[-1]
        left.clear()
        return replace(step_input, input_ids=ids)

    _wrap(engine, "abort", aborting)
    _change_input(engine, change)


@mutant("F15 a preemption repeats the random numbers of the round before it", "drafted requests", kv_cache_tokens=192)
def _random_numbers_again_after_a_preemption(engine: EngineCore) -> None:
    last: dict[str, tuple[int, np.ndarray[Any, Any]]] = {}

    def numbering(number: Any, step_input: StepInput, host: Kernels | None) -> VerifyRows:
        rows: VerifyRows = number(step_input, host)
        for index, entry in enumerate(step_input.sampled_entries):
            own, name = step_input.verify_entries == index, entry.sequence.request.request_id
            admission, before = last.get(name, (entry.sequence.admission, None))
            if before is not None and admission < entry.sequence.admission:
                common = min(before.shape[1], int(own.sum()))
                rows.uniforms[:, np.flatnonzero(own)[:common]] = before[:, :common]
            last[name] = entry.sequence.admission, rows.uniforms[:, own]
        return rows

    _patch_module(engine, VerifyRows, "of", numbering)


@mutant("F20 the prefix cache outlives an update of the weights", "switched requests")
def _prefix_cache_outlives_an_update(engine: EngineCore) -> None:
    engine.scheduler.pool.drop_prefixes = lambda: None  # type: ignore[method-assign]


@mutant("F20 running requests keep the keys and values of old weights through an update", "switched requests")
def _kept_through_an_update(engine: EngineCore) -> None:
    engine.scheduler.reset = engine.scheduler.pool.drop_prefixes  # type: ignore[method-assign]


@mutant("F28 the drafter keeps its weights through an update", "drafted switched requests")
def _drafter_of_old_weights(engine: EngineCore) -> None:
    drafter: Any = engine.drafter
    model, switch = drafter.model, engine.switch
    engine.switch = (  # type: ignore[method-assign]
        lambda weights, version: switch(replace(weights, draft_model=model), version)
    )


@mutant("F30 positions shift by one behind token 32, in the referee, too", "requests", place="referee")
def _shifted_positions(engine: EngineCore) -> None:
    def shifted(forward: Any, step_input: StepInput, capture: Any) -> Any:
        return forward(replace(step_input, positions=step_input.positions + (step_input.positions > 32)), capture)

    _wrap(engine.runner, "forward_with_features", shifted)


@mutant("F15 penalties forget what was said before a preemption", "requests", kv_cache_tokens=192, max_model_len=160)
def _preemption_loses_penalties(engine: EngineCore) -> None:
    def preempting(preempt: Any, sequence: Sequence) -> None:
        preempt(sequence)
        if sequence.rules is not None:
            sequence.rules = _Amnesic(sequence.rules, sequence.num_output)  # type: ignore[assignment]

    _wrap(engine.scheduler, "_preempt", preempting)


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


@mutant("F3 draft probabilities of an earlier step")
def _q_of_an_earlier_step(engine: EngineCore) -> None:
    """From the second draft of a round on q is what an earlier step left in the buffer."""
    buffer: list[DraftOutput] = []

    def change(draft: DraftOutput) -> DraftOutput:
        before = buffer[-1] if buffer else draft
        buffer[:] = [draft]
        if not isinstance(draft.draft_probs, Drawn) or not isinstance(before.draft_probs, Drawn):
            return draft
        offsets = np.concatenate([np.arange(count) for count in draft.counts.tolist()])
        rows = min(len(draft.draft_probs.probs), len(before.draft_probs.probs))
        stale = torch.from_numpy(offsets[:rows] > 0)[:, None]
        probs = torch.cat(
            [
                torch.where(stale, before.draft_probs.probs[:rows], draft.draft_probs.probs[:rows]),
                draft.draft_probs.probs[rows:],
            ]
        )
        return replace(draft, draft_probs=Drawn(probs))

    _change_draft(engine, change)


@mutant("F4 draft probabilities in another order")
def _q_in_another_order(engine: EngineCore) -> None:
    _change_distribution(engine, lambda probs: probs.roll(1, 0))


@mutant("F4 draft probabilities never reach the verifier")
def _q_is_lost(engine: EngineCore) -> None:
    _change_step(engine, lambda step: replace(step, draft_probs=PointMass()))


@mutant("F6 draft and residual share their noise")
def _shared_noise(engine: EngineCore) -> None:
    def change(step: VerifyInput) -> VerifyInput:
        seeds = step.seeds.numpy().astype(np.uint64)
        starts = (step.positions - step.offsets).numpy().astype(np.uint64)
        offsets = step.offsets.numpy().astype(np.uint64)
        noise = torch.from_numpy(uniforms(seeds, starts, offsets, np.full_like(seeds, Purpose.DRAFT)))
        return replace(step, sample_uniforms=torch.where(step.judged, noise, step.sample_uniforms))

    _change_step(engine, change)


@mutant("F6 the coin is used again for the residual")
def _coin_for_residual(engine: EngineCore) -> None:
    _change_step(engine, lambda step: replace(step, sample_uniforms=step.accept_uniforms))


@mutant("F7 q at another temperature")
def _q_at_another_temperature(engine: EngineCore) -> None:
    def change(probs: Tensor) -> Tensor:
        sharper = probs**1.1
        return sharper / sharper.sum(-1, keepdim=True)

    _change_distribution(engine, change)


@mutant("F7 q before the filters, drafts sampled after them")
def _q_before_filters(engine: EngineCore) -> None:
    drafter: Any = engine.drafter
    floor = drafter.q.topk(min(20, drafter.q.shape[1] // 2), dim=-1).values[:, -1:]
    drafter.cdf = torch.where(drafter.q >= floor, drafter.q, 0.0).double().cumsum(-1).numpy()


@mutant("F7 drafts cut short by the token that was sampled")
def _trimmed_drafts(engine: EngineCore) -> None:
    """A drafter that gives up where it happened to draw something unlikely."""

    def change(draft: DraftOutput) -> DraftOutput:
        assert isinstance(draft.draft_probs, Drawn)
        likely = draft.draft_probs.probs.gather(1, torch.from_numpy(draft.token_ids)[:, None])[:, 0].numpy() > 0.02
        ends = np.split(likely, np.cumsum(draft.counts)[:-1])
        kept = [int(np.argmin(np.append(run, False))) for run in ends]
        rows = np.concatenate([np.arange(len(run)) < count for run, count in zip(ends, kept, strict=True)])
        chosen = torch.from_numpy(rows)
        return DraftOutput(np.array(kept, np.int64), draft.token_ids[rows], Drawn(draft.draft_probs.probs[chosen]))

    _change_draft(engine, change)


@mutant("F8 every draft is accepted a twentieth more often")
def _accepts_too_often(engine: EngineCore) -> None:
    _change_step(engine, lambda step: replace(step, accept_uniforms=step.accept_uniforms / 1.05))


@mutant("F8 argmax match at T > 0")
def _argmax_match(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        accepted = step.leading(step.drafts == step.probs.argmax(-1))
        rows = step.first_rows + accepted
        return VerifyOutput(accepted, draw(step.probs[rows], step.sample_uniforms[rows]), accepted.float())

    engine.parts.sampler.verify_uncoupled = verify


@mutant("F8 the residual is drawn from p")
def _residual_from_p(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        output = verify_token_wise(step)
        rows = step.first_rows + output.num_accepted
        return replace(output, token_ids=draw(step.probs[rows], step.sample_uniforms[rows]))

    engine.parts.sampler.verify_uncoupled = verify


@mutant("F12 the first draft is committed unverified")
def _first_draft_unverified(engine: EngineCore) -> None:
    def verify(step: VerifyInput) -> VerifyOutput:
        surely = step.probs.scatter(1, step.drafts.clamp(min=0)[:, None], 1.0)
        first = (step.judged & (step.offsets == 0))[:, None]
        return verify_token_wise(replace(step, probs=torch.where(first, surely, step.probs), draft_probs=PointMass()))

    engine.parts.sampler.verify_uncoupled = verify


@mutant("F12 the token after an accepted run is dropped")
def _recovered_token_is_dropped(engine: EngineCore) -> None:
    def without_last(results_per_entry: Any, *args: Any) -> Any:
        return [
            one._replace(token_ids=one.token_ids[:-1]) if one.num_accepted else one for one in results_per_entry(*args)
        ]

    _patch_module(engine, sampler, "results_per_entry", without_last)


@mutant("F16 a corrupt q accepts whatever was drafted")
def _corrupt_q(engine: EngineCore) -> None:
    _change_distribution(engine, lambda probs: probs.where(probs.argmax(-1, keepdim=True) % 7 > 0, torch.nan))


@mutant("F18 every draft counts as accepted")
def _flattering_metric(engine: EngineCore) -> None:
    engine.stats = engine.scheduler.stats = _Flattering()


class _Flattering(StepStats):
    """Counts that are always 100 %."""

    def count_round(self, num_drafted: int, num_accepted: int, times: int = 1) -> None:
        super().count_round(num_drafted, num_drafted, times)


@mutant("F19 a dead drafter")
def _dead_drafter(engine: EngineCore) -> None:
    propose, vocab_size = engine.drafter.propose, engine.model.vocab_size

    def proposing(batch: Batch) -> DraftOutput:
        draft = propose(batch)
        drafts = [[(token * 7919 + 13) % vocab_size for token in run] for run in draft.per_entry()]
        return DraftOutput.pack(drafts, PointMass())

    engine.drafter.propose = proposing  # type: ignore[method-assign]


@mutant("F20 a drafter of other weights than its target was updated to")
def _drafter_of_other_weights(engine: EngineCore) -> None:
    drafter: Any = engine.drafter
    drafter.q = drafter.q.roll(1, 0)
    drafter.cdf = drafter.q.double().cumsum(-1).numpy()


@mutant("F26 q is lost at its source")
def _q_is_lost_at_its_source(engine: EngineCore) -> None:
    """Drafts are sampled, and their distribution is forgotten on the way to the step."""
    _change_draft(engine, lambda draft: replace(draft, draft_probs=None))  # type: ignore[arg-type]


@mutant("F26 sampled drafts are declared deterministic")
def _drawn_drafts_said_to_be_chosen(engine: EngineCore) -> None:
    """The verifier and the self-checks read the same point mass: lossless, and slow for no visible reason."""
    _change_draft(engine, lambda draft: replace(draft, draft_probs=PointMass()))


def _reuse_uniforms(engine: EngineCore, which: int) -> None:
    """Every other round of a request gets the accept (0) or sample (1) uniforms of the round before, where it has as
    many rows; whoever checks them is given the same."""
    last: dict[str, np.ndarray[Any, Any]] = {}

    def numbering(number: Any, step_input: StepInput, host: Kernels | None) -> VerifyRows:
        rows: VerifyRows = number(step_input, host)
        for index, entry in enumerate(step_input.sampled_entries):
            own = step_input.verify_entries == index
            before = last.pop(entry.sequence.request.request_id, None)
            if before is None:
                last[entry.sequence.request.request_id] = rows.uniforms[which, own]
            elif len(before) == own.sum():
                rows.uniforms[which, own] = before
        return rows

    _patch_module(engine, VerifyRows, "of", numbering)


@mutant("F24 accept uniforms of the round before")
def _accept_uniforms_again(engine: EngineCore) -> None:
    _reuse_uniforms(engine, 0)


@mutant("F24 sample uniforms of the round before", "deterministic")
def _sample_uniforms_again(engine: EngineCore) -> None:
    _reuse_uniforms(engine, 1)


@mutant("F23 the residual is drawn from p, and every client sends one seed", "one seed")
def _residual_from_p_with_one_seed(engine: EngineCore) -> None:
    _residual_from_p(engine)


@mutant("F29 the temperature counts twice behind the last draft of a round", "close")
def _temperature_twice_on_the_bonus(engine: EngineCore) -> None:
    def giving(of_rows: Any, rows: VerifyRows, probs: Tensor, draft_probs: Any) -> VerifyInput:
        step: VerifyInput = of_rows(rows, probs, draft_probs)
        sharper = probs ** (1 / WARM.temperature)
        last = (~step.judged & (step.offsets > 0))[:, None]
        return replace(step, probs=torch.where(last, sharper / sharper.sum(-1, keepdim=True), probs))

    _patch_module(engine, VerifyRows, "input", giving)


@mutant("F31 rounding counts where a term is certain", "uniform", place="self-checks")
def _rounding_counts(engine: EngineCore) -> None:
    """Terms as they were before: p(y) - sum(p^2) of tokens that are equally likely differs from 0 by rounding, always
    to the same side."""
    _change_ops(engine, "take_terms", lambda _, *args, **rest: terms.take_terms(*args, **rest))
    _patch_module(engine, terms, "_minus", lambda _, values, mean: values - mean)


@mutant("F32 drafting stops at a coin that would hardly accept", "deterministic")
def _stops_at_a_high_coin(engine: EngineCore) -> None:
    """It saves drafts, and has those that are judged accepted too often."""

    def fitting(fit: Any, sequence: Sequence, budget: int) -> tuple[int, int]:
        offsets = np.arange(fit(sequence, budget)[0], dtype=np.uint64)
        seeds, starts = np.full_like(offsets, sequence.request.seed), np.full_like(offsets, len(sequence.tokens))
        coins = uniforms(seeds, starts, offsets, np.full_like(offsets, Purpose.COIN))
        count = int(np.append(coins > 0.7, True).argmax())
        return count, count

    _wrap(engine.scheduler, "_fit_drafts", fitting)


@mutant("F33 uniforms of 16 bits")
def _uniforms_of_16_bits(engine: EngineCore) -> None:
    """Tokens and rejections less likely than 2**-17 never come, and no mean shows it."""

    def numbering(number: Any, step_input: StepInput, host: Kernels | None) -> VerifyRows:
        rows: VerifyRows = number(step_input, host)
        rows.uniforms[:] = (np.floor(rows.uniforms * 2**16) + 0.5) / 2**16
        return rows

    _patch_module(engine, VerifyRows, "of", numbering)


# -- sampling parameters, logprobs, ends ---------------------------------------------------------------------------


def _patch_module(engine: EngineCore, module: Any, name: str, call: Callable[..., Any]) -> None:
    """Have another function called for one of a module or class, but only while this engine steps. It gets the original
    before the arguments."""
    original = getattr(module, name)

    def stepping(step: Callable[[], list[TokenDelta]]) -> list[TokenDelta]:
        # A function, not a partial: of a class it has to become a method.
        setattr(module, name, lambda *args, **rest: call(original, *args, **rest))
        try:
            return step()
        finally:
            setattr(module, name, original)

    _wrap(engine, "step", stepping)


def _change_ops(engine: EngineCore, name: str, call: Callable[..., Any]) -> None:
    """Have another function called for an operation of the target's rows, with the operation before the arguments; the
    drafter keeps its own."""
    ops: Any = copy.copy(engine.parts.sampler.ops)
    _wrap(ops, name, call)
    engine.parts.sampler.ops = ops


@mutant("F9 sampling parameters skipped on drafted positions", "requests")
def _parameters_on_first_row_only(engine: EngineCore) -> None:
    def adjusting(adjust: Any, logits: Any, contexts: Any, *rest: Any) -> Any:
        adjusted = adjust(logits, contexts, *rest)
        first = torch.tensor([not context.drafts for context in contexts])
        return torch.where(first[:, None], adjusted, logits)

    _patch_module(engine, sampler, "adjust", adjusting)


@mutant("F9 penalties blind to the round's own drafts", "requests")
def _penalties_blind_to_drafts(engine: EngineCore) -> None:
    def adjusting(adjust: Any, logits: Any, contexts: Any, *rest: Any) -> Any:
        return adjust(logits, [replace(context, drafts=()) for context in contexts], *rest)

    _patch_module(engine, sampler, "adjust", adjusting)


@mutant("F9 the structure is skipped on drafted positions", "drafted requests")
def _structure_on_first_row_only(engine: EngineCore) -> None:
    def without(contexts_of: Any, step_input: Any, masks: Any) -> Any:
        return [replace(one, allowed=None) if one.drafts else one for one in contexts_of(step_input, masks)]

    _patch_module(engine, sampler, "row_contexts", without)


@mutant("F9 penalties are skipped where nothing else is asked for", "drafted requests")
def _penalties_alone_are_skipped(engine: EngineCore) -> None:
    def without(params: SamplingParams) -> SamplingParams:
        alone = not (params.greedy or params.filtered)
        if not alone:
            return params
        return replace(params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)

    _change_params(engine, without)


@mutant("F9 a bad word is forbidden one token too late", "requests")
def _bad_words_one_token_late(engine: EngineCore) -> None:
    """Once it was said, its last token may not be said again."""
    _change_params(
        engine, lambda params: replace(params, bad_words=tuple((*word, word[-1]) for word in params.bad_words))
    )


@front_mutant("F9 the structure is lost between client and engine")
def _structure_is_lost(front_end: FrontEnd) -> None:
    _change_groups(
        front_end,
        lambda group: tuple(replace(one, params=replace(one.params, structure=None)) for one in group),
    )


@front_mutant("F9 calls are held to no schema of their tools")
def _calls_without_schemas(front_end: FrontEnd) -> None:
    _change_parameters(front_end, lambda known: [{} for _ in known])


@front_mutant("F9 calls are held to another tool's schema")
def _schemas_of_other_tools(front_end: FrontEnd) -> None:
    _change_parameters(front_end, lambda known: [*known[1:], *known[:1]])


def _change_parameters(front_end: FrontEnd, change: Callable[[list[Any]], list[Any]]) -> None:
    """Have calls forced into other JSON schemas than those of the client's tools."""

    def answering(answers: Any, chat: ChatPrompt, prompt: Any, form: Structure | None) -> Any:
        functions = [tool["function"] for tool in chat.tools]
        changed = zip(functions, change([one["parameters"] for one in functions]), strict=True)
        tools = tuple({"function": {**function, "parameters": parameters}} for function, parameters in changed)
        return answers(replace(chat, tools=tools), prompt, form)

    _wrap(front_end._chats, "answers", answering)


@front_mutant("F21 one choice too few is generated")
def _one_choice_too_few(front_end: FrontEnd) -> None:
    _change_groups(front_end, lambda group: group[: max(1, len(group) - 1)])


@front_mutant("F21 a stop string is lost")
def _last_stop_string_is_lost(front_end: FrontEnd) -> None:
    _change_job(front_end, lambda job: replace(job, stops=job.stops[:-1]))


@front_mutant("F21 only the first stop string is kept")
def _first_stop_string_only(front_end: FrontEnd) -> None:
    _change_job(front_end, lambda job: replace(job, stops=job.stops[:1]))


@front_mutant("F11 the echo begins one character late")
def _echo_begins_late(front_end: FrontEnd) -> None:
    def late(job: Planned) -> Planned:
        echoed = tuple(replace(one, text=one.text[1:]) for one in job.prompted.echoed)
        return replace(job, prompted=replace(job.prompted, echoed=echoed))

    _change_job(front_end, late)


def _change_job(front_end: FrontEnd, change: Callable[[Planned], Planned]) -> None:
    """Have requests taken in as others."""

    async def preparing(prepare: Any, *args: Any, **rest: Any) -> Planned:
        return change(await prepare(*args, **rest))

    _wrap(front_end, "prepare", preparing)


def _change_groups(front_end: FrontEnd, change: Callable[[tuple[Request, ...]], tuple[Request, ...]]) -> None:
    """Have the front end ask the engine for something else than the client's choices."""
    _wrap(front_end._planner, "_group", lambda group, *args: change(group(*args)))


def _change_each(front_end: FrontEnd, change: Callable[[Request], Request]) -> None:
    """Have each of a client's choices be another request."""
    _change_groups(front_end, lambda group: tuple(map(change, group)))


Change = Callable[[ChoiceDelta, Planned], ChoiceDelta]


def _change_pieces(front_end: FrontEnd, change: Change) -> None:
    """Have something else go out than was made of the engine's tokens."""

    async def changing(pieces: Any, job: Planned, run: ChoiceRun) -> AsyncGenerator[ChoiceDelta | None, None]:
        async for piece in pieces(job, run):
            yield None if piece is None else change(piece, job)

    _wrap(front_end, "_pieces", changing)


def _change_usage(front_end: FrontEnd, change: Callable[[Usage], Usage]) -> None:
    """Have tokens counted in another way."""

    def counting(pieces: Any, job: Planned, run: ChoiceRun) -> Any:
        _wrap(run, "usage", lambda usage: change(usage()))
        return pieces(job, run)

    _wrap(front_end, "_pieces", counting)


def _entries_of_the_row_before(change: Callable[[TokenEntry, TokenEntry], TokenEntry]) -> Change:
    """Have each token's entry changed by what the entry before it says."""
    last: dict[int, TokenEntry] = {}

    def changed(piece: ChoiceDelta, job: Planned) -> ChoiceDelta:
        entries, made = piece.logprobs or (), list[TokenEntry]()
        for entry in entries:
            made.append(change(entry, last.get(piece.index, entry)))
            last[piece.index] = entry
        return piece if piece.logprobs is None else piece._replace(logprobs=tuple(made))

    return changed


_IN_REPLIES: dict[str, Change] = {
    "F21 a text is cut one character before its stop string": lambda piece, job: (
        piece._replace(text=piece.text[:-1]) if isinstance(piece.stop_reason, str) else piece
    ),
    "F21 an answer that max_tokens cut is said to have stopped": lambda piece, job: (
        piece._replace(finish_reason="stop") if piece.finish_reason == "length" else piece
    ),
    "F21 another stop string is named": lambda piece, job: (
        piece._replace(stop_reason=job.stops[-1]) if isinstance(piece.stop_reason, str) else piece
    ),
    "F21 choices change places": lambda piece, job: (
        piece._replace(index=1 - piece.index) if job.head.num_choices == 2 else piece
    ),
    "F9 the second call is lost": lambda piece, job: piece._replace(
        calls=tuple(one for one in piece.calls if one.index == 0)
    ),
    "F10 ids of a reply are one too high": lambda piece, job: piece._replace(
        token_ids=tuple(token + 1 for token in piece.token_ids)
    ),
    "F10 logprobs of the row before, in the reply alone": _entries_of_the_row_before(
        lambda entry, before: replace(entry, logprob=before.logprob)
    ),
    "F10 likeliest tokens of the row before, in the reply alone": _entries_of_the_row_before(
        lambda entry, before: replace(entry, top=before.top)
    ),
}
_IN_REQUESTS: dict[str, Callable[[Request], Request]] = {
    "F9 min_tokens is lost": lambda one: replace(one, params=replace(one.params, min_tokens=0)),
    "F9 the last of the biases is lost": lambda one: replace(
        one, params=replace(one.params, logit_bias=one.params.logit_bias[:-1])
    ),
    "F27 filters are lost in front of the engine where no logprobs are asked for": lambda one: (
        one if one.params.returns_logprobs else replace(one, params=replace(one.params, top_k=0, top_p=1.0))
    ),
}
for _name, _change in _IN_REPLIES.items():
    front_mutant(_name)(partial(_change_pieces, change=_change))
for _name, _changed in _IN_REQUESTS.items():
    front_mutant(_name)(partial(_change_each, change=_changed))


@front_mutant("F17 all choices have the seed of the first")
def _one_seed_for_all(front_end: FrontEnd) -> None:
    _change_groups(front_end, lambda group: tuple(replace(one, seed=group[0].seed) for one in group))


@front_mutant("F18 tokens of rejected drafts are counted")
def _rejected_are_counted(front_end: FrontEnd) -> None:
    _change_usage(
        front_end, lambda usage: replace(usage, completion_tokens=usage.completion_tokens + usage.rejected_tokens)
    )


@front_mutant("F18 a prompt is counted one token short")
def _prompt_counted_short(front_end: FrontEnd) -> None:
    _change_usage(front_end, lambda usage: replace(usage, prompt_tokens=usage.prompt_tokens - 1))


@mutant("F27 no filters where no logprobs are asked for", "requests")
def _no_filters_without_logprobs(engine: EngineCore) -> None:
    def without(params: SamplingParams) -> SamplingParams:
        return params if params.returns_logprobs else replace(params, top_k=0, top_p=1.0, min_p=0.0)

    _change_params(engine, without)


def _change_params(engine: EngineCore, change: Callable[[SamplingParams], SamplingParams]) -> None:
    """Have the engine read other parameters than the client sent."""
    _wrap(engine, "add", lambda add, request, **rest: add(replace(request, params=change(request.params)), **rest))


@mutant("F2 scored ids gathered from the logits", "requests")
def _scores_from_logits(engine: EngineCore) -> None:
    def gathering(gather: Any, matrix: Any, token_ids: Any, num_top: int, scored_ids: Any = None) -> Any:
        rows = gather(matrix, token_ids, num_top, scored_ids)
        return replace(rows, scored=rows.scored + 9.0)

    _patch_module(engine, host_copy, "gather_logprobs", gathering)


def _change_entries(
    engine: EngineCore, change: Callable[[tuple[TokenLogprobs, ...]], tuple[TokenLogprobs, ...]]
) -> None:
    def drawing_entries(results_per_entry: Any, *args: Any) -> Any:
        return [
            one if one.logprobs is None else one._replace(logprobs=change(one.logprobs))
            for one in results_per_entry(*args)
        ]

    _patch_module(engine, sampler, "results_per_entry", drawing_entries)


@mutant("F10 logprob 0 for every token", "requests")
def _zero_logprobs(engine: EngineCore) -> None:
    _change_entries(engine, lambda entries: tuple(replace(entry, logprob=0.0) for entry in entries))


def _shifted(nats: float) -> Install:
    """Reported logprobs are so much too low, as if another normalizer were subtracted from the logits."""

    def shift(entry: TokenLogprobs) -> TokenLogprobs:
        top, scored = (tuple((token, own - nats) for token, own in part) for part in (entry.top, entry.scored))
        return replace(entry, logprob=entry.logprob - nats, top=top, scored=scored)

    return lambda engine: _change_entries(engine, lambda entries: tuple(map(shift, entries)))


for _nats in (0.04, 0.005):
    mutant(f"F10 every logprob {_nats} nats too low", "requests")(_shifted(_nats))


@mutant("F10 logprobs for the first token of a run only", "requests")
def _first_logprob_only(engine: EngineCore) -> None:
    _change_entries(engine, lambda entries: entries[:1])


@mutant("F10 logprobs of another row", "requests")
def _logprobs_of_another_row(engine: EngineCore) -> None:
    _patch_module(engine, host_copy, "gather_logprobs", lambda gather, matrix, *rest: gather(matrix.roll(1, 0), *rest))


@mutant("F10 ids of other tokens beside the likeliest tokens' logprobs", "requests")
def _ids_of_other_tokens(engine: EngineCore) -> None:
    _change_entries(engine, lambda entries: tuple(_renamed(entry, engine.model.vocab_size) for entry in entries))


def _renamed(entry: TokenLogprobs, vocab_size: int) -> TokenLogprobs:
    """With other ids among the likeliest. Values, order, the own token and those that are scored are right: no two of
    its numbers disagree."""
    known = {entry.token_id, *(token for token, _ in entry.scored)}
    free = (token for token in range(vocab_size) if token not in {*known, *(one for one, _ in entry.top)})
    top = tuple((token if token in known else next(free), value) for token, value in entry.top)
    return replace(entry, top=top)


@mutant("F10 scored ids of the row before", "requests")
def _scored_ids_of_the_row_before(engine: EngineCore) -> None:
    """In an engine that does not compare what it reports of one row: its contract would see some of them."""
    engine.scheduler._contract = None

    def gathering(gather: Any, matrix: Any, token_ids: Any, num_top: int, scored_ids: Any = None) -> Any:
        rows = gather(matrix, token_ids, num_top, scored_ids)
        return rows if scored_ids is None else replace(rows, scored=matrix.roll(1, 0).gather(1, scored_ids))

    _patch_module(engine, host_copy, "gather_logprobs", gathering)


@mutant("F11 the prompt's likeliest tokens go by other ids", "requests")
def _prompt_ids_of_other_tokens(engine: EngineCore) -> None:
    def scoring(score: Any, entry: Any, row_start: int, hidden: Any, *parts: Any) -> Any:
        logprobs, replayed = score(entry, row_start, hidden, *parts)
        return tuple(_renamed(one, engine.model.vocab_size) for one in logprobs), replayed

    _wrap(engine.parts.eager.scorer, "score", scoring)


@mutant("F10 logits modified in place", "requests")
def _logits_modified_in_place(engine: EngineCore) -> None:
    def processing(process: Any, logits: Any, rows: Any) -> Any:
        logits.copy_(process(logits, rows))
        return logits

    _change_ops(engine, "process", processing)


@mutant("F11 prompt logprobs damaged at chunk borders", "requests")
def _prompt_logprobs_at_chunk_borders(engine: EngineCore) -> None:
    def scoring(score: Any, entry: Any, row_start: int, hidden: Any, *parts: Any) -> Any:
        later_chunk = entry.sequence.num_computed > 0
        return score(entry, row_start, hidden.roll(1, 0) if later_chunk else hidden, *parts)

    _wrap(engine.parts.eager.scorer, "score", scoring)


@mutant("F16 a row of NaN becomes a token", "requests")
def _nan_becomes_a_token(engine: EngineCore) -> None:
    """A kernel that now and then writes NaN, and nobody who looks for it."""
    logits, calls = engine.runner.logits, itertools.count(1)

    def spoiling(hidden: Tensor) -> Tensor:
        rows = logits(hidden)
        return rows.index_fill(0, torch.tensor([0]), torch.nan) if next(calls) % 50 == 0 else rows

    def overlooking(broken_rows: Any, step: Any, verified: Any, emitted: Any, highest: Any, outside: Any) -> Any:
        return broken_rows(step, verified, emitted, torch.zeros_like(highest), outside)

    engine.runner.logits = spoiling  # type: ignore[method-assign]
    _change_ops(engine, "broken_rows", overlooking)


@mutant("F17 unseeded requests share a stream", "requests")
def _shared_seed(engine: EngineCore) -> None:
    _wrap(engine, "add", lambda add, request, **rest: add(replace(request, seed=0), **rest))


@mutant("F21 a stop inside an accepted run is overlooked", "stopping")
def _stop_inside_a_run(engine: EngineCore) -> None:
    until_stop = Scheduler._until_stop

    def last_only(sequence: Sequence, token_ids: tuple[int, ...]) -> Any:
        kept, reason = until_stop(engine.scheduler, sequence, token_ids)
        if reason is FinishReason.STOP and kept < len(token_ids):
            return until_stop(engine.scheduler, sequence, (*(-1 for _ in token_ids[:-1]), token_ids[-1]))
        return kept, reason

    engine.scheduler._until_stop = last_only  # type: ignore[method-assign]


@mutant("F25 one token beyond the model's length", "requests", max_model_len=96)
def _one_token_too_many(engine: EngineCore) -> None:
    """The end of an answer is computed with a limit that is one too high."""
    until_stop = Scheduler._until_stop

    def one_too_many(sequence: Sequence, token_ids: tuple[int, ...]) -> Any:
        engine.scheduler._max_model_len += 1
        try:
            return until_stop(engine.scheduler, sequence, token_ids)
        finally:
            engine.scheduler._max_model_len -= 1

    engine.scheduler._until_stop = one_too_many  # type: ignore[method-assign]


@mutant("F25 a limit that is one too high for the whole engine", "requests", max_model_len=96)
def _limit_one_too_high(engine: EngineCore) -> None:
    """The commit's check is blind with the rest: only another engine refuses what comes of it."""
    engine.scheduler._max_model_len += 1


@mutant("F22 speculation silently off while logprobs are asked for", "requests")
def _no_drafts_with_logprobs(engine: EngineCore) -> None:
    def fitting(fit: Any, sequence: Sequence, budget: int) -> tuple[int, int]:
        found: tuple[int, int] = fit(sequence, budget)
        return found if sequence.params.logprobs is None else (0, 0)

    _wrap(engine.scheduler, "_fit_drafts", fitting)


# -- trees of drafts -----------------------------------------------------------------------------------------------

_TREES: Mapping[str, Any] = {
    "drafter": DrafterConfig(kind="draft_model", model="toy", num_draft_tokens=2, tree=(3, 2)),
    "verifier": "coupled",
    "max_batched_tokens": 128,
}


@mutant("F34 keys and values of a chosen sibling stay where it was drafted", "drafted requests", **_TREES)
def _siblings_stay(engine: EngineCore) -> None:
    engine.cache.move = lambda sources, targets: None  # type: ignore[method-assign]


@mutant("F34 rows of a tree have the positions of a chain", "drafted requests", **_TREES)
def _positions_by_row(engine: EngineCore) -> None:
    def forward_by_row(forward: Any, rows: StepInput, capture: Any) -> Any:
        counts = np.diff(rows.row_starts).tolist()
        spans = [own.num_computed + np.arange(count) for own, count in zip(rows.sequences, counts, strict=True)]
        return forward(replace(rows, positions=np.concatenate(spans)), capture)

    _wrap(engine.runner, "forward_with_features", forward_by_row)


@mutant("F34 drafts attend to their elder siblings' branches", "drafted requests", **_TREES)
def _attention_to_siblings(engine: EngineCore) -> None:
    _patch_module(engine, TreeInput, "attention_rows", lambda _, rows: StepInput.attention_rows(rows))
