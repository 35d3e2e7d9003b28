"""Rows of made-up steps, and caches for a captured and a plain pass over them."""

import numpy as np
import torch

from speculative.cache.kv_cache import KVCache
from speculative.model.decoder import Decoder
from speculative.request import Request
from speculative.state.batch import StepInput
from speculative.state.sequence import Sequence
from tests.support.graph_scenes import VOCABULARY

HIDDEN_TOLERANCE = 1e-4


def input_of(lengths: list[int], counts: list[int], block_size: int, seed: int) -> StepInput:
    """Rows of sequences with `lengths` known positions, `counts` rows each, in blocks at random places."""
    random = np.random.default_rng(seed)
    blocks_each = [-(-(length + count) // block_size) for length, count in zip(lengths, counts, strict=True)]
    blocks = np.split(random.permutation(sum(blocks_each)), np.cumsum(blocks_each)[:-1])
    sequences = [Sequence(Request(f"r{index}", (1,))) for index in range(len(lengths))]
    for sequence, own, length in zip(sequences, blocks, lengths, strict=True):
        sequence.blocks, sequence.num_computed = own.tolist(), length
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([length + np.arange(count) for length, count in zip(lengths, counts, strict=True)])
    empty = np.empty(0, np.int64)
    return StepInput(
        sequences=tuple(sequences),
        block_size=block_size,
        row_starts=starts,
        input_ids=random.integers(0, VOCABULARY, len(positions)),
        positions=positions,
        verify_rows=empty,
        verify_entries=empty,
        offsets=empty,
        drafts=empty,
        sampled_entries=(),
        draft_counts=empty,
    )


def twin_caches(decoder: Decoder, num_blocks: int, block_size: int) -> tuple[KVCache, KVCache]:
    """Two caches with the same random contents; the second has a trash block, of NaN."""
    shape = decoder.config.kv_shape
    plain, padded = (
        KVCache(shape, blocks * block_size, dtype=torch.float32, device=torch.device("cpu"))
        for blocks in (num_blocks, num_blocks + 1)
    )
    plain.data.copy_(torch.randn(plain.data.shape, generator=torch.Generator().manual_seed(1)))
    padded.data.fill_(torch.nan)
    padded.data[:, :, : num_blocks * block_size] = plain.data
    return plain, padded
