"""The profile of a step: parts add up, nested ones count once, and the engine is left as it was."""

from pathlib import Path

import pytest

from speculative.config import DrafterConfig
from speculative.request import Request, SamplingParams
from speculative.step import sampler
from tests.support.engines import tiny_engine
from tests.support.tiny_models import write_tiny_model
from tools.bench.workers.profiling import PARTS, Profile


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_a_steps_time_is_divided_among_its_parts(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path / "tiny", vocab_size=64)
    model = str(folder) if kind == "draft_model" else None
    engine = tiny_engine(folder, drafter=DrafterConfig(kind=kind, model=model, ngram_min=1))  # type: ignore[arg-type]
    before = sampler.adjust
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)))
    engine.step()
    profile = Profile(engine)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    reported = profile.end()
    assert reported["num_steps"] == num_steps
    expected = set(PARTS) - ({"drafter"} if kind == "none" else set())
    assert all(reported[f"{part}_s"] > 0 for part in expected)
    total = sum(reported[f"{part}_s"] for part in PARTS)
    assert reported["target_s"] < total
    assert sampler.adjust is before and "step" not in vars(engine) and "process" not in vars(engine.ops)
    assert not {"forward_with_features", "logits"} & set(vars(engine.runner))
