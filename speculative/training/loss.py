"""A head's training objective: KL to the target's distribution, then the acceptance probability; in closed form, slice
by slice."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculative.training.unrolling import TrainingBatch

# Of the float32 distributions. What fits a core's cache is not read from memory again; a GPU wants fewer, larger
# kernels.
_TARGETS_AT_ONCE = {"cpu": 32, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The target's distribution on the draft vocabulary.

    logits: [A, draft_vocab] in the products' type.
    log_z: [A] float32.
    """

    logits: Tensor
    log_z: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, weight: Tensor) -> "TargetDistribution":
        """At the batch's targets. `weight`: the target LM head's rows; products are made in its type."""
        return cls(functional.linear(batch.final.to(weight.dtype), weight), batch.log_z)

    def log_probs(self, rows: slice) -> Tensor:
        """[r, draft_vocab] float32; their exponentials sum to the draft vocabulary's share of the mass."""
        return self.logits[rows].float() - self.log_z[rows, None]


def distribution_slices(num_targets: int, device: torch.device) -> Iterator[slice]:
    """Slices of targets whose distributions are held in float32 at once."""
    size = _TARGETS_AT_ONCE.get(device.type, 32)
    for start in range(0, num_targets, size):
        yield slice(start, min(start + size, num_targets))


def draft_loss(
    hidden: Tensor, weight: Tensor, distribution: TargetDistribution, row_weights: Tensor, mix: float
) -> tuple[Tensor, Tensor]:
    """Weighted sum of (1 - mix) KL(p || q) + mix (1 - sum of min(p, q)), [], and the acceptance [J, A] float32.

    KL is over the draft vocabulary, with p renormalized there; the second term, the probability of rejection, takes p
    as it is. Logits are never all held in float32: slice by slice, they are replaced by their closed-form gradient.

    Args:
        hidden: [J, A, H] after the final norm.
        weight: [draft_vocab, H] of the draft LM head.
        distribution: the target's, at the A targets; products are made in the type of its logits.
        row_weights: [J, A] float32; 0 where there is nothing to learn.
        mix: from 0 (KL) to 1 (acceptance).
    """
    loss, acceptance = _DraftLoss.apply(hidden, weight, distribution, row_weights, mix)  # type: ignore[no-untyped-call]
    return loss, acceptance


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, distribution: TargetDistribution, row_weights: Tensor, mix: float
    ) -> tuple[Tensor, Tensor]:
        rows, matrix = hidden.to(distribution.logits.dtype), weight.to(distribution.logits.dtype)
        grads = functional.linear(rows, matrix)  # [J, A, draft_vocab]: the logits, overwritten by the gradient
        acceptance = torch.empty_like(row_weights)
        loss = torch.zeros((), device=hidden.device)
        for run in distribution_slices(rows.shape[1], rows.device):
            wanted = _Wanted.of(distribution.log_probs(run))
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
        wanted = ctx.needs_input_grad[1]  # not if the LM head is the target's
        by_weight = (flat.T @ rows.flatten(0, 1)).float() * outputs[0] if wanted else None
        return (grads @ matrix).float() * outputs[0], by_weight, None, None, None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A slice's targets, shared by all its drafts.

    p: [r, D] of the draft vocabulary.
    shares: [r, D] p renormalized.
    mass: [r, 1] of p.
    entropy: [r, 1] of the shares, nats.
    """

    p: Tensor
    shares: Tensor
    mass: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, log_p: Tensor) -> "_Wanted":
        p = log_p.exp()
        mass = p.sum(-1, keepdim=True)
        entropy = mass.log() - (p * log_p).sum(-1, keepdim=True) / mass
        return cls(p, p / mass, mass, entropy)


def _loss_and_gradient(wanted: _Wanted, logits: Tensor, weights: Tensor, mix: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: weighted loss [r, 1], its gradient by the logits [r, D], and the acceptance [r, 1].

    Works in place on the logits: at this size allocating memory costs more than arithmetic.
    """
    log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
    kl = -(wanted.shares * log_q).sum(-1, keepdim=True) - wanted.entropy
    q = log_q.exp_()
    accepted = torch.minimum(wanted.p, q).sum(-1, keepdim=True)
    losses = weights * ((1 - mix) * kl + mix * (1 - accepted))
    if mix == 0:
        return losses, q.sub_(wanted.shares).mul_(weights), accepted
    rising = (q < wanted.p) * q  # where raising q raises acceptance
    grad = q.mul_(weights * (1 - mix + mix * rising.sum(-1, keepdim=True)))
    grad.addcmul_(wanted.shares, weights, value=mix - 1).addcmul_(rising, weights, value=-mix)
    return losses, grad, accepted


def step_weights(depths: Tensor, num_steps: int, decay: float) -> Tensor:
    """Each draft's weight in the loss: [num_steps, A] float32, decay^step, 0 where no row drafts the target."""
    steps = torch.arange(num_steps, device=depths.device)[:, None]
    weights = torch.where(depths[None, :] >= steps, decay**steps, 0.0)
    return weights / weights.sum().clamp(min=1e-9)
