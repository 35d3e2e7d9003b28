"""Front ends over a fake engine, and what a client gets from them."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from serve_app.backends.base import ModelInfo
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.prepared_request import Limits
from serve_app.text.tokenizer import Tokenizer
from speculative.request import Request, TokenDelta
from tests.support.fake_serving import BackendSource, Script, make_backend


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"model": "m", "prompt": "hello", "max_tokens": 50, **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "hello"}]
    return parse(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ChatCompletionRequest)


class DeltaSource:
    """Gives out prepared deltas in the name of the first request."""

    def __init__(self, *deltas: TokenDelta) -> None:
        self._deltas = deltas

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        for delta in self._deltas:
            yield delta.replace(request_id=requests[0].request_id)

    async def abort(self, request_id: str) -> None:
        """Nothing runs here."""


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
    events = [event.decode() async for event in front.events(await front.prepare(wire))]
    blocks = "".join(events).removesuffix("\n\n").split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
