"""The engine on its thread: what goes in comes out, and one request's trouble is nobody else's."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_app.backends import torch_backend
from serve_app.backends.base import DeviceHandoff, Numerics
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import DrafterConfig, EngineConfig, WeightsName
from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault, HandoffRefused
from speculative.gpu.device_handoff import checksum
from speculative.model.arithmetic import Arithmetic
from speculative.model.formats.fp8 import Fp8
from speculative.model.quantized import save_quantized
from speculative.request import FinishReason, Request, SamplingParams, Speculation, TokenDelta
from speculative.state.handoff import Blob, Export, decode_state
from tests.support.backend_conformance import (
    GREEDY,
    LONG,
    PLAIN,
    PROMPT,
    EngineConformance,
    collect,
    handed_off,
    idle,
    serving,
    tokens,
)
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model

CONFIG = EngineConfig(
    dtype="float32", device="cpu", kv_cache_tokens=2048, drafter=DrafterConfig.of(ngram_min=1), max_num_seqs=4
)


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[TorchBackend]:
    async with serving(TorchBackend(str(folder), "tiny", CONFIG)) as started:
        yield started


@pytest.fixture
async def other(folder: Path) -> AsyncIterator[TorchBackend]:
    async with serving(TorchBackend(str(folder), "tiny", CONFIG)) as started:
        yield started


async def test_a_handoff_whose_values_travel_apart_is_continued_or_refused(
    backend: TorchBackend, other: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_apart(export: Export, finish: Callable[[Export], Blob] = Export.finish) -> Blob:
        state = decode_state(finish(export), export._manifest)
        sealed = Export(export._manifest, len(state.token_ids), 8)
        export.on_device = state.kv.flatten().view(torch.uint8)
        placed = sealed.place((2,))
        placed.view(torch.int64).copy_(checksum(export.on_device))
        sealed.take(placed, of_target=False)
        sealed.describe(state.token_ids, state.num_prompt, state.num_cached, {})
        return finish(sealed)

    request = Request("apart", PROMPT, GREEDY)
    expected = tokens(await collect(other.generate(request)))
    monkeypatch.setattr(Export, "finish", finish_apart)
    handoff = await handed_off(backend, request)
    assert isinstance(handoff, DeviceHandoff)
    assert tokens(await collect(other.resume(request, handoff))) == expected
    handoff.values[100] ^= 1
    with pytest.raises(HandoffRefused, match="not those that were sent"):
        await collect(other.resume(request, handoff))


@pytest.mark.parametrize(
    ("weights", "came_quantized", "reported"),
    [("auto", False, None), ("float32", True, "gguf"), ("auto", True, "gguf")],
)
async def test_rounded_weights_are_reported_in_whatever_form_they_are_kept(
    weights: WeightsName, came_quantized: bool, reported: str | None, folder: Path, tmp_path: Path
) -> None:
    made = shutil.copytree(folder, tmp_path / "model")
    if came_quantized:
        save_quantized(made, {})
    backend = TorchBackend(str(made), "tiny", replace(CONFIG, quantization=weights))
    assert (await backend.start()).quantization == reported
    await backend.load_weights(str(folder))
    assert (await backend.switch_weights("other")).quantization is None
    await backend.stop()


@pytest.mark.parametrize("rounding", ["", "products round by the size of the batch"])
async def test_a_replica_says_whether_it_rounds_a_row_alike_in_any_batch(
    rounding: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "arithmetic", Arithmetic("cpu", "", rounding, "made up"))
    async with serving(TorchBackend(str(folder), "tiny", CONFIG)) as backend:
        replay = await backend.replay(Request("r", (3, 4, 5), SamplingParams(), score_from=1, replay=True))
    assert replay.numerics == Numerics("truespec", "float32", "plain", repeats=not rounding)


async def test_fp8_weights_are_reported_and_updated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8, "why_not", lambda *_: "")  # as on a GPU
    backend, plain = (TorchBackend(str(folder), "tiny", replace(CONFIG, quantization=one)) for one in ("fp8", "auto"))
    served, unrounded = await backend.start(), await plain.start()
    assert (served.quantization, unrounded.quantization) == ("fp8", None)
    assert served.fingerprint != unrounded.fingerprint, "their logprobs and computed tokens do not agree"
    await backend.load_weights(str(folder))
    assert (await backend.switch_weights("other")) == served
    await backend.stop()
    await plain.stop()


async def test_a_head_that_comes_with_the_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", vocab_size=512, num_hidden_layers=4)
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_backend, "SHIPPED_HEADS", tmp_path)
    head = write_tiny_head(tmp_path / "tiny-head", folder)
    drafter = DrafterConfig(kind="eagle3", model="tiny-head", num_draft_tokens=2)
    backend = TorchBackend(str(folder), "tiny", replace(CONFIG, drafter=drafter))
    assert (await backend.start()).drafter_folder == str(head)
    await backend.load_weights(str(folder), "tiny-head")
    assert (await backend.switch_weights("other")).drafter_folder == str(head)
    assert len(tokens(await collect(backend.generate(Request("one", PROMPT, GREEDY))))) == GREEDY.max_tokens
    await backend.stop()


class TestConformance(EngineConformance):
    """Our engine passes the kit of all backends."""


async def test_a_request_goes_on_plainly_when_what_was_computed_is_no_longer_trusted(backend: TorchBackend) -> None:
    plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
    stream = backend.generate(Request("r", PROMPT, GREEDY))
    deltas = [await anext(stream)]
    backend.set_speculation(Speculation.OFF)
    backend.invalidate_cache()
    rest = await collect(stream)
    assert tokens(deltas + rest) == plain
    assert rest[-1].preempted and not deltas[0].preempted
    assert not any(delta.num_drafted for delta in rest if delta.preempted)
    again = await collect(backend.generate(Request("again", PROMPT, PLAIN)))
    assert again[0].num_cached_tokens > 0, "what was computed since is cached again"
    backend.invalidate_cache()
    afresh = await collect(backend.generate(Request("afresh", PROMPT, PLAIN)))
    assert afresh[0].num_cached_tokens == 0
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
    deltas = await asyncio.wait_for(collect(backend.generate(Request("r", PROMPT, LONG))), 300)
    assert deltas[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineFault, match="out of order"):
        backend.check_health()
    with pytest.raises(EngineFault):
        await collect(backend.generate(Request("late", PROMPT, GREEDY)))
    await backend.stop()


async def test_a_model_that_is_not_there_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.source: There is no folder .*nothing here"):
        await TorchBackend(str(tmp_path / "nothing"), "tiny", CONFIG).start()
