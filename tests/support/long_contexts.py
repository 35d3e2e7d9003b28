"""Attention of a few rows over one long context, by either kernel, against float64; on any device."""

import torch
from torch import Tensor

from speculative.gpu.packed_attention import PackedRows
from speculative.gpu.paged_attention import AttentionSizes, PagedRows

LENGTH, BLOCK_SIZE, NUM_ROWS = 4200, 16, 2
NUM_BLOCKS = -(-LENGTH // BLOCK_SIZE)
HEADS, HEAD_DIM = 3, 64


def error_of(kernel: str, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error, where all values are near 1 and the rows have float32 numbers, so that nothing is rounded at
    the end. Weights are rounded to `dtype`: of thousands the mean is off by far less than one."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn((NUM_ROWS, HEADS, HEAD_DIM), generator=random).to(dtype).float()
    keys = (torch.randn((NUM_BLOCKS * BLOCK_SIZE, 1, HEAD_DIM), generator=random) / 2).to(dtype)
    values = (1 + torch.randn(keys.shape, generator=random) / 10).to(dtype)
    expected = _attend(query.double(), keys.double()[:, 0], values.double()[:, 0])
    given = [tensor.to(device) for tensor in (query, keys, values)]
    found = (_by_splits if kernel == "splits" else _packed)(*given, device)
    assert found.dtype == torch.float32
    return float((found.cpu().double() - expected).abs().max())


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = torch.einsum("rhd,ld->rhl", query, keys) * HEAD_DIM**-0.5
    seen = torch.arange(len(keys)) < LENGTH - NUM_ROWS + 1 + torch.arange(NUM_ROWS)[:, None, None]
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ values


def _by_splits(query: Tensor, keys: Tensor, values: Tensor, device: torch.device) -> Tensor:
    from speculative.gpu.triton_attention import TritonAttend

    visible = LENGTH - NUM_ROWS + 1 + torch.arange(NUM_ROWS, device=device)
    blocks = torch.arange(NUM_BLOCKS, device=device)[None]
    rows = PagedRows(visible - 1, visible, blocks)
    return TritonAttend(AttentionSizes(BLOCK_SIZE, NUM_ROWS, NUM_BLOCKS))(query, keys, values, rows)


def _packed(query: Tensor, keys: Tensor, values: Tensor, device: torch.device) -> Tensor:
    from speculative.gpu.triton_prompts import triton_attend_packed

    spans = torch.tensor([[0, NUM_ROWS, LENGTH - NUM_ROWS, 0]], dtype=torch.int32, device=device)
    blocks = torch.arange(NUM_BLOCKS, dtype=torch.int32, device=device)
    return triton_attend_packed(query, keys, values, PackedRows(spans, blocks, 0, BLOCK_SIZE))
