"""Causal attention over the paged KV cache, for packed rows of several sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from speculative.batch import AttentionRows
from speculative.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence's rows: start..stop of the step, and the slots [L] of all positions they may attend to."""

    start: int
    stop: int
    context: Tensor
    mask: Tensor | None  # [stop - start, L] bool, None where every row sees the whole context or it is square


class StepAttention:
    """Attention of one step: stores its keys and values, then attends, layer by layer."""

    def __init__(self, cache: KVCache, rows: AttentionRows, device: torch.device) -> None:
        self._cache = cache
        self._slots = torch.from_numpy(rows.slots).to(device)
        starts = rows.row_starts.tolist()
        self._spans = tuple(
            _span(start, stop, torch.from_numpy(slots).to(device))
            for start, stop, slots in zip(starts, starts[1:], rows.context_slots, strict=False)
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        self._cache.write(layer, self._slots, key, value)
        outputs = [self._attend(layer, query[span.start : span.stop], span) for span in self._spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, query: Tensor, span: _Span) -> Tensor:
        keys, values = self._cache.read(layer, span.context)  # [L, num_kv_heads, head_dim]
        num_rows, length = query.shape[0], keys.shape[0]
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=span.mask,
            is_causal=span.mask is None and num_rows == length and num_rows > 1,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def _span(start: int, stop: int, context: Tensor) -> _Span:
    num_rows, length = stop - start, context.shape[0]
    if num_rows == 1 or num_rows == length:
        return _Span(start, stop, context, None)
    rows = torch.arange(length - num_rows, length, device=context.device)
    columns = torch.arange(length, device=context.device)
    return _Span(start, stop, context, columns[None, :] <= rows[:, None])
