"""From what a step computed on the device to what the host may act on, copied piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.logprobs import LogprobRows, gather_logprobs, padded_ids
from speculative.sampling.verification import VerifyOutput
from speculative.state.batch import SequenceResult, StepInput

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The host copy of a verification, per sampled entry.

    Rows without a draft hold anything.

    num_accepted: [E] leading drafts that survived.
    token_ids: [E] the token after them.
    expected_accepted: the chances of acceptance, summed over the positions that were reached.
    draft_probs: [R] q of the draft judged at each row; None where drafts are deterministic.
    last_probs: [E] q of each entry's last token; None where drafts are deterministic.
    mass_before: [R] the mass of q before that draft, in the order it is sampled in; None where it was not asked for.
    """

    num_accepted: Array
    token_ids: Array
    expected_accepted: float
    draft_probs: Array | None = None
    last_probs: Array | None = None
    mass_before: Array | None = None


def copy_to_host(verified: VerifyOutput, probs: tuple[Tensor | None, ...]) -> Verdicts:
    """Copy what was decided, and the q it was decided by; probs: what `VocabularyOps.round_probs` returned, or None."""
    expected = verified.expected_accepted.cpu().numpy()
    of_drafts, of_last, before = (None if part is None else part.cpu().numpy() for part in probs)
    return Verdicts(
        num_accepted=verified.num_accepted.cpu().numpy(),
        token_ids=verified.token_ids.cpu().numpy(),
        expected_accepted=float(expected[np.isfinite(expected)].sum()),  # a faulty row counts nothing
        draft_probs=of_drafts,
        last_probs=of_last,
        mass_before=before,
    )


def logprobs_to_host(step_input: StepInput, matrix: Callable[[], Tensor], emitted: Tensor) -> LogprobRows | None:
    """Gather the logprobs of every verify row, as many as the most demanding entry asks for; None if nobody asks.

    `matrix` makes the mode's matrix [R, V]: nobody pays for it unless somebody asks.
    """
    asking = [entry.sequence.params for entry in step_input.sampled_entries if entry.sequence.params.returns_logprobs]
    if not asking:
        return None
    num_top = max(params.logprobs or 0 for params in asking)
    padded = padded_ids([entry.sequence.params.logprob_token_ids for entry in step_input.sampled_entries])
    scored_ids = torch.from_numpy(padded[step_input.verify_entries]).to(emitted.device)
    return gather_logprobs(matrix(), emitted, num_top, scored_ids).to_host()


def results_per_entry(step_input: StepInput, verdicts: Verdicts, logprobs: LogprobRows | None) -> list[SequenceResult]:
    """Return one result for each sampled entry, in order."""
    if (
        logprobs is None
        and verdicts.draft_probs is None
        and not (step_input.draft_counts | verdicts.num_accepted).any()
    ):
        return [SequenceResult((token_id,)) for token_id in verdicts.token_ids.tolist()]
    drafts = step_input.drafts.tolist()
    draft_probs = None if verdicts.draft_probs is None else verdicts.draft_probs.tolist()
    last_probs = verdicts.last_probs
    decided = (
        step_input.draft_counts.tolist(),
        verdicts.num_accepted.tolist(),
        verdicts.token_ids.tolist(),
        [0.0] * len(step_input.sampled_entries) if last_probs is None else last_probs.tolist(),
    )
    first_row, results = 0, []
    for entry, count, accepted, last, last_prob in zip(step_input.sampled_entries, *decided, strict=True):
        token_ids = (*drafts[first_row : first_row + accepted], last)
        entries = None
        if logprobs is not None and (params := entry.sequence.params).returns_logprobs:
            num_top, scored_ids = params.logprobs or 0, params.logprob_token_ids
            entries = tuple(
                logprobs.entry(row, token, num_top, scored_ids) for row, token in enumerate(token_ids, start=first_row)
            )
        judged_to = first_row + (count if accepted >= count else accepted + 1)
        judged = tuple(drafts[first_row:judged_to])
        own_probs = None if draft_probs is None else tuple(draft_probs[first_row:judged_to])
        of_last = last_prob if accepted < count else 0.0
        results.append(SequenceResult(token_ids, count, accepted, judged, own_probs, of_last, entries))
        first_row += count + 1
    return results
