"""SkyRL's `RemoteInferenceClient`."""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# The package `skyrl.backends` imports its backends, which need Python 3.12; the client's module needs aiohttp only.
_PACKAGE = ModuleType("skyrl.backends")
_PACKAGE.__path__ = [str(Path(importlib.util.find_spec("skyrl").origin).parent / "backends")]
sys.modules["skyrl.backends"] = _PACKAGE

_MODULE = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
PauseMode, RemoteInferenceClient = _MODULE.PauseMode, _MODULE.RemoteInferenceClient


@pytest.fixture
def with_client(base_url: str, model: str) -> Callable[[Callable[[RemoteInferenceClient], Awaitable[Any]]], Any]:
    """Runs what is to be done with a client."""

    def run(work: Callable[[RemoteInferenceClient], Awaitable[Any]]) -> Any:
        async def running() -> Any:
            client = RemoteInferenceClient(
                proxy_url=base_url, server_urls=[base_url], model_name=model, data_parallel_size=1
            )
            async with client:
                return await work(client)

        return asyncio.run(running())

    return run


def test_completions(with_client: Any, model: str) -> None:
    """`chat_completion` and `completion`"""

    async def both(client: RemoteInferenceClient) -> tuple[dict[str, Any], dict[str, Any]]:
        talk = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        chat = await client.chat_completion({"json": {**talk, "temperature": 0, "session_id": "one"}})
        text = {"model": model, "prompt": "Water is", "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
        return chat, await client.completion({"json": text})

    chat, completion = with_client(both)
    assert "Paris" in chat["choices"][0]["message"]["content"]
    (choice,) = completion["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4


def test_generate(with_client: Any) -> None:
    """`generate` from token ids (`/inference/v1/generate`), and `sample` with logprobs of the prompt"""
    prompts = [[504, 3575, 282, 4649], [12615, 314]]

    async def both(client: RemoteInferenceClient) -> tuple[dict[str, Any], dict[str, Any]]:
        params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 1, "seed": 3}
        batch = {"prompt_token_ids": prompts, "sampling_params": params, "session_ids": ["one", "two"]}
        chunks = [{"type": "encoded_text", "tokens": prompts[0]}]
        asked = {
            "prompt": {"chunks": chunks},
            "num_samples": 3,
            "sampling_params": {"temperature": 1.0, "max_tokens": 8},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }
        return await client.generate(batch), await client.sample({"json": asked})

    generated, sampled = with_client(both)
    assert [len(one) for one in generated["response_ids"]] == [8, 8]
    assert [len(one) for one in generated["response_logprobs"]] == [8, 8]
    assert generated["stop_reasons"] == ["length", "length"]
    assert all(generated["responses"])
    assert len(sampled["sequences"]) == 3
    assert all(len(one["logprobs"]) == len(one["tokens"]) > 0 for one in sampled["sequences"])
    assert sampled["prompt_logprobs"][0] is None
    assert all(value < 0 for value in sampled["prompt_logprobs"][1:])
    assert [len(one) for one in sampled["topk_prompt_logprobs"][1:]] == [2, 2, 2]


def test_tokenization(with_client: Any) -> None:
    """`tokenize` and `detokenize`"""
    texts = ["Hello, world.", "Café 🦊"]

    async def there_and_back(client: RemoteInferenceClient) -> list[str]:
        return await client.detokenize(await client.tokenize(texts))

    assert with_client(there_and_back) == texts


def test_pause_keeps_what_runs(with_client: Any, model: str) -> None:
    """`pause`, `resume`, `reset_prefix_cache` and `get_world_size`"""

    async def paused(client: RemoteInferenceClient) -> tuple[bool, dict[str, Any]]:
        body = {"model": model, "prompt": "Water is", "max_tokens": 64, "ignore_eos": True}
        answer = asyncio.create_task(client.completion({"json": body}))
        await asyncio.sleep(0.2)
        await client.pause(PauseMode.KEEP)
        await asyncio.sleep(3)
        waits = not answer.done()
        await client.resume()
        return waits, await answer

    waited, answer = with_client(paused)
    assert waited
    assert answer["usage"]["completion_tokens"] == 64

    async def ask(client: RemoteInferenceClient) -> Any:
        await client.reset_prefix_cache()
        return await client.get_world_size()

    assert with_client(ask) == (2, 2)
