"""The self-checks around vLLM's own sampler hear of what it decides, and do not disturb it."""

import asyncio
from pathlib import Path

import pytest

from serve_app.backends import vllm_backend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts.settings import SIZES, Faults, VllmSettings
from speculative.config import DrafterConfig, EngineConfig
from speculative.request import Request, SamplingParams
from tests.support.backend_conformance import collect
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    max_model_len=400,
    max_num_seqs=8,
    max_batched_tokens=512,
    kv_cache_tokens=4096,
    block_size=32,
    drafter=DrafterConfig(ngram_min=1, num_draft_tokens=3),
)
HOT = SamplingParams(max_tokens=120, temperature=0.5, ignore_eos=True)


@pytest.mark.parametrize("kept_away", [True, False])
async def test_the_terms_of_sampled_drafts_arrive(
    kept_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU build verifies sampled drafts against a wrong temperature: a p as good as any to draw from.

    Kept away from that, it drafts nothing for them.
    """
    monkeypatch.setattr(vllm_backend, "faults_of", lambda *, cpu: Faults(kept_away and cpu, chunked_seeds=cpu))
    folder = write_tiny_model(tmp_path / "m", vocab_size=512, hidden_size=128, head_dim=32, tokenizer=True)
    settings = VllmSettings(CONFIG, SIZES, {"enforce_eager": True}, self_check_sample_rate=1.0)
    backend = VllmBackend(str(folder), "tiny", settings)
    await backend.start()
    try:
        prompts = [tuple(range(start, start + 40)) * 4 for start in range(3, 400, 25)]
        await asyncio.gather(
            *(
                collect(backend.generate(Request(f"r{index}", prompt, HOT, seed=index)))
                for index, prompt in enumerate(prompts)
            )
        )
        await asyncio.sleep(3 * vllm_backend._TERMS_EVERY_S)
        states, stats = backend.self_checks(), backend.take_stats()
    finally:
        await backend.stop()
    terms = {state.check: state.num for state in states}
    assert not stats.alarms
    if kept_away:
        assert sum(terms.values()) == 0
    else:
        assert stats.num_drafted > 100
        assert 0 < terms["a"] <= stats.num_drafted
        assert terms["d"] == terms["a"] and terms["g"] > 0
