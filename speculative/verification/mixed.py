"""A batch in which some requests are judged by another verifier than the rest."""

import torch
from torch import Tensor

from speculative.verification.base import Verifier, VerifyInput, VerifyOutput


def verify_mixed(step: VerifyInput, chosen: Tensor, theirs: Verifier, others: Verifier) -> VerifyOutput:
    """Judge the entries of `chosen` [E] bool with `theirs`, and the rest with `others`."""
    num_accepted, token_ids = torch.zeros_like(step.counts), torch.zeros_like(step.counts)
    expected = step.probs.new_zeros(step.counts.shape)
    for which, verify in ((chosen, theirs), (~chosen, others)):
        part, entries = verify(step.select(which)), which.nonzero()[:, 0]
        num_accepted[entries] = part.num_accepted
        token_ids[entries] = part.token_ids
        expected[entries] = part.expected_accepted.to(expected.dtype)
    return VerifyOutput(num_accepted, token_ids, expected)
