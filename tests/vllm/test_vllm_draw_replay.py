"""What vLLM samples on a CPU is drawn again by our engine: its answers follow from their seeds."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.referee.judge.answer import Answer
from serve_app.referee.records.records import Record
from speculative.config import DrafterConfig
from speculative.request import Request, SamplingParams
from speculative.selfcheck.replayed_draws import DrawCheck
from tests.support.vllm_engines import CONFIG as IN_CHUNKS
from tests.support.vllm_engines import vllm
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
NGRAM = DrafterConfig.of(ngram_min=1, num_draft_tokens=3)
CONFIG = replace(IN_CHUNKS, max_num_seqs=8, kv_cache_tokens=1024, drafter=NGRAM)  # six requests are too many for it
ROUNDING = 1e-3  # nats
PLAIN = SamplingParams(max_tokens=100, temperature=1.0, ignore_eos=True)
PARAMS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.3),
    "top_p": replace(PLAIN, temperature=0.7, top_p=0.8),
    "top_k": replace(PLAIN, top_k=20),
    "penalties": replace(PLAIN, presence_penalty=1.0, repetition_penalty=1.2),
    "rules": replace(PLAIN, allowed_token_ids=tuple(range(40, 90)), bad_words=((45,),)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(folder: Path) -> AsyncIterator[VllmBackend]:
    ours = TorchBackend(str(folder), "tiny", replace(CONFIG, kv_cache_tokens=4096, drafter=DrafterConfig(kind="none")))
    async with vllm(folder, config=CONFIG, ours=ours) as started:
        yield started


async def served(backend: VllmBackend, request: Request) -> Answer:
    record = Record(request, "r1", 0.0, CONFIG.max_model_len)
    async for delta in backend.generate(request):
        assert delta.error is None
        record.take(delta)
    answer = record.answer()
    assert answer is not None
    return answer


async def checked(backend: VllmBackend, answer: Answer) -> list[DrawCheck]:
    assert answer.replayable_rounds is not None
    replay = (await backend.replay(answer.scored(f"replay {answer.request.request_id}"))).replayed
    assert replay is not None
    return answer.replayable_rounds.check(replay)


async def test_each_token_follows_from_its_seed_and_a_changed_one_does_not(backend: VllmBackend) -> None:
    requests = [
        Request(f"{name} {seed}", tuple(range(30 + seed, 130 + seed)), params, seed=seed)
        for seed in (1, 2)
        for name, params in PARAMS.items()
    ]
    chance, found, changed, preempted = random.Random(1), 0, 0, 0
    for answer in await asyncio.gather(*(served(backend, request) for request in requests)):
        name = answer.request.request_id
        preempted += any(answer.preempted)
        checks = await checked(backend, answer)
        assert len(checks) == len(answer.token_ids) == 100, name
        assert all(check.kind == "choice" and check.loose < ROUNDING for check in checks), name
        for place in chance.sample(range(100), 4):
            token = chance.choice([one for one in range(40, 90) if one != answer.token_ids[place]])
            other = replace(answer, token_ids=(*answer.token_ids[:place], token, *answer.token_ids[place + 1 :]))
            found += (await checked(backend, other))[place].miss > ROUNDING
            changed += 1
    assert preempted > 0
    assert found >= 0.95 * changed


async def test_what_cannot_be_drawn_again_comes_without_rounds(backend: VllmBackend) -> None:
    request = Request("continued", tuple(range(40)), replace(PLAIN, max_tokens=10), seed=1)
    deltas = [delta async for delta in backend.generate(request, (5, 6))]
    assert deltas and all(not delta.rounds for delta in deltas), "its first tokens were drawn elsewhere"
