"""`FindFloors` as a Triton kernel; imported only where Triton is installed.

A token stays where fewer than top_k tokens are likelier, and where the likelier ones have less than top_p of the mass.
Both are searched for over the bits of the lowest logit that stays, whose order is that of the numbers: no sorting, and
ties stay without a rule of their own. A pass over the row, which lies in the cache, compares it with three candidates
and leaves a quarter of the range. Logits of 16 bits take 8 passes for the whole range, others 16; what a row's highest
logits show beforehand leaves about half of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 8192
WARPS = 16  # as many threads as have room for the sums of three candidates
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
def _counts_from(logits, first, second, third, size, TILE: tl.constexpr):
    """Count the tokens of at least each of three logits."""
    of_first = tl.zeros([TILE], tl.int32)
    of_second = tl.zeros([TILE], tl.int32)
    of_third = tl.zeros([TILE], tl.int32)
    for offset in range(0, size, TILE):
        token = offset + tl.arange(0, TILE)
        there = token < size
        x = tl.load(logits + token, mask=there, other=-float("inf")).to(tl.float32)
        of_first += ((x >= first) & there).to(tl.int32)
        of_second += ((x >= second) & there).to(tl.int32)
        of_third += ((x >= third) & there).to(tl.int32)
    return tl.sum(of_first, axis=0), tl.sum(of_second, axis=0), tl.sum(of_third, axis=0)


@triton.jit
def _masses_from(logits, first, second, third, highest, scale, size, TILE: tl.constexpr):  # noqa: PLR0913
    """The mass of the tokens of at least each of three logits, in units of the likeliest; scale: 1 / temperature."""
    of_first = tl.zeros([TILE], tl.float32)
    of_second = tl.zeros([TILE], tl.float32)
    of_third = tl.zeros([TILE], tl.float32)
    for offset in range(0, size, TILE):
        token = offset + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < size, other=-float("inf")).to(tl.float32)
        mass = tl.where(token < size, tl.exp((x - highest) * scale), 0.0)
        of_first += tl.where(x >= first, mass, 0.0)
        of_second += tl.where(x >= second, mass, 0.0)
        of_third += tl.where(x >= third, mass, 0.0)
    return tl.sum(of_first, axis=0), tl.sum(of_second, axis=0), tl.sum(of_third, axis=0)


@triton.jit
def _narrow(low, high, first, second, third, below_first, below_second, below_third):  # noqa: PLR0913
    """Return the rest of a range of keys; below_first: the wanted one is at most the first of three candidates."""
    if below_first:
        high = first
    elif below_second:
        low, high = first + 1, second
    elif below_third:
        low, high = second + 1, third
    else:
        low = third + 1
    return low, high


@triton.jit
def _from_top_k(logits, best, top_k, low, high, size, TILE: tl.constexpr, UNUSED: tl.constexpr):  # noqa: PLR0913
    """The lowest of the keys that fewer than top_k tokens lie above; best: [TILE] the highest logits of as many parts
    of the row."""
    most = high
    while low < most:  # where top_k parts have a token above a key, the row has as many
        middle = _middle(low, most)
        if tl.sum((best >= _number(middle + 1, UNUSED)).to(tl.int32), axis=0) < top_k:
            most = middle
        else:
            low = middle + 1
    while low < high:
        second = _middle(low, high)
        first, third = _middle(low, second), _middle(second + 1, high)
        above = _counts_from(
            *(logits, _number(first + 1, UNUSED), _number(second + 1, UNUSED), _number(third + 1, UNUSED), size, TILE)
        )
        low, high = _narrow(*(low, high, first, second, third, above[0] < top_k, above[1] < top_k, above[2] < top_k))
    return low


@triton.jit
def _from_top_p(  # noqa: PLR0913
    logits, top_p, highest, scale, low, high, size, TILE: tl.constexpr, UNUSED: tl.constexpr
):
    """The lowest of the keys above which lies less than top_p of the mass from `low` on."""
    begin = low
    # All tokens below this have less than half of the mass that may be left out, as the likeliest alone has 1.
    surely_out = highest + tl.log((1 - top_p) / (2 * size)) / scale
    if surely_out > -float("inf"):
        low = tl.minimum(tl.maximum(low, _key(surely_out, UNUSED)), high)
    first = _middle(low, high)
    second = _middle(tl.minimum(first + 1, high), high)
    total, above_first, above_second = _masses_from(
        logits,
        *(_number(begin, UNUSED), _number(first + 1, UNUSED), _number(second + 1, UNUSED), highest, scale, size, TILE),
    )
    goal = top_p * total
    low, high = _narrow(low, high, first, second, second, above_first < goal, above_second < goal, above_second < goal)
    while low < high:
        second = _middle(low, high)
        first, third = _middle(low, second), _middle(second + 1, high)
        above = _masses_from(
            *(logits, _number(first + 1, UNUSED), _number(second + 1, UNUSED), _number(third + 1, UNUSED)),
            *(highest, scale, size, TILE),
        )
        low, high = _narrow(*(low, high, first, second, third, above[0] < goal, above[1] < goal, above[2] < goal))
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
        least, most = tl.div_rn(highest, temperature) + log_min_p, high
        while low < most:  # the lowest of the keys whose logit after temperature is not below `least`
            middle = _middle(low, most)
            if tl.div_rn(_number(middle, UNUSED), temperature) >= least:
                most = middle
            else:
                low = middle + 1
        if top_k < size:
            low = _from_top_k(own, best, top_k, low, high, size, TILE, UNUSED)
        if top_p < 1:
            low = _from_top_p(own, top_p, base, scale, low, high, size, TILE, UNUSED)
        floor = tl.div_rn(_number(low, UNUSED), temperature)
    tl.store(floors + row, floor)


def triton_floors(logits: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Implement `FindFloors`."""
    floors = torch.empty_like(top_p)
    _find_floor[(len(logits),)](
        *(logits, temperature, log_min_p, top_k, top_p, floors, logits.stride(0), logits.shape[1]),
        TILE=_TILE,
        UNUSED=_UNUSED_BITS[logits.dtype],
        num_warps=WARPS,
    )
    return floors
