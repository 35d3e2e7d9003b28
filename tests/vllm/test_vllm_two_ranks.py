"""vLLM with `tensor_parallel_size: 2`: two processes compute each token, each with half of the heads."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.run.processes import process_tree
from serve_app.backends.vllm_backend import VllmBackend
from speculative.errors import EngineFault, HandoffRefused
from speculative.request import Request, SamplingParams
from tests.support.backend_conformance import (
    GREEDY,
    LONG,
    PLAIN,
    PROMPT,
    EngineConformance,
    collect,
    handed_off,
    idle,
    tokens,
)
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_engines import drafter_for, vllm
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
TARGET = {
    "num_hidden_layers": 2, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
HOT = SamplingParams(max_tokens=40, temperature=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ranks") / "m", vocab_size=512, tokenizer=True, **TARGET)


def engine(folder: Path, num_ranks: int = 2, **changes: Any) -> contextlib.AbstractAsyncContextManager[VllmBackend]:
    """With the model as its own draft model: every draft is accepted, if the drafter sees the prompt."""
    ranks = {"tensor_parallel_size": num_ranks}
    return vllm(folder, drafter_for(folder, "draft_model"), engine_args=ranks, **{"handoff": "copy"} | changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(folder: Path) -> AsyncIterator[VllmBackend]:
    async with engine(folder) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(folder: Path) -> AsyncIterator[VllmBackend]:
    async with engine(folder) as made:
        yield made


class TestConformance(EngineConformance):
    """Two ranks pass the kit of all backends."""


async def test_each_rank_hands_over_its_half_of_target_and_drafter(backend: VllmBackend, other: VllmBackend) -> None:
    request = Request("r", PROMPT, GREEDY)
    handoff = await handed_off(backend, request, first_token=True)
    other.invalidate_cache()
    other.take_stats()
    deltas = await collect(other.resume(request, handoff))
    assert other.take_stats().num_prompt_tokens == 1
    num_drafted, num_accepted = (sum(getattr(d, f"num_{what}") for d in deltas) for what in ("drafted", "accepted"))
    assert num_accepted == num_drafted - (deltas[-1].num_drafted - deltas[-1].num_accepted) > 10


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl")
async def test_each_rank_reads_its_half_by_nixl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self,sm,tcp")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    request = Request("r", PROMPT, GREEDY)
    async with (
        engine(folder, handoff="nixl", role="kv_producer") as giver,
        engine(folder, handoff="nixl", role="kv_consumer") as taker,
    ):
        whole = tokens(await collect(taker.generate(request)))
        taker.invalidate_cache()
        taker.take_stats()
        handoff = await handed_off(giver, request, first_token=True)
        deltas = await collect(taker.resume(request, handoff))
        assert tokens(deltas) == whole
        assert taker.take_stats().num_prompt_tokens <= 1
        assert sum(delta.num_accepted for delta in deltas) > 10, "the drafter's keys and values came with it"


async def test_one_rank_computes_the_same_counts_each_term_once_and_hands_nothing_over(
    backend: VllmBackend, folder: Path
) -> None:
    async def terms(made: VllmBackend) -> int:
        made.take_stats()
        await collect(made.generate(Request("hot", PROMPT, HOT, seed=5)))
        await asyncio.sleep(2.5)
        return sum(sums.num for sums in made.take_stats().checks.values())

    request = Request("r", PROMPT, GREEDY)
    text = tokens(await collect(backend.generate(request)))
    handed = await handed_off(backend, request, first_token=True)
    async with engine(folder, self_check_sample_rate=1.0) as two:
        num_terms = await terms(two)
    async with engine(folder, num_ranks=1, self_check_sample_rate=1.0) as one:
        assert await terms(one) == num_terms > 0
        assert tokens(await collect(one.generate(request))) == text
        for giver, taker in ((handed, one), (await handed_off(one, request, first_token=True), backend)):
            with pytest.raises(HandoffRefused, match="num_ranks"):
                await collect(taker.resume(request, giver))


async def test_new_weights_reach_every_rank(backend: VllmBackend, folder: Path, tmp_path: Path) -> None:
    before = tokens(await collect(backend.generate(Request("before", PROMPT, PLAIN))))
    others = write_tiny_model(tmp_path / "others", vocab_size=512, tokenizer=True, seed=9, **TARGET)
    await backend.load_weights(str(others))
    await backend.switch_weights("v1")
    after = tokens(await collect(backend.generate(Request("after", PROMPT, PLAIN))))
    async with engine(others, num_ranks=1) as alone:
        assert tokens(await collect(alone.generate(Request("alone", PROMPT, PLAIN)))) == after != before
    await backend.load_weights(str(folder))
    await backend.switch_weights("default")
    await idle(backend)


async def test_a_killed_rank_ends_the_engine_and_nothing_hangs(folder: Path) -> None:
    before = set(process_tree(os.getpid()))
    async with engine(folder) as made:
        (rank,) = (pid for pid in set(process_tree(os.getpid())) - before if _title(pid) == "VLLM::Worker_TP1")
        running = made.generate(Request("running", PROMPT, dataclasses.replace(LONG, max_tokens=300)))
        await anext(running)
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(120):
            deltas = await collect(running)
            assert deltas[-1].error is not None
            while not _is_ill(made):
                await asyncio.sleep(0.2)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")


def _is_ill(made: VllmBackend) -> bool:
    try:
        made.check_health()
    except EngineFault:
        return True
    return False
