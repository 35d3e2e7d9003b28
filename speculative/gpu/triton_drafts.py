"""`SampleDrafts` as Triton kernels; imported only where Triton is installed.

A drafter's logits are read as verification reads the target's (`triton_vocabulary`), so q and p are one expression of
such numbers, and drafts are drawn by the rule that last tokens are drawn by:

    _reduce_blocks   of verification: the logits once
    _write_blocks    the logits again: q, its mass, and of coupled rows the highest of log q + noise
    _choose_drafts   a few numbers of each row, and the one block of q that the draft lies in
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.gpu import triton_vocabulary as of_verification
from speculative.gpu.row_drafts import DraftBuffers, DraftFields
from speculative.gpu.triton_filters import triton_floors
from speculative.gpu.triton_judge import BLOCK
from speculative.gpu.triton_noise import best_choice
from speculative.gpu.triton_vocabulary import choices_of, facts_of_row, first_above, load_block, of_row, probability

_kernel = triton.jit(do_not_specialize=["num_rows", "first"])  # one binary for all batches, and all drafts of a round


@_kernel
def _write_blocks(  # noqa: PLR0913
    logits,  # [E, W]
    temperature,  # [E] float32
    greedy,  # [E] bool
    maxima,  # [NUM_FACTS, E, NUM_BLOCKS] float32: what `_reduce_blocks` found
    floors,  # [E] float32
    ids,  # [W] int64: the token of each column; None where it is the column
    coupled,  # [E] bool
    seeds,  # [E] int64
    positions,  # [K * E] int64
    q,  # [D, W] float32
    masses,  # [E, NUM_BLOCKS] float64
    choices,  # [2, E, NUM_BLOCKS] float64: the highest log q + noise, and the first column that has it
    stride,
    q_stride,
    num_rows,
    first,  # of the round's K * E drafts, the first that is sampled here
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, column, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    own, floor, is_greedy = tl.load(temperature + row), tl.load(floors + row), tl.load(greedy + row) != 0
    highest, total, _, _, best = facts_of_row(maxima, own, row, num_rows, NUM_BLOCKS, PADDED)
    found = probability(x, column, highest, total, best.to(tl.int64), own, floor, is_greedy)
    mass = tl.where(inside, found, 0.0)
    tl.store(q + (first + row) * q_stride + column, mass, mask=inside)
    tl.store(masses + row * NUM_BLOCKS + block, tl.sum(mass.to(tl.float64), axis=0))
    if tl.load(coupled + row) != 0:
        token = column
        if ids is not None:
            token = tl.load(ids + column, mask=inside, other=0)
        score, place = best_choice(mass, tl.load(seeds + row), tl.load(positions + first + row), token, inside)
        tl.store(choices + row * NUM_BLOCKS + block, score)
        tl.store(choices + (num_rows + row) * NUM_BLOCKS + block, (block * BLOCK + place).to(tl.float64))


@_kernel
def _choose_drafts(  # noqa: PLR0913
    q,
    masses,
    choices,
    ids,
    coupled,
    uniforms,  # [K * E] float64
    tokens,  # [D] int64
    columns,  # [D] int64
    mass_before,  # [D] float64
    q_stride,
    num_rows,
    first,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    place = first + row
    of_blocks = of_row(masses, 0, row, num_rows, NUM_BLOCKS, PADDED)
    threshold = tl.load(uniforms + place) * tl.sum(of_blocks, axis=0)
    block = first_above(tl.cumsum(of_blocks, axis=0), of_blocks, blocks, threshold)
    is_coupled, choice = tl.load(coupled + row) != 0, row * 0
    if is_coupled:
        only = row + tl.zeros([1], tl.int64)
        choice = tl.max(choices_of(choices, only, only >= 0, num_rows, NUM_BLOCKS, PADDED), axis=0)
        block = choice // BLOCK
    before = tl.sum(tl.where(blocks < block, of_blocks, 0.0), axis=0)
    found, column, inside = load_block(q, place, q_stride, block, VOCABULARY, BLOCK)
    mass = tl.where(inside, found, 0.0).to(tl.float64)
    drawn = first_above(tl.cumsum(mass, axis=0), mass, column, threshold - before)
    chosen = tl.where(is_coupled, choice, drawn)
    token = chosen
    if ids is not None:
        token = tl.load(ids + chosen)
    tl.store(tokens + place, token)
    tl.store(columns + place, chosen)
    tl.store(mass_before + place, before + tl.sum(tl.where(column < chosen, mass, 0.0), axis=0))


def triton_drafts(
    logits: Tensor, fields: DraftFields, offset: int, ids: Tensor | None, vocab_size: int, drafts: DraftBuffers
) -> None:
    """Implement `SampleDrafts`: nothing waits for the host, and every grid follows from the shapes."""
    del vocab_size  # the noise of a token needs no other's
    (num_rows, width), num_blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    floors = triton_floors(logits, fields.temperature, fields.log_min_p, fields.top_k, fields.top_p)
    device = logits.device
    maxima = torch.empty((of_verification.NUM_FACTS, num_rows, num_blocks), dtype=torch.float32, device=device)
    masses = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=device)
    choices = torch.empty((2, num_rows, num_blocks), dtype=torch.float64, device=device)
    per_block, place = (num_rows, num_blocks), (num_rows, offset * num_rows)
    sizes = {"VOCABULARY": width, "NUM_BLOCKS": num_blocks, "BLOCK": BLOCK}
    padded = {"PADDED": triton.next_power_of_2(num_blocks)}
    of_verification._reduce_blocks[per_block](
        logits, fields.temperature, floors, maxima, logits.stride(0), num_rows, **sizes
    )
    _write_blocks[per_block](
        *(logits, fields.temperature, fields.greedy, maxima, floors, ids),
        *(fields.coupled, fields.seeds, fields.noise_positions, drafts.probs, masses, choices),
        *(logits.stride(0), drafts.probs.stride(0), *place),
        **sizes,
        **padded,
        num_warps=8,
    )
    _choose_drafts[(num_rows,)](
        *(drafts.probs, masses, choices, ids, fields.coupled, fields.uniforms),
        *(drafts.tokens, drafts.columns, drafts.mass_before, drafts.probs.stride(0), *place),
        **sizes,
        **padded,
    )
