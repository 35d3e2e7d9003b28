"""The interface of what samples a draft for each of some sequences, from a drafter's logits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DraftFields(NamedTuple):
    """Parameters and random numbers of K drafts of each of E sequences; all on the device.

    temperature: [E, 1] float32. greedy: [E] bool. log_min_p, top_p: [E] float32, and top_k: [E] int64, as in `Filters`.
    uniforms: [K, E] float64. coupled: [E] bool, sequences whose drafts are chosen with noise; seeds: [E] int64, and
    noise_positions: [K, E] int64, of that noise.
    """

    temperature: Tensor
    greedy: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniforms: Tensor
    coupled: Tensor
    seeds: Tensor
    noise_positions: Tensor


class DraftBuffers(NamedTuple):
    """The drafts of a step: draft j of the i-th of E sequences lies in row j * E + i.

    tokens: [D] int64. columns: [D] int64, those of the drafter's vocabulary. probs: [D, W] float32, the distributions
    that they were sampled from. mass_before: [D] float64, the mass of each distribution before the draft's column.
    """

    tokens: Tensor
    columns: Tensor
    probs: Tensor
    mass_before: Tensor

    @classmethod
    def empty(cls, num_drafts: int, width: int, device: torch.device) -> "DraftBuffers":
        """Room for so many drafts from `width` columns."""
        tokens = torch.zeros(num_drafts, dtype=torch.int64, device=device)
        probs = torch.zeros((num_drafts, width), dtype=torch.float32, device=device)
        return cls(tokens, tokens.clone(), probs, tokens.double())

    def tokens_or(self, token_ids: Tensor, sources: Tensor) -> Tensor:
        """Return the drafts in the rows `sources`; where that is -1, what is in `token_ids`."""
        return torch.where(sources >= 0, self.tokens[sources.clamp(min=0)], token_ids)


SampleDrafts = Callable[[Tensor, DraftFields, int, Tensor | None, int, DraftBuffers], None]
"""logits [E, W] in the drafter's own type, the round's fields, an offset below K, ids [W] int64 of each column's token
(None where it is the column), the target's vocabulary size, and the step's drafts, which get each sequence's draft
number `offset` in its row."""
