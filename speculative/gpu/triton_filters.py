"""`FindFloors` as a Triton kernel; imported only where Triton is installed.

A token stays where fewer than top_k tokens are likelier, and where the likelier ones have less than top_p of the mass.
Both are searched for by bisection over the bits of the floor, whose order is that of the numbers: no sorting, and ties
stay without a rule of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit
def _key(values):
    """Integers in the order of float32 numbers."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, base, floor, key, size, TILE: tl.constexpr):
    """How many of the tokens from `floor` on lie above a key, and their mass in units of the likeliest token's."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for offset in range(0, size, TILE):
        token = offset + tl.arange(0, TILE)
        values = tl.load(logits + token, mask=token < size, other=-float("inf"))
        counts = (_key(values) > key) & (values >= floor)
        count += counts.to(tl.int32)
        mass += tl.where(counts, tl.exp(values - base), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _find_floor(  # noqa: PLR0913
    logits, log_min_ps, top_ks, top_ps, floors, row_stride, size, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * row_stride
    top_k, top_p, log_min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row)
    lowest = -float("inf")
    if (top_k < size) | (top_p < 1) | (log_min_p > lowest):
        best = tl.full([TILE], -float("inf"), tl.float32)
        for offset in range(0, size, TILE):
            token = offset + tl.arange(0, TILE)
            best = tl.maximum(best, tl.load(own + token, mask=token < size, other=-float("inf")))
        highest = tl.max(best, axis=0)
        floor = highest + log_min_p
        base = tl.where(highest == lowest, 0.0, highest)  # -inf - -inf is NaN
        low, high = _key(floor), _key(highest)
        if top_k < size:
            while low < high:
                middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
                count, _ = _above(own, base, floor, middle, size, TILE)
                if count < top_k:
                    high = middle
                else:
                    low = middle + 1
            floor = _number(low)
        if top_p < 1:
            high = _key(highest)
            _, total = _above(own, base, floor, low - 1, size, TILE)
            while low < high:
                middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
                _, mass = _above(own, base, floor, middle, size, TILE)
                if mass < top_p * total:
                    high = middle
                else:
                    low = middle + 1
            floor = _number(low)
        tl.store(floors + row, floor)
    else:
        tl.store(floors + row, lowest)


def triton_floors(logits: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `FindFloors`."""
    floors = torch.empty_like(top_p)
    sizes = (logits.stride(0), logits.shape[1])
    _find_floor[(len(logits),)](logits, log_min_p, top_k, top_p, floors, *sizes, TILE=_TILE, num_warps=8)
    return floors
