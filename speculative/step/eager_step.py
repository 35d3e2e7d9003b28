"""A step whose every operation is launched by Python, for batches of any kind."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from speculative.config import EngineConfig
from speculative.drafting.base import Drafter, DraftOutput, constrain
from speculative.request import ReplayedToken, Request, TokenLogprobs
from speculative.sampling.logprobs import gather_logprobs, mode_matrix, padded_ids
from speculative.selfcheck.replayed_tokens import replayed_tokens
from speculative.state.batch import Batch, Entry, SequenceResult, StepInput, StepOutcome, build_step_input
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools, TokenConstraint
from speculative.step.checked_sampler import CheckedSampler
from speculative.step.runner import ModelRunner

_SCORED_ROWS_AT_ONCE = 64  # bounds the logits of a scored prompt


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
        constraint_of: compiles the structure of a request; None where it has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        drafter: Drafter,
        sampler: CheckedSampler,
        constraint_of: Callable[[Request], TokenConstraint | None],
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.sampler = sampler
        self._config = config
        self._constraint_of = constraint_of

    def takes(self, batch: Batch) -> bool:
        """Every batch."""
        return True

    def draft(self, batch: Batch) -> Proposal:
        """The drafts of every entry, without those that came without q."""
        draft, without_q = self.drafter.propose(batch), frozenset[int]()
        if draft.lacks_q:
            without_q = frozenset(np.flatnonzero(draft.counts).tolist()) - draft.repeated
            draft = DraftOutput.nothing(len(batch.entries))
        return Proposal(*constrain(batch, draft), without_q)

    def verify(self, batch: Batch, drafts: Proposal) -> StepOutcome:
        """Run the target over known tokens and drafts, verify and sample, and score what was asked for."""
        draft = drafts.draft
        step_input = build_step_input(batch.entries, draft.counts, draft.token_ids, self._config.block_size)
        hidden = self._forward(batch, step_input)
        outcome = StepOutcome(())
        if step_input.sampled_entries:
            decoding_only = len(step_input.verify_rows) == len(hidden)
            rows = hidden if decoding_only else hidden[torch.from_numpy(step_input.verify_rows).to(hidden.device)]
            logits = self.runner.logits(rows)  # [R, V]
            masks = [drafts.masks.get(index) for index, entry in enumerate(batch.entries) if entry.samples]
            repeated = [index in draft.repeated for index, entry in enumerate(batch.entries) if entry.samples]
            outcome = self.sampler.sample(step_input, logits, draft.draft_probs, masks, np.array(repeated))
        sampled = iter(outcome.results)
        results = [next(sampled) if entry.samples else SequenceResult() for entry in batch.entries]
        for index in drafts.without_q:
            results[index] = SequenceResult(fault="q_missing")
        for index, entry in enumerate(batch.entries):
            if entry.sequence.scored_positions:
                logprobs, replayed = self._score(entry, int(step_input.row_starts[index]), hidden)
                results[index] = results[index]._replace(prompt_logprobs=logprobs, replayed=replayed)
        return replace(outcome, results=tuple(results))

    def _forward(self, batch: Batch, step_input: StepInput) -> Tensor:
        """Hidden states [N, hidden]; a drafter that reads features gets them."""
        hidden, features = self.runner.forward_with_features(step_input, self.drafter.capture)
        if self.drafter.capture:
            self.drafter.observe(batch, step_input, features)
        return hidden

    def _score(
        self, entry: Entry, row_start: int, hidden: Tensor
    ) -> tuple[tuple[TokenLogprobs, ...], tuple[ReplayedToken, ...]]:
        """Return what was asked for of the known tokens that this entry's rows predict, as in `SequenceResult`."""
        sequence = entry.sequence
        wanted = sequence.scored_positions
        begin = max(wanted.start - 1, sequence.num_computed)
        end = min(wanted.stop - 1, sequence.num_computed + entry.num_known)
        mode = "raw_logprobs" if sequence.scores_only else self._config.logprobs_mode
        num_top = sequence.params.prompt_logprobs or 0
        offset = row_start - sequence.num_computed
        logprobs: list[TokenLogprobs] = []
        replayed: list[ReplayedToken] = []
        for start in range(begin, end, _SCORED_ROWS_AT_ONCE):
            stop = min(start + _SCORED_ROWS_AT_ONCE, end)
            token_ids = sequence.tokens[start + 1 : stop + 1]
            logits = self.runner.logits(hidden[offset + start : offset + stop])
            matrix = mode_matrix(mode, logits, logits)  # nothing is sampled here, so no processor applies
            asked = sequence.request.scored_ids[start + 1 - wanted.start : stop + 1 - wanted.start]
            ids = torch.from_numpy(padded_ids(asked)).to(logits.device) if asked else None
            host = gather_logprobs(matrix, torch.tensor(token_ids, device=logits.device), num_top, ids).to_host()
            own_ids = asked or ((),) * len(token_ids)
            logprobs.extend(
                host.entry(row, token, num_top, own)
                for row, (token, own) in enumerate(zip(token_ids, own_ids, strict=True))
            )
            if sequence.scores_only:
                constraint = self._constraint_of(sequence.request)
                known = (sequence.request, start + 1, constraint, self.sampler.sampler.eos_token_ids)
                draft_logits = self._draft_logits(sequence, start + 1, stop + 1)
                replayed.extend(replayed_tokens(logits, *known, self.sampler.sampler.ops, draft_logits))
        return tuple(logprobs), tuple(replayed)

    def _draft_logits(self, sequence: Sequence, start: int, stop: int) -> dict[int, Tensor]:
        """[V] of the rejected drafts in whose stead a replay's tokens start..stop were drawn, where the drafter can
        compute them; by index of the token among these."""
        first = sequence.request.score_from or 0
        draws = sequence.request.draws[start - first : stop - first]
        places = {
            index: (draw.round_start, draw.offset) for index, draw in enumerate(draws) if draw.rule == "recovered"
        }
        logits = self.drafter.logits_again(sequence, tuple(places.values())) if places else None
        return {} if logits is None else dict(zip(places, logits, strict=True))
