"""Attention of packed rows in plain torch, sequence after sequence."""

import torch
from torch import Tensor

from speculative.gpu.packed_attention import PackedRows


def attend_packed(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows) -> Tensor:
    """Implement `AttendPacked` in float64."""
    out = torch.full_like(query, torch.nan)
    num_kv_heads, head_dim = keys.shape[1:]
    for first_row, num_rows, begin, table in rows.spans.tolist():
        if num_rows == 0:
            continue
        positions = torch.arange(rows.first, begin + num_rows)
        blocks = rows.blocks[table + positions // rows.block_size].long()
        slots = blocks * rows.block_size + positions % rows.block_size
        own = slice(first_row, first_row + num_rows)
        queries = query[own].double().view(num_rows, num_kv_heads, -1, head_dim)
        scores = torch.einsum("nhgd,lhd->nhgl", queries, keys[slots].double()) * head_dim**-0.5
        hidden = positions > begin + torch.arange(num_rows)[:, None]  # [N, L]
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), dim=-1)
        attended = torch.einsum("nhgl,lhd->nhgd", weights, values[slots].double())
        out[own] = attended.flatten(1, 2).to(query.dtype)
    return out
