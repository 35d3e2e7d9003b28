"""Adapters from the wire to the engine and back: who asks for one gets it, wherever the request goes from there.

The engine is the fake; its rule of the next token depends on the adapter.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from serve_app.backends.base import Adapter, ModelInfo
from serve_app.backends.torch_backend import load_engine
from serve_app.errors import ModelNotFound
from serve_app.guard.canary import Canary
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Records
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics, Sink
from serve_app.text.tokenizer import Tokenizer
from speculative.config import EngineConfig
from speculative.errors import InvalidRequest
from speculative.request import Request
from tests.support.fake_backend import FakeBackend, FakeConfig
from tests.support.fake_serving import BackendSource
from tests.support.front_ends import completion
from tests.support.referees import TOLERANCE, Replayer, served
from tests.support.tiny_models import write_tiny_model

ADAPTERS = (Adapter("sql", "/adapters/sql"), Adapter("legal", "/adapters/legal"))
RULE = {"": 40, "sql": 50, "legal": 60}


def next_token(request: Request, tokens: Sequence[int]) -> int:
    return RULE[request.adapter] + len(tokens) % 7


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    config = FakeConfig(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_ids[0])
    return FakeBackend(config, next_token)


@pytest.fixture
def info(backend: FakeBackend) -> ModelInfo:
    return dataclasses.replace(backend.info, adapters=ADAPTERS)


async def test_the_model_of_a_request_chooses_its_adapter_and_the_reply_names_it(
    backend: FakeBackend, info: ModelInfo, tokenizer: Tokenizer
) -> None:
    front = FrontEnd(BackendSource(backend), tokenizer, info)
    for model, adapter in (("fake", ""), ("sql", "sql"), ("legal", "legal")):
        job = await front.prepare(completion(model=model, prompt=[5, 6, 7], max_tokens=6, return_token_ids=True, n=2))
        assert {request.adapter for request in job.requests} == {adapter}
        reply = await front.collect(job)
        assert reply["model"] == model
        for choice in reply["choices"]:
            assert choice["token_ids"] == [RULE[adapter] + position % 7 for position in range(3, 9)]
    with pytest.raises(ModelNotFound, match="served: fake, sql, legal"):
        await front.prepare(completion(model="alien"))


def test_adapters_are_listed_with_their_parent_and_root(
    backend: FakeBackend, info: ModelInfo, tokenizer: Tokenizer
) -> None:
    front = FrontEnd(BackendSource(backend), tokenizer, info)
    listed = {card["id"]: card for card in front.models()["data"]}
    assert {name: (card["parent"], card["root"]) for name, card in listed.items()} == {
        "fake": (None, "fake"),
        "sql": ("fake", "/adapters/sql"),
        "legal": ("fake", "/adapters/legal"),
    }
    assert {card["max_model_len"] for card in listed.values()} == {256}
    assert front.model("sql") == listed["sql"]


async def test_an_answer_is_replayed_with_its_adapter_and_so_is_its_prompt() -> None:
    replayer = Replayer()
    checks = ReplayChecker(replayer, Judge(TOLERANCE).judge, ReplicaBook(TOLERANCE))
    one = served(prompt_logprobs=(-1.0, -1.0))
    answer = dataclasses.replace(one, request=dataclasses.replace(one.request, adapter="sql"))
    await checks._check(answer)
    assert [request.adapter for request in replayer.asked] == ["sql", "sql"]


async def test_a_canary_tries_the_adapters_that_clients_use(backend: FakeBackend) -> None:
    judged: list[Answer] = []

    async def judge(answer: Answer) -> Checked:
        judged.append(answer)
        return Checked(Verdict.VERIFIED, "set by the test")

    source = PooledTokenSource(backend, Metrics(Sink(), model_name="fake", pool="decode"))
    canary = Canary(source, Records("r1", 256), judge, num_requests=3)
    for name in RULE:
        canary.remember(Request(f"client-{name}-0", (5, 6, 7), adapter=name))
    assert await canary.try_out()
    assert {answer.request.adapter for answer in judged} == set(RULE)


def test_an_engine_without_adapters_refuses_them(tmp_path: Path) -> None:
    engine = load_engine(write_tiny_model(tmp_path / "m"), EngineConfig(dtype="float32", device="cpu"))
    with pytest.raises(InvalidRequest, match="has no adapters; 'sql' was asked for") as caught:
        engine.add(Request("r", (5, 6, 7), adapter="sql"))
    assert caught.value.field == "model"
    engine.add(Request("r", (5, 6, 7)))
