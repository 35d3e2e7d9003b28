"""Invariants of every step. A breach is reported by its kind (`INVARIANTS`) and fails its request; it never becomes a
token."""

from collections.abc import Sequence as Tokens

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.draft_probs import PointMass
from speculative.sampling.probs import SamplingRows
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.state.batch import Entry, Int64s, StepInput
from speculative.state.token_constraint import Bools

MASS_ROUNDING = 1e-3  # of a distribution's mass; float32 sums of a vocabulary are far closer
EDGE_ROUNDING = 1e-5  # of the mass that lies before a nucleus' edge

ROW_KINDS = ("not_finite", "no_token", "law", "q_zero", "p_zero", "support")
"""Invariants that `broken_rows` reports, in its order."""


def broken_rows(step: VerifyInput, verified: VerifyOutput, emitted: Tensor, highest: Tensor, outside: Tensor) -> Tensor:
    """[R] int64 on the device: 1 + the index into ROW_KINDS of what is broken at a row, 0 where nothing is.

    Rows behind a rejected draft decide nothing: only what their draft came from is looked at.

    Args:
        step: what was verified. verified: what became of it.
        emitted: [R] int64, the token emitted at each row.
        highest: [R] the highest logit after all rules: NaN or +inf wins the maximum, a row of -inf has none.
        outside: [R] bool, whether that token lies outside the filters of its request.
    """
    reached = step.offsets <= verified.num_accepted[step.entries]
    p_emitted = step.probs.gather(1, emitted[:, None])[:, 0]
    broken = torch.where(reached & outside, _code("support"), 0)
    broken = torch.where(reached & ~(p_emitted > 0), _code("p_zero"), broken)  # NaN is not above 0 either
    if not isinstance(step.draft_probs, PointMass):
        q = step.draft_probs.probs
        sane = ((q.sum(-1) - 1).abs() < MASS_ROUNDING) & (q.amin(-1) >= 0)
        of_row = sane[step.packed.clamp(max=q.shape[0] - 1)]
        broken = torch.where(step.judged & ~(step.q_of_drafts() > 0), _code("q_zero"), broken)
        broken = torch.where(step.judged & ~of_row, _code("law"), broken)
    broken = torch.where(reached & (highest == -torch.inf), _code("no_token"), broken)
    return torch.where(reached & ~(highest < torch.inf), _code("not_finite"), broken)


def outside_filters(adjusted: Tensor, params: SamplingRows, emitted: Tensor) -> Tensor:
    """[R] bool: rows whose token the request's filters cannot have let through; found without the filters' code.

    Args:
        adjusted: [R, V] logits after the requests' rules.
        params: temperature and filters of each row.
        emitted: [R] int64.
    """
    outside, filters = torch.zeros_like(params.greedy), params.filters
    if filters is None:
        return outside
    which = filters.rows
    distribution = torch.softmax(adjusted[which] / params.temperature[which], dim=-1)
    own = distribution.gather(1, emitted[which, None])
    likelier = distribution > own * (1 + EDGE_ROUNDING)
    too_far = likelier.sum(dim=-1) >= filters.top_k
    # Of all mass, of what is kept it is more. A float32 softmax of a large vocabulary does not add up to 1 so closely.
    above, total = ((distribution * rows).sum(dim=-1, dtype=torch.float64) for rows in (likelier, 1))
    too_far |= above > (filters.top_p + EDGE_ROUNDING) * total
    if filters.min_p is not None:
        too_far |= own[:, 0] < distribution.amax(dim=-1) * filters.min_p * (1 - 10 * EDGE_ROUNDING)
    outside[which] = too_far
    return outside


def forbidden_by_rules(
    entry: Entry, token_ids: Tokens[int], masks: list[Bools] | None, eos_token_ids: Tokens[int]
) -> bool:
    """Return whether a token breaks its request's own rules (allowed ids, bad words, min_tokens) or its structure."""
    sequence = entry.sequence
    if masks is not None and not all(mask[token] for mask, token in zip(masks, token_ids, strict=False)):
        return True
    if sequence.rules is None:
        return False
    allowed, output = sequence.rules.allowed, sequence.tokens[sequence.num_prompt :]
    if allowed is not None and not np.isin(token_ids, allowed).all():
        return True
    return any(
        token in sequence.rules.forbidden(output, token_ids[:index], eos_token_ids)
        for index, token in enumerate(token_ids)
    )


def misplaced(step_input: StepInput) -> Int64s:
    """[E] whether rows of a sampled entry stand elsewhere than behind its tokens, or do not begin with its last one."""
    lengths = np.array([len(entry.sequence.tokens) for entry in step_input.sampled_entries], np.int64)
    pending = np.array([entry.sequence.tokens[-1] for entry in step_input.sampled_entries], np.int64)
    rows, owners = step_input.verify_rows, step_input.verify_entries
    wrong = step_input.positions[rows] != lengths[owners] - 1 + step_input.offsets
    wrong |= (step_input.offsets == 0) & (step_input.input_ids[rows] != pending[owners])
    return np.bincount(owners, wrong, minlength=len(lengths)).astype(np.int64)


def _code(kind: str) -> int:
    return 1 + ROW_KINDS.index(kind)
