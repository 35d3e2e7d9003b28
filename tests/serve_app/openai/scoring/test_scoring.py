"""/v1/score over a real engine: what transformers gives, added up, normalised, refused, and let go."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from serve_app.backends.torch_backend import TorchBackend
from serve_app.errors import NoRoom
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.scoring.score_request import ScoreRequest
from serve_app.openai.scoring.scorer import ScoreLimits, Scorer
from serve_app.referee.records import Records
from serve_app.referee.replay_selection import Selection
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, Request, TokenDelta
from tests.support.engines import settings
from tests.support.tiny_models import write_tiny_model

MAX_RUNNING = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("scored"), vocab_size=512, tokenizer=True)


@pytest.fixture(scope="module")
def own_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


class Source(ObservedSource):
    """The real source, which remembers what it was asked for."""

    asked: list[Request]

    def stream(self, requests: Sequence[Request]) -> Any:
        self.asked.extend(requests)
        return super().stream(requests)


class Replica:
    """One replica as it is deployed, without Ray around it."""

    def __init__(self, backend: TorchBackend, source: Source, scorer: Scorer, front_end: FrontEnd) -> None:
        self.backend, self.source, self.scorer, self.front_end = backend, source, scorer, front_end
        self.app = build_ingress(front_end, scorer=scorer)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://tiny")

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/score", json={"model": "tiny", **body})

    async def score(self, **body: Any) -> dict[str, Any]:
        response = await self.post(**body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    async def wait_until_idle(self) -> None:
        async with asyncio.timeout(10):
            while (usage := self.backend.usage()).num_free_blocks < usage.num_blocks or usage.num_waiting:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(folder: Path, limits: ScoreLimits, **engine: Any) -> AsyncIterator[Replica]:
    config = settings(kv_cache_tokens=2048, **engine)
    backend = TorchBackend(str(folder), "tiny", config)
    info = await backend.start()
    metrics = Metrics([BufferSink("test")], model_name="tiny", pool="monolith")
    source = Source(
        PooledTokenSource(backend, metrics),
        metrics,
        Records("r1", info.max_model_len),
        select=lambda _: Selection.NOT_CHECKED,
        ended=lambda record, job: None,
        limits=SourceLimits(MAX_RUNNING, timeout_s=300),
    )
    source.asked = []
    tokenizer = Tokenizer.from_folder(folder)
    scorer = Scorer(source, tokenizer, info, logprobs_mode=config.logprobs_mode, limits=limits)
    replica = Replica(backend, source, scorer, FrontEnd(source, tokenizer, info))
    try:
        yield replica
        await replica.wait_until_idle()
    finally:
        await replica.client.aclose()
        await backend.stop()


Run = Callable[..., AbstractAsyncContextManager[Replica]]


@pytest.fixture
def replica(folder: Path) -> Run:
    """Starts a replica; engine settings as given."""
    return lambda limits=None, **engine: running(folder, limits or ScoreLimits(max_concurrent=MAX_RUNNING), **engine)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[Sequence[int], Sequence[int]], float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprob(context: Sequence[int], label: Sequence[int]) -> float:
        with torch.inference_mode():
            distribution = model(torch.tensor([[*context, *label]])).logits[0].log_softmax(-1)
        return sum(float(distribution[len(context) + index - 1, token]) for index, token in enumerate(label))

    return logprob


CONTEXTS = ["Is water wet? Answer:", [5, 6, 7, 8] * 6, "x"]
LABELS = ["a", [40], 77, " the answer", [9, 10, 11]]


@pytest.mark.parametrize("normalize", [True, False])
async def test_scores_are_what_transformers_gives(
    replica: Run,
    own_tokenizer: Tokenizer,
    reference: Callable[[Sequence[int], Sequence[int]], float],
    normalize: bool,
) -> None:
    async with replica() as server:
        reply = await server.score(contexts=CONTEXTS, labels=LABELS, normalize=normalize)
    contexts = [own_tokenizer.encode(text) if isinstance(text, str) else text for text in CONTEXTS]
    labels = [own_tokenizer.encode("a"), [40], [77], own_tokenizer.encode(" the answer"), [9, 10, 11]]
    assert len(labels[3]) > 1
    assert [row["index"] for row in reply["data"]] == [0, 1, 2]
    for context, row in zip(contexts, reply["data"], strict=True):
        assert [entry["token_ids"] for entry in row["labels"]] == labels
        expected = [reference(context, label) for label in labels]
        assert [entry["logprob"] for entry in row["labels"]] == pytest.approx(expected, abs=2e-4)
        probabilities = [math.exp(value) for value in expected]
        total = sum(probabilities) if normalize else 1
        scores = [entry["score"] for entry in row["labels"]]
        assert scores == pytest.approx([value / total for value in probabilities], rel=1e-3)
        assert not normalize or math.isclose(sum(scores), 1, abs_tol=1e-9)
    num_context, num_label = sum(map(len, contexts)), sum(map(len, labels))
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_context + 3 * num_label
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["model"] == "tiny"


async def test_single_tokens_share_a_request_and_long_labels_have_their_own(replica: Run) -> None:
    async with replica() as server:
        await server.score(contexts=CONTEXTS, labels=LABELS)
        shared = [request for request in server.source.asked if request.score_from is None]
        forced = [request for request in server.source.asked if request.score_from is not None]
        assert (len(shared), len(forced)) == (3, 6)
        assert all(len(request.params.logprob_token_ids) == 3 for request in shared)


async def test_a_label_of_two_tokens_is_the_chain_of_both(replica: Run) -> None:
    async with replica() as server:
        pair = await server.score(contexts=[[5, 6, 7]], labels=[[8, 9]])
        first = await server.score(contexts=[[5, 6, 7]], labels=[8])
        second = await server.score(contexts=[[5, 6, 7, 8]], labels=[9])
    parts = [reply["data"][0]["labels"][0]["logprob"] for reply in (first, second)]
    assert pair["data"][0]["labels"][0]["logprob"] == pytest.approx(sum(parts), abs=1e-4)
    assert pair["data"][0]["labels"][0]["score"] == 1


async def test_more_pairs_than_may_run_at_once_wait_their_turn(replica: Run) -> None:
    async with replica() as server:
        contexts = [[index, 3, 4] for index in range(40)]
        alone = await server.score(contexts=contexts[-1:], labels=[1, 2])
        reply = await server.score(contexts=contexts, labels=[1, 2])
    assert [row["index"] for row in reply["data"]] == list(range(40))
    for entry, lone in zip(reply["data"][-1]["labels"], alone["data"][0]["labels"], strict=True):
        assert entry["logprob"] == pytest.approx(lone["logprob"], abs=1e-4)


async def test_a_prefix_that_is_cached_is_counted(replica: Run) -> None:
    async with replica() as server:
        for expected in (0, 20):
            reply = await server.score(contexts=[list(range(3, 24))], labels=[1])
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def asked(**body: Any) -> ScoreRequest:
    return parse(json.dumps({"model": "tiny", **body}).encode(), ScoreRequest)


async def test_what_is_paid_for_is_what_the_usage_reports(replica: Run) -> None:
    spent: list[int] = []
    async with replica() as server:
        for labels in (LABELS, [1, 2], [[2, 3], [4, 5]]):
            reply = await server.scorer.score(asked(contexts=CONTEXTS, labels=labels), charge=spent.append)
            assert sum(spent) == reply["usage"]["prompt_tokens"]
            spent.clear()


async def test_what_is_refused_costs_nothing(replica: Run) -> None:
    spent: list[int] = []
    async with replica() as server:

        async def full(requests: Sequence[Request]) -> AsyncIterator[TokenDelta]:
            raise NoRoom("capacity", "full", 1.0)
            yield

        server.source.stream = full  # type: ignore[method-assign, assignment]
        with pytest.raises(NoRoom):
            await server.scorer.score(asked(contexts=CONTEXTS, labels=LABELS), charge=spent.append)
    assert spent == []


WRONG: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no contexts": ({"contexts": []}, "contexts", ""),
    "contexts missing": ({"contexts": None}, "contexts", ""),
    "one text": ({"contexts": "x"}, "contexts", ""),
    "an empty context": ({"contexts": ["x", ""]}, "contexts.1", ""),
    "no ids": ({"contexts": ["x", []]}, "contexts.1", ""),
    "a number": ({"contexts": [5]}, "contexts.0", "string"),
    "an id of no token": ({"contexts": [[1], [2, 512]]}, "contexts.1", "512"),
    "a negative id": ({"contexts": [[-1]]}, "contexts.0", "-1"),
    "a text among ids": ({"contexts": [[1, "2"]]}, "contexts.0.1", ""),
    "too long a context": ({"contexts": ["x", [3] * 512]}, "contexts.1", "512"),
    "no labels": ({"labels": []}, "labels", ""),
    "an empty label": ({"labels": ["yes", ""]}, "labels.1", ""),
    "a label that is no token": ({"labels": [1, 512]}, "labels.1", "512"),
    "true as a label": ({"labels": [True]}, "labels.0", ""),
    "one label twice": ({"labels": [9, 8, [9]]}, "labels.2", "labels.0"),
    "normalize is no boolean": ({"normalize": 1}, "normalize", ""),
    "the mode is not the client's": ({"logprobs_mode": "raw_logits"}, "logprobs_mode", "Unknown"),
    "too many pairs": ({"contexts": [[1]] * 103, "labels": list(range(10))}, "contexts", "1030"),
}


@pytest.fixture(scope="module")
def reported(folder: Path) -> dict[str, httpx.Response]:
    """What every wrong body gets."""

    async def ask_all() -> dict[str, httpx.Response]:
        async with running(folder, ScoreLimits(max_concurrent=MAX_RUNNING)) as server:
            good: dict[str, Any] = {"contexts": ["x"], "labels": [1]}
            replies = {name: await server.post(**{**good, **body}) for name, (body, _, _) in WRONG.items()}
            replies["other model"] = await server.client.post("/v1/score", json={**good, "model": "other"})
            replies["GET"] = await server.client.get("/v1/score")
            replies["no JSON"] = await server.client.post("/v1/score", content=b"{")
            assert server.source.asked == [], "what is wrong reaches no engine"
            return replies

    return asyncio.run(ask_all())


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(reported: dict[str, httpx.Response], name: str) -> None:
    _, field, words = WRONG[name]
    assert reported[name].status_code == 400
    error = reported[name].json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_other_errors_have_their_status(reported: dict[str, httpx.Response]) -> None:
    assert reported["other model"].status_code == 404
    assert reported["other model"].json()["error"]["code"] == "model_not_found"
    assert reported["GET"].status_code == 405
    assert reported["GET"].headers["allow"] == "POST"
    assert reported["no JSON"].json()["error"]["code"] == "malformed_body"


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
async def test_another_mode_than_raw_logprobs_is_refused_by_name(replica: Run, mode: str) -> None:
    async with replica(logprobs_mode=mode) as server:
        response = await server.post(contexts=["x"], labels=[1])
        assert response.status_code == 400
        assert mode in response.json()["error"]["message"]
        assert server.source.asked == []


async def test_without_a_scorer_there_is_no_such_route(replica: Run) -> None:
    async with replica() as server:
        transport = httpx.ASGITransport(build_ingress(server.front_end))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            response = await client.post("/v1/score", json={})
        assert response.status_code == 404


async def test_a_failure_of_one_is_reported_and_frees_the_others(replica: Run) -> None:
    async with replica() as server:
        healthy = server.source.stream

        async def failing(requests: Sequence[Request]) -> AsyncIterator[TokenDelta]:
            async with aclosing(healthy(requests)) as deltas:
                async for delta in deltas:
                    faulty = requests[0].prompt_token_ids[0] == 7
                    failure = {"finish_reason": FinishReason.ERROR, "error": "block 3 of secret-host"}
                    yield delta.replace(**failure) if faulty else delta

        server.source.stream = failing  # type: ignore[method-assign, assignment]
        response = await server.post(contexts=[[index, 3] for index in range(20)], labels=[1, [2, 3]])
        assert response.status_code == 500
        assert "secret" not in response.text
        await server.wait_until_idle()
        assert not server.source._watched


async def test_a_client_that_leaves_frees_everything(replica: Run) -> None:
    body = json.dumps({"model": "tiny", "contexts": [[index, 3] * 60 for index in range(100)], "labels": [1, [2, 3]]})
    async with replica() as server:
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "query_string": b""}
        answering = asyncio.create_task(server.app({**scope, "http_version": "1.1"}, receive, send))
        while not server.source._watched:
            await asyncio.sleep(0.005)
        left.set()
        async with asyncio.timeout(5):
            await answering
        assert sent[0]["status"] == 499
        await server.wait_until_idle()
        assert not server.source._watched
        assert len(server.source.asked) < 200


async def test_a_body_that_takes_too_long_is_ended(replica: Run) -> None:
    async with replica(ScoreLimits(max_concurrent=1, timeout_s=0.05)) as server:
        response = await server.post(contexts=[[index, 3] * 60 for index in range(100)], labels=[1, [2, 3]])
        assert response.status_code == 504
        await server.wait_until_idle()
