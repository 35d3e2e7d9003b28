"""vLLM with drafts of dynamic length: the same text, and no drafts where they do not pay."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.backends.vllm_backend import VllmBackend
from speculative.config import DrafterConfig
from speculative.request import Request, TokenDelta
from tests.support.backend_conformance import GREEDY, PROMPT, collect, tokens
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_engines import TARGET, vllm
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
MANY = dataclasses.replace(GREEDY, max_tokens=370, logprobs=None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(folder: Path) -> AsyncIterator[VllmBackend]:
    """With a drafter as costly as the target, and none of whose drafts are accepted."""
    other = write_tiny_model(folder.parent / "other", vocab_size=512, tokenizer=True, seed=9, **TARGET)
    drafter = DrafterConfig(kind="draft_model", model=str(other), num_draft_tokens=3, length="dynamic")
    async with vllm(folder, drafter) as started:
        yield started


def drafted(deltas: list[TokenDelta]) -> list[int]:
    return [delta.num_drafted for delta in deltas]


async def test_every_length_is_tried_then_nothing_is_drafted_and_the_text_is_the_same(backend: VllmBackend) -> None:
    first = await collect(backend.generate(Request("first", PROMPT, MANY)))
    assert set(drafted(first)[:20]) == {0, 1, 2, 3}
    later = [first]  # a busy machine may make drafts look cheap for a while
    while len(later) < 7 and sum(drafted(later[-1])) >= 0.1 * len(later[-1]):
        later.append(await collect(backend.generate(Request(f"later-{len(later)}", PROMPT, MANY))))
    assert sum(drafted(later[-1])) < 0.1 * len(later[-1]), "but for a probe now and then"
    plain = dataclasses.replace(MANY, speculate=False)
    assert (
        tokens(first) == tokens(later[-1]) == tokens(await collect(backend.generate(Request("plain", PROMPT, plain))))
    )


async def test_other_weights_make_it_try_again(backend: VllmBackend, folder: Path) -> None:
    """With those that it accepts all of the drafts: each costs as much as a token, and two at once are cheaper."""
    await backend.load_weights(str(folder), str(folder))
    await backend.switch_weights("v1")
    deltas = await collect(backend.generate(Request("r", PROMPT, MANY)))
    assert sum(drafted(deltas)) > 0
    await backend.load_weights(str(folder))
    await backend.switch_weights("default")
