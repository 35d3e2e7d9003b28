"""Attention of prompts and chunks: Triton's (in Triton's interpreter) against a loop over rows; the tables it reads."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.gpu.packed_attention import AttendPacked, PackedRows, sending_packed, tables_of
from speculative.model.config import PLAIN, ScoreRule
from speculative.state.batch import AttentionRows
from speculative.state.kv_cache import KVCache, KVShape
from tests.support.judged_rows import of_wider
from tests.support.torch_operators import attend_packed
from tests.support.triton_interpreter import needs_triton

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 96
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
HEADS = [(4, 4, 16), (6, 2, 64), (3, 1, 80), (7, 1, 96), (5, 1, 128), (2, 1, 256)]
# (positions before, rows): edges of tiles of 16 to 64 positions and of 32 to 128 rows, of blocks, and of nothing
CHUNKS = [(0, 1), (0, 16), (1, 33), (63, 2), (15, 66), (128, 1), (300, 43)]


@pytest.fixture
def triton() -> AttendPacked:
    from speculative.gpu.triton_prompts import triton_attend_packed

    return triton_attend_packed


class Scene:
    """Sequences with keys and values, of which chunks attend; all that nobody may see is NaN.

    What a sequence holds depends on its name alone, so scenes can be compared.
    """

    def __init__(self, heads: tuple[int, int, int], dtype: torch.dtype, first: int = 0) -> None:
        self.heads, self.dtype, self.first = heads, dtype, first

    def attend(
        self, chunks: dict[int, tuple[int, int]], attend: AttendPacked, rule: ScoreRule = PLAIN, spare: int = 0
    ) -> Tensor:
        """Compute each named sequence (positions before, rows), with `spare` rows and blocks of nobody in front. The
        cache lies further apart than its heads are wide."""
        num_heads, num_kv_heads, head_dim = self.heads
        cache = KVCache(KVShape(1, num_kv_heads, head_dim), NUM_BLOCKS * BLOCK_SIZE, dtype=self.dtype, device=CPU)
        cache.data.fill_(torch.nan)
        free = list(range(NUM_BLOCKS))[spare:][::-1]
        queries, contexts = list[Tensor](), list[np.ndarray]()
        for name, (before, count) in chunks.items():
            length = before + count
            own = np.array([free.pop() for _ in range(-(-length // BLOCK_SIZE))])
            slots = (own[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[self.first : length]
            random = torch.Generator().manual_seed(name)
            drawn = torch.randn((512, num_heads + 2 * num_kv_heads, head_dim), generator=random).to(self.dtype)
            drawn[: max(0, before + 1 - (rule.window or length)), num_heads:] = torch.nan
            cache.data[0][:, slots] = drawn[self.first : length, num_heads:].unflatten(1, (2, -1)).transpose(0, 1)
            queries.append(drawn[before:length, :num_heads])
            contexts.append(slots)
        starts = np.cumsum([0, *(count for _, count in chunks.values())])
        last = [slots[len(slots) - count :] for slots, (_, count) in zip(contexts, chunks.values(), strict=True)]
        rows = AttentionRows(np.concatenate(last), starts, tuple(contexts))

        def attend_apart(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scores: ScoreRule) -> Tensor:
            return attend(query, of_wider(keys), of_wider(values), rows, scores)

        made, sent = sending_packed(BLOCK_SIZE, self.first, attend_apart)(cache, rows, starts)
        assert torch.equal(sent[0], torch.from_numpy(starts))
        assert torch.equal(made.slots, torch.from_numpy(rows.slots))
        return made.attend_stored(0, torch.cat(queries), rule)


@needs_triton
@pytest.mark.parametrize(("heads", "dtype"), list(zip(HEADS, [torch.float32, torch.float16] * 3, strict=True)))
@pytest.mark.parametrize(
    ("rule", "first"), [(PLAIN, 0), (ScoreRule(window=1), 1), (ScoreRule(window=65, cap=1.0, scale=0.3), 0), (PLAIN, 1)]
)
def test_every_row_sees_its_own_past_and_nothing_else(
    triton: AttendPacked, rule: ScoreRule, first: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Positions below the first do not exist."""
    scene, chunks = Scene(heads, dtype, first), dict(enumerate(CHUNKS[2 * first :]))
    found, expected = scene.attend(chunks, triton, rule), scene.attend(chunks, attend_packed, rule)
    assert found.dtype == dtype and not expected.isnan().any()
    assert (found.double() - expected.double()).abs().max() < TOLERANCE[dtype]


@needs_triton
def test_few_programs_find_nothing_to_do(triton: AttendPacked) -> None:
    """A chunk of 2,048 rows of one prompt beside 15 sequences without rows, for a head of four queries."""
    from speculative.gpu.triton_prompts import most_tiles

    assert most_tiles(4 * 2048, 16, 128) == 64 + 15
    assert [most_tiles(rows, 1, 128) for rows in (1, 128, 129)] == [1, 1, 2]
    scene, chunks = Scene((4, 1, 16), torch.float32), {number: (number, 3 * (number % 3)) for number in range(40)}
    assert torch.allclose(scene.attend(chunks, triton), scene.attend(chunks, attend_packed), atol=2e-5)


def matmul_by_rows(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As tensor cores multiply: a row's sums are in the same order wherever it stands. The interpreter's are not."""
    return np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype))


@needs_triton
@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(window=50)])
def test_neither_neighbours_nor_chunks_nor_places_change_a_bit(
    triton: AttendPacked, monkeypatch: pytest.MonkeyPatch, rule: ScoreRule
) -> None:
    monkeypatch.setattr(np, "matmul", matmul_by_rows)
    scene = Scene((6, 2, 64), torch.float16)
    whole = scene.attend({7: (0, 200)}, triton, rule)
    for cuts in ((0, 1, 64, 200), (0, 37, 100, 101, 200)):
        parts = []
        for number, (begin, end) in enumerate(pairwise(cuts)):
            others = {1: (number * 50, 90), 2: (3, 1)}
            found = scene.attend(others | {7: (begin, end - begin)}, triton, rule, spare=number)
            parts.append(found[91:])
        assert torch.equal(torch.cat(parts), whole)


@needs_triton
def test_a_query_of_another_type_or_layout_is_read_as_it_is_meant(triton: AttendPacked) -> None:
    scene, seen = Scene((4, 2, 32), torch.float16), list[Tensor]()

    def strided(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scores: ScoreRule) -> Tensor:
        wide = torch.full((*query.shape[:2], 2 * query.shape[2]), torch.nan)
        wide[:, :, ::2] = query
        seen.append(triton(wide[:, :, ::2], keys, values, rows, scores))
        return triton(query, keys, values, rows, scores)

    expected = scene.attend({0: (9, 30)}, strided)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0].half(), expected)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tables_name_the_block_of_every_position(block_size: int, first: int) -> None:
    random = np.random.default_rng(block_size)
    lengths, counts = [1 + first, 2 * block_size, 2 * block_size + 1, 37], [1, 2 * block_size - first, 1, 5]
    contexts = []
    for length in lengths:
        own = random.permutation(64)[: -(-length // block_size)]
        contexts.append((own[:, None] * block_size + np.arange(block_size)).reshape(-1)[first:length])
    starts = np.cumsum([0, *counts])
    spans, blocks = tables_of(AttentionRows(np.empty(0, np.int64), starts, tuple(contexts)), block_size, first)
    assert spans.dtype == blocks.dtype == np.int32
    for (row, count, begin, table), start, length, own in zip(
        spans.tolist(), starts.tolist(), lengths, contexts, strict=False
    ):
        assert (row, begin) == (start, length - count)
        positions = np.arange(first, length)
        assert (blocks[table + positions // block_size] * block_size + positions % block_size == own).all()
