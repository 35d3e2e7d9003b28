"""Requests to a server under audit: every result, including refusals, timeouts and connection errors, is a value."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
_OK = 200
_LONGEST_ERROR = 300  # characters kept of a failed reply


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its result.

    status: of HTTP; None = no reply. reply: the JSON body, or {}. error: what went wrong; empty = nothing.
    """

    path: str
    body: dict[str, Any]
    status: int | None
    reply: dict[str, Any]
    error: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it was answered."""
        return self.status == _OK and not self.error

    @property
    def refused(self) -> bool:
        """Whether the server rejected the request (4xx)."""
        return self.status is not None and 400 <= self.status < 500

    def reported(self) -> str:
        """The result in a few words."""
        if self.ok:
            return "an answer"
        return f"{'no reply' if self.status is None else f'HTTP {self.status}'}: {self.error}"


class Server:
    """One server, addressed with or without /v1; may be used from several threads.

    Args:
        url: of the server.
        api_key: sent as a bearer token if given.
        timeout_s: for a whole reply.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers)
        self.num_requests = 0
        self.last_failed: dict[str, Any] = {}  # the body of the latest request without a proper reply

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> str | None:
        """The text at a path; None if the request fails."""
        try:
            response = self._http.get(path)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == _OK else None

    def post(self, body: dict[str, Any], path: str = COMPLETIONS) -> Exchange:
        """Send a request and wait for its reply."""
        self.num_requests += 1
        began = time.monotonic()
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            reported = str(error) or type(error).__name__
            self.last_failed = body
            return Exchange(path, body, None, {}, reported, time.monotonic() - began)
        reply, error_text = _read(response)
        return Exchange(path, body, response.status_code, reply, error_text, time.monotonic() - began)

    def post_all(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Exchange]:
        """Send requests, `at_once` at a time; returns their exchanges in the order of the bodies."""
        if not bodies:
            return []
        with ThreadPoolExecutor(max_workers=at_once) as threads:
            return list(threads.map(self.post, bodies))

    def stream(self, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[Exchange, list[dict[str, Any]]]:
        """Send a streaming request; returns the exchange and the events of its stream."""
        self.num_requests += 1
        body = body | {"stream": True}
        began = time.monotonic()
        events: list[dict[str, Any]] = []
        status, error = None, ""
        try:
            with self._http.stream("POST", path, json=body) as response:
                status = response.status_code
                if status != _OK:
                    response.read()
                    error = _read(response)[1]
                else:
                    data = [line[5:].strip() for line in response.iter_lines() if line.startswith("data:")]
                    events = [json.loads(item) for item in data if item != "[DONE]"]
        except (httpx.HTTPError, ValueError) as failure:
            error = str(failure) or type(failure).__name__
        error = error or next((str(event["error"])[:_LONGEST_ERROR] for event in events if "error" in event), "")
        return Exchange(path, body, status, {}, error, time.monotonic() - began), events

    def alive(self) -> bool:
        """Whether the server still answers at all."""
        return any(self.get(path) is not None for path in ("/health", "/healthz", "/v1/models"))


def _read(response: httpx.Response) -> tuple[dict[str, Any], str]:
    """The JSON body and what is wrong with the reply."""
    try:
        reply = response.json()
    except ValueError:
        return {}, f"not JSON: {response.text[:_LONGEST_ERROR]}"
    if not isinstance(reply, dict):
        return {}, f"not a JSON object: {response.text[:_LONGEST_ERROR]}"
    if response.status_code == _OK and "error" not in reply:
        return reply, ""
    error = reply.get("error", reply)
    return reply, str(error.get("message", error) if isinstance(error, dict) else error)[:_LONGEST_ERROR]
