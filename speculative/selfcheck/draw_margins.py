"""How far replayed logits would have to move for a draw, made again with its own random number, to give the token that
was served.

With equal arithmetic the same draw gives the same token. Where rounding differs, the edges of a token's interval of the
cumulative distribution move: if each logit moves by noise of standard deviation s, the edge F_k by s times
sqrt(sum over i of p_i^2 (1[i <= k] - F_k)^2). The distance of the uniform to the interval over that root is a miss in
nats. For a choice by noise it is the gap to the winner (as in DiFR, Karvonen et al., arXiv 2511.20621).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.request import Draw, Redrawn, Request, SamplingParams
from speculative.sampling.rng import Purpose, noise_uniforms, uniforms
from speculative.selfcheck.vllm_draws import token_numbers, uniforms_of


class _Edges(NamedTuple):
    """How near to a filter's edge a token may be on either side of it."""

    nats: float
    mass: float  # for the edge of the nucleus, which a cumulative mass decides


_OWN_EDGES = _Edges(0.1, 0.01)  # where an engine of the same arithmetic replays
_VLLM_EDGES = _Edges(0.25, 0.04)  # vLLM computes logits in bfloat16: 0.04 nats of noise
_CDF_ROUNDING = 1e-6  # of a cumulative sum of float32 probabilities
_RACE_ROUNDING = 1e-9  # of E / p


def redraw(
    scaled: Tensor, kept: Tensor, probs: Tensor, tokens: Sequence[int], draws: Sequence[Draw], request: Request
) -> list[Redrawn]:
    """Draw n tokens again.

    Args:
        scaled: [n, V] float32, logits after the rules and the temperature. kept: the same with -inf where a token is
            filtered out. probs: [n, V], softmax of `kept`.
        tokens: those that were served. draws: of each.
        request: its seed and parameters.
    """
    every = zip(scaled, kept, probs.cpu(), tokens, draws, strict=True)
    rows = [
        _Row(own_scaled, own_kept, own_probs, token, request.params, _edges_of(draw))
        for own_scaled, own_kept, own_probs, token, draw in every
    ]
    numbers = _numbers_of(draws, request)
    redrawn = []
    for row, draw, drawn in zip(rows, draws, _uniforms_of(draws, request.seed), strict=True):
        miss = loose = 0.0
        if draw.rule == "bonus":
            miss, loose = _by_uniform(row, drawn[0])
        elif draw.rule == "residual":
            miss, loose = _by_uniform(row, drawn[1], draw.rejected)
        elif draw.rule == "noise":
            miss, loose = _by_noise(row, _noise_at(request.seed, draw.round_start + draw.offset, len(row.probs)))
        elif draw.rule == "vllm_noise":
            miss, loose = _by_noise(row, uniforms_of(numbers[_token_index(draw, request)], len(row.probs)))
        of_rejected = float(row.probs[draw.rejected]) if draw.rejected >= 0 else 0.0
        redrawn.append(Redrawn(miss, loose, of_rejected, (drawn[2], drawn[3])))
    return redrawn


def _edges_of(draw: Draw) -> _Edges:
    return _VLLM_EDGES if draw.rule == "vllm_noise" else _OWN_EDGES


@dataclass(frozen=True, slots=True)
class _Row:
    """One token's distribution, [V] each."""

    scaled: Tensor
    kept: Tensor
    probs: Tensor
    token: int
    params: SamplingParams
    edges: _Edges

    def edge_mass(self) -> Tensor:
        """[V] float64, of tokens that rounding may move across an edge of the filters; 0 elsewhere."""
        if not self.params.filtered:
            return torch.zeros_like(self.probs, dtype=torch.float64)
        near = _near_edges(self.scaled, self.kept, self.params, self.edges)
        mass = (self.scaled - self.kept.logsumexp(dim=-1)).double().exp()
        return torch.where(near, mass, 0.0).cpu()


def _uniforms_of(draws: Sequence[Draw], seed: int) -> list[list[float]]:
    """[n, 4] for a bonus token, for the residual, and for the coins at the draw's offset and the next."""
    uses = ((Purpose.BONUS, 0), (Purpose.RESIDUAL, 0), (Purpose.COIN, 0), (Purpose.COIN, 1))
    keys = [(seed, draw.round_start, draw.offset + ahead, use) for draw in draws for use, ahead in uses]
    drawn: list[list[float]] = uniforms(*np.array(keys, np.uint64).T).reshape(-1, len(uses)).tolist()
    return drawn


def _by_uniform(row: _Row, uniform: float, without: int = -1) -> tuple[float, float]:
    """The miss of a draw by inverse CDF, from p without one token (-1 = with all), and the loose one."""
    probs = row.probs
    if without >= 0:
        probs = probs.clone()
        probs[without] = 0.0
    total = float(probs.sum(dtype=torch.float64))
    own = float(probs[row.token]) / total if total > 0 else 0.0
    if own <= 0:
        return math.inf, 0.0 if row.edge_mass()[row.token] > 0 else math.inf
    below = float(probs[: row.token].sum(dtype=torch.float64)) / total
    distance = max(below - uniform, uniform - below - own) - _CDF_ROUNDING
    if distance <= 0:
        return 0.0, 0.0
    is_below = uniform < below
    at, first_above = (below, row.token) if is_below else (below + own, row.token + 1)
    squares = (probs.double() / total).square()
    moves = math.sqrt((1 - at) ** 2 * float(squares[:first_above].sum()) + at**2 * float(squares[first_above:].sum()))
    # What is on an edge may be there or not, and moves every edge of the cumulative distribution with it.
    edge_mass = row.edge_mass()
    slack = math.inf if edge_mass[row.token] > 0 else float(edge_mass.sum())
    moves = max(moves, _CDF_ROUNDING)
    return distance / moves, max(0.0, distance - slack) / moves


def _noise_at(seed: int, position: int, vocab_size: int) -> Tensor:
    """[V] float64, the uniforms behind our own noise."""
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    return noise_uniforms(signed, torch.tensor([position]), vocab_size)[0]


def _numbers_of(draws: Sequence[Draw], request: Request) -> list[int]:
    """vLLM's, of the answer's tokens up to the last that is drawn by one."""
    last = max((_token_index(draw, request) for draw in draws if draw.rule == "vllm_noise"), default=-1)
    return token_numbers(request.seed, last + 1) if last >= 0 else []


def _token_index(draw: Draw, request: Request) -> int:
    return draw.round_start + draw.offset - (request.score_from or 0)


def _by_noise(row: _Row, unit: Tensor) -> tuple[float, float]:
    """The miss of a choice by noise, of which [V] are the uniforms, and the loose one. With E = -log(u) the chosen
    token is the one with the least E / p (the same as the largest log p + Gumbel noise); E is at least 1 - u, which
    rules out all but a few."""
    own = float(row.probs[row.token])
    if own <= 0:
        return math.inf, 0.0 if row.edge_mass()[row.token] > 0 else math.inf
    lead = -math.log(float(unit[row.token])) / own
    better = torch.nonzero(1 - unit < row.probs * lead)[:, 0]
    leads = -unit[better].log() / row.probs[better].double()
    if len(leads) == 0 or float(leads.min()) >= lead * (1 - _RACE_ROUNDING):
        return 0.0, 0.0
    edge_mass = row.edge_mass()
    certain = leads[edge_mass[better] == 0] if edge_mass[row.token] == 0 else leads[:0]
    loose = max(0.0, math.log(lead / float(certain.min()))) if len(certain) else 0.0
    return math.log(lead / float(leads.min())), loose


def _near_edges(scaled: Tensor, kept: Tensor, params: SamplingParams, edges: _Edges) -> Tensor:
    """[V] bool: tokens that rounding may move across an edge of the filters."""
    inside = kept > -torch.inf
    lowest, highest_outside = kept[inside].amin(), scaled.masked_fill(inside, -torch.inf).amax()
    near = torch.where(inside, scaled <= highest_outside + edges.nats, scaled >= lowest - edges.nats)
    if params.min_p > 0:
        near |= (scaled - (scaled.amax() + math.log(params.min_p))).abs() <= edges.nats
    if params.top_p < 1:
        probs, order = scaled.softmax(dim=-1).sort(descending=True)
        if params.top_k:
            probs = probs / probs[: params.top_k].sum()
        before = probs.cumsum(dim=-1) - probs  # a token is in the nucleus if this is below top_p
        near[order] |= (before - params.top_p).abs() <= edges.mass
    return near & (scaled > -torch.inf)
