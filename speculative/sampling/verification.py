"""Inputs and outputs of verifiers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speculative.errors import EngineFault
from speculative.kernels.bindings import Kernels
from speculative.sampling.draft_probs import DraftProbs, PointMass, num_rows


@dataclass(frozen=True)
class VerifyInput:
    """One step's verify rows, packed. Row j of an entry judges its draft j; its last row draws the bonus token.

    probs: [R, V] the target's distribution p at each row.
    draft_probs: q, the distribution of the drafts; where nobody drafted, a point mass whatever was given.
    drafts: [R] int64, the draft judged there; -1 in each entry's last row.
    packed: [R] int64, which of the step's packed drafts that is; meaningless in last rows.
    entries: [R] int64, which sampled entry a row belongs to.
    offsets: [R] int64, its position in the round.
    first_rows: [E] int64, each entry's first row.
    counts: [E] int64, its drafts.
    accept_uniforms: [R] float64 in (0, 1), purpose coin.
    sample_uniforms: [R] float64 in (0, 1), for the token sampled at this row if it is the last one: purpose
        residual where a draft was rejected, purpose bonus in the last row.
    seeds: [R] int64, the request's seed as two's complement.
    positions: [R] int64, the position of the token drawn there.
    host: kernels of the noise; None = torch.
    prepared: what an implementation keeps of this step between its calls; a copy of the step starts without it.

    Raises:
        EngineFault: q has fewer rows than there are drafts.
    """

    probs: Tensor
    draft_probs: DraftProbs
    drafts: Tensor
    packed: Tensor
    entries: Tensor
    offsets: Tensor
    first_rows: Tensor
    counts: Tensor
    accept_uniforms: Tensor
    sample_uniforms: Tensor
    seeds: Tensor
    positions: Tensor
    host: Kernels | None = None
    prepared: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, num_drafts = num_rows(self.draft_probs), self.drafts.shape[0] - self.first_rows.shape[0]
        if rows is not None and rows < num_drafts:  # after `select` q has more: `packed` still numbers all of its rows
            raise EngineFault(
                f"q is missing: {num_drafts} drafts are to be verified, and {max(rows, 0)} of them came with what they "
                "were sampled from. A deterministic drafter must say so (PointMass)."
            )
        if rows == 0:
            object.__setattr__(self, "draft_probs", PointMass())

    @property
    def judged(self) -> Tensor:
        """[R] bool: rows that judge a draft."""
        return self.drafts >= 0

    def p_of_drafts(self) -> Tensor:
        """[R] p of each row's draft; 0 in last rows."""
        return torch.where(self.judged, self.probs.gather(1, self.drafts.clamp(min=0)[:, None])[:, 0], 0.0)

    def q_of_drafts(self) -> Tensor:
        """[R] q of each row's draft; 0 in last rows."""
        return self.draft_probs.of_drafts(self.drafts, self.packed).to(self.probs.dtype)

    def q_at(self, rows: Tensor) -> Tensor:
        """[len(rows), V] q over the vocabulary; a zero row in last rows, so that the residual there is p itself."""
        return self.draft_probs.at(self.drafts[rows], self.packed[rows], self.probs.shape[1]).to(self.probs.dtype)

    def leading(self, survives: Tensor) -> Tensor:
        """[E] how many of each entry's first drafts survive, given [R] bool which survive on their own."""
        most = torch.iinfo(torch.int64).max
        first_loss = torch.where(survives & self.judged, most, self.offsets)  # a last row always counts as one
        return torch.full_like(self.counts, most).scatter_reduce(0, self.entries, first_loss, "amin")

    def sum_reached(self, values: Tensor, num_accepted: Tensor) -> Tensor:
        """[E] sum of `values` [R] over the draft positions that were reached: all accepted ones and the one after."""
        reached = self.judged & (self.offsets <= num_accepted[self.entries])
        return values.new_zeros(self.counts.shape).scatter_add(0, self.entries, torch.where(reached, values, 0.0))

    def select(self, chosen: Tensor) -> "VerifyInput":
        """The rows of some entries only; chosen: [E] bool."""
        rows = chosen[self.entries].nonzero()[:, 0]  # once: each look at a mask is a wait for a GPU
        renumbered = chosen.cumsum(0) - 1
        counts = self.counts[chosen]
        by_row = ("probs", "drafts", "packed", "offsets", "accept_uniforms", "sample_uniforms", "seeds", "positions")
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in by_row},
            entries=renumbered[self.entries[rows]],
            first_rows=(counts + 1).cumsum(0) - counts - 1,
            counts=counts,
        )


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """The drafts that survived, on the device."""

    num_accepted: Tensor  # [E] int64, leading drafts that survived
    token_ids: Tensor  # [E] int64, the recovered or bonus token after them
    expected_accepted: Tensor  # [E], the verifier's acceptance probability summed over the positions it reached


Verifier = Callable[[VerifyInput], VerifyOutput]
"""Decides which drafts survive, so that what is emitted follows the target's distribution."""


def residual(probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The distribution after a rejection, up to a factor: (p - q)+, [E, V]; p where nothing is left of it but rounding.

    The difference of two floats is rounded once, so this is as exact as p and q are; a zero row of q gives p.
    """
    left = (probs - draft_probs).clamp(min=0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, probs)
