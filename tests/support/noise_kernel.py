"""A kernel that stores the noise which others add to logits."""

import triton
import triton.language as tl

from speculative.gpu.triton_noise import gumbel


@triton.jit
def store_noise(out, seeds, positions, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store that of one row's WIDTH tokens, in float64."""
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * WIDTH + token, noise, mask=token < WIDTH)
