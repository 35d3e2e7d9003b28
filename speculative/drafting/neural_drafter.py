"""Drafting with a model: its rows, its KV cache, and how it keeps up with its target.

A draft model has a KV cache of its own, over the target's block ids: position i of a sequence lies in the same slot of
both. Before it drafts it catches up: it computes the tokens verified since, with true inputs. Rows computed from its
own drafts are then overwritten, or kept where the draft was accepted.

A hidden-state drafter reads the target's features. Its row i belongs to token i and the features of position i - 1, so
it depends on nothing after token i, and a full block can be shared like the target's own. Row 0 does not exist.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from speculative.cache.kv_cache import BlockPool, KVCache, KVShape
from speculative.drafting.base import DraftOutput
from speculative.drafting.draft_sampler import DraftSampler
from speculative.errors import HandoffRefused
from speculative.model.attention import StepAttention
from speculative.model.cpu.fused import FusedHead
from speculative.model.layers import Attend
from speculative.scheduling.draft_length import DraftLength, ExpectedRates
from speculative.scheduling.early_exit import EarlyExit
from speculative.state.batch import AttentionRows, Batch, Entry, Int64s, StepInput
from speculative.state.sequence import Sequence
from speculative.verification.draft_probs import Dense, PointMass, SubVocabulary

_MAX_BUFFERED = 512  # rows of features kept for a sequence before the drafter catches up on them


class DraftModel(Protocol):
    """A model that drafts.

    name: what its state in a handoff must have been made with.
    capture: the target's layers whose inputs it reads (the LM head counts as the layer after the last); () where it
        reads none. num_features: numbers a position.
    ids: [W] int64, the target's token of each of its logits; None = the target's vocabulary.
    held_out_rates: how often its drafts were accepted at the end of its training, where that is known.
    """

    name: str
    kv_shape: KVShape
    capture: tuple[int, ...]
    num_features: int
    ids: Tensor | None
    held_out_rates: ExpectedRates

    @property
    def network(self) -> nn.Module:
        """What computes `run`."""
        ...

    @property
    def fused(self) -> FusedHead | None:
        """It as our CPU kernels run it, where it is packed for them."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Features [N, F] of the target -> [N, hidden] as `run` takes them."""
        ...

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N] and hidden [N, hidden] -> [N, hidden], which is also the next step's."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, W] float32."""
        ...


@dataclass(frozen=True, slots=True)
class CatchUpRows:
    """Rows of verified tokens, positions starts..stops of B sequences. token_ids: packed."""

    token_ids: Int64s
    starts: Int64s
    stops: Int64s
    sequences: tuple[Sequence, ...]


CatchUp = Callable[[CatchUpRows, Tensor], Tensor | None]
"""Computes such rows, given their features [N, F]: the hidden states [B, hidden] of the last ones, or None if not."""


class MadeDrafts(NamedTuple):
    """The drafts of each entry; their columns [D] int64 among the drafter's logits, and q [D, W], entry after entry.

    probabilities: of each draft in the drafter's own distribution, also where all of q is on it; None where nobody
    asked."""

    tokens: list[list[int]]
    columns: Tensor
    q: Tensor
    probabilities: list[list[float]] | None = None


MakeDrafts = Callable[[Sequences[Entry], Tensor, EarlyExit | None], MadeDrafts | None]
"""Drafts for entries, given the hidden states [E, hidden] of their last rows; None if it cannot.

Drafts whose probabilities are unknown are all made, whatever the rule says.
"""


@dataclass(slots=True)
class _State:
    """A drafter's state of one sequence; valid for one stay in the cache (`admission`)."""

    admission: int
    num_computed: int  # rows below it are computed, with true inputs
    features: list[tuple[int, Tensor]] = field(default_factory=list)  # (position, [n, F]); later ones take precedence
    num_marked: int = 0  # leading blocks known to be marked
    drafted_after: int = 0  # tokens at the start of the last round, and what was drafted in it
    drafted: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts with a model, for every sequence of a batch at once.

    Args:
        model: what computes.
        cache: its keys and values; as many slots as the target's.
        pool: the blocks both share; blocks whose drafter rows are also computed are marked.
        sampler: draws its drafts.
        block_size: tokens a block.
        length: decides where drafts may end early, and learns from what was drafted.
    """

    def __init__(
        self,
        model: DraftModel,
        cache: KVCache,
        pool: BlockPool,
        sampler: DraftSampler,
        block_size: int,
        length: DraftLength | None = None,
    ) -> None:
        self.model = model
        self.capture = model.capture
        self.state_name = model.name
        self.cache = cache
        self._pool = pool
        self.sampler = sampler
        self._block_size = block_size
        self.length = length or DraftLength()
        self._device = cache.data.device
        self.catch_up: CatchUp | None = None  # computes a few rows of many sequences, if set
        self.draft_loop: MakeDrafts | None = None  # makes all drafts of a round at once, if set
        self._first_row = 1 if model.capture else 0
        self._states: dict[str, _State] = {}
        self._edges: dict[int, Tensor] = {}  # features of the last position of a marked block, by block

    # -- the drafter's contract ---------------------------------------------------------------------------------

    def propose(self, batch: Batch) -> DraftOutput:
        """What sequences repeat; for the others catch up, then draft token after token."""
        repeats = [self.length.repeated(entry.sequence)[: entry.max_drafts] for entry in batch.entries]
        repeated = frozenset(index for index, drafts in enumerate(repeats) if drafts)
        own = [replace(one, max_drafts=0) if index in repeated else one for index, one in enumerate(batch.entries)]
        drafting, hidden = self.begin_round(replace(batch, entries=tuple(own)))
        if not drafting:
            return DraftOutput.pack(repeats, PointMass())
        drafts = self._draft(drafting, hidden, self.length.early_exit())
        self.end_round(drafting, drafts.tokens)
        for entry, probabilities in zip(drafting, drafts.probabilities or (), strict=False):
            self.length.drafted(entry.sequence, probabilities)
        by_entry = iter(drafts.tokens)
        per_entry = [next(by_entry) if one.max_drafts > 0 else known for one, known in zip(own, repeats, strict=True)]
        ids = self.model.ids
        draft_probs = Dense(drafts.q) if ids is None else SubVocabulary(drafts.q, ids, drafts.columns)
        return DraftOutput.pack(per_entry, draft_probs, repeated)

    def begin_round(self, batch: Batch) -> tuple[list[Entry], Tensor]:
        """Catch up: the entries that draft, and the hidden states [E, hidden] their first drafts are drawn from."""
        self._flush([entry.sequence for entry in batch.entries])
        drafting = [entry for entry in batch.entries if entry.max_drafts > 0]
        return drafting, self._catch_up([(entry.sequence, len(entry.sequence.tokens)) for entry in drafting])

    def end_round(self, entries: Sequences[Entry], drafts: Sequences[list[int]]) -> None:
        """Record what was drafted for entries that are not committed yet."""
        for entry, draft in zip(entries, drafts, strict=True):
            state = self._state(entry.sequence)
            state.drafted_after, state.drafted = len(entry.sequence.tokens), draft

    def observe(self, batch: Batch, layout: StepInput, features: Tensor) -> None:
        """Record the features [N, F] of a step's rows, before it is known which of them will be kept."""
        if not self.capture:
            return
        for entry, (begin, end) in zip(batch.entries, pairwise(layout.row_starts.tolist()), strict=True):
            if _drafts_for(entry.sequence):
                state = self._state(entry.sequence)
                state.features.append((entry.sequence.num_computed, features[begin:end]))

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        self._states.pop(request_id, None)

    # -- handoff ------------------------------------------------------------------------------------------------

    def export_state(self, sequence: Sequence) -> dict[str, Tensor]:
        """The sections of a handoff: the rows of all computed tokens, and the features the next one needs."""
        if not _drafts_for(sequence):
            return {}
        num_computed = sequence.num_computed
        self._catch_up([(sequence, num_computed)])
        slots = self._slots(sequence, 0, num_computed)
        shape = self.cache.shape
        rows = self.cache.data.new_empty((shape.num_layers, 2, num_computed, shape.num_kv_heads, shape.head_dim))
        self.cache.read_all(slots, rows)
        sections = {"drafter_kv": rows}
        if self.capture:
            features = self._features(self._state(sequence), num_computed - 1, num_computed)
            sections["drafter_features"] = features
        return sections

    def check_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The sections of a handoff needed to continue drafting; none if nothing is drafted.

        Raises:
            HandoffRefused: a section is missing or has another shape.
        """
        if not _drafts_for(sequence):
            return {}
        shape, num_computed = self.cache.shape, len(sequence.tokens) - 1
        wanted: dict[str, tuple[int, ...]] = {
            "drafter_kv": (shape.num_layers, 2, num_computed, shape.num_kv_heads, shape.head_dim)
        }
        if self.capture:
            wanted["drafter_features"] = (min(1, num_computed), self.model.num_features)
        found = {name: tuple(section.shape) for name, section in sections.items()}
        if found != wanted:
            raise HandoffRefused("drafter", f"The handoff's drafter sections are {found}; this drafter needs {wanted}.")
        return sections

    def import_state(self, sequence: Sequence, sections: Mapping[str, Tensor]) -> None:
        """Load the sections of a handoff; the sequence already has its blocks."""
        num_computed = len(sequence.tokens) - 1
        self.cache.write_all(self._slots(sequence, 0, num_computed), sections["drafter_kv"])
        state = _State(sequence.admission, max(self._first_row, num_computed))
        if self.capture and num_computed > 0:
            state.features.append((num_computed - 1, sections["drafter_features"].to(self._device)))
        self._states[sequence.request.request_id] = state

    # -- catching up --------------------------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> _State:
        """The state of a sequence; reset if it has lost its blocks since."""
        state = self._states.get(sequence.request.request_id)
        if state is None or state.admission != sequence.admission:
            state = self._begin(sequence)
            self._states[sequence.request.request_id] = state
        return state

    def _begin(self, sequence: Sequence) -> _State:
        shared = sequence.blocks[: sequence.num_shared // self._block_size]
        marked = next((i for i, block in enumerate(shared) if not self._pool.is_marked(block)), len(shared))
        state = _State(sequence.admission, max(self._first_row, marked * self._block_size))
        if self.capture and marked:
            state.features.append((marked * self._block_size - 1, self._edges[shared[marked - 1]]))
        return state

    def _flush(self, sequences: Sequences[Sequence]) -> None:
        """Catch up on sequences that would otherwise buffer too many features: long prompts being prefilled."""
        long = [
            seq
            for seq in sequences
            if _drafts_for(seq) and seq.num_computed - self._state(seq).num_computed >= _MAX_BUFFERED
        ]
        if long:
            self._catch_up([(seq, seq.num_computed) for seq in long])

    def _catch_up(self, wanted: Sequences[tuple[Sequence, int]]) -> Tensor:
        """Compute the rows below `stop` of each (sequence, stop); the hidden states [B, hidden] of the last ones."""
        jobs = []
        for sequence, stop in wanted:
            state = self._state(sequence)
            self._keep_what_was_right(state, sequence)
            if stop > state.num_computed:
                jobs.append((sequence, state, state.num_computed, stop))
        if not jobs:
            return self.cache.data.new_empty((0, 0))
        rows = CatchUpRows(
            token_ids=np.array([token for seq, _, start, stop in jobs for token in seq.tokens[start:stop]], np.int64),
            starts=np.array([start for _, _, start, _ in jobs], np.int64),
            stops=np.array([stop for _, _, _, stop in jobs], np.int64),
            sequences=tuple(sequence for sequence, _, _, _ in jobs),
        )
        if self.capture:
            parts = [self._features(state, start - 1, stop - 1) for _, state, start, stop in jobs]
            features = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            features = self.cache.data.new_empty((len(rows.token_ids), 0))
        replayed = None if self.catch_up is None else self.catch_up(rows, features)
        hidden = self._compute(rows, features) if replayed is None else replayed
        for sequence, state, _, upto in jobs:
            state.num_computed = upto
            self._mark(sequence, state)
            self._trim(state)
        return hidden

    def _compute(self, rows: CatchUpRows, features: Tensor) -> Tensor:
        """As `CatchUp`, eagerly."""
        spans = list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True))
        slots = [own.slots(stop, self._block_size) for own, (_, stop) in zip(rows.sequences, spans, strict=True)]
        inputs = self.model.fuse(features) if self.capture else features
        hidden = self._run(torch.from_numpy(rows.token_ids).to(self._device), inputs, spans, slots)
        if len(spans) == 1:
            return hidden[-1:]
        lasts = np.cumsum(rows.stops - rows.starts) - 1
        return hidden[torch.from_numpy(lasts).to(self._device)]

    def _keep_what_was_right(self, state: _State, sequence: Sequence) -> None:
        """Keep the rows of accepted drafts, except the last, for a drafter that reads no features.

        The last token of a round is never among them, whatever it is: its row must be recomputed.
        """
        if self.capture or state.num_computed != state.drafted_after:
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
        merged = torch.cat(rows) if rows else self.cache.data.new_empty((0, self.model.num_features))
        state.features = [(begin, merged)] if len(merged) else []
        return merged[: stop - begin]

    def _trim(self, state: _State) -> None:
        """Drop features that no later row needs."""
        begin = max(state.num_computed - 1, 0)
        state.features = [
            (max(first, begin), features[max(begin - first, 0) :].clone())
            for first, features in state.features
            if first + len(features) > begin
        ]

    def _mark(self, sequence: Sequence, state: _State) -> None:
        """Mark the full blocks whose rows are now all computed, and keep what the row after each of them needs."""
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
                self._edges[block] = features[edge - first : edge - first + 1].clone()
            self._pool.mark(block)

    # -- drafting -----------------------------------------------------------------------------------------------

    def _draft(self, entries: Sequences[Entry], hidden: Tensor, rule: EarlyExit | None) -> MadeDrafts:
        made = None if self.draft_loop is None else self.draft_loop(entries, hidden, rule)
        if made is not None:
            return made
        drafts: list[list[int]] = [[] for _ in entries]
        reported: list[list[float]] = [[] for _ in entries]
        survived, goes_on = [1.0] * len(entries), [True] * len(entries)
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
            drawn = self.sampler.draw(logits, draft_round, offset)
            tokens = drawn.columns if self.model.ids is None else self.model.ids[drawn.columns]
            for row, (index, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                drafts[index].append(token)
                drawn_of[index].append((drawn.columns[row], drawn.probs[row]))
            if rule is not None:
                probabilities = self.sampler.probabilities(logits, draft_round, drawn.columns).tolist()
                for index, probability in zip(active, probabilities, strict=True):
                    reported[index].append(probability)
                    greedy = entries[index].sequence.params.greedy
                    survived[index], goes_on[index] = rule.after(survived[index], probability, greedy)
            wanted = [goes_on[index] and entries[index].max_drafts > offset + 1 for index in active]
            going_on = [row for row, one_more in enumerate(wanted) if one_more]
            if not going_on:
                break
            if len(going_on) < len(active):
                active = [active[row] for row in going_on]
                sequences, slots = [sequences[row] for row in going_on], [slots[row] for row in going_on]
                draft_round = self.sampler.start_round(sequences, most, self._device)
                tokens, hidden = tokens[going_on], hidden[going_on]
            spans = [(len(seq.tokens) + offset, len(seq.tokens) + offset + 1) for seq in sequences]
            hidden = self._run(tokens, hidden, spans, [own[:stop] for own, (_, stop) in zip(slots, spans, strict=True)])
        columns, probs = zip(*chain.from_iterable(drawn_of), strict=True)
        return MadeDrafts(drafts, torch.stack(columns), torch.stack(probs), reported if rule is not None else None)

    def _run(
        self, tokens: Tensor, hidden: Tensor, spans: Sequences[tuple[int, int]], slots: Sequences[Int64s]
    ) -> Tensor:
        """Run positions start..stop of some sequences, packed; `slots` are those of each one's first `stop`."""
        first = self._first_row
        rows = AttentionRows(
            slots=np.concatenate([own[start:] for own, (start, _) in zip(slots, spans, strict=True)]),
            row_starts=np.array([0, *accumulate(stop - start for start, stop in spans)], np.int64),
            context_slots=tuple(own[first:] for own in slots),
        )
        positions = [position for start, stop in spans for position in range(start - first, stop - first)]
        attend = StepAttention(self.cache, rows, self._device)
        return self.model.run(tokens, hidden, torch.tensor(positions, device=self._device), attend)

    def _slots(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        return torch.from_numpy(sequence.slots(stop, self._block_size)[start:]).to(self._device)


def _drafts_for(sequence: Sequence) -> bool:
    return sequence.params.speculate and not sequence.scores_only
