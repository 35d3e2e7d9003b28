"""How often what a head drafts would be accepted, measured on answers it was not trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from speculative.training.loss import TargetLaw, law_slices
from speculative.training.unrolling import TrainingBatch


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How a head does on held-out answers; one entry per draft position.

    acceptance: mean of the sum of min(p, q) at T = 1, prefix and earlier drafts true. top1: how often the head's
    likeliest token is the answer's next, on greedy answers. length_t1, length_t0: emitted tokens a round with as many
    drafts, the token after them included; None where the data has no answers at that temperature.
    """

    acceptance: tuple[float, ...]
    top1: tuple[float, ...] | None
    length_t1: float | None
    length_t0: float | None
    num_targets: int


@dataclass(frozen=True, slots=True)
class Judged:
    """Per draft step and target: [J, A] each. ratio: min(1, q/p) of the answer's next token, the chance that it would
    be accepted as a draft (in the mean over drafts); hit: whether it is the head's likeliest token."""

    acceptance: Tensor
    ratio: Tensor
    hit: Tensor
    depths: Tensor  # [A]
    temperatures: Tensor  # [A]


def judge(hidden: Tensor, weight: Tensor, law: TargetLaw, ids: Tensor, batch: TrainingBatch) -> Judged:
    """Compare a head's drafts with the target's law.

    Args:
        hidden: [J, A, H] after the final norm.
        weight: [W, H] of the LM head that it drafts through.
        law: the target's on the same tokens.
        ids: [W] int64, these tokens.
        batch: the A targets.
    """
    num_steps, num_targets = hidden.shape[:2]
    acceptance, ratio, hit = (hidden.new_empty(num_steps, num_targets, dtype=torch.float32) for _ in range(3))
    draft_of = ids.new_full((int(torch.maximum(ids.max(), batch.next_ids.max())) + 1,), -1)
    draft_of[ids] = torch.arange(len(ids), device=ids.device)
    next_drafts = draft_of[batch.next_ids]  # -1: never drafted
    logits = functional.linear(hidden.to(law.logits.dtype), weight.to(law.logits.dtype))
    for run in law_slices(num_targets, hidden.device):
        log_p, wanted = law.log_probs(run), next_drafts[run, None]
        known = wanted >= 0
        for step in range(num_steps):
            log_q = logits[step, run].float().log_softmax(-1)
            acceptance[step, run] = torch.minimum(log_p, log_q).exp().sum(-1)
            ratios = (log_q - log_p).gather(1, wanted.clamp(min=0)).clamp(max=0).exp()
            ratio[step, run] = torch.where(known, ratios, 0.0).squeeze(1)
            hit[step, run] = (log_q.argmax(-1, keepdim=True) == wanted).float().squeeze(1)
    return Judged(acceptance, ratio, hit, batch.depths, batch.temperatures)


def summary(parts: list[Judged]) -> Acceptance:
    """The means over all targets of the parts."""
    num_steps = len(parts[0].acceptance)
    acceptance, ratio, hit = (
        torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("acceptance", "ratio", "hit")
    )
    depths, temperatures = (torch.cat([getattr(part, name) for part in parts]) for name in ("depths", "temperatures"))
    drafted = depths[None, :] >= torch.arange(num_steps, device=depths.device)[:, None]
    greedy, own_law = temperatures == 0, temperatures == 1
    everywhere = torch.ones_like(greedy)
    return Acceptance(
        acceptance=_means(acceptance, drafted, own_law if own_law.any() else everywhere),
        top1=_means(hit, drafted, greedy) if greedy.any() else None,
        length_t1=_length(acceptance, ratio, drafted, own_law) if own_law.any() else None,
        length_t0=_length(hit, hit, drafted, greedy) if greedy.any() else None,
        num_targets=len(depths),
    )


def _means(values: Tensor, drafted: Tensor, where: Tensor) -> tuple[float, ...]:
    counted = drafted & where
    return tuple(((values * counted).sum(1) / counted.sum(1).clamp(min=1)).tolist())


def _length(acceptance: Tensor, ratio: Tensor, drafted: Tensor, where: Tensor) -> float:
    """Mean emitted tokens of a round: 1 + a0 + r0 a1 + r0 r1 a2 + ..., along the row that drafts them.

    The answer's token x was drawn from p, and E over x of min(1, q(x)/p(x)) f(x) is the sum of min(p, q)(x) f(x): the
    ratios stand for having accepted x. Only rounds whose drafts all lie within the answer count.
    """
    num_steps, num_targets = acceptance.shape
    num_rounds = num_targets - num_steps + 1
    if num_rounds < 1:
        return 1.0
    last = num_steps - 1
    whole = drafted[last, last:] & where[last:]  # the round's last draft belongs to the answer of its first
    length, reached = torch.ones(num_rounds, device=where.device), torch.ones(num_rounds, device=where.device)
    for step in range(num_steps):
        aligned = slice(step, step + num_rounds)
        length += reached * acceptance[step, aligned]
        reached = reached * ratio[step, aligned]
    return float(length[whole].mean()) if whole.any() else 1.0
