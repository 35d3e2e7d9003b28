"""The drafter's contract: drafts are values of the step that made them."""

from collections.abc import Sequence as Entries
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from speculative.batch import Batch

Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class PointMass:
    """The law of a draft that was not drawn but chosen: all its mass lies on the token."""


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One step's drafts, packed: entry i of the batch has `counts[i]` of them, in order.

    counts: [B] int64; an entry with nothing drafted takes no row.
    token_ids: [sum(counts)] int64.
    law: what the drafts were drawn from.
    """

    counts: Int64s
    token_ids: Int64s
    law: PointMass = PointMass()

    @classmethod
    def pack(cls, drafts: Entries[Entries[int]]) -> "DraftOutput":
        """Pack one list of token ids per entry of the batch."""
        counts = np.fromiter((len(draft) for draft in drafts), np.int64, len(drafts))
        flat = np.fromiter((token for draft in drafts for token in draft), np.int64, int(counts.sum()))
        return cls(counts, flat)


class Drafter(Protocol):
    """Guesses the next tokens of every sequence of a batch."""

    def propose(self, batch: Batch) -> DraftOutput:
        """At most `max_drafts` tokens per entry. Must depend on the entry's own tokens alone."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        ...


class NoDrafter:
    """Plain decoding: nothing is ever drafted."""

    def propose(self, batch: Batch) -> DraftOutput:
        """No drafts for any entry."""
        return DraftOutput.pack([()] * len(batch.entries))

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
