"""The drafter's contract: drafts are values of the step that made them."""

from collections.abc import Sequence as Entries
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from speculative.batch import Batch
from speculative.constraint import Bools
from speculative.draft_law import DraftLaw, PointMass

Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One step's drafts, packed: entry i of the batch has `counts[i]` of them, in order.

    counts: [B] int64; an entry with nothing drafted takes no row.
    token_ids: [sum(counts)] int64.
    law: what the drafts were drawn from, row by row.
    """

    counts: Int64s
    token_ids: Int64s
    law: DraftLaw

    @classmethod
    def pack(cls, drafts: Entries[Entries[int]], law: DraftLaw | None = None) -> "DraftOutput":
        """Pack one list of token ids per entry of the batch; chosen, unless a law is given."""
        counts = np.fromiter((len(draft) for draft in drafts), np.int64, len(drafts))
        flat = np.fromiter((token for draft in drafts for token in draft), np.int64, int(counts.sum()))
        return cls(counts, flat, law or PointMass())

    def per_entry(self) -> list[list[int]]:
        """The drafts of each entry."""
        return [part.tolist() for part in np.split(self.token_ids, np.cumsum(self.counts)[:-1])]


class Drafter(Protocol):
    """Guesses the next tokens of every sequence of a batch."""

    def propose(self, batch: Batch) -> DraftOutput:
        """At most `max_drafts` tokens per entry.

        Chosen drafts and the number of any are a function of the prefix, of q, and of what the drafter has seen before,
        never of a token or a random number that was drawn at the position.
        """
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


def constrain(batch: Batch, draft: DraftOutput) -> tuple[DraftOutput, dict[int, list[Bools]]]:
    """Masks of the entries that must keep to a form, by entry, and the drafts without what the masks forbid.

    Only chosen drafts (point masses) are cut short: they are a function of the prefix. To cut a draft that was drawn,
    because of the token that was drawn, would change the law; there the mask makes p(x) = 0, and the draft is rejected.
    """
    masks: dict[int, list[Bools]] = {}
    if all(entry.sequence.constraint is None for entry in batch.entries):
        return draft, masks
    drafts = draft.per_entry()
    chosen = isinstance(draft.law, PointMass)
    for index, entry in enumerate(batch.entries):
        sequence = entry.sequence
        if sequence.constraint is None or not entry.draws:
            continue
        masks[index] = sequence.constraint.allowed(sequence.tokens[sequence.num_prompt :], drafts[index])
        if chosen:
            drafts[index] = drafts[index][: len(masks[index]) - 1]
    return (DraftOutput.pack(drafts) if masks and chosen else draft), masks
