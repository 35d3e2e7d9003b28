"""The verify rows of a step, laid out on the host: the one place that numbers them and gives them random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.rng import Float64s, Purpose, uniforms
from speculative.verification.base import VerifyInput
from speculative.verification.draft_probs import DraftProbs

Int64s = np.ndarray[Any, np.dtype[np.int64]]

ROW_FIELDS = ("drafts", "packed", "entries", "offsets", "seeds", "positions")
ENTRY_FIELDS = ("first_rows", "counts")
UNIFORM_FIELDS = ("accept_uniforms", "sample_uniforms")


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The fields of `VerifyInput` beside p and q, in three arrays: one copy to a device each.

    rows: [6, R] int64, the `ROW_FIELDS`. entries: [2, E] int64, the `ENTRY_FIELDS`. uniforms: [2, R] float64, the
    `UNIFORM_FIELDS`.
    """

    rows: Int64s
    entries: Int64s
    uniforms: Float64s

    @classmethod
    def build(cls, counts: Sequence[int], seeds: Sequence[int], lengths: Sequence[int], drafts: Int64s) -> "VerifyRows":
        """Number the rows of E entries: each has one row a draft, and one more.

        Args:
            counts: [E] drafts of each entry.
            seeds: [E] of each request.
            lengths: [E] tokens of each sequence before the round.
            drafts: [R] the draft verified at each row, -1 in each entry's last row.
        """
        row_seeds, row_lengths, packed, purposes = list[int](), list[int](), list[int](), list[int]()
        first_rows, entries, offsets = list[int](), list[int](), list[int]()  # few rows: lists beat small arrays
        for index, (count, seed, length) in enumerate(zip(counts, seeds, lengths, strict=True)):
            first_row = len(packed)
            first_rows.append(first_row)
            packed += range(first_row - index, first_row - index + count + 1)  # each entry before has one row without
            entries += [index] * (count + 1)
            offsets += range(count + 1)
            row_seeds += [seed] * (count + 1)
            row_lengths += [length] * (count + 1)
            purposes += [int(Purpose.RESIDUAL)] * count + [int(Purpose.BONUS)]
        num_rows = len(packed)
        accept = [int(Purpose.COIN)] * num_rows
        key = np.array([row_seeds * 2, row_lengths * 2, offsets * 2, accept + purposes], np.uint64)
        rows = np.empty((len(ROW_FIELDS), num_rows), np.int64)
        rows[0], rows[1], rows[2], rows[3] = drafts, packed, entries, offsets
        rows[4] = key[0, :num_rows].view(np.int64)
        np.add(row_lengths, rows[3], out=rows[5])
        return cls(rows, np.array([first_rows, counts], np.int64), uniforms(*key).reshape(2, -1))

    def named(self) -> dict[str, Int64s | Float64s]:
        """Each array by the name of its field."""
        return {
            **dict(zip(ROW_FIELDS, self.rows, strict=True)),
            **dict(zip(ENTRY_FIELDS, self.entries, strict=True)),
            **dict(zip(UNIFORM_FIELDS, self.uniforms, strict=True)),
        }

    def on_device(self, device: torch.device) -> dict[str, Tensor]:
        """Each field as a tensor there, by three copies."""
        moved = [torch.from_numpy(array).to(device) for array in (self.rows, self.entries, self.uniforms)]
        names = (*ROW_FIELDS, *ENTRY_FIELDS, *UNIFORM_FIELDS)
        return dict(zip(names, (row for array in moved for row in array.unbind()), strict=True))

    def input(self, probs: Tensor, draft_probs: DraftProbs) -> VerifyInput:
        """The input of a verifier, on the device of p [R, V]."""
        return VerifyInput(probs=probs, draft_probs=draft_probs, **self.on_device(probs.device))
