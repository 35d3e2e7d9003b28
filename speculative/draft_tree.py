"""Trees of drafts: several candidates for a position, each with drafts of its own behind it.

The nodes of a tree are rows of a step: node 0 is the pending token, node j the draft in row j behind it. They stand in
preorder, so a node's first candidate is the row behind it, and what follows first candidates only is a chain of rows.
A row's position in its sequence is that of its parent and one more; it attends to what is computed of the sequence, to
the rows of its ancestors, and to itself.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Branch(NamedTuple):
    """Rows of a tree that follow each other, `start` to `stop`, and the rows of the first one's ancestors."""

    start: int
    stop: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class DraftTree:
    """The shape of a tree."""

    parents: tuple[int, ...]  # of the nodes behind node 0: n, in preorder

    @classmethod
    @functools.cache
    def of_widths(cls, widths: tuple[int, ...]) -> "DraftTree":
        """Every node of depth d has `widths[d]` candidates behind it."""
        parents = list[int]()

        def grow(node: int, depth: int) -> None:
            for _ in range(widths[depth] if depth < len(widths) else 0):
                parents.append(node)
                grow(len(parents), depth + 1)

        grow(0, 0)
        return cls(tuple(parents))

    def __len__(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> Int64s:
        """[n + 1] how many drafts lie on the way to each node, its own included."""
        return np.array([len(path) for path in self._paths], np.int64)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The candidates behind each node, the first one first."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @functools.cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The fewest runs of rows in which each row is the parent of the next."""
        starts = [0, *(node for node, parent in enumerate(self.parents, 1) if parent != node - 1)]
        stops = [*starts[1:], len(self) + 1]
        paths = [() if start == 0 else (0, *self.path(start)[:-1]) for start in starts]
        return tuple(Branch(*branch) for branch in zip(starts, stops, paths, strict=True))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first draft to this one; () of node 0."""
        return self._paths[node]

    def to_leaf(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The path, and first candidates behind its end."""
        node = path[-1] if path else 0
        while self.children[node]:
            node = self.children[node][0]
        return self.path(node)

    @functools.cached_property
    def _paths(self) -> tuple[tuple[int, ...], ...]:
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents, 1):
            paths.append((*paths[parent], node))
        return tuple(paths)


@functools.cache
def rows_of_levels(widths: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts of the first 0, 1, ... levels of `DraftTree.of_widths` together."""
    return (0, *accumulate(accumulate(widths, mul)))
