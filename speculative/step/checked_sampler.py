"""Samples a step's tokens, and checks each of them: `Sampler` with the self-checks around it."""

from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.draft_probs import DraftProbs, PointMass
from speculative.sampling.verify_rows import VerifyRows
from speculative.selfcheck.invariants import ROW_KINDS, forbidden_by_rules, misplaced, outside_filters
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.rounds import contradicted, misdrafted, too_coarse, with_round_terms
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import Int64s, SequenceResult, StepInput, StepOutcome, Terms, merge_outcomes
from speculative.state.token_constraint import Bools
from speculative.step.host_copy import Verdicts
from speculative.step.sampler import Sampler


@dataclass(frozen=True, slots=True)
class DeviceChecks:
    """Findings of the checks on the device, copied to the host."""

    broken: Int64s  # [R] 1 + the index into ROW_KINDS of the invariant that a row breaks, or 0
    counted: Bools  # [E] the entries whose terms count
    terms: Terms | None  # of the self-checks; None in a step where they are not taken


@dataclass
class CheckedSampler:
    """Samples, checks the invariants of every result, and in some steps takes the terms of the self-checks; the
    invariants `draw` and `resolution` need those."""

    sampler: Sampler
    self_check: SelfCheck

    def sample(
        self,
        step_input: StepInput,
        logits: Tensor,
        draft_probs: DraftProbs,
        masks: list[list[Bools] | None],
        deterministic: Bools | None = None,
    ) -> StepOutcome:
        """Return what each sampled entry emits, and the step's self-checks.

        Args:
            step_input, logits, draft_probs, masks: as in `Sampler.sample`.
            deterministic: [E] the entries whose drafts are so although others' are sampled; None = none.
        """
        checked = self.self_check.due()  # asked once a step, whatever its parts: it counts steps by being asked
        if deterministic is None or not deterministic.any():
            return self._sample(step_input, logits, draft_probs, masks, checked=checked)
        parts = []
        for chosen, q in ((deterministic, PointMass()), (~deterministic, draft_probs)):
            rows = torch.from_numpy(np.flatnonzero(chosen[step_input.verify_entries])).to(logits.device)
            own_masks = list(compress(masks, chosen))
            parts.append(self._sample(step_input.select(chosen), logits[rows], q, own_masks, checked=checked))
        # Stable: within a part entries keep their order, which is how `merge_outcomes` counts them.
        return merge_outcomes(parts, np.argsort(~deterministic, kind="stable").tolist())

    def _sample(
        self,
        step_input: StepInput,
        logits: Tensor,
        draft_probs: DraftProbs,
        masks: list[list[Bools] | None],
        *,
        checked: bool,
    ) -> StepOutcome:
        """Sample and check entries whose drafts come from one kind of q."""
        sampled = self.sampler.sample(step_input, logits, draft_probs, masks)
        given, verified, token_ids, coupled = sampled.given, sampled.verified, sampled.token_ids, sampled.coupled
        device, ops = token_ids.device, self.sampler.ops
        outside = outside_filters(sampled.adjusted, sampled.params, token_ids)
        broken = ops.broken_rows(given, verified, token_ids, sampled.processed.amax(dim=-1), outside)
        counted, terms = self.self_check.counted(step_input.sampled_entries, checked=checked), None
        if checked:
            of_whom = torch.from_numpy(coupled).to(device) if coupled.any() else None
            scope = TermScope(torch.from_numpy(counted).to(device), of_whom, bool(coupled.all()))
            terms = ops.take_terms(given, verified, token_ids, scope).to_host()
        found = DeviceChecks(broken.cpu().numpy(), counted, terms)
        verdicts, results = self.sampler.report(step_input, sampled, places=checked)
        return self.check(step_input, verdicts, results, masks, found, sampled.rows)

    def check(
        self,
        step_input: StepInput,
        verdicts: Verdicts,
        results: list[SequenceResult],
        masks: list[list[Bools] | None],
        found: DeviceChecks,
        rows: VerifyRows | None = None,
    ) -> StepOutcome:
        """The outcome of a step, with the fault of each entry that breaks an invariant.

        Args:
            step_input: the step's rows, with its drafts.
            verdicts, results: what was decided.
            masks: per sampled entry, what its structure allows.
            found: by the checks on the device.
            rows: with the step's random numbers, where they are known already.
        """
        results = self.check_on_host(step_input, with_row_faults(step_input, results, found.broken), masks)
        terms = found.terms
        if terms is not None:
            rows = rows or VerifyRows.of(step_input, self.sampler.ops.host)
            terms, results = self.check_rounds(step_input, rows, verdicts, results, terms, found.counted)
        return StepOutcome(tuple(results), verdicts.expected_accepted, terms)

    def check_on_host(
        self, step_input: StepInput, results: list[SequenceResult], masks: list[list[Bools] | None]
    ) -> list[SequenceResult]:
        """The results, with the fault of those that break a rule which the host can see."""
        wrong = misplaced(step_input).tolist()
        checked = []
        for entry, one, mask, is_wrong in zip(step_input.sampled_entries, results, masks, wrong, strict=True):
            fault = one.fault
            if fault is None:
                if not 0 <= len(one.token_ids) - 1 == one.num_accepted <= one.num_drafted:
                    fault = "conservation"
                elif is_wrong:
                    fault = "positions"
                elif (mask is not None or entry.sequence.rules is not None) and forbidden_by_rules(
                    entry, one.token_ids, mask, self.sampler.eos_token_ids
                ):
                    fault = "support"
            checked.append(one if fault is one.fault else one._replace(fault=fault))
        return checked

    def check_rounds(
        self,
        step_input: StepInput,
        rows: VerifyRows,
        verdicts: Verdicts,
        results: list[SequenceResult],
        terms: Terms,
        counted: Bools,
    ) -> tuple[Terms, list[SequenceResult]]:
        """A step's terms with those of its rounds, and its results, with the fault of those that are not what their
        random numbers give."""
        assert terms.rows is not None
        coupled = self.sampler.coupled(step_input)
        wrong = contradicted(step_input, verdicts.num_accepted, terms.rows, rows.uniforms)
        if verdicts.draft_probs is not None and verdicts.mass_before is not None:
            by_noise = coupled[step_input.verify_entries]
            of_drafts = np.where(by_noise, np.nan, [verdicts.mass_before, verdicts.draft_probs])
            wrong |= misdrafted(step_input, of_drafts, rows.draft_uniforms())
        for fault, of_entries in (("resolution", too_coarse(step_input, rows.uniforms)), ("draw", wrong)):
            if of_entries.any():
                results = [
                    one._replace(fault=fault) if own and one.fault is None else one
                    for one, own in zip(results, of_entries.tolist(), strict=True)
                ]
        scope = counted & ~coupled
        signs = self.self_check.last_signs(step_input.sampled_entries)
        terms = with_round_terms(terms, step_input, verdicts.num_accepted, rows.uniforms[0], scope, signs)
        return terms, results


def with_row_faults(step_input: StepInput, results: list[SequenceResult], broken: Int64s) -> list[SequenceResult]:
    """The results, with the first fault of each entry's rows, as `broken_rows` numbers them."""
    if not broken.any():
        return results
    of_entries = np.split(broken, np.cumsum(step_input.draft_counts + 1)[:-1])
    first = [min(rows[rows > 0].tolist(), default=0) for rows in of_entries]
    return [one._replace(fault=ROW_KINDS[kind - 1]) if kind else one for one, kind in zip(results, first, strict=True)]
