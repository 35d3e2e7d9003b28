"""Attention of packed rows by a plain loop over them."""

import torch
from torch import Tensor

from speculative.gpu.packed_attention import PackedRows


def attend_packed(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows) -> Tensor:
    """As `AttendPacked`; computed in float64, row after row."""
    out = torch.full_like(query, torch.nan)
    num_kv_heads, head_dim = keys.shape[1:]
    for first_row, num_rows, begin, table in rows.spans.tolist():
        for offset in range(num_rows):
            positions = torch.arange(rows.first, begin + offset + 1)
            blocks = rows.blocks[table + positions // rows.block_size].long()
            slots = blocks * rows.block_size + positions % rows.block_size
            own = query[first_row + offset].double().view(num_kv_heads, -1, head_dim)
            scores = torch.einsum("hgd,lhd->hgl", own, keys[slots].double()) * head_dim**-0.5
            attended = torch.einsum("hgl,lhd->hgd", torch.softmax(scores, dim=-1), values[slots].double())
            out[first_row + offset] = attended.flatten(0, 1).to(query.dtype)
    return out
