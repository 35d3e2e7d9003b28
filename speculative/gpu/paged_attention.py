"""Causal attention of a few new positions of each sequence over the paged KV cache: fixed shapes, no host in between.

Every sequence has Q rows, or rows are packed; those that stand for nothing see nothing and give zeros. A row's result
depends on its own query, on what it sees, and on how many rows its sequence has; never on its neighbours or on B.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from speculative.model.attention import CacheAttention
from speculative.model.config import PLAIN, ScoreRule
from speculative.state.kv_cache import KVCache

SPLIT_TOKENS = 256
"""Positions of a context that a kernel reads one after another: a constant, as is the number of parts that they are
shared out to, so that no result depends on the batch."""

SHORT_SPLIT_TOKENS = 64
"""The same at the beginning of every context: one stream with a short one has too few splits for a GPU otherwise."""

_MOST_SHORT_SPLITS = 8
_MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Slots and contexts of the rows of B sequences. On the cache's device, int64 but for `starts`.

    slots: [N] where each row's key and value go; rows that stand for nothing go to the trash block.
    visible: [N] a row sees the positions below this of its sequence; 0 = it stands for nothing.
    blocks: [B, M] the blocks of each sequence; anything valid behind the last one.
    first: positions below it do not exist.
    starts: [B + 2] int32 of packed rows: how many of the B sequences there are, where the rows of each begin, and where
        the last one's end; None = each has N / B.
    """

    slots: Tensor
    visible: Tensor
    blocks: Tensor
    first: int = 0
    starts: Tensor | None = None

    @property
    def num_queries(self) -> int:
        """Q, of rows that are not packed."""
        return self.visible.shape[0] // self.blocks.shape[0]


def splits_of(length: int) -> int:
    """The number of splits of a context."""
    short = min(length, _MOST_SHORT_SPLITS * SHORT_SPLIT_TOKENS)
    return -(-short // SHORT_SPLIT_TOKENS) - (-(length - short) // SPLIT_TOKENS)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes that a kernel is compiled for, the same for all batches of an engine.

    block_size: tokens a block. max_queries: the most rows of a sequence. max_blocks: M.
    """

    block_size: int
    max_queries: int
    max_blocks: int

    @property
    def num_parts(self) -> int:
        """Parts of a context: part i is split i, i + `num_parts`, and so on."""
        return min(_MOST_PARTS, splits_of(self.max_blocks * self.block_size))

    @property
    def num_short(self) -> int:
        """Splits that are short: no more than parts, so that no part has two of them."""
        return min(_MOST_SHORT_SPLITS, self.num_parts)

    def workspace_bytes(self, num_rows: int, num_heads: int, head_dim: int) -> int:
        """Bytes of the partial results of `num_rows` rows, float32."""
        return num_rows * num_heads * self.num_parts * (head_dim + 1) * 4


AttendPaged = Callable[[Tensor, Tensor, Tensor, PagedRows, ScoreRule], Tensor]
"""query [N or more, num_heads, head_dim], a layer's keys and values [num_slots, num_kv_heads, head_dim] -> as query;
anything behind the first N rows."""


Rows = TypeVar("Rows")


@dataclass
class KernelAttention(CacheAttention, Generic[Rows]):
    """Attention of one step by a kernel."""

    cache: KVCache
    slots: Tensor  # [N] int64, where its rows go
    rows: Rows  # what the kernel knows of them
    attend: Callable[[Tensor, Tensor, Tensor, Rows, ScoreRule], Tensor]

    def attend_stored(self, layer: int, query: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """Implement `CacheAttention`."""
        keys, values = self.cache.data[layer].unbind(0)
        return self.attend(query, keys, values, self.rows, scores)
