"""The engine on its thread: what goes in comes out, and one request's trouble is nobody else's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from serve_app.backends.base import Backend
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault, HandoffRefused, InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams, Speculation, TokenDelta
from tests.tiny_models import write_tiny_model

CONFIG = EngineConfig(
    dtype="float32", device="cpu", kv_cache_tokens=2048, drafter=DrafterConfig(ngram_min=1), max_num_seqs=4
)
PROMPT = tuple([5, 9, 17, 33] * 5)
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
PLAIN = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculate=False)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("backend") / "m", vocab_size=512, tokenizer=True)


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[TorchBackend]:
    made = TorchBackend(str(folder), "tiny", CONFIG)
    await made.start()
    yield made
    await made.stop()


async def collect(stream: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    return [delta async for delta in stream]


def tokens(deltas: list[TokenDelta] | tuple[TokenDelta, ...]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def idle(backend: Backend) -> None:
    """Wait until the engine holds nothing."""
    for _ in range(200):
        usage = backend.usage()
        if usage.num_running + usage.num_waiting + usage.num_held == 0:
            assert usage.num_free_blocks == usage.num_blocks
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still holds {backend.usage()}")


async def test_prefill_here_and_resume_there_is_generating_here(folder: Path, backend: TorchBackend) -> None:
    whole = await collect(backend.generate(Request("whole", PROMPT, PARAMS)))
    assert len(tokens(whole)) == 24
    assert whole[-1].finish_reason is FinishReason.LENGTH
    other = TorchBackend(str(folder), "tiny", CONFIG)
    await other.start()
    for first_token in (True, False):
        request = Request("apart", PROMPT, PARAMS)
        prefilled = await backend.prefill(request, first_token=first_token)
        assert prefilled.handoff is not None
        assert len(tokens(prefilled.deltas)) == first_token
        rest = await collect(other.resume(request, prefilled.handoff))
        assert tokens(prefilled.deltas) + tokens(rest) == tokens(whole)
    moved = await collect(other.generate(Request("moved", PROMPT, PARAMS), emitted=tokens(whole)[:9]))
    assert tokens(moved) == tokens(whole)[9:]
    await idle(backend)
    await idle(other)
    await other.stop()


async def test_a_prompt_whose_first_token_is_its_last_has_no_handoff(backend: TorchBackend) -> None:
    one = SamplingParams(max_tokens=1, temperature=0)
    prefilled = await backend.prefill(Request("one", PROMPT, one), first_token=True)
    assert prefilled.handoff is None
    assert prefilled.deltas[-1].finished
    await idle(backend)


async def test_replays_equal_what_was_served(backend: TorchBackend) -> None:
    deltas = await collect(backend.generate(Request("r", PROMPT, PARAMS)))
    served = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    forced = Request("again", (*PROMPT, *tokens(deltas)), PARAMS, score_from=len(PROMPT))
    replayed = await backend.replay(forced)
    assert list(replayed.logprobs) == pytest.approx(served, abs=1e-4)
    stats = backend.take_stats()
    assert stats.num_emitted == 24
    assert backend.take_stats().num_emitted == 0


@pytest.mark.parametrize("speculation", Speculation)
async def test_who_may_draft_is_switched_while_requests_run(backend: TorchBackend, speculation: Speculation) -> None:
    plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
    backend.set_speculation(speculation)
    for canary in (False, True):
        deltas = await collect(backend.generate(Request(f"{canary}", PROMPT, PARAMS, canary=canary)))
        drafts = speculation is Speculation.ON or (speculation is Speculation.CANARY and canary)
        assert (sum(delta.num_drafted for delta in deltas) > 0) == drafts
        assert tokens(deltas) == plain


async def test_a_request_goes_on_plainly_when_what_was_computed_is_no_longer_trusted(backend: TorchBackend) -> None:
    plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
    stream = backend.generate(Request("r", PROMPT, PARAMS))
    deltas = [await anext(stream)]
    backend.set_speculation(Speculation.OFF)
    backend.distrust()
    rest = await collect(stream)
    assert tokens(deltas + rest) == plain
    assert rest[-1].preempted and not deltas[0].preempted
    assert not any(delta.num_drafted for delta in rest if delta.preempted)
    again = await collect(backend.generate(Request("again", PROMPT, PLAIN)))
    assert again[0].num_cached_tokens > 0, "what was computed since is cached anew"
    backend.distrust()
    afresh = await collect(backend.generate(Request("afresh", PROMPT, PLAIN)))
    assert afresh[0].num_cached_tokens == 0
    await idle(backend)


async def test_leaving_early_frees_what_was_held(backend: TorchBackend) -> None:
    stream = backend.generate(Request("left", PROMPT, LONG))
    await anext(stream)
    await stream.aclose()
    await idle(backend)
    prefill = asyncio.create_task(backend.prefill(Request("cancelled", PROMPT * 4, LONG), first_token=False))
    await asyncio.sleep(0)
    prefill.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await prefill
    await idle(backend)


async def test_an_aborted_request_ends_and_its_neighbour_goes_on(backend: TorchBackend) -> None:
    stream = backend.generate(Request("aborted", PROMPT, LONG))
    neighbour = asyncio.create_task(collect(backend.generate(Request("neighbour", PROMPT, PARAMS))))
    await anext(stream)
    backend.abort("aborted")
    rest = await collect(stream)
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert len(tokens(await neighbour)) == 24
    await idle(backend)


async def test_a_request_that_cannot_be_served_harms_nobody(backend: TorchBackend) -> None:
    neighbour = asyncio.create_task(collect(backend.generate(Request("neighbour", PROMPT, PARAMS))))
    with pytest.raises(InvalidRequest, match=r"vocabulary|Token ids"):
        await collect(backend.generate(Request("foreign", (600,), PARAMS)))
    with pytest.raises(InvalidRequest, match="prompt"):
        await collect(backend.generate(Request("long", PROMPT * 40, PARAMS)))
    with pytest.raises(HandoffRefused):
        await collect(backend.resume(Request("junk", PROMPT, PARAMS), np.zeros(100, np.uint8)))
    assert len(tokens(await neighbour)) == 24
    backend.check_health()
    await idle(backend)


async def test_an_engine_that_breaks_fails_its_requests_and_says_so(folder: Path) -> None:
    def breaking(path: Path, config: EngineConfig) -> EngineCore:
        engine = EngineCore.load(path, config)
        step, count = engine.step, 0

        def broken() -> list[TokenDelta]:
            nonlocal count
            count += 1
            if count > 12:
                raise RuntimeError("out of order")
            return step()

        engine.step = broken  # type: ignore[method-assign]
        return engine

    backend = TorchBackend(str(folder), "tiny", CONFIG, breaking)
    await backend.start()
    deltas = await asyncio.wait_for(collect(backend.generate(Request("r", PROMPT, LONG))), 30)
    assert deltas[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineFault, match="out of order"):
        backend.check_health()
    with pytest.raises(EngineFault):
        await collect(backend.generate(Request("late", PROMPT, PARAMS)))
    await backend.stop()


async def test_a_model_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No model"):
        await TorchBackend(str(tmp_path / "nothing"), "tiny", CONFIG).start()
