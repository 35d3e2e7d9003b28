"""The rows of a step with trees of drafts: where they attend, and what is left of them along one path."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from speculative.draft_tree import DraftTree
from speculative.request import Request
from speculative.state.batch import Entry, build_step_input
from speculative.state.sequence import Sequence
from speculative.state.tree_input import TreeInput

BLOCK_SIZE = 4
SHAPES: list[tuple[int, int, bool, tuple[int, ...]]] = [  # computed, known, samples, widths
    (9, 1, True, (3, 2)),
    (7, 1, True, ()),
    (4, 6, False, ()),
    (0, 1, True, (2, 2, 2)),
    (0, 5, True, ()),
    (11, 1, True, (1, 1)),
    (2, 1, True, (2, 1, 3)),
]


def entries_of(shapes: list[tuple[int, int, bool, tuple[int, ...]]]) -> tuple[list[Entry], tuple[DraftTree, ...]]:
    """Sequences in blocks at random places, and their trees."""
    trees = tuple(DraftTree.of_widths(widths) for *_, widths in shapes)
    random, entries = np.random.default_rng(1), list[Entry]()
    blocks = iter(random.permutation(200).tolist())
    for index, ((computed, known, samples, widths), tree) in enumerate(zip(shapes, trees, strict=True)):
        num_tokens = computed + known + (0 if samples else 3)
        sequence = Sequence(Request(f"r{index}", tuple(random.integers(0, 1000, num_tokens).tolist())))
        sequence.num_computed = computed
        sequence.blocks = [next(blocks) for _ in range(-(-(computed + known + len(tree)) // BLOCK_SIZE))]
        entries.append(Entry(sequence, known, len(widths), samples))
    return entries, trees


def drafts_of(trees: tuple[DraftTree, ...]) -> list[list[int]]:
    """Tokens of the nodes of each tree, all of them different."""
    numbers = iter(range(2000, 3000))
    return [[next(numbers) for _ in range(len(tree))] for tree in trees]


def build(entries: list[Entry], trees: tuple[DraftTree, ...]) -> TreeInput:
    return TreeInput.build(entries, trees, np.concatenate(drafts_of(trees)).astype(np.int64), BLOCK_SIZE)


def attended(rows: TreeInput) -> list[list[int]]:
    """The slots that each row attends to, as attention reads them: a span's rows are the last of its context."""
    attention, found = rows.attention_rows(), list[list[int]]()
    assert len(attention.row_starts) == len(attention.context_slots) + 1
    for (start, stop), context in zip(pairwise(attention.row_starts.tolist()), attention.context_slots, strict=True):
        found += [context[: len(context) - (stop - 1 - row)].tolist() for row in range(start, stop)]
    assert [own[-1] for own in found] == attention.slots.tolist(), "a row's own key and value come last"
    return found


def places(entries: list[Entry], trees: tuple[DraftTree, ...]) -> Iterator[tuple[Sequence, int, list[int], int]]:
    """For each row its sequence, its position, the places in its sequence that it attends to, and its own place."""
    for (own, known, *_), tree in zip(entries, trees, strict=True):
        root = own.num_computed + known - 1
        for place in range(own.num_computed, root):
            yield own, place, list(range(place + 1)), place
        for node in range(len(tree) + 1):
            path = tree.path(node)
            yield own, root + len(path), [*range(root + 1), *(root + step for step in path)], root + node


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[::-1], SHAPES[:1], SHAPES[1:3]], ids=["all", "back", "one", "none"])
def test_rows_attend_to_what_is_computed_to_their_ancestors_and_to_themselves(
    shapes: list[tuple[int, int, bool, tuple[int, ...]]],
) -> None:
    entries, trees = entries_of(shapes)
    rows = build(entries, trees)
    expected = list(places(entries, trees))
    assert rows.positions.tolist() == [position for _, position, _, _ in expected]
    for found, (own, position, wanted, place) in zip(attended(rows), expected, strict=True):
        slots = own.slots(len(own.blocks) * BLOCK_SIZE, BLOCK_SIZE).tolist()
        names = {slot: place for place, slot in enumerate(slots)}
        assert [names[slot] for slot in found] == wanted
        assert names[found[-1]] == place
        assert len(found) == position + 1, "a window over what a row attends to is one over positions"


def some_paths(trees: tuple[DraftTree, ...], seed: int, *, to_leaves: bool) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    nodes = [
        np.flatnonzero(tree.depths == tree.depths.max()).tolist() if to_leaves else range(len(tree) + 1)
        for tree in trees
    ]
    return [tree.path(int(random.choice(own))) for tree, own in zip(trees, nodes, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_along_a_path_a_step_is_one_whose_drafts_are_that_path_and_its_keys_are_moved_there(seed: int) -> None:
    entries, trees = entries_of(SHAPES)
    rows = build(entries, trees)
    paths = some_paths(trees, seed, to_leaves=seed < 4)
    said = [[own[node - 1] for node in path] for own, path in zip(drafts_of(trees), paths, strict=True)]
    chain = build_step_input(entries, np.array([len(own) for own in said]), np.concatenate(said), BLOCK_SIZE)
    found, kept = rows.along(entries, paths)
    for field in fields(chain):
        one, other = getattr(found, field.name), getattr(chain, field.name)
        assert one.tolist() == other.tolist() if isinstance(one, np.ndarray) else one == other, field.name
    assert rows.input_ids[kept].tolist() == chain.input_ids.tolist()
    assert rows.positions[kept].tolist() == chain.positions.tolist()
    cache = np.full(200 * BLOCK_SIZE, -1)
    cache[rows.attention_rows().slots] = rows.input_ids
    sources, targets = rows.moves(paths)
    assert not (sources == targets).any()
    cache[targets] = cache[sources]
    for entry, drafts in zip(entries, said, strict=True):
        own, begin = entry.sequence, entry.sequence.num_computed
        known = own.tokens[begin : begin + entry.num_known]
        stop = begin + entry.num_known + len(drafts)
        assert cache[own.slots(stop, BLOCK_SIZE)[begin:]].tolist() == [*known, *drafts]
