"""A whole decoding step in captured graphs: the drafter's loop, the target, the verdict, and one copy to the host.

Entries that no graph can hold run eagerly, with the same distribution: prompts, and all of a step with more edits of
logits than there is room for. Their forward pass is replayed still (`GraphRunner`)."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress

import numpy as np
import torch

from speculative.config import EngineConfig
from speculative.drafting.base import Drafter, allowed_masks, constrain, split_drafts
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.errors import ConfigError, EngineFault
from speculative.gpu.buckets import Buckets
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Capturer
from speculative.gpu.catch_up_graph import CatchUpPass
from speculative.gpu.draft_graph import DraftLoop
from speculative.gpu.logit_edits import LogitEdits, StepEdits, fits, follows
from speculative.gpu.next_round import NextPass, NextRound
from speculative.gpu.operators import GraphOperators
from speculative.gpu.padding import CacheRoom, PagedCache
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import PromptPass, prompt_sizes
from speculative.gpu.staged_inputs import Array, copy_late
from speculative.gpu.step_requests import LastRequests
from speculative.gpu.target_graph import GraphRunner, TargetPass
from speculative.gpu.verify_graph import JudgedRows, VerifyGraph
from speculative.model.decoder import Decoder
from speculative.model.layers import use_layer_ops
from speculative.sampling.draft_probs import PointMass
from speculative.state.batch import Batch, Entry, Int64s, StepInput, StepOutcome, build_step_input
from speculative.state.kv_cache import KVCache
from speculative.state.token_constraint import Bools
from speculative.step.checked_sampler import CheckedSampler, DeviceChecks
from speculative.step.host_copy import results_per_entry

_log = logging.getLogger("truespec.start")


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of a step, before the host has seen them.

    counts: [B] per entry. token_ids: [sum(counts)], zeros where only the device knows them. rows: [sum(counts)] where
    each lies in the statics; None where the host knows them. masks: by entry, what its structure allows; None where a
    model drafts.
    """

    counts: Int64s
    token_ids: Int64s
    rows: Int64s | None
    masks: dict[int, list[Bools]] | None


class GraphStep:
    """Runs the steps of plain decoding batches, and has the runner of the others.

    Args:
        config: of the engine.
        decoder: the target.
        cache: the target's keys and values, with a block more than the pool owns: the trash block.
        drafter: of the engine; the passes of one that has a model are captured, too.
        sampler: of the engine.
        max_model_len: tokens of the longest sequence.
        operators: of the engine.

    Raises:
        ConfigError: drafts are to be trees.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        cache: KVCache,
        drafter: Drafter,
        sampler: CheckedSampler,
        max_model_len: int,
        operators: GraphOperators,
    ) -> None:
        if config.drafter.tree:
            raise ConfigError("drafter.tree: trees are drafted on a CPU only, without cuda_graphs; remove it.")
        self.buckets = Buckets.of(config.max_num_seqs, config.drafter.max_drafts, config.drafter.num_draft_tokens)
        self.capturer = Capturer(decoder.device)
        self._config = config
        self._drafter = drafter
        self._checked = sampler
        self._requests = LastRequests()
        self._neural = neural = drafter if isinstance(drafter, ModelDrafter) else None
        self._draft_model = None if neural is None else neural.model
        room = CacheRoom(config.block_size, -(-max_model_len // config.block_size), config.num_blocks)
        sizes = AttentionSizes(config.block_size, self.buckets.largest.num_queries, room.max_blocks)
        self.buffers = GraphBuffers.make(decoder, self.buckets, self._draft_model)
        attend = operators.attend(sizes)
        use_layer_ops(decoder, operators.layers)
        paged = PagedCache(cache, room, attend)
        target = TargetPass(decoder, paged, self.buffers, drafter.capture, self.capturer)
        prompts = PromptPass(
            *(decoder, paged, operators.attend_packed, self.buffers, drafter.capture),
            *(prompt_sizes(config.max_batched_tokens), self.capturer),
        )
        prepare = operators.prepare(config.block_size, 0)
        self.runner = GraphRunner(decoder, cache, target, prompts, self.buckets, prepare)
        drafts = config.drafter.max_drafts > 0
        self.next_pass = None if drafts else NextPass(target, config.block_size, max_model_len)
        self._vocab_size = decoder.config.vocab_size
        edits = LogitEdits(self.buckets.largest, self._vocab_size, decoder.device, operators.edit)
        self.judge = VerifyGraph(decoder, self.buffers, self._draft_model, config, self.capturer, edits, operators)
        self._drafts_on_host: Callable[[], Array] | None = None
        self.loop: DraftLoop | None = None
        self._catch_up: CatchUpPass | None = None
        self.next_round: NextRound | None = None
        if neural is not None:
            use_layer_ops(neural.model.network, operators.layers)
            paged = PagedCache(neural.cache, room, attend)
            self._lengths = self.buckets.of_drafts(varying=config.drafter.length == "dynamic")
            self.loop = DraftLoop(
                neural.model, neural.sampler, paged, self.buffers, self._lengths, self.capturer, operators.sample_drafts
            )
            self._catch_up = CatchUpPass(neural.model, paged, neural.edges, self.buffers, self.buckets, self.capturer)
            neural.catch_up, neural.draft_loop = self._catch_up, self.loop.make
            self.next_round = NextRound(neural, self._catch_up, self.loop, config.block_size, max_model_len)
            neural.prepare = operators.prepare(config.block_size, 1 if neural.capture else 0)

    # -- which steps --------------------------------------------------------------------------------------------

    def takes(self, entries: Sequence[Entry]) -> list[bool]:
        """Return which of them can be replayed together; none where their edits of logits are more than there is room
        for."""
        takes, most = [self._takes(entry) for entry in entries], self.buckets.batch_sizes[-1]
        if sum(takes) > most:  # the others are another step's, in the same buffers
            takes = [one and number <= most for one, number in zip(takes, accumulate(takes), strict=True)]
        has_room = fits(list(compress(entries, takes)), len(self._checked.sampler.eos_token_ids))
        return takes if has_room else [False] * len(takes)

    def _takes(self, entry: Entry) -> bool:
        sequence, num_known, max_drafts, samples, repeated = entry
        if not samples or num_known > 1 or sequence.scored_positions or not follows(sequence):
            return False
        if sequence.request.rehearsal:  # its fault is in the eager sampler
            return False
        # A repeated passage's q is a point mass, that of others is not.
        return not (max_drafts and repeated)

    # -- the step -----------------------------------------------------------------------------------------------

    def draft(self, batch: Batch) -> StepDrafts:
        """Draft for every entry; a model's drafts stay on the device.

        Raises:
            EngineFault: a drafter without a model gives another distribution than a point mass.
        """
        if self.next_round is None:
            drafts, allowed = constrain(batch, self._drafter.propose(batch))
            if not isinstance(drafts.draft_probs, PointMass):
                raise EngineFault(
                    f"{type(self._drafter).__name__} has no model, and did not say that it chose its drafts "
                    f"(PointMass): its q is {type(drafts.draft_probs).__name__}, which a captured step cannot take. "
                    "Set cuda_graphs to false."
                )
            return StepDrafts(drafts.counts, drafts.token_ids, None, allowed)
        counts = np.array([entry.max_drafts for entry in batch.entries], np.int64)
        made = self.next_round.draft(batch)
        if made is None:
            return StepDrafts(counts, np.empty(0, np.int64), None, None)
        if self._requests.of(batch.entries).edited and _host_reads_drafts(batch):
            self._drafts_on_host = copy_late(self.buffers.drafts.tokens)
        own = counts[counts > 0]
        entries = np.repeat(np.arange(len(own)), own)
        offsets = np.arange(len(entries)) - np.repeat(np.cumsum(own) - own, own)
        rows = offsets * made.bucket.num_seqs + made.places[entries]
        return StepDrafts(counts, np.zeros(len(entries), np.int64), rows, None)

    def verify(self, batch: Batch, drafts: StepDrafts, beside: Sequence[Entry] = ()) -> StepOutcome:
        """Run the target on the step's rows, verify, and copy the results to the host. Prompts beside them are computed
        in the same pass, where they fit."""
        step_input = build_step_input(batch.entries, drafts.counts, drafts.token_ids, self._config.block_size)
        bucket = self.buckets.fit_rows(len(batch.entries), len(step_input.input_ids))
        assert bucket is not None, "every batch that is taken fits"
        sources = None
        if drafts.rows is not None:
            sources = np.full(len(step_input.input_ids), -1, np.int64)
            sources[step_input.verify_rows[step_input.offsets > 0]] = drafts.rows
        prompts = None
        only_prompts = not any(entry.max_drafts or self._takes(entry) for entry in beside)
        if beside and only_prompts:
            nothing = np.empty(0, np.int64)
            prompts = build_step_input(beside, np.zeros(len(beside), np.int64), nothing, self._config.block_size)
        if beside or self.next_pass is None or not self.next_pass.take(batch.entries, bucket):
            self.runner.run_decoding(bucket, step_input, sources, prompts)
        requests = self._requests.of(batch.entries)
        sampler, self_check = self._checked.sampler, self._checked.self_check
        checked, edits = self_check.due(), None
        masks: list[list[Bools] | None] = [None] * len(batch.entries)
        if requests.edited:
            if drafts.rows is not None and _host_reads_drafts(batch):  # rules read a model's; the target runs meanwhile
                assert self._drafts_on_host is not None
                own = step_input.drafts.copy()
                own[own >= 0] = self._drafts_on_host()[drafts.rows]
                step_input = _with_drafts(step_input, own)
            allowed = drafts.masks
            if allowed is None:
                allowed = allowed_masks(batch, _per_entry(step_input))
            masks = [allowed.get(index) for index in range(len(batch.entries))]
            edits = StepEdits.of(step_input, masks, sampler.eos_token_ids, self._vocab_size)
        rows = JudgedRows(
            step_input,
            requests,
            drafts.rows,
            counted=self_check.counted(batch.entries, checked=checked),
            coupled=sampler.coupled(step_input),
            checked=checked,
            edits=edits,
        )
        read = self.judge.launch(bucket, rows)
        if self._neural is not None:  # while the device works
            self._neural.observe_in_buffer(batch, step_input)
        if self.next_round is not None and drafts.rows is not None and only_prompts:
            self.next_round.begin(batch.entries, np.split(drafts.rows, np.cumsum(drafts.counts)[:-1]))
        elif self.next_pass is not None and not beside:
            self.next_pass.begin(bucket, step_input)
        judged = read()
        known = _with_drafts(step_input, judged.draft_ids)
        results = results_per_entry(known, judged.verdicts, judged.logprobs)
        found = DeviceChecks(judged.broken, rows.counted, judged.terms)
        return self._checked.check(known, judged.verdicts, results, masks, found)

    # -- before the first step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture all that decoding will ask for, so that no request waits for it; it can take minutes."""
        both = (self.runner.target.prepare, self.judge.prepare_usual)
        steps: list[Callable[[], object]] = [partial(one, packed) for packed in self.buckets.packed for one in both]
        stages: dict[str, list[Callable[[], object]]] = {"prompts": [self.runner.prompts.capture_all], "steps": steps}
        if self.loop is not None and self._catch_up is not None:
            catch_up = (partial(self._catch_up.prepare, bucket) for bucket in self.buckets)
            stages["drafts"] = [*catch_up, *(partial(self.loop.prepare, bucket) for bucket in self._lengths)]
        for what, captures in stages.items():
            _log.info("compiling kernels that were not kept, and capturing CUDA graphs: %s", what)
            before, began = self.capturer.num_captured, time.monotonic()
            for capture in captures:
                capture()
            captured, took = self.capturer.num_captured - before, time.monotonic() - began
            _log.info("captured %d CUDA graphs in %.0f s: %s", captured, took, what)


def _host_reads_drafts(batch: Batch) -> bool:
    """Return whether what some request does to its logits depends on drafts, in a way that only the host can find
    out."""
    drafting = [entry.sequence for entry in batch.entries if entry.max_drafts > 0]
    return any(
        sequence.constraint is not None or (sequence.rules is not None and sequence.rules.reads_drafts)
        for sequence in drafting
    )


def _per_entry(step_input: StepInput) -> list[list[int]]:
    """The drafts of each entry."""
    return split_drafts(step_input.drafts[step_input.drafts >= 0], step_input.draft_counts)


def _with_drafts(step_input: StepInput, draft_ids: Int64s) -> StepInput:
    """The step's rows with the drafts that were on the device only."""
    input_ids = step_input.input_ids.copy()
    input_ids[step_input.verify_rows[step_input.offsets > 0]] = draft_ids[draft_ids >= 0]
    return dataclasses.replace(step_input, drafts=draft_ids, input_ids=input_ids)
