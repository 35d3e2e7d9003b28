"""Edits of the logits of a captured step: masks, biases and bans, penalties.

As `sampling.logits_processors.adjust`, from lists of a few sizes that the host sends. It counts the tokens that were
emitted before the step; what the step's drafts add to that is counted on the device, which may be the only one to know
them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.buckets import Bucket
from speculative.gpu.row_edits import EditFields, EditLogits
from speculative.gpu.row_judge import RowFields
from speculative.gpu.staged_inputs import Array, Field, StagedInputs
from speculative.request import SamplingParams
from speculative.state.batch import Entry, StepInput
from speculative.state.logit_constraints import Float32s, Int64s
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools

MAX_CELLS = 1 << 18
"""Cells that one captured step can bias or ban, and tokens it can penalise; beyond, it runs eagerly."""

FOLLOWED = frozenset((
    "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "temperature", "top_k", "top_p", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "structure", "logprobs", "logprob_token_ids", "prompt_logprobs", "speculate", "reproducible",
))  # fmt: skip
"""Parameters that captured steps know of; a request that sends another one runs eagerly."""

_LEAST_MASKS = 1 << 4
_LEAST_CELLS = 1 << 14
_GROWTH = 16  # from one size to the next: few captures matter more than what is sent in vain


class EditSizes(NamedTuple):
    """Room of a capture: masks, and cells of either list."""

    num_masks: int = _LEAST_MASKS
    num_cells: int = _LEAST_CELLS


def usual_sizes(num_rows: int) -> list[EditSizes]:
    """Room for what most requests ask for in steps of so many rows: up to a mask for each of them."""
    masks = [_LEAST_MASKS]
    while masks[-1] < num_rows:
        masks.append(masks[-1] * _GROWTH)
    return [EditSizes(own) for own in masks]


@dataclass(eq=False)
class LogitEdits:
    """The edits of captured steps: their inputs, by size, and what applies them."""

    largest: Bucket  # rows and sequences of the largest step
    vocab_size: int
    device: torch.device
    edit: EditLogits
    _inputs: dict[EditSizes, StagedInputs] = field(default_factory=dict)

    def prepare(self, sizes: EditSizes) -> None:
        """Make room for edits of that size, before anything that applies them is captured."""
        if sizes in self._inputs:
            return
        rows, entries, cells = (self.largest.num_rows,), (self.largest.num_seqs,), (sizes.num_cells,)
        num_masks = min(sizes.num_masks, self.largest.num_rows)
        fields = {
            "mask_of_row": Field(rows, torch.int32, -1),
            "masks": Field((num_masks, -(-self.vocab_size // 32)), torch.int32),
            "biased_rows": Field(cells, torch.int32, self.largest.num_rows),
            "biased_tokens": Field(cells, torch.int32),
            "biases": Field(cells, torch.float32),
            "starts": Field((entries[0] + 1,), torch.int32),
            "penalised": Field(cells, torch.int32),
            "counts": Field(cells, torch.int32),
            "in_prompt": Field(cells, torch.bool),
            "repetition": Field(entries, torch.float64, 1.0),
            "frequency": Field(entries, torch.float64),
            "presence": Field(entries, torch.float64),
        }
        self._inputs[sizes] = StagedInputs(fields, self.device)

    def send(self, edits: "StepEdits") -> None:
        """Bring a step's edits to the device."""
        inputs = self._inputs[edits.sizes]
        edits.fill(inputs.next_host())
        inputs.send()

    def apply(self, logits: Tensor, rows: RowFields, sizes: EditSizes) -> Tensor:
        """The captured function: logits [R, V] float32 after what was sent of that size; the given ones stay."""
        given = self._inputs[sizes].on_device
        num_rows, num_entries = len(rows.drafts), len(rows.counts)
        used = {"mask_of_row": num_rows, "starts": num_entries + 1}
        used |= dict.fromkeys(("repetition", "frequency", "presence"), num_entries)
        fields = EditFields(**{name: given[name][: used.get(name)] for name in EditFields._fields})
        return self.edit(logits, rows, fields, self.largest.num_queries - 1)


# -- on the host ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepEdits:
    """Edits of a step's rows by their requests, as the host knows them.

    masks: of V tokens each. mask_of_row: [R]. biased: rows with tokens and what is added to their logits. counted: per
    entry the tokens that it is penalised for, how often they were emitted before the step, and whether they are in the
    prompt; None where it is not. params: per entry.
    """

    masks: list[Bools]
    mask_of_row: Int64s
    biased: list[tuple[int, Int64s, Float32s]]
    counted: list[tuple[Int64s, Int64s, Bools] | None]
    params: list[SamplingParams]

    @classmethod
    def of(
        cls, step_input: StepInput, masks: Sequences[list[Bools] | None], eos_token_ids: Sequences[int], vocab_size: int
    ) -> "StepEdits | None":
        """The edits of a step; None where no request has any.

        Args:
            step_input: the step's rows, with those drafts that rules read.
            masks: per sampled entry, what its structure allows, row by row; None where it has none.
            eos_token_ids: tokens that end an answer.
            vocab_size: of the target.
        """
        entries = step_input.sampled_entries
        if all(mask is None for mask in masks) and all(entry.sequence.rules is None for entry in entries):
            return None
        params = [entry.sequence.params for entry in entries]
        edits = cls([], np.full(len(step_input.drafts), -1), [], [_counted(entry) for entry in entries], params)
        first_row = 0
        for entry, count, mask in zip(entries, step_input.draft_counts.tolist(), masks, strict=True):
            rows, rules, allowed = range(first_row, first_row + count + 1), entry.sequence.rules, mask or []
            if rules is not None and rules.allowed is not None:
                listed = np.zeros(vocab_size, np.bool_)
                listed[rules.allowed] = True
                allowed = [listed] if mask is None else [listed & one for one in mask]
            if allowed:  # row j gets mask j; rows behind a forbidden draft are never reached: they repeat the last one
                numbers = np.minimum(np.arange(len(rows)), len(allowed) - 1)
                edits.mask_of_row[rows.start : rows.stop] = len(edits.masks) + numbers
                edits.masks.extend(allowed)
            if rules is not None:
                output = entry.sequence.tokens[entry.sequence.num_prompt :]
                drafts = step_input.drafts[rows[:-1]].tolist()
                for offset, row in enumerate(rows):
                    edits.biased.append((row, *rules.biased(output, tuple(drafts[:offset]), eos_token_ids)))
            first_row = rows.stop
        return edits

    @property
    def sizes(self) -> EditSizes:
        """The smallest that holds it."""
        num_biased = sum(len(tokens) for _, tokens, _ in self.biased)
        num_counted = sum(len(counted[0]) for counted in self.counted if counted is not None)
        return EditSizes(_size(len(self.masks), _LEAST_MASKS), _size(max(num_biased, num_counted), _LEAST_CELLS))

    def fill(self, host: Mapping[str, Array]) -> None:
        """Write it into padding."""
        for row, mask in zip(host["masks"].view(np.uint8), self.masks, strict=False):
            packed = np.packbits(mask, bitorder="little")
            row[: len(packed)] = packed
        host["mask_of_row"][: len(self.mask_of_row)] = self.mask_of_row
        _write(host, ("biased_tokens", "biases"), [(tokens, values) for _, tokens, values in self.biased])
        rows = np.repeat([row for row, _, _ in self.biased], [len(tokens) for _, tokens, _ in self.biased])
        host["biased_rows"][: len(rows)] = rows
        counted = [own for own in self.counted if own is not None]
        _write(host, ("penalised", "counts", "in_prompt"), counted)
        ends = np.cumsum([0 if own is None else len(own[0]) for own in self.counted])
        host["starts"][1 : len(ends) + 1] = ends
        host["starts"][len(ends) + 1 :] = ends[-1]
        for name in ("repetition", "frequency", "presence"):
            host[name][: len(self.params)] = [getattr(one, f"{name}_penalty") for one in self.params]


def follows(sequence: Sequence) -> bool:
    """Return whether captured steps know what a request does to logits."""
    return FOLLOWED.issuperset(sequence.changed_params)


def fits(entries: Sequences[Entry], num_eos: int) -> bool:
    """Return whether captured steps have room for what the entries' requests do to logits, whatever is drafted."""
    ruled = [(entry, entry.sequence.rules) for entry in entries if entry.sequence.rules is not None]
    if not ruled:
        return True
    num_biased = sum((entry.max_drafts + 1) * (rules.most_biased + num_eos) for entry, rules in ruled)
    counted = (_counted(entry) for entry, _ in ruled)
    return max(num_biased, sum(len(own[0]) for own in counted if own is not None)) <= MAX_CELLS


def _counted(entry: Entry) -> tuple[Int64s, Int64s, Bools] | None:
    sequence = entry.sequence
    if sequence.rules is None or not sequence.rules.penalised:
        return None
    return sequence.rules.counted(sequence.tokens[sequence.num_prompt :])


def _write(host: Mapping[str, Array], names: tuple[str, ...], parts: Sequences[tuple[Array, ...]]) -> None:
    """Pack one array of each part after another."""
    end = 0
    for part in parts:
        begin, end = end, end + len(part[0])
        for name, values in zip(names, part, strict=True):
            host[name][begin:end] = values


def _size(count: int, least: int) -> int:
    """The smallest that holds so many."""
    size = least
    while size < count:
        size *= _GROWTH
    return size
