"""The coupled verifier's noise in Triton, and the drafts that are chosen with it; imported only where Triton is
installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.sampling.rng import Purpose
from speculative.verification.coupled import NoiseRows

_BLOCK = 2048  # tokens of a program
_NOISE = tl.constexpr(Purpose.NOISE.value)


@triton.jit
def gumbel(seed, position, token):
    """[N] float64, the noise of some tokens at one position, as in `rng.gumbel`: two tokens share a call of Philox."""
    pair = (token >> 1).to(tl.int32)
    zero = pair * 0
    words = tl.philox(seed, pair, zero + position.to(tl.int32), zero + _NOISE, zero)
    is_first = (token & 1) == 0
    high, low = tl.where(is_first, words[0], words[2]), tl.where(is_first, words[1], words[3])
    bits = ((high >> 6).to(tl.int64) << 26) + (low >> 6).to(tl.int64)
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def best_choice(p, seed, position, token, inside):
    """The highest log p + noise of some tokens, and the first place among them that has it; p is float32."""
    score = tl.log(p).to(tl.float64) + gumbel(seed, position, token)
    score = tl.where(inside & (score == score), score, -float("inf"))
    return tl.max(score, axis=0), tl.argmax(score, axis=0)


@triton.jit
def _score_blocks(  # noqa: PLR0913
    probs,  # [E, W] float32
    ids,  # [W] int64: the token of each column; None where it is the column
    coupled,  # [E] bool
    seeds,  # [E] int64
    positions,  # [E] int64
    best,  # [E, NUM_BLOCKS] float64
    places,  # [E, NUM_BLOCKS] int64: the column that has it
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(coupled + row) == 0:
        return
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    p = tl.load(probs + row * stride + column, mask=inside, other=0.0)
    token = column
    if ids is not None:
        token = tl.load(ids + column, mask=inside, other=0)
    highest, place = best_choice(p, tl.load(seeds + row), tl.load(positions + row), token, inside)
    tl.store(best + row * num_blocks + block, highest)
    tl.store(places + row * num_blocks + block, (block * BLOCK + place).to(tl.int64))


@triton.jit
def _choose(
    coupled,
    best,
    places,
    columns,  # [E] int64: those of coupled rows are replaced
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    if tl.load(coupled + row) == 0:
        return
    highest = tl.load(best + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=-float("inf"))
    tl.store(columns + row, tl.load(places + row * NUM_BLOCKS + tl.argmax(highest, axis=0)))


def triton_choose(probs: Tensor, columns: Tensor, rows: NoiseRows, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Implement `VocabularyOps.choose`; `columns` are written to."""
    del vocab_size  # the noise of a token needs no other's
    num_rows, width = probs.shape
    num_blocks = triton.cdiv(width, _BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=probs.device)
    places = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=probs.device)
    _score_blocks[(num_rows, num_blocks)](
        probs, ids, *rows, best, places, probs.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=8
    )
    _choose[(num_rows,)](
        rows.coupled, best, places, columns, NUM_BLOCKS=num_blocks, PADDED=triton.next_power_of_2(num_blocks)
    )
    return columns
