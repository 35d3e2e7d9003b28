"""Samples the tokens of a step on the device: from logits to p, from p and drafts to emitted tokens and their logprobs.

A few copies to the host end it. On the way the self-checks take their terms and check every invariant of a row.
"""

from dataclasses import replace
from itertools import compress
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from speculative.config import EngineConfig
from speculative.sampling.logits_processors import adjust
from speculative.sampling.logprobs import mode_matrix
from speculative.sampling.probs import LastRows, SamplingRows
from speculative.selfcheck.invariants import forbidden_by_rules, misplaced, outside_filters
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.rounds import contradicted, misdrafted, too_coarse, with_round_terms
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import SequenceResult, StepInput, StepOutcome, Terms, merge_outcomes, row_contexts
from speculative.state.token_constraint import Bools
from speculative.step.host_copy import Verdicts, copy_to_host, logprobs_to_host, results_per_entry
from speculative.verification.base import Verifier, VerifyInput, VerifyOutput
from speculative.verification.coupled import verify_coupled
from speculative.verification.draft_probs import DraftProbs, PointMass
from speculative.verification.mixed import verify_mixed
from speculative.verification.rows import VerifyRows
from speculative.vocabulary.ops import VocabularyOps


class Sampler:
    """Turns one step's logits into tokens, by the engine's verifier and each request's own parameters."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        eos_token_ids: tuple[int, ...],
        self_check: SelfCheck,
        ops: VocabularyOps,
    ) -> None:
        self.ops = ops
        self.self_check = self_check
        self._verifier: Literal["token_wise", "block"] = "block" if config.verifier == "block" else "token_wise"
        self._mode = config.logprobs_mode
        self.eos_token_ids = eos_token_ids
        self._device = device
        verifiers = {"token_wise": ops.verify_token_wise, "block": ops.verify_block, "coupled": verify_coupled}
        self.verify: Verifier = verifiers[config.verifier]
        self._all_coupled = config.verifier == "coupled"
        self._rows = LastRows()

    def draw(
        self,
        layout: StepInput,
        logits: Tensor,
        draft_probs: DraftProbs,
        masks: list[list[Bools] | None],
        repeated: Bools | None = None,
    ) -> StepOutcome:
        """Return what each drawing entry emits, and the step's self-checks.

        Args:
            layout: the step's rows.
            logits: [R, V] float32 of the verify rows; not written to.
            draft_probs: q of the step's drafts.
            masks: per drawing entry, the tokens its structure allows, row by row; None where it has none.
            repeated: [E] the entries whose drafts are deterministic although others' are sampled; None = none.
        """
        checked = self.self_check.due()
        if repeated is None or not repeated.any():
            return self._draw(layout, logits, draft_probs, masks, checked=checked)
        parts = []
        for chosen, q in ((repeated, PointMass()), (~repeated, draft_probs)):
            rows = torch.from_numpy(np.flatnonzero(chosen[layout.verify_entries])).to(logits.device)
            own_masks = list(compress(masks, chosen))
            parts.append(self._draw(layout.drawing_only(chosen), logits[rows], q, own_masks, checked=checked))
        drawn = merge_outcomes(parts)
        theirs, others = iter(drawn.results[: repeated.sum()]), iter(drawn.results[repeated.sum() :])
        return replace(drawn, results=tuple(next(theirs if own else others) for own in repeated))

    def _draw(
        self,
        layout: StepInput,
        logits: Tensor,
        draft_probs: DraftProbs,
        masks: list[list[Bools] | None],
        *,
        checked: bool,
    ) -> StepOutcome:
        """As `draw`, of entries whose drafts come from one kind of q."""
        params = [layout.drawing[entry].sequence.params for entry in layout.verify_entries.tolist()]
        rows = self._rows.of(params, logits.shape[-1], self._device)
        adjusted = self._adjust(layout, logits, masks)
        processed = self.ops.process(adjusted, rows)  # [R, V]
        of_rows = VerifyRows.of(layout, self.ops.host)
        step = of_rows.input(self.ops.target_probs(processed, rows), draft_probs)
        coupled = self.coupled(layout)
        verified = self._verify(step, coupled)
        emitted = self.ops.emitted_at_rows(verified, step)
        logprobs = logprobs_to_host(layout, lambda: mode_matrix(self._mode, logits, processed), emitted)
        outside = outside_filters_of(rows, adjusted, emitted)
        broken = self.ops.broken_rows(step, verified, emitted, processed.amax(dim=-1), outside)
        terms, counted = None, self.self_check.counted(layout.drawing, checked=checked)
        if checked:
            terms = self._terms(step, verified, emitted, counted, coupled)
        sampled = not isinstance(step.draft_probs, PointMass)
        q = self.ops.round_probs(step, verified, places=checked) if sampled else (None, None, None)
        verdicts = copy_to_host(verified, broken, q)
        drawn = self.check_on_host(layout, results_per_entry(layout, verdicts, logprobs), masks)
        if terms is not None:
            terms, drawn = self.check_rounds(layout, of_rows, verdicts, drawn, terms, counted)
        return StepOutcome(tuple(drawn), verdicts.expected_accepted, terms)

    def _adjust(self, layout: StepInput, logits: Tensor, masks: list[list[Bools] | None]) -> Tensor:
        if all(mask is None for mask in masks) and all(entry.sequence.rules is None for entry in layout.drawing):
            return logits
        return adjust(logits, row_contexts(layout, masks), self.eos_token_ids)

    def _verify(self, step: VerifyInput, coupled: Bools) -> VerifyOutput:
        if coupled.all():
            return verify_coupled(step)
        if not coupled.any():
            return self.verify(step)
        return verify_mixed(step, torch.from_numpy(coupled).to(self._device), verify_coupled, self.verify)

    def coupled(self, layout: StepInput) -> Bools:
        """[E] which entries the coupled verifier judges."""
        return np.array([self._all_coupled or entry.sequence.params.reproducible for entry in layout.drawing], np.bool_)

    # -- self-checks --------------------------------------------------------------------------------------------

    def _terms(
        self, step: VerifyInput, verified: VerifyOutput, emitted: Tensor, counted: Bools, coupled: Bools
    ) -> Terms:
        scope = TermScope(
            self._verifier,
            torch.from_numpy(counted).to(self._device),
            torch.from_numpy(coupled).to(self._device) if coupled.any() else None,
        )
        return self.ops.take_terms(step, verified, emitted, scope).to_host()

    def check_rounds(
        self,
        layout: StepInput,
        rows: VerifyRows,
        verdicts: Verdicts,
        drawn: list[SequenceResult],
        terms: Terms,
        counted: Bools,
    ) -> tuple[Terms, list[SequenceResult]]:
        """A step's terms with those of its rounds, and what each entry drew, with the fault of those whose draws are
        not what their random numbers give."""
        coupled = self.coupled(layout)
        wrong = contradicted(layout, verdicts.num_accepted, terms.rows, rows.uniforms, self._verifier)
        if verdicts.draft_probs is not None and verdicts.mass_before is not None:
            by_noise = coupled[layout.verify_entries]
            of_drafts = np.where(by_noise, np.nan, [verdicts.mass_before, verdicts.draft_probs])
            wrong |= misdrafted(layout, of_drafts, rows.draft_uniforms())
        for fault, of_entries in (("resolution", too_coarse(layout, rows.uniforms)), ("draw", wrong)):
            if of_entries.any():
                drawn = [
                    one._replace(fault=fault) if own and one.fault is None else one
                    for one, own in zip(drawn, of_entries.tolist(), strict=True)
                ]
        accept_uniforms, rejection = rows.uniforms[0], counted & ~coupled
        terms = with_round_terms(terms, layout, verdicts.num_accepted, accept_uniforms, rejection, self._verifier)
        return terms, drawn

    def check_on_host(
        self, layout: StepInput, drawn: list[SequenceResult], masks: list[list[Bools] | None]
    ) -> list[SequenceResult]:
        """Return what each entry drew, with the fault of those that break a rule which the host can see."""
        wrong = misplaced(layout).tolist()
        checked = []
        for index, (entry, one) in enumerate(zip(layout.drawing, drawn, strict=True)):
            fault = one.fault
            if fault is None and not 0 <= len(one.token_ids) - 1 == one.num_accepted <= one.num_drafted:
                fault = "conservation"
            if fault is None and wrong[index]:
                fault = "positions"
            if fault is None and forbidden_by_rules(entry, one.token_ids, masks[index], self.eos_token_ids):
                fault = "support"
            checked.append(one if fault is one.fault else one._replace(fault=fault))
        return checked


def outside_filters_of(rows: SamplingRows, adjusted: Tensor, emitted: Tensor) -> Tensor:
    """[R] bool: rows whose token lies outside the filters of its request."""
    outside = torch.zeros_like(rows.greedy)
    if rows.filters is not None:
        which = rows.filters.rows
        outside[which] = outside_filters(adjusted[which], rows.temperature[which], rows.filters, emitted[which])
    return outside
