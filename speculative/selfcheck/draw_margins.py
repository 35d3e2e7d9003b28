"""Margins of draws that are made again with their own random numbers: how far replayed logits would have to move to
give the token that was served.

With equal arithmetic the same draw gives the same token. Where rounding differs, the edges of a token's interval of the
cumulative distribution move: if each logit moves by noise of standard deviation s, the edge F_k by s / T times
sqrt(sum over i of p_i^2 (1[i <= k] - F_k)^2), and its log odds by that over F_k (1 - F_k), which holds further: of two
tokens exactly. The distance of the uniform to the interval in log odds over that root is a miss in nats. A draw from
(p - q)+ moves with the drafter's logits, too. For a choice by noise it is the gap to the winner (as in DiFR, Karvonen
et al., arXiv 2511.20621).

Rounding also moves tokens across the edges of the filters, and with one token's mass all others' share: `_Edges`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.request import Draw, Redrawn, Request, SamplingParams
from speculative.sampling.probs import SamplingRows, temperature_of
from speculative.sampling.rng import Purpose, noise_uniforms, uniforms
from speculative.selfcheck.vllm_draws import token_numbers, uniforms_of

_FURTHER_NATS = 2.0  # of log p; what lies further below the nucleus cannot enter it
_CDF_ROUNDING = 1e-6  # of a cumulative sum of float32 probabilities
_RACE_ROUNDING = 1e-9  # of E / p
_NEARLY = 0.75  # of q: where p is above it, noise may leave something of p - q


class Distributions(NamedTuple):
    """Distributions of n tokens, [n, V] float32, or of one.

    scaled: logits after the rules and the temperature.
    kept: the same with -inf where a token is filtered out.
    probs: softmax of `kept`.
    """

    scaled: Tensor
    kept: Tensor
    probs: Tensor

    @classmethod
    def of(
        cls, adjusted: Tensor, rows: SamplingRows, process: Callable[[Tensor, SamplingRows], Tensor]
    ) -> "Distributions":
        """Apply temperature and filters to logits [n, V]; process: of the engine's `VocabularyOps`."""
        kept = process(adjusted, rows)
        return cls(adjusted / rows.temperature, kept, kept.softmax(dim=-1))

    def each(self) -> "Iterator[Distributions]":
        """The n one by one."""
        return (Distributions(*one) for one in zip(*self, strict=True))


def redraw(
    target: Distributions,
    tokens: Sequence[int],
    draws: Sequence[Draw],
    request: Request,
    drafter: Mapping[int, Distributions],
    host: Kernels | None = None,
) -> list[Redrawn]:
    """Draw n tokens again. Whole distributions are read only where they are, or for a draw that misses: on a GPU the
    copies would take longer than the forward pass.

    Args:
        target: of the n.
        tokens: those that were served. draws: of each.
        request: its seed and parameters.
        drafter: that the drafts rejected there were sampled from, by row; where known.
        host: kernels that compute random numbers; None = numpy and torch.
    """
    temperature = temperature_of(request.params)
    rows = _rows_of(target, tokens, draws, request)
    last = max((_token_index(draw, request) for draw in draws if draw.rule == "vllm_noise"), default=-1)
    numbers = token_numbers(request.seed, last + 1) if last >= 0 else []
    uses = (Purpose.BONUS, Purpose.RESIDUAL, Purpose.COIN)
    keys = [(request.seed, draw.round_start, draw.offset, use) for draw in draws for use in uses]
    drawn_with = uniforms(*np.array(keys, np.uint64).T, kernels=host).reshape(-1, len(uses)).tolist()
    signed = request.seed - 2**64 if request.seed >= 2**63 else request.seed
    seed = torch.tensor([signed], device=target.probs.device)
    redrawn = []
    for index, (row, draw, drawn) in enumerate(zip(rows, draws, drawn_with, strict=True)):
        miss, loose, of_draft = 0.0, 0.0, None
        if draw.rule == "bonus":
            miss, loose = _by_uniform(row, drawn[0])
        elif draw.rule == "residual":
            miss, loose = _by_uniform(row, drawn[1], draw.rejected)
        elif draw.rule == "recovered" and index in drafter:
            miss, loose = _by_residual(row, drafter[index], drawn[1])
            of_draft = float(drafter[index].probs[draw.rejected])
        elif draw.rule == "noise":
            position = torch.full_like(seed, draw.round_start + draw.offset)
            miss, loose = _by_noise(row, noise_uniforms(seed, position, len(row.probs), host)[0])
        elif draw.rule == "vllm_noise":
            miss, loose = _by_noise(row, uniforms_of(numbers[_token_index(draw, request)], len(row.probs)))
        redrawn.append(
            Redrawn(
                # Margins are nats of the logits after the temperature; rounding is of those before it.
                miss * temperature,
                loose * temperature,
                row.rejected.p,
                drawn[2],
                of_draft,
                row.bounds(row.own),
                row.bounds(row.rejected),
                temperature,
            )
        )
    return redrawn


class _Edges(NamedTuple):
    """Tokens that rounding may move across the edges of the filters of n tokens.

    mass: [n, V] float32, of each token beside those that are kept.
    near: [n, V] bool.
    sure: [n] the mass of what is kept and not near.
    moving: [n] of what is near.
    """

    mass: Tensor
    near: Tensor
    sure: Tensor
    moving: Tensor


def _edges_of(target: Distributions, request: Request) -> _Edges | None:
    """Find the edges of n distributions; None where nothing is filtered."""
    if not request.params.filtered:
        return None
    near = _near_edges(target, request.params, request.edge_nats)
    # In units of the mass that is kept, so that p of a token, with other tokens kept, is its mass over theirs.
    mass = (target.scaled - target.kept.logsumexp(dim=-1, keepdim=True)).exp()
    sure = torch.where((target.kept > -torch.inf) & ~near, mass, 0.0).sum(dim=-1)
    return _Edges(mass, near, sure, torch.where(near, mass, 0.0).sum(dim=-1))


class _Token(NamedTuple):
    """One token of a distribution: p, its mass beside those that are kept, and whether rounding may move it across an
    edge of the filters."""

    p: float = 0.0
    mass: float = 0.0
    near: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """One token, and what it was sampled from.

    probs: [V] p, where it was computed.
    near: [V] as in `_Edges`; None where nothing is filtered.
    own, rejected: the token, and the draft that was rejected there.
    total, below: the sum of p, and that of the tokens below this one.
    sure, moving: as in `_Edges`.
    """

    request: Request
    token: int
    probs: Tensor
    near: Tensor | None
    own: _Token
    rejected: _Token
    total: float
    below: float
    sure: float = 0.0
    moving: float = 0.0

    def bounds(self, one: _Token) -> tuple[float, float]:
        """The least and the most that p of a token may be."""
        if self.near is None:
            return one.p, one.p
        if one.near:  # with nothing that is sure, whatever is near may be all there is
            return 0.0, one.mass / (self.sure + one.mass) if self.sure > 0 else 1.0
        if not (one.mass > 0 and one.p > 0):
            return 0.0, 0.0
        return one.mass / (self.sure + self.moving), one.mass / self.sure


def _rows_of(target: Distributions, tokens: Sequence[int], draws: Sequence[Draw], request: Request) -> list[_Row]:
    """Return the rows of n tokens, with one copy of what is known of each."""
    probs, edges = target.probs, _edges_of(target, request)
    rejected = [max(draw.rejected, 0) for draw in draws]
    ids = torch.tensor([tokens, rejected], device=probs.device).T
    below = [row[:token].sum(dtype=torch.float64) for row, token in zip(probs, tokens, strict=True)]
    columns = [probs.gather(1, ids), probs.sum(dim=-1, dtype=torch.float64)[:, None], torch.stack(below)[:, None]]
    columns += (
        [probs.new_zeros((len(tokens), 6))]
        if edges is None
        else [edges.mass.gather(1, ids), edges.near.gather(1, ids), edges.sure[:, None], edges.moving[:, None]]
    )
    rows = []
    for index, known in enumerate(torch.cat([one.double() for one in columns], dim=1).tolist()):
        p, of_rejected, total, below_it, mass, rejected_mass, near, rejected_near, *sums = known
        own, draft = _Token(p, mass, bool(near)), _Token(of_rejected, rejected_mass, bool(rejected_near))
        rejected_one = draft if draws[index].rejected >= 0 else _Token()
        all_near = None if edges is None else edges.near[index]
        rows.append(_Row(request, tokens[index], probs[index], all_near, own, rejected_one, total, below_it, *sums))
    return rows


class _Interval(NamedTuple):
    """A token's part of a cumulative distribution of unscaled weights."""

    token: int
    total: float
    below: float
    own: float


def _by_uniform(row: _Row, uniform: float, without: int = -1) -> tuple[float, float]:
    """The miss of a draw by inverse CDF, from p without one token (-1 = with all), and the loose one."""
    left_out = row.rejected.p if without >= 0 else 0.0
    below = row.below - left_out if without < row.token else row.below
    interval = _Interval(row.token, row.total - left_out, below, 0.0 if without == row.token else row.own.p)
    if not interval.own > 0:
        return math.inf, 0.0 if row.own.near else math.inf
    if interval.total <= _CDF_ROUNDING:  # all of it is rounding
        return 0.0, 0.0

    def moves(at: float, first_above: int) -> float:
        probs = row.probs.cpu()
        if without >= 0:
            probs = probs.index_fill(0, torch.tensor(without), 0.0)
        # dF_k / dlogit_i = p_i (1[i <= k] - F_k), and independent noises add up in squares.
        before, after = (float(part.double().square().sum()) for part in probs.tensor_split([first_above]))
        return math.sqrt((1 - at) ** 2 * before + at**2 * after)

    return _of_interval(interval, uniform, moves, near=row.own.near, moving=row.moving)


def _by_residual(row: _Row, draft: Distributions, uniform: float) -> tuple[float, float]:
    """The miss of a draw by inverse CDF from (p - q)+, q of `draft`, and the loose one."""
    token = row.token
    if not row.own.p > 0:
        return math.inf, 0.0 if row.own.near else math.inf
    residual = (row.probs - draft.probs).clamp(min=0)
    edges = _edges_of(Distributions(*(part[None] for part in draft)), row.request)
    known = [
        residual.sum(dtype=torch.float64),
        residual[:token].sum(dtype=torch.float64),
        residual[token],
        draft.probs[token],
    ]
    known += [] if edges is None else [edges.near[0, token], edges.moving[0]]
    total, below, own, q_own, *of_edges = torch.stack([one.double() for one in known]).tolist()
    near, moving = of_edges or (0.0, 0.0)
    if total <= _CDF_ROUNDING:  # all of it is rounding
        return 0.0, 0.0

    def moves(at: float, first_above: int) -> float:
        # The logits behind p and those behind q have noise of their own: two independent parts.
        p, q = row.probs.cpu(), draft.probs.cpu()
        weights = torch.where(p > q * _NEARLY, -at, 0.0).double()
        weights[:first_above] = torch.where(p[:first_above] > q[:first_above] * _NEARLY, 1 - at, 0.0).double()
        return math.sqrt(_variance(p, weights) + _variance(q, weights))

    interval = _Interval(token, total, below, own)
    miss, loose = _of_interval(interval, uniform, moves, near=row.own.near or near > 0, moving=row.moving + moving)
    if q_own < row.own.p:
        return miss, loose
    # Nothing is left of the token here: log p and log q have to come so much closer before any uniform gives it.
    apart = math.log(q_own / row.own.p)
    return max(miss, apart), 0.0 if near else max(loose, apart)


def _variance(probs: Tensor, weights: Tensor) -> float:
    """Return the variance of weights [V] @ probs [V], if noise of variance 1 is added to each logit behind these."""
    own = probs.double()
    return float((own * (weights - weights @ own)).square().sum())


def _of_interval(
    interval: _Interval, uniform: float, moves: Callable[[float, int], float], *, near: bool, moving: float
) -> tuple[float, float]:
    """The miss of a token's interval, and the loose one, in nats of the logits behind the weights.

    Args:
        interval: of p, or of what is left of it.
        moves: the mass by which a nat of noise moves an edge of the cumulative distribution, given its place and the
            first token above it.
        near: the token is on an edge of the filters of what the weights are made of.
        moving: the mass on those edges.
    """
    token, total = interval.token, interval.total
    own, below = interval.own / total, interval.below / total
    rounding = _CDF_ROUNDING / total

    def miss(reach: float) -> float:
        """Return where the edges of the interval may move so far by themselves."""
        if below - reach <= uniform <= below + own + reach:
            return 0.0
        at, first_above = (below, token) if uniform < below else (below + own, token + 1)
        # An edge's log odds stay almost linear over many nats of noise, which its place does not.
        at = min(max(at, rounding), 1 - rounding)
        nearest = uniform + reach if uniform < below else uniform - reach
        moved = max(moves(at, first_above) / total, rounding) / (at * (1 - at))
        return abs(_log_odds(nearest) - _log_odds(at)) / moved

    strict = miss(rounding)
    if near or not strict or not moving:
        return strict, 0.0 if near else strict
    # What is on an edge may be there or not, and moves every edge of the cumulative distribution with it.
    return strict, miss(rounding + moving / total)


def _log_odds(share: float) -> float:
    return math.log(share) - math.log1p(-share)


def _token_index(draw: Draw, request: Request) -> int:
    return draw.round_start + draw.offset - (request.score_from or 0)


def _by_noise(row: _Row, unit: Tensor) -> tuple[float, float]:
    """The miss of a choice by noise, of which [V] are the uniforms, and the loose one. With E = -log(u) the chosen
    token is the one with the least E / p (the same as the largest log p + Gumbel noise); E is at least 1 - u, which
    rules out all but a few."""
    own, probs = row.own.p, row.probs.to(unit.device)
    if own <= 0:
        return math.inf, 0.0 if row.own.near else math.inf
    lead = -math.log(float(unit[row.token])) / own
    better = torch.nonzero(1 - unit < probs * lead)[:, 0]
    leads = -unit[better].log() / probs[better].double()
    if len(leads) == 0 or float(leads.min()) >= lead * (1 - _RACE_ROUNDING):
        return 0.0, 0.0
    certain = leads[:0] if row.own.near else leads
    if row.near is not None and len(certain):
        certain = leads[~row.near.to(unit.device)[better]]
    loose = max(0.0, math.log(lead / float(certain.min()))) if len(certain) else 0.0
    return math.log(lead / float(leads.min())), loose


def _near_edges(target: Distributions, params: SamplingParams, edge_nats: float) -> Tensor:
    """[n, V] bool: tokens that rounding may move across an edge of the filters."""
    scaled, inside = target.scaled, target.kept > -torch.inf
    reach = edge_nats / temperature_of(params)
    lowest = target.kept.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True)
    highest_outside = scaled.masked_fill(inside, -torch.inf).amax(dim=-1, keepdim=True)
    if params.top_k or params.top_p < 1:  # keep ties with the last token, too, of which rounding may part some
        tied = (target.kept == lowest).sum(dim=-1, keepdim=True) > 1
        highest_outside = torch.where(tied, lowest, highest_outside)
    near = torch.where(inside, scaled <= highest_outside + reach, scaled >= lowest - reach)
    if params.min_p > 0:
        edge = scaled.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        near |= (scaled - edge).abs() <= reach
    if params.top_p < 1:
        most = int((scaled >= lowest - reach - _FURTHER_NATS).sum(dim=-1).amax())
        highest, order = scaled.topk(most, dim=-1)  # the nucleus, and what may enter it
        within = scaled.logsumexp(dim=-1, keepdim=True)
        if params.top_k:
            within = highest[:, : params.top_k].logsumexp(dim=-1, keepdim=True)
        probs = (highest - within).exp()
        before = probs.cumsum(dim=-1) - probs  # a token is in the nucleus if this is below top_p
        # The mass before a token moves with all logits, as an edge of the cumulative distribution does.
        squares = probs.square()
        above = squares.cumsum(dim=-1) - squares
        below = squares.sum(dim=-1, keepdim=True) - above
        moved = reach * ((1 - before) ** 2 * above + before**2 * below).sqrt()
        near.scatter_(1, order, near.gather(1, order) | ((before - params.top_p).abs() <= moved))
    return near & (scaled > -torch.inf)
