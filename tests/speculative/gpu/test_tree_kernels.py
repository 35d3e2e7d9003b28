"""Kernels for trees of drafts (in Triton's interpreter): attention to a path's rows, and candidates, against what they
are by definition."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speculative.gpu.row_drafts import CandidateFields, PickCandidates
from speculative.sampling.rng import gumbel
from speculative.state.draft_tree import DraftTree
from speculative.vocabulary.ops import TorchOps
from tests.speculative.gpu.test_paged_attention import BLOCK_SIZE, CONTEXTS, SIZES, TOLERANCE, scene
from tests.support.drafted_rows import FILTERS, OFFSET, DraftScene, draft_scene
from tests.support.torch_operators import TorchAttend, TorchCandidates

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)
BLOCK = 64
WIDTH, VOCABULARY = 3 * BLOCK + 11, 500  # the last block is not full


# -- attention ------------------------------------------------------------------------------------------------------


def path_by_path(query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, begin: int, tree: DraftTree) -> Tensor:
    """The attention of a tree's rows, [n + 1, num_heads, head_dim] in float64, over the positions that each sees."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for node in range(len(tree) + 1):
        seen = torch.tensor([*range(begin + 1), *(begin + own for own in tree.path(node))])
        slots = blocks[seen // BLOCK_SIZE] * BLOCK_SIZE + seen % BLOCK_SIZE
        for head in range(query.shape[1]):
            k, v = (part[slots, head // group].double() for part in (keys, values))
            out[node, head] = torch.softmax(k @ query[node, head].double() * query.shape[-1] ** -0.5, dim=0) @ v
    return out


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("widths", [(4,), (2, 1)])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 64)])
def test_a_row_of_a_tree_sees_its_path_alone(
    heads: tuple[int, int, int], widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Trees lie on the edges of blocks and of splits; beside them chains, and rows that stand for nothing."""
    from speculative.gpu.triton_attention import TritonAttend

    attend, tree = TritonAttend(SIZES), DraftTree.of_widths(widths)
    query, keys, values, rows = scene(heads, CONTEXTS, 5, dtype)
    roots, ancestors = rows.visible.clone(), torch.zeros_like(rows.visible)
    whole = [index for index, (_, count) in enumerate(CONTEXTS) if count == len(tree) + 1]
    for index in whole:
        roots[5 * index : 5 * index + 5] = CONTEXTS[index][0] + 1
        ancestors[5 * index : 5 * index + 5] = torch.from_numpy(tree.ancestors)
    found = attend(query, keys, values, replace(rows, roots=roots, ancestors=ancestors))
    chains = attend(query, keys, values, rows)
    by_torch = TorchAttend(BLOCK_SIZE)(query, keys, values, replace(rows, roots=roots, ancestors=ancestors))
    assert len(whole) == 2
    for index in range(len(CONTEXTS)):
        own = slice(5 * index, 5 * index + 5)
        if index in whole:
            expected = path_by_path(query[own], keys, values, rows.blocks[index], CONTEXTS[index][0], tree)
            assert (found[own].double() - expected).abs().max() < TOLERANCE[dtype]
            assert (by_torch[own].double() - expected).abs().max() < TOLERANCE[dtype]
            assert not torch.equal(found[own], chains[own])
        else:
            assert torch.equal(found[own], chains[own]), "the bits of a chain are the same beside trees"


@pytest.mark.usefixtures("poisoned")
def test_the_64th_draft_is_seen() -> None:
    """The last bit is the sign."""
    from speculative.gpu import triton_attention
    from speculative.gpu.paged_attention import AttentionSizes, PagedRows

    random, length = torch.Generator().manual_seed(3), 7 + 64
    keys, values = (torch.randn((6 * BLOCK_SIZE, 1, 16), generator=random) for _ in range(2))
    query, blocks = torch.randn((2, 2, 16), generator=random), torch.arange(6)[None]
    visible = torch.tensor([length, length])
    ancestors = torch.tensor([-(2**63) + 1, 2**62])
    rows = PagedRows(visible - 1, visible, blocks, 0, torch.full((2,), 7), ancestors)
    found = triton_attention.TritonAttend(AttentionSizes(BLOCK_SIZE, 2, 6))(query, keys, values, rows)
    for row, seen in enumerate(([*range(7), 7, 70], [*range(7), 69])):
        weights = torch.softmax(query[row] @ keys[seen, 0].T / 4, dim=-1)
        torch.testing.assert_close(found[row], weights @ values[seen, 0], rtol=1e-4, atol=1e-5)


# -- candidates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> PickCandidates:
    from speculative.gpu import triton_candidates

    monkeypatch.setattr(triton_candidates, "BLOCK", BLOCK)
    return triton_candidates.triton_candidates


def fields_of(given: DraftScene, num_nodes: int) -> CandidateFields:
    """Those of every `num_nodes`-th row: the rows between are of the same sequence."""
    own = {name: getattr(given.fields, name) for name in CandidateFields._fields}
    noise = own.pop("noise_positions")[:, ::num_nodes].contiguous()
    return CandidateFields(**{name: one[::num_nodes].contiguous() for name, one in own.items()}, noise_positions=noise)


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("vocab_size", [None, VOCABULARY])
@pytest.mark.parametrize("filters", [(), FILTERS])
def test_candidates_are_the_largest_of_log_q_and_noise(
    pick: PickCandidates, num_nodes: int, vocab_size: int | None, filters: tuple[tuple[float, int, float], ...]
) -> None:
    given = draft_scene(12, WIDTH, vocab_size=vocab_size)
    given = given.filtered(*filters) if filters else given
    fields, count = fields_of(given, num_nodes), 4
    found = pick(given.logits, fields, OFFSET, given.ids, given.vocab_size, count)
    assert torch.equal(
        found, TorchCandidates(TorchOps())(given.logits, fields, OFFSET, given.ids, given.vocab_size, count)
    )
    noise = gumbel(fields.seeds, fields.noise_positions[OFFSET], given.vocab_size)
    for row, columns in enumerate(found.tolist()):
        own = row // num_nodes
        assert len(set(columns)) == count
        if fields.greedy[own]:
            assert columns == given.logits[row].topk(count).indices.tolist()
        elif not filters:
            score = given.logits[row].double() / fields.temperature[own].double()
            score += noise[own] if given.ids is None else noise[own][given.ids]
            assert columns == score.topk(count).indices.tolist()
    assert len({tuple(columns) for columns in found.tolist()}) > 8


@pytest.mark.parametrize("size", [2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 1])
def test_vocabularies_of_any_size(pick: PickCandidates, size: int) -> None:
    given = draft_scene(4, size, seed=size)
    found = pick(given.logits, fields_of(given, 1), OFFSET, None, size, 2)
    assert torch.equal(found, TorchCandidates(TorchOps())(given.logits, fields_of(given, 1), OFFSET, None, size, 2))


def test_rows_of_no_numbers_have_candidates_within_the_vocabulary(pick: PickCandidates) -> None:
    given = draft_scene(3, WIDTH)
    given.logits[0], given.logits[1] = torch.nan, -torch.inf
    found = pick(given.logits, fields_of(given, 1), OFFSET, None, WIDTH, 3)
    assert ((found >= 0) & (found < WIDTH)).all()
