"""LoRA adapters in vLLM: each request gets its own, wherever it is computed, handed over, cached, or computed again."""

import asyncio
import dataclasses
import gc
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts.settings import SIZES, VllmSettings
from speculative.config import DrafterConfig
from speculative.errors import ConfigError, HandoffRefused, InvalidRequest
from speculative.request import Request, TokenDelta
from tests.support.backend_conformance import GREEDY, PLAIN, PROMPT, collect, handed_off, idle, serving, tokens
from tests.support.tiny_adapters import write_merged, write_tiny_adapter
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_engines import CONFIG, TARGET, drafter_for
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
LONG_PROMPT = (PROMPT * 10)[:129]  # several blocks and chunks
NAMES = ("", "sql", "legal")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """One that changes all linear layers; one that changes few, of another rank."""
    return {
        "sql": write_tiny_adapter(folder.parent / "sql", folder, seed=1),
        "legal": write_tiny_adapter(folder.parent / "legal", folder, seed=2, rank=10, modules=("q_proj", "v_proj")),
    }


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle3"])
def settings(request: pytest.FixtureRequest, folder: Path, adapters: dict[str, Path]) -> VllmSettings:
    config = dataclasses.replace(CONFIG, drafter=drafter_for(folder, request.param))
    modules = {name: str(path) for name, path in adapters.items()}
    return VllmSettings(config, SIZES, {"enforce_eager": True}, handoff="copy", lora_modules=modules)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, settings: VllmSettings) -> AsyncIterator[VllmBackend]:
    async with serving(VllmBackend(str(folder), "tiny", settings)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(folder: Path, settings: VllmSettings) -> AsyncIterator[VllmBackend]:
    async with serving(VllmBackend(str(folder), "tiny", settings)) as started:
        yield started


ParsedDelta = dict[str, list[TokenDelta]]


async def said_by(engine: Any, prompt: Sequence[int] = LONG_PROMPT, names: Sequence[str] = NAMES) -> ParsedDelta:
    """What each adapter says, all in the same steps."""
    answers = await asyncio.gather(
        *(collect(engine.generate(Request(f"r-{name}", tuple(prompt), GREEDY, adapter=name))) for name in names)
    )
    return dict(zip(names, answers, strict=True))


async def merged_says(folder: Path, scratch: Path, adapters: dict[str, Path], prompt: Sequence[int]) -> ParsedDelta:
    """The same of our own engine, with each adapter merged into the model."""
    reported: ParsedDelta = {}
    for name in NAMES:
        merged = write_merged(scratch / f"merged-{name}", folder, adapters[name]) if name else folder
        plain = dataclasses.replace(CONFIG, drafter=DrafterConfig(kind="none"))
        async with serving(TorchBackend(str(merged), "merged", plain)) as reference:
            reported[name] = await collect(reference.generate(Request("r", tuple(prompt), GREEDY)))
    return reported


def logprobs(deltas: Sequence[TokenDelta]) -> list[float]:
    return [entry.logprob for delta in deltas for entry in delta.logprobs or ()]


async def test_each_adapter_says_what_the_model_with_it_merged_says_also_in_one_batch(
    engine: VllmBackend, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for number, prompt in enumerate((LONG_PROMPT, PROMPT)):
        right = await merged_says(folder, tmp_path / str(number), adapters, prompt)
        assert len({tuple(tokens(deltas)) for deltas in right.values()}) == len(NAMES), "they must be distinguished"
        for _ in range(2):
            said = await said_by(engine, prompt)
            for name in NAMES:
                assert tokens(said[name]) == tokens(right[name]), name
                assert logprobs(said[name]) == pytest.approx(logprobs(right[name]), abs=1e-3)
        assert sum(delta.num_drafted for deltas in said.values() for delta in deltas) > 0
        alone = [await said_by(engine, prompt, [name]) for name in NAMES]
        assert [tokens(one[name]) for one, name in zip(alone, NAMES, strict=True)] == [
            tokens(right[name]) for name in NAMES
        ]


async def test_what_one_adapter_has_cached_another_does_not_find(engine: VllmBackend) -> None:
    engine.invalidate_cache()
    for again in (False, True):
        for name in NAMES:
            (deltas,) = (await said_by(engine, names=[name])).values()
            cached = sum(delta.num_cached_tokens for delta in deltas)
            assert (cached >= 96) == again and (cached == 0) != again, name


async def test_a_prompt_is_handed_over_with_its_adapter_only(engine: VllmBackend, elsewhere: VllmBackend) -> None:
    whole = await said_by(engine)
    for name in NAMES:
        request = Request("r", LONG_PROMPT, GREEDY, adapter=name)
        handoff = await handed_off(engine, request)
        elsewhere.invalidate_cache()
        elsewhere.take_stats()
        assert tokens(await collect(elsewhere.resume(request, handoff))) == tokens(whole[name])
        assert elsewhere.take_stats().num_prompt_tokens == 1, name
        for wrong in set(NAMES) - {name}:
            with pytest.raises(HandoffRefused, match="adapter") as caught:
                await collect(elsewhere.resume(dataclasses.replace(request, adapter=wrong), handoff))
            assert caught.value.reason == "manifest"
    await idle(elsewhere)


async def test_an_answer_is_computed_again_with_its_adapter(engine: VllmBackend, elsewhere: VllmBackend) -> None:
    """All at once: steps in which vLLM returns the logprobs of several given texts, of several adapters."""
    said = await said_by(engine)
    forced = [
        Request(f"again-{name}", (*LONG_PROMPT, *tokens(said[name])), PLAIN, score_from=len(LONG_PROMPT), adapter=name)
        for name in NAMES
    ]
    replays = await asyncio.gather(*(elsewhere.replay(request) for request in forced))
    for name, replayed in zip(NAMES, replays, strict=True):
        assert list(replayed.logprobs) == pytest.approx(logprobs(said[name]), abs=1e-4), name
        assert replayed.replayed is not None and max(row.gap for row in replayed.replayed) < 1e-3
    of_model = await elsewhere.replay(dataclasses.replace(forced[1], adapter=""))
    assert of_model.replayed is not None and max(row.gap for row in of_model.replayed) > 0.1, (
        "a wrong adapter must show"
    )


async def test_an_adapter_that_is_not_there_is_refused_by_name(engine: VllmBackend) -> None:
    assert [one.name for one in engine._info().adapters] == ["sql", "legal"]
    request = Request("r", PROMPT, GREEDY, adapter="alien")
    for ask in (collect(engine.generate(request)), engine.prefill(request, first_token=False)):
        with pytest.raises(InvalidRequest) as caught:
            await ask
        assert caught.value.field == "model"


async def test_adapters_stay_when_other_weights_come(
    engine: VllmBackend, elsewhere: VllmBackend, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    before, first = await said_by(engine), engine._info().fingerprint
    request = Request("r", LONG_PROMPT, GREEDY, adapter="sql")
    handoff = await handed_off(engine, request)
    others = write_tiny_model(tmp_path / "others", vocab_size=512, tokenizer=True, seed=9, **TARGET)
    right = await merged_says(others, tmp_path, adapters, LONG_PROMPT)
    for one in (engine, elsewhere):
        fingerprint = await one.load_weights(str(others))
        info = await one.switch_weights("v1")
        assert info.fingerprint == fingerprint != first
        after = await said_by(one)
        for name in NAMES:
            assert tokens(after[name]) == tokens(right[name]) != tokens(before[name]), name
    with pytest.raises(HandoffRefused, match="fingerprint"):
        await collect(elsewhere.resume(request, handoff))
    for one in (engine, elsewhere):
        await one.load_weights(str(folder))
        assert (await one.switch_weights("default")).fingerprint == first
    back = await said_by(engine)
    assert {name: tokens(back[name]) for name in NAMES} == {name: tokens(before[name]) for name in NAMES}


async def test_weights_do_not_change_where_an_adapters_files_have(
    engine: VllmBackend, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM would read them again."""
    weights = adapters["legal"] / "adapter_model.safetensors"
    shutil.copy(weights, tmp_path)
    write_tiny_adapter(adapters["legal"], folder, seed=3, rank=10, modules=("q_proj", "v_proj"))
    with pytest.raises(ConfigError, match=r"vllm.lora_modules.legal has changed in .* Restart"):
        await engine.load_weights(str(folder))
    shutil.copy(tmp_path / weights.name, weights)
    await engine.load_weights(str(folder))
    engine.drop_weights()
    engine.check_health()


async def test_what_vllm_does_not_take_is_refused_at_start(
    folder: Path, settings: VllmSettings, adapters: dict[str, Path]
) -> None:
    if settings.engine.drafter.kind != "ngram":
        pytest.skip("no drafter changes that")
    dora = write_tiny_adapter(folder.parent / "dora", folder, seed=4, config={"use_dora": True})
    wrong = dataclasses.replace(settings, lora_modules={"dora": str(dora)})
    with pytest.raises(ConfigError, match=r"vllm.lora_modules.dora is .*, which vLLM rejects: .*DoRA"):
        await VllmBackend(str(folder), "tiny", wrong).start()
    gc.collect()  # what vLLM leaves open is found here, where its warnings are put up with
