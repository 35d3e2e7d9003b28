"""Token-wise rejection sampling.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192); Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2302.01318). For a point-mass draft x the rule
"accept with probability min(1, p(x)/q(x)), else draw from (p - q)+" reads: accept with probability p(x), else draw
from p without x.
"""

import torch

from speculative.sampling import draw
from speculative.verification.base import VerifyInput, VerifyOutput


def verify_point_mass(step: VerifyInput) -> VerifyOutput:
    """Verify drafts that were chosen, not drawn. Greedy rows need no rule of their own: their p is one-hot."""
    judged = step.drafts >= 0
    accept_probs = step.probs.gather(1, step.drafts.clamp(min=0)[:, None])[:, 0]  # [R] p(x)
    survives = judged & (step.coins < accept_probs)  # coins are > 0, so p(x) = 0 never survives
    past_end = step.counts.new_full((), torch.iinfo(torch.int64).max)
    num_accepted = torch.full_like(step.counts, torch.iinfo(torch.int64).max).scatter_reduce(
        0, step.entries, torch.where(survives, past_end, step.offsets), "amin"
    )
    final_rows = step.first_rows + num_accepted
    law = step.probs[final_rows]  # [E, V], a copy
    rejected = num_accepted < step.counts
    rejected_ids = step.drafts[final_rows].clamp(min=0)[:, None]
    kept = torch.where(rejected[:, None], 0.0, law.gather(1, rejected_ids))
    residual = law.scatter(1, rejected_ids, kept)
    empty = residual.sum(dim=-1, keepdim=True) <= 0  # p(x) is 1 up to rounding, and yet x was rejected
    reached = judged & (step.offsets <= num_accepted[step.entries])
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=draw(torch.where(empty, law, residual), step.finals[final_rows]),
        expected_accepted=torch.zeros_like(step.counts, dtype=torch.float32).scatter_add(
            0, step.entries, torch.where(reached, accept_probs, 0.0)
        ),
    )
