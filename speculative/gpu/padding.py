"""From a step's packed rows to B x Q padded ones, on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from speculative.cache.kv_cache import KVCache
from speculative.gpu.buckets import Bucket
from speculative.gpu.paged_attention import AttendPaged, PagedAttention, PagedRows
from speculative.gpu.staged_inputs import Array, Field
from speculative.state.batch import Int64s


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Where rows may lie. trash_block: belongs to nobody; what stands for nothing is written there."""

    block_size: int
    max_blocks: int  # of a sequence
    trash_block: int


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A KV cache as captured passes use it."""

    cache: KVCache
    room: CacheRoom
    attend: AttendPaged

    def attention(self, rows: PagedRows) -> PagedAttention:
        """Attention of one pass over these rows."""
        return PagedAttention(self.cache, rows, self.attend)


def row_fields(bucket: Bucket, room: CacheRoom) -> dict[str, Field]:
    """The fields that `fill_rows` fills and `paged_rows` reads."""
    shape = (bucket.num_seqs, bucket.num_queries)
    return {
        "positions": Field(shape),
        "visible": Field(shape),
        "slots": Field(shape, padding=room.trash_block * room.block_size),
        "blocks": Field((bucket.num_seqs, room.max_blocks), padding=room.trash_block),
    }


def fill_rows(host: Mapping[str, Array], blocks: list[Int64s], starts: Int64s, counts: Int64s, room: CacheRoom) -> None:
    """Place `counts[i]` rows at the positions from `starts[i]` on, in the blocks of sequence i."""
    tables, num_seqs = host["blocks"], len(blocks)
    for table, own in zip(tables, blocks, strict=False):
        table[: len(own)] = own
    offsets = np.arange(host["positions"].shape[1])
    live = offsets < counts[:, None]
    positions = np.where(live, starts[:, None] + offsets, 0)
    block = np.take_along_axis(tables[:num_seqs], positions // room.block_size, axis=1)
    slots = block * room.block_size + positions % room.block_size
    host["positions"][:num_seqs] = positions
    host["visible"][:num_seqs] = np.where(live, positions + 1, 0)
    host["slots"][:num_seqs] = np.where(live, slots, host["slots"][:num_seqs])


def paged_rows(on_device: Mapping[str, torch.Tensor], first: int = 0) -> PagedRows:
    """What attention reads of the fields; positions below `first` do not exist."""
    return PagedRows(on_device["slots"].view(-1), on_device["visible"].view(-1), on_device["blocks"], first)


def padded_places(counts: Int64s, num_queries: int) -> Int64s:
    """Where the packed rows lie among the padded ones."""
    offsets = np.arange(num_queries)
    return (np.arange(len(counts))[:, None] * num_queries + offsets)[offsets < counts[:, None]]
