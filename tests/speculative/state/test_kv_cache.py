"""Blocks: nobody's twice, nobody's lost, and a cached prefix is found only by who has the same tokens."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from speculative.state.kv_cache import BlockPool, KVCache, KVShape
from speculative.state.prefix import hash_block

NUM_BLOCKS = 6
DIGESTS = [bytes([index]) * 16 for index in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the one that one would write first: lists, searched from one end to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))  # least recently used first
        self.tables: list[list[int]] = []  # each holder's blocks
        self.named: list[tuple[bytes, int]] = []

    def names_of(self, block: int) -> list[bytes]:
        return [digest for digest, named in self.named if named == block]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> None:
        blocks = self.pool.take(count)
        if count > len(self.free):
            assert blocks is None
            return
        assert blocks == self.free[:count], "the least recently used go first"
        del self.free[:count]
        self.named = [(digest, block) for digest, block in self.named if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            if not any(block in other for other in self.tables):
                self.free.append(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        held = sorted({block for table in self.tables for block in table if not self.names_of(block)})
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        self.pool.publish(block, digest)
        if all(known != digest for known, _ in self.named):
            self.named.append((digest, block))

    @rule(digests=st.lists(st.sampled_from(DIGESTS), unique=True))
    def share(self, digests: list[bytes]) -> None:
        expected = []
        for digest in digests:
            found = [block for known, block in self.named if known == digest]
            if not found:
                break
            expected += found
        blocks = self.pool.find(digests)
        assert blocks == expected
        assert self.pool.num_free_of(blocks) == len(set(blocks) & set(self.free))
        self.pool.hold(blocks)
        self.free = [block for block in self.free if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.withdraw(table)
        self.named = [(digest, block) for digest, block in self.named if block not in table]

    @rule()
    def drop_prefixes(self) -> None:
        self.pool.drop_prefixes()
        self.named = []

    @invariant()
    def agrees(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert {*self.free, *(block for table in self.tables for block in table)} == set(range(NUM_BLOCKS))
        for digest in DIGESTS:
            assert self.pool.find([digest]) == [block for known, block in self.named if known == digest]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_a_block_belongs_to_the_scope_of_the_holder_that_filled_it() -> None:
    pool = BlockPool(2)
    (own,), (other,) = pool.take(1, "a") or (), pool.take(1, "b") or ()
    pool.hold([own])
    assert pool.lie_within([own], "a") and pool.lie_within([], "b") and not pool.lie_within([own, other], "a")
    pool.release([other])
    assert pool.take(1, "a") == [other] and pool.lie_within([own, other], "a")


def test_withdrawn_blocks_are_found_no_more_and_stay_as_they_are_for_who_holds_them() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1) or []
    pool.publish(block, DIGESTS[0])
    pool.mark(block)
    pool.withdraw([block])
    assert pool.find(DIGESTS[:1]) == []
    assert pool.is_marked(block)
    pool.release([block])
    assert block in (pool.take(2) or []) and not pool.is_marked(block)


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, caching=False)
    (block,) = pool.take(1) or []
    pool.publish(block, DIGESTS[0])
    assert pool.find(DIGESTS[:1]) == []


def test_a_block_is_named_by_its_tokens_and_all_before_them() -> None:
    root = hash_block(b"", [1, 2, 3, 4])
    names = {
        root,
        hash_block(b"", [1, 2, 4, 3]),
        hash_block(b"", [1, 2, 3, 5]),
        hash_block(root, [1, 2, 3, 4]),
        hash_block(hash_block(b"", [9, 9, 9, 9]), [1, 2, 3, 4]),
        hash_block(b"", [0x0201, 0, 0, 0]),
        hash_block(b"", [1, 2, 0, 0]),
    }
    assert len(names) == 7
    assert hash_block(b"", [1, 2, 3, 4]) == root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_layer_by_layer_and_as_a_whole(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=4)
    cache = KVCache(shape, 16, dtype=dtype, device=torch.device("cpu"))
    whole = torch.randn(5, 3, 2, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    slots = torch.tensor([9, 3, 15, 0, 7])
    for layer in range(3):
        cache.write(layer, slots, whole[:, layer, 0], whole[:, layer, 1])
    out = torch.empty_like(whole)
    cache.read_all(slots, out)
    assert torch.equal(out, whole)
    other = KVCache(shape, 16, dtype=dtype, device=torch.device("cpu"))
    other.write_all(torch.arange(5), whole)
    for layer in range(3):
        keys, values = other.read(layer, torch.tensor([4, 1]))
        assert torch.equal(keys, whole[[4, 1], layer, 0])
        assert torch.equal(values, whole[[4, 1], layer, 1])
    assert not other.data[:, :, 5:].any(), "nothing else was touched"
    assert shape.num_values == whole[0].numel()
