"""The target's forward pass over packed rows, captured; and the runner that uses it wherever a step fits."""

import numpy as np
from torch import Tensor

from speculative.gpu.buckets import Buckets, PackedBucket
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.padding import BlockTables, PagedCache, fill_packed, paged_rows, row_fields
from speculative.gpu.prompt_graph import PromptPass, run_in_parts
from speculative.gpu.staged_inputs import Field, StagedInputs
from speculative.model.attention import PreparePass
from speculative.model.decoder import Decoder
from speculative.state.batch import Int64s, StepInput
from speculative.state.kv_cache import KVCache
from speculative.step.runner import ModelRunner


class TargetPass:
    """Runs the target on a step's rows as one launch; what it computes lies in the first rows of the statics.

    capture: the layers whose inputs are features, as `Decoder.run` takes them.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, buffers: GraphBuffers, capture: tuple[int, ...], capturer: Capturer
    ) -> None:
        self.capture = capture
        self._capturer = capturer
        self.buffers = buffers
        self._decoder, self._cache, self._room = decoder, cache, cache.room
        self._tables = BlockTables(cache.room)
        self._passes: dict[PackedBucket, Captured[None]] = {}

    def prepare(self, bucket: PackedBucket) -> Captured[None]:
        """The captured pass of a bucket; captured now if it is new."""
        if bucket not in self._passes:
            rows = (bucket.num_rows,)
            fields = row_fields(bucket, self._room) | {"input_ids": Field(rows), "sources": Field(rows, padding=-1)}
            inputs = StagedInputs(fields, self._capturer.device)
            replay = self._capturer.capture(lambda: self._compute(inputs.on_device))
            self._passes[bucket] = Captured(inputs, replay)
        return self._passes[bucket]

    def run(self, bucket: PackedBucket, step_input: StepInput, sources: Int64s | None) -> None:
        """Compute a step's rows.

        Args:
            bucket: holds them.
            step_input: the step's rows.
            sources: [N] the row of `GraphBuffers.drafts` that holds each row's token; -1 = `step_input` has it.
        """
        captured = self.prepare(bucket)
        host = captured.inputs.next_host()
        num_blocks = fill_packed(host, self._tables.of(step_input.sequences), step_input, self._room)
        host["input_ids"][: len(step_input.input_ids)] = step_input.input_ids
        if sources is not None:
            host["sources"][: len(sources)] = sources
        captured.inputs.send(num_blocks)
        self.buffers.features.version += 1
        captured.replay()

    def _compute(self, inputs: dict[str, Tensor]) -> None:
        input_ids = self.buffers.drafts.tokens_or(inputs["input_ids"], inputs["sources"])
        attention = self._cache.attention(paged_rows(inputs))
        hidden, features = self._decoder.run(input_ids, inputs["positions"], attention, self.capture)
        num_rows = len(input_ids)
        self.buffers.hidden[:num_rows].copy_(hidden)
        if self.capture:
            self.buffers.features.rows[:num_rows].copy_(features)


class GraphRunner(ModelRunner):
    """A ModelRunner that replays passes: those of sequences that have a few rows each, and those of prompts."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        target: TargetPass,
        prompts: PromptPass,
        buckets: Buckets,
        prepare: PreparePass,
    ) -> None:
        super().__init__(decoder, cache, decoder.device, prepare)
        self.target, self.prompts = target, prompts
        self._buckets = buckets
        self._found: tuple[StepInput, tuple[Tensor, Tensor]] | None = None  # rows computed beside decoding ones

    def run_decoding(
        self, bucket: PackedBucket, step_input: StepInput, sources: Int64s | None, prompts: StepInput | None
    ) -> None:
        """Run `TargetPass.run`; in the same pass compute the rows of prompts, where they fit, for which
        `forward_with_features` will be asked next."""
        found = None if prompts is None else self.prompts.run_beside(prompts, bucket, step_input, sources)
        self._found = None if prompts is None or found is None else (prompts, found)
        if found is None:
            self.target.run(bucket, step_input, sources)

    def forward_with_features(self, step_input: StepInput, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Implement `ModelRunner.forward_with_features`."""
        found, self._found = self._found, None
        if capture not in ((), self.target.capture):
            return super().forward_with_features(step_input, capture)
        if found is not None and found[0].sequences == step_input.sequences:
            hidden, features = found[1]
        elif np.diff(step_input.row_starts).max() <= self._buckets.query_lengths[-1]:
            hidden, features = self._replay(step_input)
        elif self.prompts.takes(step_input):
            hidden, features = self.prompts.run(step_input)
        else:
            return super().forward_with_features(step_input, capture)
        return hidden, features if capture else hidden[:, :0]

    def _replay(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        num_seqs, num_rows = len(step_input.sequences), len(step_input.input_ids)
        bucket, buffers = self._buckets.fit_rows(num_seqs, num_rows), self.target.buffers
        if bucket is None:  # several replays: eagerly, each sequence would be several launches a layer
            return run_in_parts(step_input, self._buckets.batch_sizes[-1], self._replay)
        self.target.run(bucket, step_input, None)
        return buffers.hidden[:num_rows].clone(), buffers.features.rows[:num_rows].clone()  # the next step overwrites
