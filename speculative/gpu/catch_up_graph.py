"""A drafting model's rows of verified tokens, a few of each sequence, captured."""

import numpy as np
import torch
from torch import Tensor

from speculative.drafting.neural_drafter import CatchUpRows, DraftModel
from speculative.gpu.buckets import Bucket, Buckets
from speculative.gpu.buffers import GraphBuffers, Unread
from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.padding import BlockTables, PagedCache, fill_rows, paged_rows, row_fields
from speculative.gpu.staged_inputs import Field, StagedInputs
from speculative.state.batch import Int64s


class CatchUpPass:
    """Computes rows of a drafting model as one launch: a `CatchUp`.

    edges: [blocks, F] gets the features of the last position of each block. least_rows: of a sequence, in the bucket of
    a pass: those that a round may leave, whatever survived of its drafts.
    """

    def __init__(
        self,
        model: DraftModel,
        cache: PagedCache,
        edges: Tensor,
        buffers: GraphBuffers,
        buckets: Buckets,
        capturer: Capturer,
    ) -> None:
        self.most_rows = buckets.query_lengths[-1]
        self.least_rows = buckets.most_made + 1
        self.buffer = buffers.features
        self._capturer, self._buffers, self._edges = capturer, buffers, edges
        self._model, self._cache, self._room = model, cache, cache.room
        self._tables = BlockTables(cache.room)
        self._buckets = buckets
        self._first = 1 if model.capture else 0
        self._passes: dict[Bucket, Captured[None]] = {}

    def prepare(self, bucket: Bucket) -> Captured[None]:
        """The captured pass of a bucket; captured now if it is new."""
        if bucket not in self._passes:
            fields = row_fields(bucket, self._room)
            rows, of_each = (bucket.num_rows,), (bucket.num_seqs,)
            fields |= {"token_ids": Field(rows), "sources": Field(rows, padding=-1)}
            fields |= {"lasts": Field(of_each), "last_sources": Field(of_each, padding=-1)}
            fields |= self._buffers.verdict_fields(bucket.num_seqs)
            if self._model.capture:
                fields |= {"features": Field(rows), "edges": Field(rows, padding=self._room.trash_block)}
            inputs = StagedInputs(fields, self._capturer.device)
            replay = self._capturer.capture(lambda: self._compute(inputs.on_device))
            self._passes[bucket] = Captured(inputs, replay)
        return self._passes[bucket]

    @torch.inference_mode()  # a handoff is exported outside of a step
    def run(self, rows: CatchUpRows, unread: Unread | None = None, sources: Int64s | None = None) -> Tensor:
        """The hidden states [B, hidden] of each sequence's last row, until the next call.

        Args:
            rows: as for `CatchUp`; where a verdict is unread, those that there are if all drafts survive.
            unread: the verdict. Rows behind the token that it ends with are computed of anything: they see nothing that
                others see, and their positions are written again before anybody sees them.
            sources: [N] where the drafts lie that the rows are of.
        """
        counts = rows.stops - rows.starts
        bucket = self._buckets.fit(len(counts), max(int(counts.max()), self.least_rows))
        assert bucket is not None, "no sequence has more than most_rows, and a step on a GPU has few enough"
        captured = self.prepare(bucket)
        host = captured.inputs.next_host()
        num_blocks, places = fill_rows(host, self._tables.of(rows.sequences), rows.starts, counts, self._room)
        host["token_ids"][places] = rows.token_ids
        host["lasts"][:] = np.arange(bucket.num_seqs) * bucket.num_queries
        host["lasts"][: len(counts)] += counts - 1
        if unread is not None:
            unread.fill(host)
            host["sources"][places] = sources
            host["last_sources"][: len(counts)] = self._buffers.sources_of(unread.columns)
        if self._model.capture:
            host["features"][places] = self._places(rows.features)
            host["edges"][places] = np.where(rows.edges >= 0, rows.edges, self._room.trash_block)
        captured.inputs.send(num_blocks)
        captured.replay()
        return self._buffers.draft_hidden[: len(counts)]

    def _places(self, features: Tensor | Int64s) -> Int64s:
        """Return where the features of packed rows lie in the buffer; they are stored there if they are elsewhere."""
        if not isinstance(features, Tensor):
            return features
        self.buffer.version += 1
        self.buffer.rows[: len(features)].copy_(features)
        return np.arange(len(features))

    def _compute(self, inputs: dict[str, Tensor]) -> None:
        attention = self._cache.attention(paged_rows(inputs, self._first))
        lasts = inputs["lasts"] + self._buffers.survived(inputs)[1]
        sources = inputs["sources"].index_copy(0, lasts, inputs["last_sources"])
        token_ids = self._buffers.drafts.tokens_or(inputs["token_ids"], sources)
        positions = (inputs["positions"].view(-1) - self._first).clamp(min=0)
        given = self.buffer.rows[:0]
        if self._model.capture:
            features = self.buffer.rows[inputs["features"]]
            self._edges.index_copy_(0, inputs["edges"], features)
            given = self._model.fuse(features)
        hidden = self._model.run(token_ids, given, positions, attention)
        torch.index_select(hidden, 0, lasts, out=self._buffers.draft_hidden[: len(lasts)])
