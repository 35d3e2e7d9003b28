"""The interface of what edits the logits of a step's rows."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from speculative.gpu.row_judge import RowFields


class EditFields(NamedTuple):
    """A step's edits, all on the device.

    mask_of_row: [R] int32, -1 = none. masks: [M, ceil(V / 32)] int32, bit t % 32 of word t // 32 says whether token t
        may come.
    biased_rows, biased_tokens: [C] int32, each cell once; padding is of a row that no step has. biases: [C] float32,
        -inf where a token may not come.
    starts: [E + 1] int32, where each entry's penalised tokens lie. penalised: [C] int32, each token once an entry.
    counts: [C] int32, how often it was emitted before the step. in_prompt: [C] bool.
    repetition, frequency, presence: [E] float64, each entry's penalties.
    """

    mask_of_row: Tensor
    masks: Tensor
    biased_rows: Tensor
    biased_tokens: Tensor
    biases: Tensor
    starts: Tensor
    penalised: Tensor
    counts: Tensor
    in_prompt: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


EditLogits = Callable[[Tensor, RowFields, EditFields, int], Tensor]
"""Logits [R, V], their rows, the edits, and the most drafts of an entry -> [R, V] float32; the given ones stay."""
