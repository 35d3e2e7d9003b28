"""Drafting with a model: its rows, its KV cache, and how it keeps up with its target.

A draft model has a KV cache of its own, over the target's block ids: position i of a sequence lies in the same slot of
both. Before it drafts it catches up: it computes the tokens verified since, with true inputs. Rows computed from its
own drafts are then overwritten, or kept where the draft was accepted.

A hidden-state drafter reads the target's features. Its row i belongs to token i and the features of position i - 1, so
it depends on nothing after token i, and a full block can be shared like the target's own. Row 0 does not exist.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from speculative.drafting.base import Drafter, DraftOutput
from speculative.drafting.draft_sampler import DraftSampler
from speculative.errors import HandoffRefused
from speculative.model.attention import PreparePass
from speculative.model.eagle3 import FusedHead
from speculative.model.layers import Attend
from speculative.sampling.draft_probs import Drawn, PointMass, columns_of
from speculative.scheduling.draft_length import ExpectedRates
from speculative.state.batch import AttentionRows, Batch, Entry, Int64s, StepInput
from speculative.state.kv_cache import BlockPool, KVCache, KVShape
from speculative.state.sequence import Sequence

_MAX_BUFFERED = 512  # rows of features kept for a sequence before the drafter catches up on them


class DraftModel(Protocol):
    """A model that drafts."""

    name: str  # what its state in a handoff must have been made with
    kv_shape: KVShape
    capture: tuple[int, ...]  # the target's layers whose inputs it reads; () where it reads none
    num_features: int  # numbers a position
    hidden_size: int  # of what `run` returns
    ids: Tensor | None  # [W] int64, the target's token of each of its logits; None = the target's vocabulary
    held_out_rates: ExpectedRates  # how often its drafts were accepted at the end of its training, where that is known

    @property
    def network(self) -> nn.Module:
        """Return what computes `run`."""

    @property
    def fused(self) -> FusedHead | None:
        """It as our CPU kernels run it, where it is packed for them."""

    def fuse(self, features: Tensor) -> Tensor:
        """Features [N, F] of the target -> [N, hidden] as `run` takes them."""

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N] and hidden [N, hidden] -> [N, hidden], which is also the next step's."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, W], in the type of its LM head's products."""


@dataclass(slots=True)
class FeatureBuffer:
    """Features [N, F] of the last replayed step's rows."""

    rows: Tensor
    version: int = 0  # how often they were overwritten


@dataclass(frozen=True, slots=True)
class CatchUpRows:
    """Rows of verified tokens, positions starts..stops of B sequences.

    token_ids: [N] packed.
    features: [N, F] those that the rows read, or [N] where they lie in the `FeatureBuffer`.
    edges: [N] the block that ends with the token before the row, where its features are to be kept; -1 = nowhere.
    """

    token_ids: Int64s
    starts: Int64s
    stops: Int64s
    sequences: tuple[Sequence, ...]
    features: Tensor | Int64s
    edges: Int64s


class CatchUp(Protocol):
    """Computes such rows where no sequence has more than `most_rows`."""

    most_rows: int
    buffer: FeatureBuffer

    def run(self, rows: CatchUpRows) -> Tensor:
        """The hidden states [B, hidden] of each sequence's last row, until the next call; the buffer may be overwritten
        unless the features lie there."""


class MadeDrafts(NamedTuple):
    """The drafts of a round, entry after entry."""

    tokens: list[list[int]]  # of each entry
    columns: Tensor  # [D] int64, of the drafts among the drafter's logits
    q: Tensor  # [D, W]


MakeDrafts = Callable[[Sequences[Entry], Tensor], MadeDrafts | None]
"""Drafts for entries, given the hidden states [E, hidden] of their last rows; None if it cannot."""


class _Span(NamedTuple):
    """Features of consecutive positions, in consecutive rows of the buffer."""

    first: int  # position
    row: int  # of the first
    num_rows: int
    version: int  # of the buffer


@dataclass(slots=True)
class _State:
    """A drafter's state of one sequence; valid for one stay in the cache (`admission`)."""

    admission: int
    num_computed: int  # rows below it are computed, with true inputs
    features: list[tuple[int, Tensor]] = field(default_factory=list)  # (position, [n, F]); later ones take precedence
    in_buffer: _Span | None = None  # takes precedence over all of them
    num_marked: int = 0  # leading blocks known to be marked
    drafted_after: int = 0  # tokens at the start of the last round, and what was drafted in it
    drafted: list[int] = field(default_factory=list)


class _Job(NamedTuple):
    """Rows start..stop of a sequence that are to be computed."""

    sequence: Sequence
    state: _State
    start: int
    stop: int


class ModelDrafter(Drafter):
    """Drafts with a model, for every sequence of a batch at once.

    Args:
        model: what computes.
        cache: its keys and values; as many slots as the target's.
        pool: the blocks both share; blocks whose drafter rows are also computed are marked.
        sampler: draws its drafts.
        block_size: tokens a block.
        prepare: brings the rows of its passes to the device.
    """

    def __init__(
        self,
        model: DraftModel,
        cache: KVCache,
        pool: BlockPool,
        sampler: DraftSampler,
        block_size: int,
        prepare: PreparePass,
    ) -> None:
        self.model = model
        self.capture = model.capture
        self.state_name = model.name
        self.cache = cache
        self._pool = pool
        self.sampler = sampler
        self._block_size = block_size
        self._device = cache.data.device
        self.catch_up: CatchUp | None = None  # computes a few rows of many sequences, if set
        self.draft_loop: MakeDrafts | None = None  # makes all drafts of a round at once, if set
        self.prepare = prepare
        self._first_row = 1 if model.capture else 0
        self._states: dict[str, _State] = {}
        self._in_buffer: list[_State] = []  # all whose features may lie in the buffer
        num_blocks = cache.data.shape[2] // block_size
        self.edges = cache.data.new_zeros((num_blocks, model.num_features))  # of the last position of marked blocks

    def rename(self, model: DraftModel) -> None:
        """Take the name of a model whose weights were copied over this one's; sequences have new states by then."""
        self.model.name = self.state_name = model.name
        self.model.held_out_rates = model.held_out_rates
        columns_of.cache_clear()  # it knows tensors of ids, and not what they hold

    # -- the drafter's contract ---------------------------------------------------------------------------------

    def propose(self, batch: Batch) -> DraftOutput:
        """Return what sequences repeat; for the others catch up, then draft token after token."""
        drafting, hidden = self.begin_round(batch)
        if not drafting:
            return DraftOutput.pack([entry.repeated for entry in batch.entries], PointMass())
        drafts = self._draft(drafting, hidden)
        self.end_round(drafting, drafts.tokens)
        by_entry = iter(drafts.tokens)
        per_entry = [next(by_entry) if entry.by_drafter else entry.repeated for entry in batch.entries]
        repeated = frozenset(index for index, entry in enumerate(batch.entries) if entry.repeated)
        ids = self.model.ids
        draft_probs = Drawn(drafts.q, ids, None if ids is None else drafts.columns)
        return DraftOutput.pack(per_entry, draft_probs, repeated)

    def begin_round(self, batch: Batch) -> tuple[list[Entry], Tensor]:
        """Catch up: the entries that draft, and the hidden states [E, hidden] their first drafts are drawn from. One
        that repeats a passage is, like a prefill, caught up on only when long."""
        others = [entry.sequence for entry in batch.entries if not entry.by_drafter and _drafts_for(entry.sequence)]
        # They would buffer too many features: long prompts that are being prefilled.
        long = [own for own in others if own.num_computed - self._state(own).num_computed >= _MAX_BUFFERED]
        if long:
            self._empty_buffer()
            self._catch_up([(own, own.num_computed) for own in long])
        drafting = [entry for entry in batch.entries if entry.by_drafter]
        # Each has a row to compute, that of its pending token, whose hidden state gives its first draft.
        hidden = self._catch_up([(entry.sequence, len(entry.sequence.tokens)) for entry in drafting])
        self._empty_buffer()  # before the target's next rows are stored there
        return drafting, hidden

    def end_round(self, entries: Sequences[Entry], drafts: Sequences[list[int]]) -> None:
        """Record what was drafted for entries that are not committed yet."""
        if self.capture:  # it computes every row again: those of its own drafts had no true features
            return
        for entry, draft in zip(entries, drafts, strict=True):
            if not draft:
                continue
            state = self._state(entry.sequence)
            state.drafted_after, state.drafted = len(entry.sequence.tokens), draft

    def observe(self, batch: Batch, step_input: StepInput, features: Tensor) -> None:
        """Record the features [N, F] of a step's rows, before it is known which of them will be kept."""
        if not self.capture:
            return
        for entry, (begin, end) in zip(batch.entries, pairwise(step_input.row_starts.tolist()), strict=True):
            if _drafts_for(entry.sequence):
                state = self._state(entry.sequence)
                state.features.append((entry.sequence.num_computed, features[begin:end]))

    def observe_in_buffer(self, batch: Batch, step_input: StepInput) -> None:
        """Take in features that lie in the buffer, row by row those of the step's packed rows."""
        if self.catch_up is None or not self.capture:
            return
        starts, version = step_input.row_starts, self.catch_up.buffer.version
        counts = (starts[1:] - starts[:-1]).tolist()
        for entry, row, count in zip(batch.entries, starts[:-1].tolist(), counts, strict=True):
            if _drafts_for(entry.sequence):
                state = self._state(entry.sequence)
                state.in_buffer = _Span(entry.sequence.num_computed, row, count, version)
                self._in_buffer.append(state)

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.in_buffer = None

    # -- replays ------------------------------------------------------------------------------------------------

    def logits_again(self, sequence: Sequence, places: Sequences[tuple[int, int]]) -> Tensor | None:
        """Logits [R, V] float32, -inf outside the drafter's vocabulary, that drafts of an answer were sampled from.

        `sequence` replays the answer, so the drafts before each of these are its tokens; None where they were not
        sampled, or a later row was computed already. places: tokens before the round, and drafts before the one."""
        state = self._state(sequence)
        if not self.sampler.sampled or places[0][0] <= state.num_computed:
            return None
        hidden, pending = list[Tensor](), list[int]()
        for start, offset in places:
            pending.append(start)
            if offset > 0:
                hidden.append(self._run_up_to(sequence, state, pending))
                slots, last = sequence.slots(start + offset, self._block_size), hidden[-1][-1:]
                for position in range(start, start + offset):  # drafts; their rows are computed again with true inputs
                    token = np.array(sequence.tokens[position : position + 1], np.int64)
                    last = self._run(token, last, [(position, position + 1)], [slots[: position + 1]])
                hidden[-1][-1:] = last
                pending = []
        if pending:
            hidden.append(self._run_up_to(sequence, state, pending))
        return self.sampler.over_vocabulary(self.model.logits(torch.cat(hidden)).float())

    def _run_up_to(self, sequence: Sequence, state: _State, stops: Sequences[int]) -> Tensor:
        """Compute the rows below the last stop: the hidden states [B, hidden] of the row before each."""
        jobs = [_Job(sequence, state, start, stop) for start, stop in pairwise([state.num_computed, *stops])]
        hidden = self._compute(self._rows(jobs, self._features_of(jobs)))
        state.num_computed = stops[-1]  # features of this step's rows stay: they are not committed yet
        return hidden

    # -- handoff ------------------------------------------------------------------------------------------------

    def cache_of(self, sequence: Sequence) -> KVCache | None:
        """Return its own, for a sequence that drafts."""
        return self.cache if _drafts_for(sequence) else None

    def export_state(self, sequence: Sequence) -> dict[str, Tensor]:
        """Compute the rows of all computed tokens; return the features that the next one needs."""
        if not _drafts_for(sequence):
            return {}
        num_computed = sequence.num_computed
        self._empty_buffer()
        self._catch_up([(sequence, num_computed)])
        if not self.capture:
            return {}
        return {"drafter_features": self._features(self._state(sequence), num_computed - 1, num_computed)}

    def check_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The sections of a handoff needed to continue drafting; none if nothing is drafted. Raises HandoffRefused: a
        section is missing or has another shape."""
        if not _drafts_for(sequence):
            return {}
        num_computed = len(sequence.tokens) - 1
        wanted: dict[str, tuple[int, ...]] = {"drafter_kv": (num_computed, *self.cache.shape.of_position)}
        if self.capture:
            wanted["drafter_features"] = (min(1, num_computed), self.model.num_features)
        found = {name: tuple(section.shape) for name, section in sections.items()}
        if found != wanted:
            raise HandoffRefused("drafter", f"The handoff's drafter sections are {found}; this drafter needs {wanted}.")
        return sections

    def import_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> None:
        """Load the sections of a handoff; the sequence already has its blocks."""
        if not sections:
            return
        num_computed = len(sequence.tokens) - 1
        state = _State(sequence.admission, max(self._first_row, num_computed))
        if self.capture and num_computed > 0:
            features = sections["drafter_features"].to(self._device, non_blocking=True, copy=True)
            state.features.append((num_computed - 1, features))
        self._states[sequence.request.request_id] = state

    # -- catching up --------------------------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> _State:
        """The state of a sequence; reset if it has lost its blocks since."""
        state = self._states.get(sequence.request.request_id)
        if state is None or state.admission != sequence.admission:
            shared = sequence.blocks[: sequence.num_shared // self._block_size]
            marked = next((i for i, block in enumerate(shared) if not self._pool.is_marked(block)), len(shared))
            state = _State(sequence.admission, max(self._first_row, marked * self._block_size))
            if self.capture and marked:
                block = shared[marked - 1]
                state.features.append((marked * self._block_size - 1, self.edges[block : block + 1].clone()))
            self._states[sequence.request.request_id] = state
        return state

    def _catch_up(self, wanted: Sequences[tuple[Sequence, int]]) -> Tensor:
        """Compute the rows below `stop` of each (sequence, stop); the hidden states [B, hidden] of the last ones."""
        jobs = []
        for sequence, stop in wanted:
            state = self._state(sequence)
            if not self.capture and self.catch_up is None:  # a replay has room for all rows that a round leaves
                self._keep_what_was_right(state, sequence)
            if stop > state.num_computed:
                jobs.append(_Job(sequence, state, state.num_computed, stop))
        if not jobs:
            return self.cache.data.new_empty((0, 0))
        most_rows = 0 if self.catch_up is None else self.catch_up.most_rows
        is_long = [stop - start > most_rows for _, _, start, stop in jobs]
        if not any(is_long):
            return self._replay(jobs)
        if all(is_long):
            return self._run_eagerly(jobs)
        parts = [[job for job, own in zip(jobs, is_long, strict=True) if own is which] for which in (False, True)]
        hidden = [iter(run(part).split(1)) for run, part in zip((self._replay, self._run_eagerly), parts, strict=True)]
        return torch.cat([next(hidden[own]) for own in is_long])

    def _replay(self, jobs: Sequences[_Job]) -> Tensor:
        """Catch up by captured steps, if every job has few rows. Features are read in the buffer if all lie there."""
        assert self.catch_up is not None
        places = self._places_in_buffer(jobs)
        if places is None:
            hidden = self.catch_up.run(self._rows(jobs, self._features_of(jobs)))
            self._finish(jobs)
            return hidden
        hidden = self.catch_up.run(self._rows(jobs, places))
        self._finish_in_buffer(jobs)
        return hidden

    def rows_behind(self, sequences: Sequences[Sequence], counts: Int64s) -> CatchUpRows | None:
        """Return what there is to catch up on once a verdict is known that no sequence has yet: so many rows behind the
        tokens of each, of tokens that only the device knows; None where features lie elsewhere than in the buffer."""
        ends = (len(own.tokens) + count for own, count in zip(sequences, counts.tolist(), strict=True))
        jobs = [_Job(own, self._state(own), len(own.tokens), end) for own, end in zip(sequences, ends, strict=True)]
        places = self._places_in_buffer(jobs) if self.capture else np.empty(0, np.int64)
        return None if places is None else self._rows(jobs, places)

    def finish_rows(self, sequences: Sequences[Sequence]) -> None:
        """Note that the rows of these, which have got their tokens, were caught up on."""
        states = [self._state(own) for own in sequences]
        paired = zip(sequences, states, strict=True)
        jobs = [_Job(own, state, state.num_computed, len(own.tokens)) for own, state in paired]
        (self._finish_in_buffer if self.capture else self._finish)(jobs)

    def _ends_of_blocks(self, jobs: Sequences[_Job]) -> list[tuple[int, int]]:
        """Each block that is not marked and ends before one of the jobs' rows, and where that row is packed."""
        found, packed, size = list[tuple[int, int]](), 0, self._block_size
        for sequence, _, start, stop in jobs:
            for row in range(-(-start // size) * size, stop, size):
                block = sequence.blocks[row // size - 1]
                if not self._pool.is_marked(block):
                    found.append((packed + row - start, block))
            packed += stop - start
        return found

    def _finish_in_buffer(self, jobs: Sequences[_Job]) -> None:
        """Note that the jobs are done, whose features lay in the buffer."""
        # Only now: whoever shares a marked block reads the rows and the edge that the run has written.
        for _, block in self._ends_of_blocks(jobs):
            self._pool.mark(block)
        for _, state, _, stop in jobs:
            state.num_computed, state.in_buffer = stop, None
            state.features.clear()

    def _places_in_buffer(self, jobs: Sequences[_Job]) -> Int64s | None:
        """[N] where the features that the jobs' rows read lie in the buffer; None unless all do."""
        if not self.capture or self.catch_up is None:
            return None
        places, version = list[int](), self.catch_up.buffer.version
        for _, state, start, stop in jobs:
            span = state.in_buffer
            if span is None:
                return None
            first, row, num_rows, of_version = span
            if start <= first or stop - 1 > first + num_rows:
                return None
            if of_version != version:
                _check_version(span, version)
            places += range(row + start - 1 - first, row + stop - 1 - first)
        return np.array(places, np.int64)

    def _run_eagerly(self, jobs: Sequences[_Job]) -> Tensor:
        """Catch up by one eager forward pass over the packed rows of all jobs."""
        hidden = self._compute(self._rows(jobs, self._features_of(jobs)))
        self._finish(jobs)
        return hidden

    def _rows(self, jobs: Sequences[_Job], features: Tensor | Int64s) -> CatchUpRows:
        sequences, _, starts, stops = zip(*jobs, strict=True)
        spans = zip(sequences, starts, stops, strict=True)
        tokens = [[*own.tokens[start:stop], *[0] * (stop - len(own.tokens))] for own, start, stop in spans]
        token_ids = np.array(list(chain.from_iterable(tokens)), np.int64)
        edges = np.full(len(token_ids), -1, np.int64)
        if not isinstance(features, Tensor) and self.capture:
            for row, block in self._ends_of_blocks(jobs):
                edges[row] = block
        return CatchUpRows(
            token_ids=token_ids,
            starts=np.array(starts, np.int64),
            stops=np.array(stops, np.int64),
            sequences=sequences,
            features=features,
            edges=edges,
        )

    def _features_of(self, jobs: Sequences[_Job]) -> Tensor:
        """[N, F] what the jobs' rows read."""
        self._empty_buffer()  # a job may read features of several steps, of which the buffer has but the last
        if not self.capture:
            return self.cache.data.new_empty((sum(job.stop - job.start for job in jobs), 0))
        parts = [self._features(state, start - 1, stop - 1) for _, state, start, stop in jobs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, jobs: Sequences[_Job]) -> None:
        """Note that the jobs are done, mark full blocks, and keep only the features that later rows need."""
        for sequence, state, _, stop in jobs:
            state.num_computed = stop
            # Mark the full blocks whose rows are now all computed, and keep what the row after each of them needs.
            for index in range(state.num_marked, min(state.num_computed, sequence.num_computed) // self._block_size):
                block = sequence.blocks[index]
                if self._pool.is_marked(block):
                    state.num_marked += index == state.num_marked
                    continue
                edge = (index + 1) * self._block_size - 1
                if self.capture:
                    held = [(f, x) for f, x in state.features if f <= edge < f + len(x)]
                    if not held:
                        continue
                    first, features = held[-1]
                    self.edges[block].copy_(features[edge - first])
                self._pool.mark(block)
            # Those from `end` on will be computed again. Copies: a view would keep the features of its whole step, of
            # all sequences, in memory.
            begin, end = max(stop - 1, 0), sequence.num_computed
            state.features = [
                (max(first, begin), features[max(begin - first, 0) : end - first].clone())
                for first, features in state.features
                if min(first + len(features), end) > max(first, begin)
            ]

    def _empty_buffer(self) -> None:
        """Copy the features that are still needed out of the buffer: it is about to be overwritten."""
        left = [(state, state.in_buffer) for state in self._in_buffer if state.in_buffer is not None]
        self._in_buffer = []
        if not left or self.catch_up is None:
            return
        buffer = self.catch_up.buffer
        for _, span in left:
            _check_version(span, buffer.version)
        copied = torch.cat([buffer.rows[span.row : span.row + span.num_rows] for _, span in left])
        for (state, span), features in zip(left, copied.split([span.num_rows for _, span in left]), strict=True):
            state.features.append((span.first, features))
            state.in_buffer = None

    def _compute(self, rows: CatchUpRows) -> Tensor:
        """Implement `CatchUp.run`, eagerly."""
        assert isinstance(rows.features, Tensor)
        features = rows.features
        spans = list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True))
        slots = [own.slots(stop, self._block_size) for own, (_, stop) in zip(rows.sequences, spans, strict=True)]
        inputs = self.model.fuse(features) if self.capture else features
        return self._run(rows.token_ids, inputs, spans, slots)

    def _keep_what_was_right(self, state: _State, sequence: Sequence) -> None:
        """Keep the rows of accepted drafts, except the last: for a drafter that reads no features.

        The last token of a round is never among them, whatever it is: its row must be recomputed.
        """
        if state.num_computed != state.drafted_after:
            return
        accepted = sequence.tokens[state.drafted_after : -1]
        for token, draft in zip(accepted, state.drafted[:-1], strict=False):
            if token != draft:
                break
            state.num_computed += 1

    def _features(self, state: _State, start: int, stop: int) -> Tensor:
        """Features [stop - start, F] of positions start..stop (none below 0), each as computed last."""
        begin, rows = max(start, 0), list[Tensor]()
        position = end = max((first + len(features) for first, features in state.features[-1:]), default=begin)
        for first, features in reversed(state.features):
            low = max(first, begin)
            if low < position:
                rows.insert(0, features[low - first : position - first])
                position = low
        if position > begin or end < stop:
            raise RuntimeError(f"Features of positions {begin} to {stop} are missing: {position} to {end} are there.")
        if len(rows) == 1:
            merged = rows[0]
        else:
            merged = torch.cat(rows) if rows else self.cache.data.new_empty((0, self.model.num_features))
        state.features = [(begin, merged)] if len(merged) else []
        return merged[: stop - begin]

    # -- drafting -----------------------------------------------------------------------------------------------

    def _draft(self, entries: Sequences[Entry], hidden: Tensor) -> MadeDrafts:
        made = None if self.draft_loop is None else self.draft_loop(entries, hidden)
        if made is not None:
            return made
        drafts: list[list[int]] = [[] for _ in entries]
        drawn_of: list[list[tuple[Tensor, Tensor]]] = [[] for _ in entries]
        active = list(range(len(entries)))
        most = max(entry.max_drafts for entry in entries)
        sequences = [entry.sequence for entry in entries]
        draft_round = self.sampler.start_round(sequences, most, self._device)
        slots = [
            seq.slots(len(seq.tokens) + entry.max_drafts - 1, self._block_size)
            for seq, entry in zip(sequences, entries, strict=True)
        ]
        for offset in range(most):
            logits = self.model.logits(hidden)
            columns, probs = self.sampler.draw(logits, draft_round, offset)
            tokens = columns if self.model.ids is None else self.model.ids[columns]
            for row, (index, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                drafts[index].append(token)
                drawn_of[index].append((columns[row], probs[row]))
            going_on = [row for row, index in enumerate(active) if entries[index].max_drafts > offset + 1]
            if not going_on:
                break
            if len(going_on) < len(active):
                active = [active[row] for row in going_on]
                sequences, slots = [sequences[row] for row in going_on], [slots[row] for row in going_on]
                # Random numbers follow from seed, round and offset, so those that go on keep theirs.
                draft_round = self.sampler.start_round(sequences, most, self._device)
                tokens, hidden = tokens[going_on], hidden[going_on]
            spans = [(len(seq.tokens) + offset, len(seq.tokens) + offset + 1) for seq in sequences]
            hidden = self._run(tokens, hidden, spans, [own[:stop] for own, (_, stop) in zip(slots, spans, strict=True)])
        own_columns, own_probs = zip(*chain.from_iterable(drawn_of), strict=True)
        return MadeDrafts(drafts, torch.stack(own_columns), torch.stack(own_probs))

    def _run(
        self, tokens: Tensor | Int64s, hidden: Tensor, spans: Sequences[tuple[int, int]], slots: Sequences[Int64s]
    ) -> Tensor:
        """Run positions start..stop of B sequences, packed; `slots` are those of each one's first `stop`.

        Returns:
            The hidden states [B, hidden] of each one's last position.
        """
        first = self._first_row
        rows = AttentionRows(
            slots=np.concatenate([own[start:] for own, (start, _) in zip(slots, spans, strict=True)]),
            row_starts=np.array([0, *accumulate(stop - start for start, stop in spans)], np.int64),
            context_slots=tuple(own[first:] for own in slots),
        )
        # A hidden-state drafter's row of token i has the position of its features, i - 1; there is no row 0.
        positions = np.concatenate([np.arange(start - first, stop - first) for start, stop in spans])
        on_host = [positions, rows.row_starts[1:] - 1] + ([] if isinstance(tokens, Tensor) else [tokens])
        attend, (sent, lasts, *sent_tokens) = self.prepare(self.cache, rows, *on_host)
        token_ids = tokens if isinstance(tokens, Tensor) else sent_tokens[0]
        hidden = self.model.run(token_ids, hidden, sent, attend)
        return hidden if len(hidden) == len(spans) else hidden[lasts]


def _check_version(span: _Span, version: int) -> None:
    if span.version != version:
        raise RuntimeError(
            f"Features of {span.num_rows} positions from {span.first} on were overwritten before they were read: "
            f"the buffer has version {version}, they had {span.version}."
        )


def _drafts_for(sequence: Sequence) -> bool:
    if sequence.scores_only:
        return any(draw.rule == "recovered" for draw in sequence.request.draws)
    return sequence.params.speculate
