"""Token-wise and coupled verification straight from logits, as Triton kernels; imported only where Triton is installed.

p is never written. Where a request has filters, `triton_filters` has found the lowest logit that stays in each row, and
p of what lies below is 0. Each row of V tokens is cut into blocks of BLOCK, and one program sums one block:

    _reduce_blocks   the logits once: maxima, sums of exponentials
    _find_facts      the same of whole rows
    _sum_blocks      logits and q once: mass of p and of (p - q)+, sum(min(p, q)), and what the self-checks sum up
    _choose_blocks   the logits of coupled entries: the highest of log p + noise
    _settle_entries  a few numbers of each row: which drafts survive; then the one block that holds the threshold of the
                     inverse CDF, from which the last token is drawn
    _compare_blocks  logits and q of each entry's last row: the rank of that token, what is likelier than it where the
                     request has filters, sum(min(r, q)) of the residual r
    _report_rows     a few numbers of each row: invariants, logprobs
    _take_terms      a few numbers of each row: the terms of the self-checks
    _sum_terms       those terms over all rows

Whether a step wants logprobs and the terms of the self-checks is a flag on the device; what nobody wants is not read.
p(x) is the same expression of the same numbers wherever it is needed. Blocks have one size and are added up in one
order for every batch, so a row's result is a function of its own inputs. Masses are added up, and uniforms compared,
in float64.
"""

import triton
import triton.language as tl

from speculative.gpu.triton_filters import has_filters
from speculative.gpu.triton_noise import best_choice
from speculative.selfcheck.eprocess import ROUNDING
from speculative.selfcheck.invariants import EDGE_ROUNDING, ROW_KINDS
from speculative.selfcheck.terms import EQUAL, LEAST_RESIDUAL, LEAST_SPREAD

# What one program finds of a block, by its place in the workspaces.
HIGHEST = tl.constexpr(0)  # maxima [NUM_FACTS, R, NUM_BLOCKS] float32; of whole rows, facts [NUM_FACTS, R]
SOFT_TOTAL = tl.constexpr(1)  # sum(exp((x - highest) / temperature)) of what filters let through
ALL_TOTAL = tl.constexpr(2)  # the same of all tokens
RAW_TOTAL = tl.constexpr(3)  # sum(exp(x - highest))
BEST = tl.constexpr(4)  # the first token with the highest logit
NUM_FACTS = 5

P_MASS = tl.constexpr(0)  # sums [NUM_SUMS, R, NUM_BLOCKS] float64
LEFT = tl.constexpr(1)  # sum((p - q)+)
OVERLAP = tl.constexpr(2)
Q_MASS = tl.constexpr(3)
LEAST_Q = tl.constexpr(4)
ABOVE = tl.constexpr(5)  # how many logits are higher than the draft's
NUM_LIKELIER = tl.constexpr(6)  # how many tokens are likelier than the draft by more than rounding, and their mass in
LIKELIER = tl.constexpr(7)  # units of the likeliest token's; where there are filters, which are not heeded here
SQUARE_P = tl.constexpr(8)  # from here on for self-checks only
SQUARE_Q = tl.constexpr(9)
SQUARE_LEFT = tl.constexpr(10)
NUM_SUMS = 11

ALIVE = tl.constexpr(0)  # drawn [NUM_DRAWN, E] float64: how many first drafts have p > 0
LEFT_TOTAL = tl.constexpr(1)  # 0 where the token was drawn from p, since nothing is left of it
BELOW = tl.constexpr(2)  # mass of the residual distribution before the token
OWN = tl.constexpr(3)  # its own
NUM_DRAWN = 4

LAST_ABOVE = tl.constexpr(0)  # compared [NUM_COMPARED, E, NUM_BLOCKS] float64
LAST_OVERLAP = tl.constexpr(1)
LAST_NUM_LIKELIER = tl.constexpr(2)
LAST_LIKELIER = tl.constexpr(3)
NUM_COMPARED = 4

POINT_MASS = tl.constexpr(0)  # what q is: a point mass,
DENSE = tl.constexpr(1)  # of all tokens,
PART = tl.constexpr(2)  # or of the tokens that have a column

# 1 + the index into `invariants.ROW_KINDS`.
NOT_FINITE, NO_TOKEN, LAW, Q_ZERO, P_ZERO, SUPPORT = (tl.constexpr(1 + ROW_KINDS.index(kind)) for kind in ROW_KINDS)

_EDGE_ROUNDING = tl.constexpr(EDGE_ROUNDING)
_ROUNDING, _EQUAL = tl.constexpr(ROUNDING), tl.constexpr(EQUAL)
_LEAST_RESIDUAL, _LEAST_SPREAD = tl.constexpr(LEAST_RESIDUAL), tl.constexpr(LEAST_SPREAD)

_TINY = tl.constexpr(1.1754943508222875e-38)
_LANES = tl.constexpr(16)  # drafts of a round that are looked at together
_NOBODY = tl.constexpr(1 << 40)


_kernel = triton.jit(do_not_specialize=["num_rows", "num_entries"])  # one binary for all batches


@triton.jit
def _soft(x, temperature, highest):
    """exp(x / temperature) over that of the highest; rounded as torch rounds."""
    return tl.exp(tl.div_rn(x, temperature) - tl.div_rn(highest, temperature))


@triton.jit
def _kept(x, temperature, highest, floor):
    """`_soft`, and 0 of what filters leave out."""
    return tl.where(tl.div_rn(x, temperature) < floor, 0.0, _soft(x, temperature, highest))


@triton.jit
def _likelier(x, own, temperature, highest):
    """Count the tokens likelier than one by more than rounding, and sum their mass; x of the others, and its own."""
    soft = _soft(x, temperature, highest)
    which = soft > _soft(own, temperature, highest) * (1 + _EDGE_ROUNDING)
    mass = tl.where(which, soft.to(tl.float64), 0.0)
    return tl.sum(which.to(tl.int32), axis=0).to(tl.float64), tl.sum(mass, axis=0)


@triton.jit
def _is_filtered(log_min_ps, top_ks, top_ps, row, VOCABULARY: tl.constexpr):
    return has_filters(tl.load(log_min_ps + row), tl.load(top_ks + row), tl.load(top_ps + row), VOCABULARY)


@triton.jit
def probability(x, token, highest, total, best, temperature, floor, is_greedy):  # noqa: PLR0913
    """p of tokens with logits x, given the facts of their rows; or q, of a drafter's logits."""
    return tl.where(is_greedy, tl.where(token == best, 1.0, 0.0), _kept(x, temperature, highest, floor) / total)


@triton.jit
def _target(x, token, row, there, facts, floors, temperature, greedy, num_rows):  # noqa: PLR0913
    """p of tokens with logits x; `row` may be one row or as many as there are tokens."""
    highest = tl.load(facts + HIGHEST * num_rows + row, mask=there, other=0.0)
    total = tl.load(facts + SOFT_TOTAL * num_rows + row, mask=there, other=1.0)
    best = tl.load(facts + BEST * num_rows + row, mask=there, other=0.0).to(tl.int64)
    own = tl.load(temperature + row, mask=there, other=1.0)
    floor = tl.load(floors + row, mask=there, other=-float("inf"))
    is_greedy = tl.load(greedy + row, mask=there, other=0) != 0
    return probability(x, token, highest, total, best, own, floor, is_greedy)


@triton.jit
def _place(packed, places, row, judged, Q: tl.constexpr):
    """The row of q that a row's draft was sampled from."""
    place = row * 0
    if Q != POINT_MASS:
        draft = tl.load(packed + row, mask=judged, other=0)
        place = tl.load(places + draft, mask=judged, other=0)
    return place


@triton.jit
def _draft_prob(q, columns, q_stride, place, draft, token, inside, Q: tl.constexpr):  # noqa: PLR0913
    """q of tokens; 0 where nothing is judged."""
    judged = inside & (draft >= 0)
    if Q == POINT_MASS:
        found = tl.where(judged & (token == draft), 1.0, 0.0)
    else:  # not behind a `return`: Triton compiles that, too, and here q may be anything, of any type
        column = token
        if Q == PART:
            column = tl.load(columns + token, mask=judged, other=-1).to(tl.int64)
        found = tl.load(q + place * q_stride + column, mask=judged & (column >= 0), other=0.0)
    return found


@triton.jit
def _left(p, q):
    """(p - q)+; NaN where one of them is."""
    return tl.where(p <= q, 0.0, p - q)


@triton.jit
def _minimum(p, q):
    return tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_block(logits, row, stride, block, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row's logits in float32, -inf behind the vocabulary; its tokens, and which of them there are."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    x = tl.load(logits + row * stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    return x, token, inside


@triton.jit
def of_row(sums, which, row, num_rows, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] what the blocks of a row came to."""
    block = tl.arange(0, PADDED)
    place = (which * num_rows + row) * NUM_BLOCKS + block
    return tl.load(sums + place, mask=block < NUM_BLOCKS, other=0.0)


@_kernel
def _reduce_blocks(  # noqa: PLR0913
    logits,  # [R, V]
    temperature,  # [R] float32
    floors,  # [R] float32: the lowest logit after temperature that filters let through
    maxima,  # [NUM_FACTS, R, NUM_BLOCKS] float32
    stride,
    num_rows,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, _, _ = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    is_damaged = tl.max((x != x).to(tl.int32), axis=0) > 0
    sound = tl.where(x != x, -float("inf"), x)
    highest = tl.max(sound, axis=0)
    base = tl.where(highest == -float("inf"), 0.0, highest)  # -inf - -inf is NaN
    own, floor = tl.load(temperature + row), tl.load(floors + row)
    place = row * NUM_BLOCKS + block
    size = num_rows * NUM_BLOCKS
    tl.store(maxima + HIGHEST * size + place, tl.where(is_damaged, float("nan"), highest))
    tl.store(maxima + SOFT_TOTAL * size + place, tl.sum(_kept(x, own, base, floor), axis=0))
    tl.store(maxima + ALL_TOTAL * size + place, tl.sum(_soft(x, own, base), axis=0))
    tl.store(maxima + RAW_TOTAL * size + place, tl.sum(tl.exp(x - base), axis=0))
    tl.store(maxima + BEST * size + place, (block * BLOCK + tl.argmax(sound, axis=0)).to(tl.float32))


@triton.jit
def facts_of_row(maxima, own, row, num_rows, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The facts of a whole row, in their order, from those of its blocks; own: its temperature."""
    exists = tl.arange(0, PADDED) < NUM_BLOCKS
    found = of_row(maxima, HIGHEST, row, num_rows, NUM_BLOCKS, PADDED)
    sound = tl.where(exists & (found == found), found, -float("inf"))
    highest = tl.max(sound, axis=0)
    is_damaged = tl.max((found != found).to(tl.int32), axis=0) > 0
    base = tl.where(highest == -float("inf"), 0.0, highest)
    kept = of_row(maxima, SOFT_TOTAL, row, num_rows, NUM_BLOCKS, PADDED)
    soft = of_row(maxima, ALL_TOTAL, row, num_rows, NUM_BLOCKS, PADDED)
    raw = of_row(maxima, RAW_TOTAL, row, num_rows, NUM_BLOCKS, PADDED)
    best = of_row(maxima, BEST, row, num_rows, NUM_BLOCKS, PADDED)
    kept = tl.sum(tl.where(kept != 0, kept * _soft(sound, own, base), 0.0), axis=0)
    soft = tl.sum(tl.where(soft != 0, soft * _soft(sound, own, base), 0.0), axis=0)
    raw = tl.sum(tl.where(raw != 0, raw * tl.exp(sound - base), 0.0), axis=0)
    first = tl.arange(0, PADDED) == tl.argmax(sound, axis=0)
    best = tl.sum(tl.where(first, best, 0.0), axis=0)
    return tl.where(is_damaged, float("nan"), highest), kept, soft, raw, best


@_kernel
def _find_facts(
    maxima,  # [NUM_FACTS, R, NUM_BLOCKS] float32
    temperature,  # [R] float32
    facts,  # [NUM_FACTS, R] float32
    num_rows,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(temperature + row)
    highest, kept, soft, raw, best = facts_of_row(maxima, own, row, num_rows, NUM_BLOCKS, PADDED)
    tl.store(facts + HIGHEST * num_rows + row, highest)
    tl.store(facts + SOFT_TOTAL * num_rows + row, kept)
    tl.store(facts + ALL_TOTAL * num_rows + row, soft)
    tl.store(facts + RAW_TOTAL * num_rows + row, raw)
    tl.store(facts + BEST * num_rows + row, best)


@_kernel
def _sum_blocks(  # noqa: PLR0913
    logits,  # [R, V]
    temperature,  # [R] float32
    greedy,  # [R] bool
    facts,  # [NUM_FACTS, R] float32
    floors,  # [R] float32
    q,  # [D, W] float32
    columns,  # [V] int32: of q, -1 where a token has none
    packed,  # [R] int64
    places,  # [D] int64: the row of q by packed draft
    drafts,  # [R] int64
    log_min_ps,  # [R] float32
    top_ks,  # [R] int64
    top_ps,  # [R] float32
    checked,  # [1] bool
    sums,  # [NUM_SUMS, R, NUM_BLOCKS] float64
    stride,
    q_stride,
    num_rows,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, token, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    draft = tl.load(drafts + row)
    judged = draft >= 0
    p = tl.where(inside, _target(x, token, row, True, facts, floors, temperature, greedy, num_rows), 0.0)
    q_row = _draft_prob(q, columns, q_stride, _place(packed, places, row, judged, Q), draft, token, inside, Q)
    left = _left(p, q_row)
    place = row * NUM_BLOCKS + block
    size = num_rows * NUM_BLOCKS
    tl.store(sums + P_MASS * size + place, tl.sum(p.to(tl.float64), axis=0))
    tl.store(sums + LEFT * size + place, tl.sum(left.to(tl.float64), axis=0))
    tl.store(sums + OVERLAP * size + place, tl.sum(_minimum(p, q_row), axis=0).to(tl.float64))
    if Q != POINT_MASS:
        tl.store(sums + Q_MASS * size + place, tl.sum(q_row, axis=0).to(tl.float64))
        is_damaged = tl.max((q_row != q_row).to(tl.int32), axis=0) > 0
        least = tl.where(is_damaged, float("nan"), tl.min(q_row, axis=0))
        tl.store(sums + LEAST_Q * size + place, least.to(tl.float64))
    own = tl.load(logits + row * stride + draft, mask=judged, other=0.0).to(tl.float32)
    tl.store(sums + ABOVE * size + place, tl.sum((x > own).to(tl.int32), axis=0).to(tl.float64))
    if _is_filtered(log_min_ps, top_ks, top_ps, row, VOCABULARY):
        highest = tl.load(facts + HIGHEST * num_rows + row)
        number, mass = _likelier(x, own, tl.load(temperature + row), highest)
        tl.store(sums + NUM_LIKELIER * size + place, number)
        tl.store(sums + LIKELIER * size + place, mass)
    if tl.load(checked) != 0:
        tl.store(sums + SQUARE_P * size + place, tl.sum(p * p, axis=0).to(tl.float64))
        tl.store(sums + SQUARE_Q * size + place, tl.sum(q_row * q_row, axis=0).to(tl.float64))
        tl.store(sums + SQUARE_LEFT * size + place, tl.sum(left * left, axis=0).to(tl.float64))


@_kernel
def _choose_blocks(  # noqa: PLR0913
    logits,
    temperature,
    greedy,
    facts,
    floors,
    entries,  # [R] int64
    coupled,  # [E] bool
    seeds,  # [R] int64
    positions,  # [R] int64
    choices,  # [2, R, NUM_BLOCKS] float64: the highest log p + noise, and the first token that has it
    stride,
    num_rows,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(coupled + tl.load(entries + row)) == 0:
        return
    x, token, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    p = _target(x, token, row, True, facts, floors, temperature, greedy, num_rows)
    highest, place = best_choice(p, tl.load(seeds + row), tl.load(positions + row), token, inside)
    tl.store(choices + row * NUM_BLOCKS + block, highest)
    tl.store(choices + (num_rows + row) * NUM_BLOCKS + block, (block * BLOCK + place).to(tl.float64))


@triton.jit
def choices_of(choices, rows, there, num_rows, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """[L] int64, the token that each of some rows [L] chooses."""
    block = tl.arange(0, PADDED)[None, :]
    place, exists = rows[:, None] * NUM_BLOCKS + block, there[:, None] & (block < NUM_BLOCKS)
    highest = tl.load(choices + place, mask=exists, other=-float("inf"))
    token = tl.load(choices + num_rows * NUM_BLOCKS + place, mask=exists, other=0.0)
    is_best = block == tl.argmax(highest, axis=1)[:, None]
    return tl.sum(tl.where(is_best, token, 0.0), axis=1).to(tl.int64)


@_kernel
def _settle_entries(  # noqa: PLR0913
    logits,
    temperature,
    greedy,
    facts,
    floors,
    q,
    columns,
    packed,
    places,
    drafts,
    coupled,
    choices,
    sums,
    first_rows,  # [E] int64
    counts,  # [E] int64
    accept_uniforms,  # [R] float64
    sample_uniforms,  # [R] float64
    num_accepted,  # [E] float64, as all that follows
    token_ids,  # [E]
    expected,  # [E]
    last_probs,  # [E] q of the last token, where drafts were sampled
    drawn,  # [NUM_DRAWN, E]
    stride,
    q_stride,
    num_rows,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    Q: tl.constexpr,
):
    entry, num_entries = tl.program_id(0), tl.num_programs(0)
    first, count = tl.load(first_rows + entry), tl.load(counts + entry)
    is_coupled = tl.load(coupled + entry) != 0
    accepted, alive = count, count
    overlap = count.to(tl.float64) * 0.0
    blocks = tl.arange(0, PADDED)
    for begin in range(0, count, _LANES):
        lane = begin + tl.arange(0, _LANES)
        there, row = lane < count, first + lane
        draft = tl.load(drafts + row, mask=there, other=0)
        x = tl.load(logits + row * stride + draft, mask=there, other=0.0).to(tl.float32)
        p = _target(x, draft, row, there, facts, floors, temperature, greedy, num_rows)
        own = _draft_prob(q, columns, q_stride, _place(packed, places, row, there, Q), draft, draft, there, Q)
        coin = tl.load(accept_uniforms + row, mask=there, other=0.0)
        # In float64 neither product underflows. A token of p = 0 or q = 0 never survives, whatever the coin.
        survives = (coin * own.to(tl.float64) < p.to(tl.float64)) & (p > 0) & (own > 0)
        if is_coupled:
            survives = draft == choices_of(choices, row, there, num_rows, NUM_BLOCKS, PADDED)
        accepted = tl.minimum(accepted, tl.min(tl.where(there & ~survives, lane, count), axis=0))
        alive = tl.minimum(alive, tl.min(tl.where(there & ~(p > 0), lane, count), axis=0))
        reached = there & (lane <= accepted)
        overlaps = (OVERLAP * num_rows + row[:, None]) * NUM_BLOCKS + blocks[None, :]
        found = tl.load(sums + overlaps, mask=reached[:, None] & (blocks < NUM_BLOCKS)[None, :], other=0.0)
        overlap += tl.sum(tl.sum(found, axis=1), axis=0)
    row = first + accepted
    left = of_row(sums, LEFT, row, num_rows, NUM_BLOCKS, PADDED)
    from_p = ~(tl.sum(left, axis=0) > 0)  # nothing is left but rounding
    masses = tl.where(from_p, of_row(sums, P_MASS, row, num_rows, NUM_BLOCKS, PADDED), left)
    total = tl.sum(masses, axis=0)
    threshold = tl.load(sample_uniforms + row) * total
    block = first_above(tl.cumsum(masses, axis=0), masses, blocks, threshold)
    before = tl.sum(tl.where(blocks < block, masses, 0.0), axis=0)
    x, token, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    p = tl.where(inside, _target(x, token, row, True, facts, floors, temperature, greedy, num_rows), 0.0)
    draft = tl.load(drafts + row)
    q_row = _draft_prob(q, columns, q_stride, _place(packed, places, row, draft >= 0, Q), draft, token, inside, Q)
    mass = tl.where(from_p, p, _left(p, q_row)).to(tl.float64)
    chosen = first_above(tl.cumsum(mass, axis=0), mass, token, threshold - before)
    if is_coupled:
        last = row + tl.zeros([1], tl.int64)
        chosen = tl.max(choices_of(choices, last, last >= 0, num_rows, NUM_BLOCKS, PADDED), axis=0)
        overlap = accepted.to(tl.float64)  # the rule has no uniform of its own: what was expected is what happened
    tl.store(num_accepted + entry, accepted.to(tl.float64))
    tl.store(token_ids + entry, chosen.to(tl.float64))
    tl.store(expected + entry, overlap)
    if Q != POINT_MASS:
        place = _place(packed, places, row, draft >= 0, Q)
        of_last = _draft_prob(q, columns, q_stride, place, draft, chosen, draft >= 0, Q)
        tl.store(last_probs + entry, of_last.to(tl.float64))
    tl.store(drawn + ALIVE * num_entries + entry, alive.to(tl.float64))
    tl.store(drawn + LEFT_TOTAL * num_entries + entry, tl.where(from_p, 0.0, total))
    below = before + tl.sum(tl.where(token < chosen, mass, 0.0), axis=0)
    tl.store(drawn + BELOW * num_entries + entry, below)
    tl.store(drawn + OWN * num_entries + entry, tl.sum(tl.where(token == chosen, mass, 0.0), axis=0))


@triton.jit
def first_above(cumulated, masses, names, threshold):
    """The first name whose interval contains the threshold; one without mass never, not even by rounding."""
    some, names = masses > 0, names.to(tl.int64)
    least = tl.min(tl.where(some & (cumulated > threshold), names, _NOBODY), axis=0)
    last = tl.max(tl.where(some, names, tl.min(names, axis=0)), axis=0)  # the threshold may be rounded up to the total
    return tl.minimum(least, last)


@_kernel
def _compare_blocks(  # noqa: PLR0913
    logits,
    temperature,
    greedy,
    facts,
    floors,
    q,
    columns,
    packed,
    places,
    drafts,
    log_min_ps,
    top_ks,
    top_ps,
    checked,  # [1] bool
    reported,  # [1] bool
    first_rows,
    num_accepted,
    token_ids,
    drawn,
    compared,  # [NUM_COMPARED, E, NUM_BLOCKS] float64
    stride,
    q_stride,
    num_rows,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
):
    entry, block, num_entries = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(first_rows + entry) + tl.load(num_accepted + entry).to(tl.int64)
    place = entry * NUM_BLOCKS + block
    size = num_entries * NUM_BLOCKS
    is_ranked = (tl.load(reported) != 0) | _is_filtered(log_min_ps, top_ks, top_ps, row, VOCABULARY)
    is_checked = (tl.load(checked) != 0) & (Q != POINT_MASS)
    if ~(is_ranked | is_checked):
        return
    x, token, inside = load_block(logits, row, stride, block, VOCABULARY, BLOCK)
    if is_ranked:
        own = tl.load(logits + row * stride + tl.load(token_ids + entry).to(tl.int64)).to(tl.float32)
        number, mass = _likelier(x, own, tl.load(temperature + row), tl.load(facts + HIGHEST * num_rows + row))
        tl.store(compared + LAST_ABOVE * size + place, tl.sum((x > own).to(tl.int32), axis=0).to(tl.float64))
        tl.store(compared + LAST_NUM_LIKELIER * size + place, number)
        tl.store(compared + LAST_LIKELIER * size + place, mass)
    if is_checked:
        draft = tl.load(drafts + row)
        q_place = _place(packed, places, row, draft >= 0, Q)
        q_row = _draft_prob(q, columns, q_stride, q_place, draft, token, inside, Q)
        p = tl.where(inside, _target(x, token, row, True, facts, floors, temperature, greedy, num_rows), 0.0)
        total = tl.load(drawn + LEFT_TOTAL * num_entries + entry).to(tl.float32)
        overlap = tl.sum(_minimum(_left(p, q_row) / total, q_row), axis=0).to(tl.float64)
        tl.store(compared + LAST_OVERLAP * size + place, overlap)


@triton.jit
def _verdict_at(drafts, num_accepted, token_ids, row, entry, offset):
    """A row's draft; whether there is one, it was accepted, the row was reached; and the token emitted there."""
    last_offset, last = tl.load(num_accepted + entry).to(tl.int64), tl.load(token_ids + entry).to(tl.int64)
    draft, accepted = tl.load(drafts + row), offset < last_offset
    return draft, draft >= 0, accepted, offset <= last_offset, tl.where(accepted, draft, last)


@_kernel
def _report_rows(  # noqa: PLR0913
    logits,
    temperature,
    greedy,
    facts,
    floors,
    q,
    columns,
    packed,
    places,
    drafts,
    log_min_ps,
    top_ks,
    top_ps,
    reported,  # [1] bool
    sums,
    compared,
    entries,  # [R] int64
    offsets,  # [R] int64
    num_accepted,
    token_ids,
    mass_before,  # [D] float64: of q, before the draft that was sampled from each of its rows
    judged_drafts,  # [R] float64, as all that follows
    broken,  # [R]
    values,  # [R] logprobs
    ranks,  # [R]
    draft_probs,  # [R] q of the draft, where drafts were sampled, and
    before,  # [R] its mass before it
    stride,
    q_stride,
    num_rows,
    num_entries,
    mass_rounding,
    VOCABULARY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    Q: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry, offset = tl.load(entries + row), tl.load(offsets + row)
    draft, judged, accepted, reached, emitted = _verdict_at(drafts, num_accepted, token_ids, row, entry, offset)
    place = _place(packed, places, row, judged, Q)
    x = tl.load(logits + row * stride + emitted).to(tl.float32)
    p_emitted = _target(x, emitted, row, True, facts, floors, temperature, greedy, num_rows)
    q_draft = _draft_prob(q, columns, q_stride, place, draft, draft, judged, Q)
    highest, own = tl.load(facts + HIGHEST * num_rows + row), tl.load(temperature + row)
    top_k, top_p, log_min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row)
    code = 0
    if has_filters(log_min_p, top_k, top_p, VOCABULARY):
        number = tl.sum(of_row(sums, NUM_LIKELIER, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
        mass = tl.sum(of_row(sums, LIKELIER, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
        last_number = tl.sum(of_row(compared, LAST_NUM_LIKELIER, entry, num_entries, NUM_BLOCKS, PADDED), axis=0)
        last_mass = tl.sum(of_row(compared, LAST_LIKELIER, entry, num_entries, NUM_BLOCKS, PADDED), axis=0)
        number, mass = tl.where(accepted, number, last_number), tl.where(accepted, mass, last_mass)
        total = tl.load(facts + ALL_TOTAL * num_rows + row).to(tl.float64)
        outside = (number >= top_k) | (mass > (top_p + _EDGE_ROUNDING) * total)
        outside |= _soft(x, own, highest) < tl.exp(log_min_p) * (1 - 10 * _EDGE_ROUNDING)
        code = tl.where(reached & outside, SUPPORT, 0)
    code = tl.where(reached & ~(p_emitted > 0), P_ZERO, code)  # NaN is not above 0 either
    if Q != POINT_MASS:
        mass = tl.sum(of_row(sums, Q_MASS, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
        each = of_row(sums, LEAST_Q, row, num_rows, NUM_BLOCKS, PADDED)
        is_sane = (tl.abs(mass - 1) < mass_rounding) & (tl.max((~(each >= 0)).to(tl.int32), axis=0) == 0)
        code = tl.where(judged & ~(q_draft > 0), Q_ZERO, code)
        code = tl.where(judged & ~is_sane, LAW, code)
        tl.store(draft_probs + row, q_draft.to(tl.float64))
        tl.store(before + row, tl.load(mass_before + place, mask=judged, other=0.0))
    code = tl.where(reached & (highest == -float("inf")), NO_TOKEN, code)
    code = tl.where(reached & ~(highest < float("inf")), NOT_FINITE, code)
    tl.store(judged_drafts + row, draft.to(tl.float64))
    tl.store(broken + row, code.to(tl.float64))
    if tl.load(reported) != 0:
        value = x
        if PROCESSED:
            value, highest = tl.div_rn(x, own), tl.div_rn(highest, own)
            value = tl.where(value < tl.load(floors + row), -float("inf"), value)
        which = SOFT_TOTAL if PROCESSED else RAW_TOTAL
        value = value - highest - tl.log(tl.load(facts + which * num_rows + row))
        tl.store(values + row, value.to(tl.float64))
        above = tl.sum(of_row(sums, ABOVE, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
        last_above = tl.sum(of_row(compared, LAST_ABOVE, entry, num_entries, NUM_BLOCKS, PADDED), axis=0)
        tl.store(ranks + row, tl.where(accepted, above, last_above) + 1)


@triton.jit
def _keep(terms, which: tl.constexpr, row, num_rows, value, mean, where):
    """A term: what a value differs from its mean by; 0 where that is rounding."""
    value, mean = value.to(tl.float64), mean.to(tl.float64)
    difference = value - mean
    difference = tl.where(tl.abs(difference) <= tl.maximum(value, mean) * _EQUAL, 0.0, difference)
    tl.store(terms + which * num_rows + row, tl.where(where, difference, float("nan")))


@triton.jit
def _is_open(certain):
    """Return whether an outcome, certain at 1, is still open; false for NaN."""
    return certain < 1 - _LEAST_SPREAD


@triton.jit
def _is_undecided(chance):
    """Return whether an outcome of this chance may turn out either way; false for NaN."""
    return (chance > _LEAST_SPREAD) & _is_open(chance)


@_kernel
def _take_terms(  # noqa: PLR0913
    logits,
    temperature,
    greedy,
    facts,
    floors,
    q,
    columns,
    packed,
    places,
    drafts,
    sums,
    compared,
    drawn,
    entries,
    offsets,
    num_accepted,
    token_ids,
    checked,  # [1] bool
    counted,  # [E] bool
    coupled,
    terms,  # [NUM_TERMS + 1, R] float64: NaN where there is none; in the last row, what sum(min(p, q)) could achieve
    row_places,  # [3, R] float64: the rows of `Terms`
    stride,
    q_stride,
    num_rows,
    num_entries,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    Q: tl.constexpr,
):
    if tl.load(checked) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    entry, offset = tl.load(entries + row), tl.load(offsets + row)
    draft, judged, accepted, reached, emitted = _verdict_at(drafts, num_accepted, token_ids, row, entry, offset)
    drawn_token = tl.load(token_ids + entry).to(tl.int64)
    x = tl.load(logits + row * stride + emitted).to(tl.float32)
    p_emitted = _target(x, emitted, row, True, facts, floors, temperature, greedy, num_rows)
    x = tl.load(logits + row * stride + draft, mask=judged, other=0.0).to(tl.float32)
    p_draft = tl.where(judged, _target(x, draft, row, True, facts, floors, temperature, greedy, num_rows), 0.0)
    overlap = tl.sum(of_row(sums, OVERLAP, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
    square_p = tl.sum(of_row(sums, SQUARE_P, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
    all_counts = tl.load(counted + entry) & (offset <= tl.load(drawn + ALIVE * num_entries + entry).to(tl.int64))
    is_coupled = tl.load(coupled + entry) != 0
    counts, coupled_counts = all_counts & ~is_coupled, all_counts & is_coupled & reached
    total = tl.load(drawn + LEFT_TOTAL * num_entries + entry)  # 0 where a token was drawn from p
    below = tl.load(drawn + BELOW * num_entries + entry) / total
    own = tl.load(drawn + OWN * num_entries + entry) / total
    square = tl.sum(of_row(sums, SQUARE_LEFT, row, num_rows, NUM_BLOCKS, PADDED), axis=0) / (total * total)
    is_last = reached & ~accepted & (total > _LEAST_RESIDUAL)
    is_open = is_last & counts & _is_open(square)
    came, here = counts & reached & judged, counts & judged
    survived = accepted.to(tl.float64)
    q_draft, q_emitted = judged.to(tl.float32), (judged & (emitted == draft)).to(tl.float32)
    if Q != POINT_MASS:
        place = _place(packed, places, row, judged, Q)
        q_draft = _draft_prob(q, columns, q_stride, place, draft, draft, judged, Q)
        q_emitted = _draft_prob(q, columns, q_stride, place, draft, emitted, judged, Q)
    against = tl.minimum(q_emitted / tl.maximum(p_emitted, _TINY), 1.0)
    chance = tl.minimum(p_draft / tl.maximum(q_draft, _TINY, propagate_nan=tl.PropagateNan.ALL), 1.0)
    nothing, one = float("nan"), survived * 0 + 1
    tl.store(row_places + row, tl.where(reached & judged & ~is_coupled, chance.to(tl.float64), nothing))
    tl.store(row_places + num_rows + row, tl.where(is_last & ~is_coupled, below, nothing))
    tl.store(row_places + 2 * num_rows + row, tl.where(is_last & ~is_coupled, own, nothing))
    p_opens, overlap_opens = _is_open(square_p), _is_undecided(overlap)
    _keep(terms, 0, row, num_rows, p_emitted, square_p, coupled_counts & p_opens)
    _keep(terms, 1, row, num_rows, against, overlap, coupled_counts & judged & overlap_opens & (p_emitted > 0))
    if Q == POINT_MASS:
        is_open &= drawn_token != draft
        _keep(terms, 2, row, num_rows, p_emitted, square_p, counts & reached & p_opens)
        _keep(terms, 3, row, num_rows, survived, overlap, came & overlap_opens)
        _keep(terms, 4, row, num_rows, own, square, is_open & judged)
        _keep(terms, 5, row, num_rows, 2 * below + own, one, is_open)
        _keep(terms, 6, row, num_rows, overlap, one * 0, reached & judged)
    else:
        square_q = tl.sum(of_row(sums, SQUARE_Q, row, num_rows, NUM_BLOCKS, PADDED), axis=0)
        q_opens = _is_open(square_q)
        residual = tl.sum(of_row(compared, LAST_OVERLAP, entry, num_entries, NUM_BLOCKS, PADDED), axis=0)
        replaced = tl.minimum(q_emitted.to(tl.float64) / tl.maximum(own, _TINY), 1.0)
        _keep(terms, 2, row, num_rows, chance, overlap, coupled_counts & judged & overlap_opens)
        _keep(terms, 3, row, num_rows, q_draft, square_q, coupled_counts & judged & q_opens)
        _keep(terms, 4, row, num_rows, p_emitted, square_p, counts & reached & p_opens)
        _keep(terms, 5, row, num_rows, against, overlap, came & overlap_opens & (p_emitted > 0))
        _keep(terms, 6, row, num_rows, chance, overlap, here & overlap_opens)
        _keep(terms, 7, row, num_rows, q_draft, square_q, here & q_opens)
        _keep(terms, 8, row, num_rows, survived, overlap, came & overlap_opens)
        _keep(terms, 9, row, num_rows, survived, chance, came & _is_undecided(chance))
        _keep(terms, 10, row, num_rows, replaced, residual, is_open & judged)
        _keep(terms, 11, row, num_rows, 2 * below + own, one, is_open)
        _keep(terms, 12, row, num_rows, overlap, one * 0, reached & judged)


@_kernel
def _sum_terms(  # noqa: PLR0913
    checked,  # [1] bool
    terms,  # [NUM_TERMS + 1, R] float64
    stakes,  # [NUM_STAKES] float64
    achievable,  # [1] float64
    sums,  # [NUM_TERMS, NUM_STAKES + 4] float64
    num_rows,
    NUM_STAKES: tl.constexpr,
    PADDED_STAKES: tl.constexpr,
    LANES: tl.constexpr,
):
    if tl.load(checked) == 0:
        return
    which, num_terms = tl.program_id(0), tl.num_programs(0) - 1
    stake = tl.arange(0, PADDED_STAKES)
    bets = tl.load(stakes + stake, mask=stake < NUM_STAKES, other=0.0)
    zeros = tl.zeros([LANES], tl.float64)
    gains = tl.zeros([PADDED_STAKES], tl.float64)
    total, number, positive, negative, squares = zeros, zeros, zeros, zeros, zeros
    for begin in range(0, num_rows, LANES):
        row = begin + tl.arange(0, LANES)
        z = tl.load(terms + which * num_rows + row, mask=row < num_rows, other=float("nan"))
        there = tl.abs(z) < float("inf")
        total += tl.where(there, z, 0.0)
        z = tl.where(there, tl.minimum(tl.maximum(z, -1.0), 1.0), 0.0)
        gain = tl.log(1 + bets[:, None] * z[None, :] - (tl.abs(bets) * _ROUNDING)[:, None])
        gains += tl.sum(tl.where(there[None, :], gain, 0.0), axis=1)
        number += there.to(tl.float64)
        positive += tl.maximum(z, 0.0)
        negative += tl.maximum(-z, 0.0)
        squares += z * z
    if which == num_terms:
        tl.store(achievable, tl.sum(total, axis=0))
    else:
        own = sums + which * (NUM_STAKES + 4)
        tl.store(own + stake, gains, mask=stake < NUM_STAKES)
        tl.store(own + NUM_STAKES, tl.sum(number, axis=0))
        tl.store(own + NUM_STAKES + 1, tl.sum(positive, axis=0))
        tl.store(own + NUM_STAKES + 2, tl.sum(negative, axis=0))
        tl.store(own + NUM_STAKES + 3, tl.sum(squares, axis=0))
