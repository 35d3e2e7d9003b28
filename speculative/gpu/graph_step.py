"""A whole decoding step in captured graphs: the drafter's loop, the target, the verdict, and one copy to the host.

What a graph cannot hold runs eagerly, with the same distribution: prefills, rules, structures, reproducible
requests, the most likely tokens' logprobs, and verifiers other than the token-wise one. Their forward pass is replayed
still where it is a decoding step's (`GraphRunner`)."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculative.cache.kv_cache import KVCache
from speculative.config import EngineConfig
from speculative.drafting.base import Drafter
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.errors import ConfigError, EngineFault
from speculative.gpu.attention_choice import make_attend, make_layer_ops
from speculative.gpu.buckets import Bucket, Buckets
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Capturer
from speculative.gpu.catch_up_graph import CatchUpPass
from speculative.gpu.draft_graph import DraftLoop
from speculative.gpu.memory import free_bytes, graph_bytes
from speculative.gpu.padding import CacheRoom, PagedCache
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.target_graph import GraphRunner, TargetPass
from speculative.gpu.verify_graph import JudgedRows, Kind, VerifyGraph
from speculative.model.decoder import Decoder
from speculative.model.layers import use_layer_ops
from speculative.state.batch import Batch, Int64s, StepInput, StepOutcome, build_step_input
from speculative.state.sequence import Sequence
from speculative.step.host_copy import results_per_entry
from speculative.step.sampler import Sampler
from speculative.verification.draft_probs import PointMass


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What was drafted, before the host has seen it.

    counts: [B] per entry. token_ids: [sum(counts)], zeros where only the device knows them. rows: [sum(counts)] where
    each lies in the statics; None where the host knows them.
    """

    counts: Int64s
    token_ids: Int64s
    rows: Int64s | None


class GraphStep:
    """Runs the steps of plain decoding batches, and has the runner of the others.

    Args:
        config: of the engine.
        decoder: the target.
        cache: the target's keys and values, with a block more than the pool owns: the trash block.
        drafter: of the engine.
        sampler: of the engine.
        max_model_len: tokens of the longest sequence.
        neural: that drafter where it has a model, whose passes are captured, too.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        cache: KVCache,
        drafter: Drafter,
        sampler: Sampler,
        max_model_len: int,
        neural: ModelDrafter | None = None,
    ) -> None:
        self.buckets = Buckets.of(config.max_num_seqs, config.drafter.max_drafts)
        self.capturer = Capturer(decoder.device)
        self._config = config
        self._drafter = drafter
        self._sampler = sampler
        self._neural = neural
        self._draft_model = None if neural is None else neural.model
        room = CacheRoom(config.block_size, -(-max_model_len // config.block_size), config.num_blocks)
        sizes = AttentionSizes(config.block_size, self.buckets.largest.num_queries, room.max_blocks)
        self._check_memory(decoder, sizes)
        self.buffers = GraphBuffers.make(decoder, self.buckets, self._draft_model)
        attend, layer_ops = make_attend(sizes, decoder.device), make_layer_ops(decoder.device)
        use_layer_ops(decoder, layer_ops)
        paged = PagedCache(cache, room, attend)
        target = TargetPass(decoder, paged, self.buffers, drafter.capture, self.capturer)
        self.runner = GraphRunner(decoder, cache, target, self.buckets)
        ids = None if self._draft_model is None else self._draft_model.ids
        self.judge = VerifyGraph(decoder, self.buffers, ids, config.logprobs_mode, sampler.ops, self.capturer)
        self.loop: DraftLoop | None = None
        self._catch_up: CatchUpPass | None = None
        if neural is not None:
            use_layer_ops(neural.model.network, layer_ops)
            paged = PagedCache(neural.cache, room, attend)
            lengths = Buckets.of(config.max_num_seqs, config.drafter.max_drafts - 1)
            self.loop = DraftLoop(neural.model, neural.sampler, paged, self.buffers, lengths, self.capturer)
            self._catch_up = CatchUpPass(neural.model, paged, self.buckets, decoder.dtype, self.capturer)
            neural.catch_up, neural.draft_loop = self._catch_up.run, self.loop.make

    # -- which steps --------------------------------------------------------------------------------------------

    def takes(self, batch: Batch) -> bool:
        """Whether the whole step can be replayed."""
        if self._config.verifier != "token_wise" or len(batch.entries) > self.buckets.batch_sizes[-1]:
            return False
        if self._neural is not None and any(self._neural.length.repeated(entry.sequence) for entry in batch.entries):
            return False
        return all(entry.samples and entry.num_known == 1 and _is_plain(entry.sequence) for entry in batch.entries)

    # -- the step -----------------------------------------------------------------------------------------------

    def draft(self, batch: Batch) -> StepDrafts:
        """Draft for every entry; a model's drafts stay on the device.

        Raises:
            EngineFault: a drafter without a model gives another distribution than a point mass.
        """
        if self.loop is None or self._neural is None:
            drafts = self._drafter.propose(batch)
            if not isinstance(drafts.draft_probs, PointMass):
                raise EngineFault(
                    f"{type(self._drafter).__name__} has no model, and did not say that it chose its drafts "
                    f"(PointMass): its q is {type(drafts.draft_probs).__name__}, which a captured step cannot take. "
                    f"Set "
                    "cuda_graphs to false."
                )
            return StepDrafts(drafts.counts, drafts.token_ids, None)
        counts = np.array([entry.max_drafts for entry in batch.entries], np.int64)
        drafting, hidden = self._neural.begin_round(batch)
        if not drafting:
            return StepDrafts(counts, np.empty(0, np.int64), None)
        bucket = self.loop.run(drafting, hidden)
        own = counts[counts > 0]
        entries = np.repeat(np.arange(len(own)), own)
        offsets = np.arange(len(entries)) - np.repeat(np.cumsum(own) - own, own)
        return StepDrafts(counts, np.zeros(len(entries), np.int64), offsets * bucket.num_seqs + entries)

    def verify(self, batch: Batch, drafts: StepDrafts) -> StepOutcome:
        """Run the target on the step's rows, verify, and copy the results to the host, once."""
        self_check = self._sampler.self_check
        layout = build_step_input(batch.entries, drafts.counts, drafts.token_ids, self._config.block_size)
        bucket = self.buckets.fit(len(batch.entries), int(drafts.counts.max()) + 1)
        rows_bucket = self.buckets.fit_rows(len(batch.entries), len(layout.verify_rows))
        assert bucket is not None and rows_bucket is not None, "every batch that is taken fits"
        places = self.runner.target.run(bucket, layout, _sources(layout, drafts))
        self._observe(batch, layout, places.on_device)
        sequences = [entry.sequence for entry in batch.entries]
        filtered = any(sequence.params.filtered for sequence in sequences)
        kind = Kind(
            sampled=drafts.rows is not None,
            checked=self_check.due(),
            logprobs=filtered or any(sequence.params.returns_logprobs for sequence in sequences),  # fewer captures
            filtered=filtered,
        )
        rows = JudgedRows(layout, places.on_host[layout.verify_rows], drafts.rows, self_check.counted(sequences))
        judged = self.judge.run(rows_bucket, kind, rows)
        known = _with_drafts(layout, judged.draft_ids)
        drawn = results_per_entry(known, judged.verdicts, judged.logprobs)
        self._note_drafts(batch, known)
        return StepOutcome(
            results=tuple(self._sampler.check_on_host(known, drawn, [None] * len(drawn))),
            expected_accepted=judged.verdicts.expected_accepted,
            terms=judged.terms,
        )

    def _observe(self, batch: Batch, layout: StepInput, places: Tensor) -> None:
        if self._drafter.capture:
            # A copy: the drafter keeps features for longer than the static ones stand.
            self._drafter.observe(batch, layout, self.buffers.features[places])

    def _note_drafts(self, batch: Batch, layout: StepInput) -> None:
        if self._neural is not None:
            ends = np.cumsum(layout.draft_counts)[:-1]
            drafts = [own.tolist() for own in np.split(layout.drafts[layout.drafts >= 0], ends)]
            drafting = [index for index, own in enumerate(drafts) if own]
            self._neural.end_round([batch.entries[index] for index in drafting], [drafts[index] for index in drafting])

    # -- before the first step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_all(self) -> int:
        """Capture what plain decoding will ask for, so that no request waits for it; how many graphs there are.

        Query lengths are 1 and the longest; others, which a drafter of varying length asks for, are captured when they
        first come. A drafting model catches up on any number of rows.
        """
        longest = self.buckets.query_lengths[-1]
        for bucket in self.buckets:
            if bucket.num_queries in (1, longest):
                self.runner.target.prepare(bucket)
                sampled = self.loop is not None and bucket.num_queries > 1
                for checked in (False, True):
                    for logprobs, filtered in ((False, False), (True, False), (True, True)):
                        self.judge.prepare(bucket, Kind(sampled, checked, logprobs, filtered))
            if self.loop is not None and self._catch_up is not None:
                hidden = self._catch_up.prepare(bucket).replay()
                if bucket.num_queries == longest:
                    drafts = Bucket(bucket.num_seqs, self._config.drafter.max_drafts)
                    for filtered in (False, True):
                        self.loop.prepare(drafts, hidden, filtered=filtered)
        return self.capturer.num_captured

    def _check_memory(self, decoder: Decoder, sizes: AttentionSizes) -> None:
        if self.capturer.device.type != "cuda":
            return
        free, _ = free_bytes(self.capturer.device)
        needed = graph_bytes(decoder, self.buckets, sizes, self._draft_model)
        if needed > free:
            raise ConfigError(
                f"cuda_graphs need up to {needed / 2**30:.1f} GiB of GPU memory for batches of "
                f"{self.buckets.largest.num_seqs}, and {free / 2**30:.1f} are free; lower max_num_seqs or "
                "kv_cache_tokens, or set cuda_graphs to false."
            )


def _is_plain(sequence: Sequence) -> bool:
    params = sequence.params
    reported = params.prompt_logprobs is not None or params.logprobs or params.logprob_token_ids or sequence.scores_only
    ruled = sequence.rules is not None or sequence.constraint is not None
    return not (reported or ruled or params.reproducible)


def _sources(layout: StepInput, drafts: StepDrafts) -> Int64s | None:
    """[N] per packed row, where its token lies in the statics; -1 where the layout has it."""
    if drafts.rows is None:
        return None
    sources = np.full(len(layout.input_ids), -1, np.int64)
    sources[layout.verify_rows[layout.offsets > 0]] = drafts.rows
    return sources


def _with_drafts(layout: StepInput, draft_ids: Int64s) -> StepInput:
    """The layout with the drafts that were on the device only."""
    input_ids = layout.input_ids.copy()
    input_ids[layout.verify_rows[layout.offsets > 0]] = draft_ids[draft_ids >= 0]
    return dataclasses.replace(layout, drafts=draft_ids, input_ids=input_ids)
