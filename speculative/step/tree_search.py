"""Runs the target over trees of drafts, and keeps the path that it takes through each.

At each node the target chooses its token with the noise of the position (`sampling.coupled`); the path goes on to
the draft that is this token, and ends where there is none. So what is emitted is what would be without any drafts, and
which drafts stand at a node decides only how far the path leads. From here on a step is one whose drafts are these
paths, one draft behind the other.

Sources: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
Verification" (2305.09781), for trees; Daliri et al. (2408.07978), for the coupling.
"""

from collections.abc import Sequence as Entries
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.draft_tree import DraftTree
from speculative.drafting.base import DraftOutput, allowed_masks
from speculative.sampling.draft_probs import Candidates
from speculative.state.batch import Batch, Entry, StepInput
from speculative.state.token_constraint import Bools
from speculative.state.tree_input import TreeInput
from speculative.step.runner import ModelRunner, TargetOutput, compute
from speculative.step.sampler import Sampler


class Found(NamedTuple):
    """A step of which one path through each tree is left."""

    draft: DraftOutput  # the drafts on these paths, one behind the other
    masks: dict[int, list[Bools]]  # what structured entries may emit along them, by entry
    step_input: StepInput  # the rows on these paths, and those of known tokens
    computed: TargetOutput  # of these rows


class TreeSearch(NamedTuple):
    """Computes a step whose drafts are trees."""

    runner: ModelRunner
    sampler: Sampler  # chooses tokens
    block_size: int

    def run(self, batch: Batch, draft: DraftOutput, capture: tuple[int, ...]) -> Found:
        """Run the target, find each tree's path, and put its keys and values where those of its positions belong."""
        assert draft.trees is not None
        rows = TreeInput.build(batch.entries, draft.trees, draft.token_ids, self.block_size)
        hidden, features, logits = compute(self.runner, rows, capture)
        drafts = draft.per_entry()
        paths = self._find_paths(batch.entries, draft.trees, drafts, logits)
        # Behind the last accepted draft follow first candidates: the one that was rejected, and those behind it.
        whole = [tree.to_leaf(path) for tree, path in zip(draft.trees, paths, strict=True)]
        sources, targets = (torch.from_numpy(slots).to(self.runner.device) for slots in rows.moves(whole))
        if len(sources):
            self.runner.cache.move(sources, targets)
        said = [[own[node - 1] for node in path] for own, path in zip(drafts, whole, strict=True)]
        step_input, kept = rows.along(batch.entries, whole)
        judged = np.searchsorted(rows.verify_rows, kept[step_input.verify_rows])
        of_rows, of_logits = (torch.from_numpy(places).to(hidden.device) for places in (kept, judged))
        computed = TargetOutput(hidden[of_rows], features[of_rows], logits[of_logits])
        return Found(DraftOutput.pack(said, Candidates()), allowed_masks(batch, said), step_input, computed)

    def _find_paths(
        self, entries: Entries[Entry], trees: Entries[DraftTree], drafts: Entries[list[int]], logits: Tensor
    ) -> list[tuple[int, ...]]:
        """The nodes on each entry's path; logits [R, V]: of the trees' nodes, sampled entry after sampled entry."""
        first_rows = np.cumsum([(1 + len(tree)) * entry.samples for entry, tree in zip(entries, trees, strict=True)])
        nodes, going_on = [0] * len(entries), [len(tree) > 0 for tree in trees]
        while any(going_on):
            walking = list(compress(range(len(entries)), going_on))
            said = [[drafts[own][node - 1] for node in trees[own].path(nodes[own])] for own in walking]
            rows = [int(first_rows[own]) - 1 - len(trees[own]) + nodes[own] for own in walking]
            choices = self._choose([entries[own] for own in walking], said, logits[rows])
            for own, choice in zip(walking, choices, strict=True):
                children = trees[own].children[nodes[own]]
                found = [node for node in children if drafts[own][node - 1] == choice]
                nodes[own] = found[0] if found else nodes[own]
                going_on[own] = bool(found and trees[own].children[found[0]])
        return [tree.path(node) for tree, node in zip(trees, nodes, strict=True)]

    def _choose(self, entries: Entries[Entry], said: Entries[list[int]], logits: Tensor) -> list[int]:
        allowed = allowed_masks(Batch(tuple(entries)), said)
        masks = [allowed[index][-1] if index in allowed else None for index in range(len(entries))]
        return self.sampler.choose([entry.sequence for entry in entries], said, masks, logits).tolist()
