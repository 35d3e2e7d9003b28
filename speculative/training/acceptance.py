"""Acceptance rates of a head's drafts, measured on answers it was not trained on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.training.loss import TargetDistribution, distribution_slices
from speculative.training.unrolling import TrainingBatch

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a head on held-out answers; one entry per draft position.

    acceptance: mean of the sum of min(p, q) at T = 1, prefix and earlier drafts true.
    top1: share of positions of greedy answers at which the head's likeliest token is the answer's next.
    length_t1: tokens a round with as many drafts, the one after them included, at T = 1; None without such answers.
    length_t0: the same of greedy answers.
    """

    acceptance: tuple[float, ...]
    top1: tuple[float, ...] | None
    length_t1: float | None
    length_t0: float | None
    num_targets: int


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Per draft step and target: [J, A] each.

    ratio: min(1, q/p) of the answer's next token, the chance that it would be accepted as a draft (in the mean over
        drafts).
    hit: whether it is the head's likeliest token.
    """

    acceptance: Tensor
    ratio: Tensor
    hit: Tensor
    depths: Tensor  # [A]
    temperatures: Tensor  # [A]


def judge(
    hidden: Tensor, weight: Tensor, distribution: TargetDistribution, ids: Tensor, batch: TrainingBatch
) -> HeadAcceptance:
    """Compare a head's drafts with the target's distribution.

    Args:
        hidden: [J, A, H] after the final norm.
        weight: [W, H] of the LM head that it drafts through.
        distribution: the target's on the same tokens.
        ids: [W] int64, these tokens.
        batch: the A targets.
    """
    num_steps, num_targets = hidden.shape[:2]
    acceptance, ratio, hit = (hidden.new_empty(num_steps, num_targets, dtype=torch.float32) for _ in range(3))
    draft_of = ids.new_full((int(torch.maximum(ids.max(), batch.next_ids.max())) + 1,), -1)
    draft_of[ids] = torch.arange(len(ids), device=ids.device)
    next_drafts = draft_of[batch.next_ids]  # -1: never drafted
    logits = functional.linear(hidden.to(distribution.logits.dtype), weight.to(distribution.logits.dtype))
    for run in distribution_slices(num_targets, hidden.device):
        log_p, wanted = distribution.log_probs(run), next_drafts[run, None]
        known = wanted >= 0
        for step in range(num_steps):
            log_q = logits[step, run].float().log_softmax(-1)
            acceptance[step, run] = torch.minimum(log_p, log_q).exp().sum(-1)
            ratios = (log_q - log_p).gather(1, wanted.clamp(min=0)).clamp(max=0).exp()
            ratio[step, run] = torch.where(known, ratios, 0.0).squeeze(1)
            hit[step, run] = (log_q.argmax(-1, keepdim=True) == wanted).float().squeeze(1)
    return HeadAcceptance(acceptance, ratio, hit, batch.depths, batch.temperatures)


def summary(parts: list[HeadAcceptance]) -> Acceptance:
    """The means over all targets of the parts."""
    num_steps = len(parts[0].acceptance)
    acceptance, ratio, hit = (
        torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("acceptance", "ratio", "hit")
    )
    depths, temperatures = (torch.cat([getattr(part, name) for part in parts]) for name in ("depths", "temperatures"))
    drafted = depths[None, :] >= torch.arange(num_steps, device=depths.device)[:, None]
    greedy, own_distribution = temperatures == 0, temperatures == 1
    everywhere = torch.ones_like(greedy)
    return Acceptance(
        acceptance=_means(acceptance, drafted, own_distribution if own_distribution.any() else everywhere),
        top1=_means(hit, drafted, greedy) if greedy.any() else None,
        length_t1=_length(ratio, depths, own_distribution) if own_distribution.any() else None,
        length_t0=_length(hit, depths, greedy) if greedy.any() else None,
        num_targets=len(depths),
    )


def _means(values: Tensor, drafted: Tensor, where: Tensor) -> tuple[float, ...]:
    counted = drafted & where
    return tuple(((values * counted).sum(1) / counted.sum(1).clamp(min=1)).tolist())


def _length(ratio: Tensor, depths: Tensor, where: Tensor) -> float:
    """Tokens a round over the chosen answers, the one after the drafts included: as an engine counts, tokens by rounds.

    The answer's token x was drawn from p, and min(1, q(x)/p(x)) is the chance that its draft was accepted, given that x
    came of it. So from any target on, the mean number of rounds to the answer's end follows from those behind it.
    """
    chances = ratio.double().cpu().numpy()
    starts = np.flatnonzero(depths.cpu().numpy() == 0)
    stops = np.append(starts[1:], len(depths))
    chosen = where.cpu().numpy()
    tokens, rounds = 0, 0.0
    for start, stop in zip(starts, stops, strict=True):
        if chosen[start]:
            tokens += stop - start
            rounds += _rounds(chances[:, start:stop])
    return float(tokens / rounds)


def _rounds(chances: Floats) -> float:
    """The mean number of rounds that an answer takes; chances: [J, n] of step j's draft of target i to be accepted."""
    num_steps, num_targets = chances.shape
    needed = np.zeros(num_targets + num_steps + 1)  # from each target on; none behind the end
    for first in range(num_targets - 1, -1, -1):
        reached = needed[first] = 1.0
        for step in range(min(num_steps, num_targets - first)):
            accepted = reached * chances[step, first + step]
            needed[first] += (reached - accepted) * needed[first + step + 1]
            reached = accepted
        needed[first] += reached * needed[first + min(num_steps, num_targets - first) + 1]
    return float(needed[0])
