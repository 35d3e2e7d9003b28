"""A stand-in for a server under audit that talks like vLLM, so that refusals, deaths and dialects need no model."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fake_http import QuietHandler, serving

Reply = tuple[int, dict[str, Any]]

DIES = (0, {})
"""In place of a reply: close the connection, and answer nobody any more."""


def uniform_reply(body: dict[str, Any]) -> Reply:
    """Says the token after the last one, with even odds over four candidates."""
    prompt, count = body["prompt"], body.get("max_tokens", 1)
    last = prompt[-1] if isinstance(prompt, list) else 4
    ids = [3 + (last + step) % 50 for step in range(1, count + 1)]
    logprobs = None
    if body.get("logprobs") is not None:
        others = {f"token_id:{token}": -1.39 for token in range(900, 903)}
        logprobs = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [-1.39] * count,
            "top_logprobs": [{f"token_id:{token}": -1.39} | others for token in ids],
            "text_offset": list(range(count)),
        }
    choice = {"index": 0, "text": "a" * count, "finish_reason": "length", "logprobs": logprobs, "token_ids": ids}
    return 200, {"choices": [choice], "usage": {"completion_tokens": count}}


class FakeAudited:
    """`answer` gets the body of a completion."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply] = uniform_reply) -> None:
        self.answer = answer
        self.url = ""
        self.dead = False

    @contextmanager
    def running(self) -> Iterator["FakeAudited"]:
        """Serve until the block ends."""
        with serving(_handler(self)) as self.url:
            yield self


def _handler(fake: FakeAudited) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._say(200, {"data": [{"id": "fake", "max_model_len": 512}]})
            else:
                self._say(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = fake.answer(body)
            fake.dead = fake.dead or reply is DIES
            self._say(*reply, streamed=bool(body.get("stream")))

        def _say(self, status: int, answer: dict[str, Any], streamed: bool = False) -> None:
            if fake.dead:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            if streamed:
                data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
            self.say(status, data)

    return Handler
