"""All drafts of a round as one captured function: sample, run, sample, without the host in between."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from speculative.drafting.draft_sampler import DraftSampler, lengths_of, noise_keys
from speculative.drafting.neural_drafter import DraftModel, MadeDrafts
from speculative.gpu.buckets import Bucket, Buckets
from speculative.gpu.buffers import GraphBuffers, Unread
from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.filters import SamplingArrays, sampling_fields
from speculative.gpu.padding import BlockTables, PagedCache, block_tables, fill_rows, row_fields
from speculative.gpu.paged_attention import PagedRows
from speculative.gpu.row_drafts import DraftFields, SampleDrafts
from speculative.gpu.staged_inputs import Field, StagedInputs
from speculative.state.batch import Entry

_BY_DRAFT = ("positions", "visible", "slots")  # those of one draft lie together, as its pass reads them


class DraftLoop:
    """Drafts with a model; drafts and their distributions lie in the statics, until the next run: `num_runs` counts.

    It holds nothing of the drafter that calls it: memory of old graphs is free as soon as nobody uses them.

    Args:
        model: what drafts.
        sampler: of its drafts; it has their parameters and random numbers.
        cache: the model's.
        buffers: get the drafts and their distributions.
        buckets: of sequences and drafts each.
        capturer: of the step.
        sample: samples a draft of each sequence.
    """

    def __init__(
        self,
        model: DraftModel,
        sampler: DraftSampler,
        cache: PagedCache,
        buffers: GraphBuffers,
        buckets: Buckets,
        capturer: Capturer,
        sample: SampleDrafts,
    ) -> None:
        self._buckets, self._capturer = buckets, capturer
        self._model, self._sampler, self._cache, self._sample = model, sampler, cache, sample
        self._room, self._statics = cache.room, buffers
        self._first, self._most = 1 if model.capture else 0, buckets.most_made
        self._params, self._tables = SamplingArrays(sampler.width), BlockTables(cache.room)
        self._loops: dict[Bucket, Captured[None]] = {}
        self.num_runs = 0

    def prepare(self, bucket: Bucket) -> Captured[None]:
        """The captured loop of a bucket, of `num_queries` drafts each; captured now if it is new."""
        if bucket not in self._loops:
            fields = row_fields(bucket, self._room) | sampling_fields(bucket.num_seqs, self._sampler.width)
            fields |= {name: replace(fields[name], shape=fields[name].shape[::-1]) for name in _BY_DRAFT}
            fields |= self._statics.verdict_fields(bucket.num_seqs)
            fields |= {
                # By how many drafts survived of those before, where the host has not read the verdict.
                "uniforms": Field((bucket.num_queries, self._most + 1, bucket.num_seqs), torch.float64, 0.5),
                "coupled": Field((bucket.num_seqs,), torch.bool, 0),
                "seeds": Field((bucket.num_seqs,)),
                "noise_positions": Field((bucket.num_queries, bucket.num_seqs)),
            }
            inputs = StagedInputs(fields, self._capturer.device)
            replay = self._capturer.capture(lambda: self._compute(bucket, inputs.on_device))
            self._loops[bucket] = Captured(inputs, replay)
        return self._loops[bucket]

    def bucket_of(self, entries: Sequences[Entry]) -> Bucket:
        """The bucket that `run` drafts for these entries in."""
        bucket = self._buckets.fit(len(entries), max(entry.max_drafts for entry in entries))
        assert bucket is not None, "every batch that is taken fits"
        return bucket

    def run(self, entries: Sequences[Entry], hidden: Tensor, unread: Unread | None = None) -> Bucket:
        """Draft for every entry; `hidden` [E, hidden] is what their first drafts are drawn from, copied unless it is
        the first rows of `GraphBuffers.draft_hidden`. unread: a verdict, behind which they draft."""
        self.num_runs += 1
        bucket = self.bucket_of(entries)
        sequences = [entry.sequence for entry in entries]
        loop = self.prepare(bucket)
        host = loop.inputs.next_host()
        lengths = lengths_of(sequences)
        drafts = np.array([entry.max_drafts for entry in entries], np.int64)
        may_be = lengths[None]  # by how many drafts survived
        if unread is not None:
            unread.fill(host)
            may_be = lengths + np.arange(1, int(unread.judged.max()) + 2)[:, None]
            lengths = lengths + unread.judged + 1
        columns = self._tables.of(sequences)
        # As `fill_rows` fills them, each sequence's rows lie together. The last draft is not run.
        by_sequence = {name: array.T if name in _BY_DRAFT else array for name, array in host.items()}
        num_blocks, _ = fill_rows(by_sequence, columns, lengths, drafts - 1, self._room)
        np.maximum(host["positions"] - self._first, 0, out=host["positions"])
        num_seqs, num_drafts = len(entries), bucket.num_queries
        host["uniforms"][:, : len(may_be), :num_seqs] = self._sampler.uniforms(sequences, num_drafts, may_be)
        for name, values in self._params.of([sequence.params for sequence in sequences]).items():
            host[name][:num_seqs] = values
        if not self._sampler.sampled:
            host["greedy"][:num_seqs] = True
        host["coupled"][:num_seqs] = [self._sampler.is_coupled(sequence) for sequence in sequences]
        host["seeds"][:num_seqs], host["noise_positions"][:, :num_seqs] = noise_keys(sequences, num_drafts, lengths)
        loop.inputs.send(num_blocks)
        if hidden.data_ptr() != self._statics.draft_hidden.data_ptr():
            self._statics.draft_hidden[:num_seqs].copy_(hidden)
        loop.replay()
        return bucket

    def make(self, entries: Sequences[Entry], hidden: Tensor) -> MadeDrafts:
        """`MakeDrafts` for a step that is not replayed whole."""
        bucket = self.run(entries, hidden)
        used, shape, made = bucket.num_rows, (bucket.num_queries, bucket.num_seqs), self._statics.drafts
        tokens = made.tokens[:used].view(shape).T.tolist()
        distributions = made.probs[:used].view(*shape, -1)
        drafts = [own[: entry.max_drafts] for entry, own in zip(entries, tokens, strict=False)]
        places = [(offset, row) for row, own in enumerate(drafts) for offset in range(len(own))]
        offsets, rows = torch.tensor(places, device=distributions.device).T
        columns = made.columns[:used].view(shape)
        return MadeDrafts(drafts, columns[offsets, rows], distributions[offsets, rows])

    def _compute(self, bucket: Bucket, inputs: Mapping[str, Tensor]) -> None:
        num_seqs, num_drafts = bucket
        model, made, tables = self._model, self._statics.drafts, block_tables(inputs)
        inputs = self._behind_verdict(inputs)
        hidden = self._statics.draft_hidden[:num_seqs]
        fields = DraftFields(**{name: inputs[name] for name in DraftFields._fields})
        for offset in range(num_drafts):
            self._sample(model.logits(hidden), fields, offset, model.ids, self._sampler.vocab_size, made)
            if offset + 1 < num_drafts:
                tokens = made.tokens[offset * num_seqs : (offset + 1) * num_seqs]
                attended = PagedRows(inputs["slots"][offset], inputs["visible"][offset], tables, self._first)
                hidden = model.run(tokens, hidden, inputs["positions"][offset], self._cache.attention(attended))

    def _behind_verdict(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs with each row at the position, and each draft with the uniform, that the last verdict gives it."""
        survived, missed = self._statics.survived(inputs)
        visible = (inputs["visible"] + missed).clamp(min=0)  # [K, B]; a row that stands for nothing sees nothing
        last, size = (visible - 1).clamp(min=0), self._room.block_size
        slots = torch.add(last % size, inputs["blocks"].gather(0, last // size), alpha=size)
        uniforms = inputs["uniforms"]
        return {
            **inputs,
            "visible": visible,
            "positions": (inputs["positions"] + missed).clamp(min=0),
            "slots": torch.where(visible > 0, slots, inputs["slots"]),
            "noise_positions": inputs["noise_positions"] + missed,
            "uniforms": uniforms.gather(1, survived.expand(len(uniforms), 1, -1)).squeeze(1),
        }
