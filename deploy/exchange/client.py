"""A small HTTP client of a running service: stream an answer, read its metrics."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.options import api_key
from serve_app.telemetry.metric_summary import MetricSummary, summarise
from speculative.errors import TruespecError

_TIMEOUT_S = 600.0


class ServiceError(TruespecError):
    """The service answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer and how fast it came."""

    text: str
    num_tokens: int
    num_accepted: int
    num_rejected: int
    first_token_s: float
    decode_s: float  # from the first message to the last

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first message, over the time they took; 0 where there was nothing to measure."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 and self.num_tokens > 1 else 0.0


class Client:
    """Talks to one service; with the key of `TRUESPEC_API_KEY`, where that is set."""

    def __init__(self, base_url: str, model_name: str) -> None:
        self.base_url = base_url
        self.model_name = model_name
        key = api_key()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=base_url, timeout=_TIMEOUT_S, headers=headers)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def chat(self, content: str, *, on_text: Callable[[str], None] | None = None, **options: object) -> Answer:
        """Ask one question and stream the answer.

        Raises:
            ServiceError: the service refused or broke off.
        """
        body = {
            "model": self.model_name,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        began = time.perf_counter()
        first = last = None
        text = ""
        usage: dict[str, Any] = {}
        for chunk in self._events("/v1/chat/completions", body):
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content")
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    text += piece
                    if on_text is not None:
                        on_text(piece)
            usage = chunk.get("usage") or usage
        details = usage.get("completion_tokens_details") or {}
        end = time.perf_counter()
        return Answer(
            text=text,
            num_tokens=usage.get("completion_tokens", 0),
            num_accepted=details.get("accepted_prediction_tokens", 0),
            num_rejected=details.get("rejected_prediction_tokens", 0),
            first_token_s=(first or end) - began,
            decode_s=(last or end) - (first or end),
        )

    def metrics(self) -> MetricSummary:
        """The service's own figures, summed over its replicas."""
        return summarise(self._get("/metrics"))

    def _get(self, path: str) -> str:
        try:
            response = self._http.get(path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise ServiceError(f"{self.base_url}{path}: {error}") from error
        return response.text

    def _events(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise ServiceError(f"{self.base_url}{path}: {response.status_code} {response.read().decode()}")
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise ServiceError(f"{self.base_url}{path}: {event['error']['message']}")
                        yield event
        except httpx.HTTPError as error:
            raise ServiceError(f"{self.base_url}{path}: {error}") from error
