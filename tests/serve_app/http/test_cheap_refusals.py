"""Twenty bodies of megabytes at once: they are refused, and whatever else the event loop serves goes on meanwhile."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx

from serve_app.http.routes import build_ingress
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.off_loop import CALLER, off_loop
from serve_app.text.tokenizer import Tokenizer
from tests.support.front_ends import DeltaSource, front_end, info

SIZE = 2**21
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [10**6] * 2**18}, "prompt holds the token id"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * SIZE}]}, "context is 100 tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * (SIZE // 30)}, "objects and lists"),
    ("/v1/responses", {"input": [{"role": "user", "content": "a" * 200}] * 10_000}, "context is 100 tokens"),
    ("/tokenize", {"prompt": '\\"' * (SIZE // 4)}, "context is 100 tokens"),
    ("/detokenize", {"tokens": [5] * (2**18 - 1) + [10**6]}, "tokens holds the token id"),
    ("/inference/v1/generate", {"token_ids": [5] * SIZE, "sampling_params": {}}, "more than 262144 values"),
]


async def test_twenty_refusals_at_once_cost_the_loop_20_ms_each_at_most(tokenizer: Tokenizer) -> None:
    app = build_ingress(front_end(DeltaSource(), tokenizer, Limits(max_sequences=64)))
    sent = [(path, json.dumps({"model": "m", **body}).encode(), words) for path, body, words in BODIES] * 4
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t", timeout=600) as client:
        begun_s = time.thread_time()  # of the loop's thread alone, however busy the machine is
        replies = await asyncio.gather(*(client.post(path, content=body) for path, body, _ in sent))
        assert time.thread_time() - begun_s < 0.02 * len(sent)
    for reply, (path, _, words) in zip(replies, sent, strict=True):
        assert reply.status_code in (400, 413) and words in reply.json()["error"]["message"], (path, reply.text)


async def test_a_long_text_is_tokenized_without_the_lock_that_the_event_loop_needs(tokenizer: Tokenizer) -> None:
    body, pauses_s = {"prompt": "hello world " * (SIZE // 12), "return_token_strs": True}, [0.0]
    app = build_ingress(FrontEnd(DeltaSource(), tokenizer, info(tokenizer, max_model_len=SIZE)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t", timeout=600) as client:
        asking = asyncio.create_task(client.post("/tokenize", json=body))
        while not asking.done():
            begun_s = time.monotonic()
            await asyncio.sleep(0.001)
            pauses_s.append(time.monotonic() - begun_s)
    assert "".join(asking.result().json()["token_strs"]) == body["prompt"]
    assert max(pauses_s) < sum(pauses_s) / 3


async def test_huge_requests_of_a_key_take_turns_though_their_clients_leave() -> None:
    begun, may_end = list[int](), threading.Event()

    async def ask(key: str, number: int) -> None:
        CALLER.set(key)
        await off_loop("a" * 2**17, lambda: [begun.append(number), may_end.wait(30)])  # type: ignore[func-returns-value]

    asking = [asyncio.create_task(ask(*one)) for one in (("a", 1), ("a", 2), ("a", 3), ("b", 4))]
    await asyncio.sleep(0.1)
    assert asking[0].cancel() and asking[1].cancel()
    await asyncio.sleep(0.1)
    assert sorted(begun) == [1, 4]
    may_end.set()
    await asyncio.wait(asking)
    assert sorted(begun) == [1, 3, 4]  # nobody waited for the second
