"""Front ends over a fake engine, and what a client gets from them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from serve_app.backends.base import ModelInfo
from serve_app.openai.asked import Limits
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.referee.records.records import Records
from serve_app.referee.records.replay_selection import Selection
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.telemetry.metrics import MetricBatch, Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.request import Request, TokenDelta
from tests.support.fake_serving import BackendSource, Script, make_backend


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"model": "m", "prompt": "hello", "max_tokens": 50, **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "hello"}]
    return parse(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ChatCompletionRequest)


class DeltaSource:
    """Gives out prepared deltas, each of the request with the number that is its id (none: the first), or an error."""

    def __init__(self, *deltas: TokenDelta | Exception) -> None:
        self._deltas = deltas
        self.aborted: list[str] = []
        self.num_open = 0
        self.num_given = 0
        self.requests: tuple[Request, ...] = ()

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        self.num_open += 1
        self.requests += tuple(requests)
        try:
            for delta in self._deltas:
                await asyncio.sleep(0)
                if isinstance(delta, Exception):
                    raise delta
                self.num_given += 1
                yield delta._replace(request_id=requests[int(delta.request_id or 0)].request_id)
        finally:
            self.num_open -= 1

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def observed(
    source: Any, metrics: Metrics, limits: SourceLimits | None = None, records: Records | None = None, **more: Any
) -> ObservedSource:
    """The source as it is deployed; without `select` none of its answers is checked."""
    more = {"select": lambda _: Selection.NOT_CHECKED, "ended": lambda record, answer: None} | more
    limits = limits or SourceLimits(64, timeout_s=300)
    return ObservedSource(source, metrics, records or Records("r1", 1000), limits=limits, **more)


def counts_by(sink: PrometheusSink, metric: str, label: str) -> dict[str, float]:
    """A counter's values by those of a label."""
    return {labels[label]: value for name, labels, value in sink.samples() if name == f"truespec_{metric}_total"}


def in_flight(batch: MetricBatch) -> dict[str, float]:
    """Requests in flight, by stage."""
    gauges = batch.gauges.items()
    return {own[-1]: value for (name, own), value in gauges if name == "truespec_requests_in_flight" and value}


def info(tokenizer: Tokenizer, max_model_len: int = 100) -> ModelInfo:
    return ModelInfo("m", max_model_len, tokenizer.vocab_size, "abcdef0123456789", "", tokenizer.eos_token_ids)


def front_end(source: Any, tokenizer: Tokenizer, limits: Limits | None = None) -> FrontEnd:
    return FrontEnd(source, tokenizer, info(tokenizer), limits)


def fake_front_end(tokenizer: Tokenizer, **settings: Any) -> tuple[FrontEnd, BackendSource, Script]:
    backend, script = make_backend(tokenizer, max_model_len=100, **settings)
    source = BackendSource(backend)
    return front_end(source, tokenizer), source, script


async def reply_to(front: FrontEnd, wire: Any) -> dict[str, Any]:
    return await front.collect(await front.prepare(wire))


async def chunks_of(front: FrontEnd, wire: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, and the error that ends it."""
    raw = b"".join([event async for event in front.events(await front.prepare(wire))]).decode("ascii")
    assert raw.endswith("\n\n")
    data = [block.removeprefix("data: ") for block in raw[:-2].split("\n\n")]
    return [json.loads(text) for text in data if text != "[DONE]"]
