"""Changes that a request's tokens so far, and its parameters, make to the logits of a row: masks, biases, penalties.

Everything here holds at every verified position, drafted ones included: a row's context is the sequence's tokens and
the drafts of the round before it. Only the cells of the logits that change are touched, and only in rows that ask.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from speculative.state.batch import RowContext
from speculative.state.logit_constraints import Float32s, Int64s, TokenRules

_Ruled = tuple[int, TokenRules, RowContext]  # a row whose request has rules


def adjust(logits: Tensor, contexts: Sequence[RowContext], eos_token_ids: Sequence[int]) -> Tensor:
    """Logits [R, V] after masks, biases and penalties; the given ones are not written to.

    Where nobody asks for anything they are given back as they are.

    Args:
        contexts: per row; the rows of one sequence stand together, by number of drafts.
        eos_token_ids: tokens that end an answer, and may not before min_tokens are emitted.
    """
    ruled = [(row, each.rules, each) for row, each in enumerate(contexts) if each.rules is not None]
    masked = [(row, each.allowed) for row, each in enumerate(contexts) if each.allowed is not None]
    if not ruled and not masked:
        return logits
    adjusted = logits.clone()
    if kept := [(row, rules.allowed) for row, rules, _ in ruled if rules.allowed is not None]:
        cells = _cells(kept, logits.device)
        adjusted[[row for row, _ in kept]] = -torch.inf
        adjusted[cells] = logits[cells]
    _add_biases(adjusted, [(row, *rules.biased(of.output, of.drafts, eos_token_ids)) for row, rules, of in ruled])
    if masked:
        forbidden = ~torch.from_numpy(np.stack([mask for _, mask in masked])).to(adjusted.device)
        rows = [row for row, _ in masked]
        adjusted[rows] = adjusted[rows].masked_fill(forbidden, -torch.inf)
    _penalise(adjusted, [each for each in ruled if each[1].penalised])
    return adjusted


def _add_biases(adjusted: Tensor, biased: Sequence[tuple[int, Int64s, Float32s]]) -> None:
    if any(tokens.size for _, tokens, _ in biased):
        cells = _cells([(row, tokens) for row, tokens, _ in biased], adjusted.device)
        adjusted[cells] += torch.from_numpy(np.concatenate([values for _, _, values in biased])).to(adjusted.device)


def _penalise(adjusted: Tensor, ruled: Sequence[_Ruled]) -> None:
    places, all_factors, all_losses = [], [], []
    for _, group in groupby(ruled, key=lambda each: id(each[1])):
        rows = list(group)
        _, rules, last = rows[-1]
        tokens, factors, losses = rules.penalties(last.output, last.drafts)
        for row, _, each in rows:
            places.append((row, tokens))
            all_factors.append(factors[len(each.drafts)])
            all_losses.append(losses[len(each.drafts)])
    if any(tokens.size for _, tokens in places):
        cells = _cells(places, adjusted.device)
        factor = torch.from_numpy(np.concatenate(all_factors)).to(adjusted.device)
        loss = torch.from_numpy(np.concatenate(all_losses)).to(adjusted.device)
        values = adjusted[cells]
        adjusted[cells] = torch.where(values > 0, values / factor, values * factor) - loss


def _cells(parts: Sequence[tuple[int, Int64s]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and tokens of the cells that the parts name, to index logits with."""
    rows = np.repeat([row for row, _ in parts], [len(tokens) for _, tokens in parts])
    tokens = np.concatenate([tokens for _, tokens in parts])
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
