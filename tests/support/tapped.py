"""A service behind its tap, over a fake engine and without a socket."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from serve_app.http.routes import Operations, build_ingress
from serve_app.http.tap import Tap
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Record
from serve_app.referee.records.replay_selection import Checks, Read
from serve_app.referee.wire.exchange import Exchange
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from tests.support.fake_serving import BackendSource, make_backend
from tests.support.front_ends import info, observed
from tests.support.referees import traces_of

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GENERATE = "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "hello", "max_tokens": 9},
    CHAT: {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    RESPONSES: {"model": "m", "input": "hello", "max_output_tokens": 9},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9}},
}
"""A request to each path that is tapped."""


def right(_: Answer) -> Verdict:
    return Verdict.VERIFIED


class TappedService:
    """A front end with the tap before it. Its answers are judged as a test says; what the tap gives is kept.

    Args:
        chosen: whether every reply is checked.
        read: reads exchanges.
        delay_s: that a judge takes.
        settings: of the fake engine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chosen: bool = True,
        judge: Callable[[Answer], Verdict] = right,
        read: Read = traces_of,
        delay_s: float = 0.0,
        operations: Operations = Operations(),  # noqa: B008  # frozen
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        self.exchanges: list[Exchange] = []
        self.records: list[list[Record]] = []
        self.submitted: list[Answer] = []
        self.checked: list[Answer] = []
        self.counted: list[str] = []
        settings = {"max_model_len": 100} | settings
        backend, self.script = make_backend(tokenizer, **settings)
        self.backend = backend

        def read_noted(exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
            self.exchanges.append(exchange)
            self.records.append(list(records))
            return read(exchange, records)

        def submit(answer: Answer, reply_bytes: str) -> None:
            self.submitted.append(answer)
            self.counted.append(reply_bytes)

        async def check(answer: Answer) -> Checked:
            self.checked.append(answer)
            await asyncio.sleep(delay_s)
            return Checked(judge(answer), checks=("logprobs", "support"))

        self.checks = checks = Checks(lambda _: chosen, lambda _: True, read_noted, submit, check, timeout_s=0.5)

        def ended(record: Record, checked: bool) -> None:
            if checked:
                checks.ended(record)

        self.source = BackendSource(backend)
        metrics = Metrics(BufferSink("r1"), model_name="m", pool="decode")
        source = observed(self.source, metrics, select=checks.select, ended=ended)
        self.front_end = FrontEnd(source, tokenizer, info(tokenizer, settings["max_model_len"]), limits, checks=checks)
        self.app = build_ingress(self.front_end, operations=operations)

    @property
    def tap(self) -> Tap:
        """The outermost layer."""
        if self.app.middleware_stack is None:
            self.app.middleware_stack = self.app.build_middleware_stack()
        assert isinstance(self.app.middleware_stack, Tap)
        return self.app.middleware_stack

    async def post(self, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        """Ask, and wait until the reply was read."""
        sampling = {"sampling_params": BODIES[GENERATE]["sampling_params"] | fields.pop("sampling_params", {})}
        body = BODIES[path] | fields | (sampling if path == GENERATE else {})
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=120) as client:
            response = await client.post(path, json=body)
        await self.settle()
        return response

    async def settle(self) -> None:
        """Wait until nothing is kept of any reply."""
        await self.checks.settled()
        await asyncio.sleep(0)
        assert self.tap.held.num_bytes == 0 and not self.checks._replies


def chunks_in(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
