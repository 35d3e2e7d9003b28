"""The packed rows of a step whose drafts are trees, and those of one path through each tree."""

from collections.abc import Iterator
from collections.abc import Sequence as Entries
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from speculative.draft_tree import DraftTree
from speculative.state.batch import AttentionRows, Entry, Int64s, StepInput, build_step_input
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TreeInput(StepInput):
    """Each draft is a row, in the order of its tree's nodes; its position is that of its depth."""

    trees: tuple[DraftTree, ...]  # of each entry; one without drafts where nothing is drafted

    @classmethod
    def build(
        cls, entries: Entries[Entry], trees: tuple[DraftTree, ...], draft_ids: Int64s, block_size: int
    ) -> "TreeInput":
        """Pack a step's tokens; `draft_ids` holds the drafts of all trees, in the order of their nodes."""
        packed = build_step_input(entries, np.array([len(tree) for tree in trees]), draft_ids, block_size)
        positions = packed.positions.copy()
        for tree, stop in zip(trees, packed.row_starts[1:].tolist(), strict=True):
            root = stop - len(tree) - 1
            positions[root:stop] = positions[root] + tree.depths
        given = {field.name: getattr(packed, field.name) for field in fields(packed)}
        return cls(**given | {"positions": positions}, trees=trees)

    def attention_rows(self) -> AttentionRows:
        """Implement `StepInput.attention_rows`; each branch attends as if it were a sequence of its own."""
        starts, contexts, slots = [0], list[Int64s](), list[Int64s]()
        for own, tree, row, place in self._roots():
            all_slots = own.slots(place + len(tree) + 1, self.block_size)
            slots.append(all_slots[own.num_computed :])
            for first, last, ancestors in tree.branches:
                starts.append(row + last)
                nodes = np.array((*ancestors, *range(first, last)), np.int64)
                contexts.append(np.concatenate([all_slots[:place], all_slots[place + nodes]]))
        return AttentionRows(np.concatenate(slots), np.array(starts, np.int64), tuple(contexts))

    def along(self, entries: Entries[Entry], paths: Entries[tuple[int, ...]]) -> tuple[StepInput, Int64s]:
        """The rows of one path through each tree, as those of drafts one behind the other, and which rows they are.

        Args:
            entries: of the step.
            paths: of each entry, the nodes behind node 0.
        """
        rows = list[int]()
        for start, (_, _, row, _), path in zip(self.row_starts.tolist(), self._roots(), paths, strict=False):
            rows += (*range(start, row + 1), *(row + node for node in path))
        counts, draft_rows = np.array([len(path) for path in paths]), np.array(rows, np.int64)
        input_ids, positions = self.input_ids[draft_rows], self.positions[draft_rows]
        lengths = np.diff(self.row_starts) - [len(tree) for tree in self.trees] + counts
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - counts, lengths)
        chains = build_step_input(entries, counts, input_ids[offsets >= 0], self.block_size)
        return replace(chains, input_ids=input_ids, positions=positions), draft_rows

    def moves(self, paths: Entries[tuple[int, ...]]) -> tuple[Int64s, Int64s]:
        """Slots that the rows of these paths lie in, and slots that they belong in; only of those that differ."""
        sources, targets = list[Int64s](), list[Int64s]()
        for (own, tree, _, place), path in zip(self._roots(), paths, strict=True):
            all_slots = own.slots(place + len(tree) + 1, self.block_size)
            nodes, depths = np.array(path, np.int64), np.arange(1, len(path) + 1)
            moved = nodes != depths
            sources.append(all_slots[place + nodes[moved]])
            targets.append(all_slots[place + depths[moved]])
        return np.concatenate(sources), np.concatenate(targets)

    def _roots(self) -> Iterator[tuple[Sequence, DraftTree, int, int]]:
        """Each entry's sequence and tree, the row of node 0, and its place in the sequence's slots."""
        for own, tree, (start, stop) in zip(
            self.sequences, self.trees, pairwise(self.row_starts.tolist()), strict=True
        ):
            row = stop - len(tree) - 1
            yield own, tree, row, own.num_computed + row - start
