"""Filters that find a floor, by sorting and by Triton's kernel (in its interpreter), against those of the CPU."""

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from speculative.gpu.filters import FindFloors, torch_floors
from speculative.gpu.operators import GraphOperators
from speculative.kernels.chosen import ChosenKernels
from speculative.request import SamplingParams
from speculative.sampling.probs import Filters, SamplingRows
from speculative.vocabulary.ops import TorchOps

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
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def find_floors(request: pytest.FixtureRequest) -> Iterator[FindFloors]:
    if request.param == "torch":
        yield torch_floors
        return
    from speculative.gpu.triton_filters import triton_floors

    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield triton_floors


def scene() -> tuple[torch.Tensor, Filters]:
    """Logits with many ties and some tokens ruled out, one row for each case."""
    logits = torch.randn((len(CASES), VOCABULARY), generator=torch.Generator().manual_seed(0)) * 3
    logits = (logits * 4).round() / 4
    logits[1::2, ::5] = -torch.inf
    min_p, top_p = (torch.tensor([case[part] for case in CASES], dtype=torch.float32) for part in (0, 2))
    top_k = torch.tensor([case[1] for case in CASES])
    return logits, Filters(torch.arange(len(CASES)), min_p, min_p.log(), top_k, top_p)


def parameters(filters: Filters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return filters.log_min_p, filters.top_k, filters.top_p


def filtered(find_floors: FindFloors, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    floors = find_floors(logits, torch.ones((len(logits), 1)), *parameters(filters))
    return logits.masked_fill(logits < floors[:, None], -torch.inf)


def test_what_stays_is_what_the_cpu_keeps(find_floors: FindFloors) -> None:
    logits, filters = scene()
    found, expected = filtered(find_floors, logits, filters), filters.keep(logits)
    assert torch.equal(found, expected)
    assert torch.equal(found[0], logits[0])
    assert (found[1:] > -torch.inf).sum(dim=-1).min() >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_logits_are_divided_by_the_temperature(find_floors: FindFloors, dtype: torch.dtype) -> None:
    """Also where that makes ties of what is none."""
    logits, filters = scene()
    logits, temperature = (logits + torch.linspace(0, 1e-6, VOCABULARY)).to(dtype), torch.linspace(0.3, 1.7, len(CASES))
    floors = find_floors(logits, temperature[:, None], *parameters(filters))
    processed = logits.float() / temperature[:, None]
    assert torch.equal(processed.masked_fill(processed < floors[:, None], -torch.inf), filters.keep(processed))


def test_a_floor_depends_on_its_own_row_alone(find_floors: FindFloors) -> None:
    logits, filters = scene()
    logits[3] = torch.nan
    logits[5] = -torch.inf
    found = filtered(find_floors, logits, filters)
    assert found[3].isnan().all(), "a row of no numbers is found by the invariants, not hidden by filters"
    assert (found[5] == -torch.inf).all()
    others = [row for row in range(len(CASES)) if row not in (3, 5)]
    assert torch.equal(found[others], filters.keep(logits)[others])


def test_rows_with_and_without_filters_are_processed_as_on_a_cpu() -> None:
    logits = scene()[0][:4]
    params = [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=7, min_p=0.01),
    ]
    rows = SamplingRows.build(params, VOCABULARY, torch.device("cpu"))
    found = GraphOperators.by_torch(ChosenKernels()).vocabulary.process(logits, rows)
    assert torch.equal(found, TorchOps().process(logits, rows))
