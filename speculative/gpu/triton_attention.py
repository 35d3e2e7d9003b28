"""`AttendPaged` as two Triton kernels; imported only where Triton is installed.

The context of a sequence is cut into splits of SPLIT_TOKENS positions, shorter ones first. Every n-th of them is a
part, which is computed for the rows of one KV head (Dao et al., "Flash-Decoding for long-context inference", 2023)
with a running softmax (Milakov and Gimelshein, 2018) in float32. A second kernel merges the parts, first to last. n
and the sizes of splits are the same for every batch, and what a row does not see leaves its sums as they are, so its
result is a function of its own inputs and of its sequence's number of rows.

A sequence with few rows gets a program's narrow tile whatever its neighbours have, one with more a wide one.

The number of programs follows the batch, and that of each context the sequences that there are in it: a program
computes several parts where these are enough to keep the GPU busy. A part is the same numbers whoever computes it. In
layers with a window the parts begin with the split that the first position in it lies in, and what is before it is not
read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.gpu.buckets import MAX_CAPTURED_SEQS
from speculative.gpu.paged_attention import SHORT_SPLIT_TOKENS, SPLIT_TOKENS, AttentionSizes, PagedRows, splits_of
from speculative.model.config import PLAIN, ScoreRule

_TILE_BYTES = 16384  # of keys, and of values: what fits beside the rows
_MOST_TILE_TOKENS = {2: 64, 4: 32}  # by bytes of a number
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a matrix product: what tensor cores take, and what fits into shared memory
_MOST_SUMS = 8192  # of a program: what fits into the registers of 8 warps
_ENOUGH_PROGRAMS = 2048  # to keep a GPU busy; those that find nothing to do cost as much as they gain
STAGES = 2  # of loads under way: programs beside one another hide more than stages, which cost shared memory
LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(  # noqa: PLR0913
    q,  # [ROWS, DIM]
    keys,  # [num_slots, KV, D] from the KV head's first number on
    values,
    table,  # the blocks of the sequence
    position,  # [TILE]
    there,  # [TILE] which of the positions are read
    seen,  # [ROWS] a row sees those of them that are below this
    highest,  # [ROWS] the running softmax: the highest score, the sum of exponentials, and of weighted values
    total,
    summed,  # [ROWS, DIM]
    scale,  # of the scores, in units of log2; where they are capped, `of_products` says it
    cache_slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # positions that a row sees; 0 = all
    CAP: tl.constexpr,  # of the scores, in units of log2; 0 = none
):
    dim = tl.arange(0, DIM)
    inside = there[:, None] & (dim < HEAD_DIM)[None, :]
    block = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    place = slot[:, None] * cache_slot_stride + dim[None, :]
    k = tl.load(keys + place, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP > 0:
        power = tl.exp2(-tl.abs(scores))
        size = CAP * (1 - power) / (1 + power)  # CAP tanh(|score| ln 2 / 2)
        scores = tl.where(scores < 0, -size, size)
    sees = there[None, :] & (position[None, :] < seen[:, None])
    if WINDOW > 0:
        sees &= position[None, :] >= seen[:, None] - WINDOW
    scores = tl.where(sees, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)  # -inf - -inf is NaN
    exponentials = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    v = tl.load(values + place, mask=inside, other=0.0)
    total = total * shrink + tl.sum(exponentials, axis=1)
    summed = summed * shrink[:, None] + tl.dot(exponentials.to(v.dtype), v, input_precision="ieee")
    return new_highest, total, summed


@triton.jit
def _split_at(position, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, SPLIT: tl.constexpr):
    """The split that a position lies in."""
    behind = position - NUM_SHORT * SHORT
    return tl.where(behind < 0, position // SHORT, NUM_SHORT + behind // SPLIT)


@triton.jit
def _tile_start(  # noqa: PLR0913
    index,
    first,
    num_first,
    SHORT: tl.constexpr,
    NUM_SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where a tile of a part begins whose first split has `num_first` tiles; its later ones are long."""
    later = index - num_first
    split = tl.where(later < 0, first, first + (later // (SPLIT // TILE) + 1) * NUM_PARTS)
    start = tl.where(split < NUM_SHORT, split * SHORT, NUM_SHORT * SHORT + (split - NUM_SHORT) * SPLIT)
    return start + tl.where(later < 0, index, later % (SPLIT // TILE)) * TILE


@triton.jit(do_not_specialize=["num_seqs", "num_queries", "num_tiles"])
def _attend_splits(  # noqa: PLR0913
    query,  # [N, KV * GROUP, D]
    keys,  # [num_slots, KV, D]
    values,
    blocks,  # [B, M] int64
    visible,  # [N] int64
    starts,  # [B + 2] int32: how many sequences there are, and where their rows begin; None = B, with Q rows each
    partial,  # [N, KV * GROUP, P, D] float32: softmax-weighted values of one of P parts of the context
    weight,  # [N, KV * GROUP, P] float32: log2 of the sum of its exponentials
    scale,  # of the scores, in units of log2
    num_seqs,  # B
    num_queries,  # Q
    num_tiles,  # of the rows of a sequence and a KV head
    table_stride,
    query_row_stride,
    query_head_stride,
    cache_slot_stride,
    cache_head_stride,
    FIRST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    SHORT: tl.constexpr,
    NUM_SHORT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ABOVE: tl.constexpr,  # rows of a sequence and a KV head: those with more than these, and no more than UP_TO
    UP_TO: tl.constexpr,  # 0 = any
    SEQS: tl.constexpr,  # at least B: the same for all batches, as each number is a compilation of seconds
):
    if starts is None:
        place, kv_head, first_turn, sharing = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
        sequence = place // num_tiles
        begin = sequence * num_queries
    else:
        kv_head, found, starts = tl.program_id(0), tl.load(starts), starts + 1
        if ABOVE > 0:  # of those
            every = tl.arange(0, SEQS)
            is_any = every < num_seqs
            own = tl.load(starts + every + 1, mask=is_any, other=0) - tl.load(starts + every, mask=is_any, other=0)
            wanted = (own * GROUP > ABOVE).to(tl.int32)
            found = tl.sum(wanted, axis=0)
        sharing = tl.maximum(tl.minimum(tl.num_programs(1) // tl.maximum(found * num_tiles, 1), NUM_PARTS), 1)
        place, first_turn = tl.program_id(1) // sharing, tl.program_id(1) % sharing
        sequence = place // num_tiles
        if sequence >= found:
            return
        if ABOVE > 0:
            is_it = (wanted > 0) & (tl.cumsum(wanted, axis=0) == sequence + 1)
            sequence = tl.sum(tl.where(is_it, every, 0), axis=0)
        begin = tl.load(starts + sequence)
        num_queries = tl.load(starts + sequence + 1) - begin
        if UP_TO > 0 and num_queries * GROUP > UP_TO:
            return
    row = place % num_tiles * ROWS + tl.arange(0, ROWS)
    exists = row < num_queries * GROUP
    token = (begin + row // GROUP).to(tl.int64)  # the workspace may hold more than 2**31 numbers
    head = kv_head * GROUP + row % GROUP
    seen = tl.load(visible + token, mask=exists, other=0)  # [ROWS]
    longest = tl.max(seen, axis=0)
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    q = tl.load(
        query + token[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )
    keys += kv_head * cache_head_stride
    values += kv_head * cache_head_stride
    table = blocks + sequence * table_stride
    num_splits = tl.where(longest > 0, _split_at(longest - 1, SHORT, NUM_SHORT, SPLIT) + 1, 0)
    lowest, before = FIRST, 0  # the first position in a window, and the splits before it
    if WINDOW > 0:
        shortest = tl.min(tl.where(seen > 0, seen, longest), axis=0)
        lowest = tl.maximum(shortest - WINDOW, FIRST)
        before = _split_at(lowest, SHORT, NUM_SHORT, SPLIT)
    for turn in range(first_turn, tl.minimum(num_splits - before, NUM_PARTS), sharing):
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        first = before + turn
        num_first = tl.where(first < NUM_SHORT, SHORT // TILE, SPLIT // TILE)  # tiles of it
        num_later = (tl.cdiv(num_splits - first, NUM_PARTS) - 1) * (SPLIT // TILE)
        for index in range(0, num_first + num_later):
            start = _tile_start(index, first, num_first, SHORT, NUM_SHORT, SPLIT, NUM_PARTS, TILE)
            position = start + tl.arange(0, TILE)
            there = (position >= lowest) & (position < longest)
            highest, total, summed = attend_tile(
                *(q, keys, values, table, position, there, seen, highest, total, summed, scale, cache_slot_stride),
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                DIM=DIM,
                WINDOW=WINDOW,
                CAP=CAP,
            )
        some = total > 0
        safe = tl.where(some, total, 1.0)
        part = turn
        if WINDOW > 0:  # whatever the other rows' windows are
            part = (before + turn) % NUM_PARTS
        cell = (token * (KV_HEADS * GROUP) + head) * NUM_PARTS + part
        tl.store(
            partial + (cell[:, None] * HEAD_DIM + dim[None, :]),
            summed / safe[:, None],
            mask=exists[:, None] & in_head[None, :],
        )
        tl.store(weight + cell, tl.where(some, highest + tl.log2(safe), -float("inf")), mask=exists)


@triton.jit
def _merge_parts(  # noqa: PLR0913
    partial,
    weight,
    visible,
    out,  # [N, num_heads, D], contiguous
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    SHORT: tl.constexpr,
    NUM_SHORT: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    seen = tl.load(visible + row)
    place = row * tl.num_programs(1) + head
    highest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([DIM], tl.float32)
    before = 0
    if WINDOW > 0:
        before = _split_at(tl.maximum(seen - WINDOW, FIRST), SHORT, NUM_SHORT, SPLIT)
    num_splits = tl.where(seen > 0, _split_at(seen - 1, SHORT, NUM_SHORT, SPLIT) + 1, 0)
    for turn in range(0, tl.minimum(num_splits - before, NUM_PARTS)):  # nobody may have written the others
        part = turn
        if WINDOW > 0:
            part = (before + turn) % NUM_PARTS
        cell = place * NUM_PARTS + part + tl.zeros([1], tl.int64)
        lse = tl.load(weight + cell)
        own = tl.load(partial + (cell * HEAD_DIM + dim), mask=in_head, other=0.0)
        new_highest = tl.maximum(highest, lse)
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        share, shrink = tl.exp2(lse - base), tl.exp2(highest - base)
        total = total * shrink + share
        summed = summed * shrink + own * share
        highest = new_highest
    merged = summed / tl.where(total > 0, total, 1.0)
    tl.store(out + place * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=in_head)


class TritonAttend:
    """Launches both kernels."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self._sizes = sizes

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scores: ScoreRule = PLAIN
    ) -> Tensor:
        """Implement `AttendPaged`."""
        num_rows, (_, num_heads, head_dim) = len(rows.visible), query.shape
        num_seqs, num_kv_heads = rows.blocks.shape[0], keys.shape[1]
        group = num_heads // num_kv_heads
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        partial, weight = workspace(self._sizes, query[:num_rows])
        query = query.to(keys.dtype)
        if query.stride(2) != 1:
            query = query.contiguous()
        num_parts, dim = self._sizes.num_parts, max(_LEAST_ROWS, triton.next_power_of_2(head_dim))
        narrow, wide = (rows_of_program(most * group, dim) for most in (1, self._sizes.max_queries))
        most_rows = rows.num_queries if rows.starts is None else self._sizes.max_queries  # of a sequence
        scale, window, cap = of_products(scores, head_dim)
        most_parts = min(num_parts, 1 + splits_of(window + most_rows)) if window else num_parts
        splits = {"SPLIT": SPLIT_TOKENS, "SHORT": SHORT_SPLIT_TOKENS, "NUM_SHORT": self._sizes.num_short}
        for tile_rows, above, up_to, num_found in tiles_of(rows, most_rows, group, narrow, wide):
            num_tiles = triton.cdiv(up_to or most_rows * group, tile_rows)
            num_places = num_found * num_tiles
            sharing = min(most_parts, -(-_ENOUGH_PROGRAMS // (num_places * num_kv_heads)))  # the parts of a context
            packed, even = (num_kv_heads, num_places * sharing), (num_places, num_kv_heads, sharing)
            _attend_splits[even if rows.starts is None else packed](
                *(query, keys, values, rows.blocks, rows.visible, rows.starts, partial, weight, scale),
                *(num_seqs, most_rows, num_tiles, rows.blocks.stride(0)),
                *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
                FIRST=rows.first,
                KV_HEADS=num_kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_SIZE=self._sizes.block_size,
                **splits,
                NUM_PARTS=num_parts,
                TILE=tile_tokens(dim, keys.element_size()),
                ROWS=tile_rows,
                DIM=dim,
                WINDOW=window,
                CAP=cap,
                ABOVE=above,
                UP_TO=up_to,
                SEQS=MAX_CAPTURED_SEQS,
                num_warps=warps_for(tile_rows, dim),
                num_stages=STAGES,
            )
        _merge_parts[(num_rows, num_heads)](
            *(partial, weight, rows.visible, out),
            HEAD_DIM=head_dim,
            NUM_PARTS=num_parts,
            **splits,
            DIM=dim,
            FIRST=rows.first if window else 0,
            WINDOW=window,
            num_warps=1,
        )
        return out


def tiles_of(rows: PagedRows, most_rows: int, group: int, narrow: int, wide: int) -> list[tuple[int, int, int, int]]:
    """The launches for the rows of sequences and KV heads: the rows of a tile, those that the sequences have more of
    than the second number and no more of than the third (0 = any), and how many sequences these can be."""
    num_rows, num_seqs = len(rows.visible), len(rows.blocks)
    if most_rows * group <= narrow or narrow == wide:
        return [(narrow, 0, 0, num_seqs)]
    if rows.starts is None:
        return [(wide, 0, 0, num_seqs)]
    least = narrow // group + 1  # rows of a sequence that has too many for the narrow tile
    return [(narrow, 0, narrow, num_seqs), (wide, narrow, 0, min(num_seqs, num_rows // least))]


def of_products(scores: ScoreRule, head_dim: int) -> tuple[float, int, float]:
    """The scale, window and cap of `attend_tile`: a capped product is scaled to twice the tanh's argument."""
    scale, cap = scores.scale or head_dim**-0.5, scores.cap or 0.0
    return (2 * scale / cap if cap else scale) * LOG2_E, scores.window or 0, cap * LOG2_E


def tile_tokens(dim: int, number_bytes: int) -> int:
    """Positions that a program reads at once."""
    return min(_MOST_TILE_TOKENS[number_bytes], _TILE_BYTES // (dim * number_bytes))


def rows_of_program(num_rows: int, dim: int) -> int:
    """Rows that a program computes, of those of a sequence and a KV head."""
    return min(_MOST_ROWS, _MOST_SUMS // dim, max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length()))


def warps_for(tile_rows: int, dim: int) -> int:
    """Warps that share the rows of a program: as many as keep their sums in registers."""
    return 8 if tile_rows * dim == _MOST_SUMS else 4


def workspace(sizes: AttentionSizes, query: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the results of the parts: values, and their weights. Within a graph all layers share it."""
    cells = (*query.shape[:2], sizes.num_parts)
    partial = torch.empty((*cells, query.shape[2]), dtype=torch.float32, device=query.device)
    return partial, torch.empty(cells, dtype=torch.float32, device=query.device)
