"""The terms of a step: numbers whose mean is 0 if drafts come from q and what is emitted follows p.

With x ~ q drafted, A whether it was accepted, y emitted, r the residual law, alpha = sum(min(p, q)), S_p = sum(p^2),
each Z lies within [-1, 1] and has conditional mean 0:

    a        A - alpha                                      token-wise, where the round came
    a_prime  min(1, p(x)/q(x)) - alpha                      every draft that was drawn
    b        A - min(1, p(x)/q(x))                          token-wise, where the round came
             1[tau = i] - h_i, from the last draft down     block: the coins up to the first that succeeded
    c        min(1, q(y)/p(y)) - alpha                      what is emitted where something was drafted
    d        p(y) - S_p                                     all that is emitted
    e        q(x) - S_q                                     every draft that was drawn
    f        min(1, q(y)/r(y)) - sum(min(r, q))             what replaces a draft that was drawn
    g        2 (sum(r(z < y)) + r(y)/2) - 1                 the last token of a round; where nothing is rejected, r = p
    r        r(y) - sum(r^2)                                what replaces a draft that was chosen

The coupled verifier chooses x and y with one noise, so it has no a, b, f, g; and since a position that is drafted again
sees its noise again, its drafts count only where the round came. Chosen drafts (point masses) leave a = b = c and make
a_prime and e vanish. In block verification the terms of a round are taken together: how far it comes depends on all of
its coins, and the mean is 0 over the round as a whole.

The chances are computed here from p and q, not taken from the verifier that is to be watched.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.draft_law import Dense, DraftLaw, PointMass, SubVocabulary
from speculative.selfcheck.eprocess import STAKES
from speculative.verification.base import VerifyInput, VerifyOutput, residual
from speculative.verification.block import running_ratio, survival

Floats = np.ndarray[Any, np.dtype[np.float64]]

_OF_DRAWN = ("d", "c", "a_prime", "e", "a", "b", "f", "g")  # in the kernel's order
_OF_CHOSEN = ("d", "a", "r", "g")
_RUN = 256  # tokens; far fewer than a vocabulary, far more than nothing
_LEAST_RESIDUAL = 0.05  # where p leaves less beside a chosen draft, rounding in sum(p^2) would bias the residual's


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a step the terms are taken of.

    verifier: of the entries that are not coupled.
    judged_rows: [D] int64, rows that judge a draft, in the order of the packed drafts.
    counted: [E] bool, entries whose terms count: chosen before anything of the step was drawn.
    coupled: [E] bool, entries that the coupled verifier judges. any_coupled, all_coupled: the same, on the host.
    """

    verifier: Literal["token_wise", "block"]
    judged_rows: Tensor
    counted: Tensor
    coupled: Tensor
    any_coupled: bool
    all_coupled: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """What the terms of a step come to, on the device.

    checks: the C self-checks that have terms.
    sums: [C, len(STAKES) + 4] float64: sums of log(1 + stake Z); then number, positive and negative parts, squares.
    achievable: sum(min(p, q)) over the positions that were reached.
    """

    checks: tuple[str, ...]
    sums: Tensor
    achievable: Tensor


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
    native = step.native if scope.verifier == "token_wise" and not scope.any_coupled else None
    if native is not None:
        kernels, struct = native
        checks = _OF_DRAWN if struct.q else _OF_CHOSEN
        stakes = np.array(STAKES)
        told = (verified.num_accepted, emitted, scope.counted, stakes, len(checks), _LEAST_RESIDUAL)
        return Terms(checks, *kernels.terms(struct, *told))
    facts = _gather_facts(step, verified, emitted, scope)
    counts = scope.counted[step.entries] & facts.alive
    coupled = scope.coupled[step.entries]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if not scope.all_coupled:
        for name, (values, where) in _of_rejection(step, verified, emitted, facts, scope.verifier).items():
            found[name] = (values, where & counts & ~coupled)
    if scope.any_coupled:
        for name, (values, where) in _of_laws(step, facts, chosen_twice=False).items():
            found[f"coupled_{name}"] = (values, where & counts & coupled & facts.reached)
    reached_drafts = torch.where(facts.reached & step.judged, facts.overlap, 0.0)
    return Terms(tuple(found), _sum_up(list(found.values())), reached_drafts.nan_to_num().sum(dtype=torch.float64))


def _gather_facts(step: VerifyInput, verified: VerifyOutput, emitted: Tensor, scope: Scope) -> _Facts:
    p_draft, q_draft = step.p_of_drafts(), step.q_of_drafts()
    num_accepted = verified.num_accepted[step.entries]
    overlap, square_q = _against_target(step, p_draft, scope.judged_rows)
    return _Facts(
        overlap=overlap,
        chance=(p_draft / q_draft.clamp(min=torch.finfo(q_draft.dtype).tiny)).clamp(max=1.0),
        p_draft=p_draft,
        q_draft=q_draft,
        p_emitted=step.probs.gather(1, emitted[:, None])[:, 0],
        q_emitted=step.law.of_tokens(emitted, step.drafts, step.packed),
        square_p=_sum_of_squares(step.probs),
        square_q=square_q,
        accepted=step.offsets < num_accepted,
        reached=step.offsets <= num_accepted,
        alive=step.offsets <= step.leading(p_draft > 0)[step.entries],
    )


def _against_target(step: VerifyInput, p_draft: Tensor, judged_rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R] sum(min(p, q)) and sum(q^2); 0 where nothing is judged."""
    law: DraftLaw = step.law
    zeros = torch.zeros_like(p_draft)
    if isinstance(law, PointMass) or judged_rows.shape[0] == 0:
        return torch.where(step.judged, p_draft, zeros), step.judged.to(p_draft.dtype)
    p = step.probs[judged_rows]
    overlap = torch.minimum(p[:, law.ids] if isinstance(law, SubVocabulary) else p, law.probs).sum(dim=-1)
    return zeros.index_put((judged_rows,), overlap), zeros.index_put((judged_rows,), _sum_of_squares(law.probs))


def _of_laws(step: VerifyInput, facts: _Facts, *, chosen_twice: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms that hold for every verifier, and where. `chosen_twice`: c of chosen drafts is told as a already."""
    found = {"d": (facts.p_emitted - facts.square_p, facts.reached)}
    drawn = isinstance(step.law, Dense | SubVocabulary)
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
    found = _of_laws(step, facts, chosen_twice=verifier == "token_wise")
    rho = torch.ones_like(facts.overlap)
    if verifier == "token_wise":
        accepted = facts.accepted.to(facts.overlap.dtype)
        found["a"] = (accepted - facts.overlap, step.judged & facts.reached)
        if not isinstance(step.law, PointMass):
            found["b"] = (accepted - facts.chance, step.judged & facts.reached)
    else:
        rho = running_ratio(step)
        last_coin = step.offsets == verified.num_accepted[step.entries]
        asked = (step.offsets > 0) & (step.offsets >= verified.num_accepted[step.entries])
        found["b"] = (last_coin.to(rho.dtype) - survival(step, rho), asked)
    last = facts.reached & ~facts.accepted
    if isinstance(step.law, PointMass):
        return found | _of_chosen(step, verified, emitted, facts, last)
    return found | _of_drawn(step, verified, emitted, rho, last)


def _of_drawn(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, rho: Tensor, last: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """f and g; `last`: [R] bool, the last row that each round came to."""
    rows = step.first_rows + verified.num_accepted
    q = step.q_at(rows)
    left = residual(rho[rows, None] * step.probs[rows], q)
    law = left / left.sum(dim=-1, keepdim=True)
    y = emitted[rows, None]
    r_y, q_y = law.gather(1, y)[:, 0], q.gather(1, y)[:, 0]
    ratio = (q_y / r_y.clamp(min=torch.finfo(r_y.dtype).tiny)).clamp(max=1.0)
    place = 2 * _mass_below(law, y) + r_y - 1
    return {
        "f": (_spread(rows, ratio - torch.minimum(law, q).sum(dim=-1), last), last & step.judged),
        "g": (_spread(rows, place, last), last),
    }


def _of_chosen(
    step: VerifyInput, verified: VerifyOutput, emitted: Tensor, facts: _Facts, last: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """r and g. The residual law is p without the draft x, so no matrix is written for it."""
    rows = step.first_rows + verified.num_accepted
    left = 1 - facts.p_draft
    square = (facts.square_p - facts.p_draft**2) / left**2
    below = _spread(rows, _mass_below(step.probs[rows], emitted[rows, None]), last)
    below = below - torch.where(step.drafts < emitted, facts.p_draft, 0.0)
    enough = last & (left > _LEAST_RESIDUAL) & (emitted != step.drafts)
    return {
        "r": (facts.p_emitted / left - square, enough & step.judged),
        "g": ((2 * below + facts.p_emitted) / left - 1, enough),
    }


def _mass_below(law: Tensor, token_ids: Tensor) -> Tensor:
    """[E] the mass that laws [E, V] have on the tokens before token_ids [E, 1]: whole runs of them, then the rest."""
    num_runs = law.shape[1] // _RUN
    runs = law[:, : num_runs * _RUN].unflatten(1, (num_runs, _RUN)).sum(dim=-1).cumsum(dim=-1)
    whole = (token_ids // _RUN).clamp(max=num_runs)
    rest = whole * _RUN + torch.arange(_RUN, device=law.device)  # [E, _RUN]
    values = law.gather(1, rest.clamp(max=law.shape[1] - 1))
    before = functional.pad(runs, (1, 0)).gather(1, whole)[:, 0]
    return before + torch.where(rest < token_ids, values, 0.0).sum(dim=-1)


def _spread(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """[R] values [E] in their rows, 0 elsewhere."""
    return values.new_zeros(like.shape).index_put((rows,), values)


def _sum_of_squares(law: Tensor) -> Tensor:
    """[N] sum(law^2) of laws [N, V], without writing a second matrix."""
    norm: Tensor = torch.linalg.vector_norm(law, dim=-1)
    return norm.square()


@functools.cache
def _stakes(device: torch.device) -> Tensor:
    """[len(STAKES)] float64; made once, since nothing may come from the host while a graph is captured."""
    return torch.tensor(STAKES, dtype=torch.float64, device=device)


def _sum_up(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    where = torch.stack([where & values.isfinite() for values, where in found])  # [C, R]
    values = torch.where(where, torch.stack([values for values, _ in found]).double().clamp(-1, 1), 0.0)
    gains = torch.log1p(_stakes(values.device)[:, None] * values[:, None]).sum(dim=-1)  # [C, len(STAKES)]
    parts = (
        where.sum(-1).double(),
        values.clamp(min=0).sum(-1),
        (-values).clamp(min=0).sum(-1),
        values.square().sum(-1),
    )
    return torch.cat([gains, torch.stack(parts, dim=1)], dim=1)
