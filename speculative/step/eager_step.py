"""A step whose every operation is launched by Python, for batches of any kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from speculative.config import EngineConfig
from speculative.drafting.base import Drafter, DraftOutput, constrain
from speculative.state.batch import Batch, Entry, SequenceResult, StepOutcome, build_step_input
from speculative.state.token_constraint import Bools
from speculative.step.checked_sampler import CheckedSampler
from speculative.step.prompt_scorer import PromptScorer
from speculative.step.runner import ModelRunner
from speculative.step.tree_search import Computed, TreeSearch, verify_logits


@dataclass(frozen=True, slots=True)
class Proposal:
    """A step's drafts, and the tokens that structured entries may emit, by entry.

    without_q: the entries whose drafts came without the probabilities they were sampled from. Those drafts are not
        among `draft`.
    """

    draft: DraftOutput
    masks: dict[int, list[Bools]]
    without_q: frozenset[int]


class EagerStep:
    """Drafts, runs the target, verifies and scores; 4 to 11 copies to the host end it.

    Args:
        config: of the engine.
        runner: the target and its cache.
        drafter: of the engine.
        sampler: of the engine.
        scorer: of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        drafter: Drafter,
        sampler: CheckedSampler,
        scorer: PromptScorer,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.sampler = sampler
        self.scorer = scorer
        self._config = config
        self._search = TreeSearch(runner, sampler.sampler, config.block_size)

    def takes(self, entries: Sequence[Entry]) -> list[bool]:
        """All of them."""
        return [True] * len(entries)

    def draft(self, batch: Batch) -> Proposal:
        """The drafts of every entry, without those that came without q."""
        draft, without_q = self.drafter.propose(batch), frozenset[int]()
        if draft.lacks_q:
            without_q = frozenset(np.flatnonzero(draft.counts).tolist()) - draft.repeated
            draft = DraftOutput.nothing(len(batch.entries))
        return Proposal(*constrain(batch, draft), without_q)

    def verify(self, batch: Batch, drafts: Proposal) -> StepOutcome:
        """Run the target over known tokens and drafts, verify and sample, and score what was asked for."""
        computed = self._run(batch, drafts)
        step_input, hidden, draft = computed.step_input, computed.hidden, computed.draft
        if self.drafter.capture:
            self.drafter.observe(batch, step_input, computed.features)
        outcome = StepOutcome(())
        if step_input.sampled_entries:
            masks = [computed.masks.get(index) for index, entry in enumerate(batch.entries) if entry.samples]
            repeated = [index in draft.repeated for index, entry in enumerate(batch.entries) if entry.samples]
            outcome = self.sampler.sample(step_input, computed.logits, draft.draft_probs, masks, np.array(repeated))
        sampled = iter(outcome.results)
        results = [next(sampled) if entry.samples else SequenceResult() for entry in batch.entries]
        for index in drafts.without_q:
            results[index] = SequenceResult(fault="q_missing")
        for index, (entry, row_start) in enumerate(zip(batch.entries, step_input.row_starts.tolist(), strict=False)):
            if entry.sequence.scored_positions:
                logprobs, replayed = self.scorer.score(entry, row_start, hidden, self.runner, self.drafter)
                results[index] = results[index]._replace(prompt_logprobs=logprobs, replayed=replayed)
        return replace(outcome, results=tuple(results))

    def _run(self, batch: Batch, drafts: Proposal) -> Computed:
        """Run the target over known tokens and drafts; of trees, what is left is one path through each."""
        draft, capture = drafts.draft, self.drafter.capture
        if draft.trees is not None:
            return self._search.run(batch, draft, capture)
        step_input = build_step_input(batch.entries, draft.counts, draft.token_ids, self._config.block_size)
        hidden, features = self.runner.forward_with_features(step_input, capture)
        logits = verify_logits(self.runner, step_input, hidden)
        return Computed(step_input, hidden, features, logits, draft, drafts.masks)
