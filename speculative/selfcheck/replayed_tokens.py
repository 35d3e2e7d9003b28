"""The distribution that a teacher-forced pass finds for tokens that were served: what the calibration test works on."""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from speculative.request import SURPRISAL_CLIP_NATS, ReplayedToken, Request
from speculative.sampling.logits_processors import adjust
from speculative.sampling.ops import DistributionOps
from speculative.sampling.probs import SamplingRows
from speculative.selfcheck.draw_margins import Distributions, redraw
from speculative.state.batch import RowContext
from speculative.state.logit_constraints import rules_of
from speculative.state.token_constraint import TokenConstraint


def replayed_tokens(
    logits: Tensor,
    request: Request,
    start: int,
    constraint: TokenConstraint | None,
    eos_token_ids: Tokens[int],
    ops: DistributionOps,
    draft_logits: Mapping[int, Tensor] | None = None,
) -> tuple[ReplayedToken, ...]:
    """One row for each token that the logits [n, V] float32 predict.

    Args:
        logits: of the model, at n positions one after another.
        request: a scoring request; its parameters are those the tokens were sampled with.
        start: the first token predicted; what lies between `score_from` and it is output already.
        constraint: a fresh one, of the request's structure.
        eos_token_ids: tokens that end an answer.
        ops: of the engine.
        draft_logits: [V] float32, that the draft rejected before a token was sampled from, by row; where known.
    """
    tokens, num_prompt = request.prompt_token_ids, request.score_from or 0
    served = tokens[start : start + len(logits)]
    rules, output = rules_of(request.params, tokens[:num_prompt]), tokens[num_prompt:start]
    masks = [None] if constraint is None else constraint.allowed(output, served[:-1])
    # The rows as they were when these tokens were about to be emitted: they are their drafts.
    contexts = [
        RowContext(rules, output, served[:offset], masks[min(offset, len(masks) - 1)]) for offset in range(len(served))
    ]
    rows = SamplingRows.build([request.params] * len(served), logits.shape[1], logits.device)
    adjusted = adjust(logits, contexts, eos_token_ids)
    target = Distributions.of(adjusted, rows, ops.process)
    replayed = _rows(target, rows.temperature[:, 0], torch.from_numpy(np.array(served)).to(logits.device))
    draws = request.draws[start - num_prompt : start - num_prompt + len(served)]
    if not draws:
        return replayed
    drafted: dict[int, Distributions] = {}
    if draft_logits:
        rows = SamplingRows.build([request.params] * len(draft_logits), logits.shape[1], logits.device)
        drafter = Distributions.of(torch.stack(list(draft_logits.values())), rows, ops.process)
        drafted = dict(zip(draft_logits, drafter.each(), strict=True))
    redrawn = redraw(target, served, draws, request, drafted, ops.host)
    return tuple(replace(row, redrawn=own) for row, own in zip(replayed, redrawn, strict=True))


def _rows(target: Distributions, temperature: Tensor, token_ids: Tensor) -> tuple[ReplayedToken, ...]:
    """Place the tokens [n] that were served at temperatures [n] in their distributions."""
    token_ids = token_ids[:, None]
    scaled, kept, probs = target
    normaliser = kept.logsumexp(dim=-1)
    own = scaled.gather(1, token_ids)[:, 0]
    inside = kept.gather(1, token_ids)[:, 0] > -torch.inf
    edge = torch.where(kept > -torch.inf, kept, torch.inf).amin(dim=-1)
    logprob = own - normaliser  # just outside of an edge: as if it were inside
    surprisals = (normaliser[:, None] - kept).clamp(max=SURPRISAL_CLIP_NATS)
    columns = (
        logprob.exp(),
        probs.square().sum(dim=-1),
        (-logprob).clamp(max=SURPRISAL_CLIP_NATS),
        (probs * surprisals).sum(dim=-1),
        (kept.amax(dim=-1) - own) * temperature,
        torch.where(inside, 0.0, (edge - own) * temperature),
    )
    return tuple(ReplayedToken(*row) for row in torch.stack(columns, dim=1).double().cpu().tolist())
