"""vLLM passes the kit of all backends, with the drafters that its CPU build runs. `make test-vllm` sets it up."""

import asyncio
import dataclasses
import json
import operator
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from speculative.config import DrafterConfig
from speculative.errors import ConfigError, HandoffRefused
from speculative.request import FinishReason, Request, SamplingParams, Speculation, Structure, TokenDelta, TokenKind
from speculative.stats import StepStats
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
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_engines import CONFIG, TARGET, drafter_for, vllm, write_head
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
MANY = dataclasses.replace(GREEDY, max_tokens=150, logprobs=None)


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle3"])
def drafter(request: pytest.FixtureRequest, folder: Path) -> DrafterConfig:
    return drafter_for(folder, request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(folder: Path, drafter: DrafterConfig) -> AsyncIterator[VllmBackend]:
    async with vllm(folder, drafter, handoff="copy") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(folder: Path, drafter: DrafterConfig) -> AsyncIterator[VllmBackend]:
    async with vllm(folder, drafter, handoff="copy") as started:
        yield started


class TestConformance(EngineConformance):
    """vLLM passes the kit of all backends."""


async def test_prompts_of_every_length_around_blocks_and_chunks_are_handed_over(
    backend: VllmBackend, other: VllmBackend
) -> None:
    for length in (2, 15, 31, 32, 33, 63, 64, 65, 66, 100, 129):
        request = Request("r", (PROMPT * 10)[:length], GREEDY)
        whole = tokens(await collect(backend.generate(request)))
        handoff = await handed_off(backend, request, first_token=True)
        other.invalidate_cache()
        other.take_stats()
        assert tokens(await collect(other.resume(request, handoff))) == whole
        computed = other.take_stats().num_prompt_tokens
        assert computed == 1, f"of {length} tokens {computed} were computed again"


async def test_a_file_that_is_gone_only_means_that_the_prompt_is_computed(backend: VllmBackend) -> None:
    whole = tokens(await collect(backend.generate(Request("whole", PROMPT, GREEDY))))
    transfer = {"load": "/nonexistent/folder/file", "num_tokens": len(PROMPT) - 1}
    backend.invalidate_cache()
    deltas = await collect(backend._deltas(Request("r", PROMPT, GREEDY), (), transfer))
    assert tokens(deltas) == whole
    backend.check_health()


async def test_the_longest_sequence_ends_by_length_and_is_replayed_whole(
    backend: VllmBackend, other: VllmBackend
) -> None:
    prompt = (PROMPT * 20)[:390]
    deltas = await collect(backend.generate(Request("r", prompt, dataclasses.replace(GREEDY, max_tokens=100))))
    said = tokens(deltas)
    assert len(said) == 10
    served = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    replayed = await other.replay(Request("again", (*prompt, *said), PLAIN, score_from=len(prompt)))
    assert list(replayed.logprobs) == pytest.approx(served, abs=1e-4)


async def test_an_answer_keeps_its_form(backend: VllmBackend) -> None:
    params = SamplingParams(max_tokens=40, temperature=1, structure=Structure("regex", "[ab]{3}"))
    deltas = await collect(backend.generate(Request("r", PROMPT, params)))
    text = json.loads((Path(backend._info().folder) / "tokenizer.json").read_text())["model"]["vocab"]
    names = {number: token for token, number in text.items()}
    *said, end = tokens(deltas)
    assert re.fullmatch("[ab]{3}", "".join(names[token] for token in said))
    assert end in backend._info().eos_token_ids and deltas[-1].finish_reason is FinishReason.STOP


async def test_acceptance_by_position_adds_up_is_as_expected_and_knows_only_drafts_that_were_verified(
    backend: VllmBackend,
) -> None:
    async def counted() -> tuple[StepStats, list[TokenDelta]]:
        """What a few requests add to the counts, with what the self-checks report a second later."""
        await asyncio.sleep(1.5)
        backend.take_stats()
        requests = [Request(f"r{shift}", PROMPT[shift:], MANY) for shift in range(3)]
        answers = await asyncio.gather(*(collect(backend.generate(request)) for request in requests))
        await asyncio.sleep(1.5)
        return backend.take_stats(), [delta for deltas in answers for delta in deltas]

    stats, deltas = await counted()
    drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
    assert stats.num_drafted == sum(drafted) == sum(delta.num_drafted for delta in deltas) > 0
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)
    assert drafted[0] == stats.num_drafts and all(map(operator.le, accepted, drafted))
    emitted = sum(delta.num_accepted for delta in deltas)
    assert emitted <= stats.num_accepted <= emitted + 3 * 3, (
        "the last drafts of an answer may be accepted behind its end"
    )
    assert stats.expected_accepted == pytest.approx(stats.num_accepted, abs=1e-2), "greedy drafts are certain"
    backend.set_speculation(Speculation.OFF)
    withheld, _ = await counted()
    backend.set_speculation(Speculation.ON)
    assert withheld.num_drafted == withheld.num_drafts == withheld.num_accepted == withheld.expected_accepted == 0


async def test_a_drafter_follows_an_update_that_brings_its_weights_and_keeps_its_own_otherwise(
    backend: VllmBackend, drafter: DrafterConfig, folder: Path, tmp_path: Path
) -> None:
    """What it shares with the target is the new target's: it drafts what our engine drafts with the two."""
    others = write_tiny_model(tmp_path / "others", vocab_size=512, tokenizer=True, seed=9, **TARGET)
    if drafter.model is None:
        with pytest.raises(ConfigError, match=r"drafter.kind ngram has no weights"):
            await backend.load_weights(str(others), str(others))
        return
    new = others if drafter.kind == "draft_model" else write_head(others, tmp_path / "head")
    alien = write_tiny_model(tmp_path / "alien", vocab_size=512, tokenizer=True, **(TARGET | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"drafter_path: .* is of another model"):
        await backend.load_weights(str(others), str(alien))
    handoff = await handed_off(backend, Request("r", PROMPT, GREEDY), first_token=True)
    seen = []
    for target, head in ((folder, new), (others, new), (others, None), (folder, None)):
        await backend.load_weights(str(target), None if head is None else str(head))
        await backend.switch_weights("default" if (target, head) == (folder, None) else "v")
        deltas = await collect(backend.generate(Request("r", PROMPT, MANY)))
        seen.append(drawn(deltas))
        config = dataclasses.replace(CONFIG, drafter=dataclasses.replace(drafter, model=str(head or drafter.model)))
        async with serving(TorchBackend(str(target), "ours", config)) as ours:
            assert drawn(await collect(ours.generate(Request("r", PROMPT, MANY)))) == seen[-1], (target.name, head)
        if head is not None and target is folder:
            with pytest.raises(HandoffRefused, match="drafter"):
                await collect(backend.resume(Request("r", PROMPT, GREEDY), handoff))
    assert seen[1] != seen[2], "the two drafters must be distinguished"
    assert tokens(await collect(backend.resume(Request("r", PROMPT, GREEDY), handoff))) == [
        token for token, _ in seen[-1][: GREEDY.max_tokens]
    ]
    await idle(backend)


async def test_a_head_that_is_tied_to_the_embedding_is_updated_with_it(tmp_path: Path) -> None:
    tied = TARGET | {"tie_word_embeddings": True}
    first, second = (
        write_tiny_model(tmp_path / name, vocab_size=512, tokenizer=True, seed=seed, **tied)
        for name, seed in (("first", 0), ("second", 9))
    )
    drafter = DrafterConfig(kind="none")
    async with vllm(first, drafter, handoff="copy") as backend:
        await backend.load_weights(str(second))
        await backend.switch_weights("second")
        found = tokens(await collect(backend.generate(Request("r", PROMPT, PLAIN))))
    async with serving(TorchBackend(str(second), "ours", dataclasses.replace(CONFIG, drafter=drafter))) as ours:
        assert found == tokens(await collect(ours.generate(Request("r", PROMPT, PLAIN))))


def drawn(deltas: Sequence[TokenDelta]) -> list[tuple[int, bool]]:
    """The tokens, and whether each was a draft; not of the end, where our engine drafts less."""
    kinds = [kind is TokenKind.ACCEPTED for delta in deltas for kind in delta.kinds]
    return list(zip(tokens(deltas), kinds, strict=True))[:-8]


async def test_other_weights_of_the_model_are_taken_while_requests_run(
    backend: VllmBackend, folder: Path, tmp_path: Path
) -> None:
    before = tokens(await collect(backend.generate(Request("before", PROMPT, PLAIN))))
    others = write_tiny_model(tmp_path / "others", vocab_size=512, tokenizer=True, seed=9, **TARGET)
    running = backend.generate(Request("running", PROMPT, LONG))
    first = await anext(running)
    fingerprint = await backend.load_weights(str(others))
    info = await backend.switch_weights("v1")
    assert info.fingerprint == fingerprint
    deltas = [first, *(await collect(running))]
    assert len(tokens(deltas)) == LONG.max_tokens
    assert deltas[0].weight_version == "default" and deltas[-1].weight_version == "v1"
    after = tokens(await collect(backend.generate(Request("after", PROMPT, PLAIN))))
    async with serving(TorchBackend(str(others), "ours", CONFIG)) as ours:
        assert after == tokens(await collect(ours.generate(Request("after", PROMPT, PLAIN))))
    assert after != before
    await backend.load_weights(str(folder))
    await backend.switch_weights("default")
    assert tokens(await collect(backend.generate(Request("back", PROMPT, PLAIN)))) == before
    await idle(backend)
