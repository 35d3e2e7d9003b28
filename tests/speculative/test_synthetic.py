"""Synthetic acceptance: for cost sweeps only, and every token of it says so."""

from pathlib import Path

import pytest
import torch

from speculative.config import EngineConfig
from speculative.errors import ConfigError
from speculative.request import Request, SamplingParams
from tests.engines import settings
from tests.table_engine import TableDrafter, table_engine


@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_drafts_survive_at_the_given_rate_and_every_delta_is_marked(tmp_path: Path, rate: float) -> None:
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    drafter = TableDrafter((-table).softmax(-1), 1, vary=False)
    engine = table_engine(
        tmp_path / "table", table, drafter, verifier="synthetic", synthetic_acceptance=rate, benchmark=True
    )
    for number in range(400):
        engine.add(Request(str(number), (3,), SamplingParams(max_tokens=12, ignore_eos=True), seed=number))
    while engine.has_work:
        assert all(delta.synthetic for delta in engine.step())
    stats = engine.take_stats()
    assert stats.num_accepted / stats.num_drafted == pytest.approx(rate, abs=0.05)
    assert stats.expected_accepted == pytest.approx(rate * stats.num_drafted, rel=1e-4)


def test_other_deltas_are_not_marked(tmp_path: Path) -> None:
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    engine = table_engine(tmp_path / "table", table, None)
    engine.add(Request("r", (3,), SamplingParams(max_tokens=4)))
    while engine.has_work:
        assert not any(delta.synthetic for delta in engine.step())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"verifier": "synthetic", "synthetic_acceptance": 0.5}, "verifier"),
        ({"verifier": "synthetic", "benchmark": True}, "synthetic_acceptance"),
        ({"synthetic_acceptance": 0.5, "benchmark": True}, "synthetic_acceptance"),
        ({"verifier": "synthetic", "synthetic_acceptance": 1.5, "benchmark": True}, "synthetic_acceptance"),
    ],
)
def test_it_is_refused_outside_benchmarks(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        settings(**changes)
    assert EngineConfig().verifier == "token_wise"
