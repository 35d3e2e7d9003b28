"""A made-up server that answers as vLLM does, with token ids and logprobs for those who ask."""

import asyncio
import json
from typing import Any

from tests.support.raw_upstream import RawRequest, chunk, reply, stream_head

WORDS = (" a", ' "logprobs"', " ü", "\n", " ,")
JSON_TYPE = "content-type: application/json"


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def plain_reply(path: str, **asked: Any) -> bytes:
    """The whole reply to a request that asks for nothing."""
    ids: dict[str, Any] = {"token_ids": [1, 2, 3]} if asked.get("return_token_ids") else {}
    of_prompt: dict[str, Any] = {"prompt_token_ids": [1, 2, 3]} if ids else {}
    logprobs = {"content": [{"token": word, "logprob": -0.5} for word in WORDS]} if asked.get("logprobs") else None
    if path.endswith("/chat/completions"):
        message = {"role": "assistant", "content": "".join(WORDS), "tool_calls": []}
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop", **ids}
        return dumped({"id": "x", "choices": [choice], "usage": {"total_tokens": 3}, **of_prompt})
    choice = {"index": 0, "text": "".join(WORDS), "logprobs": logprobs, **ids, **of_prompt}
    return dumped({"id": "x", "choices": [choice], "usage": {"total_tokens": 3}})


def plain_events(**asked: Any) -> list[bytes]:
    """The events of a streamed chat; those who ask for ids get one more, whose delta is empty."""
    ids: dict[str, Any] = {"token_ids": [7]} if asked.get("return_token_ids") else {}
    logprobs = {"content": [{"token": "logprobs", "logprob": -0.5}]} if asked.get("logprobs") else None
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events: list[dict[str, Any]] = [{"id": "x", "choices": [first], **({"prompt_token_ids": [7]} if ids else {})}]
    for word in WORDS:
        choice = {"index": 0, "delta": {"content": word}, "logprobs": logprobs, "finish_reason": None, **ids}
        events.append({"id": "x", "choices": [choice]})
    if ids:
        empty = {"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": None, **ids}
        events.append({"id": "x", "choices": [empty]})
    last = {"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None, **ids}
    events += [{"id": "x", "choices": [last]}, {"id": "x", "choices": [], "usage": {"n": 1}}]
    return [b"data: " + dumped(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


async def answer(request: RawRequest, writer: asyncio.StreamWriter) -> None:
    """Answer like that."""
    if request.target == "/v1/models":
        writer.write(reply(dumped({"data": [{"id": "m", "owned_by": "vllm"}]}), JSON_TYPE))
        return
    asked = json.loads(request.body)
    if not asked.get("stream"):
        writer.write(reply(plain_reply(request.target, **asked), JSON_TYPE, "x-replica: r1"))
        return
    writer.write(stream_head("x-replica: r1"))
    for event in plain_events(**asked):
        writer.write(chunk(event))
        await asyncio.sleep(0)
    writer.write(chunk(b""))
