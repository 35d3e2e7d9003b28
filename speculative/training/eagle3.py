"""Training of an EAGLE-3 head by training-time test: it learns on its own drafts, as it will be used.

Step 0 reads true features; step j reads the hidden state that step j - 1 gave for the same row, and attends to the
true-feature rows up to its own and to that row's earlier drafts, which is what serving gives it (Li et al., 2025,
arXiv 2503.01840, section 3). Tokens are the true ones throughout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from speculative.model.layers import DecoderLayer
from speculative.training.features import Features, causal_attention

# Of the laws in float32. What a core's cache holds is not read from memory again; a GPU wants fewer, larger kernels.
_TARGETS_AT_ONCE = {"cpu": 32, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Some conversations, packed: S tokens, of which A are targets (answer tokens after the first, but for the last).

    lengths: rows of each conversation, and answer_starts: the first row that drafts, both on the host.
    token_ids: [S] int64. aux: [S, 3 * target_hidden].
    final: [A, target_hidden], log_z: [A], next_ids: [A] int64: the target's law at each target and what came of it.
    depths: [A] int64, place of each target within its answer: how many rows can draft it.
    temperatures: [A] float32, of the answer.
    """

    lengths: tuple[int, ...]
    answer_starts: tuple[int, ...]
    token_ids: Tensor
    aux: Tensor
    final: Tensor
    log_z: Tensor
    next_ids: Tensor
    depths: Tensor
    temperatures: Tensor


def make_batch(features: Features, which: Sequence[int], device: torch.device) -> TrainingBatch:
    """Collect conversations; target i of an answer is drafted at step j by that answer's row i - j."""
    conversations = features.conversations
    starts = conversations.starts
    spans = [
        (int(starts[i]), int(starts[i] + conversations.lengths[i]), int(conversations.prompt_lengths[i])) for i in which
    ]
    targets = [range(start + prompt, stop - 1) for start, stop, prompt in spans]
    rows = torch.cat([torch.arange(start, stop) for start, stop, _ in spans])
    law_rows = torch.cat([torch.arange(one.start, one.stop) for one in targets])
    tokens = torch.from_numpy(conversations.token_ids)
    temperatures = [
        torch.full((len(one),), conversations.temperatures[i]) for i, one in zip(which, targets, strict=True)
    ]
    return TrainingBatch(
        lengths=tuple(stop - start for start, stop, _ in spans),
        answer_starts=tuple(prompt - 1 for _, _, prompt in spans),
        token_ids=tokens[rows].long().to(device),
        aux=features.aux[rows].to(device),
        final=features.final[law_rows].to(device),
        log_z=features.log_z[law_rows].to(device),
        next_ids=tokens[law_rows + 1].long().to(device),
        depths=torch.cat([torch.arange(len(one)) for one in targets]).to(device),
        temperatures=torch.cat(temperatures).to(device),
    )


def is_trainable(length: int, prompt_length: int) -> bool:
    """Whether a conversation has a target at all."""
    return prompt_length >= 1 and length - prompt_length >= 2


def draft_vocabulary(counts: np.ndarray[Any, np.dtype[np.int64]], size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent ids, ascending, [min(size, len(counts))] int64; those of `always` come first."""
    ranked = counts.copy()
    ranked[list(always)] = ranked.max() + 1
    kept = np.argsort(-ranked, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept)).long()


def initial_head(target: Decoder, draft_ids: Tensor) -> Eagle3Head:
    """A float32 head that starts from the target: its last layer, its norm, its LM head's rows of the draft vocabulary.

    The hidden state begins as the last of the three features; the token's half of query, key and value begins at zero.
    """
    config = _config_for(target.config, len(draft_ids))
    head = Eagle3Head(config, draft_ids.to(target.device), target.embedding, dtype=torch.float32)
    last = target.layers[-1]
    assert isinstance(last, DecoderLayer)
    size = target.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -size:].copy_(torch.eye(size))
    qkv = _plain(last.attention.qkv_proj.weight)
    head.attention.qkv_proj.weight.zero_()
    head.attention.qkv_proj.weight[:, size:].copy_(qkv)
    head.input_norm.weight.fill_(1.0)
    for ours, theirs in (
        (head.hidden_norm, last.input_norm),
        (head.mlp_norm, last.mlp_norm),
        (head.norm, target.norm),
        (head.attention.o_proj, last.attention.o_proj),
        (head.mlp.gate_up_proj, last.mlp.gate_up_proj),
        (head.mlp.down_proj, last.mlp.down_proj),
    ):
        ours.weight.copy_(_plain(theirs.weight))
    head.lm_head.weight.copy_(law_weight(target, draft_ids))
    return head


def law_weight(target: Decoder, draft_ids: Tensor) -> Tensor:
    """Rows of the target's LM head, [draft_vocab, target_hidden]: they give its law on the draft vocabulary."""
    return _plain(target.lm_head.weight)[draft_ids]


def drafted_hidden(head: Eagle3Head, batch: TrainingBatch, num_steps: int) -> Tensor:
    """What the head's final norm makes of each step's hidden states, aligned with the targets: [num_steps, A, hidden].

    Row [j, i] drafts target i at step j; where its answer has no row i - j (depths[i] < j) it means nothing.
    """
    device = batch.token_ids.device
    local = torch.cat([torch.arange(length - 1, device=device) for length in batch.lengths])
    starts = np.cumsum([0, *batch.lengths])
    rows = torch.cat([torch.arange(s, s + n - 1, device=device) for s, n in zip(starts, batch.lengths, strict=False)])
    attend = _DraftAttention(batch)
    fused = head.fuse(batch.aux[rows].to(head.fc.weight.dtype)).float()  # autocast or not, it runs on in float32
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

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        del layer
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


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """The target's law on the draft vocabulary. logits: [A, draft_vocab] in the products' type; log_z: [A] float32."""

    logits: Tensor
    log_z: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, weight: Tensor) -> "TargetLaw":
        """At the batch's targets. `weight`: see `law_weight`; products are made in its type."""
        return cls(functional.linear(batch.final.to(weight.dtype), weight), batch.log_z)

    def log_probs(self, rows: slice) -> Tensor:
        """[r, draft_vocab] float32; their exponentials sum to what the draft vocabulary holds of the mass."""
        return self.logits[rows].float() - self.log_z[rows, None]


def law_slices(num_targets: int, device: torch.device) -> Iterator[slice]:
    """Runs of targets whose laws are held in float32 at once."""
    size = _TARGETS_AT_ONCE.get(device.type, 32)
    for start in range(0, num_targets, size):
        yield slice(start, min(start + size, num_targets))


def draft_loss(
    hidden: Tensor, weight: Tensor, law: TargetLaw, row_weights: Tensor, mix: float
) -> tuple[Tensor, Tensor]:
    """Weighted sum of (1 - mix) KL(p || q) + mix (1 - sum of min(p, q)), [], and the acceptance [J, A] float32.

    KL is over the draft vocabulary, p made to sum to 1 there; the second term, the probability of rejection, takes p as
    it is. Logits are never held whole in float32: run after run, they are replaced by their gradient, in closed form.

    Args:
        hidden: [J, A, H] after the final norm.
        weight: [draft_vocab, H] of the draft LM head.
        law: the target's, at the A targets; products are made in the type of its logits.
        row_weights: [J, A] float32; 0 where there is nothing to learn.
        mix: from 0 (KL) to 1 (acceptance).
    """
    loss, acceptance = _DraftLoss.apply(hidden, weight, law, row_weights, mix)  # type: ignore[no-untyped-call]
    return loss, acceptance


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, law: TargetLaw, row_weights: Tensor, mix: float
    ) -> tuple[Tensor, Tensor]:
        rows, matrix = hidden.to(law.logits.dtype), weight.to(law.logits.dtype)
        grads = functional.linear(rows, matrix)  # [J, A, draft_vocab]: the logits, and in their place the gradient
        acceptance = torch.empty_like(row_weights)
        loss = torch.zeros((), device=hidden.device)
        for run in law_slices(rows.shape[1], rows.device):
            wanted = _Wanted.of(law.log_probs(run))
            for step in range(len(rows)):
                logits, weights = grads[step, run].to(torch.float32, copy=True), row_weights[step, run, None]
                losses, grad, accepted = _loss_and_gradient(wanted, logits, weights, mix)
                loss += losses.sum()
                grads[step, run] = grad
                acceptance[step, run] = accepted.squeeze(-1)
        ctx.save_for_backward(rows, matrix, grads)
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix, grads = ctx.saved_tensors
        flat = grads.flatten(0, 1)
        by_weight = (flat.T @ rows.flatten(0, 1)).float() * outputs[0]
        return (grads @ matrix).float() * outputs[0], by_weight, None, None, None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a run of targets asks of all its drafts. p: [r, D]; shares: p made to sum to 1; mass, entropy: [r, 1]."""

    p: Tensor
    shares: Tensor
    mass: Tensor
    entropy: Tensor  # of the shares, nats

    @classmethod
    def of(cls, log_p: Tensor) -> "_Wanted":
        p = log_p.exp()
        mass = p.sum(-1, keepdim=True)
        entropy = mass.log() - (p * log_p).sum(-1, keepdim=True) / mass
        return cls(p, p / mass, mass, entropy)


def _loss_and_gradient(wanted: _Wanted, logits: Tensor, weights: Tensor, mix: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: weighted loss [r, 1], its gradient by the logits [r, D], and the acceptance [r, 1].

    Works in the logits' own memory: at this size fresh memory costs more than arithmetic.
    """
    log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
    kl = -(wanted.shares * log_q).sum(-1, keepdim=True) - wanted.entropy
    q = log_q.exp_()
    accepted = torch.minimum(wanted.p, q).sum(-1, keepdim=True)
    losses = weights * ((1 - mix) * kl + mix * (1 - accepted))
    if mix == 0:
        return losses, q.sub_(wanted.shares).mul_(weights), accepted
    rising = (q < wanted.p) * q  # where more of q is more acceptance
    grad = q.mul_(weights * (1 - mix + mix * rising.sum(-1, keepdim=True)))
    grad.addcmul_(wanted.shares, weights, value=mix - 1).addcmul_(rising, weights, value=-mix)
    return losses, grad, accepted


def step_weights(depths: Tensor, num_steps: int, decay: float) -> Tensor:
    """What each draft counts in the loss: [num_steps, A] float32, decay^step, 0 where no row drafts the target."""
    steps = torch.arange(num_steps, device=depths.device)[:, None]
    weights = torch.where(depths[None, :] >= steps, decay**steps, 0.0)
    return weights / weights.sum().clamp(min=1e-9)


def _config_for(target: ModelConfig, draft_vocab_size: int) -> Eagle3Config:
    """A head of the target's own width; what Llama's layer does not have (norms of heads) is left out."""
    shape = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        rope_scaling=target.rope_scaling,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )
    return Eagle3Config(
        shape=shape,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=default_aux_layers(target.num_layers),
    )


def _plain(weight: Tensor) -> Tensor:
    """A weight as a matrix; those of a decoder packed for a CPU are unpacked."""
    return weight.to_dense() if weight.is_mkldnn else weight
