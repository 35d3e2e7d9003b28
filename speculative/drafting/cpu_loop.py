"""All drafts of a round in one call of our CPU kernels: draw, run, draw, with no Python in between."""

from collections.abc import Sequence as Sequences
from itertools import islice

import numpy as np
from torch import Tensor

from speculative.drafting.draft_sampler import DraftSampler
from speculative.drafting.neural_drafter import MadeDrafts
from speculative.kernels.bindings import DraftRoundStruct
from speculative.model.attention import join_contexts
from speculative.model.eagle3 import FusedHead
from speculative.sampling.rng import Purpose
from speculative.state.batch import Entry
from speculative.state.kv_cache import KVCache


class FusedDraftLoop:
    """Makes the drafts of a head that reads features, for any temperatures and filters.

    Args:
        head: packed for our kernels.
        sampler: says what drafts are sampled with.
        cache: the head's keys and values.
        block_size: tokens a block.
    """

    def __init__(self, head: FusedHead, sampler: DraftSampler, cache: KVCache, block_size: int) -> None:
        self.head = head
        self._sampler = sampler
        self._place = (head.shape_with(cache), cache.data)
        self._block_size = block_size

    def __call__(self, entries: Sequences[Entry], hidden: Tensor) -> MadeDrafts | None:
        """Implement `MakeDrafts`; None where drafts are chosen with the noise of their tokens."""
        sequences = [entry.sequence for entry in entries]
        if any(self._sampler.is_coupled(sequence) for sequence in sequences):
            return None
        lengths = [len(sequence.tokens) for sequence in sequences]
        counts = [entry.max_drafts for entry in entries]
        contexts = tuple(
            sequence.slots(length + count - 1, self._block_size)[1:]  # row 0 does not exist
            for sequence, length, count in zip(sequences, lengths, counts, strict=True)
        )
        context, starts = join_contexts(contexts)
        numbers = np.array([lengths, counts], np.int64)
        num_drafts = sum(counts)
        seeds = np.array([sequence.request.seed for sequence in sequences], np.uint64)
        rows = self._sampler.rows_of(sequences, hidden.device)
        struct = DraftRoundStruct(
            num_entries=len(entries),
            counts=numbers[1].ctypes.data,
            context=context.ctypes.data,
            context_starts=starts.ctypes.data,
            seeds=seeds.ctypes.data,
            lengths=numbers[0].ctypes.data,
            purpose=Purpose.DRAFT,
            temperature=rows.temperature.data_ptr(),
            greedy=rows.greedy.data_ptr(),
        )
        if rows.filters is not None:
            struct.num_filters, struct.filtered = len(rows.filters.rows), rows.filters.rows.data_ptr()
            struct.log_min_p, struct.top_p = rows.filters.log_min_p.data_ptr(), rows.filters.top_p.data_ptr()
            struct.top_k = rows.filters.top_k.data_ptr()
        tokens, columns, distributions = self.head.draft(struct, num_drafts, hidden, self._place)
        packed = iter(tokens.tolist())
        return MadeDrafts([list(islice(packed, count)) for count in counts], columns, distributions)
