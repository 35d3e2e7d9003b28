"""The self-checks around vLLM's own sampler hear of what it decides, and do not disturb it."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from serve_app.backends import vllm_backend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts import settings
from speculative.config import DrafterConfig
from speculative.request import Request, SamplingParams
from tests.support.backend_conformance import collect
from tests.support.vllm_engines import CONFIG as IN_CHUNKS
from tests.support.vllm_engines import vllm
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
NGRAM = DrafterConfig.of(ngram_min=1, num_draft_tokens=3)
CONFIG = dataclasses.replace(IN_CHUNKS, max_num_seqs=8, max_batched_tokens=512, drafter=NGRAM)
PROMPTS = [tuple(range(start, start + 40)) * 4 for start in range(3, 400, 25)]
HOT = SamplingParams(max_tokens=120, temperature=0.5, ignore_eos=True)


@pytest.mark.parametrize("kept_away", [True, False])
async def test_what_is_sampled_is_checked(kept_away: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build verifies sampled drafts against a wrong temperature: a p as good as any to draw from.

    Kept away from that, it drafts nothing for them, and each token is sampled alone.
    """
    monkeypatch.setattr(settings, "faults_of", lambda *, cpu: settings.Faults(kept_away and cpu, chunked_seeds=cpu))
    async with vllm(folder, config=CONFIG, self_check_sample_rate=1.0) as backend:
        await answered(backend, HOT)
        states, stats = backend.self_checks(), backend.take_stats()
    terms = {state.check: state.num for state in states}
    assert not stats.alarms
    assert terms["d"] > 1000 and terms["g"] > 1000
    if kept_away:
        assert stats.num_drafted == 0 and not stats.violations
        assert terms["a"] == 0 and all(abs(state.z) < 4.5 for state in states)
    else:
        assert stats.num_drafted > 100 and terms["r"] > 10


async def test_greedy_answers_are_found_right_and_their_drafts_expected(folder: Path) -> None:
    async with vllm(folder, config=CONFIG, self_check_sample_rate=1.0) as backend:
        await answered(backend, dataclasses.replace(HOT, temperature=0.0))
        stats = backend.take_stats()
    assert not stats.violations and not stats.alarms
    assert stats.num_accepted > 5
    assert stats.num_accepted == stats.expected_accepted
    assert stats.num_accepted <= stats.achievable_accepted <= stats.num_accepted + 3 * len(PROMPTS), "some end early"


async def answered(backend: VllmBackend, params: SamplingParams) -> None:
    """Answer requests, and wait until what was found in them is here."""
    requests = [Request(f"r{index}", prompt, params, seed=index) for index, prompt in enumerate(PROMPTS)]
    await asyncio.gather(*(collect(backend.generate(request)) for request in requests))
    await asyncio.sleep(3 * vllm_backend._TERMS_EVERY_S)
