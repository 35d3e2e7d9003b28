"""Handoffs by vLLM's `NixlConnector`: the kit of all backends, and what becomes of the blocks that one side keeps."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.run.processes import process_tree
from serve_app.backends.base import PauseMode
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts import settings as vllm_settings
from speculative.config import DrafterConfig
from speculative.errors import HandoffRefused
from speculative.request import Request, SamplingParams
from tests.support.backend_conformance import (
    GREEDY,
    PLAIN,
    PROMPT,
    EngineConformance,
    collect,
    handed_off,
    idle,
    tokens,
)
from tests.support.processes import alive
from tests.support.vllm_engines import CONFIG, drafter_for, vllm
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"),
    pytest.mark.timeout(300),
]
NUM_BLOCKS = CONFIG.kv_cache_tokens // CONFIG.block_size
BRIEF = dataclasses.replace(GREEDY, max_tokens=2)


@pytest.fixture(scope="module", autouse=True)
def nothing_runs_out() -> Iterator[None]:
    """What is not given back stays for ever, and the next prompts wait for it for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_settings, "LEASE_S", 3600)
        patch.setenv("UCX_TLS", "self,sm,tcp")
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        yield


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def drafter(request: pytest.FixtureRequest, folder: Path) -> DrafterConfig:
    """Those with keys and values of their own; the draft model is the target, and right if it sees the prompt."""
    return drafter_for(folder, request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(folder: Path, drafter: DrafterConfig) -> AsyncIterator[VllmBackend]:
    async with vllm(folder, drafter, handoff="nixl", role="kv_producer") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(folder: Path, drafter: DrafterConfig) -> AsyncIterator[VllmBackend]:
    async with vllm(folder, drafter, handoff="nixl", role="kv_consumer") as made:
        yield made


class TestNixlConformance(EngineConformance):
    """vLLM passes the kit of all backends with NIXL, too."""


def prompt_of(number: int, length: int = 300) -> tuple[int, ...]:
    """A prompt of its own: no block of it is cached because of another."""
    return (number, *(PROMPT * 20)[: length - 1])


async def fill(backend: VllmBackend, begin: int) -> None:
    """Compute prompts until every block of the cache was another one's."""
    for number in range(2 * NUM_BLOCKS // 10):
        await collect(backend.generate(Request(f"fill-{number}", prompt_of(begin + number), BRIEF)))


async def test_prompts_of_every_length_are_read_whole_and_their_blocks_come_back(
    backend: VllmBackend, other: VllmBackend
) -> None:
    for length in (2, 31, 32, 33, 63, 64, 65, 100, 129):
        request = Request("r", (PROMPT * 10)[:length], GREEDY)
        whole = tokens(await collect(backend.generate(request)))
        handoff = await handed_off(backend, request)
        assert len(handoff) < 2000, "what is sent says where to read"
        other.invalidate_cache()
        other.take_stats()
        assert tokens(await collect(other.resume(request, handoff))) == whole
        assert other.take_stats().num_prompt_tokens <= 1, length
    for number in range(2 * NUM_BLOCKS // 10):
        request = Request("r", prompt_of(number), BRIEF)
        assert len(tokens(await collect(other.resume(request, await handed_off(backend, request))))) == 2
    await fill(backend, 100)


async def test_blocks_of_a_handoff_that_is_refused_come_back(backend: VllmBackend, other: VllmBackend) -> None:
    for number in range(2 * NUM_BLOCKS // 10):
        request = Request("r", prompt_of(number), BRIEF)
        handoff = await handed_off(backend, request)
        with pytest.raises(HandoffRefused, match="another prompt"):
            await collect(other.resume(Request("r", PROMPT, BRIEF), handoff))


async def test_blocks_of_a_request_that_ends_early_come_back(backend: VllmBackend, other: VllmBackend) -> None:
    """Before it is computed, after, and while it is read."""
    for number in range(2 * NUM_BLOCKS // 10):
        request = Request("r", prompt_of(number), BRIEF)
        prefill = asyncio.create_task(backend.prefill(request, first_token=False))
        await asyncio.sleep(0.02 * (number % 5))
        prefill.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            lost = (await prefill).handoff
            assert lost is not None
            await collect(other.resume(request, lost))
        reading = asyncio.create_task(collect(other.resume(request, await handed_off(backend, request))))
        await asyncio.sleep(0.02 * (number % 5))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    await fill(backend, 200)
    await fill(other, 200)
    await idle(other)


async def test_what_lies_there_instead_is_never_taken_for_what_was_computed(
    backend: VllmBackend, other: VllmBackend
) -> None:
    """The prefill side is asked to take everything back, and others get the blocks before they are read."""
    request = Request("r", prompt_of(7), GREEDY)
    whole = tokens(await collect(other.generate(request)))
    handoff = await handed_off(backend, request)
    backend.invalidate_cache()
    await fill(backend, 300)
    other.invalidate_cache()
    with pytest.raises(HandoffRefused) as caught:
        await collect(other.resume(request, handoff))
    assert caught.value.reason == "lost"
    assert tokens(await collect(other.generate(request))) == whole, "nothing of it was kept"
    with pytest.raises(HandoffRefused):
        await collect(other.resume(request, handoff))
    await idle(other)


async def test_it_is_distrusted_and_paused_while_handoffs_are_under_way(
    backend: VllmBackend, other: VllmBackend
) -> None:
    request = Request("r", PROMPT, PLAIN)
    whole = tokens(await collect(backend.generate(request)))
    for mode in (None, PauseMode.KEEP, PauseMode.ABORT):
        reading = [
            asyncio.create_task(collect(other.resume(request, await handed_off(backend, request)))) for _ in range(4)
        ]
        for one in (other, backend):
            if mode is None:
                one.invalidate_cache()
            else:
                await one.pause(mode)
        if mode is not None:
            await other.unpause()
            await backend.unpause()
        for result in await asyncio.gather(*reading, return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, HandoffRefused)
            else:
                assert tokens(result) == whole or (mode is PauseMode.ABORT and result[-1].finished)
    await handed_off(backend, request)
    await backend.pause(PauseMode.ABORT)
    await backend.unpause()
    backend.check_health()
    other.check_health()
    await fill(backend, 400)


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "known"])
async def test_a_prefill_side_that_is_gone_is_found_out(
    other: VllmBackend, folder: Path, drafter: DrafterConfig, known: bool
) -> None:
    request = Request("r", PROMPT, GREEDY)
    async with vllm(folder, drafter, handoff="nixl", role="kv_producer") as doomed:
        if known:
            await collect(other.resume(request, await handed_off(doomed, request)))
        other.invalidate_cache()
        handoff = await handed_off(doomed, request)
        engines = [process.pid for process in doomed._llm.engine_core.resources.engine_manager.processes]
        gone = [pid for engine in engines for pid in reversed(process_tree(engine))]
        for pid in gone:
            os.kill(pid, signal.SIGKILL)
        while any(map(alive, gone)):
            await asyncio.sleep(0.05)
        with pytest.raises(HandoffRefused) as caught:
            await collect(other.resume(request, handoff))
        assert caught.value.reason == "lost"
    assert len(tokens(await collect(other.generate(request)))) == GREEDY.max_tokens
    other.check_health()
    await idle(other)


async def test_what_nobody_reads_comes_back_after_a_while(
    folder: Path, drafter: DrafterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_settings, "LEASE_S", 1)
    async with vllm(folder, drafter, handoff="nixl", role="kv_producer") as alone:
        for number in range(2 * NUM_BLOCKS // 10):
            await handed_off(alone, Request("r", prompt_of(number), SamplingParams(temperature=0)))
