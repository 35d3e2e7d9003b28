"""Drafts a tree for each sequence: several candidates for a position, each with drafts of its own behind it.

The candidates of a node are its k largest of log q + noise, with the noise that the target chooses its token with: a
sample from q without replacement (Kool et al., "Stochastic Beams and Where to Find Them", 1903.06059), which holds the
target's choice the oftener the larger k is. A greedy request's candidates are the k likeliest tokens.
"""

from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from speculative.draft_tree import DraftTree
from speculative.drafting.base import DraftOutput
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.errors import ConfigError
from speculative.sampling.draft_probs import Candidates, PointMass
from speculative.state.batch import Batch, Entry


class TreeDrafter(ModelDrafter):
    """A `ModelDrafter` whose drafts are trees.

    Args:
        parts: of `ModelDrafter`.
        widths: candidates of the nodes of each depth, at most.

    Raises:
        ConfigError: it is not on a CPU, or has fewer tokens than candidates.
    """

    def __init__(self, *parts: Any, widths: tuple[int, ...]) -> None:
        super().__init__(*parts)
        if self._device.type != "cpu":
            raise ConfigError(
                "drafter.tree: trees are drafted on a CPU only. Remove it, or set device to cpu (for a replica, "
                "num_gpus of its pool to 0)."
            )
        if max(widths) > self.sampler.width:
            raise ConfigError(
                f"drafter.tree: must have at most {self.sampler.width} candidates for a position: the drafter knows no "
                "more tokens."
            )
        self._widths = widths

    def propose(self, batch: Batch) -> DraftOutput:
        """A tree for each entry, of its `max_drafts` levels. A repeated passage has no siblings."""
        drafting, hidden = self.begin_round(batch)
        if not drafting:
            return DraftOutput.pack([entry.repeated for entry in batch.entries], PointMass())
        trees = [DraftTree.of_widths(self._widths[: entry.max_drafts]) for entry in drafting]
        drafts = self._grow(drafting, trees, hidden)
        self.end_round(drafting, [tokens[: entry.max_drafts] for entry, tokens in zip(drafting, drafts, strict=True)])
        made, shapes = iter(drafts), iter(trees)
        tokens = [next(made) if entry.by_drafter else entry.repeated for entry in batch.entries]
        whole = [
            next(shapes) if entry.by_drafter else DraftTree.of_widths((1,) * len(entry.repeated))
            for entry in batch.entries
        ]
        return replace(DraftOutput.pack(tokens, Candidates()), trees=tuple(whole))

    def _grow(self, entries: Sequences[Entry], trees: Sequences[DraftTree], hidden: Tensor) -> list[list[int]]:
        """The tokens of each tree's nodes, level by level; hidden: [E, hidden] of the entries' pending tokens."""
        drafts = [[-1] * len(tree) for tree in trees]
        sequences = [entry.sequence for entry in entries]
        slots = [
            own.slots(len(own.tokens) + len(tree), self._block_size) for own, tree in zip(sequences, trees, strict=True)
        ]
        nodes = [(index, 0) for index in range(len(entries))]  # those whose candidates are next, a row of hidden each
        for depth, width in enumerate(self._widths):
            owners = [sequences[index] for index, _ in nodes]
            columns = self.sampler.candidates(owners, self.model.logits(hidden), depth, width)
            tokens = columns if self.model.ids is None else self.model.ids[columns]
            for (index, node), candidates in zip(nodes, tokens.tolist(), strict=True):
                for child, token in zip(trees[index].children[node], candidates, strict=True):
                    drafts[index][child - 1] = token
            grown = [
                (row, index, child)
                for row, (index, node) in enumerate(nodes)
                for child in trees[index].children[node]
                if trees[index].children[child]
            ]
            if not grown:
                break
            parents = [row for row, _, _ in grown]
            nodes = [(index, child) for _, index, child in grown]
            of_nodes = np.array([drafts[index][node - 1] for index, node in nodes], np.int64)
            places = []  # of a sequence's tokens, and of the nodes on the path to one of its tree
            for index, node in nodes:
                length, path = len(sequences[index].tokens), np.array(trees[index].path(node), np.int64)
                places.append(np.concatenate([slots[index][:length], slots[index][length - 1 + path]]))
            spans = [(len(own) - 1, len(own)) for own in places]
            hidden = self._run(of_nodes, hidden[parents], spans, places)
        return drafts
