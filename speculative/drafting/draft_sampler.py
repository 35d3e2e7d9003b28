"""Samples drafts from a drafter's logits, with the request's own temperature and filters, on its own random
stream.

What is drawn from travels on as q. A greedy request's draft is the likeliest token, and its q has all mass there. A
reproducible request's draft is chosen with the noise that its target token will be chosen with, so that the two agree
as often as can be.
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.coupled import NoiseRows, largest
from speculative.sampling.ops import DistributionOps
from speculative.sampling.probs import LastRows, SamplingRows
from speculative.sampling.rng import Float64s, Purpose, uniforms
from speculative.state.batch import Int64s
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftRound:
    """Parameters and random numbers of a round's drafts, made once for all of them."""

    rows: SamplingRows
    uniforms: Tensor  # [K, E] float64, one row for each draft of the round
    noise: NoiseRows | None  # that of the coupled verifier, its positions [K, E]; None where no request uses it


class DraftSampler:
    """Samples from a drafter's vocabulary.

    Args:
        ids: [W] int64, the target's token of each column; None = the drafter has the target's vocabulary.
        vocab_size: of the target.
        ops: of the engine.
        sampled: False = always the likeliest token, whatever the request's temperature.
        all_coupled: the engine's verifier is the coupled one for every request.
    """

    def __init__(
        self, ids: Tensor | None, vocab_size: int, ops: DistributionOps, *, sampled: bool, all_coupled: bool
    ) -> None:
        self._ids = ids
        self.width = vocab_size if ids is None else len(ids)
        self.vocab_size = vocab_size
        self._ops = ops
        self.sampled = sampled
        self._all_coupled = all_coupled
        self._rows = LastRows()

    def start_round(self, sequences: Sequences[Sequence], num_drafts: int, device: torch.device) -> DraftRound:
        """Return what up to `num_drafts` drafts of each sequence are drawn with."""
        coupled = [self.is_coupled(sequence) for sequence in sequences]
        noise = None
        if any(coupled):
            keys = (np.array(coupled), *noise_keys(sequences, num_drafts, lengths_of(sequences)))
            noise = NoiseRows(*(torch.from_numpy(key).to(device) for key in keys))
        drawn = torch.from_numpy(self.uniforms(sequences, num_drafts, lengths_of(sequences))).to(device)
        return DraftRound(self.rows_of(sequences, device), drawn, noise)

    def uniforms(self, sequences: Sequences[Sequence], num_drafts: int, lengths: Int64s) -> Float64s:
        """Return what drafts behind so many tokens [..., E] are drawn with, [num_drafts, ..., E] float64 in (0, 1)."""
        key = np.empty((4, num_drafts, *lengths.shape), np.uint64)
        key[0] = np.array([sequence.request.seed for sequence in sequences], np.uint64)
        key[1] = lengths
        key[2] = np.arange(num_drafts).reshape(-1, *[1] * lengths.ndim)
        key[3] = Purpose.DRAFT
        return uniforms(*key.reshape(4, -1), kernels=self._ops.host).reshape(num_drafts, *lengths.shape)

    def is_coupled(self, sequence: Sequence) -> bool:
        """Return whether its drafts are chosen with the noise of their target tokens."""
        return self._all_coupled or sequence.params.reproducible

    def rows_of(self, sequences: Sequences[Sequence], device: torch.device) -> SamplingRows:
        """Temperature and filters of each sequence, for the drafter's vocabulary."""
        return self._rows.of([sequence.params for sequence in sequences], self.width, device)

    def draw(self, logits: Tensor, draft_round: DraftRound, offset: int) -> tuple[Tensor, Tensor]:
        """Draft number `offset` of the round of each sequence: its columns [E] int64 in the drafter's vocabulary, and
        the distributions [E, W] float32. logits is [E, W], of any type."""
        probs = self._ops.target_probs(self._ops.process(logits.float(), draft_round.rows), draft_round.rows)
        if not self.sampled:
            columns = probs.argmax(dim=-1)
            return columns, torch.zeros_like(probs).scatter_(1, columns[:, None], 1.0)
        columns = self._ops.draw(probs, draft_round.uniforms[offset])
        if draft_round.noise is not None:
            rows = draft_round.noise._replace(positions=draft_round.noise.positions[offset])
            columns = self._ops.choose(probs, columns, rows, self._ids, self.vocab_size)
        return columns, probs

    def candidates(self, sequences: Sequences[Sequence], logits: Tensor, offset: int, count: int) -> Tensor:
        """[E, count] int64, the columns that are the best candidates for draft number `offset` of each sequence, the
        best one first; logits as for `draw`."""
        rows, greedy = self.rows_of(sequences, logits.device), [own.params.greedy for own in sequences]
        processed = self._ops.process(logits.float(), rows)
        if not self.sampled or all(greedy):
            return processed.topk(count).indices
        seeds, positions = noise_keys(sequences, offset + 1, lengths_of(sequences))
        keys = torch.from_numpy(seeds).to(logits.device), torch.from_numpy(positions[offset]).to(logits.device)
        probs = self._ops.target_probs(processed, rows)
        columns = largest(probs, keys, self._ops.host, ids=self._ids, vocab_size=self.vocab_size, count=count)
        if any(greedy):
            columns[rows.greedy] = processed[rows.greedy].topk(count).indices
        return columns

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [E, W] of the drafter's vocabulary -> [E, V] of the target's; -inf where it has no column."""
        if self._ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self._ids, logits)


def lengths_of(sequences: Sequences[Sequence]) -> Int64s:
    """[E] the tokens of each, behind which its next draft comes."""
    return np.array([len(sequence.tokens) for sequence in sequences], np.int64)


def noise_keys(sequences: Sequences[Sequence], num_drafts: int, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Seeds [E], and positions [num_drafts, E] of drafts behind so many tokens [E], as for `gumbel`."""
    seeds = np.array([sequence.request.seed for sequence in sequences], np.uint64).view(np.int64)
    return seeds, lengths + np.arange(num_drafts)[:, None]
