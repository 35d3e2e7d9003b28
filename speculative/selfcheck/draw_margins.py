"""How far replayed logits would have to move for a draw, made again with its own random number, to give the token that
was served.

With equal arithmetic the same draw gives the same token. Where rounding differs, the edges of a token's interval of the
cumulative distribution move: if each logit moves by noise of standard deviation s, the edge F_k by s times
sqrt(sum over i of p_i^2 (1[i <= k] - F_k)^2). The distance of the uniform to the interval over that root is a miss in
nats. A draw from (p - q)+ moves with the drafter's logits, too. For a choice by noise it is the gap to the winner (as
in DiFR, Karvonen et al., arXiv 2511.20621).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.request import Draw, Redrawn, Request, SamplingParams
from speculative.sampling.probs import SamplingRows
from speculative.sampling.rng import Purpose, noise_uniforms, uniforms
from speculative.selfcheck.replayed_draws import log_share
from speculative.selfcheck.vllm_draws import token_numbers, uniforms_of


class _Edges(NamedTuple):
    """How near to a filter's edge a token may be on either side of it."""

    nats: float
    mass: float  # for the edge of the nucleus, which a cumulative mass decides


_OWN_EDGES = _Edges(0.1, 0.01)  # where an engine of the same arithmetic replays
_VLLM_EDGES = _Edges(0.25, 0.04)  # vLLM computes logits in bfloat16: 0.04 nats of noise
_CDF_ROUNDING = 1e-6  # of a cumulative sum of float32 probabilities
_RACE_ROUNDING = 1e-9  # of E / p
_NEARLY = 0.75  # of q: where p is above it, noise may leave something of p - q


class Distributions(NamedTuple):
    """Of n tokens, [n, V] float32, or of one. scaled: logits after the rules and the temperature. kept: the same with
    -inf where a token is filtered out. probs: softmax of `kept`."""

    scaled: Tensor
    kept: Tensor
    probs: Tensor

    @classmethod
    def of(
        cls, adjusted: Tensor, rows: SamplingRows, process: Callable[[Tensor, SamplingRows], Tensor]
    ) -> "Distributions":
        """Those that temperature and filters make of logits [n, V]; process: of the engine's `VocabularyOps`."""
        kept = process(adjusted, rows)
        return cls(adjusted / rows.temperature, kept, kept.softmax(dim=-1))

    def each(self) -> "Iterator[Distributions]":
        """The n one by one, their probabilities on the host."""
        return (Distributions(*one) for one in zip(self.scaled, self.kept, self.probs.cpu(), strict=True))


def redraw(
    target: Distributions,
    tokens: Sequence[int],
    draws: Sequence[Draw],
    request: Request,
    drafter: Mapping[int, Distributions],
) -> list[Redrawn]:
    """Draw n tokens again.

    Args:
        target: of the n.
        tokens: those that were served. draws: of each.
        request: its seed and parameters.
        drafter: that the drafts rejected there were sampled from, by row; where known.
    """
    rows = [
        _Row(own, token, request.params, _edges_of(draw))
        for own, token, draw in zip(target.each(), tokens, draws, strict=True)
    ]
    numbers = _numbers_of(draws, request)
    redrawn = []
    for index, (row, draw, drawn) in enumerate(zip(rows, draws, _uniforms_of(draws, request.seed), strict=True)):
        miss, loose, of_draft = 0.0, 0.0, None
        if draw.rule == "bonus":
            miss, loose = _by_uniform(row, drawn[0])
        elif draw.rule == "residual":
            miss, loose = _by_uniform(row, drawn[1], draw.rejected)
        elif draw.rule == "recovered" and index in drafter and index >= len(draw.accepted_probs):
            accepted = rows[index - len(draw.accepted_probs) : index]
            miss, loose = _by_residual(row, drafter[index], drawn[1], _log_ratios(accepted, draw.accepted_probs))
            of_draft = float(drafter[index].probs[draw.rejected])
        elif draw.rule == "noise":
            miss, loose = _by_noise(row, _noise_at(request.seed, draw.round_start + draw.offset, len(row.probs)))
        elif draw.rule == "vllm_noise":
            miss, loose = _by_noise(row, uniforms_of(numbers[_token_index(draw, request)], len(row.probs)))
        of_rejected = float(row.probs[draw.rejected]) if draw.rejected >= 0 else 0.0
        redrawn.append(Redrawn(miss, loose, of_rejected, (drawn[2], drawn[3]), of_draft))
    return redrawn


def _edges_of(draw: Draw) -> _Edges:
    return _VLLM_EDGES if draw.rule == "vllm_noise" else _OWN_EDGES


@dataclass(frozen=True, slots=True)
class _Row:
    """One token, and what it was sampled from."""

    target: Distributions
    token: int
    params: SamplingParams
    edges: _Edges

    @property
    def probs(self) -> Tensor:
        """[V] float32, on the host."""
        return self.target.probs

    def edge_mass(self, of: Distributions | None = None) -> Tensor:
        """[V] float64, of tokens that rounding may move across an edge of the filters; 0 elsewhere."""
        scaled, kept, probs = of or self.target
        if not self.params.filtered:
            return torch.zeros_like(probs, dtype=torch.float64)
        near = _near_edges(scaled, kept, self.params, self.edges)
        mass = (scaled - kept.logsumexp(dim=-1)).double().exp()
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
    if not probs[row.token] > 0:
        return math.inf, 0.0 if row.edge_mass()[row.token] > 0 else math.inf

    def moves(at: float, first_above: int) -> float:
        before, after = (float(part.double().square().sum()) for part in probs.tensor_split([first_above]))
        return math.sqrt((1 - at) ** 2 * before + at**2 * after)

    return _of_interval(row, probs, uniform, moves)


def _by_residual(row: _Row, draft: Distributions, uniform: float, log_ratios: Sequence[float]) -> tuple[float, float]:
    """The miss of a draw by inverse CDF from (share p - q)+, and the loose one.

    Args:
        draft: that the rejected draft was sampled from.
        log_ratios: log p / q of the drafts accepted before it, as far as the share depends on them.
    """
    share = log_share(log_ratios)
    if share == -math.inf:  # an accepted draft lies outside of a filter: its own check reports it
        return 0.0, 0.0
    p, q, token = row.probs * math.exp(share), draft.probs, row.token
    if not p[token] > 0:
        return math.inf, 0.0 if row.edge_mass()[token] > 0 else math.inf
    residual = (p - q).clamp(min=0)
    if residual.sum() <= _CDF_ROUNDING:  # all of it is rounding
        return 0.0, 0.0

    def moves(at: float, first_above: int) -> float:
        weights = torch.where(p > q * _NEARLY, -at, 0.0).double()
        weights[:first_above] = torch.where(p[:first_above] > q[:first_above] * _NEARLY, 1 - at, 0.0).double()
        of_share = len(log_ratios) * float(weights @ p.double()) ** 2  # it moves all of p together
        return math.sqrt(math.exp(2 * share) * _variance(row.probs, weights) + _variance(q, weights) + of_share)

    miss, loose = _of_interval(row, residual, uniform, moves, draft)
    if q[token] < p[token]:
        return miss, loose
    apart = math.log(q[token] / p[token])
    return max(miss, apart), 0.0 if row.edge_mass(draft)[token] > 0 else max(loose, apart)


def _log_ratios(accepted: Sequence[_Row], draft_probs: Sequence[float]) -> list[float]:
    """log p / q of accepted drafts; q as it was served."""
    return [
        math.log(p / q) if (p := float(row.probs[row.token])) > 0 < q else -math.inf
        for row, q in zip(accepted, draft_probs, strict=True)
    ]


def _variance(probs: Tensor, weights: Tensor) -> float:
    """Of the sum of weights [V] times probabilities [V], if noise of variance 1 is added to each logit behind these."""
    own = probs.double()
    return float((own * (weights - weights @ own)).square().sum())


def _of_interval(
    row: _Row,
    weights: Tensor,
    uniform: float,
    moves: Callable[[float, int], float],
    draft: Distributions | None = None,
) -> tuple[float, float]:
    """The miss of a token's interval, and the loose one.

    Args:
        weights: [V] that it was drawn by: p, or what is left of it.
        moves: the mass by which a nat of noise moves an edge of the cumulative distribution, given its place and the
            first token above it.
        draft: whose rejection left this of p; None = there was none.
    """
    total = float(weights.sum(dtype=torch.float64))
    own = float(weights[row.token]) / total
    below = float(weights[: row.token].sum(dtype=torch.float64)) / total
    distance = max(below - uniform, uniform - below - own) - _CDF_ROUNDING / total
    if distance <= 0:
        return 0.0, 0.0
    at, first_above = (below, row.token) if uniform < below else (below + own, row.token + 1)
    moved = max(moves(at, first_above) / total, _CDF_ROUNDING)
    # What is on an edge may be there or not, and moves every edge of the cumulative distribution with it.
    edge_mass = row.edge_mass() if draft is None else row.edge_mass() + row.edge_mass(draft)
    slack = math.inf if edge_mass[row.token] > 0 else float(edge_mass.sum()) / total
    return distance / moved, max(0.0, distance - slack) / moved


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
