"""Top-k, top-p and min-p without the host: they find each row's lowest logit that stays."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.staged_inputs import Array, Field
from speculative.request import SamplingParams
from speculative.sampling.probs import Filters, SamplingRows

FindFloors = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""logits [F, V], temperature [F, 1], log_min_p, top_k and top_p [F] of `Filters` -> [F] the lowest logit after
temperature that stays.

Ties with it stay, too. The likeliest token always stays; -inf where nothing is filtered out."""


# -- as inputs of a captured function -------------------------------------------------------------------------------


def sampling_fields(num_rows: int, vocab_size: int) -> dict[str, Field]:
    """Fields of `SamplingArrays`; padding is greedy, and filters nothing out."""
    rows = (num_rows,)
    return {
        "temperature": Field((num_rows, 1), torch.float32, 1.0),
        "greedy": Field(rows, torch.bool, 1),
        "log_min_p": Field(rows, torch.float32, -np.inf),
        "top_k": Field(rows, padding=vocab_size),
        "top_p": Field(rows, torch.float32, 1.0),
    }


class SamplingArrays:
    """Temperature and filters of a step's requests; made again where they differ from those of the step before."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last: tuple[list[SamplingParams], dict[str, Array]] = [], {}

    def of(self, params: list[SamplingParams]) -> Mapping[str, Array]:
        """One row a request of each of `sampling_fields`; not to be written to."""
        if self._last[0] == params:
            return self._last[1]
        rows = SamplingRows.build(params, self._vocab_size, torch.device("cpu"))
        made = {"temperature": rows.temperature.numpy(), "greedy": rows.greedy.numpy()}
        nothing = {"log_min_p": -np.inf, "top_k": self._vocab_size, "top_p": 1.0}
        for name, padding in nothing.items():
            made[name] = np.full(len(params), padding, np.int64 if name == "top_k" else np.float32)
            if rows.filters is not None:
                made[name][rows.filters.rows.numpy()] = getattr(rows.filters, name).numpy()
        self._last = params, made
        return made


def sampling_rows(inputs: Mapping[str, Tensor]) -> SamplingRows:
    """Temperature and filters of every row, which only the device knows when code is captured."""
    log_min_p = inputs["log_min_p"]
    rows = torch.arange(len(log_min_p), device=log_min_p.device)
    filters = Filters(rows, log_min_p.exp(), log_min_p, inputs["top_k"], inputs["top_p"])
    return SamplingRows(inputs["temperature"], inputs["greedy"], any_greedy=True, filters=filters)
