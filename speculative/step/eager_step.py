"""A step whose every operation is launched by Python, for batches of any kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from speculative.drafting.base import Drafter, DraftOutput, constrain
from speculative.state.batch import Batch, Entry, SequenceResult, StepOutcome, build_step_input
from speculative.state.token_constraint import Bools
from speculative.step.checked_sampler import CheckedSampler
from speculative.step.prompt_scorer import ROWS_AT_ONCE, PromptScorer
from speculative.step.runner import ModelRunner, compute
from speculative.step.tree_search import TreeSearch


@dataclass(frozen=True, slots=True)
class Proposal:
    """A step's drafts, and the tokens that structured entries may emit, by entry.

    without_q: the entries whose drafts came without the probabilities they were sampled from. Those drafts are not
        among `draft`.
    """

    draft: DraftOutput
    masks: dict[int, list[Bools]]
    without_q: frozenset[int]


@dataclass
class EagerStep:
    """Drafts, runs the target, verifies and scores; 4 to 11 copies to the host end it."""

    runner: ModelRunner
    drafter: Drafter
    sampler: CheckedSampler
    scorer: PromptScorer
    block_size: int

    def takes(self, entries: Sequence[Entry]) -> list[bool]:
        """All of them; on a GPU, whose memory the cache has, as many as have their rows verified together."""
        if self.runner.device.type == "cpu":
            return [True] * len(entries)
        ends = accumulate((1 + entry.max_drafts) * entry.samples for entry in entries)
        return [index == 0 or end <= ROWS_AT_ONCE for index, end in enumerate(ends)]

    def draft(self, batch: Batch) -> Proposal:
        """The drafts of every entry, without those that came without q."""
        draft, without_q = self.drafter.propose(batch), frozenset[int]()
        if draft.lacks_q:
            without_q = frozenset(np.flatnonzero(draft.counts).tolist()) - draft.deterministic
            draft = DraftOutput.nothing(len(batch.entries))  # nothing says which rows of q are the missing ones
        return Proposal(*constrain(batch, draft), without_q)

    def verify(self, batch: Batch, drafts: Proposal, beside: Sequence[Entry] = ()) -> StepOutcome:
        """Run the target over known tokens and drafts, verify and sample, and score what was asked for."""
        del beside  # there is no later step
        draft, masks = drafts.draft, drafts.masks
        if draft.trees is None:
            step_input = build_step_input(batch.entries, draft.counts, draft.token_ids, self.block_size)
            hidden, features, logits = compute(self.runner, step_input, self.drafter.capture)
        else:
            search = TreeSearch(self.runner, self.sampler.sampler, self.block_size)
            found = search.run(batch, draft, self.drafter.capture)
            draft, masks, step_input, (hidden, features, logits) = found
        # Before the scorer, whose `logits_again` reads these features, and before `commit` moves the first position.
        self.drafter.observe(batch, step_input, features)
        outcome = StepOutcome(())
        if step_input.sampled_entries:
            own_masks = [masks.get(index) for index, entry in enumerate(batch.entries) if entry.samples]
            deterministic = [index in draft.deterministic for index, entry in enumerate(batch.entries) if entry.samples]
            outcome = self.sampler.sample(step_input, logits, draft.draft_probs, own_masks, np.array(deterministic))
        sampled = iter(outcome.results)
        results = [next(sampled) if entry.samples else SequenceResult() for entry in batch.entries]
        for index in drafts.without_q:
            results[index] = SequenceResult(fault="q_missing")
        for index, (entry, row_start) in enumerate(zip(batch.entries, step_input.row_starts.tolist(), strict=False)):
            if entry.sequence.scored_positions:
                logprobs, replayed = self.scorer.score(entry, row_start, hidden, self.runner, self.drafter)
                results[index] = results[index]._replace(prompt_logprobs=logprobs, replayed=replayed)
        return replace(outcome, results=tuple(results))
