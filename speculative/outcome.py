"""From what a step computed on the device to what the host may act on: the one copy of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.batch import Drawn, Layout
from speculative.logprobs import HostLogprobs, gather_logprobs
from speculative.verification.base import VerifyInput, VerifyOutput

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The host copy of a verification: per drawing entry."""

    num_accepted: Array
    token_ids: Array
    finite: Array  # per verify row: whether its logits were numbers
    expected_accepted: float


def copy_to_host(verified: VerifyOutput, finite: Tensor) -> Verdicts:
    """Copy what was decided."""
    return Verdicts(
        num_accepted=verified.num_accepted.cpu().numpy(),
        token_ids=verified.token_ids.cpu().numpy(),
        finite=finite.cpu().numpy(),
        expected_accepted=float(verified.expected_accepted.nan_to_num().sum()),  # a faulty row counts nothing
    )


def emitted_at_rows(verified: VerifyOutput, step: VerifyInput) -> Tensor:
    """[R] int64: the token emitted at each verify row; rows past the last emitted one repeat it."""
    accepted = step.offsets < verified.num_accepted[step.entries]
    return torch.where(accepted, step.drafts, verified.token_ids[step.entries])


def logprobs_to_host(layout: Layout, matrix: Callable[[], Tensor], emitted: Tensor) -> HostLogprobs | None:
    """Gather the logprobs of every verify row, as many as the most demanding entry asks for; None if nobody asks.

    `matrix` makes the mode's matrix [R, V]: nobody pays for it unless somebody asks.
    """
    asked = [entry.sequence.params.logprobs for entry in layout.drawing]
    num_top = max((count for count in asked if count is not None), default=None)
    return None if num_top is None else gather_logprobs(matrix(), emitted, num_top).to_host()


def drawn_per_entry(layout: Layout, verdicts: Verdicts, logprobs: HostLogprobs | None) -> list[Drawn]:
    """What was drawn, one value per drawing entry, in order."""
    first_row = 0
    drawn = []
    for index, entry in enumerate(layout.drawing):
        count, accepted = int(layout.draft_counts[index]), int(verdicts.num_accepted[index])
        rows = range(first_row, first_row + accepted + 1)
        token_ids = (*layout.drafts[first_row : first_row + accepted].tolist(), int(verdicts.token_ids[index]))
        num_top = entry.sequence.params.logprobs
        entries = None
        if logprobs is not None and num_top is not None:
            entries = tuple(logprobs.entry(row, token, num_top) for row, token in zip(rows, token_ids, strict=True))
        fault = None
        if not verdicts.finite[first_row : first_row + count + 1].all():
            fault = "The model's logits were not finite; no token was drawn from them."
        drawn.append(Drawn(token_ids, count, accepted, entries, fault))
        first_row += count + 1
    return drawn
