"""What verifiers take and give."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.draft_law import DraftLaw, PointMass, SubVocabulary
from speculative.model.kernels import Kernels, VerifyStruct
from speculative.rng import gumbel
from speculative.sampling import draw, kernels_for


@dataclass(frozen=True)
class VerifyInput:
    """One step's verify rows, packed. Row j of an entry judges its draft j; its last row draws the bonus token.

    probs: [R, V] the target's law p at each row.
    law: the draft's law q.
    drafts: [R] int64, the draft judged there; -1 in each entry's last row.
    packed: [R] int64, which of the step's packed drafts that is; meaningless in last rows.
    entries: [R] int64, which drawing entry a row belongs to.
    offsets: [R] int64, its position in the round.
    first_rows: [E] int64, each entry's first row.
    counts: [E] int64, its drafts.
    coins: [R] float64 in (0, 1), purpose coin.
    finals: [R] float64 in (0, 1), for the token drawn at this row if it is the last one: purpose residual where a draft
        was rejected, purpose bonus in the last row.
    seeds, positions: [R] int64, the request's seed (as two's complement) and the position of the token drawn there.
    """

    probs: Tensor
    law: DraftLaw
    drafts: Tensor
    packed: Tensor
    entries: Tensor
    offsets: Tensor
    first_rows: Tensor
    counts: Tensor
    coins: Tensor
    finals: Tensor
    seeds: Tensor
    positions: Tensor

    @property
    def judged(self) -> Tensor:
        """[R] bool: rows that judge a draft."""
        return self.drafts >= 0

    def p_of_drafts(self) -> Tensor:
        """[R] p of each row's draft; 0 in last rows."""
        return torch.where(self.judged, self.probs.gather(1, self.drafts.clamp(min=0)[:, None])[:, 0], 0.0)

    def q_of_drafts(self) -> Tensor:
        """[R] q of each row's draft; 0 in last rows."""
        return self.law.of_drafts(self.drafts, self.packed).to(self.probs.dtype)

    def q_at(self, rows: Tensor) -> Tensor:
        """[len(rows), V] q over the vocabulary; a zero row in last rows, so that the residual there is p itself."""
        return self.law.at(self.drafts[rows], self.packed[rows], self.probs.shape[1]).to(self.probs.dtype)

    @functools.cached_property
    def native(self) -> tuple[Kernels, VerifyStruct] | None:
        """The step as our CPU kernels read it, where they can."""
        kernels = kernels_for(self.probs)
        law = None if isinstance(self.law, PointMass) or not len(self.law.probs) else self.law
        if kernels is None or (law is not None and law.probs.dtype != torch.float32):
            return None
        part = law if isinstance(law, SubVocabulary) else None
        tensors = {
            "p": self.probs,
            "q": None if law is None else law.probs,
            "ids": None if part is None else part.ids,
            "columns": None if part is None else part.columns,
            "drafts": self.drafts,
            "packed": self.packed,
            "entries": self.entries,
            "first_rows": self.first_rows,
        }
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        struct = VerifyStruct(
            num_rows=len(self.drafts),
            num_entries=len(self.first_rows),
            size=self.probs.shape[1],
            width=0 if law is None else law.probs.shape[1],
            **{name: tensor.data_ptr() for name, tensor in kept.items()},
        )
        struct.kept = kept  # as long as it points there
        return kernels, struct

    def noise(self) -> Tensor:
        """[R, V] float64 Gumbel noise of the coupled verifier, a function of (seed, position) alone."""
        return gumbel(self.seeds, self.positions, self.probs.shape[1])

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
        rows = chosen[self.entries]
        renumbered = chosen.cumsum(0) - 1
        counts = self.counts[chosen]
        return VerifyInput(
            probs=self.probs[rows],
            law=self.law,
            drafts=self.drafts[rows],
            packed=self.packed[rows],
            entries=renumbered[self.entries[rows]],
            offsets=self.offsets[rows],
            first_rows=(counts + 1).cumsum(0) - counts - 1,
            counts=counts,
            coins=self.coins[rows],
            finals=self.finals[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What survived, on the device.

    num_accepted: [E] int64, leading drafts that survived.
    token_ids: [E] int64, the recovered or bonus token after them.
    expected_accepted: [E], the verifier's acceptance probability summed over the positions it reached.
    """

    num_accepted: Tensor
    token_ids: Tensor
    expected_accepted: Tensor


Verifier = Callable[[VerifyInput], VerifyOutput]
"""Decides which drafts survive, so that what is emitted follows the target's law."""


def residual(probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The law after a rejection, up to a factor: (p - q)+, [E, V]; p where nothing is left of it but rounding.

    The difference of two floats is rounded once, so this is as exact as p and q are; a zero row of q gives p.
    """
    left = (probs - draft_probs).clamp(min=0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, probs)


def draw_last(step: VerifyInput, rows: Tensor, shares: Tensor | None = None) -> Tensor:
    """[E] the token after the accepted drafts, from the residual law of each entry's row.

    Args:
        step: what is verified.
        rows: [E] int64, the row that each entry came to.
        shares: [E] what p counts there; None = 1.
    """
    kernels, law, drafts = kernels_for(step.probs), step.law, step.drafts[rows]
    if kernels is None:
        probs = step.probs[rows] if shares is None else shares[:, None] * step.probs[rows]
        return draw(residual(probs, step.q_at(rows)), step.finals[rows])
    shares = torch.ones(len(rows)) if shares is None else shares
    if isinstance(law, PointMass):
        places = torch.where(drafts >= 0, 0, -1)
        draft: tuple[Tensor, Tensor | None, Tensor] = (torch.ones((1, 1)), drafts[:, None], places)
    else:
        places = torch.where(drafts >= 0, step.packed[rows], -1)
        draft = (law.probs, law.ids[None] if isinstance(law, SubVocabulary) else None, places)
    return kernels.draw_residual((step.probs, rows, shares), draft, step.finals[rows])
