"""Judges the rows of a plain step, from logits to one vector: the interface, and one by torch's operators."""

from dataclasses import fields
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.capture import copy_once
from speculative.gpu.filters import sampling_rows
from speculative.sampling.logprobs import gather_logprobs, mode_matrix
from speculative.selfcheck.invariants import outside_filters
from speculative.selfcheck.terms import TermScope
from speculative.verification.base import Verifier, VerifyInput
from speculative.verification.coupled import NoiseRows, accept_choice
from speculative.verification.draft_probs import Dense, DraftProbs, PointMass, SubVocabulary
from speculative.verification.mixed import merge
from speculative.vocabulary.ops import VocabularyOps


class RowFields(NamedTuple):
    """The rows, as in `VerifyInput`; all on the device.

    temperature: [R, 1] float32. greedy: [R] bool. log_min_p, top_p: [R] float32, and top_k: [R] int64, as in `Filters`.
    counted: [E] bool, entries whose terms count. coupled: [E] bool, entries that the coupled verifier judges. checked,
    reported: [1] bool, whether the terms of the self-checks are taken, and whether logprobs are returned; where not,
    anything stands in their place.
    """

    temperature: Tensor
    greedy: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    drafts: Tensor
    packed: Tensor
    entries: Tensor
    offsets: Tensor
    first_rows: Tensor
    counts: Tensor
    accept_uniforms: Tensor
    sample_uniforms: Tensor
    seeds: Tensor
    positions: Tensor
    counted: Tensor
    coupled: Tensor
    checked: Tensor
    reported: Tensor


class SampledFrom(NamedTuple):
    """Distributions that drafts were sampled from, where they lie.

    probs: [N, W] float32. places: [D] int64, its row for each packed draft. columns: [V] int32, its column for each
    token, -1 = none; None where W = V. ids: [W] int64, the token of each column. own_columns: [N] int64, that of the
    draft that was sampled from each row. mass_before: [N] float64, the row's mass before that draft.
    """

    probs: Tensor
    places: Tensor
    columns: Tensor | None
    ids: Tensor | None
    own_columns: Tensor
    mass_before: Tensor


class RowJudge(Protocol):
    """Verification of R rows of E entries over V tokens."""

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, tuple[str, ...]]:
        """Judge logits [R, V]; `sampled` is None where the drafts are deterministic, or there are none.

        Returns:
            One float64 vector: accepted drafts [E], last tokens [E], drafts [R], broken invariants [R], expected
            accepted drafts [E]; the logprobs' values [R] and ranks [R]; of the self-checks what could be accepted [1],
            and rows [3, R] and sums [C, S] of `Terms`; where drafts were sampled, q of each row's draft [R], its mass
            before that draft [R], and q of the last tokens [E], all 0 in rows without a draft. And the names of the C
            self-checks.
        """


class TorchJudge:
    """By torch's operators; p is a matrix, and everything is computed, wanted or not.

    Args:
        ops: over the vocabulary.
        mode: of the logprobs.
        block_drafts: how many drafts an entry may have, where entries that are not coupled are verified by block; None
            = token-wise.
    """

    def __init__(self, ops: VocabularyOps, mode: LogprobsMode, block_drafts: int | None = None) -> None:
        self._ops, self._mode, self._block_drafts = ops, mode, block_drafts
        self._verify: Verifier = ops.verify_token_wise if block_drafts is None else ops.verify_block
        self._verifier: Literal["token_wise", "block"] = "token_wise" if block_drafts is None else "block"

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, tuple[str, ...]]:
        """Implement `RowJudge`."""
        logits = logits.float()
        sampling = sampling_rows(rows._asdict())
        processed = self._ops.process(logits, sampling)
        step = _verify_input(
            self._ops.target_probs(processed, sampling), rows, _draft_probs(sampled), self._block_drafts
        )
        noise = NoiseRows(rows.coupled[rows.entries], rows.seeds, rows.positions)
        choice = self._ops.choose(step.probs, torch.zeros_like(rows.drafts), noise, None, logits.shape[1])
        verified = merge(rows.coupled, accept_choice(step, choice), self._verify(step))
        emitted = self._ops.emitted_at_rows(verified, step)
        outside = outside_filters(logits, sampling, emitted)
        broken = self._ops.broken_rows(step, verified, emitted, processed.amax(dim=-1), outside)
        reported = gather_logprobs(mode_matrix(self._mode, logits, processed), emitted, 0)
        terms = self._ops.take_terms(step, verified, emitted, TermScope(self._verifier, rows.counted, rows.coupled))
        parts = [verified.num_accepted, verified.token_ids, step.drafts, broken, verified.expected_accepted]
        parts += [reported.values, reported.ranks, terms.achievable, terms.rows, terms.sums]
        if sampled is not None:
            of_drafts, of_last, _ = self._ops.round_probs(step, verified, places=False)
            place = sampled.places[rows.packed.clamp(max=len(sampled.places) - 1)]
            parts += [of_drafts, torch.where(step.judged, sampled.mass_before[place], 0.0), of_last]
        return copy_once(parts), terms.checks


def _verify_input(probs: Tensor, rows: RowFields, draft_probs: DraftProbs, longest: int | None) -> VerifyInput:
    shared = {field.name for field in fields(VerifyInput)} & set(RowFields._fields)
    own = {name: getattr(rows, name) for name in shared}
    return VerifyInput(probs=probs, draft_probs=draft_probs, longest=longest, **own)


def _draft_probs(sampled: SampledFrom | None) -> DraftProbs:
    if sampled is None:
        return PointMass()
    probs = sampled.probs[sampled.places]
    return (
        Dense(probs) if sampled.ids is None else SubVocabulary(probs, sampled.ids, sampled.own_columns[sampled.places])
    )
