"""Shapes of trees of drafts, against their definition: nodes named by the candidates on the way to them."""

from itertools import accumulate, product

import numpy as np
import pytest

from speculative.draft_tree import DraftTree, rows_of_levels

MOST = (3, 3, 2)
WIDTHS = [
    widths for depth in range(len(MOST) + 1) for widths in product(*(range(1, width + 1) for width in MOST[:depth]))
]
Name = tuple[int, ...]
"""A node's name: which candidate is taken at each depth, from the root; () = the pending token."""


def names_of(widths: tuple[int, ...]) -> list[Name]:
    """All nodes in preorder, the pending token first: a node's name begins those of the nodes behind it."""
    return sorted(
        name for depth in range(len(widths) + 1) for name in product(*(range(width) for width in widths[:depth]))
    )


def before(name: Name) -> list[Name]:
    """The names of a node's ancestors and of itself."""
    return [name[:depth] for depth in range(len(name) + 1)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_nodes_stand_in_preorder_and_levels_hold_those_of_each_depth(widths: tuple[int, ...]) -> None:
    tree, names = DraftTree.of_widths(widths), names_of(widths)
    assert len(tree) == len(names) - 1
    assert [names[parent] for parent in tree.parents] == [name[:-1] for name in names[1:]]
    assert tree.depths.tolist() == [len(name) for name in names]
    for node, name in enumerate(names):
        assert [names[own] for own in tree.path(node)] == before(name)[1:]
        children = [(*name, rank) for rank in range(widths[len(name)])] if len(name) < len(widths) else []
        assert [names[child] for child in tree.children[node]] == children
    levels = [[name for name in names if len(name) == depth] for depth in range(1, len(widths) + 1)]
    of_depth = [np.flatnonzero(tree.depths == depth).tolist() for depth in range(1, len(widths) + 1)]
    assert [[names[node] for node in level] for level in of_depth] == levels
    assert rows_of_levels(widths) == tuple(accumulate(map(len, levels), initial=0))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_branches_are_the_fewest_runs_of_rows_that_follow_each_other(widths: tuple[int, ...]) -> None:
    tree, names = DraftTree.of_widths(widths), names_of(widths)
    assert [row for start, stop, _ in tree.branches for row in range(start, stop)] == list(range(len(names)))
    for start, stop, ancestors in tree.branches:
        assert start == 0 or names[start][:-1] != names[start - 1], "it belongs to the branch before it"
        for row in range(start, stop):
            assert [names[own] for own in (*ancestors, *range(start, row + 1))] == before(names[row])
