"""`EditLogits` as Triton kernels; imported only where Triton is installed.

Masks first, in the pass that copies the logits; then biases; then penalties, in one program a row: its entry's list is
read once for the tokens that stand in it, and once for each draft before the row, which may be none of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.gpu.row_edits import EditFields
from speculative.gpu.row_judge import RowFields

BLOCK = 2048  # tokens of a program that copies
_CELLS = 256


@triton.jit
def _copy_allowed(  # noqa: PLR0913
    logits, mask_of_row, masks, edited, row_stride, size, num_words, BLOCK: tl.constexpr
):
    """A block of a row, with -inf where its mask has no bit."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    values = tl.load(logits + row * row_stride + token, mask=inside).to(tl.float32)
    which = tl.load(mask_of_row + row).to(tl.int64)
    if which >= 0:
        words = tl.load(masks + which * num_words + token // 32, mask=inside)
        values = tl.where((words >> (token % 32)) & 1 != 0, values, -float("inf"))
    tl.store(edited + row * size + token, values, mask=inside)


@triton.jit(do_not_specialize=("num_rows",))
def _add_biases(  # noqa: PLR0913
    edited, rows, tokens, biases, num_rows, size, num_cells, CELLS: tl.constexpr
):
    """A block of cells; those of rows that the step does not have are padding."""
    cell = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    row = tl.load(rows + cell, mask=cell < num_cells, other=num_rows)
    inside = row < num_rows
    places = edited + row.to(tl.int64) * size + tl.load(tokens + cell, mask=inside, other=0)
    values = tl.load(places, mask=inside) + tl.load(biases + cell, mask=inside)
    tl.store(places, values, mask=inside)


@triton.jit
def _penalise_cells(places, inside, emitted, in_prompt, repetition, frequency, presence):
    """Change some logits of one row, where `inside`."""
    said = (emitted > 0).to(tl.float64)
    factor = tl.where(in_prompt | (emitted > 0), repetition, 1.0).to(tl.float32)
    loss = (frequency * emitted.to(tl.float64) + presence * said).to(tl.float32)
    values = tl.load(places, mask=inside, other=0.0)
    values = tl.where(values > 0, tl.div_rn(values, factor), values * factor) - loss
    tl.store(places, values, mask=inside)


@triton.jit
def _penalise(  # noqa: PLR0913
    edited,
    drafts,
    entries,
    offsets,
    first_rows,
    num_drafts,
    starts,
    penalised,
    counts,
    in_prompts,
    repetitions,
    frequencies,
    presences,
    size,
    CELLS: tl.constexpr,
):
    """One row: the tokens of its entry's list, and the drafts before it that are none of them."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + row)
    repetition, frequency = tl.load(repetitions + entry), tl.load(frequencies + entry)
    presence, seen = tl.load(presences + entry), tl.load(offsets + row)
    is_row = seen <= tl.load(num_drafts + entry)  # padding comes after all drafts
    if is_row & ((repetition != 1) | (frequency != 0) | (presence != 0)):
        own, before = edited + row * size, drafts + tl.load(first_rows + entry)
        begin, end = tl.load(starts + entry).to(tl.int64), tl.load(starts + entry + 1).to(tl.int64)
        for first in range(begin, end, CELLS):
            cell = first + tl.arange(0, CELLS)
            token = tl.load(penalised + cell, mask=cell < end, other=-1)
            emitted = tl.load(counts + cell, mask=cell < end, other=0)
            for draft in range(0, seen):
                emitted += (token == tl.load(before + draft)).to(tl.int32)
            in_prompt = tl.load(in_prompts + cell, mask=cell < end, other=0) != 0
            _penalise_cells(own + token, cell < end, emitted, in_prompt, repetition, frequency, presence)
        for draft in range(0, seen):
            token = tl.load(before + draft)
            emitted, num_known = 0, 0
            for other in range(0, seen):
                emitted += (tl.load(before + other) == token).to(tl.int32)
            for other in range(0, draft):
                num_known += (tl.load(before + other) == token).to(tl.int32)
            for first in range(begin, end, CELLS):
                cell = first + tl.arange(0, CELLS)
                known = tl.load(penalised + cell, mask=cell < end, other=-1) == token
                num_known += tl.sum(known.to(tl.int32), axis=0)
            _penalise_cells(own + token, num_known == 0, emitted, False, repetition, frequency, presence)


def triton_edit(logits: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> Tensor:
    """Implement `EditLogits`; the kernels take any number of drafts."""
    (num_rows, size), num_cells = logits.shape, len(edits.biases)
    edited = torch.empty((num_rows, size), dtype=torch.float32, device=logits.device)
    _copy_allowed[(num_rows, triton.cdiv(size, BLOCK))](
        logits, edits.mask_of_row, edits.masks, edited, logits.stride(0), size, edits.masks.shape[1], BLOCK=BLOCK
    )
    cells = (edits.biased_rows, edits.biased_tokens, edits.biases)
    _add_biases[(triton.cdiv(num_cells, _CELLS),)](edited, *cells, num_rows, size, num_cells, CELLS=_CELLS)
    _penalise[(num_rows,)](
        *(edited, rows.drafts, rows.entries, rows.offsets, rows.first_rows, rows.counts),
        *(edits.starts, edits.penalised, edits.counts, edits.in_prompt),
        *(edits.repetition, edits.frequency, edits.presence, size),
        CELLS=_CELLS,
    )
    return edited
