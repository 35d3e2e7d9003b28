"""The places of drafts in the distributions that they were sampled from, in Triton; imported only where it is
installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # columns that a program adds up at once


@triton.jit
def _sum_before(
    probs,  # [D, W] float32
    rows,  # [R] int64: which distribution
    columns,  # [R] int64: the first column that is left out
    sums,  # [R] float64
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    end, own = tl.load(columns + row), probs + tl.load(rows + row) * stride
    total = tl.zeros((), tl.float64)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(own + column, mask=column < end, other=0.0), axis=0).to(tl.float64)
    tl.store(sums + row, total)


def triton_mass_before(probs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Implement `speculative.verification.draft_probs.mass_before`."""
    sums = torch.empty(len(rows), dtype=torch.float64, device=probs.device)
    _sum_before[(len(rows),)](probs, rows, columns, sums, probs.stride(0), BLOCK=_BLOCK, num_warps=8)
    return sums
