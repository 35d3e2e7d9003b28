"""The terms of a step: numbers whose mean is 0 if drafts come from q and what is emitted follows p.

With x ~ q drafted, A whether it was accepted, y emitted, r the residual distribution, alpha = sum(min(p, q)), S_p =
sum(p^2), each Z lies within [-1, 1] and has conditional mean 0:

    a        A - alpha                                      token-wise, where the round came
    a_prime  min(1, p(x)/q(x)) - alpha                      every sampled draft
    b        A - min(1, p(x)/q(x))                          token-wise, where the round came
    c        min(1, q(y)/p(y)) - alpha                      what is emitted where something was drafted
    d        p(y) - S_p                                     all that is emitted
    e        q(x) - S_q                                     every sampled draft
    f        min(1, q(y)/r(y)) - sum(min(r, q))             what replaces a sampled draft
    g        2 (sum(r(z < y)) + r(y)/2) - 1                 the last token of a round; where nothing is rejected, r = p
    r        r(y) - sum(r^2)                                what replaces a deterministic draft

The coupled verifier chooses x and y with one noise, so it has no a, b, f, g; and since a position that is drafted again
sees its noise again, its drafts count only where the round came. Of a tree of drafts only d is left: which of them is
judged depends on what the target chose. Deterministic drafts (point masses) leave a = b = c and make a_prime and e
vanish.

Nothing is taken where the outcome is as good as certain (`LEAST_SPREAD`, `LEAST_RESIDUAL`): it follows from p and q
alone, before anything is drawn from them, and what is left of such a term is rounding. Where a term is certain for
another reason (p is 0.37 q on all of q's tokens, or uniform over some), it differs from its mean by rounding alone, and
counts as 0. What rounding may leave after that is less than `ROUNDING`, and the bets are against a mean beyond it.

The chances are computed here from p and q, not taken from the verifier that is to be watched.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.sampling.draft_probs import Candidates, Drawn, PointMass
from speculative.sampling.token_wise import overlap
from speculative.sampling.verification import VerifyInput, VerifyOutput, residual
from speculative.selfcheck.eprocess import ROUNDING, STAKES
from speculative.state.batch import Terms

Floats = np.ndarray[Any, np.dtype[np.float64]]

_RUN = 256  # tokens; far fewer than a vocabulary, far more than nothing
CHECKS_OF_SAMPLED = ("d", "c", "a_prime", "e", "a", "b", "f", "g")  # of token-wise verification, in the kernels' order
CHECKS_OF_DETERMINISTIC = ("d", "a", "r", "g")  # the same where drafts are deterministic
COUPLED_CHECKS_OF_SAMPLED = ("coupled_d", "coupled_c", "coupled_a_prime", "coupled_e")
COUPLED_CHECKS_OF_DETERMINISTIC = ("coupled_d", "coupled_c")
LEAST_RESIDUAL = 0.1  # of p, that is left after a rejection; what rounding leaves of less is no distribution
LEAST_SPREAD = 0.01  # that the sum of squares of p, q or r lacks of 1, and alpha or a draft's chance of 0 and 1
EQUAL = 4e-6  # two numbers that differ by this share of the greater are equal but for rounding


@dataclass(frozen=True, slots=True)
class TermScope:
    """The part of a step that the terms are taken of.

    counted: [E] bool, entries whose terms count: chosen before anything of the step was drawn.
    coupled: [E] bool, entries that the coupled verifier judges; None where it judges none.
    all_coupled: it is known to judge all of them.
    """

    counted: Tensor
    coupled: Tensor | None = None
    all_coupled: bool = False


@dataclass(frozen=True, slots=True)
class _Facts:
    """Quantities that several terms are made of, per row: [R]."""

    overlap: Tensor  # sum(min(p, q)), or alpha
    chance: Tensor  # min(1, p(x)/q(x))
    p_draft: Tensor
    q_draft: Tensor
    p_emitted: Tensor
    q_emitted: Tensor
    square_p: Tensor  # sum(p^2)
    square_q: Tensor
    accepted: Tensor  # bool
    reached: Tensor  # bool: all accepted rows and the one after
    alive: Tensor  # bool: p was not 0 at an earlier draft of the round


def take_terms(step: VerifyInput, verified: VerifyOutput, emitted: Tensor, scope: TermScope) -> Terms:
    """The terms of a step.

    Args:
        step: what the verifier was to see.
        verified: what it decided.
        emitted: [R] int64, the token emitted at each row; anything where none was.
        scope: what counts.
    """
    facts = _gather_facts(step, verified, emitted)
    counts = scope.counted[step.entries] & facts.alive
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if scope.coupled is not None:
        coupled = scope.coupled[step.entries]
        for name, (values, where) in _of_distributions(step, facts, chosen_twice=False).items():
            found[f"coupled_{name}"] = (values, where & counts & coupled & facts.reached)
        counts = counts & ~coupled
    rows = torch.full((3, len(emitted)), torch.nan, dtype=torch.float64, device=emitted.device)
    if not scope.all_coupled:
        of_rejection, rows = _of_rejection(step, verified, emitted, facts)
        for name, (values, where) in of_rejection.items():
            found[name] = (values, where & counts)
        if scope.coupled is not None:
            rows = torch.where(coupled, torch.nan, rows)
    # Of the drafts in a tree no more would have been accepted: the target's choice was among them or not.
    achievable = facts.accepted.double() if isinstance(step.draft_probs, Candidates) else facts.overlap
    reached_drafts = torch.where(facts.reached & step.judged, achievable, 0.0)
    total = reached_drafts.nan_to_num().sum(dtype=torch.float64)
    counted = torch.stack([where & values.isfinite() for values, where in found.values()])  # [C, R]
    values = torch.where(counted, torch.stack([values for values, _ in found.values()]).double().clamp(-1, 1), 0.0)
    stakes = stakes_on(values.device)[:, None]
    gains = torch.log1p(stakes * values[:, None] - stakes.abs() * ROUNDING)  # [C, len(STAKES), R]
    parts = (
        counted.sum(-1).double(),
        values.clamp(min=0).sum(-1),
        (-values).clamp(min=0).sum(-1),
        values.square().sum(-1),
    )
    sums = torch.cat([(gains * counted[:, None]).sum(dim=-1), torch.stack(parts, dim=1)], dim=1)
    return Terms(tuple(found), sums, total, rows)


def _gather_facts(step: VerifyInput, verified: VerifyOutput, emitted: Tensor) -> _Facts:
    p_draft, q_draft = step.p_of_drafts(), step.q_of_drafts()
    num_accepted = verified.num_accepted[step.entries]
    q = step.draft_probs
    if isinstance(q, PointMass):
        shared, square_q = p_draft, step.judged.to(p_draft.dtype)
    else:
        squares = _sum_of_squares(q.probs)[step.packed.clamp(max=q.probs.shape[0] - 1)]
        shared, square_q = overlap(step, p_draft), torch.where(step.judged, squares, 0.0)
    return _Facts(
        overlap=shared,
        chance=(p_draft / q_draft.clamp(min=torch.finfo(q_draft.dtype).tiny)).clamp(max=1.0),
        p_draft=p_draft,
        q_draft=q_draft,
        p_emitted=step.probs.gather(1, emitted[:, None])[:, 0],
        q_emitted=step.draft_probs.of_tokens(emitted, step.drafts, step.packed, step.probs.shape[1]),
        square_p=_sum_of_squares(step.probs),
        square_q=square_q,
        accepted=step.offsets < num_accepted,
        reached=step.offsets <= num_accepted,
        alive=step.offsets <= step.leading(p_draft > 0)[step.entries],
    )


def _of_distributions(step: VerifyInput, facts: _Facts, *, chosen_twice: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms that hold for every verifier, and where. `chosen_twice`: c of deterministic drafts is reported as a
    already."""
    found = {"d": (_minus(facts.p_emitted, facts.square_p), facts.reached & _is_open(facts.square_p))}
    drawn = isinstance(step.draft_probs, Drawn)
    judged = step.judged & _is_undecided(facts.overlap)
    if drawn or not (chosen_twice or isinstance(step.draft_probs, Candidates)):
        ratio = facts.q_emitted / facts.p_emitted.clamp(min=torch.finfo(facts.p_emitted.dtype).tiny)
        found["c"] = (_minus(ratio.clamp(max=1.0), facts.overlap), judged & facts.reached & (facts.p_emitted > 0))
    if drawn:
        found["a_prime"] = (_minus(facts.chance, facts.overlap), judged)
        found["e"] = (_minus(facts.q_draft, facts.square_q), step.judged & _is_open(facts.square_q))
    return found


def _of_rejection(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, facts: _Facts
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """The terms of rejection sampling, and where they hold; and the rows of `Terms`."""
    found = _of_distributions(step, facts, chosen_twice=True)
    accepted, asked = facts.accepted.to(facts.overlap.dtype), step.judged & facts.reached
    found["a"] = (accepted - facts.overlap, asked & _is_undecided(facts.overlap))
    if not isinstance(step.draft_probs, PointMass):
        found["b"] = (accepted - facts.chance, asked & _is_undecided(facts.chance))
    last = facts.reached & ~facts.accepted
    if isinstance(step.draft_probs, PointMass):
        of_last, where, place = _of_chosen(step, verified, emitted, facts, last)
    else:
        of_last, where, place = _of_drawn(step, verified, emitted, last)
    rows = torch.stack([facts.chance, *place]).double()
    return found | of_last, torch.where(torch.stack([asked, where, where]), rows, torch.nan)


Place = tuple[Tensor, Tensor]
"""Masses of each round's last token in the distribution that it is drawn from: before it, and its own."""


def _of_drawn(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, last: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Place]:
    """f and g; `last`: [R] bool, the last row that each round came to. Then where the place is known, and the place."""
    rows = step.first_rows + verified.num_accepted
    q = step.q_at(rows)
    left = residual(step.probs[rows], q)
    total = left.sum(dim=-1, keepdim=True)
    distribution = left / total
    y = emitted[rows, None]
    r_y, q_y = distribution.gather(1, y)[:, 0], q.gather(1, y)[:, 0]
    ratio = (q_y / r_y.clamp(min=torch.finfo(r_y.dtype).tiny)).clamp(max=1.0)
    replaced = _minus(ratio, torch.minimum(distribution, q).sum(dim=-1))
    below = _mass_below(distribution, y)
    enough = last & _at_rows(rows, total[:, 0] > LEAST_RESIDUAL, last)
    is_open = enough & _at_rows(rows, _is_open(_sum_of_squares(distribution)), last)
    terms = {
        "f": (_at_rows(rows, replaced, last), is_open & step.judged),
        "g": (_at_rows(rows, _minus(2 * below + r_y, torch.ones_like(r_y)), last), is_open),
    }
    return terms, enough, (_at_rows(rows, below, last), _at_rows(rows, r_y, last))


def _of_chosen(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, facts: _Facts, last: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Place]:
    """r and g, and as `_of_drawn`. The residual distribution is p without the draft x, so no matrix is written for
    it."""
    rows = step.first_rows + verified.num_accepted
    left = 1 - facts.p_draft
    square = (facts.square_p - facts.p_draft**2) / left**2
    below = _at_rows(rows, _mass_below(step.probs[rows], emitted[rows, None]), last)
    below = (below - torch.where(step.drafts < emitted, facts.p_draft, 0.0)) / left
    own = torch.where(emitted == step.drafts, 0.0, facts.p_emitted / left)
    enough = last & (left > LEAST_RESIDUAL)
    is_open = enough & _is_open(square) & (emitted != step.drafts)
    terms = {
        "r": (_minus(own, square), is_open & step.judged),
        "g": (_minus(2 * below + own, torch.ones_like(own)), is_open),
    }
    return terms, enough, (below, own)


def _is_open(certain: Tensor) -> Tensor:
    """Return whether what is certain at 1 may still turn out one way or the other; not where it is NaN."""
    return certain < 1 - LEAST_SPREAD


def _is_undecided(chance: Tensor) -> Tensor:
    """Return whether what has this chance may turn out one way or the other; not where it is NaN."""
    return (chance > LEAST_SPREAD) & _is_open(chance)


def _minus(values: Tensor, mean: Tensor) -> Tensor:
    """Return what values differ from their mean by; 0 where that is rounding."""
    difference = values - mean
    return torch.where(difference.abs() <= EQUAL * torch.maximum(values, mean), 0.0, difference)


def _mass_below(distribution: Tensor, token_ids: Tensor) -> Tensor:
    """[E] the mass that distributions [E, V] have on the tokens before token_ids [E, 1]: whole runs of them, then the
    rest."""
    num_runs = distribution.shape[1] // _RUN
    runs = distribution[:, : num_runs * _RUN].unflatten(1, (num_runs, _RUN)).sum(dim=-1).cumsum(dim=-1)
    whole = (token_ids // _RUN).clamp(max=num_runs)
    rest = whole * _RUN + torch.arange(_RUN, device=distribution.device)  # [E, _RUN]
    values = distribution.gather(1, rest.clamp(max=distribution.shape[1] - 1))
    before = functional.pad(runs, (1, 0)).gather(1, whole)[:, 0]
    return before + torch.where(rest < token_ids, values, 0.0).sum(dim=-1)


def _at_rows(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """[R] values [E] in their rows, 0 elsewhere."""
    return values.new_zeros(like.shape).index_put((rows,), values)


def _sum_of_squares(distribution: Tensor) -> Tensor:
    """[N] sum(distribution^2) of distributions [N, V], without writing a second matrix."""
    norm: Tensor = torch.linalg.vector_norm(distribution, dim=-1)
    return norm.square()


@functools.cache
def stakes_on(device: torch.device) -> Tensor:
    """[len(STAKES)] float64; made once, since nothing may come from the host while a graph is captured."""
    return torch.tensor(STAKES, dtype=torch.float64, device=device)
