"""The KV cache: tensors, the pool that owns their blocks, and the cached prefixes.

A block holds the keys and values of `block_size` consecutive positions, of all layers. A block is free (nobody holds
it; it may still carry a cached prefix until it is taken), or held by one or more sequences. Position i of a sequence
lies in its block i // block_size; rejected drafts are not undone, their positions are overwritten.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.state.huge_pages import zeros


class BlockPool:
    """The blocks of a cache: who holds each, and which of them carry a prefix that may be shared.

    Free blocks are taken least recently used first, so cached prefixes live as long as there is room.
    """

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._marked: set[int] = set()
        self._scopes = [""] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those with a cached prefix included."""
        return len(self._free)

    def take(self, count: int, scope: str = "") -> list[int] | None:
        """`count` blocks for one holder, of this `Request.cache_scope`, or None when there are not so many free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._marked.discard(block)
            self._forget_name(block)
            self._holders[block] = 1
            self._scopes[block] = scope
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix among `hashes`, without holding them."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def lie_within(self, blocks: Iterable[int], scope: str) -> bool:
        """Return whether all of these were filled by requests of one scope, whatever their names say."""
        return all(self._scopes[block] == scope for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Become one more holder of blocks that `find` returned."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def num_free_of(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` are free: holding them uses up room."""
        return sum(self._holders[block] == 0 for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Stop holding. The last blocks of a sequence become free first: they are the least likely to be shared."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let others share a full block of verified tokens. The first block of a prefix stays its representative."""
        if self._caching and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def newest_prefixes(self, most: int) -> list[bytes]:
        """Names of the blocks that can be found, the newest last, at most so many; any thread may ask."""
        return list(self._block_of)[-most:]

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Let nobody else find these blocks: what they hold is suspect. Who holds them, marks included, goes on."""
        for block in blocks:
            self._forget_name(block)

    def mark(self, block: int) -> None:
        """Note that a held block's drafter rows are complete too; forgotten when the block is taken again."""
        self._marked.add(block)

    def is_marked(self, block: int) -> bool:
        """Return whether a block's drafter rows are complete."""
        return block in self._marked

    def drop_prefixes(self) -> None:
        """Forget every cached prefix: nothing that was computed before is found again. Held blocks stay held."""
        self._hash_of.clear()
        self._block_of.clear()

    def _forget_name(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The contents of one position of the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def of_position(self) -> tuple[int, int, int, int]:
        """The shape of a position's keys and values."""
        return self.num_layers, 2, self.num_kv_heads, self.head_dim

    @property
    def num_values(self) -> int:
        """Numbers stored per position."""
        return math.prod(self.of_position)


class KVCache:
    """Keys and values of all layers, by slot (block x block_size + offset).

    `data` is [num_layers, 2, num_slots, num_kv_heads, head_dim]: 0 = keys, 1 = values.
    """

    def __init__(self, shape: KVShape, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, shape.head_dim)
        self.data = zeros(size, dtype) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [N, num_kv_heads, head_dim] of one layer at slots [N]."""
        self.data[layer, 0].index_copy_(0, slots, key)
        self.data[layer, 1].index_copy_(0, slots, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, num_kv_heads, head_dim] of one layer at slots [N]."""
        return self.data[layer, 0].index_select(0, slots), self.data[layer, 1].index_select(0, slots)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy all layers from slots [N] to others [N], which may be among them."""
        self.data[:, :, targets] = self.data[:, :, sources]

    def read_all(self, slots: Tensor, out: Tensor) -> None:
        """Copy all layers at slots [N] into out [N, num_layers, 2, num_kv_heads, head_dim], in one operation."""
        torch.index_select(self._positions(), 0, slots, out=_words(out))

    def write_all(self, slots: Tensor, source: Tensor) -> None:
        """Store all layers of source [N, num_layers, 2, num_kv_heads, head_dim] at slots [N]."""
        self._positions().index_copy_(0, slots, _words(source))

    def _positions(self) -> Tensor:
        """[num_slots, num_layers, 2, W] words, position by position."""
        return _words(self.data).permute(2, 0, 1, 3)


def _words(values: Tensor) -> Tensor:
    """[..., num_kv_heads, head_dim] as the largest words that such a row is made of: to copy is to copy bits."""
    rows = values.flatten(-2)
    return rows if rows.shape[-1] * rows.itemsize % 8 else rows.view(torch.int64)
