"""A head's training objective: KL to the target's distribution, then the probability of acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a head on held-out answers; one entry per draft position.

    greedy: share of positions of greedy answers at which the head's likeliest token is the answer's next.
    """

    sampled: tuple[float, ...]  # mean of the sum of min(p, q) at T = 1, prefix and earlier drafts true
    greedy: tuple[float, ...]


def draft_log_probs(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A head's log q, [A, D] float32, from [A, H] after its final norm and the [D, H] of its LM head."""
    return functional.linear(hidden.to(dtype), weight.to(dtype)).float().log_softmax(-1)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The sum of min(p, q), [A]."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def losses(log_p: Tensor, log_q: Tensor, mix: float) -> Tensor:
    """(1 - mix) KL(p || q) + mix (1 - sum of min(p, q)), [A].

    KL is over the drafted tokens, with p renormalized there; the second term, the probability of rejection, takes p as
    it is.
    """
    log_shares = log_p - log_p.logsumexp(-1, keepdim=True)
    kl = (log_shares.exp() * (log_shares - log_q)).sum(-1)
    return kl if mix == 0 else (1 - mix) * kl + mix * (1 - acceptance(log_p, log_q))


def step_weights(depths: Tensor, num_steps: int, decay: float) -> Tensor:
    """Each draft's weight in the loss: [num_steps, A] float32, decay^step, 0 where no row drafts the target."""
    steps = torch.arange(num_steps, device=depths.device)[:, None]
    weights = torch.where(depths[None, :] >= steps, decay**steps, 0.0)
    return weights / weights.sum().clamp(min=1e-9)


def summary(accepted: Tensor, hit: Tensor, depths: Tensor, temperatures: Tensor) -> Acceptance:
    """The means over all targets; without answers at T = 1, or greedy ones, over all answers.

    Args:
        accepted: [J, A] of `acceptance`.
        hit: [J, A], whether the head's likeliest token comes next.
        depths: [A] as in the batches.
        temperatures: [A] as in the batches.
    """
    drafted = depths[None, :] >= torch.arange(len(accepted), device=depths.device)[:, None]
    rates = []
    for values, where in ((accepted, temperatures == 1), (hit, temperatures == 0)):
        counted = drafted & where if where.any() else drafted
        rates.append(tuple(((values * counted).sum(1) / counted.sum(1).clamp(min=1)).tolist()))
    return Acceptance(*rates)
