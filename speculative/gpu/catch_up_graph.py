"""A drafting model's rows of verified tokens, a few of each sequence, captured."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculative.drafting.neural_drafter import CatchUpRows, DraftModel
from speculative.gpu.buckets import Bucket, Buckets
from speculative.gpu.capture import Capturer
from speculative.gpu.padding import PagedCache, fill_rows, padded_places, paged_rows, row_fields
from speculative.gpu.staged_inputs import Field, StagedInputs
from speculative.state.batch import Int64s


@dataclass(frozen=True, slots=True)
class _Pass:
    """features: [B * Q, F] the target's, of each row."""

    inputs: StagedInputs
    features: Tensor
    replay: Callable[[], Tensor]


class CatchUpPass:
    """Computes rows of a drafting model as one launch, where the sequences have few enough each: a `CatchUp`.

    dtype: of the target's features.
    """

    def __init__(
        self,
        model: DraftModel,
        cache: PagedCache,
        buckets: Buckets,
        dtype: torch.dtype,
        capturer: Capturer,
    ) -> None:
        self._capturer = capturer
        self._model, self._cache, self._room = model, cache, cache.room
        self._buckets, self._dtype = buckets, dtype
        self._first = 1 if model.capture else 0
        self._passes: dict[Bucket, _Pass] = {}

    def prepare(self, bucket: Bucket) -> _Pass:
        """The captured pass of a bucket; captured now if it is new."""
        if bucket not in self._passes:
            fields = row_fields(bucket, self._room)
            fields |= {"token_ids": Field((bucket.num_seqs, bucket.num_queries)), "lasts": Field((bucket.num_seqs,))}
            fields |= {"places": Field((bucket.num_rows,))}
            inputs = StagedInputs(fields, self._capturer.device)
            size = (bucket.num_rows, self._model.num_features)
            features = torch.zeros(size, dtype=self._dtype, device=self._capturer.device)
            replay = self._capturer.capture(lambda: self._compute(inputs.on_device, features))
            self._passes[bucket] = _Pass(inputs, features, replay)
        return self._passes[bucket]

    @torch.inference_mode()  # a handoff is exported outside of a step
    def run(self, rows: CatchUpRows, features: Tensor) -> Tensor | None:
        """The hidden states [B, hidden] of each sequence's last row, until the next call; None where they do not fit.

        `features` is [N, F], of the packed rows.
        """
        counts, most = rows.stops - rows.starts, self._buckets.batch_sizes[-1]
        if len(counts) > most and counts.max() <= self._buckets.query_lengths[-1]:
            begins = range(0, len(counts), most)
            return torch.cat([self._run_part(rows, features, slice(begin, begin + most)) for begin in begins])
        bucket = self._buckets.fit(len(counts), int(counts.max()))
        if bucket is None:
            return None
        captured = self.prepare(bucket)
        host, places = captured.inputs.next_host(), padded_places(counts, bucket.num_queries)
        fill_rows(host, [_blocks(sequence.blocks) for sequence in rows.sequences], rows.starts, counts, self._room)
        host["token_ids"].reshape(-1)[places] = rows.token_ids
        host["lasts"][: len(counts)] = np.arange(len(counts)) * bucket.num_queries + counts - 1
        host["places"][: len(places)] = places
        captured.inputs.send()
        if features.shape[1]:
            captured.features.index_copy_(0, captured.inputs.on_device["places"][: len(places)], features)
        return captured.replay()[: len(counts)]

    def _run_part(self, rows: CatchUpRows, features: Tensor, part: slice) -> Tensor:
        """The hidden states of some sequences that fit, in memory of their own."""
        counts = rows.stops - rows.starts
        begin, own = int(counts[: part.start].sum()), int(counts[part].sum())
        packed = slice(begin, begin + own)
        chosen = CatchUpRows(rows.token_ids[packed], rows.starts[part], rows.stops[part], rows.sequences[part])
        hidden = self.run(chosen, features[packed])
        assert hidden is not None, "it fits"
        return hidden.clone()

    def _compute(self, inputs: dict[str, Tensor], features: Tensor) -> Tensor:
        attention = self._cache.attention(paged_rows(inputs, self._first))
        positions = (inputs["positions"].view(-1) - self._first).clamp(min=0)
        given = self._model.fuse(features) if self._model.capture else features
        return self._model.run(inputs["token_ids"].view(-1), given, positions, attention)[inputs["lasts"]]


def _blocks(blocks: list[int]) -> Int64s:
    return np.array(blocks, np.int64)
