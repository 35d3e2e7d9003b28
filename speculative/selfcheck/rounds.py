"""Checks of a step's rounds on the host: whether each draw is the one that its random number gives, and whether these
numbers are fine enough, independent from round to round, and not seen by whoever drafts.

The first two need no statistics and no fresh random numbers: given its uniform a draw is certain, whatever other
requests had the same seed, and only numbers that were cut short end alike. The others are terms of mean 0. With b of a
draft, with its sign at the same offset of the request's last round that was checked, and with u the accept uniform of
the row behind the last draft,

    lag_b    b now, times the sign of b then
    lag_g    the same of g
    coin     2 u - 1                                        every round, also one without drafts

The sign was known before anything of the round was drawn, so lagged terms find random numbers that are used again in a
later round, which no marginal mean shows. u decides nothing: however many drafts there are, it is uniform, unless
whoever stopped drafting looked at it.
"""

from dataclasses import replace

import numpy as np

from speculative.sampling.rng import RESOLUTION, Float64s
from speculative.selfcheck.eprocess import ROUNDING, STAKES
from speculative.selfcheck.terms import EQUAL, LEAST_SPREAD
from speculative.state.batch import Int64s, StepInput, Terms
from speculative.state.token_constraint import Bools

ROUND_CHECKS = ("lag_b", "lag_g", "coin")
DRAW_ROUNDING = 1e-3  # of a uniform: ours are float32 sums of a vocabulary, and 1e-5 off at most
_LOWEST = 2**20 - 1  # bits of a uniform that a float32 does not hold: of numbers above 2**-9 not one
_ENOUGH = 4  # numbers that end alike
_STAKES = np.array(STAKES)[:, None]


def contradicted(step_input: StepInput, num_accepted: Int64s, rows: Float64s, uniforms: Float64s) -> Bools:
    """[E] the entries of which a draft was accepted or rejected, or the last token drawn, against its random number.

    Args:
        step_input: of the step. num_accepted: [E].
        rows: [3, R], as in `Terms`.
        uniforms: [2, R] the step's accept and sample uniforms.
    """
    chance, below, own = rows
    accept, sample = uniforms
    succeeded = _succeeded(step_input, num_accepted)
    wrong = np.where(succeeded, accept > chance + DRAW_ROUNDING, accept < chance - DRAW_ROUNDING)  # NaN is neither
    wrong |= (sample < below - DRAW_ROUNDING) | (sample > below + own + DRAW_ROUNDING)
    found = np.zeros(len(step_input.sampled_entries), np.bool_)
    found[step_input.verify_entries[wrong]] = True
    return found


def too_coarse(step_input: StepInput, uniforms: Float64s) -> Bools:
    """[E] the entries with drafts whose random numbers end with the same 20 bits, as those do that were cut to 32 bits
    or fewer: all of one entry, or all of the step's coins, or of what tokens are drawn with. Of four numbers, fewer of
    which are not looked at, that happens by chance once in 2**60 steps.

    Args:
        step_input: of the step.
        uniforms: [2, R] the step's accept and sample uniforms.
    """
    ends = _ends(uniforms)
    first_rows = np.flatnonzero(step_input.offsets == 0)
    least = np.minimum.reduceat(ends.min(axis=0), first_rows)
    most = np.maximum.reduceat(ends.max(axis=0), first_rows)
    drafting = step_input.draft_counts > 0
    distinct = map(np.unique, uniforms[:, drafting[step_input.verify_entries]])  # requests with one seed have the same
    cut = any(len(own) >= _ENOUGH and len(np.unique(_ends(own))) == 1 for own in distinct)
    found: Bools = drafting & (cut | (least == most))
    return found


def _ends(uniforms: Float64s) -> Int64s:
    """The lowest 20 bits."""
    return (uniforms / RESOLUTION).astype(np.int64) & _LOWEST


def misdrafted(step_input: StepInput, places: Float64s, uniforms: Float64s) -> Bools:
    """[E] the entries of which a draft was sampled from another distribution than its q, or with another random number.

    Args:
        step_input: of the step.
        places: [2, R] of the draft judged at each row: the mass of q before it, and its own; NaN where it was not
            sampled by inverse CDF.
        uniforms: [R] what drafts are sampled with.
    """
    below, own = places
    wrong = (step_input.drafts >= 0) & ((uniforms < below - DRAW_ROUNDING) | (uniforms > below + own + DRAW_ROUNDING))
    found = np.zeros(len(step_input.sampled_entries), np.bool_)
    found[step_input.verify_entries[wrong]] = True
    return found


def with_round_terms(
    terms: Terms,
    step_input: StepInput,
    num_accepted: Int64s,
    accept_uniforms: Float64s,
    counted: Bools,
    last_signs: list[Float64s],
) -> Terms:
    """The terms with those of `ROUND_CHECKS`, and without the rows that they were made of.

    Args:
        terms: of the step, with its rows.
        step_input: of the step. num_accepted: [E]. accept_uniforms: [R].
        counted: [E] whose terms count; none of an entry that the coupled verifier judges.
        last_signs: per entry, [2, offsets] of its last round that was checked: b's and g's, 0 = none yet. Those of
            this round are written over them.
    """
    assert terms.rows is not None
    chance, below, own = terms.rows
    place = np.where(abs(2 * below + own - 1) <= EQUAL, 0.0, 2 * below + own - 1)
    values = np.stack([_succeeded(step_input, num_accepted) - chance, place])  # [2, R]
    entries, offsets = step_input.verify_entries, step_input.offsets
    signs = np.stack(last_signs)  # [E, 2, offsets]
    kept = offsets < signs.shape[2]  # a longer round's other rows take no part
    before = np.where(kept, signs[entries, :, np.minimum(offsets, signs.shape[2] - 1)].T, 0)
    counts = counted[entries] & (before != 0) & np.isfinite(values)
    counts[0] &= (chance > LEAST_SPREAD) & (chance < 1 - LEAST_SPREAD)
    found = [_sums(values[which][own_rows] * before[which][own_rows]) for which, own_rows in enumerate(counts)]
    for which in range(len(values)):
        drawn = np.isfinite(values[which]) & kept
        signs[entries[drawn], which, offsets[drawn]] = np.sign(values[which][drawn])
    for kept_signs, of_entry in zip(last_signs, signs, strict=True):
        kept_signs[:] = of_entry
    undecided = counted[entries] & (step_input.drafts < 0)
    found.append(_sums(2 * accept_uniforms[undecided] - 1))
    return replace(terms, checks=(*terms.checks, *ROUND_CHECKS), sums=np.concatenate([terms.sums, found]), rows=None)


def _succeeded(step_input: StepInput, num_accepted: Int64s) -> Bools:
    """[R] whether the row's accept uniform succeeded, where it decided something."""
    found: Bools = step_input.offsets < num_accepted[step_input.verify_entries]
    return found


def _sums(values: Float64s) -> Float64s:
    """A row of the sums of `Terms`."""
    gains = np.log1p(_STAKES * values - abs(_STAKES) * ROUNDING).sum(axis=1)
    parts = (len(values), np.maximum(values, 0).sum(), np.maximum(-values, 0).sum(), (values**2).sum())
    return np.concatenate([gains, parts])
