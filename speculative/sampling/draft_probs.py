"""The distribution a draft was sampled from, as the verifiers read it: q, in float32, row by row.

It travels with the drafts it belongs to, and a drafter that chooses its drafts says so. A q that is missing is never
read as a point mass: that would be lossless, and slow for no visible reason.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PointMass:
    """Deterministic drafts: all mass lies on the token."""

    def of_drafts(self, drafts: Tensor, packed: Tensor) -> Tensor:
        """q of each row's draft, [R] float32; 0 in bonus rows (draft -1)."""
        del packed
        return (drafts >= 0).float()

    def of_tokens(self, tokens: Tensor, drafts: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
        """q of any tokens [R], as many float32; 0 in bonus rows."""
        del packed, vocab_size
        return ((drafts >= 0) & (tokens == drafts)).float()

    def at(self, drafts: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
        """q over the vocabulary, [R, V] float32; a zero row in bonus rows."""
        del packed
        mass = (drafts >= 0).float()[:, None]
        rows = torch.zeros((drafts.shape[0], vocab_size), device=drafts.device)
        return rows.scatter_(1, drafts.clamp(min=0)[:, None], mass)


@dataclass(frozen=True, slots=True)
class Candidates(PointMass):
    """Drafts that were found in a tree by what the target chose: no statistic may take them for drafts that came before
    the choice."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drafts that were drawn, from the whole vocabulary or from a part of it: then q is 0 everywhere else."""

    probs: Tensor  # [D, W] float32, row d is what packed draft d was sampled from
    ids: Tensor | None = None  # [W] int64, the tokens its columns stand for; None = each for the token of its number
    columns: Tensor | None = None  # [D] int64, the column of each draft; None where it is the draft

    def __post_init__(self) -> None:
        if torch.finfo(self.probs.dtype).bits < 32:
            raise TypeError(f"q must be float32, the precision it is drawn and compared in; got {self.probs.dtype}.")

    def of_drafts(self, drafts: Tensor, packed: Tensor) -> Tensor:
        """q of each row's draft, [R] float32; 0 in bonus rows (draft -1). packed: [R] which draft a row judges."""
        return torch.where(drafts >= 0, self.probs[self._within(packed), self._columns(drafts, packed)], 0.0)

    def mass_before(self, drafts: Tensor, packed: Tensor) -> Tensor:
        """[R] float64: the mass of q before each row's draft, in the order it is sampled in; anything in bonus rows."""
        return mass_before(self.probs, self._within(packed), self._columns(drafts, packed))

    def of_tokens(self, tokens: Tensor, drafts: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
        """q of any tokens [R], as many float32; 0 in bonus rows and outside the part."""
        columns = tokens if self.ids is None else columns_of(self.ids, vocab_size)[tokens]
        values = self.probs[self._within(packed), columns.clamp(min=0)]
        return torch.where((drafts >= 0) & (columns >= 0), values, 0.0)

    def at(self, drafts: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
        """q over the vocabulary, [R, V] float32; a zero row in bonus rows."""
        rows = torch.where(drafts[:, None] >= 0, self.probs[self._within(packed)], 0.0)
        if self.ids is None:
            return rows
        return rows.new_zeros((len(rows), vocab_size)).index_copy_(1, self.ids, rows)

    def _columns(self, drafts: Tensor, packed: Tensor) -> Tensor:
        """[R] of each row's draft; any in bonus rows."""
        return drafts.clamp(min=0) if self.columns is None else self.columns[self._within(packed)]

    def _within(self, packed: Tensor) -> Tensor:
        """Bonus rows judge no draft; wherever they point, it must be a row."""
        return packed.clamp(max=self.probs.shape[0] - 1)


DraftProbs = PointMass | Drawn


def mass_before(probs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[R] float64: the mass that distributions [D, W] have in the columns before one, [R]; rows: [R] of which."""
    if probs.device.type == "cpu":  # without a matrix
        places = zip(rows.tolist(), columns.tolist(), strict=True)
        distributions = probs.numpy()
        return torch.tensor([float(distributions[row, :column].sum()) for row, column in places], dtype=torch.float64)
    before = torch.arange(probs.shape[1], device=probs.device) < columns[:, None]
    return torch.where(before, probs[rows], 0.0).sum(dim=-1, dtype=torch.float64)


@functools.lru_cache(maxsize=8)
def columns_of(ids: Tensor, vocab_size: int) -> Tensor:
    """[V] int32, the column of each token where `ids` [W] has one, else -1. Made once for each drafter's vocabulary."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
    columns[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return columns


def num_rows(draft_probs: object) -> int | None:
    """The drafts that a distribution holds q of; None where they are deterministic, so that it holds for any; -1 of
    what is no distribution."""
    if isinstance(draft_probs, PointMass):
        return None
    return draft_probs.probs.shape[0] if isinstance(draft_probs, Drawn) else -1
