"""Floors of filters, by Triton's kernel (in its interpreter), against the filters of the CPU: the same tokens to the
last, also of half precision. `step_conformance` has the rest."""

import pytest
import torch

from speculative.gpu.filters import FindFloors
from speculative.sampling.probs import Filters
from tests.support.judged_rows import of_wider
from tests.support.triton_interpreter import needs_triton

VOCABULARY = 300
NOTHING = (0.0, VOCABULARY, 1.0)
CASES = [
    NOTHING,
    (0.0, 5, 1.0),
    (0.0, 1, 1.0),
    (0.0, VOCABULARY, 0.8),
    (0.0, VOCABULARY, 1e-30),
    (0.1, VOCABULARY, 1.0),
    (0.02, 20, 0.5),
    (0.5, 20, 0.999),
    (0.0, 7, 0.999),
    (0.0, 150, 1.0),  # more than a tile has, so that whole rows are counted
]
pytestmark = needs_triton


@pytest.fixture(params=[8192, 64], ids=["one tile", "five tiles"])
def find_floors(poisoned: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FindFloors:
    from speculative.gpu import triton_filters

    monkeypatch.setattr(triton_filters, "_TILE", request.param)
    return triton_filters.triton_floors


def scene() -> tuple[torch.Tensor, Filters]:
    """Logits with many ties and some tokens ruled out, one row for each case."""
    logits = torch.randn((len(CASES), VOCABULARY), generator=torch.Generator().manual_seed(0)) * 3
    logits = (logits * 4).round() / 4
    logits[1::2, ::5] = -torch.inf
    min_p, top_p = (torch.tensor([case[part] for case in CASES], dtype=torch.float32) for part in (0, 2))
    top_k = torch.tensor([case[1] for case in CASES])
    return of_wider(logits), Filters(torch.arange(len(CASES)), min_p, min_p.log(), top_k, top_p)


def parameters(filters: Filters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return filters.log_min_p, filters.top_k, filters.top_p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_logits_are_divided_by_the_temperature(find_floors: FindFloors, dtype: torch.dtype) -> None:
    """Also where that makes ties of what is none. The logits use all bits of their type."""
    logits, filters = scene()
    logits = of_wider((logits * 1.0371 + torch.linspace(0, 1e-6, VOCABULARY)).to(dtype))
    temperature = torch.linspace(0.3, 1.7, len(CASES))
    floors = find_floors(logits, temperature[:, None], *parameters(filters))
    processed = logits.float() / temperature[:, None]
    assert torch.equal(processed.masked_fill(processed < floors[:, None], -torch.inf), filters.keep(processed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_differ_in_their_last_bit_are_told_apart(find_floors: FindFloors, dtype: torch.dtype) -> None:
    counts = torch.arange(1, 9)
    steps = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    logits = of_wider((4 + steps * 4 * torch.finfo(dtype).eps).to(dtype).expand(len(counts), -1))
    rest = torch.full((len(counts),), -torch.inf), counts, torch.ones(len(counts))
    floors = find_floors(logits, torch.ones((len(counts), 1)), *rest)
    assert (logits.float() >= floors[:, None]).sum(dim=-1).tolist() == counts.tolist()
