"""Block verification: the round's drafts are judged together, and on average more of them survive.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (2403.10444). With p and q along the drafts:

    rho_0 = 1, rho_i = min(1, rho_{i-1} p_i(x_i) / q_i(x_i))
    M_i = sum over y of (rho_i p_{i+1}(y) - q_{i+1}(y))+
    h_i = M_i / (M_i + 1 - rho_i) for i < n, h_n = rho_n (0/0 counts as 1)
    tau = the largest i with u_i < h_i, 0 if there is none

tau drafts are accepted, then a token is drawn from (rho_tau p_{tau+1} - q_{tau+1})+. It does not stop at the first
failure, so every coin of the round counts: they are keyed by the round, and never seen again in the next one.
"""

import torch
from torch import Tensor

from speculative.verification.base import DrawLast, VerifyInput, VerifyOutput, draw_last
from speculative.verification.draft_probs import PointMass


def verify_block(step: VerifyInput, last_token: DrawLast = draw_last) -> VerifyOutput:
    """Accept as many drafts as the largest successful coin says; `last_token` draws what follows them."""
    rho = running_ratio(step)  # [R]; row i of an entry holds rho_i
    passes = (step.accept_uniforms < survival(step, rho)) | (step.offsets == 0)  # tau = 0 needs no coin
    reached = torch.where(passes, step.offsets, 0)
    num_accepted = torch.zeros_like(step.counts).scatter_reduce(0, step.entries, reached, "amax")
    final_rows = step.first_rows + num_accepted
    after_first = torch.where(step.offsets > 0, rho, 0.0)
    return VerifyOutput(
        num_accepted=num_accepted,
        token_ids=last_token(step, final_rows, rho[final_rows]),
        expected_accepted=torch.zeros_like(step.counts, dtype=rho.dtype).scatter_add(0, step.entries, after_first),
    )


def running_ratio(step: VerifyInput) -> Tensor:
    """[R] rho_i in row i: how much of the target's mass the drafts so far are entitled to."""
    p, q = step.p_of_drafts(), step.q_of_drafts()
    ratio = torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0.0)
    rho = torch.ones_like(ratio)
    for offset in range(1, int(step.offsets.max()) + 1):
        after = (rho * ratio).clamp(max=1.0).roll(1)  # of the row before
        rho = torch.where(step.offsets == offset, after, rho)
    return rho


def survival(step: VerifyInput, rho: Tensor) -> Tensor:
    """[R] h_i in row i, given rho [R]."""
    if isinstance(step.draft_probs, PointMass):
        mass = rho * (1 - step.p_of_drafts())  # no matrix needs to be written
    else:
        rows = torch.arange(step.probs.shape[0], device=rho.device)
        mass = (rho[:, None] * step.probs - step.q_at(rows)).clamp(min=0).sum(dim=-1)
    denominator = mass + 1 - rho
    within = torch.where(denominator > 0, mass / denominator.clamp(min=torch.finfo(rho.dtype).tiny), 1.0)
    return torch.where(step.judged, within, rho)
