"""The arithmetic over the vocabulary in captured functions: torch's operators where they neither wait for the host nor
sort, and Triton's kernels in the place of the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from speculative.gpu.attention_choice import uses_triton
from speculative.gpu.filters import FindFloors, torch_floors
from speculative.sampling.probs import SamplingRows
from speculative.verification.coupled import NoiseRows, choose
from speculative.verification.draft_probs import mass_before
from speculative.vocabulary.ops import TorchOps

Choose = Callable[[Tensor, Tensor, NoiseRows, Tensor | None, int], Tensor]
"""As `VocabularyOps.choose`."""
MassBefore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `mass_before`."""


class DeviceOps(TorchOps):
    """torch's operators, with filters and coupled drafts that a graph can hold."""

    def __init__(self, device: torch.device) -> None:
        self._find_floors, self._choose = make_find_floors(device), make_choose(device)
        self.mass_before = make_mass_before(device)

    def process(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """As `VocabularyOps`."""
        filters = rows.filters
        if filters is None:
            return super().process(logits, rows)
        every = len(filters.rows) == len(logits)
        which = slice(None) if every else filters.rows
        parameters = (filters.log_min_p, filters.top_k, filters.top_p)
        floors = self._find_floors(logits[which], rows.temperature[which], *parameters)
        if not every:
            floors = floors.new_full((len(logits),), -torch.inf).index_copy(0, filters.rows, floors)
        processed = logits / rows.temperature
        return processed.masked_fill_(processed < floors[:, None], -torch.inf)

    def choose(self, probs: Tensor, columns: Tensor, rows: NoiseRows, ids: Tensor | None, vocab_size: int) -> Tensor:
        """As `VocabularyOps`."""
        return self._choose(probs, columns, rows, ids, vocab_size)


def make_find_floors(device: torch.device) -> FindFloors:
    """Triton's kernel on a CUDA device where it can be compiled, else plain torch."""
    if uses_triton(device):
        from speculative.gpu.triton_filters import triton_floors

        return triton_floors
    return torch_floors


def make_mass_before(device: torch.device) -> MassBefore:
    """As `make_find_floors`."""
    if uses_triton(device):
        from speculative.gpu.triton_places import triton_mass_before

        return triton_mass_before
    return mass_before


def make_choose(device: torch.device) -> Choose:
    """As `make_find_floors`."""
    if uses_triton(device):
        from speculative.gpu.triton_noise import triton_choose

        return triton_choose
    return choose
