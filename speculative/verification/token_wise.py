"""Token-wise rejection sampling.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192); Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2302.01318). A draft x survives with probability
min(1, p(x)/q(x)); after the first that does not, a token is drawn from (p - q)+. For a chosen draft (q a point mass)
this reads: survive with probability p(x), else draw from p without x. Greedy rows need no rule of their own: their p is
one-hot.
"""

import torch
from torch import Tensor

from speculative.draft_law import PointMass
from speculative.sampling import draw
from speculative.verification.base import VerifyInput, VerifyOutput, residual


def verify_token_wise(step: VerifyInput) -> VerifyOutput:
    """Accept each draft by its own coin, up to the first that is rejected."""
    p, q = step.p_of_drafts(), step.q_of_drafts()
    # In float64 neither product underflows. A token of p = 0 or q = 0 never survives, whatever the coin.
    survives = (step.coins * q.double() < p.double()) & (p > 0) & (q > 0)
    num_accepted = step.leading(survives)
    final_rows = step.first_rows + num_accepted
    law = residual(step.probs[final_rows], step.q_at(final_rows))
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=draw(law, step.finals[final_rows]),
        expected_accepted=step.sum_reached(_overlap(step, p), num_accepted),
    )


def _overlap(step: VerifyInput, p: Tensor) -> Tensor:
    """[R] the chance that a draft survives, before it is drawn: sum of min(p, q) over the vocabulary."""
    if isinstance(step.law, PointMass):
        return p
    rows = torch.arange(step.probs.shape[0], device=p.device)
    return torch.minimum(step.probs, step.q_at(rows)).sum(dim=-1)
