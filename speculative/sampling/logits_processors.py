"""What a request's tokens so far, and its own wishes, do to the logits of a row: masks, biases, penalties.

Everything here holds at every verified position, drafted ones included: a row's context is the sequence's tokens and
the drafts of the round before it. Only the cells of the logits that change are touched, and only in rows that ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from speculative.state.batch import RowContext
from speculative.state.logit_constraints import Int64s, TokenRules
from speculative.state.token_constraint import Bools


@dataclass(frozen=True, slots=True)
class _RuledRow:
    """A row whose request has rules."""

    row: int
    rules: TokenRules
    output: Sequence[int]
    drafts: tuple[int, ...]


def adjust(
    logits: Tensor,
    contexts: Sequence[RowContext],
    allowed: Sequence[Bools | None],
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Logits [R, V] after masks, biases and penalties; the given ones are not written to.

    Where nobody asks for anything they are given back as they are.

    Args:
        contexts: per row, what it draws after; the rows of one sequence stand together, by number of drafts.
        allowed: per row, the tokens its structure allows; None where it has none.
        eos_token_ids: tokens that end an answer, and may not before min_tokens are emitted.
    """
    ruled = _ruled_rows(contexts)
    if not ruled and all(mask is None for mask in allowed):
        return logits
    adjusted = logits.clone()
    _keep_allowed(adjusted, logits, ruled)
    _forbid(adjusted, [(each.row, each.rules.forbidden(each.output, each.drafts, eos_token_ids)) for each in ruled])
    _add_biases(adjusted, ruled)
    _keep_structure(adjusted, allowed)
    _penalise(adjusted, [each for each in ruled if each.rules.penalised])
    return adjusted


def _ruled_rows(contexts: Sequence[RowContext]) -> list[_RuledRow]:
    ruled: list[_RuledRow] = []
    for row, context in enumerate(contexts):
        sequence, rules = context.sequence, context.sequence.rules
        if rules is not None:
            same = bool(ruled) and ruled[-1].rules is rules
            output = ruled[-1].output if same else sequence.tokens[sequence.num_prompt :]
            ruled.append(_RuledRow(row, rules, output, context.drafts))
    return ruled


def _keep_allowed(adjusted: Tensor, logits: Tensor, ruled: Sequence[_RuledRow]) -> None:
    kept = [(each.row, each.rules.allowed) for each in ruled if each.rules.allowed is not None]
    if kept:
        cells = _cells(kept, logits.device)
        adjusted[[row for row, _ in kept]] = -torch.inf
        adjusted[cells] = logits[cells]


def _forbid(adjusted: Tensor, forbidden: Sequence[tuple[int, Int64s]]) -> None:
    if any(tokens.size for _, tokens in forbidden):
        adjusted[_cells(forbidden, adjusted.device)] = -torch.inf


def _add_biases(adjusted: Tensor, ruled: Sequence[_RuledRow]) -> None:
    biased = [(each.row, *each.rules.biases) for each in ruled if each.rules.biases[0].size]
    if biased:
        cells = _cells([(row, tokens) for row, tokens, _ in biased], adjusted.device)
        adjusted[cells] += torch.from_numpy(np.concatenate([values for _, _, values in biased])).to(adjusted.device)


def _keep_structure(adjusted: Tensor, allowed: Sequence[Bools | None]) -> None:
    masked = [row for row, mask in enumerate(allowed) if mask is not None]
    if masked:
        forbidden = ~torch.from_numpy(np.stack([mask for mask in allowed if mask is not None])).to(adjusted.device)
        adjusted[masked] = adjusted[masked].masked_fill(forbidden, -torch.inf)


def _penalise(adjusted: Tensor, ruled: Sequence[_RuledRow]) -> None:
    places, all_factors, all_losses = [], [], []
    for _, group in groupby(ruled, key=lambda each: id(each.rules)):
        rows = list(group)
        tokens, factors, losses = rows[0].rules.penalties(rows[0].output, rows[-1].drafts)
        for each in rows:
            places.append((each.row, tokens))
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
