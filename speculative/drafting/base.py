"""The drafter's contract: drafts are values of the step that made them."""

from collections.abc import Mapping
from collections.abc import Sequence as Entries
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from speculative.draft_tree import DraftTree
from speculative.sampling.draft_probs import DraftProbs, PointMass, num_rows
from speculative.state.batch import Batch, Int64s, StepInput
from speculative.state.kv_cache import KVCache
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One step's drafts, packed: entry i of the batch has `counts[i]` of them, in order.

    counts: [B] int64; an entry with nothing drafted takes no row.
    token_ids: [sum(counts)] int64.
    draft_probs: q, what the drafts were sampled from, row by row.
    deterministic: entries whose drafts are so although others' are sampled, as where passages are repeated; without q.
    trees: the shape of each entry's drafts, which stand in the order of its nodes; None = each behind the other.
    """

    counts: Int64s
    token_ids: Int64s
    draft_probs: DraftProbs
    deterministic: frozenset[int] = frozenset()
    trees: tuple[DraftTree, ...] | None = None

    @classmethod
    def pack(
        cls, drafts: Entries[Entries[int]], draft_probs: DraftProbs, deterministic: frozenset[int] = frozenset()
    ) -> "DraftOutput":
        """Pack one list of token ids per entry of the batch; `PointMass()` as q of deterministic drafts."""
        counts = np.fromiter((len(draft) for draft in drafts), np.int64, len(drafts))
        flat = np.fromiter((token for draft in drafts for token in draft), np.int64, int(counts.sum()))
        return cls(counts, flat, draft_probs, deterministic)

    @classmethod
    def nothing(cls, num_entries: int) -> "DraftOutput":
        """No drafts for any entry."""
        return cls(np.zeros(num_entries, np.int64), np.empty(0, np.int64), PointMass())

    @property
    def lacks_q(self) -> bool:
        """Return whether there is not one row of q for each sampled draft: what they were sampled from is lost."""
        rows = num_rows(self.draft_probs)
        return rows is not None and rows != self.counts.sum() - self.counts[list(self.deterministic)].sum()

    def per_entry(self) -> list[list[int]]:
        """The drafts of each entry."""
        return split_drafts(self.token_ids, self.counts)


def split_drafts(token_ids: Int64s, counts: Int64s) -> list[list[int]]:
    """Packed drafts, as `DraftOutput` has them, by entry."""
    return [part.tolist() for part in np.split(token_ids, np.cumsum(counts)[:-1])]


class Drafter:
    """Guesses the next tokens of every sequence of a batch; this one none.

    Beside `propose`, all here is what a drafter without weights needs: it rebuilds its state from the tokens.

    capture: the target's layers whose inputs it reads; () where it reads none.
    state_name: what its state in a handoff must have been made with; "none" where it has no state.
    """

    capture: tuple[int, ...] = ()
    state_name = "none"

    def propose(self, batch: Batch) -> DraftOutput:
        """At most `max_drafts` tokens per entry.

        The tokens of deterministic drafts, and the number of drafts of any kind, may depend on the prefix, on q and on
        the past; never on a token or a random number that was drawn at the position."""
        return DraftOutput.nothing(len(batch.entries))

    def observe(self, batch: Batch, step_input: StepInput, features: Tensor) -> None:
        """Take in the features [N, F] of a step's rows, before anybody knows which of them will stand."""

    def logits_again(self, sequence: Sequence, places: Entries[tuple[int, int]]) -> Tensor | None:
        """Logits [R, V] float32 that drafts of a finished answer were sampled from, while `sequence` replays it.

        None where drafts are not sampled from such, or it cannot compute these. places: tokens before the round, and
        drafts before the one; in the order of the answer."""
        return None

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""

    def cache_of(self, sequence: Sequence) -> KVCache | None:
        """The keys and values of its own that a handoff takes along, as the section `drafter_kv`."""
        return None

    def export_state(self, sequence: Sequence) -> dict[str, Tensor]:
        """Bring `cache_of` up to date, and return the other sections of a handoff that drafting on needs."""
        return {}

    def check_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The sections of a handoff that will be read; none where nothing is drafted. Raises HandoffRefused: a section
        is missing or has another shape."""
        return {}

    def import_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> None:
        """Go on from the sections of a handoff; the sequence has its blocks, and `cache_of` what belongs into them."""


def constrain(batch: Batch, draft: DraftOutput) -> tuple[DraftOutput, dict[int, list[Bools]]]:
    """Masks of the entries that must keep to a form, by entry, and the drafts without what the masks forbid.

    Only deterministic drafts (point masses) are cut short: they are a function of the prefix. To cut a draft that was
    drawn, because of the token that was drawn, would change the distribution; there the mask makes p(x) = 0, and the
    draft is rejected."""
    if draft.trees is not None or all(entry.sequence.constraint is None for entry in batch.entries):
        return draft, {}  # what a tree's tokens are followed by is known once there is a way through it
    drafts = draft.per_entry()
    masks = allowed_masks(batch, drafts)
    all_deterministic = isinstance(draft.draft_probs, PointMass)
    for index, mask in masks.items():
        if all_deterministic or index in draft.deterministic:
            drafts[index] = drafts[index][: len(mask) - 1]
    return DraftOutput.pack(drafts, draft.draft_probs, draft.deterministic), masks


def allowed_masks(batch: Batch, drafts: Entries[list[int]]) -> dict[int, list[Bools]]:
    """Return what the structures of the entries that sample allow, by entry, given the drafts of each."""
    structured = [
        (index, entry.sequence, entry.sequence.constraint)
        for index, entry in enumerate(batch.entries)
        if entry.sequence.constraint is not None and entry.samples
    ]
    return {
        index: constraint.allowed(sequence.tokens[sequence.num_prompt :], drafts[index])
        for index, sequence, constraint in structured
    }
