"""The engine behind its thread: new weights under requests that run, and what a pause does to them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
import torch

from serve_app.backends.base import PauseMode
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import WeightsName
from speculative.drafting.weights import Weights
from speculative.errors import ConfigError, EngineFault
from speculative.kernels.library import cpu_kernels
from speculative.model.decoder import Decoder
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta
from tests.support.engines import settings
from tests.support.tiny_models import write_tiny_model

PROMPT = tuple(range(3, 20))
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.5, speculate=False)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.5, logprobs=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("backend-weights")
    return write_tiny_model(base / "old", vocab_size=64), write_tiny_model(base / "new", vocab_size=64, seed=9)


async def started(folder: Path) -> TorchBackend:
    backend = TorchBackend(str(folder), "tiny", settings())
    await backend.start()
    return backend


@pytest_asyncio.fixture
async def backend(folders: tuple[Path, Path]) -> AsyncIterator[TorchBackend]:
    one = await started(folders[0])
    yield one
    await one.stop()


async def collected(backend: TorchBackend, name: str, params: SamplingParams = SHORT) -> list[TokenDelta]:
    return [delta async for delta in backend.generate(Request(name, PROMPT, params, seed=3))]


class Running:
    """A long request, once its first token is there."""

    def __init__(self, backend: TorchBackend) -> None:
        self.deltas: list[TokenDelta] = []
        self._began = asyncio.Event()
        self.task = asyncio.create_task(self._run(backend))

    async def _run(self, backend: TorchBackend) -> None:
        async for delta in backend.generate(Request("long", PROMPT, LONG, seed=4)):
            self.deltas.append(delta)
            self._began.set()

    async def begun(self) -> "Running":
        await asyncio.wait_for(self._began.wait(), 300)
        return self


async def test_after_a_switch_it_answers_as_a_fresh_engine_would(
    backend: TorchBackend, folders: tuple[Path, Path]
) -> None:
    await collected(backend, "first")  # from here on the prompt is in the prefix cache, for all of them alike
    old = await collected(backend, "old")
    fingerprint = await backend.load_weights(str(folders[1]))
    assert [d.logprobs for d in await collected(backend, "beside")] == [d.logprobs for d in old]
    info = await backend.switch_weights("v1")
    assert info.fingerprint == fingerprint and info.folder == str(folders[0])
    got = await collected(backend, "new")
    fresh = await started(folders[1])
    try:
        wanted = await collected(fresh, "new")
    finally:
        await fresh.stop()
    assert [d.logprobs for d in got] == [d.logprobs for d in wanted]
    assert {d.weight_version for d in got} == {"v1"} and {d.weight_version for d in old} == {"default"}
    replay = await backend.replay(Request("replay", PROMPT, score_from=4))
    assert replay.weight_version == "v1"


async def test_weights_that_cannot_be_had_change_nothing(
    backend: TorchBackend, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^path: There is no folder .*nowhere"):
        await backend.load_weights(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="ngram has no weights"):  # whatever the name, it is not looked for
        await backend.load_weights(str(folders[1]), "nobody/has-this")
    other = write_tiny_model(tmp_path / "other", vocab_size=64, num_hidden_layers=3)
    with pytest.raises(ConfigError, match="is of another model: its num_layers is 3"):
        await backend.load_weights(str(other))
    with pytest.raises(EngineFault, match="load them first"):
        await backend.switch_weights("v1")
    assert {d.weight_version for d in await collected(backend, "still")} == {"default"}


async def test_keep_stands_still_and_goes_on_with_the_new_weights(
    backend: TorchBackend, folders: tuple[Path, Path]
) -> None:
    await backend.load_weights(str(folders[1]))
    running = await Running(backend).begun()
    await backend.pause(PauseMode.KEEP)
    frozen = backend.usage()
    backend.check_health()
    await backend.switch_weights("v1")
    assert not running.task.done() and frozen.num_running == 1
    await backend.unpause()
    await running.task
    versions = [delta.weight_version for delta in running.deltas]
    num_old = versions.count("default")
    assert versions == ["default"] * num_old + ["v1"] * (len(versions) - num_old) and 0 < num_old < len(versions)
    assert sum(len(delta.token_ids) for delta in running.deltas) == LONG.max_tokens


@pytest.mark.parametrize("frozen", [True, False])
async def test_a_switch_that_fails_ends_the_engine(
    backend: TorchBackend, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend._live_engine().parts, "_make_steps", fails)
    await backend.load_weights(str(folders[1]))
    running = await Running(backend).begun()
    await backend.pause(PauseMode.KEEP if frozen else PauseMode.WAIT)
    newcomer = asyncio.create_task(collected(backend, "newcomer"))
    await asyncio.sleep(0)
    with pytest.raises(EngineFault, match="stopped: CUDA out of memory"):
        await backend.switch_weights("v1")
    with pytest.raises(EngineFault, match="stopped: CUDA out of memory"):
        backend.check_health()
    with pytest.raises(EngineFault, match="stopped: CUDA out of memory"):
        await collected(backend, "later")
    await asyncio.wait_for(running.task, 300)
    (reported,) = await asyncio.wait_for(newcomer, 300)
    assert reported.finish_reason is FinishReason.ERROR and reported.error == "CUDA out of memory"
    assert running.deltas[-1].finish_reason is (FinishReason.ERROR if frozen else FinishReason.LENGTH)


def only_the_first_layer(new: Decoder, old: Decoder) -> None:
    new.layers[1], new.fused = old.layers[1], old.fused


def tied_head_left_behind(new: Decoder, old: Decoder) -> None:
    new.lm_head = old.lm_head


def kernels_left_behind(new: Decoder, old: Decoder) -> None:
    new.fused = old.fused


def norm_left_behind(new: Decoder, old: Decoder) -> None:
    new.layers[1].mlp_norm.weight = old.layers[1].mlp_norm.weight


@pytest.mark.skipif(cpu_kernels() is None, reason="the forms are those of the CPU kernels")
@pytest.mark.parametrize("quantization", ["float32", "bfloat16", "w4a8"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (only_the_first_layer, "model "),
        (kernels_left_behind, "model fused. It"),
        (tied_head_left_behind, r"model lm_head\."),
        (norm_left_behind, r"model layers\.1\.mlp_norm\.weight\."),
    ],
)
async def test_weights_of_which_a_part_is_not_applied_are_never_served(
    tmp_path: Path, quantization: WeightsName, change: Callable[[Decoder, Decoder], None], named: str
) -> None:
    old, new = (write_tiny_model(tmp_path / str(seed), "qwen3", vocab_size=64, seed=seed) for seed in (1, 2))
    dtype: Literal["float32", "bfloat16"] = "float32" if quantization == "float32" else "bfloat16"
    backend = TorchBackend(str(old), "tiny", settings(quantization=quantization, dtype=dtype))
    await backend.start()
    engine = backend._live_engine()
    switch = engine.switch

    def switching(weights: Weights, version: str) -> None:
        if version == "half":
            change(weights.decoder, engine.runner.decoder)
        switch(weights, version)

    engine.switch = switching  # type: ignore[method-assign]
    for version, folder in (("whole", new), ("half", old)):
        await backend.load_weights(str(folder))
        if version == "half":
            with pytest.raises(EngineFault, match=f"update to 'half' it computes with other weights .*: {named}"):
                await backend.switch_weights(version)
        else:
            await backend.switch_weights(version)
            assert {delta.weight_version for delta in await collected(backend, "served")} == {"whole"}
    with pytest.raises(EngineFault, match="stopped"):
        await collected(backend, "refused")
    await backend.stop()


async def test_wait_after_keep_lets_them_finish(backend: TorchBackend) -> None:
    running = await Running(backend).begun()
    await backend.pause(PauseMode.KEEP)
    newcomer = asyncio.create_task(collected(backend, "newcomer"))
    await asyncio.wait_for(backend.pause(PauseMode.WAIT), 300)
    assert running.deltas[-1].finish_reason is FinishReason.LENGTH
    assert not newcomer.done() and backend.usage().num_running == 0
    await backend.unpause()
    assert (await newcomer)[-1].finished


async def test_abort_after_keep_ends_them_and_keep_after_wait_stands_still(backend: TorchBackend) -> None:
    running = await Running(backend).begun()
    await backend.pause(PauseMode.KEEP)
    await asyncio.wait_for(backend.pause(PauseMode.ABORT), 300)
    assert running.deltas[-1].finish_reason is FinishReason.ABORT
    await backend.pause(PauseMode.WAIT)
    await backend.pause(PauseMode.KEEP)
    newcomer = asyncio.create_task(collected(backend, "newcomer"))
    await asyncio.sleep(0.05)
    assert not newcomer.done()
    await backend.unpause()
    assert (await newcomer)[-1].finished


async def test_a_pause_that_is_called_off_leaves_no_trace(backend: TorchBackend) -> None:
    running = await Running(backend).begun()
    pausing = asyncio.create_task(backend.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    assert (await collected(backend, "meanwhile"))[-1].finished
    await running.task
    assert running.deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_client_that_leaves_during_a_pause_leaves_nothing_behind(backend: TorchBackend) -> None:
    await backend.pause(PauseMode.WAIT)
    waiting = asyncio.create_task(collected(backend, "leaver"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await backend.unpause()
    assert (await collected(backend, "leaver"))[-1].finished, "its name is still taken"
    assert backend.usage().num_free_blocks == backend.usage().num_blocks
