"""`FindFloors` as a Triton kernel; imported only where Triton is installed.

A token stays where fewer than top_k tokens are likelier, and where the likelier ones have less than top_p of the mass.
Both are searched for by bisection over the bits of the lowest logit that stays, whose order is that of the numbers: no
sorting, and ties stay without a rule of their own. Logits of 16 bits take 16 to 19 steps, others 32; each reads the row
again, from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # zeros at the end of such a float32


@triton.jit
def _key(value, UNUSED: tl.constexpr):
    """Integers in the order of float32 numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED


@triton.jit
def _number(key, UNUSED: tl.constexpr):
    """The inverse of `_key`."""
    bits = key << UNUSED
    bits = tl.where(key < 0, bits | ((1 << UNUSED) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kept_from(logits, least, highest, scale, size, TILE: tl.constexpr):
    """Count the tokens of at least this logit, and sum their mass in units of the likeliest; scale: 1 / temperature."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for offset in range(0, size, TILE):
        token = offset + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < size, other=-float("inf")).to(tl.float32)
        kept = (x >= least) & (token < size)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x - highest) * scale), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _from_min_p(least, temperature, low, high, UNUSED: tl.constexpr):
    """The lowest of the keys whose logit after temperature is not below `least`; of those from `low` to `high`."""
    while low < high:
        middle = _middle(low, high)
        if tl.div_rn(_number(middle, UNUSED), temperature) >= least:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _from_top_k(  # noqa: PLR0913
    logits, top_k, highest, scale, low, high, size, TILE: tl.constexpr, UNUSED: tl.constexpr
):
    """The lowest of the keys that fewer than top_k tokens lie above."""
    while low < high:
        middle = _middle(low, high)
        count, _ = _kept_from(logits, _number(middle + 1, UNUSED), highest, scale, size, TILE)
        if count < top_k:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _from_top_p(  # noqa: PLR0913
    logits, top_p, highest, scale, low, high, size, TILE: tl.constexpr, UNUSED: tl.constexpr
):
    """The lowest of the keys above which lies less than top_p of the mass from `low` on."""
    _, total = _kept_from(logits, _number(low, UNUSED), highest, scale, size, TILE)
    while low < high:
        middle = _middle(low, high)
        _, mass = _kept_from(logits, _number(middle + 1, UNUSED), highest, scale, size, TILE)
        if mass < top_p * total:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def has_filters(log_min_p, top_k, top_p, size):
    """Return whether a row's parameters filter anything out."""
    return (top_k < size) | (top_p < 1) | (log_min_p > -float("inf"))


@triton.jit
def _find_floor(  # noqa: PLR0913
    logits,  # [R, V] float32, bfloat16 or float16
    temperatures,  # [R] float32
    log_min_ps,  # [R] float32
    top_ks,  # [R] int64
    top_ps,  # [R] float32
    floors,  # [R] float32
    row_stride,
    size,
    TILE: tl.constexpr,
    UNUSED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * row_stride
    top_k, top_p, log_min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row)
    lowest = -float("inf")
    floor = lowest
    if has_filters(log_min_p, top_k, top_p, size):
        temperature = tl.load(temperatures + row)
        best = tl.full([TILE], -float("inf"), tl.float32)
        for offset in range(0, size, TILE):
            token = offset + tl.arange(0, TILE)
            best = tl.maximum(best, tl.load(own + token, mask=token < size, other=-float("inf")).to(tl.float32))
        highest = tl.max(best, axis=0)
        base, scale = tl.where(highest == lowest, 0.0, highest), 1 / temperature  # -inf - -inf is NaN
        low, high = _key(tl.full((), lowest, tl.float32), UNUSED), _key(highest, UNUSED)
        low = _from_min_p(tl.div_rn(highest, temperature) + log_min_p, temperature, low, high, UNUSED)
        if top_k < size:
            low = _from_top_k(own, top_k, base, scale, low, high, size, TILE, UNUSED)
        if top_p < 1:
            low = _from_top_p(own, top_p, base, scale, low, high, size, TILE, UNUSED)
        floor = tl.div_rn(_number(low, UNUSED), temperature)
    tl.store(floors + row, floor)


def triton_floors(logits: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Implement `FindFloors`."""
    floors = torch.empty_like(top_p)
    _find_floor[(len(logits),)](
        logits,
        temperature,
        log_min_p,
        top_k,
        top_p,
        floors,
        logits.stride(0),
        logits.shape[1],
        TILE=_TILE,
        UNUSED=_UNUSED_BITS[logits.dtype],
        num_warps=8,
    )
    return floors
