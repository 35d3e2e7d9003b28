"""What a request's tokens so far, and its own wishes, do to the logits of a row: masks, biases, penalties.

Everything here holds at every verified position, drafted ones included: a row's context is the sequence's tokens and
the drafts of the round before it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from speculative.batch import RowContext
from speculative.constraint import Bools


def adjust(logits: Tensor, contexts: Sequence[RowContext], allowed: Sequence[Bools | None]) -> Tensor:
    """Logits [R, V] after masks, biases and penalties; the given ones are not written to.

    Args:
        contexts: per row, what it draws after.
        allowed: per row, the tokens its structure allows; None where it has none.
    """
    masked = [row for row, mask in enumerate(allowed) if mask is not None]
    if not masked:
        return logits
    adjusted = logits.clone()
    forbidden = ~torch.from_numpy(np.stack([mask for mask in allowed if mask is not None])).to(logits.device)
    adjusted[masked] = adjusted[masked].masked_fill(forbidden, -torch.inf)
    return adjusted
