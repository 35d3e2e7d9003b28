"""Synthetic acceptance, for sweeps of cost against accepted length: every draft survives with a given probability.

What it emits is wrong on purpose. The engine refuses it outside benchmarks and marks every delta.
"""

import torch

from speculative.sampling import draw
from speculative.verification.base import Verifier, VerifyInput, VerifyOutput


def synthetic_verifier(acceptance: float) -> Verifier:
    """A verifier that accepts each draft with probability `acceptance`, and then draws from p."""

    def verify(step: VerifyInput) -> VerifyOutput:
        num_accepted = step.leading(step.coins < acceptance)
        final_rows = step.first_rows + num_accepted
        chance = torch.full_like(step.coins, acceptance, dtype=step.probs.dtype)
        return VerifyOutput(
            num_accepted=num_accepted,
            token_ids=draw(step.probs[final_rows], step.finals[final_rows]),
            expected_accepted=step.sum_reached(chance, num_accepted),
        )

    return verify
