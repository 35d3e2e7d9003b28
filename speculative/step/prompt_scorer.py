"""Scores known tokens: the logprobs of a prompt, and of the tokens of a finished answer that is replayed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.drafting.base import Drafter
from speculative.request import ReplayedToken, Request, TokenLogprobs
from speculative.sampling.logprobs import gather_logprobs, mode_matrix, padded_ids
from speculative.selfcheck.replayed_tokens import replayed_tokens
from speculative.state.batch import Entry
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import TokenConstraint
from speculative.step.runner import ModelRunner
from speculative.step.sampler import Sampler

ROWS_AT_ONCE = 64
"""Rows over the vocabulary that are computed together where memory is short."""


@dataclass
class PromptScorer:
    """Scores the known tokens of sequences that ask for it, in the logprobs mode of the engine."""

    mode: LogprobsMode  # of the logprobs of prompts; replayed tokens have raw ones
    sampler: Sampler  # its end tokens and vocabulary operations serve replays
    constraint_of: Callable[[Request], TokenConstraint | None]  # compiles the structure of a request, if it has one

    def score(
        self, entry: Entry, row_start: int, hidden: Tensor, runner: ModelRunner, drafter: Drafter
    ) -> tuple[tuple[TokenLogprobs, ...], tuple[ReplayedToken, ...]]:
        """Return the fields of `SequenceResult` for the known tokens that this entry's rows predict.

        Args:
            entry: of a sequence with `scored_positions`.
            row_start: the first of its rows.
            hidden: [N, hidden] of all rows of the step.
            runner: computes their logits.
            drafter: computes again the q of rejected drafts, where it can.
        """
        sequence = entry.sequence
        wanted = sequence.scored_positions
        begin = max(wanted.start - 1, sequence.num_computed)
        end = min(wanted.stop - 1, sequence.num_computed + entry.num_known)
        mode = "raw_logprobs" if sequence.scores_only else self.mode
        num_top = sequence.params.prompt_logprobs or 0
        offset = row_start - sequence.num_computed
        logprobs: list[TokenLogprobs] = []
        replayed: list[ReplayedToken] = []
        for start in range(begin, end, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, end)
            token_ids = sequence.tokens[start + 1 : stop + 1]
            logits = runner.logits(hidden[offset + start : offset + stop])
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
                constraint = self.constraint_of(sequence.request)
                known = (sequence.request, start + 1, constraint, self.sampler.eos_token_ids)
                draft_logits = _draft_logits(drafter, sequence, start + 1, stop + 1)
                replayed.extend(replayed_tokens(logits, *known, self.sampler.ops, draft_logits))
        return tuple(logprobs), tuple(replayed)


def _draft_logits(drafter: Drafter, sequence: Sequence, start: int, stop: int) -> dict[int, Tensor]:
    """[V] of the rejected drafts in whose stead a replay's tokens start..stop were drawn, where the drafter can
    compute them; by index of the token among these."""
    first = sequence.request.score_from or 0
    draws = sequence.request.draws[start - first : stop - first]
    places = {index: (draw.round_start, draw.offset) for index, draw in enumerate(draws) if draw.rule == "recovered"}
    logits = drafter.logits_again(sequence, tuple(places.values())) if places else None
    return {} if logits is None else dict(zip(places, logits, strict=True))
