"""`PickCandidates` with a Triton kernel; imported only where Triton is installed.

The kernel writes log q + noise, but for a number that a row's columns have in common; torch finds the largest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from speculative.gpu.row_drafts import CandidateFields
from speculative.gpu.triton_filters import triton_floors
from speculative.gpu.triton_judge import BLOCK
from speculative.gpu.triton_noise import gumbel
from speculative.gpu.triton_vocabulary import load_block

_kernel = triton.jit(do_not_specialize=["num_nodes"])  # one binary for all levels of a tree


@_kernel
def _score_blocks(  # noqa: PLR0913
    logits,  # [E * N, W]
    temperature,  # [E] float32
    greedy,  # [E] bool
    floors,  # [E * N] float32: the lowest logit after temperature that filters let through
    ids,  # [W] int64: the token of each column; None where it is the column
    seeds,  # [E] int64
    positions,  # [E] int64: that of the candidates
    scores,  # [E * N, W] float32
    stride,
    num_nodes,  # N
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, column, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    sequence = row // num_nodes
    score = x
    if tl.load(greedy + sequence) == 0:
        token = column
        if ids is not None:
            token = tl.load(ids + column, mask=inside, other=0)
        soft = tl.div_rn(x, tl.load(temperature + sequence))
        noise = gumbel(tl.load(seeds + sequence), tl.load(positions + sequence), token)
        score = tl.where(soft < tl.load(floors + row), -float("inf"), (soft.to(tl.float64) + noise).to(tl.float32))
    tl.store(scores + row * VOCABULARY + column, score, mask=inside)


def triton_candidates(
    logits: Tensor, fields: CandidateFields, depth: int, ids: Tensor | None, vocab_size: int, count: int
) -> Tensor:
    """Implement `PickCandidates`: nothing waits for the host, and every grid follows from the shapes."""
    del vocab_size  # the noise of a token needs no other's
    (num_rows, width), num_nodes = logits.shape, len(logits) // len(fields.seeds)
    filters = (fields.temperature.view(-1), fields.log_min_p, fields.top_k, fields.top_p)
    floors = triton_floors(logits, *(one[:, None].expand(-1, num_nodes).reshape(-1) for one in filters))
    scores = torch.empty((num_rows, width), dtype=torch.float32, device=logits.device)
    _score_blocks[(num_rows, triton.cdiv(width, BLOCK))](
        logits,
        fields.temperature,
        fields.greedy,
        floors,
        ids,
        fields.seeds,
        fields.noise_positions[depth],
        scores,
        logits.stride(0),
        num_nodes,
        VOCABULARY=width,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return scores.topk(count).indices
