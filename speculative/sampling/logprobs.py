"""Logprobs: one matrix per mode, one gather.

Whatever is reported about a row (the emitted token, the most likely tokens, scored tokens) is gathered from the same
matrix, so two reports about one row cannot disagree.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.request import TokenLogprobs


def mode_matrix(mode: LogprobsMode, logits: Tensor, processed: Tensor) -> Tensor:
    """The matrix [R, V] float32 that everything is gathered from.

    logits: [R, V] of the model. processed: [R, V] after the request's temperature and filters.
    """
    return (processed if mode == "processed_logprobs" else logits).log_softmax(dim=-1)


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Gathered logprobs: tensors on the device, numpy arrays after `to_host`."""

    values: Any  # [R] of the row's own token
    ranks: Any  # [R], 1 = the most likely
    top_ids: Any  # [R, k] the likeliest tokens, in order
    top_values: Any  # [R, k] theirs
    scored: Any  # [R, S] of further tokens that were asked for

    def to_host(self) -> "LogprobRows":
        """Copy to the host, all of it at once: float64 keeps ids and ranks as they are."""
        fields = (self.values, self.ranks, self.top_ids, self.top_values, self.scored)
        copied = torch.cat([field.reshape(-1).double() for field in fields]).cpu()
        parts = zip(copied.split([field.numel() for field in fields]), fields, strict=True)
        return LogprobRows(*(part.view(field.shape).to(field.dtype).numpy() for part, field in parts))

    def entry(self, row: int, token_id: int, num_top: int, scored_ids: Tokens[int] = ()) -> TokenLogprobs:
        """The logprobs entry of one row, on the host. Of masked tokens (-inf) `scored` has entries, `top` has none.

        Args:
            row: which one.
            token_id: its own token.
            num_top: how many of the most likely its request asked for.
            scored_ids: the first of the ids that were gathered for this row; what follows them is padding.
        """
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_values[row, :num_top].tolist(), strict=True)
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(self.values[row]),
            rank=int(self.ranks[row]),
            top=tuple((token, value) for token, value in top if value > -np.inf),
            scored=tuple(zip(scored_ids, self.scored[row, : len(scored_ids)].tolist(), strict=True)),
        )


def padded_ids(sets: Tokens[Tokens[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[R, S] of R sets of ids, each padded to the longest with token 0, which nobody reads."""
    padded = np.zeros((len(sets), max(map(len, sets), default=0)), np.int64)
    for index, ids in enumerate(sets):
        padded[index, : len(ids)] = ids
    return padded


def gather_logprobs(matrix: Tensor, token_ids: Tensor, num_top: int, scored_ids: Tensor | None = None) -> LogprobRows:
    """Read token_ids [R], the num_top best and scored_ids [R, S] of each row out of the mode's matrix [R, V]."""
    values = matrix.gather(1, token_ids[:, None])
    ranks = (matrix > values).sum(dim=-1) + 1
    top = matrix.topk(min(num_top, matrix.shape[-1]), dim=-1) if num_top else None
    nothing = matrix.new_empty((matrix.shape[0], 0))
    return LogprobRows(
        values=values[:, 0],
        ranks=ranks,
        top_ids=nothing.to(torch.int64) if top is None else top.indices,
        top_values=nothing if top is None else top.values,
        scored=nothing if scored_ids is None else matrix.gather(1, scored_ids),
    )
