"""The next step, begun behind a verdict that the host has not read: the device works while the host books the last one.

Where a model drafts, the next round's drafts are made; where nothing drafts, the target's next rows are computed. They
are of tokens that verification has chosen, which only the device knows yet. The next step takes what was begun if its
sequences are among those that it was begun for; else it computes the same again, to the same bits.

What is written for nothing harms nobody, as all of it is launched on one stream. A block that its sequence gives back
between two steps may be anybody's then; but whoever gets it writes each position before it reads it, and later. No
state on the host changes before the next step takes what was begun: until then no block is marked, and what is
published is what was booked, never a row of a sequence that has ended.
"""

from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from speculative.drafting.neural_drafter import ModelDrafter
from speculative.gpu.buckets import Bucket, PackedBucket
from speculative.gpu.buffers import Unread
from speculative.gpu.catch_up_graph import CatchUpPass
from speculative.gpu.draft_graph import DraftLoop
from speculative.gpu.staged_inputs import send_once
from speculative.gpu.target_graph import TargetPass
from speculative.state.batch import Batch, Entry, Int64s, StepInput
from speculative.state.sequence import Sequence

STEADY_STEPS = 8
"""Steps of the same sequences, behind which the target's next rows are computed early."""


class RoundDrafts(NamedTuple):
    """Drafts of a step in the statics. places: [E] of each drafting entry among the sequences of the bucket."""

    bucket: Bucket
    places: Int64s


class _Begun(NamedTuple):
    """Work that was begun, and that nobody has taken yet.

    of: by sequence its place, its admission and its advances when that was begun, and how many drafts it has.
    number: how often the buffers with the results had been written.
    """

    of: dict[Sequence, tuple[int, int, int, int]]
    bucket: Bucket | PackedBucket
    number: int

    @classmethod
    def of_entries(cls, entries: Sequences[Entry], bucket: Bucket | PackedBucket, number: int) -> "_Begun":
        """Remember for whom it was begun."""
        about = [(own.admission, own.num_advances, most) for own, _, most, _, _ in entries]
        return cls({own[0]: (place, *about[place]) for place, own in enumerate(entries)}, bucket, number)

    def places(self, entries: Sequences[Entry], bucket: Bucket | PackedBucket, number: int) -> Int64s | None:
        """Where the results for entries lie; None unless all are there, as computing them now would give them."""
        if (bucket, number) != (self.bucket, self.number):  # in another bucket, sums may round otherwise
            return None
        places = list[int]()
        for own, _, max_drafts, _, _ in entries:
            place, admission, num_advances, num_drafts = self.of.get(own, (0, -1, 0, 0))
            if (own.admission, own.num_advances - 1) != (admission, num_advances) or max_drafts > num_drafts:
                return None  # it is new, was computed again, or has got other steps' tokens than this lies behind
            places.append(place)
        return np.array(places, np.int64)


class NextRound:
    """Makes the drafts of each round, the next one's early where it can.

    Args:
        drafter: of the engine.
        catch_up, loop: its captured passes.
        block_size: tokens a block.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(
        self, drafter: ModelDrafter, catch_up: CatchUpPass, loop: DraftLoop, block_size: int, max_model_len: int
    ) -> None:
        self._drafter, self._catch_up, self._loop = drafter, catch_up, loop
        self._block_size, self._max_model_len = block_size, max_model_len
        self._last = frozenset[Sequence]()
        self._begun: _Begun | None = None

    def draft(self, batch: Batch) -> RoundDrafts | None:
        """The drafts of a step, made now unless they were begun; None where no entry drafts."""
        found = self._take([entry for entry in batch.entries if entry.by_drafter])
        drafting, hidden = self._drafter.begin_round(batch)
        if not drafting:
            return None
        if found is None:
            found = RoundDrafts(self._loop.run(drafting, hidden), np.arange(len(drafting)))
        self._catch_up.least_rows = found.bucket.num_queries + 1
        return found

    def begin(self, entries: Sequences[Entry], rows: Sequences[Int64s]) -> None:
        """Draft for the sequences of a step that was launched and that the host has not read, as far as they go on.

        entries: all are verified. rows: where the drafts of each lie in the statics.
        """
        last, self._last = self._last, frozenset(entry.sequence for entry in entries)
        if last.isdisjoint(self._last):
            return  # groups take turns, as canaries and others do
        # One token is sure to come. Near its end, a sequence that gets more wants fewer drafts: the first of these.
        fitting = [own.sequence.num_drafts_that_fit(own.max_drafts + 1, self._max_model_len) - 1 for own in entries]
        going_on = [index for index, fits in enumerate(fitting) if entries[index].by_drafter and fits > 0]
        if not going_on:
            return
        judged = np.array([entries[index].max_drafts for index in going_on], np.int64)
        wanted = [min(fitting[index], entries[index].max_drafts) for index in going_on]
        drafting = [entries[index]._replace(max_drafts=most) for index, most in zip(going_on, wanted, strict=True)]
        sequences = [entry.sequence for entry in drafting]
        behind = self._drafter.rows_behind(sequences, judged + 1)
        if behind is None or not all(map(self._has_blocks, drafting, judged.tolist())):
            return
        unread = Unread(np.array(going_on, np.int64), judged)
        nothing = np.array([-1])  # the token behind all drafts is the verdict's, if it is any
        sources = np.concatenate([part for index in going_on for part in (rows[index], nothing)])
        hidden = self._catch_up.run(behind, unread, sources)
        bucket = self._loop.run(drafting, hidden, unread)
        self._begun = _Begun.of_entries(drafting, bucket, self._loop.num_runs)

    def _has_blocks(self, entry: Entry, judged: int) -> bool:
        """Return whether each position has a block that may be drafted if all of so many drafts survive."""
        most = len(entry.sequence.tokens) + judged + entry.max_drafts
        return most <= min(len(entry.sequence.blocks) * self._block_size, self._max_model_len)

    def _take(self, drafting: Sequences[Entry]) -> RoundDrafts | None:
        """The drafts that were begun, if they are those of these entries."""
        begun, self._begun = self._begun, None
        if begun is None or not drafting:
            return None
        places = begun.places(drafting, self._loop.bucket_of(drafting), self._loop.num_runs)
        if places is None:
            return None
        self._drafter.finish_rows([entry.sequence for entry in drafting])
        return RoundDrafts(self._loop.bucket_of(drafting), places)


class NextPass:
    """Runs the target on the pending tokens of plain decoding, of the next step early where it can.

    Args:
        target: its captured passes.
        block_size: tokens a block.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, target: TargetPass, block_size: int, max_model_len: int) -> None:
        self._target, self._block_size, self._max_model_len = target, block_size, max_model_len
        self._last, self._num_steps = tuple[Sequence, ...](), 0
        self._begun: _Begun | None = None

    def begin(self, bucket: PackedBucket, step_input: StepInput) -> None:
        """Compute the tokens that a step ends with, which was launched and which the host has not read.

        Only where as many steps had the same sequences: a pass for nothing takes longer than what it would save.
        """
        sequences = step_input.sequences
        self._num_steps = self._num_steps + 1 if sequences == self._last else 0
        self._last = sequences
        if self._num_steps < STEADY_STEPS or not all(map(self._goes_on, sequences)):
            return
        behind = replace(step_input, input_ids=np.zeros_like(step_input.input_ids), positions=step_input.positions + 1)
        self._target.run(bucket, behind, self._target.buffers.sources_of(np.arange(len(sequences))))
        self._begun = _Begun.of_entries(step_input.sampled_entries, bucket, self._target.buffers.features.version)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Return whether a sequence goes on behind one more token, unless that ends it, and has a block for it."""
        has_block = len(sequence.tokens) < len(sequence.blocks) * self._block_size
        return has_block and sequence.num_drafts_that_fit(1, self._max_model_len) > 0

    def take(self, entries: Sequences[Entry], bucket: PackedBucket) -> bool:
        """Return whether the rows of a step were computed early; then they lie where the step computes them."""
        begun, self._begun = self._begun, None
        buffers = self._target.buffers
        places = None if begun is None else begun.places(entries, bucket, buffers.features.version)
        if places is None:
            return False
        if (places != np.arange(len(places))).any():  # others have ended: what was computed for them is dropped
            (sent,) = send_once([places], buffers.hidden.device)
            buffers.hidden[: len(places)] = buffers.hidden[sent]
        return True
