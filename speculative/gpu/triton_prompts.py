"""Attention of prompts and chunks as one Triton kernel; imported only where Triton is installed.

A program computes a tile of the rows of one sequence and one KV head, all of its query heads together, over the keys
from the first to the last position that one of the rows sees, in tiles of a constant size that begin at position 0
(Dao, "FlashAttention-2", 2023). So a row's result is a function of its own inputs: its neighbours, and where a prompt
was cut into chunks, change nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.gpu.packed_attention import PackedRows
from speculative.gpu.triton_attention import attend_tile, of_products, tile_tokens
from speculative.model.config import PLAIN, ScoreRule

_MOST_ROWS = {2: 128, 4: 32}  # of a program, by bytes of a number
_MOST_SUMS = 16384  # of a program: what fits into the registers of its warps
WARPS = 8
_SPANS = 16  # sequences that a program looks at together for its tile


@triton.jit(do_not_specialize=["num_spans"])
def _attend_packed(  # noqa: PLR0913
    query,  # [N, KV * GROUP, D]
    keys,  # [num_slots, KV, D]
    values,
    blocks,  # [any] int32
    spans,  # [B, 4] int32
    out,  # [N, KV * GROUP, D], contiguous
    scale,  # of the scores, in units of log2
    num_spans,  # B
    query_row_stride,
    query_head_stride,
    cache_slot_stride,
    cache_head_stride,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SPANS: tl.constexpr,
):
    kv_head, number = tl.program_id(0), tl.program_id(1)  # of a tile among those of all sequences
    before, which, left = 0, 0, 0
    for begin in range(0, num_spans, SPANS):
        every = begin + tl.arange(0, SPANS)
        tiles = tl.cdiv(tl.load(spans + every * 4 + 1, mask=every < num_spans, other=0) * GROUP, ROWS)
        ends = before + tl.cumsum(tiles, axis=0)
        is_it = (number < ends) & (number >= ends - tiles)
        which += tl.sum(tl.where(is_it, every, 0), axis=0)
        left += tl.sum(tl.where(is_it, ends - number, 0), axis=0)
        before += tl.sum(tiles, axis=0)
    if left == 0:
        return
    span = spans + which * 4
    num_rows = tl.load(span + 1) * GROUP
    row = (left - 1) * ROWS + tl.arange(0, ROWS)  # of a sequence, those that see most start first
    exists = row < num_rows
    token = (tl.load(span) + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    seen = tl.where(exists, tl.load(span + 2) + row // GROUP + 1, 0)  # [ROWS]
    table = blocks + tl.load(span + 3)
    dim = tl.arange(0, DIM)
    given = exists[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        query + token[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=given,
        other=0.0,
    )
    keys += kv_head * cache_head_stride
    values += kv_head * cache_head_stride
    longest = tl.max(seen, axis=0)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    lowest = FIRST  # the first position in a window
    if WINDOW > 0:
        lowest = tl.maximum(tl.min(tl.where(exists, seen, longest), axis=0) - WINDOW, FIRST)
    for start in range(FIRST + (lowest - FIRST) // TILE * TILE, longest, TILE):  # the tiles of any other row
        position = start + tl.arange(0, TILE)
        there = position < longest
        if WINDOW > 0:
            there &= position >= lowest
        highest, total, summed = attend_tile(
            *(q, keys, values, table, position, there, seen, highest, total, summed, scale, cache_slot_stride),
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            DIM=DIM,
            WINDOW=WINDOW,
            CAP=CAP,
        )
    place = (token * (tl.num_programs(0) * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    attended = summed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place, attended.to(out.dtype.element_ty), mask=given)


def triton_attend_packed(
    query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scores: ScoreRule = PLAIN
) -> Tensor:
    """An `AttendPacked`."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group, dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if rows.out is None else rows.out
    query = query.to(keys.dtype)
    if query.stride(2) != 1:
        query = query.contiguous()
    tile_rows = rows_of_program(dim, keys.element_size())
    scale, window, cap = of_products(scores, head_dim)
    num_spans = len(rows.spans)
    _attend_packed[(num_kv_heads, most_tiles(num_rows * group, num_spans, tile_rows))](
        *(query, keys, values, rows.blocks, rows.spans, out, scale, num_spans),
        *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
        FIRST=rows.first,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=rows.block_size,
        TILE=tile_tokens(dim, keys.element_size()),
        ROWS=tile_rows,
        DIM=dim,
        WINDOW=window,
        CAP=cap,
        SPANS=_SPANS,
        num_warps=WARPS,
    )
    return out


def most_tiles(num_rows: int, num_spans: int, tile_rows: int) -> int:
    """Tiles that hold the rows of so many sequences, however they are shared out."""
    return (num_rows + num_spans * (tile_rows - 1)) // tile_rows


def rows_of_program(dim: int, number_bytes: int) -> int:
    """Rows that a program computes, of those of a sequence and a KV head: the same for all prompts."""
    return min(_MOST_ROWS[number_bytes], _MOST_SUMS // dim)
