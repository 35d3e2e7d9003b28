"""The coupled verifier's noise in Triton; imported only where Triton is installed."""

import triton
import triton.language as tl

from speculative.sampling.rng import Purpose

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
