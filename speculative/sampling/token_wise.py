"""Token-wise rejection sampling.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192); Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2302.01318). A draft x survives with probability
min(1, p(x)/q(x)); after the first that does not, a token is drawn from (p - q)+. For a deterministic draft (q a point
mass) this reads: survive with probability p(x), else draw from p without x. Greedy rows need no rule of their own:
their p is one-hot.
"""

import torch
from torch import Tensor

from speculative.sampling.draft_probs import PointMass
from speculative.sampling.probs import draw
from speculative.sampling.verification import VerifyInput, VerifyOutput, residual


def verify_token_wise(step: VerifyInput) -> VerifyOutput:
    """Accept each draft by its own coin, up to the first that is rejected."""
    p, q = step.p_of_drafts(), step.q_of_drafts()
    # In float64 neither product underflows. A token of p = 0 or q = 0 never survives, whatever the coin.
    survives = (step.accept_uniforms * q.double() < p.double()) & (p > 0) & (q > 0)
    num_accepted = step.leading(survives)
    last = step.first_rows + num_accepted  # the rows that the entries came to
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=draw(residual(step.probs[last], step.q_at(last)), step.sample_uniforms[last]),
        expected_accepted=step.sum_reached(overlap(step, p), num_accepted),
    )


def overlap(step: VerifyInput, p: Tensor) -> Tensor:
    """[R] the chance that a draft survives, before it is sampled: sum of min(p, q) over the vocabulary."""
    if isinstance(step.draft_probs, PointMass):
        return p
    draft_probs = step.draft_probs.probs[step.packed.clamp(max=step.draft_probs.probs.shape[0] - 1)].to(p.dtype)
    probs = step.probs if step.draft_probs.ids is None else step.probs[:, step.draft_probs.ids]
    return torch.where(step.judged, torch.minimum(probs, draft_probs).sum(dim=-1), 0.0)
