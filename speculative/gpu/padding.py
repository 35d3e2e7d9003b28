"""From a step's packed rows to B x Q padded ones, on the host."""

from collections.abc import Mapping, Sequence
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
    """The room for rows. trash_block: belongs to nobody; what stands for nothing is written there."""

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
    """The fields that `fill_rows` fills and `paged_rows` reads. blocks: a column a sequence, sent as far as it is used:
    contexts are far shorter than the longest possible one."""
    shape = (bucket.num_seqs, bucket.num_queries)
    return {
        "positions": Field(shape),
        "visible": Field(shape),
        "slots": Field(shape, padding=room.trash_block * room.block_size),
        "blocks": Field((room.max_blocks, bucket.num_seqs), torch.int32, in_part=True),
    }


def fill_rows(
    host: Mapping[str, Array], contexts: Sequence[Int64s], starts: Int64s, counts: Int64s, room: CacheRoom
) -> int:
    """Place `counts[i]` rows at the positions from `starts[i]` on.

    contexts: per sequence, the slots of all positions up to its last row.

    Returns:
        How many rows of "blocks" are to be sent.
    """
    size, num_seqs = room.block_size, len(contexts)
    first_slots = [slots[::size] for slots in contexts]  # of each block
    num_blocks = np.array([len(own) for own in first_slots])
    most = int(num_blocks.max())
    tables = np.zeros((num_seqs, most), np.int64)
    tables[np.arange(most) < num_blocks[:, None]] = np.concatenate(first_slots)
    host["blocks"][:most, :num_seqs] = (tables // size).T
    offsets = np.arange(host["positions"].shape[1])
    live = offsets < counts[:, None]
    positions = np.where(live, starts[:, None] + offsets, 0)
    slots = tables[np.arange(num_seqs)[:, None], positions // size] + positions % size
    host["positions"][:num_seqs] = positions
    host["visible"][:num_seqs] = np.where(live, positions + 1, 0)
    host["slots"][:num_seqs][live] = slots[live]
    return most


def paged_rows(on_device: Mapping[str, torch.Tensor], first: int = 0) -> PagedRows:
    """Return what attention reads of the fields; positions below `first` do not exist."""
    return PagedRows(on_device["slots"].view(-1), on_device["visible"].view(-1), block_tables(on_device), first)


def block_tables(on_device: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The blocks of each sequence as `PagedRows` has them."""
    columns = on_device["blocks"]
    return columns.new_empty(columns.shape[::-1], dtype=torch.int64).copy_(columns.T)


def padded_places(counts: Int64s, num_queries: int) -> Int64s:
    """Return where the packed rows lie among the padded ones."""
    offsets = np.arange(num_queries)
    return (np.arange(len(counts))[:, None] * num_queries + offsets)[offsets < counts[:, None]]
