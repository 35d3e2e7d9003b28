"""Coupled verification: draft and target choose with the same noise, and the target's choice is always emitted.

Source: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2408.07978). With
Gumbel noise g that is a function of (seed, position), the target's token is argmax(log p + g); a draft survives if it
is that token. What is emitted is a function of seed, prefix and p alone: speculation on, off, or with another drafter
gives the same text, at any temperature.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.sampling.rng import gumbel
from speculative.sampling.verification import VerifyInput, VerifyOutput


def verify_coupled(step: VerifyInput) -> VerifyOutput:
    """Accept the drafts that equal the target's own choice."""
    return accept_choice(step, largest(step.probs, (step.seeds, step.positions), step.host)[:, 0])


def largest(
    probs: Tensor,
    keys: tuple[Tensor, Tensor],
    kernels: Kernels | None = None,
    *,
    ids: Tensor | None = None,
    vocab_size: int | None = None,
    count: int = 1,
) -> Tensor:
    """[R, count] int64, the columns of distributions [R, W] with the largest log p + noise, the largest first.

    Args:
        probs: as described; a column without mass comes last, if at all.
        keys: seeds and positions, [R] each, as for `gumbel`.
        kernels: of a CPU; None = torch.
        ids: [W] the token of each column, of `vocab_size` tokens; None where it is the column.
        vocab_size: needed with `ids`.
        count: columns to return.
    """
    if kernels is not None and probs.device.type == "cpu" and probs.dtype == torch.float32:
        return kernels.choose(probs, ids, *keys, count)
    noise = gumbel(*keys, vocab_size or probs.shape[1], kernels)
    scores = probs.log() + (noise if ids is None else noise[:, ids])
    return scores.argmax(dim=-1, keepdim=True) if count == 1 else scores.topk(count).indices


def accept_choice(step: VerifyInput, choice: Tensor) -> VerifyOutput:
    """Accept the drafts that equal what the target chose at each row, [R].

    The rule has no coin of its own, so what was expected is reported as what was observed.
    """
    num_accepted = step.leading(step.drafts == choice)
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=choice[step.first_rows + num_accepted],
        expected_accepted=num_accepted.to(step.probs.dtype),
    )


class NoiseRows(NamedTuple):
    """The noise of those of E rows that choose with noise."""

    coupled: Tensor  # [E] bool
    seeds: Tensor  # [E] int64, as for `gumbel`
    positions: Tensor  # [E] int64, as for `gumbel`
