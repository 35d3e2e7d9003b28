"""A request with a seed, asked again of the same service, gets the same text, or hears why it may not."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.backends.base import Computing, ModelInfo
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.openai.frontend import FrontEnd
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.kernels.library import cpu_kernels, find_kernels
from speculative.scheduling.draft_length import DraftLength, DraftPlan
from speculative.state.sequence import Sequence
from tests.support.engines import settings
from tests.support.fake_serving import make_backend
from tests.support.front_ends import chat, completion, reply_to
from tests.support.vocabulary import needs_kernels

BODY = {"model": "tiny", "prompt": "a b a b a b", "max_tokens": 40, "ignore_eos": True, "seed": 7, "temperature": 1.0}


class ForcedLength(DraftLength):
    """An adaptive length whose every decision is the test's."""

    longest = 0

    def choose(self, decoding: Iterable[Sequence]) -> DraftPlan:
        return DraftPlan({sequence.request.request_id: self.longest for sequence in decoding})


class Service:
    def __init__(self, folder: Path, **changes: Any) -> None:
        self.length = ForcedLength()
        drafter = DrafterConfig.of(kind="ngram", num_draft_tokens=4, ngram_min=1, length="dynamic")
        self._folder, self._config = folder, settings(**({"drafter": drafter} | changes))
        self.backend = TorchBackend(str(folder), "tiny", self._config, self._make_engine)

    def _make_engine(self, folder: Path, config: EngineConfig) -> EngineCore:
        engine = load_engine(folder, config)
        if config.drafter.kind != "none":
            engine.scheduler.draft_length = self.length
        return engine

    async def start(self) -> "Service":
        self.info = await self.backend.start()
        source = PooledTokenSource(self.backend, Metrics(BufferSink("r"), model_name="tiny", pool="monolith"))
        self.front = FrontEnd(source, Tokenizer.from_folder(str(self._folder)), self.info)
        return self

    async def ask(self, longest: int, **fields: Any) -> dict[str, Any]:
        """The reply where at most so many tokens are drafted in a round."""
        self.length.longest = longest
        return await reply_to(self.front, completion(**BODY | fields))


def text(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def num_drafted(reply: dict[str, Any]) -> int:
    return sum(reply["usage"]["completion_tokens_details"].values())


def reported(reply: dict[str, Any]) -> list[tuple[Any, Any]]:
    """What each choice says of its seed."""
    return [(choice.get("reproducible"), choice.get("reproducible_reason")) for choice in reply["choices"]]


@pytest_asyncio.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    made = await Service(folder).start()
    yield made
    await made.backend.stop()


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"top_p": 0.9, "temperature": 1.4}, {"presence_penalty": 0.5}])
async def test_a_seed_gives_the_same_text_whatever_was_drafted(service: Service, more: dict[str, Any]) -> None:
    first, second, third = [await service.ask(longest, **more) for longest in (4, 0, 1)]
    assert num_drafted(first) > 0 and num_drafted(second) == 0, "else nothing was shown"
    assert first["choices"] == second["choices"] == third["choices"]
    assert first["system_fingerprint"] == second["system_fingerprint"]
    assert text(await service.ask(4, **more, seed=8)) != text(first)


@needs_kernels
async def test_a_reply_to_a_seed_says_that_it_gives_this_text_again(service: Service) -> None:
    for more in ({}, {"temperature": 0}, {"reproducible": True}, {"reproducible": False, "speculate": False}):
        assert reported(await service.ask(4, **more)) == [(True, None)], more
    assert reported(await service.ask(4, n=3)) == [(True, None)] * 3
    assert reported(await service.ask(4, seed=None)) == [(None, None)], "nobody can ask for an unknown seed again"


@needs_kernels
async def test_who_does_without_hears_why_the_text_may_be_another(service: Service) -> None:
    first, second = [await service.ask(longest, reproducible=False) for longest in (4, 0)]
    assert text(first) != text(second), "the drafts shift the draws"
    ((promised, why),) = reported(first)
    assert promised is False and "reproducible is false" in why and "drafted" in why


@needs_kernels
async def test_without_a_drafter_nothing_shifts_the_draws(folder: Path) -> None:
    service = await Service(folder, drafter=DrafterConfig(kind="none")).start()
    try:
        first, second = [await service.ask(0, reproducible=False) for _ in range(2)]
    finally:
        await service.backend.stop()
    assert text(first) == text(second) and reported(first) == reported(second) == [(True, None)]


async def test_without_the_kernels_a_reply_says_that_rounding_depends_on_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def forget() -> None:
        find_kernels.cache_clear()
        cpu_kernels.cache_clear()

    request.addfinalizer(forget)
    with_kernels = (await _info(folder)).system_fingerprint if cpu_kernels() is not None else "none"
    forget()
    monkeypatch.setenv("PATH", "")  # no compiler
    service = await Service(folder).start()
    reply = await service.ask(4)
    await service.backend.stop()
    monkeypatch.undo()
    ((promised, why),) = reported(reply)
    assert promised is False and "without the CPU kernels" in why
    assert service.info.computing.kernels_off, "and why there are none"
    assert reply["system_fingerprint"] != with_kernels, "what computes is part of it"


async def _info(folder: Path) -> ModelInfo:
    service = await Service(folder).start()
    await service.backend.stop()
    return service.info


WHY = Computing(unrepeatable="it rounds by the batch", couples_seeds=False)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("computing", "switches", "expected"),
    [
        (Computing(), False, [(True, None)]),
        (WHY, False, [(False, "it rounds by the batch")]),
        (Computing(), True, [(False, "the weights were changed while it was generated")]),
    ],
    ids=["promised", "not promised", "new weights on the way"],
)
async def test_the_end_of_a_choice_says_it_once(
    tokenizer: Tokenizer, stream: bool, make: Any, computing: Computing, switches: bool, expected: list[Any]
) -> None:
    backend, script = make_backend(tokenizer, run_length=1)
    script.say("abcdefgh")
    info = dataclasses.replace(await backend.start(), computing=computing)
    front = FrontEnd(
        PooledTokenSource(backend, Metrics(BufferSink("r"), model_name="fake", pool="decode")), tokenizer, info
    )
    job = await front.prepare(make(model="fake", seed=1, max_tokens=9, stream=stream))
    assert job.requests[0].params.reproducible is computing.couples_seeds
    replies, answering = [], _whole(front, job) if not stream else _chunks(front, job)
    async for reply in answering:
        replies.append(reply)
        if switches:
            backend.weight_version = "step-1"
    if switches and not stream:
        return  # it came at once; streams show it
    said = [one for reply in replies for one in reported(reply) if one != (None, None)]
    assert said == expected


async def _whole(front: FrontEnd, job: Any) -> AsyncIterator[dict[str, Any]]:
    yield await front.collect(job)


async def _chunks(front: FrontEnd, job: Any) -> AsyncIterator[dict[str, Any]]:
    async for event in front.events(job):
        for block in event.decode().split("\n\n"):
            if block.startswith("data: {"):
                yield json.loads(block.removeprefix("data: "))
        await asyncio.sleep(0)
