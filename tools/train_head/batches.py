"""Batches of conversations, with what a head reads of its target and what it is to learn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.model.attention import attend_by_rule
from speculative.model.config import PLAIN, ScoreRule
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head
from tools.train_head.conversations import Conversations

_ROWS_AT_ONCE = 64  # whose logits are summed at once: 12 MB of 49,152 tokens, which a CPU keeps in its cache


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Some conversations, packed: S tokens, of which A are targets (answer tokens after the first, but for the last).

    log_p: [A, D] float32, the target's distribution over the tokens that the head drafts; they sum to these tokens'
        share.
    """

    lengths: tuple[int, ...]  # rows of each conversation
    answer_starts: tuple[int, ...]  # the first row of each that drafts
    token_ids: Tensor  # [S] int64
    features: Tensor  # [S, F], what the head reads of the target
    log_p: Tensor
    next_ids: Tensor  # [A] int64, the tokens that were drawn from it
    depths: Tensor  # [A] int64, place of each target within its answer: how many rows can draft it
    temperatures: Tensor  # [A] float32, of the answer


class PlainAttention:
    """Causal attention over whole sequences, packed one after another; nothing is cached."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        del layer
        parts = zip(*(rows.split(self._lengths) for rows in (query, key, value)), strict=True)
        if scores != PLAIN:
            return torch.cat([attend_by_rule(query, key, value, scores) for query, key, value in parts])
        return torch.cat([causal_attention(*part) for part in parts])


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence attends to itself: [L, heads, head_dim] each, fewer heads in key and value."""
    query, key, value = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


@torch.no_grad()
def make_batch(target: Decoder, head: Eagle3Head, conversations: Conversations, which: Sequence[int]) -> TrainingBatch:
    """Run the target over conversations; target i of an answer is drafted at step j by that answer's row i - j."""
    starts, lengths = conversations.starts[which], conversations.lengths[which]
    prompts = conversations.prompt_lengths[which]
    rows = np.concatenate([np.arange(n) for n in lengths])  # within their conversations
    tokens = np.concatenate(
        [conversations.token_ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    )
    ends = np.cumsum(lengths)
    spans = list(zip(ends - lengths + prompts, ends - 1, strict=True))
    targets = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(target.device)
    counts = torch.tensor([stop - start for start, stop in spans])
    token_ids, positions = (torch.from_numpy(array).long().to(target.device) for array in (tokens, rows))
    hidden, features = target.run(token_ids, positions, PlainAttention(lengths.tolist()), head.aux_layers)
    log_p = []
    for some in hidden[targets].split(_ROWS_AT_ONCE):
        logits = target.logits(some).float()
        log_p.append(logits[:, head.draft_ids] - logits.logsumexp(-1, keepdim=True))
    return TrainingBatch(
        lengths=tuple(lengths.tolist()),
        answer_starts=tuple((prompts - 1).tolist()),
        token_ids=token_ids,
        features=features,
        log_p=torch.cat(log_p),
        next_ids=token_ids[targets + 1],
        depths=torch.cat([torch.arange(count) for count in counts.tolist()]).to(target.device),
        temperatures=torch.from_numpy(conversations.temperatures[which]).repeat_interleave(counts).to(target.device),
    )
