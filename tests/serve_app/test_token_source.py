"""Where tokens come from when a prefill pool is there: what is told once, what is never handed off, what falls back."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engines import settings
from tiny_models import write_tiny_model

from serve_app.backends.base import Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.metrics import BufferSink, Metrics
from serve_app.observed_source import ObservedSource, SourceLimits
from serve_app.referee import ReplayJob
from serve_app.token_source import PooledTokenSource
from speculative.request import Request, SamplingParams, TokenDelta

PROMPT = tuple(range(3, 20))
ASKING = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pooled"), vocab_size=64)


class Pools:
    """Two engines, as a prefill and a decode replica, and what the prefill was asked for."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = (TorchBackend(str(folder), "tiny", settings()) for _ in range(2))
        self.asked: list[tuple[Request, bool]] = []
        self.damaged = False
        self.metrics = Metrics([BufferSink("test")], model_name="tiny", pool="decode")
        self.source = PooledTokenSource(self.decode, self.metrics, self._ask)

    async def _ask(self, request: Request, first_token: bool) -> Prefilled:
        self.asked.append((request, first_token))
        prefilled = await self.prefill.prefill(request, first_token=first_token)
        if self.damaged and prefilled.handoff is not None:
            prefilled.handoff[-20] ^= 1
        return prefilled

    async def stream(self, *requests: Request) -> list[TokenDelta]:
        return [delta async for delta in self.source.stream(requests)]


@pytest_asyncio.fixture
async def pools(folder: Path) -> AsyncIterator[Pools]:
    both = Pools(folder)
    await both.prefill.start()
    await both.decode.start()
    yield both
    await both.prefill.stop()
    await both.decode.stop()


def text_of(deltas: Sequence[TokenDelta], name: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


@pytest.mark.parametrize("damaged", [False, True], ids=["handed off", "refused"])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_prompt", [1, 2, len(PROMPT)])
async def test_a_prompt_is_told_once_and_first(pools: Pools, damaged: bool, num_choices: int, num_prompt: int) -> None:
    pools.damaged = damaged
    prompt = PROMPT[:num_prompt]
    requests = [Request(f"c{index}", prompt, PLAIN if index else ASKING, index) for index in range(num_choices)]
    deltas = await pools.stream(*requests)
    own = [delta for delta in deltas if delta.request_id == "c0"]
    assert [delta.prompt_logprobs is not None for delta in own] == [True] + [False] * (len(own) - 1)
    assert [entry.token_id for entry in own[0].prompt_logprobs or ()] == list(prompt[1:])
    assert all(delta.prompt_logprobs is None for delta in deltas if delta.request_id != "c0")
    assert [first for _, first in pools.asked] == [num_choices == 1]
    for request in requests:
        alone = [delta async for delta in pools.decode.generate(request)]
        assert text_of(deltas, request.request_id) == text_of(alone, request.request_id)


async def test_what_is_teacher_forced_stays_here(pools: Pools) -> None:
    deltas = await pools.stream(Request("score", PROMPT, score_from=4))
    assert pools.asked == []
    assert [entry.token_id for entry in deltas[0].logprobs or ()] == list(PROMPT[4:])


# -- and what is watched --------------------------------------------------------------------------------------------


def observed(pools: Pools, jobs: list[ReplayJob]) -> ObservedSource:
    limits: Any = SourceLimits(max_running=4, timeout_s=30)
    return ObservedSource(pools.source, pools.metrics, choose=lambda _: True, submit=jobs.append, limits=limits)


async def test_logprobs_that_were_asked_for_in_any_way_are_passed_on(pools: Pools) -> None:
    jobs: list[ReplayJob] = []
    source = observed(pools, jobs)
    asked = {
        "plain": PLAIN,
        "scored": SamplingParams(max_tokens=6, ignore_eos=True, logprob_token_ids=(3, 9)),
        "counted": SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1),
    }
    for name, params in asked.items():
        deltas = [delta async for delta in source.stream([Request(name, PROMPT, params, 1)])]
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert len(entries) == (0 if name == "plain" else 6)
        assert all(len(entry.scored) == 2 * (name == "scored") for entry in entries)
    assert [job.request_id for job in jobs] == list(asked)
    assert all(len(job.logprobs) == 6 for job in jobs)


async def test_a_teacher_forced_request_is_not_replayed(pools: Pools) -> None:
    jobs: list[ReplayJob] = []
    requests = [Request("score", PROMPT, score_from=4)]
    deltas = [delta async for delta in observed(pools, jobs).stream(requests)]
    assert len(deltas[-1].logprobs or ()) == len(PROMPT) - 4
    assert jobs == []
