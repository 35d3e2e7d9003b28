"""Causal attention of packed rows, any number a sequence, over the paged KV cache: prompts, and chunks of them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from speculative.gpu.paged_attention import KernelAttention
from speculative.gpu.staged_inputs import Array, send_once
from speculative.model.attention import CacheAttention, PreparePass
from speculative.model.config import ScoreRule
from speculative.state.batch import AttentionRows, Int64s
from speculative.state.kv_cache import KVCache


class PackedRows(NamedTuple):
    """The context of the rows of B sequences, on the cache's device.

    spans: [B, 4] int32: a sequence's first row, how many it has, the position of the first, and where its blocks begin
        in `blocks`. A row sees the positions of its sequence up to its own.
    blocks: [any] int32, sequence after sequence.
    first: positions below it do not exist. block_size: tokens a block.
    out: what gets the rows' results, and keeps what else is in it; None = a new tensor.
    """

    spans: Tensor
    blocks: Tensor
    first: int
    block_size: int
    out: Tensor | None = None


AttendPacked = Callable[[Tensor, Tensor, Tensor, PackedRows, ScoreRule], Tensor]
"""query [N, num_heads, head_dim], a layer's keys and values [num_slots, num_kv_heads, head_dim] -> as query; anything
in rows of no sequence."""


def sending_packed(block_size: int, first: int, attend: AttendPacked) -> PreparePass:
    """A `PreparePass` that sends everything in one copy; first: the position of a context's first slot."""

    def prepare(cache: KVCache, rows: AttentionRows, *arrays: Int64s) -> tuple[CacheAttention, list[Tensor]]:
        spans, blocks = tables_of(rows, block_size, first)
        sent = send_once((rows.slots, spans, blocks, *arrays), cache.data.device)
        packed = PackedRows(sent[1], sent[2], first, block_size)
        return KernelAttention(cache, sent[0], packed, attend), sent[3:]

    return prepare


def tables_of(rows: AttentionRows, block_size: int, first: int) -> tuple[Array, Array]:
    """`spans` and `blocks` of `PackedRows`."""
    counts = np.diff(rows.row_starts)
    lengths = np.array([len(context) for context in rows.context_slots], np.int64)
    begins = [context[:1] for context in rows.context_slots]
    others = [context[block_size - first :: block_size] for context in rows.context_slots]
    tables = [np.concatenate(parts) // block_size for parts in zip(begins, others, strict=True)]
    sizes = np.array([len(table) for table in tables], np.int64)
    spans = (rows.row_starts[:-1], counts, first + lengths - counts, np.cumsum(sizes) - sizes)
    return np.stack(spans, axis=1).astype(np.int32), np.concatenate(tables).astype(np.int32)
