"""The terms of a step: numbers whose mean is 0 if drafts come from q and what is emitted follows p.

With x ~ q drafted, A whether it was accepted, y emitted, r the residual distribution, alpha = sum(min(p, q)), S_p =
sum(p^2), each Z lies within [-1, 1] and has conditional mean 0:

    a        A - alpha                                      token-wise, where the round came
    a_prime  min(1, p(x)/q(x)) - alpha                      every sampled draft
    b        A - min(1, p(x)/q(x))                          token-wise, where the round came
             1[tau = i] - h_i, from the last draft down     block: the accept uniforms up to the first that succeeded
    c        min(1, q(y)/p(y)) - alpha                      what is emitted where something was drafted
    d        p(y) - S_p                                     all that is emitted
    e        q(x) - S_q                                     every sampled draft
    f        min(1, q(y)/r(y)) - sum(min(r, q))             what replaces a sampled draft
    g        2 (sum(r(z < y)) + r(y)/2) - 1                 the last token of a round; where nothing is rejected, r = p
    r        r(y) - sum(r^2)                                what replaces a deterministic draft

The coupled verifier chooses x and y with one noise, so it has no a, b, f, g; and since a position that is drafted again
sees its noise again, its drafts count only where the round came. Deterministic drafts (point masses) leave a = b = c
and make a_prime and e vanish. In block verification the terms of a round are taken together: how far it comes depends
on all of its accept uniforms, and the mean is 0 over the round as a whole.

f, g and r are taken only where it is open what the last token will be. Where one token is left, say of two candidates
after the other was rejected, they are 0 up to rounding, and so is their spread: many of them would look like a mean
that is not 0. Whether it is open follows from the distribution alone, before anything is drawn from it.

The chances are computed here from p and q, not taken from the verifier that is to be watched.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.selfcheck.eprocess import STAKES
from speculative.state.batch import Terms
from speculative.verification.base import VerifyInput, VerifyOutput, residual
from speculative.verification.block import running_ratio, survival
from speculative.verification.draft_probs import Dense, PointMass, SubVocabulary

Floats = np.ndarray[Any, np.dtype[np.float64]]

_RUN = 256  # tokens; far fewer than a vocabulary, far more than nothing
CHECKS_OF_SAMPLED = ("d", "c", "a_prime", "e", "a", "b", "f", "g")  # of token-wise verification, in the kernels' order
CHECKS_OF_DETERMINISTIC = ("d", "a", "r", "g")  # the same where drafts are deterministic
COUPLED_CHECKS_OF_SAMPLED = ("coupled_d", "coupled_c", "coupled_a_prime", "coupled_e")
COUPLED_CHECKS_OF_DETERMINISTIC = ("coupled_d", "coupled_c")
LEAST_RESIDUAL = 0.05  # that p leaves beside a deterministic draft; with less, rounding in sum(p^2) is a bias
LEAST_SPREAD = 0.01  # of what an entirely open distribution has; rounding is 1e-6 of a term


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a step the terms are taken of.

    verifier: of the entries that are not coupled.
    counted: [E] bool, entries whose terms count: chosen before anything of the step was drawn.
    coupled: [E] bool, entries that the coupled verifier judges; None where it judges none.
    """

    verifier: Literal["token_wise", "block"]
    counted: Tensor
    coupled: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What several terms are made of, per row: [R]."""

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


def take_terms(step: VerifyInput, verified: VerifyOutput, emitted: Tensor, scope: Scope) -> Terms:
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
    for name, (values, where) in _of_rejection(step, verified, emitted, facts, scope.verifier).items():
        found[name] = (values, where & counts)
    reached_drafts = torch.where(facts.reached & step.judged, facts.overlap, 0.0)
    return Terms(tuple(found), _sum_up(list(found.values())), reached_drafts.nan_to_num().sum(dtype=torch.float64))


def _gather_facts(step: VerifyInput, verified: VerifyOutput, emitted: Tensor) -> _Facts:
    p_draft, q_draft = step.p_of_drafts(), step.q_of_drafts()
    num_accepted = verified.num_accepted[step.entries]
    overlap, square_q = _against_target(step, p_draft)
    return _Facts(
        overlap=overlap,
        chance=(p_draft / q_draft.clamp(min=torch.finfo(q_draft.dtype).tiny)).clamp(max=1.0),
        p_draft=p_draft,
        q_draft=q_draft,
        p_emitted=step.probs.gather(1, emitted[:, None])[:, 0],
        q_emitted=step.draft_probs.of_tokens(emitted, step.drafts, step.packed),
        square_p=_sum_of_squares(step.probs),
        square_q=square_q,
        accepted=step.offsets < num_accepted,
        reached=step.offsets <= num_accepted,
        alive=step.offsets <= step.leading(p_draft > 0)[step.entries],
    )


def _against_target(step: VerifyInput, p_draft: Tensor) -> tuple[Tensor, Tensor]:
    """[R] sum(min(p, q)) and sum(q^2); 0 where nothing is judged."""
    q = step.draft_probs
    if isinstance(q, PointMass):
        return p_draft, step.judged.to(p_draft.dtype)
    rows = step.packed.clamp(max=q.probs.shape[0] - 1)
    p = step.probs[:, q.ids] if isinstance(q, SubVocabulary) else step.probs
    overlap = torch.minimum(p, q.probs[rows]).sum(dim=-1)
    return torch.where(step.judged, overlap, 0.0), torch.where(step.judged, _sum_of_squares(q.probs)[rows], 0.0)


def _of_distributions(step: VerifyInput, facts: _Facts, *, chosen_twice: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms that hold for every verifier, and where. `chosen_twice`: c of deterministic drafts is reported as a
    already."""
    found = {"d": (facts.p_emitted - facts.square_p, facts.reached)}
    drawn = isinstance(step.draft_probs, Dense | SubVocabulary)
    if drawn or not chosen_twice:
        ratio = facts.q_emitted / facts.p_emitted.clamp(min=torch.finfo(facts.p_emitted.dtype).tiny)
        found["c"] = (ratio.clamp(max=1.0) - facts.overlap, step.judged & facts.reached & (facts.p_emitted > 0))
    if drawn:
        found["a_prime"] = (facts.chance - facts.overlap, step.judged)
        found["e"] = (facts.q_draft - facts.square_q, step.judged)
    return found


def _of_rejection(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, facts: _Facts, verifier: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms of rejection sampling, and where they hold."""
    found = _of_distributions(step, facts, chosen_twice=verifier == "token_wise")
    rho = torch.ones_like(facts.overlap)
    if verifier == "token_wise":
        accepted = facts.accepted.to(facts.overlap.dtype)
        found["a"] = (accepted - facts.overlap, step.judged & facts.reached)
        if not isinstance(step.draft_probs, PointMass):
            found["b"] = (accepted - facts.chance, step.judged & facts.reached)
    else:
        rho = running_ratio(step)
        last_coin = step.offsets == verified.num_accepted[step.entries]
        asked = (step.offsets > 0) & (step.offsets >= verified.num_accepted[step.entries])
        found["b"] = (last_coin.to(rho.dtype) - survival(step, rho), asked)
    last = facts.reached & ~facts.accepted
    if isinstance(step.draft_probs, PointMass):
        return found | _of_chosen(step, verified, emitted, facts, last)
    return found | _of_drawn(step, verified, emitted, rho, last)


def _of_drawn(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, rho: Tensor, last: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """f and g; `last`: [R] bool, the last row that each round came to."""
    rows = step.first_rows + verified.num_accepted
    q = step.q_at(rows)
    left = residual(rho[rows, None] * step.probs[rows], q)
    distribution = left / left.sum(dim=-1, keepdim=True)
    y = emitted[rows, None]
    r_y, q_y = distribution.gather(1, y)[:, 0], q.gather(1, y)[:, 0]
    ratio = (q_y / r_y.clamp(min=torch.finfo(r_y.dtype).tiny)).clamp(max=1.0)
    place = 2 * _mass_below(distribution, y) + r_y - 1
    is_open = last & _at_rows(rows, 1 - _sum_of_cubes(distribution) > LEAST_SPREAD, last)
    return {
        "f": (_at_rows(rows, ratio - torch.minimum(distribution, q).sum(dim=-1), last), is_open & step.judged),
        "g": (_at_rows(rows, place, last), is_open),
    }


def _of_chosen(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, facts: _Facts, last: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """r and g. The residual distribution is p without the draft x, so no matrix is written for it."""
    rows = step.first_rows + verified.num_accepted
    left = 1 - facts.p_draft
    square = (facts.square_p - facts.p_draft**2) / left**2
    cube = (_at_rows(rows, _sum_of_cubes(step.probs[rows]), last) - facts.p_draft**3) / left**3
    below = _at_rows(rows, _mass_below(step.probs[rows], emitted[rows, None]), last)
    below = below - torch.where(step.drafts < emitted, facts.p_draft, 0.0)
    enough = last & (left > LEAST_RESIDUAL) & (emitted != step.drafts)
    varies = cube - square**2 > LEAST_SPREAD * cube  # the variance of r(y), against the mean of its square
    return {
        "r": (facts.p_emitted / left - square, enough & step.judged & varies),
        "g": ((2 * below + facts.p_emitted) / left - 1, enough & (1 - cube > LEAST_SPREAD)),
    }


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


def _sum_of_cubes(distribution: Tensor) -> Tensor:
    """[N] sum(distribution^3) of distributions [N, V]: 1 where one token has all mass; the variance of g is a third of
    what it lacks."""
    norm: Tensor = torch.linalg.vector_norm(distribution, ord=3, dim=-1)
    return norm.pow(3)


@functools.cache
def stakes_on(device: torch.device) -> Tensor:
    """[len(STAKES)] float64; made once, since nothing may come from the host while a graph is captured."""
    return torch.tensor(STAKES, dtype=torch.float64, device=device)


def _sum_up(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    where = torch.stack([where & values.isfinite() for values, where in found])  # [C, R]
    values = torch.where(where, torch.stack([values for values, _ in found]).double().clamp(-1, 1), 0.0)
    gains = torch.log1p(stakes_on(values.device)[:, None] * values[:, None]).sum(dim=-1)  # [C, len(STAKES)]
    parts = (
        where.sum(-1).double(),
        values.clamp(min=0).sum(-1),
        (-values).clamp(min=0).sum(-1),
        values.square().sum(-1),
    )
    return torch.cat([gains, torch.stack(parts, dim=1)], dim=1)
