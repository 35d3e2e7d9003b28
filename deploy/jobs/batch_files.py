"""The two files of a batch, in OpenAI's batch format: the requests, and one line for each answer.

https://platform.openai.com/docs/guides/batch has the format.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from filelock import FileLock, Timeout

from speculative.errors import ConfigError

ID_PREFIX = "batch_req_"
_LINE_BEGINS = f'{{"id": "{ID_PREFIX}'.encode()
_FAULTS_SHOWN = 10
_LONGEST_PATH = 2000  # bytes of a url, encoded


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the input."""

    custom_id: str
    url: str  # path and all below the server's root: /v1/...
    body: dict[str, Any]


class BatchInput:
    """An input file with every line checked. Only its ids are kept in memory.

    Raises:
        ConfigError: the file cannot be read, or lines are invalid; the message lists the first of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models: set[str] = set()  # that the lines ask for
        self._line_of: dict[str, int] = {}
        faults = [f"line {number}: {fault}" for number, raw in self._raw() if (fault := self._check(number, raw))]
        if faults:
            more = f"\n... and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
            raise ConfigError(f"{path} is not a batch input:\n" + "\n".join(faults[:_FAULTS_SHOWN]) + more)
        if not self._line_of:
            raise ConfigError(f"{path} holds no request.")

    def __len__(self) -> int:
        return len(self._line_of)

    @property
    def custom_ids(self) -> Collection[str]:
        """Ids of all lines, in order."""
        return self._line_of.keys()

    def lines(self, but: Collection[str]) -> Iterator[BatchLine]:
        """The requests in order, except those with these ids."""
        for _, raw in self._raw():
            entry = json.loads(raw)
            if entry["custom_id"] not in but:
                yield BatchLine(entry["custom_id"], entry["url"], entry["body"])

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        try:
            kind = self.path.stat().st_mode
            if not stat.S_ISREG(kind):
                what = "a pipe" if stat.S_ISFIFO(kind) else "not a regular file"
                raise ConfigError(f"{self.path} is {what}; the input is read twice, so write it to a file.")
            with self.path.open("rb") as file:
                yield from ((number, raw) for number, raw in enumerate(file, start=1) if raw.strip())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}.") from error

    def _check(self, number: int, raw: bytes) -> str | None:
        """Return what is wrong with a line; records the id of a valid one."""
        try:
            entry = json.loads(raw)
        except (ValueError, RecursionError) as error:
            return f"not JSON ({error})."
        if not isinstance(entry, dict):
            return "not an object."
        custom_id = entry.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            return "custom_id must be a text that is not empty."
        if custom_id in self._line_of:
            return f"custom_id {custom_id!r} is that of line {self._line_of[custom_id]} too; each must be its own."
        self._line_of[custom_id] = number
        return self._check_request(entry)

    def _check_request(self, entry: dict[str, Any]) -> str | None:
        url, body = entry.get("url"), entry.get("body")
        if entry.get("method") != "POST":
            return "method must be POST."
        if not isinstance(url, str) or not _is_path(url):
            return "url must be a path such as /v1/chat/completions."
        if not isinstance(body, dict):
            return "body must be an object."
        if body.get("stream"):
            return "body.stream is not for batches; leave it out."
        if isinstance(model := body.get("model"), str):
            self.models.add(model)
        return None


def _is_path(url: str) -> bool:
    """Return whether requests can be sent to this path of a server."""
    try:
        return url.startswith("/v1/") and len(httpx.URL(url).raw_path) <= _LONGEST_PATH
    except (httpx.InvalidURL, ValueError):
        return False


@dataclass(slots=True)
class Tally:
    """Counts over the lines of an output."""

    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by status and code
    verdicts: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def failed(self) -> int:
        """Lines without an answer."""
        return self.failures.total()

    def add(self, result: dict[str, Any]) -> None:
        """Count one line."""
        self.done += 1
        if (failure := failure_of(result)) is not None:
            self.failures[failure] += 1
            return
        body = result["response"]["body"]
        usage = body.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        if "verdict" in body:
            self.verdicts[body["verdict"]] += 1


def failure_of(result: dict[str, Any]) -> str | None:
    """Return why a line of the output holds no answer, in a word or two; None if it holds one."""
    response, error = result["response"], result["error"]
    if response is None:
        return str(error["code"])
    reported = response["body"].get("error")
    if response["status_code"] == 200 and not reported:
        return None
    code = reported.get("code") or reported.get("type") if isinstance(reported, dict) else None
    return f"{response['status_code']} {code or ''}".strip()


class BatchOutput:
    """The output file: every id in it once, each line on disk before it counts as done.

    What a killed process left is read first: its complete lines count, a torn last line is cut off and requested again.
    Open it with `opened`.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.done: set[str] = set()
        self.tally = Tally()
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, path: Path, expected: Collection[str], *, retry_failed: bool = False) -> Iterator["BatchOutput"]:
        """The output of an input with these ids, until the block ends; locked against other processes.

        Args:
            path: the file; made where it is missing.
            expected: ids of the input.
            retry_failed: drop the lines without an answer, so that they are requested again.

        Raises:
            ConfigError: it cannot be written, another process writes it, or it is the output of something else.
        """
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(f"{path} is being written by another process; wait for it, or stop it.") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}.") from error
        try:
            if retry_failed and path.is_file():
                _forget_failures(path, expected)
            with path.open("ab", buffering=0) as file:
                output = cls(path, file)
                output._recover(expected)
                _sync_folder(path)
                yield output
        finally:
            lock.release()

    def append(self, results: Sequence[dict[str, Any]]) -> None:
        """Add lines; they are on disk when this returns."""
        data = "".join(json.dumps(result) + "\n" for result in results).encode()
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        self._count(results)

    def _recover(self, expected: Collection[str]) -> None:
        whole = 0
        with self.path.open("rb") as written:
            for result, end in _results(self.path, written, expected):
                self._count([result])
                whole = end
        self._file.truncate(whole)

    def _count(self, results: Iterable[dict[str, Any]]) -> None:
        for result in results:
            self.done.add(result["custom_id"])
            self.tally.add(result)


def _results(path: Path, file: BinaryIO, expected: Collection[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """The lines of an output, each with the offset of its end; a torn last one is left out.

    Raises:
        ConfigError: a line is not ours, answers an id that the input does not have, or answers one twice.
    """
    end, seen = 0, set[str]()
    for number, raw in enumerate(file, start=1):
        if _is_torn(raw):
            return
        result = _result(raw)
        if result is None:
            raise ConfigError(f"{path} line {number} is not a line of a batch output; fix the file, or give another.")
        custom_id = result["custom_id"]
        if custom_id not in expected:
            raise ConfigError(f"{path} line {number} answers {custom_id!r}, which the input does not have.")
        if custom_id in seen:
            raise ConfigError(f"{path} line {number} answers {custom_id!r} a second time; fix the file.")
        seen.add(custom_id)
        end += len(raw)
        yield result, end


def _is_torn(raw: bytes) -> bool:
    """Return whether this is the beginning of a line of ours whose end was never written (zeros: after a loss of
    power)."""
    written = raw.rstrip(b"\0")
    return not raw.endswith(b"\n") and (written.startswith(_LINE_BEGINS) or _LINE_BEGINS.startswith(written))


def _result(raw: bytes) -> dict[str, Any] | None:
    """A line of the output; None where it is something else."""
    try:
        result = json.loads(raw)
        failure_of(result)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return result if raw.endswith(b"\n") and isinstance(result.get("custom_id"), str) else None


def _forget_failures(path: Path, expected: Collection[str]) -> None:
    """Rewrite the file without the lines that hold no answer; it is replaced atomically."""
    kept = path.with_name(f".{path.name}.kept")
    with path.open("rb") as old, kept.open("wb") as new:
        for result, _ in _results(path, old, expected):
            if failure_of(result) is None:
                new.write(json.dumps(result).encode() + b"\n")
        new.flush()
        os.fsync(new.fileno())
    kept.replace(path)


def _sync_folder(path: Path) -> None:
    """Sync a new file's directory entry to disk."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
