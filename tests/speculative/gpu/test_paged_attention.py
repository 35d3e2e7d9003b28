"""Attention over padded rows: Triton's (in Triton's interpreter) against torch's operators in float32."""

import pytest
import torch
from torch import Tensor

from speculative.gpu.paged_attention import SPLIT_TOKENS, AttendPaged, AttentionSizes, PagedRows, splits_of
from speculative.model.config import PLAIN, ScoreRule
from tests.support.judged_rows import of_wider
from tests.support.long_contexts import error_of
from tests.support.torch_operators import TorchAttend
from tests.support.triton_interpreter import needs_triton

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_BLOCKS, MAX_QUERIES = 16, 40, 5
SIZES = AttentionSizes(BLOCK_SIZE, MAX_QUERIES, MAX_BLOCKS)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
HEADS = [(4, 4, 16), (6, 2, 64), (3, 1, 80), (32, 1, 16)]  # of the last, several programs share rows
DTYPES = [torch.float32, torch.float16] * 2  # the interpreter multiplies bfloat16's bit patterns
CONTEXTS = [(0, 1), (15, 5), (SPLIT_TOKENS - 2, 5), (2 * SPLIT_TOKENS + 3, 2), (0, 0)]

pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture
def attend(poisoned: None) -> AttendPaged:
    from speculative.gpu.triton_attention import TritonAttend

    return TritonAttend(SIZES)


def scene(
    heads: tuple[int, int, int],
    contexts: list[tuple[int, int]],
    num_queries: int,
    dtype: torch.dtype,
    first: int = 0,
    max_blocks: int = MAX_BLOCKS,
) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Query, keys, values and rows of sequences given as (positions before, rows); all that nobody sees is NaN. Each is
    a part of a wider tensor.

    What a sequence holds depends on its place in the list alone, so scenes can be compared.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_slots = (len(contexts) * max_blocks + 1) * BLOCK_SIZE  # the last block is the trash block
    keys, values = (of_wider(torch.full((num_slots, num_kv_heads, head_dim), torch.nan, dtype=dtype)) for _ in range(2))
    query = of_wider(torch.full((len(contexts) * num_queries, num_heads, head_dim), torch.nan, dtype=dtype))
    blocks = torch.full((len(contexts), max_blocks + 3), num_slots // BLOCK_SIZE - 1)[:, :-3]
    visible = torch.zeros(len(contexts) * num_queries, dtype=torch.int64)
    slots = torch.full_like(visible, num_slots - 1)
    for index, (before, count) in enumerate(contexts):
        random = torch.Generator().manual_seed(index)
        length = before + count
        used = -(-length // BLOCK_SIZE)
        own = torch.randperm(max_blocks, generator=random)[:used] + index * max_blocks
        blocks[index, :used] = own
        places = (own[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
        for part in (keys, values):
            drawn = torch.randn((max_blocks * BLOCK_SIZE, num_kv_heads, head_dim), generator=random)
            part[places[first:]] = drawn[first:length].to(dtype)
        begin = index * num_queries
        queries = torch.randn((MAX_QUERIES, num_heads, head_dim), generator=random)
        query[begin : begin + count] = queries[:count].to(dtype)
        visible[begin : begin + count] = torch.arange(before + 1, length + 1)
        slots[begin : begin + count] = places[before:]
    return query, keys, values, PagedRows(slots, visible, blocks, first)


def expected_of(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, rule: ScoreRule = PLAIN) -> Tensor:
    return TorchAttend(BLOCK_SIZE)(query.float(), keys, values, rows, rule)


@pytest.mark.parametrize(("heads", "dtype"), list(zip(HEADS, DTYPES, strict=True)))
def test_every_row_sees_its_own_past_and_nothing_else(
    attend: AttendPaged, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    arguments = scene(heads, CONTEXTS, 5, dtype)
    found = attend(*arguments)
    assert found.dtype == dtype
    live = arguments[3].visible > 0
    error = (found - expected_of(*arguments))[live].abs().max()
    assert error < TOLERANCE[dtype]
    assert torch.equal(found[~live], torch.zeros_like(found[~live])), "rows that stand for nothing give zeros"


@pytest.mark.parametrize(
    ("num_parts", "window", "first"),
    [(1, None, 0), (2, None, 0), (32, None, 0), (2, SPLIT_TOKENS + 1, 1), (2, BLOCK_SIZE, 0), (32, 4, 0), (32, 1, 1)],
)
def test_a_row_sees_its_own_window_alone_and_in_company_in_any_number_of_parts(
    attend: AttendPaged, monkeypatch: pytest.MonkeyPatch, num_parts: int, window: int | None, first: int
) -> None:
    """The bits are the same, and nothing else is read."""
    monkeypatch.setattr("speculative.gpu.paged_attention._MOST_PARTS", num_parts)
    heads, rule = (3, 1, 80), ScoreRule(window=window)
    arguments = scene(heads, CONTEXTS, 5, torch.float32, first)
    _, keys, values, rows = arguments
    for table, visible in zip(rows.blocks, rows.visible.view(-1, 5), strict=True):
        unseen = torch.arange(max(0, int(visible[0]) - (window or SIZES.max_blocks * BLOCK_SIZE)))
        places = table[unseen // BLOCK_SIZE] * BLOCK_SIZE + unseen % BLOCK_SIZE
        keys[places] = values[places] = torch.nan
    whole, live = attend(*arguments, rule), rows.visible > first
    assert (whole - expected_of(*arguments, rule))[live].abs().max() < TOLERANCE[torch.float32]
    assert not whole[~live].any(), "positions below the first do not exist"
    for index in (1, 3):
        before, count = CONTEXTS[index]
        for some in (1, count):  # the last rows
            alone = scene(heads, [(0, 0)] * index + [(before + count - some, some)], some, torch.float32, first)
            alone[0][-some:] = arguments[0][5 * index + count - some : 5 * index + count]
            assert torch.equal(attend(*alone, rule)[-some:], whole[5 * index + count - some : 5 * index + count])


@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(window=20)])
def test_packed_rows_get_the_bits_that_each_sequence_gets_alone(attend: AttendPaged, rule: ScoreRule) -> None:
    """Sequences of one row and of several, whose tiles are of different sizes; rows of padding behind them."""
    heads, contexts = (8, 1, 16), [*CONTEXTS, (3, 3), (40, 1), (7, 4)]
    query, keys, values, padded = scene(heads, contexts, MAX_QUERIES, torch.float32)
    live = padded.visible > 0
    starts = torch.tensor([0, *(count for _, count in contexts)]).cumsum(0).to(torch.int32)
    behind = torch.zeros(4, dtype=torch.int64)
    given = torch.cat([torch.tensor([len(contexts)], dtype=torch.int32), starts])
    slots, visible = (torch.cat([own[live], behind]) for own in (padded.slots, padded.visible))
    packed = PagedRows(slots, visible, padded.blocks, 0, given)
    found = attend(torch.cat([query[live], torch.full((4, 8, 16), torch.nan)]), keys, values, packed, rule)
    assert (found[:-4] - expected_of(query, keys, values, padded, rule)[live]).abs().max() < TOLERANCE[torch.float32]
    assert torch.equal(found[-4:], torch.zeros_like(found[-4:])), "rows that stand for nothing give zeros"
    for index, (_, count) in enumerate(contexts):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        if count:
            own = PagedRows(slots[rows], visible[rows], padded.blocks[index : index + 1])
            assert torch.equal(attend(query[live][rows], keys, values, own, rule), found[rows])


def test_programs_are_few_where_one_sequence_of_many_has_several_rows() -> None:
    """An 8B model with rounds of five rows: none is wide where nobody drafts, and few where one of 64 does."""
    from speculative.gpu.triton_attention import rows_of_program, tiles_of

    narrow, wide = rows_of_program(4, 128), rows_of_program(5 * 4, 128)
    plain, starts = torch.zeros(64, dtype=torch.int64), torch.zeros(66, dtype=torch.int32)
    blocks = plain[:, None]
    assert tiles_of(PagedRows(plain, plain, blocks), 1, 4, narrow, wide) == [(16, 0, 0, 64)]
    assert tiles_of(PagedRows(plain, plain, blocks, 0, starts), 4, 4, narrow, wide) == [(16, 0, 0, 64)]
    drafting = PagedRows(plain, torch.zeros(128, dtype=torch.int64), blocks, 0, starts)
    assert tiles_of(drafting, 5, 4, narrow, wide) == [(16, 0, 16, 64), (32, 16, 0, 25)]


@pytest.mark.parametrize(("rule", "lift"), [(ScoreRule(cap=5.0, scale=0.3), 1.0), (ScoreRule(cap=50.0), 1e4)])
def test_scores_are_capped(attend: AttendPaged, rule: ScoreRule, lift: float) -> None:
    query, *others = scene((6, 2, 64), CONTEXTS, 5, torch.float32)
    arguments = (query * lift, *others)
    live = arguments[3].visible > 0
    assert (attend(*arguments, rule) - expected_of(*arguments, rule))[live].abs().max() < TOLERANCE[torch.float32]


def test_the_kernels_bits_depend_on_no_number_of_programs(attend: AttendPaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch has one program for a context, a small one as many as the context has parts."""
    from speculative.gpu import triton_attention

    assert SIZES.num_parts > 1
    found = []
    for enough in (1, 2 * 3 * len(CONTEXTS), 1 << 20):
        monkeypatch.setattr(triton_attention, "_ENOUGH_PROGRAMS", enough)
        found.append(attend(*scene((3, 1, 64), CONTEXTS, 5, torch.float32)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kernel", ["splits", "packed"])
def test_long_contexts_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Not in float16, one rounding of which is 2.4e-4."""
    monkeypatch.setattr("speculative.gpu.paged_attention._MOST_PARTS", 2)
    assert error_of(kernel, torch.float16, CPU) < 2e-5


def test_the_workspace_is_accounted_for() -> None:
    assert SIZES.num_parts == splits_of(MAX_BLOCKS * BLOCK_SIZE) == 9
    assert [splits_of(length) for length in (0, 1, 64, 256, 512, 513, 1500)] == [0, 1, 1, 4, 8, 9, 12]
    assert AttentionSizes(16, 5, 8192).workspace_bytes(1, 1, 64) == 32 * 65 * 4, "whatever the longest sequence"
    from speculative.gpu.triton_attention import workspace

    held = sum(part.nbytes for part in workspace(SIZES, torch.empty(7, 4, 16)))
    assert held == SIZES.workspace_bytes(7, 4, 16)
