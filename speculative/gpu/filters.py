"""Top-k, top-p and min-p without the host: they find each row's lowest logit that stays."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.staged_inputs import Array, Field
from speculative.sampling.probs import Filters, SamplingRows
from speculative.state.batch import Int64s

FindFloors = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""logits [F, V], temperature [F, 1], log_min_p, top_k and top_p [F] of `Filters` -> [F] the lowest logit after
temperature that stays.

Ties with it stay, too. The likeliest token always stays; -inf where nothing is filtered out."""


def torch_floors(logits: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`FindFloors` by sorting."""
    best = (logits.float() / temperature).sort(dim=-1, descending=True).values
    floor = best[:, 0] + log_min_p
    floor = torch.where(top_k < logits.shape[-1], floor.maximum(best.gather(1, top_k[:, None] - 1)[:, 0]), floor)
    mass = torch.softmax(best.masked_fill(best < floor[:, None], -torch.inf), dim=-1)
    before = mass.cumsum(dim=-1) - mass  # of the likelier tokens
    num_kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)  # a top_p may round to 0
    return torch.where(top_p < 1, floor.maximum(best.gather(1, num_kept - 1)[:, 0]), floor)


# -- as inputs of a captured function -------------------------------------------------------------------------------


def filter_fields(num_rows: int, vocab_size: int) -> dict[str, Field]:
    """Fields in which padding filters nothing out."""
    rows = (num_rows,)
    return {
        "log_min_p": Field(rows, torch.float32, -np.inf),
        "top_k": Field(rows, padding=vocab_size),
        "top_p": Field(rows, torch.float32, 1.0),
    }


def fill_filters(host: Mapping[str, Array], filters: Filters | None, entries: Int64s) -> None:
    """Give row i the filters of entry `entries[i]`."""
    if filters is None:
        return
    owner = np.full(int(entries.max()) + 1, -1)
    owner[filters.rows.numpy()] = np.arange(len(filters.rows))
    filtered = np.flatnonzero(owner[entries] >= 0)
    of_row = owner[entries[filtered]]
    for name in ("log_min_p", "top_k", "top_p"):
        host[name][filtered] = getattr(filters, name).numpy()[of_row]


def sampling_rows(inputs: Mapping[str, Tensor]) -> SamplingRows:
    """Temperature and filters of every row."""
    log_min_p = inputs["log_min_p"]
    rows = torch.arange(len(log_min_p), device=log_min_p.device)
    filters = Filters(rows, log_min_p.exp(), log_min_p, inputs["top_k"], inputs["top_p"])
    return SamplingRows.on_device(inputs["temperature"], inputs["greedy"], filters)
