"""Causal attention over the paged KV cache, for packed rows of several sequences."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.kernels.bindings import Kernels, ShapeStruct, StepStruct
from speculative.model.config import PLAIN, ScoreRule
from speculative.state.batch import AttentionRows, Int64s
from speculative.state.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence's rows: start..stop of the step, and the slots [L] of all positions they may attend to."""

    start: int
    stop: int
    context: Tensor
    mask: Tensor | None  # [stop - start, L] bool, None where every row sees the whole context or it is square


class CacheAttention(ABC):
    """An `Attend` over a KV cache: stores keys and values, then attends, layer by layer.

    What stores them itself calls `attend_stored` alone. cache: of the model. slots: [N] int64, where the rows go.
    """

    cache: KVCache
    slots: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        dtype = self.cache.data.dtype
        self.cache.write(layer, self.slots, key.to(dtype), value.to(dtype))
        return self.attend_stored(layer, query, scores)

    @abstractmethod
    def attend_stored(self, layer: int, query: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """The same, where keys and values of the rows are in the cache already."""


PreparePass = Callable[..., tuple[CacheAttention, list[Tensor]]]
"""Brings the rows of an eager pass to the device of the cache: (cache, `AttentionRows`, *int64 arrays) -> attention of
those rows, and the arrays."""


def prepare_by(kernels: Kernels | None) -> PreparePass:
    """A `PreparePass` by our CPU kernels, or by torch on any device."""

    def prepare(cache: KVCache, rows: AttentionRows, *arrays: Int64s) -> tuple[CacheAttention, list[Tensor]]:
        device = cache.data.device
        return StepAttention(cache, rows, kernels), [torch.from_numpy(array).to(device) for array in arrays]

    return prepare


class StepAttention(CacheAttention):
    """Attention of one step.

    Our own CPU kernels, where they are given and know the shape, read the cache where it lies; else each sequence's
    part of it is gathered for torch's.
    """

    def __init__(self, cache: KVCache, rows: AttentionRows, kernels: Kernels | None = None) -> None:
        self.cache = cache
        self.native = None
        if kernels is not None and cache.shape.head_dim % 16 == 0:
            self.native = NativeStep(kernels, cache, rows)
            return
        device = cache.data.device
        self.slots = torch.from_numpy(rows.slots).to(device)
        starts = rows.row_starts.tolist()
        self._spans = tuple(
            _span(start, stop, torch.from_numpy(slots).to(device))
            for start, stop, slots in zip(starts, starts[1:], rows.context_slots, strict=False)
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """Implement `CacheAttention`."""
        if self.native is not None:
            return self.native.attend(layer, query, key, value, scores)
        return super().__call__(layer, query, key, value, scores)

    def attend_stored(self, layer: int, query: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """Implement `CacheAttention`."""
        outputs = [self._attend(layer, query[span.start : span.stop], span, scores) for span in self._spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, query: Tensor, span: _Span, scores: ScoreRule) -> Tensor:
        num_rows = query.shape[0]
        if scores != PLAIN:
            most = num_rows - 1 + (scores.window or len(span.context))  # positions that some row sees
            keys, values = self.cache.read(layer, span.context[-most:])
            return attend_by_rule(query, keys.to(query.dtype), values.to(query.dtype), scores)
        keys, values = self.cache.read(layer, span.context)  # [L, num_kv_heads, head_dim]
        length = keys.shape[0]
        if query.is_cuda and span.mask is not None:  # the kernel that takes masks and builds no plans takes no groups
            keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (keys, values))
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=span.mask,
            is_causal=span.mask is None and num_rows == length and num_rows > 1,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def attend_by_rule(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
    """The last n of L positions attend to all that they see, by matrix products over all L.

    Args:
        query: [n, num_heads, head_dim].
        keys: [L, num_kv_heads, head_dim].
        values: the same.
        rule: of the layer.

    Returns:
        [n, num_heads, head_dim].
    """
    num_rows, length, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))  # [H, L, D]
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores = (query.transpose(0, 1) @ keys.transpose(1, 2)).float() * scale
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    columns = torch.arange(length, device=query.device)
    rows = columns[length - num_rows :, None]
    hidden = columns > rows
    if rule.window is not None:
        hidden |= columns <= rows - rule.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return (weights.to(values.dtype) @ values).transpose(0, 1)


class NativeStep:
    """A step as our kernels read it: where its rows lie, and which slots each sequence attends to.

    cache: [num_layers, 2, num_slots, num_kv_heads, head_dim].
    """

    def __init__(self, kernels: Kernels, cache: KVCache, rows: AttentionRows) -> None:
        self.kernels = kernels
        self.cache = cache.data
        context, starts = join_contexts(rows.context_slots)
        self._arrays = (rows.slots, rows.row_starts, context, starts)  # kept alive for the addresses below
        self.struct = StepStruct(
            num_rows=len(rows.slots),
            num_spans=len(rows.context_slots),
            slots=rows.slots.ctypes.data,
            row_starts=rows.row_starts.ctypes.data,
            context=context.ctypes.data,
            context_starts=starts.ctypes.data,
        )
        self.shape = cache_shape(cache)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """Implement `StepAttention`; computed in float32 whatever the query's type."""
        self.shape.num_heads = query.shape[1]
        heads = (_packed_heads(query), _packed_heads(key), _packed_heads(value))
        return self.kernels.attend(self.shape, self.struct, self.cache, layer, heads, scores.numbers).to(query.dtype)


def cache_shape(cache: KVCache) -> ShapeStruct:
    """Return what our kernels have to know of a cache; the rest is the model's."""
    return ShapeStruct(
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
        num_slots=cache.data.shape[2],
        cache_is_bfloat16=cache.data.dtype == torch.bfloat16,
    )


def join_contexts(context_slots: tuple[Int64s, ...]) -> tuple[Int64s, Int64s]:
    """The slots of all sequences, one after another, and where each begins, with their number at the end."""
    starts = np.array([0, *accumulate(map(len, context_slots))], np.int64)
    return context_slots[0] if len(context_slots) == 1 else np.concatenate(context_slots), starts


def _packed_heads(heads: Tensor) -> Tensor:
    """Float32, with the heads of a row side by side; rows may be apart."""
    heads = heads.float()
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _span(start: int, stop: int, context: Tensor) -> _Span:
    num_rows, length = stop - start, context.shape[0]
    if num_rows == 1 or num_rows == length:
        return _Span(start, stop, context, None)
    rows = torch.arange(length - num_rows, length, device=context.device)
    columns = torch.arange(length, device=context.device)
    return _Span(start, stop, context, columns[None, :] <= rows[:, None])
