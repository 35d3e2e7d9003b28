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
from speculative.verification.base import VerifyInput, VerifyOutput


def verify_coupled(step: VerifyInput) -> VerifyOutput:
    """Accept the drafts that equal the target's own choice."""
    return accept_choice(step, chosen(step.probs, step.noise()))


def chosen(probs: Tensor, noise: Tensor) -> Tensor:
    """[R] the target's choice, from its distribution [R, V] with the noise [R, V] of the position."""
    return (probs.log() + noise).argmax(dim=-1)


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
    """The noise of those of E rows that choose with noise.

    coupled: [E] bool.
    seeds: [E] int64, as for `gumbel`.
    positions: [E] int64, as for `gumbel`.
    """

    coupled: Tensor
    seeds: Tensor
    positions: Tensor


def choose(
    probs: Tensor,
    columns: Tensor,
    rows: NoiseRows,
    ids: Tensor | None,
    vocab_size: int,
    kernels: Kernels | None = None,
) -> Tensor:
    """[E] the column of each draft: chosen from its distribution [E, W] with the noise of its target token where the
    row is coupled, else as in `columns` [E].

    ids: [W] the token of each column; None where it is the column. kernels: of the noise.
    """
    noise = gumbel(rows.seeds, rows.positions, vocab_size, kernels)
    choice = (probs.log() + (noise if ids is None else noise[:, ids])).argmax(dim=-1)
    return torch.where(rows.coupled, choice, columns)
