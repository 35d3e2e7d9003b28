"""The lists "A request's life" and "A verdict's life" of docs/architecture.md, and the modules that are visited."""

import asyncio
import dataclasses
import json
import re
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from serve_app.guard.breaker import BreakerState
from speculative.kernels.library import cpu_kernels
from speculative.request import Request, TokenDelta
from tests.support.loops import for_each
from tests.support.project_files import ROOT
from tests.support.service_in_process import Service, started
from tests.support.tiny_models import write_tiny_model

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("speculative", "serve_app")
ENGINE = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16, "kv_cache_tokens": 8192, "max_batched_tokens": 128}
REQUEST, VERDICT = "A request's life", "A verdict's life"
# Rooms that are visited and not named: what every step rests on, and what goes on beside the steps.
_BENEATH = {
    "serve_app/routing": "counts the prompt tokens that wait, for routers",
    "serve_app/telemetry": "counts and traces",
    "speculative/cache": "blocks of keys and values",
    "speculative/kernels": "runs the model",
    "speculative/options": "the range of each sampling parameter",
    "speculative/selfcheck": "checks each step",
    "speculative/state": "the sequence, and the rows of its steps",
    "speculative/stats": "counts steps",
    "speculative/vocabulary": "what a step computes over the vocabulary",
}
BENEATH = {
    REQUEST: {
        **_BENEATH,
        "serve_app/config": "which answers a replay can judge",
        "serve_app/guard": "keeps the request for canaries",
        "speculative/errors": "that of a body that is too long, made before it is read",
    },
    VERDICT: {
        **{name: why for name, why in _BENEATH.items() if name != "speculative/selfcheck"},
        "serve_app/access": "the limits of the client that asks for the verdict",
        "serve_app/backends": "passes the replay on to the engine's thread",
        "serve_app/openai": "ends the reply",
        "serve_app/streams": "the replay's span",
        "serve_app/text": "compiles grammars for the independent replay",
        "serve_app/weights": "which weights are served",
        "speculative/drafting": "drafts nothing for a replay",
        "speculative/end_tokens": "of the independent replay",
        "speculative/engine": "steps, as in the life of a request",
        "speculative/lookup": "drafts nothing for a replay",
        "speculative/model": "steps, as in the life of a request",
        "speculative/request": "the request that is to be replayed",
        "speculative/sampling": "the logprobs, and random numbers of the draws",
        "speculative/scheduling": "steps, as in the life of a request",
        "speculative/verification": "drafts nothing for a replay",
    },
}
WATCHING: ContextVar[bool] = ContextVar("WATCHING", default=False)
"""Whether what runs only watches the service."""

Lives = dict[str, list[str]]
"""The modules that were visited, in the order of their first visits, by the list that is to name them."""


class Visits:
    """The modules of ours whose functions were called, in the order of the calls, in every thread."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and code.co_name != "<module>":
            path = code.co_filename[len(str(ROOT)) + 1 :]
            if path.startswith(PACKAGES) and not WATCHING.get():
                self.log.append(path)

    @classmethod
    def begin(cls) -> "Visits":
        """Record what this thread calls, and those that start from now on."""
        made = cls()
        threading.setprofile(made)
        sys.setprofile(made)
        return made

    @staticmethod
    def end() -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)
    visits = Visits.begin()
    try:
        with pytest.MonkeyPatch.context() as patch:
            yield asyncio.run(_live(folder, patch, visits))
    finally:
        visits.end()


async def _live(folder: Path, patch: pytest.MonkeyPatch, visits: Visits) -> Lives:
    drafter, replay = {"kind": "ngram", "ngram_min": 1}, {"sample_rate": 1.0, "independent_rate": 1.0}
    async with started(folder, patch, drafter=drafter, engine=ENGINE, replay=replay) as service:
        log, controller_answers = visits.log, service.controller_answers
        controller_answers.clear()
        log.clear()
        sound = await _ask(service)
        request = list(log)
        controller_answers.set()
        assert await _verdict(service, sound) == "verified"
        await _counted(service, r'truespec_independent_replays_total\{.*result="agrees"')
        controller_answers.clear()
        so_far = len(log)
        _report_wrong_logprobs(service, patch)
        wrong = await _ask(service)
        del log[so_far:]  # another request's life
        controller_answers.set()
        assert await _verdict(service, wrong) == "suspect"
        assert service.decode.host.breaker_controller.status.state is BreakerState.CLOSED
        await service.decode.host.reporter.report()
        assert service.decode.host.breaker_controller.status.state is BreakerState.OPEN
        reply = await service.client.get(f"/v1/verdicts/{sound}")
        assert reply.json()["choices"][0]["reason"] == "the replica tripped: drift"
    first = named(VERDICT)[0]
    finished = max(place for place, path in enumerate(request) if path == first)
    return {REQUEST: list(dict.fromkeys(request)), VERDICT: list(dict.fromkeys(log[finished:]))}


async def _ask(service: Service) -> str:
    """Stream an answer; its id."""
    messages = [{"role": "user", "content": "one two one two one two one two"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 40, "seed": 3, "stream": True, "logprobs": True}
    reply = await service.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    return str(json.loads(reply.text.partition("\n")[0].removeprefix("data: "))["id"])


async def _verdict(service: Service, reply: str) -> str:
    """The verdict on an answer, once there is one."""
    WATCHING.set(True)
    async with asyncio.timeout(60):
        while (found := await service.decode.host.runtime.controller.verdict(reply)) is None:
            await asyncio.sleep(0.01)
    WATCHING.set(False)
    return str(found["verdict"])


async def _counted(service: Service, sample: str) -> None:
    """Wait until the controller has counted something, given by a pattern of its line in `/metrics`."""
    WATCHING.set(True)
    async with asyncio.timeout(60):
        while True:
            text, _ = await service.decode.host.runtime.controller.exposition()
            if re.search(rf"^{sample}.* [1-9]", text.decode(), re.M):
                break
            await asyncio.sleep(0.1)
    WATCHING.set(False)


def _report_wrong_logprobs(service: Service, patch: pytest.MonkeyPatch) -> None:
    """Have the decode replica report logprobs that are 3 nats too low."""
    backend = service.decode.host.backend
    resume = backend.resume

    async def wrong(request: Request, handoff: Any) -> AsyncGenerator[TokenDelta, None]:
        async for delta in resume(request, handoff):
            entries = [dataclasses.replace(entry, logprob=entry.logprob - 3) for entry in delta.logprobs or ()]
            yield delta.replace(logprobs=entries)

    patch.setattr(backend, "resume", wrong)


def named(title: str) -> list[str]:
    """The modules and rooms that a list of the page names, in the order in which it names them first."""
    section = re.search(rf"^## {title}\n(.*?)^## ", PAGE, re.M | re.S)
    assert section is not None
    steps = section[1][section[1].index("\n1. ") :]
    found = []
    for path in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", steps):
        (place,) = [ROOT / path] if "/" in path else [own for top in PACKAGES for own in (ROOT / top).rglob(path)]
        assert place.exists(), path
        found.append(str(place.relative_to(ROOT)) + "/" * place.is_dir())
    return list(dict.fromkeys(found))


def faults(names: Sequence[str], visited: Sequence[str]) -> list[str]:
    """What is wrong with the names of a list; modules are named in the order of the first visits to them."""
    found = [f"{name} was not visited" for name in names if not any(path.startswith(name) for path in visited)]
    modules = [name for name in names if name in visited]
    in_order = sorted(modules, key=visited.index)
    return found + [f"{name} comes after {then}" for name, then in zip(modules, in_order, strict=True) if name != then]


@for_each([REQUEST, VERDICT])
def test_the_modules_of_a_life_are_visited_in_its_order(title: str, lives: Lives) -> None:
    assert not faults(named(title), lives[title])


@for_each([REQUEST, VERDICT])
def test_the_rooms_of_a_life_are_on_the_page(title: str, lives: Lives) -> None:
    """Or belong to those on which all steps rest."""
    on_the_page = {room(path) for path in named(title)}
    visited = {room(path) for path in lives[title]}
    absent = set() if cpu_kernels() is not None else {"speculative/kernels"}
    assert visited - on_the_page == BENEATH[title].keys() - absent


def test_a_name_that_was_not_visited_and_another_order_are_found(lives: Lives) -> None:
    names = named(VERDICT)
    assert faults([*names, "serve_app/access/keys.py"], lives[VERDICT]) == ["serve_app/access/keys.py was not visited"]
    assert faults([*names, "speculative/lookup/"], lives[VERDICT]) == ["speculative/lookup/ was not visited"]
    assert len(faults([names[1], names[0], *names[2:]], lives[VERDICT])) == 2


def room(path: str) -> str:
    """The folder or single module of a package that a module belongs to."""
    return "/".join(path.removesuffix(".py").split("/")[:2])
