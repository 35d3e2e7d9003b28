"""The two files of a batch, in OpenAI's format: the requests, and a line for each that was answered or refused.

https://platform.openai.com/docs/guides/batch has the format.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from deploy.exchange.client import Attempt
from serve_app.config.files import why_unread
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS
from speculative.errors import ConfigError

REFUSED = "refused"
_PATHS = (COMPLETIONS, CHAT, "/v1/responses")
_LINE_BEGINS = b'{"id": "batch_req_'
_FAULTS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    path: str
    body: dict[str, Any]


def read_requests(path: Path) -> dict[str, BatchRequest]:
    """The requests of an input file by their ids, in order. Raises ConfigError: the file cannot be read, or lines are
    invalid; the message lists the first of them."""
    requests: dict[str, BatchRequest] = {}
    faults: list[str] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {why_unread(error)}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                request = _request(json.loads(line), requests)
                requests[request.custom_id] = request
        except (ValueError, RecursionError) as error:
            faults.append(f"line {number}: {error}.")
    if faults:
        raise ConfigError("\n".join([f"{path}: {len(faults)} lines are no requests:", *faults[:_FAULTS_SHOWN]]))
    if not requests:
        raise ConfigError(f"{path} holds no request.")
    return requests


def _request(entry: Any, others: Collection[str]) -> BatchRequest:
    """The request of a line, whose id none of the others has. Raises ValueError: it cannot be sent."""
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    json.dumps(entry, allow_nan=False, ensure_ascii=False).encode()  # NaN and half characters cannot be sent
    custom_id, path, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text that is not empty")
    if custom_id in others:
        raise ValueError(f"custom_id {custom_id!r} is an earlier line's too; each must be its own")
    if entry.get("method") != "POST" or path not in _PATHS:
        raise ValueError(f"method must be POST, and url one of {', '.join(_PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        raise ValueError("body must be an object, without stream")
    return BatchRequest(custom_id, path, body)


class BatchOutput:
    """The output file: one line for each id, on disk before it counts."""

    def __init__(self, path: Path, file: BinaryIO, expected: Collection[str]) -> None:
        self.outcomes: dict[str, str] = {}  # of each id: the verdict, "answered" without one, or "refused"
        self._file = file
        file.seek(0)
        whole = 0
        for number, line in enumerate(file, start=1):
            begun = line.rstrip(b"\0")[: len(_LINE_BEGINS)]  # zeros: after a loss of power
            if not line.endswith(b"\n") and _LINE_BEGINS.startswith(begun):
                file.truncate(whole)
                break
            try:
                result = json.loads(line)
                custom_id, outcome = result["custom_id"], _outcome(result["response"])
                if custom_id not in expected or custom_id in self.outcomes:
                    raise ValueError(f"{custom_id!r} is not of the input, or twice here")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path} line {number} is no answer to this batch: {error}.") from error
            self.outcomes[custom_id] = outcome
            whole += len(line)

    @classmethod
    @contextmanager
    def opened(cls, path: Path, expected: Collection[str]) -> Iterator["BatchOutput"]:
        """The output of an input with these ids, made where it is missing, and locked until the block ends.

        What a killed process left is read first: whole lines count, a torn last one is cut off. Raises ConfigError: it
        cannot be written, another process writes it, or it is the output of something else."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{path} is being written by another process; wait for it ({error}).") from error
            yield cls(path, file, expected)

    def append(self, custom_id: str, attempt: Attempt, body: dict[str, Any]) -> None:
        """Add the line of a request with the body of its reply; it is on disk when this returns."""
        request_id = attempt.headers.get("x-request-id", "")
        response = {"status_code": attempt.status, "request_id": request_id, "body": body}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.outcomes[custom_id] = _outcome(response)


def _outcome(response: dict[str, Any]) -> str:
    return str(response["body"].get("verdict", "answered")) if response["status_code"] == 200 else REFUSED
