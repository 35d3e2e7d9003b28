"""Rows of a step as captured passes read them: packed, or padded to B x Q; filled on the host."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from operator import is_not
from typing import Any

import numpy as np
import torch

from speculative.gpu.buckets import Bucket, PackedBucket
from speculative.gpu.paged_attention import AttendPaged, KernelAttention, PagedRows
from speculative.gpu.staged_inputs import Array, Field
from speculative.state.batch import Int64s, StepInput
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


def row_fields(bucket: Bucket | PackedBucket, room: CacheRoom) -> dict[str, Field]:
    """The fields that `fill_rows` or `fill_packed` fills and `paged_rows` reads. blocks: a column a sequence, sent as
    far as it is used: contexts are far shorter than the longest possible one. starts: as in `PagedRows`, where packed
    rows of sequences may be several."""
    shape = (bucket.num_rows,) if isinstance(bucket, PackedBucket) else (bucket.num_seqs, bucket.num_queries)
    fields = {
        "positions": Field(shape),
        "visible": Field(shape),
        "slots": Field(shape, padding=room.trash_block * room.block_size),
        "blocks": Field((room.max_blocks, bucket.num_seqs), torch.int32, in_part=True),
    }
    if isinstance(bucket, PackedBucket) and bucket.num_rows > bucket.num_seqs:
        fields["starts"] = Field((bucket.num_seqs + 2,), torch.int32)
    return fields


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
    num_queries = host["positions"].shape[1]
    owners, offsets = (np.arange(num_queries) < counts[:, None]).nonzero()
    most = _write_rows(host, columns, owners, starts[owners] + offsets, (owners, offsets), room)
    return most, owners * num_queries + offsets


def fill_packed(host: Mapping[str, Array], columns: Array, step_input: StepInput, room: CacheRoom) -> int:
    """Write a step's rows one after another; return how many rows of "blocks" are to be sent."""
    row_starts, positions = step_input.row_starts, step_input.positions
    owners = np.repeat(np.arange(len(row_starts) - 1), row_starts[1:] - row_starts[:-1])
    if "starts" in host:
        host["starts"][0], host["starts"][1 : len(row_starts) + 1] = len(row_starts) - 1, row_starts
        host["starts"][len(row_starts) + 1 :] = row_starts[-1]
    return _write_rows(host, columns, owners, positions, slice(len(positions)), room)


def _write_rows(
    host: Mapping[str, Array], columns: Array, owners: Int64s, positions: Int64s, where: Any, room: CacheRoom
) -> int:
    """Write rows of the sequences `owners` to the places `where`; return how many rows of "blocks" they use."""
    blocks, rest = np.divmod(positions, room.block_size)
    most = int(blocks.max(initial=-1)) + 1
    host["blocks"][:most, : columns.shape[1]] = columns[:most]
    host["positions"][where] = positions
    host["visible"][where] = positions + 1
    host["slots"][where] = columns[blocks, owners].astype(np.int64) * room.block_size + rest
    return most


def paged_rows(on_device: Mapping[str, torch.Tensor], first: int = 0) -> PagedRows:
    """Return what attention reads of the fields; positions below `first` do not exist."""
    rows = (on_device["slots"].view(-1), on_device["visible"].view(-1), block_tables(on_device))
    return PagedRows(*rows, first, on_device.get("starts"))


def block_tables(on_device: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The blocks of each sequence as `PagedRows` has them."""
    columns = on_device["blocks"]
    return columns.new_empty(columns.shape[::-1], dtype=torch.int64).copy_(columns.T)
