"""The verify rows of a step, on the host: the one place that numbers their drafts and gives them random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.sampling.draft_probs import DraftProbs
from speculative.sampling.rng import Float64s, Purpose, uniforms
from speculative.sampling.verification import VerifyInput
from speculative.state.batch import StepInput

Int64s = np.ndarray[Any, np.dtype[np.int64]]

_ROW_FIELDS = ("drafts", "packed", "entries", "offsets", "seeds", "positions")
_FIELDS = (*_ROW_FIELDS, "first_rows", "counts", "accept_uniforms", "sample_uniforms")


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The fields of `VerifyInput` beside p and q, in three arrays: one copy to a device each."""

    rows: Int64s  # [6, R] int64, drafts to positions
    entries: Int64s  # [2, E] int64, first_rows and counts
    uniforms: Float64s  # [2, R] float64
    host: Kernels | None = None  # kernels that compute the random numbers; None = numpy

    @classmethod
    def build(
        cls,
        owners: tuple[Int64s, Int64s],
        counts: Int64s,
        seeds: Sequence[int],
        lengths: Sequence[int],
        drafts: Int64s,
        host: Kernels | None = None,
    ) -> "VerifyRows":
        """Number the drafts of E entries and give each row its random numbers.

        Args:
            owners: [R] the entry of each row, and [R] its place in that entry: an entry has one row a draft, and one
                more.
            counts: [E] drafts of each entry.
            seeds: [E] of each request.
            lengths: [E] tokens of each sequence before the round.
            drafts: [R] the draft verified at each row, -1 in each entry's last row.
            host: kernels that compute the random numbers; None = numpy.
        """
        entries, offsets = owners
        num_rows = len(entries)
        row_seeds, row_lengths = np.array(seeds, np.uint64)[entries], np.array(lengths, np.uint64)[entries]
        key = np.empty((4, 2, num_rows), np.uint64)
        key[0], key[1], key[2], key[3, 0] = row_seeds, row_lengths, offsets, int(Purpose.COIN)
        key[3, 1] = np.where(drafts < 0, np.uint64(Purpose.BONUS), np.uint64(Purpose.RESIDUAL))
        rows = np.empty((len(_ROW_FIELDS), num_rows), np.int64)
        rows[0], rows[2], rows[3], rows[4] = drafts, entries, offsets, row_seeds.view(np.int64)
        np.subtract(np.arange(num_rows), entries, out=rows[1])  # each entry before has one row without a draft
        np.add(row_lengths.view(np.int64), offsets, out=rows[5])
        of_entries = np.empty((2, len(counts)), np.int64)
        of_entries[0], of_entries[1] = np.cumsum(counts + 1) - counts - 1, counts
        drawn = uniforms(*key.reshape(4, -1), kernels=host).reshape(2, -1)
        return cls(rows, of_entries, drawn, host)

    @classmethod
    def of(cls, step_input: StepInput, host: Kernels | None) -> "VerifyRows":
        """Build the rows of a step's entries."""
        sequences = [entry.sequence for entry in step_input.sampled_entries]
        seeds = [sequence.request.seed for sequence in sequences]
        lengths = [len(sequence.tokens) for sequence in sequences]
        owners = (step_input.verify_entries, step_input.offsets)
        return cls.build(owners, step_input.draft_counts, seeds, lengths, step_input.drafts, host)

    def draft_uniforms(self) -> Float64s:
        """[R] what the draft judged at each row is sampled with, if it is; meaningless in last rows."""
        _, _, _, offsets, seeds, positions = self.rows.view(np.uint64)
        return uniforms(seeds, positions - offsets, offsets, np.full_like(offsets, Purpose.DRAFT), kernels=self.host)

    def named(self) -> dict[str, Int64s | Float64s]:
        """Each array by the name of its field."""
        return dict(zip(_FIELDS, (*self.rows, *self.entries, *self.uniforms), strict=True))

    def on_device(self, device: torch.device) -> dict[str, Any]:
        """Each field as a tensor there, by three copies."""
        moved = [torch.from_numpy(array).to(device) for array in (self.rows, self.entries, self.uniforms)]
        return dict(zip(_FIELDS, (row for array in moved for row in array.unbind()), strict=True))

    def input(self, probs: Tensor, draft_probs: DraftProbs) -> VerifyInput:
        """The input of a verifier, on the device of p [R, V]."""
        return VerifyInput(probs=probs, draft_probs=draft_probs, host=self.host, **self.on_device(probs.device))
