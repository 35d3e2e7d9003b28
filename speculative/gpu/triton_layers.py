"""`LayerOps` as four Triton kernels; imported only where Triton is installed.

What a row becomes is a function of that row alone. Results are rounded to the rows' dtype where torch's operators round
theirs, so in bfloat16 and float16 rotations have the same bits; norms and gates, whose sums and exponentials differ in
float32's last bits, are at most one unit in the last place apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.model.attention import CacheAttention
from speculative.model.fp8 import E4M3, LARGEST, LEAST_AMAX, Rows, ScaledRows
from speculative.model.layers import Attend, Attention, LayerOps, Norm, RMSNorm, Rotation
from speculative.model.rotary import Rotary

_GATE_BLOCK = 1024
_QUANTIZED_AT_ONCE = 4096  # numbers of a row
_LEAST_AMAX, _SCALE = tl.constexpr(LEAST_AMAX), tl.constexpr(1 / LARGEST)
_PAIRS = 512  # that a program rotates


@triton.jit
def _scale_of(amax):
    """Of a row, as `quantize_rows`, and its inverse. A NaN that `max` passed over stays one in the numbers."""
    scale = tl.maximum(amax, _LEAST_AMAX) * _SCALE
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _once_rounded(scaled):
    """Cut float32 to its sign, exponent and ten bits, the last of which is set if any behind it is: FP8 has as much to
    round, and compute capability 8.9, which makes FP8 by way of float16, rounds once."""
    bits = scaled.to(tl.int32, bitcast=True)
    return (bits & -8192 | ((bits & 8191) != 0).to(tl.int32) << 13).to(tl.float32, bitcast=True)


@triton.jit
def _add_norm(  # noqa: PLR0913
    hidden,  # [N, SIZE]
    update,  # [N, SIZE]
    norm_weight,  # [SIZE]
    added,  # [N, SIZE] hidden + update
    normed,  # [N, SIZE], e4m3 if QUANTIZED
    scales,  # [N] float32, if QUANTIZED
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    num_row = tl.program_id(0).to(tl.int64)
    place = num_row * SIZE + column
    summed = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    summed += tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
    rounded = summed.to(added.dtype.element_ty)
    tl.store(added + place, rounded, mask=inside)
    row = rounded.to(tl.float32)
    scaled = row * tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    scaled *= tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = scaled.to(added.dtype.element_ty)
    if QUANTIZED:
        scaled = scaled.to(tl.float32)
        scale, inverse = _scale_of(tl.max(tl.abs(scaled), axis=0))
        tl.store(scales + num_row, scale)
        scaled = _once_rounded(scaled * inverse)
    tl.store(normed + place, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate_up, row, column, SIZE: tl.constexpr):
    """Of [N, 2 * SIZE]; 0 beyond a row."""
    inside = column < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = gate_up.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def _gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # [N, 2 * SIZE] -> [N, SIZE]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + column, _gated(gate_up, row, column, SIZE), mask=column < SIZE)


@triton.jit
def _to_quantize(rows, row, column, SIZE: tl.constexpr, GATED: tl.constexpr):
    if GATED:
        return _gated(rows, row, column, SIZE).to(tl.float32)
    else:
        return tl.load(rows + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _quantize(
    rows,  # [N, SIZE], or [N, 2 * SIZE] if GATED
    numbers,  # [N, SIZE] e4m3
    scales,  # [N] float32
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        largest = tl.maximum(largest, tl.abs(_to_quantize(rows, row, start + tl.arange(0, BLOCK), SIZE, GATED)))
    scale, inverse = _scale_of(tl.max(largest, axis=0))
    tl.store(scales + row, scale)
    for start in range(0, SIZE, BLOCK):  # read again, from the cache: the longest rows do not fit into registers
        column = start + tl.arange(0, BLOCK)
        scaled = _once_rounded(_to_quantize(rows, row, column, SIZE, GATED) * inverse)
        tl.store(numbers + row * SIZE + column, scaled.to(numbers.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _rotate_and_store(  # noqa: PLR0913
    heads,  # [N, HEADS + 2 * KV_HEADS, 2 * HALF] of query, key and value
    table,  # [P, 2, HALF] float32; cosines, sines
    positions,  # [N] int64
    slots,  # [N] int64
    norm_weight,  # [HEADS + KV_HEADS, 2 * HALF] of the heads' norm, if NORMED
    query,  # [N, HEADS, 2 * HALF]
    keys,  # [num_slots, KV_HEADS, 2 * HALF]
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    in_half = dim[None, :] < HALF
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    exists = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half
    place = head[:, None] * (2 * HALF) + dim[None, :]  # within a row, of the first half
    given = heads + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + place
    dtype = heads.dtype.element_ty
    first = tl.load(given, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(given + HALF, mask=exists, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if NORMED:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        weighted = exists & (head < HEADS + KV_HEADS)[:, None]
        turned_first = (first * scale).to(dtype).to(tl.float32)
        turned_first *= tl.load(norm_weight + place, mask=weighted, other=0.0).to(tl.float32)
        turned_first = turned_first.to(dtype).to(tl.float32)
        turned_second = (second * scale).to(dtype).to(tl.float32)
        turned_second *= tl.load(norm_weight + place + HALF, mask=weighted, other=0.0).to(tl.float32)
        turned_second = turned_second.to(dtype).to(tl.float32)
    angle = table + tl.load(positions + row) * (2 * HALF) + dim
    cos = tl.load(angle, mask=dim < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=dim < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
    rotated_first = (turned_first * cos).to(dtype).to(tl.float32) - turned_second * sin
    rotated_second = (turned_second * cos).to(dtype).to(tl.float32) + turned_first * sin
    of_query = query + row * (HEADS * 2 * HALF) + place
    tl.store(of_query, rotated_first.to(dtype), mask=exists & is_query[:, None])
    tl.store(of_query + HALF, rotated_second.to(dtype), mask=exists & is_query[:, None])
    slot = tl.load(slots + row) * (KV_HEADS * 2 * HALF)
    stored = keys.dtype.element_ty
    of_key = keys + slot + (place - HEADS * 2 * HALF)
    is_key = exists & (~is_query & ~is_value)[:, None]
    tl.store(of_key, rotated_first.to(dtype).to(stored), mask=is_key)
    tl.store(of_key + HALF, rotated_second.to(dtype).to(stored), mask=is_key)
    of_value = values + slot + (place - (HEADS + KV_HEADS) * 2 * HALF)
    tl.store(of_value, first.to(stored), mask=exists & is_value[:, None])
    tl.store(of_value + HALF, second.to(stored), mask=exists & is_value[:, None])


class TritonLayerOps(LayerOps):
    """`LayerOps` of one launch each, without gradients. Attention is over a KV cache, a `CacheAttention`."""

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Rows]:
        """Implement `LayerOps`."""
        assert isinstance(norm, RMSNorm), "layers of the Llama shape have their norms"
        hidden, update = hidden.contiguous(), update.contiguous()
        added, (num_rows, size) = torch.empty_like(hidden), hidden.shape
        quantized = _empty_fp8(hidden, size) if norm.feeds_fp8 else None
        normed, scales = quantized or (torch.empty_like(hidden), None)
        block = triton.next_power_of_2(size)
        _add_norm[(num_rows,)](
            *(hidden, update, norm.weight, added, normed, scales, norm.eps),
            SIZE=size,
            BLOCK=block,
            QUANTIZED=norm.feeds_fp8,
            num_warps=norm_warps(block),
        )
        return added, quantized or normed

    def gate(self, gate_up: Tensor, *, feeds_fp8: bool = False) -> Rows:
        """Implement `LayerOps`."""
        if feeds_fp8:
            return _quantized(gate_up, gated=True)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, size))
        _gate[(num_rows, triton.cdiv(size, _GATE_BLOCK))](gate_up.contiguous(), out, SIZE=size, BLOCK=_GATE_BLOCK)
        return out

    def quantize(self, rows: Tensor) -> ScaledRows:
        """Implement `LayerOps`."""
        return _quantized(rows, gated=False)

    def rotation(self, rotary: Rotary, positions: Tensor, like: Tensor) -> Rotation:
        """Implement `LayerOps`: the whole table, which the kernel reads at the positions."""
        del like
        return rotary.table, positions

    def attend(self, heads: Tensor, attention: Attention, rotation: Rotation, attend: Attend, layer: int) -> Tensor:
        """Implement `LayerOps`."""
        assert isinstance(attend, CacheAttention), "keys and values are stored by the kernel that rotates them"
        keys, values = attend.cache.data[layer].unbind(0)
        query = rotate_and_store(heads, attention, rotation, attend.slots, keys, values)
        return attend.attend_stored(layer, query, attention.scores)


def rotate_and_store(
    heads: Tensor, attention: Attention, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The query, normed and rotated; keys, too, which go to the cache with the values.

    Args:
        heads: [N, num_heads + 2 * num_kv_heads, head_dim], as attention's projection gives them.
        attention: whose heads they are.
        rotation: of `TritonLayerOps`.
        slots: [N] int64, where the keys and values go.
        keys: [num_slots, num_kv_heads, head_dim] of the layer, contiguous.
        values: the same.

    Returns:
        [N, num_heads, head_dim].
    """
    num_rows, all_heads, head_dim = heads.shape
    query = heads.new_empty((num_rows, attention.num_heads, head_dim))
    norm, dim = attention.qk_norm, triton.next_power_of_2(head_dim // 2)
    tile = min(max(1, _PAIRS // dim), triton.next_power_of_2(all_heads))
    _rotate_and_store[(num_rows, triton.cdiv(all_heads, tile))](
        *(heads.contiguous(), *rotation, slots),
        *(query if norm is None else norm.weight, query, keys, values),
        0.0 if norm is None else norm.eps,
        HEADS=attention.num_heads,
        KV_HEADS=attention.num_kv_heads,
        HALF=head_dim // 2,
        NORMED=norm is not None,
        TILE=tile,
        DIM=dim,
    )
    return query


def _quantized(rows: Tensor, *, gated: bool) -> ScaledRows:
    size = rows.shape[1] // 2 if gated else rows.shape[1]
    out, block = _empty_fp8(rows, size), quantized_at_once(size)
    _quantize[(len(rows),)](
        rows.contiguous(), *out, SIZE=size, BLOCK=block, GATED=gated, num_warps=norm_warps(2 * block)
    )
    return out


def _empty_fp8(like: Tensor, size: int) -> ScaledRows:
    """Allocate as many rows as `like` has, to be written."""
    num_rows = len(like)
    return ScaledRows(like.new_empty((num_rows, size), dtype=E4M3), like.new_empty((num_rows, 1), dtype=torch.float32))


def quantized_at_once(size: int) -> int:
    """Numbers of a row that a program holds at once."""
    block: int = triton.next_power_of_2(size)
    return min(block, _QUANTIZED_AT_ONCE)


def norm_warps(block: int) -> int:
    """Warps that share a row of a norm: 16 numbers a thread, more only of the longest rows."""
    return min(16, max(4, block // 512))
