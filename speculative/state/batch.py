"""One step's work: the scheduled batch, the packed input of the model, and the results.

Rows are packed: an entry that computes c known tokens and n drafts has c + n rows. The last 1 + n rows of an entry that
samples a token are its verify rows; row j of them holds the target's distribution after j accepted drafts.
"""

from collections.abc import Sequence as Entries
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np

from speculative.request import ReplayedToken, TokenLogprobs
from speculative.state.logit_constraints import TokenRules
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Entry(NamedTuple):
    """One sequence's share of a step. A tuple, as `SequenceResult` is: a step makes one for each sequence.

    num_known: known tokens computed in this step: the pending one, or a chunk of a prefill.
    max_drafts: how many drafts fit; 0 while prefilling.
    samples: whether the known tokens end with the sequence's last one, so that the next token is sampled.
    repeated: what is drafted in a model's place: how a passage goes on that is being repeated; empty = the model
        drafts.
    """

    sequence: Sequence
    num_known: int
    max_drafts: int
    samples: bool
    repeated: Entries[int] = ()

    @property
    def by_drafter(self) -> bool:
        """Return whether the drafter drafts for it."""
        return self.max_drafts > 0 and not self.repeated


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Slots and contexts of packed rows. int64 on the host."""

    slots: Int64s  # [N] where each row's key and value go
    row_starts: Int64s  # [B + 1] first row of each sequence, and N
    context_slots: tuple[Int64s, ...]  # per sequence, slots of all positions its last row attends to, its own included


@dataclass(frozen=True, slots=True)
class StepInput:
    """The packed rows of a step's tokens, entry by entry. All arrays are int64 on the host."""

    sequences: tuple[Sequence, ...]  # that of each entry
    block_size: int  # tokens of a block of theirs
    row_starts: Int64s  # [B + 1] first row of each entry, and N
    input_ids: Int64s  # [N] the token of each row
    positions: Int64s  # [N] its position in its sequence
    verify_rows: Int64s  # [R] the rows whose logits are needed to sample tokens
    verify_entries: Int64s  # [R] the entry of each verify row, counted over the sampled entries
    offsets: Int64s  # [R] its offset in its round
    drafts: Int64s  # [R] the draft that the row judges; -1 in each entry's last row
    sampled_entries: tuple[Entry, ...]  # the E entries that get a token
    draft_counts: Int64s  # [E] their drafts

    @classmethod
    def of_pending(cls, entries: tuple[Entry, ...], sequences: tuple[Sequence, ...], block_size: int) -> "StepInput":
        """One row an entry, that of its pending token: most steps without a drafter."""
        num_rows = len(entries)
        rows, zeros, begins = np.arange(num_rows), np.zeros(num_rows, np.int64), [own.num_computed for own in sequences]
        return cls(
            sequences=sequences,
            block_size=block_size,
            row_starts=np.arange(num_rows + 1),
            input_ids=np.array([own.tokens[begin] for own, begin in zip(sequences, begins, strict=True)]),
            positions=np.array(begins),
            verify_rows=rows,
            verify_entries=rows,
            offsets=zeros,
            drafts=zeros - 1,
            sampled_entries=entries,
            draft_counts=zeros,
        )

    def attention_rows(self) -> AttentionRows:
        """Slots and contexts of the rows, which follow what is computed of each sequence."""
        begins, counts = [own.num_computed for own in self.sequences], np.diff(self.row_starts).tolist()
        computed = zip(self.sequences, begins, counts, strict=True)
        contexts = tuple(own.slots(begin + count, self.block_size) for own, begin, count in computed)
        slots = np.concatenate([own[begin:] for own, begin in zip(contexts, begins, strict=True)])
        return AttentionRows(slots, self.row_starts, contexts)

    def of_sequences(self, chosen: Bools) -> "StepInput":
        """The rows of some sequences, as far as a forward pass reads them; chosen: [B]."""
        counts = np.diff(self.row_starts)
        rows = np.repeat(chosen, counts)
        return replace(
            self,
            sequences=tuple(compress(self.sequences, chosen)),
            row_starts=np.concatenate([[0], np.cumsum(counts[chosen])]),
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
        )

    def select(self, chosen: Bools) -> "StepInput":
        """The same rows, with the verify rows of only some sampled entries; chosen: [E]."""
        rows = chosen[self.verify_entries]
        return replace(
            self,
            verify_rows=self.verify_rows[rows],
            verify_entries=(np.cumsum(chosen) - 1)[self.verify_entries[rows]],
            offsets=self.offsets[rows],
            drafts=self.drafts[rows],
            sampled_entries=tuple(compress(self.sampled_entries, chosen)),
            draft_counts=self.draft_counts[chosen],
        )


def build_step_input(entries: Entries[Entry], counts: Int64s, draft_ids: Int64s, block_size: int) -> StepInput:
    """Pack a step's tokens: `counts[i]` drafts follow the known tokens of entry i; `draft_ids` holds all of them."""
    sequences, all_known, _, all_sample, _ = zip(*entries, strict=True)
    if all(all_sample) and max(all_known) == 1 and not counts.any() and not len(draft_ids):
        return StepInput.of_pending(tuple(entries), sequences, block_size)
    computed = [sequence.num_computed for sequence in sequences]
    begins, known, samples = np.array(computed), np.array(all_known), np.array(all_sample)
    lengths = known + counts
    row_starts = np.zeros(len(entries) + 1, np.int64)
    np.cumsum(lengths, out=row_starts[1:])
    owners = np.repeat(np.arange(len(entries)), lengths)  # [N]
    rows = np.arange(len(owners))
    offsets = rows - (row_starts[:-1] + known - 1)[owners]  # [N] from the last known token on
    input_ids = np.empty(len(rows), np.int64)
    is_draft = offsets > 0
    input_ids[is_draft] = draft_ids
    known_ids = [own.tokens[n : n + num] for own, n, num in zip(sequences, computed, all_known, strict=True)]
    input_ids[~is_draft] = list(chain.from_iterable(known_ids))
    verify_rows = np.flatnonzero((offsets >= 0) & samples[owners])
    verify_entries, draft_counts = (samples.cumsum() - 1)[owners[verify_rows]], counts[samples]
    verify_offsets = offsets[verify_rows]
    judged = np.full(len(verify_rows), -1, np.int64)
    judged[verify_offsets < draft_counts[verify_entries]] = draft_ids
    return StepInput(
        sequences=sequences,
        block_size=block_size,
        row_starts=row_starts,
        input_ids=input_ids,
        positions=rows + (begins - row_starts[:-1])[owners],
        verify_rows=verify_rows,
        verify_entries=verify_entries,
        offsets=verify_offsets,
        drafts=judged,
        sampled_entries=tuple(compress(entries, all_sample)),
        draft_counts=draft_counts,
    )


@dataclass(frozen=True, slots=True)
class RowContext:
    """The facts, beside the model, that decide which tokens one verify row may emit."""

    rules: TokenRules | None  # of its request; None where it has none
    output: Entries[int]  # tokens emitted before the round
    drafts: tuple[int, ...]  # those of the round before the row
    allowed: Bools | None = None  # [V] the tokens its structure allows; None where it has none


def row_contexts(step_input: StepInput, masks: Entries[list[Bools] | None]) -> list[RowContext]:
    """One context per verify row, in order.

    masks: per sampled entry, what its structure allows, row by row. Rows behind a forbidden draft are never reached;
        they repeat the last mask.
    """
    contexts, first_row = list[RowContext](), 0
    for entry, count, mask in zip(step_input.sampled_entries, step_input.draft_counts.tolist(), masks, strict=True):
        output = entry.sequence.tokens[entry.sequence.num_prompt :]
        drafts = tuple(step_input.drafts[first_row : first_row + count].tolist())
        for offset in range(count + 1):
            allowed = None if mask is None else mask[min(offset, len(mask) - 1)]
            contexts.append(RowContext(entry.sequence.rules, output, drafts[:offset], allowed))
        first_row += count + 1
    return contexts


class SequenceResult(NamedTuple):
    """The result of a step for one sequence, on the host.

    token_ids: the accepted drafts and the token drawn after them; none while a prefill goes on.
    num_drafted: drafts of this round.
    num_accepted: those that survived.
    drafts: those accepted, and the first that was not.
    draft_probs: q of each of them; None where they are deterministic.
    last_prob: q of the token that replaced a sampled draft.
    logprobs: one per token, when asked for.
    fault: which of `INVARIANTS` is broken, so that nothing may be emitted; then the rest is meaningless.
    prompt_logprobs: of the known tokens, for a request for its prompt's logprobs or a scoring one.
    replayed: the places of a scoring request's tokens in its distribution.
    """

    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    drafts: tuple[int, ...] = ()
    draft_probs: tuple[float, ...] | None = None
    last_prob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    fault: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    replayed: tuple[ReplayedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a step's self-checks, summed up: tensors on the device, an array and a number after `to_host`.

    checks: the C self-checks that had any; one of a step in parts may occur once a part.
    sums: [C, S + 4] float64: sums of log(1 + stake Z) for S stakes; then number, positive and negative parts, squares.
    achievable: sum of sum(min(p, q)) over the draft positions that were reached.
    rows: [3, R] float64, whatever counts: the chance that the row's accept uniform succeeds, NaN where it decided
        nothing; and of each round's last token the mass before it, and its own, of the distribution it is drawn from,
        NaN elsewhere and where that is rounding. All NaN for coupled entries; None once it was looked at.
    """

    checks: tuple[str, ...]
    sums: Any
    achievable: Any
    rows: Any = None

    def to_host(self) -> "Terms":
        """Copy to the host."""
        rows = None if self.rows is None else self.rows.cpu().numpy()
        return Terms(self.checks, self.sums.cpu().numpy(), float(self.achievable), rows)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The host copy of what a step decided."""

    results: tuple[SequenceResult, ...]  # one per entry
    expected_accepted: float = 0.0  # sum of the verifier's acceptance probability over the draft positions it reached
    terms: Terms | None = None  # of the self-checks; None where nothing counted
    step_s: float = 0.0  # seconds from the first draft to the last copy


def merge_outcomes(parts: Entries[StepOutcome], places: Entries[int]) -> StepOutcome:
    """Merge the outcomes of a step whose entries were computed in parts.

    places: of each result, part after part, among the step's entries.
    """
    terms = [part.terms for part in parts if part.terms is not None]
    results = dict(zip(places, chain.from_iterable(part.results for part in parts), strict=True))
    return StepOutcome(
        results=tuple(results[place] for place in range(len(results))),
        expected_accepted=sum(part.expected_accepted for part in parts),
        terms=Terms(
            checks=tuple(chain.from_iterable(part.checks for part in terms)),
            sums=np.concatenate([part.sums for part in terms]),
            achievable=sum(part.achievable for part in terms),
        )
        if terms
        else None,
        step_s=sum(part.step_s for part in parts),
    )
