"""Training-time test: a head learns on its own drafts, as it will be used.

Step 0 reads what the target computed; step j reads the hidden state that step j - 1 gave for the same row, and attends
to the rows of step 0 up to its own and to that row's earlier drafts, which is what serving gives it (Li et al., 2025,
arXiv 2503.01840, section 3). Tokens are the true ones throughout.
"""

import numpy as np
import torch
from torch import Tensor

from speculative.model.eagle3 import Eagle3Head
from tools.train_head.batches import TrainingBatch, causal_attention


def drafted_hidden(head: Eagle3Head, batch: TrainingBatch, num_steps: int) -> Tensor:
    """Return what the head's final norm makes of each step's hidden states, aligned with the targets: [num_steps, A,
    hidden].

    Row [j, i] drafts target i at step j; where its answer has no row i - j (depths[i] < j) it means nothing.
    """
    device = batch.token_ids.device
    local = torch.cat([torch.arange(length - 1, device=device) for length in batch.lengths])
    starts = np.cumsum([0, *batch.lengths])
    rows = torch.cat([torch.arange(s, s + n - 1, device=device) for s, n in zip(starts, batch.lengths, strict=False)])
    attend = _DraftAttention(batch)
    fused = head.fuse(batch.features[rows].float()).float()  # autocast or not, it runs on in float32
    hidden = head(batch.token_ids[rows + 1], fused, local, attend)
    drafting = attend.drafting.to(device)  # rows of step 0 that later steps go on from
    hidden, rows, local = hidden[drafting], rows[drafting], local[drafting]
    targets = torch.arange(len(hidden), device=device)
    steps = [head.norm(hidden)]
    for step in range(1, num_steps):
        # Rows near an answer's end draft beyond it; their tokens stand for nothing and no target reads them.
        token_ids = batch.token_ids[(rows + 1 + step).clamp(max=len(batch.token_ids) - 1)]
        positions = (local + step).clamp(max=head.config.shape.max_position_embeddings - 1)
        hidden = head(token_ids, hidden, positions, attend)
        steps.append(head.norm(hidden)[(targets - step).clamp(min=0)])
    return torch.stack(steps)


class _DraftAttention:
    """The attention of all steps over one batch; each call is the next step."""

    def __init__(self, batch: TrainingBatch) -> None:
        self._sizes = [length - 1 for length in batch.lengths]  # the last token's features draft nothing here
        self._starts = batch.answer_starts
        self._counts = [length - 2 - start for length, start in zip(batch.lengths, batch.answer_starts, strict=True)]
        firsts = np.cumsum([0, *self._sizes])
        spans = zip(firsts, self._starts, self._counts, strict=False)
        self.drafting = torch.cat([torch.arange(f + start, f + start + count) for f, start, count in spans])
        self._true: list[tuple[Tensor, Tensor]] = []  # keys and values of true-feature rows, by conversation
        self._own: list[list[tuple[Tensor, Tensor]]] = []  # those of drafted rows, by step and conversation

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *plain: object) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        del layer, plain
        sizes = self._counts if self._true else self._sizes
        queries, keys, values = (rows.to(value.dtype).split(sizes) for rows in (query, key, value))
        pairs = list(zip(keys, values, strict=True))
        if not self._true:
            self._true = pairs
            return torch.cat([causal_attention(query, *pair) for query, pair in zip(queries, pairs, strict=True)])
        self._own.append(pairs)
        return torch.cat([self._drafted(index, query) for index, query in enumerate(queries)])

    def _drafted(self, index: int, query: Tensor) -> Tensor:
        """Rows [n, heads, head_dim] of one conversation: each attends to true rows up to its own, and to its drafts."""
        keys, values = self._true[index]
        num_rows, num_heads, head_dim = query.shape
        start, stop = self._starts[index], self._starts[index] + num_rows
        keys, values, groups = keys[:stop], values[:stop], keys.shape[1]
        heads = query.view(num_rows, groups, num_heads // groups, head_dim) / head_dim**0.5
        scores = torch.einsum("ngrd,lgd->grnl", heads, keys)
        columns = torch.arange(stop, device=query.device)
        hidden = columns[None, :] > columns[start:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        own = [torch.einsum("ngrd,ngd->grn", heads, step[index][0])[..., None] for step in self._own]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(query.dtype)
        attended = torch.einsum("grnl,lgd->ngrd", weights[..., :stop], values)
        for number, step in enumerate(self._own):
            attended = attended + weights[..., stop + number].permute(2, 0, 1)[..., None] * step[index][1][:, :, None]
        return attended.reshape(num_rows, num_heads, head_dim)
