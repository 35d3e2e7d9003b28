"""From a step's packed rows to B x Q padded ones, on the host."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from operator import is_not

import numpy as np
import torch

from speculative.gpu.buckets import Bucket
from speculative.gpu.paged_attention import AttendPaged, KernelAttention, PagedRows
from speculative.gpu.staged_inputs import Array, Field
from speculative.state.batch import Int64s
from speculative.state.kv_cache import KVCache
from speculative.state.sequence import Sequence


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

    def attention(self, rows: PagedRows) -> KernelAttention[PagedRows]:
        """Attention of one pass over these rows."""
        return KernelAttention(self.cache, rows.slots, rows, self.attend)


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


class BlockTables:
    """The blocks of the last step's sequences; only what came or went since is written again.

    A sequence's list of blocks grows or is replaced, and is never changed: what is known of a list stays true.
    """

    def __init__(self, room: CacheRoom) -> None:
        self._max_blocks = room.max_blocks
        self._lists: list[list[int]] = []
        self._lengths: list[int] = []
        self._columns = np.empty((room.max_blocks, 0), np.int32)

    def of(self, sequences: Sequences[Sequence]) -> Array:
        """[max_blocks, B] int32, a column a sequence, with anything behind its blocks; until the next call."""
        lists = [sequence.blocks for sequence in sequences]
        lengths = [len(blocks) for blocks in lists]
        if len(lists) != len(self._lists):
            self._columns = np.zeros((self._max_blocks, len(lists)), np.int32)
            self._lists, self._lengths = [[] for _ in lists], [0] * len(lists)
        if lengths != self._lengths or any(map(is_not, lists, self._lists)):
            paired = zip(lists, lengths, self._lists, self._lengths, strict=True)
            for column, (blocks, length, known_blocks, known_length) in enumerate(paired):
                begin = known_length if blocks is known_blocks else 0
                if length > begin:
                    self._columns[begin:length, column] = blocks[begin:]
            self._lists, self._lengths = lists, lengths
        return self._columns


def fill_rows(
    host: Mapping[str, Array], columns: Array, starts: Int64s, counts: Int64s, room: CacheRoom
) -> tuple[int, Int64s]:
    """Place `counts[i]` rows at the positions from `starts[i]` on; columns: of `BlockTables`.

    Returns:
        How many rows of "blocks" are to be sent, and where the packed rows lie among the padded ones.
    """
    size, num_queries = room.block_size, host["positions"].shape[1]
    most = -(-int((starts + counts).max()) // size)
    host["blocks"][:most, : len(counts)] = columns[:most]
    owners, offsets = (np.arange(num_queries) < counts[:, None]).nonzero()
    positions = starts[owners] + offsets
    blocks, rest = np.divmod(positions, size)
    host["positions"][owners, offsets] = positions
    host["visible"][owners, offsets] = positions + 1
    host["slots"][owners, offsets] = columns[blocks, owners].astype(np.int64) * size + rest
    return most, owners * num_queries + offsets


def paged_rows(on_device: Mapping[str, torch.Tensor], first: int = 0) -> PagedRows:
    """Return what attention reads of the fields; positions below `first` do not exist."""
    return PagedRows(on_device["slots"].view(-1), on_device["visible"].view(-1), block_tables(on_device), first)


def block_tables(on_device: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The blocks of each sequence as `PagedRows` has them."""
    columns = on_device["blocks"]
    return columns.new_empty(columns.shape[::-1], dtype=torch.int64).copy_(columns.T)
