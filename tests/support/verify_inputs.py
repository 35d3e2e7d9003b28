"""Steps to verify, made of rows in a row."""

import torch
from torch import Tensor

from speculative.sampling.draft_probs import DraftProbs, Drawn, PointMass
from speculative.sampling.probs import draw
from speculative.sampling.verification import VerifyInput


def verify_input(
    probs: Tensor,
    drafts: Tensor,
    draft_probs: DraftProbs,
    accept_uniforms: Tensor | float = 0.5,
    sample_uniforms: Tensor | float = 0.5,
) -> VerifyInput:
    """A step whose rows judge `drafts` [N], where -1 ends each entry; a float stands for the uniforms of all rows."""
    rows, is_last = torch.arange(len(drafts)), drafts < 0
    entries = is_last.cumsum(0) - is_last.long()
    num_rows = entries.bincount()
    first_rows = num_rows.cumsum(0) - num_rows
    accept_uniforms, sample_uniforms = (
        torch.as_tensor(uniforms, dtype=torch.float64).expand(len(drafts)).clone()
        for uniforms in (accept_uniforms, sample_uniforms)
    )
    return VerifyInput(
        probs=probs, draft_probs=draft_probs, drafts=drafts, packed=rows - entries, entries=entries,
        offsets=rows - first_rows[entries], first_rows=first_rows, counts=num_rows - 1, accept_uniforms=accept_uniforms,
        sample_uniforms=sample_uniforms, seeds=rows, positions=rows,
    )  # fmt: skip


def rounds_of_one_draft(p: Tensor, q: Tensor, noise: torch.Generator, *, deterministic: bool) -> VerifyInput:
    """Rounds of one draft each, whose p and q are [N, V]: the likeliest token, or drawn from q."""
    num_rounds = len(p)
    drafts = draw(q, torch.rand(num_rounds, generator=noise, dtype=torch.float64))
    drafts = p.argmax(-1) if deterministic else drafts
    return verify_input(
        p.repeat_interleave(2, 0),
        torch.where(torch.arange(2 * num_rounds) % 2 == 0, drafts.repeat_interleave(2), -1),
        PointMass() if deterministic else Drawn(q),
        *torch.rand((2, 2 * num_rounds), generator=noise, dtype=torch.float64),
    )
