"""A batch in which some requests are judged by another verifier than the rest."""

import torch
from torch import Tensor

from speculative.verification.base import Verifier, VerifyInput, VerifyOutput


def verify_mixed(step: VerifyInput, chosen: Tensor, theirs: Verifier, others: Verifier) -> VerifyOutput:
    """Judge the entries of `chosen` [E] bool with `theirs`, and the rest with `others`."""
    num_accepted, token_ids = torch.zeros_like(step.counts), torch.zeros_like(step.counts)
    expected = step.probs.new_zeros(step.counts.shape)
    for entries, verify in ((chosen, theirs), (~chosen, others)):
        part = verify(step.select(entries))
        num_accepted[entries] = part.num_accepted
        token_ids[entries] = part.token_ids
        expected[entries] = part.expected_accepted.to(expected.dtype)
    return VerifyOutput(num_accepted, token_ids, expected)


def merge(chosen: Tensor, theirs: VerifyOutput, others: VerifyOutput) -> VerifyOutput:
    """Merge two verdicts on the same entries: `theirs` for those of `chosen` [E] bool, `others` for the rest."""
    return VerifyOutput(
        torch.where(chosen, theirs.num_accepted, others.num_accepted),
        torch.where(chosen, theirs.token_ids, others.token_ids),
        torch.where(chosen, theirs.expected_accepted, others.expected_accepted),
    )
