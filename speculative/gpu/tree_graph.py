"""All levels of a round's trees as one captured function, and the paths to their leaves, each of which is judged."""

import functools
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from speculative.gpu.buckets import Bucket
from speculative.gpu.draft_graph import CapturedDrafts
from speculative.gpu.padding import block_tables, row_fields, tree_fields
from speculative.gpu.paged_attention import PagedRows
from speculative.gpu.row_drafts import CandidateFields, PickCandidates
from speculative.gpu.staged_inputs import Array, Field
from speculative.state.batch import Entry, Int64s, StepInput, build_step_input
from speculative.state.draft_tree import DraftTree, level_sizes
from speculative.state.tree_input import TreeInput

_BY_NODE = ("positions", "visible", "slots")


class TreeLoop(CapturedDrafts):
    """Drafts trees of these widths; its buckets are of levels.

    The candidates of a level lie together in the statics: sequence after sequence, in the order of their nodes.

    Args:
        parts: of `CapturedDrafts`.
        widths: candidates of the nodes of each depth.
        pick: finds them.
    """

    def __init__(self, *parts: Any, widths: tuple[int, ...], pick: PickCandidates) -> None:
        super().__init__(*parts)
        self._widths, self._pick = widths, pick
        self._sizes = level_sizes(widths)
        self._begins = (0, *accumulate(self._sizes))  # of each level among the candidates of a sequence

    def places(self, bucket: Bucket, counts: Int64s) -> Int64s:
        """Implement `CapturedDrafts.places`; counts: levels of each sequence's tree."""
        sequences = np.arange(len(counts))
        places = {levels: self._places_of(bucket, self._tree(levels), sequences) for levels in set(counts.tolist())}
        return np.concatenate([places[levels][index, 1:] for index, levels in enumerate(counts.tolist())])

    def _tree(self, levels: int) -> DraftTree:
        return DraftTree.of_widths(self._widths[:levels])

    def _places_of(self, bucket: Bucket, tree: DraftTree, sequences: Int64s) -> Int64s:
        """[E, n + 1] where the nodes of such trees of these sequences lie among those of all; anything for node 0."""
        levels = tree.depths - 1
        begins, sizes = np.array(self._begins, np.int64)[levels], np.array(self._sizes, np.int64)[levels]
        places: Int64s = begins * bucket.num_seqs + sequences[:, None] * sizes + tree.ranks
        return places

    def _fields(self, bucket: Bucket) -> dict[str, Field]:
        """Of the nodes that have candidates behind them, level by level."""
        num_rows = bucket.num_seqs * self._begins[bucket.num_queries - 1]
        fields = row_fields(bucket, self._room)
        return fields | {name: replace(fields[name], shape=(num_rows,)) for name in _BY_NODE} | tree_fields(num_rows)

    def _fill_drafts(self, host: dict[str, Array], bucket: Bucket, entries: Sequences[Entry]) -> int:
        """Implement `CapturedDrafts._fill_drafts`: node j of a tree lies j slots behind its sequence's last token."""
        columns, size = self._tables.of([entry.sequence for entry in entries]), self._room.block_size
        all_levels = np.array([entry.max_drafts for entry in entries])
        all_roots = np.array([len(entry.sequence.tokens) - 1 for entry in entries], np.int64)
        end = 0
        for levels in set(all_levels.tolist()):
            tree, own = self._tree(levels), np.flatnonzero(all_levels == levels)
            nodes = np.flatnonzero((tree.depths > 0) & (tree.depths < levels))
            rows, roots = self._places_of(bucket, tree, own)[:, nodes], all_roots[own, None]
            places = roots + nodes
            host["positions"][rows], host["roots"][rows] = roots + tree.depths[nodes], roots + 1
            host["visible"][rows], host["ancestors"][rows] = places + 1, tree.ancestors[nodes]
            host["slots"][rows] = columns[places // size, own[:, None]].astype(np.int64) * size + places % size
            end = max(end, int(roots.max()) + 1 + int(nodes.max(initial=0)))
        num_blocks = -(-end // size)
        host["blocks"][:num_blocks, : len(entries)] = columns[:num_blocks]
        return num_blocks

    def _compute(self, bucket: Bucket, inputs: dict[str, Tensor]) -> None:
        num_seqs, num_levels = bucket
        model, tokens, tables = self._model, self._statics.drafts.tokens, block_tables(inputs)
        hidden = self._statics.draft_hidden[:num_seqs]
        fields = CandidateFields(**{name: inputs[name] for name in CandidateFields._fields})
        for depth, width in enumerate(self._widths[:num_levels]):
            logits = model.logits(hidden)
            columns = self._pick(logits, fields, depth, model.ids, self._sampler.vocab_size, width).view(-1)
            nodes = slice(num_seqs * self._begins[depth], num_seqs * self._begins[depth + 1])
            tokens[nodes].copy_(columns if model.ids is None else model.ids[columns])
            if depth + 1 < num_levels:
                of_trees = inputs["roots"][nodes], inputs["ancestors"][nodes]
                rows = PagedRows(inputs["slots"][nodes], inputs["visible"][nodes], tables, self._first, *of_trees)
                parents = hidden[:, None].expand(-1, width, -1).reshape(-1, hidden.shape[1])
                hidden = model.run(tokens[nodes], parents, inputs["positions"][nodes], self._cache.attention(rows))


@functools.cache
def _paths_of(tree: DraftTree) -> tuple[Int64s, Int64s]:
    """The drafts of each path to a leaf, and the nodes of all paths, node 0 first in each."""
    paths = [(0, *tree.path(leaf)) for leaf in tree.leaves]
    return np.array([len(path) - 1 for path in paths], np.int64), np.array([n for own in paths for n in own], np.int64)


@dataclass(frozen=True, slots=True)
class LeafPaths:
    """The paths from the root of each tree to its leaves, as entries whose drafts stand one behind the other.

    The target's choices lead along one of them, which is the one with the most accepted drafts.

    firsts: [E] each tree's first path, which is that of first candidates.
    owners: [P] the entry of each path.
    step_input: the rows of all of them.
    rows: [R] which of the trees' rows they are.
    nodes: [R] the node of each.
    """

    firsts: Int64s
    owners: Int64s
    step_input: StepInput
    rows: Int64s
    nodes: Int64s

    @classmethod
    def of(cls, entries: Sequences[Entry], trees: TreeInput) -> "LeafPaths":
        """Those of a step of which every entry has one known token; drafts are still to come."""
        lengths, all_nodes = zip(*map(_paths_of, trees.trees), strict=True)
        owners = np.repeat(np.arange(len(entries)), [len(own) for own in lengths])
        counts, nodes = np.concatenate(lengths), np.concatenate(all_nodes)
        unknown = np.zeros(int(counts.sum()), np.int64)
        step_input = build_step_input([entries[owner] for owner in owners.tolist()], counts, unknown, trees.block_size)
        rows = np.repeat(trees.row_starts[owners], counts + 1) + nodes
        return cls(np.searchsorted(owners, np.arange(len(entries))), owners, step_input, rows, nodes)

    def best(self, num_accepted: Int64s) -> Int64s:
        """[E] each entry's path with the most accepted drafts, the first of several; num_accepted: [P].

        Behind its last accepted draft it goes on with first candidates.
        """
        order = np.lexsort((np.arange(len(self.owners)), -num_accepted, self.owners))
        return order[self.firsts]

    def rows_of(self, paths: Int64s) -> Int64s:
        """The numbers of the rows that are of these paths, ascending."""
        return np.flatnonzero(np.isin(self.step_input.verify_entries, paths))
