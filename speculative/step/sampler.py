"""Samples a step's tokens on the device: from logits to p, from p and drafts to tokens and their logprobs."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculative.config import EngineConfig
from speculative.sampling.coupled import largest, verify_coupled
from speculative.sampling.draft_probs import DraftProbs, PointMass
from speculative.sampling.logits_processors import adjust
from speculative.sampling.logprobs import mode_matrix
from speculative.sampling.probs import LastRows, SamplingRows
from speculative.sampling.verification import Verifier, VerifyInput, VerifyOutput
from speculative.sampling.verify_rows import VerifyRows
from speculative.state.batch import RowContext, SequenceResult, StepInput, row_contexts
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from speculative.step.host_copy import Verdicts, copy_to_host, logprobs_to_host, results_per_entry
from speculative.step.vocabulary_ops import VocabularyOps


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The tokens of a step on the device, and what they were sampled from."""

    logits: Tensor  # [R, V] the model's own
    adjusted: Tensor  # [R, V] after the requests' penalties, biases and masks
    processed: Tensor  # [R, V] after temperature and filters
    params: SamplingRows  # temperature and filters of each row
    rows: VerifyRows  # the verify rows on the host, with their random numbers
    coupled: Bools  # [E] the entries that the coupled verifier judges
    given: VerifyInput  # what was verified
    verified: VerifyOutput  # the drafts accepted, and the token after them
    token_ids: Tensor  # [R] the token emitted at each row


class Sampler:
    """Turns a step's logits into tokens, by the engine's verifier and each request's own parameters.

    Knows no self-checks: `CheckedSampler` has them, around this.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, eos_token_ids: tuple[int, ...], ops: VocabularyOps
    ) -> None:
        self.ops = ops
        self.eos_token_ids = eos_token_ids
        self._mode = config.logprobs_mode
        self._device = device
        self.verify_uncoupled: Verifier = ops.verify_token_wise
        self._all_coupled = config.verifier == "coupled"
        self._rows = LastRows()

    def sample(
        self, step_input: StepInput, logits: Tensor, draft_probs: DraftProbs, masks: list[list[Bools] | None]
    ) -> SampledStep:
        """Adjust the logits, and verify the drafts against what becomes of them.

        Args:
            step_input: the step's rows.
            logits: [R, V] float32 of the verify rows; not written to.
            draft_probs: q of the step's drafts.
            masks: per sampled entry, the tokens its structure allows, row by row; None where it has none.
        """
        entries = step_input.sampled_entries
        adjusted = logits
        if any(mask is not None for mask in masks) or any(entry.sequence.rules is not None for entry in entries):
            adjusted = adjust(logits, row_contexts(step_input, masks), self.eos_token_ids)
        params = [entries[entry].sequence.params for entry in step_input.verify_entries.tolist()]
        sampling_rows = self._rows.of(params, logits.shape[-1], self._device)
        processed = self.ops.process(adjusted, sampling_rows)
        rows = VerifyRows.of(step_input, self.ops.host)
        given = rows.input(self.ops.target_probs(processed, sampling_rows), draft_probs)
        coupled = self.coupled(step_input)
        verified = self._verify(given, coupled)
        token_ids = self.ops.emitted_at_rows(verified, given)
        return SampledStep(logits, adjusted, processed, sampling_rows, rows, coupled, given, verified, token_ids)

    def choose(
        self,
        sequences: Sequences[Sequence],
        drafts: Sequences[list[int]],
        allowed: Sequences[Bools | None],
        logits: Tensor,
    ) -> Tensor:
        """Return what the coupled verifier chooses behind drafts of each sequence, [E] int64.

        Args:
            sequences: E of them.
            drafts: of each.
            allowed: what each one's structure allows there; None where it has none.
            logits: [E, V] float32, not written to.
        """
        each = zip(sequences, drafts, allowed, strict=True)
        contexts = [RowContext(own.rules, own.tokens[own.num_prompt :], tuple(said), mask) for own, said, mask in each]
        adjusted = adjust(logits, contexts, self.eos_token_ids)
        rows = self._rows.of([own.params for own in sequences], logits.shape[-1], self._device)
        processed = self.ops.process(adjusted, rows)
        if all(own.params.greedy for own in sequences):
            return processed.argmax(dim=-1)
        seeds = np.array([own.request.seed for own in sequences], np.uint64).view(np.int64)
        positions = np.array([len(own.tokens) + len(said) for own, said in zip(sequences, drafts, strict=True)])
        keys = torch.from_numpy(seeds).to(self._device), torch.from_numpy(positions).to(self._device)
        return largest(self.ops.target_probs(processed, rows), keys, self.ops.host)[:, 0]

    def coupled(self, step_input: StepInput) -> Bools:
        """[E] which entries the coupled verifier judges."""
        reproducible = [entry.sequence.params.reproducible for entry in step_input.sampled_entries]
        return np.array(reproducible, np.bool_) | self._all_coupled

    def _verify(self, given: VerifyInput, coupled: Bools) -> VerifyOutput:
        if coupled.all():
            return verify_coupled(given)
        if not coupled.any():
            return self.verify_uncoupled(given)
        num_accepted, token_ids = torch.zeros_like(given.counts), torch.zeros_like(given.counts)
        expected = given.probs.new_zeros(given.counts.shape)
        chosen = torch.from_numpy(coupled).to(self._device)
        for which, verify in ((chosen, verify_coupled), (~chosen, self.verify_uncoupled)):
            part, entries = verify(given.select(which)), which.nonzero()[:, 0]
            num_accepted[entries] = part.num_accepted
            token_ids[entries] = part.token_ids
            expected[entries] = part.expected_accepted.to(expected.dtype)
        return VerifyOutput(num_accepted, token_ids, expected)

    def report(
        self, step_input: StepInput, sampled: SampledStep, *, places: bool = False
    ) -> tuple[Verdicts, list[SequenceResult]]:
        """Copy to the host what was decided, and by which q, and the logprobs that were asked for.

        Args:
            step_input: the step's rows.
            sampled: what `sample` returned for them.
            places: copy the mass of q before each draft, too.
        """
        logprobs = logprobs_to_host(
            step_input, lambda: mode_matrix(self._mode, sampled.logits, sampled.processed), sampled.token_ids
        )
        has_q = not isinstance(sampled.given.draft_probs, PointMass)
        q = self.ops.round_probs(sampled.given, sampled.verified, places=places) if has_q else (None, None, None)
        verdicts = copy_to_host(sampled.verified, q)
        return verdicts, results_per_entry(step_input, verdicts, logprobs)
