"""Coupled verification: draft and target choose with the same noise, and the target's choice is always emitted.

Source: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2408.07978). With
Gumbel noise g that is a function of (seed, position), the target's token is argmax(log p + g); a draft survives if it
is that token. What is emitted is a function of seed, prefix and p alone: speculation on, off, or with another drafter
gives the same text, at any temperature.
"""

from speculative.verification.base import VerifyInput, VerifyOutput


def verify_coupled(step: VerifyInput) -> VerifyOutput:
    """Accept the drafts that equal the target's own choice.

    The rule has no coin of its own, so what was expected is reported as what was observed.
    """
    choice = (step.probs.log() + step.noise()).argmax(dim=-1)  # [R]
    num_accepted = step.leading(step.drafts == choice)
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=choice[step.first_rows + num_accepted],
        expected_accepted=num_accepted.to(step.probs.dtype),
    )
