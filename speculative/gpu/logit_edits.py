"""What requests do to the logits of a captured step: masks, biases and bans, penalties.

As `sampling.logits_processors.adjust`, from lists of a few sizes that the host sends. It counts the tokens that were
emitted before the step; what the step's drafts add to that is counted on the device, which may be the only one to know
them.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.gpu.attention_choice import why_no_triton
from speculative.gpu.buckets import Bucket
from speculative.gpu.row_judge import RowFields
from speculative.gpu.staged_inputs import Array, Field, StagedInputs
from speculative.request import SamplingParams
from speculative.state.batch import Entry, RowContext, StepInput, row_contexts
from speculative.state.logit_constraints import Float32s, Int64s
from speculative.state.token_constraint import Bools

MAX_CELLS = 1 << 18
"""Cells that one captured step can bias or ban, and tokens it can penalise; beyond, it runs eagerly."""

_LEAST_CELLS, _LEAST_MASKS = 1 << 10, 1 << 2


class EditSizes(NamedTuple):
    """What a capture has room for: masks, and cells of either list; 0 = none."""

    num_masks: int
    num_cells: int


class EditFields(NamedTuple):
    """A step's edits, all on the device.

    mask_of_row: [R] int32, -1 = none. masks: [M, ceil(V / 32)] int32, bit t % 32 of word t // 32 says whether token t
        may come.
    biased_rows, biased_tokens: [C] int32, each cell once; padding is of a row that no step has. biases: [C] float32,
        -inf where a token may not come.
    starts: [E + 1] int32, where each entry's penalised tokens lie. penalised: [C] int32, each token once an entry.
    counts: [C] int32, how often it was emitted before the step. in_prompt: [C] bool.
    repetition, frequency, presence: [E] float64, each entry's penalties.
    """

    mask_of_row: Tensor
    masks: Tensor
    biased_rows: Tensor
    biased_tokens: Tensor
    biases: Tensor
    starts: Tensor
    penalised: Tensor
    counts: Tensor
    in_prompt: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


EditLogits = Callable[[Tensor, RowFields, EditFields, int], Tensor]
"""Logits [R, V], their rows, the edits, and the most drafts of an entry -> [R, V] float32; the given ones stay."""


class LogitEdits:
    """The edits of captured steps: their inputs, by size, and what applies them.

    Args:
        largest: rows and sequences of the largest step.
        vocab_size: of the target.
        device: of the steps.
    """

    def __init__(self, largest: Bucket, vocab_size: int, device: torch.device) -> None:
        self._largest, self._vocab_size, self._device = largest, vocab_size, device
        self._edit = make_edit(device)
        self._inputs: dict[EditSizes, StagedInputs] = {}

    def prepare(self, sizes: EditSizes) -> None:
        """Make room for edits of that size, before anything that applies them is captured."""
        if sizes not in self._inputs:
            self._inputs[sizes] = StagedInputs(self._fields(sizes), self._device)

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
        return self._edit(logits, rows, fields, self._largest.num_queries - 1)

    def _fields(self, sizes: EditSizes) -> dict[str, Field]:
        rows, entries, cells = (self._largest.num_rows,), (self._largest.num_seqs,), (sizes.num_cells,)
        return {
            "mask_of_row": Field(rows, torch.int32, -1),
            "masks": Field((sizes.num_masks, -(-self._vocab_size // 32)), torch.int32),
            "biased_rows": Field(cells, torch.int32, self._largest.num_rows),
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


def make_edit(device: torch.device) -> EditLogits:
    """The Triton kernels on a CUDA device where they can be compiled, else plain torch."""
    if device.type == "cuda" and not why_no_triton():
        from speculative.gpu.triton_edits import triton_edit

        return triton_edit
    return torch_edit


# -- on the host ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepEdits:
    """What a step's requests do to its rows, as the host knows it.

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
        cls, layout: StepInput, masks: Sequences[list[Bools] | None], eos_token_ids: Sequences[int], vocab_size: int
    ) -> "StepEdits | None":
        """The edits of a step; None where no request has any.

        Args:
            layout: the step's rows, with those drafts that rules read.
            masks: per drawing entry, what its structure allows, row by row; None where it has none.
            eos_token_ids: tokens that end an answer.
            vocab_size: of the target.
        """
        if all(mask is None for mask in masks) and all(entry.sequence.rules is None for entry in layout.drawing):
            return None
        contexts = row_contexts(layout, masks)
        given = [_mask_of(context, vocab_size) for context in contexts]
        is_masked = np.array([mask is not None for mask in given])
        biased = [
            (row, *each.rules.biased(each.output, each.drafts, eos_token_ids))
            for row, each in enumerate(contexts)
            if each.rules is not None
        ]
        return cls(
            masks=[mask for mask in given if mask is not None],
            mask_of_row=np.where(is_masked, np.cumsum(is_masked) - 1, -1),
            biased=[one for one in biased if one[1].size],
            counted=[_counted(entry) for entry in layout.drawing],
            params=[entry.sequence.params for entry in layout.drawing],
        )

    @property
    def sizes(self) -> EditSizes:
        """The smallest that hold it: powers of four."""
        num_biased = sum(len(tokens) for _, tokens, _ in self.biased)
        num_counted = sum(len(counted[0]) for counted in self.counted if counted is not None)
        return EditSizes(
            _power_of_four(len(self.masks), _LEAST_MASKS), _power_of_four(max(num_biased, num_counted), _LEAST_CELLS)
        )

    def fill(self, host: Mapping[str, Array]) -> None:
        """Write it into padding."""
        if self.masks:
            packed = np.packbits(np.stack(self.masks), axis=1, bitorder="little")
            host["masks"].view(np.uint8)[: len(packed), : packed.shape[1]] = packed
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


def fits(entries: Sequences[Entry], num_eos: int) -> bool:
    """Whether what the entries' requests do to logits fits into a captured step, whatever is drafted."""
    ruled = [(entry, entry.sequence.rules) for entry in entries if entry.sequence.rules is not None]
    num_biased = sum((entry.max_drafts + 1) * (rules.most_biased + num_eos) for entry, rules in ruled)
    counted = (_counted(entry) for entry, _ in ruled)
    return max(num_biased, sum(len(own[0]) for own in counted if own is not None)) <= MAX_CELLS


def _mask_of(context: RowContext, vocab_size: int) -> Bools | None:
    if context.rules is None or context.rules.allowed is None:
        return context.allowed
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[context.rules.allowed] = True
    return allowed if context.allowed is None else allowed & context.allowed


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


def _power_of_four(count: int, least: int) -> int:
    """The smallest that holds so many, 0 for none."""
    size = least
    while size < count:
        size *= 4
    return size if count else 0


# -- by torch's operators -------------------------------------------------------------------------------------------


def torch_edit(logits: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> Tensor:
    """`EditLogits` by torch's operators."""
    num_rows, vocab_size = logits.shape
    edited = logits.new_zeros((num_rows + 1, vocab_size), dtype=torch.float32)  # the last one takes what is padding
    edited[:num_rows].copy_(logits)
    if len(edits.masks):
        edited[:num_rows].masked_fill_(_forbidden(edits, vocab_size), -torch.inf)
    if len(edits.biases):
        cells = edits.biased_rows.long().clamp(max=num_rows), edits.biased_tokens.long()
        edited.index_put_(cells, edited[cells] + edits.biases)
        _penalise(edited, rows, edits, max_drafts)
    return edited[:num_rows]


def _forbidden(edits: EditFields, vocab_size: int) -> Tensor:
    """[R, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=edits.masks.device)
    allowed = ((edits.masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] > 0  # [M, V]
    which = edits.mask_of_row.long()
    return ~allowed[which.clamp(min=0)] & (which >= 0)[:, None]


def _penalise(edited: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> None:
    """Penalise, row by row, the tokens that were counted before the step, and the drafts that are none of them."""
    num_entries, nobody = len(rows.counts), len(edited) - 1
    numbers = torch.arange(max_drafts + 1, device=edited.device)
    places = (rows.first_rows[:, None] + numbers[:-1]).clamp(max=nobody - 1)
    is_draft = numbers[:-1] < rows.counts[:, None]
    drafts = torch.where(is_draft, rows.drafts[places], -1)  # [E, K]

    cells = torch.arange(len(edits.penalised), device=edited.device)
    owners = torch.searchsorted(edits.starts[1:].contiguous(), cells, right=True)  # E = padding
    is_cell, owners = owners < num_entries, owners.clamp(max=num_entries - 1)
    same = (drafts[owners] == edits.penalised[:, None]) & is_cell[:, None]  # [C, K]
    known = torch.zeros_like(drafts).index_add_(0, owners, same.long()) > 0
    equal = drafts[:, :, None] == drafts[:, None, :]  # [E, K, K]
    is_new = is_draft & ~known & ~equal.tril(-1).any(dim=-1)

    entries = torch.arange(num_entries, device=edited.device).repeat_interleave(max_drafts, output_size=drafts.numel())
    owners = torch.cat([owners, entries])
    tokens = torch.cat([edits.penalised.long(), drafts.flatten().clamp(min=0)])
    counts = torch.cat([edits.counts.long(), torch.zeros_like(entries)])
    in_prompt = torch.cat([edits.in_prompt, torch.zeros_like(entries, dtype=torch.bool)])
    live = torch.cat([is_cell, is_new.flatten()])
    drafted = torch.cat([same, equal.flatten(0, 1)])  # [C + E * K, K]
    emitted = counts[:, None] + functional.pad(drafted.long().cumsum(dim=-1), (1, 0))  # before each row

    row = torch.where(
        live[:, None] & (numbers <= rows.counts[owners, None]), rows.first_rows[owners, None] + numbers, nobody
    )
    where = row, tokens[:, None].expand_as(row)
    of_entry = edits.repetition[owners, None], edits.frequency[owners, None], edits.presence[owners, None]
    repetition, frequency, presence = of_entry
    said = emitted > 0
    factor = torch.where(in_prompt[:, None] | said, repetition, 1.0).float()
    loss = (frequency * emitted + presence * said).float()
    values = edited[where]
    edited.index_put_(where, torch.where(values > 0, values / factor, values * factor) - loss)
