"""Edits the logits of a step's rows: the interface, and one by torch's operators."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from speculative.gpu.row_judge import RowFields


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


def torch_edit(logits: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> Tensor:
    """`EditLogits` by torch's operators."""
    num_rows, vocab_size = logits.shape
    edited = logits.new_zeros((num_rows + 1, vocab_size), dtype=torch.float32)  # the last one takes what is padding
    edited[:num_rows].copy_(logits)
    edited[:num_rows].masked_fill_(_forbidden(edits, vocab_size), -torch.inf)
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
