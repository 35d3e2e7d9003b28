"""A stand-in for a server of OpenAI's API, so that batches are tested without a model: it answers as a test says."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fake_http import QuietHandler, serving

Reply = tuple[int, dict[str, str], dict[str, Any] | str]
"""Status, headers, and a body: an object, or text that is none."""

BREAK = (0, {}, "")
"""In place of a reply: close the connection without one."""


def completion(text: str, **more: Any) -> Reply:
    """An answer of /v1/completions."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    return 200, {}, {"object": "text_completion", "choices": [choice], "usage": usage, **more}


def failure(status: int, code: str, **headers: str) -> Reply:
    """An error in OpenAI's form."""
    return status, headers, {"error": {"message": code, "type": "test", "param": None, "code": code}}


class FakeOpenAI:
    """What was asked of the server, and how it answers: `answer` gets a prompt and how often it came, 1 at first."""

    def __init__(self, answer: Callable[[str, int], Reply]) -> None:
        self.answer = answer
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        prompt = body["prompt"]
        with self._lock:
            self.asked[prompt] += 1
            times = self.asked[prompt]
            self.bodies.append(body)
            self.headers.append({**headers, "path": path})
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return self.answer(prompt, times)
        finally:
            with self._lock:
                self._running -= 1

    @contextmanager
    def running(self) -> Iterator["FakeOpenAI"]:
        """Serve until the block ends."""
        with serving(_handler(self)) as self.url:
            yield self


def _handler(fake: FakeOpenAI) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.sent())
            sent = {name.lower(): value for name, value in self.headers.items()}
            status, headers, answer = fake.reply(self.path, sent, body)
            if status == 0:
                self.close_connection = True
                return
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            try:
                self.say(status, data, {name.replace("_", "-"): value for name, value in headers.items()})
            except OSError:
                self.close_connection = True  # the client was killed

    return Handler
