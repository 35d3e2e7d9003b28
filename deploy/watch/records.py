"""Answers that were kept: outputs of batches in OpenAI's format, requests with their responses, or rollouts.

A rollout is an object with `prompt_token_ids`, `token_ids` and `logprobs` (nats, one a token), and where they differ
from a plain sample `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `finish_reason`, `replica` and `id`. It is a line
of a JSONL file, or a row of a Parquet file, which Ray Data reads.
"""

import gzip
import itertools
import json
import math
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, WATCHED_PATHS, Exchange
from speculative.errors import ConfigError

Json = dict[str, Any]

STANDARD_INPUT = Path("-")

_ROLLOUT = ("prompt_token_ids", "token_ids")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_OK = 200
_CUT_OFF = object()
_FORMS = (
    "a line of a batch's output (with --requests for its input), an object with `request` and `response`, or a rollout "
    "with `prompt_token_ids` and `token_ids`"
)


def read_records(paths: Iterable[Path], requests: Path | None = None) -> Iterator[Exchange | str]:
    """The exchanges of these files, in order; for a record without an answer the reason why it has none.

    Files are opened at once, and the first record is read, but for those of pipes, which may keep a reader waiting.

    Args:
        paths: JSONL files (`.gz` packed by gzip), Parquet files or folders of them, or `-` for JSONL on standard input.
        requests: the input of the batch whose output they hold.

    Raises:
        ConfigError: a file cannot be read, or holds something else; the message names file and line.
    """
    paths = list(paths)
    for path in paths:
        try:
            if path != STANDARD_INPUT and stat.S_ISREG(path.stat().st_mode):  # what writes a pipe would see it closed
                path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    found = _records(paths, {} if requests is None else _requests(requests))
    is_pipe = not (paths[0].is_file() or paths[0].is_dir())
    return found if is_pipe else itertools.chain(list(itertools.islice(found, 1)), found)


def _records(paths: Iterable[Path], bodies: Mapping[str, tuple[str, Json]]) -> Iterator[Exchange | str]:
    for path in paths:
        for number, record in _rows(path):
            if record is _CUT_OFF:
                yield "the last line of its file is cut off"
                continue
            try:
                yield _exchange(record, bodies, f"{path.name}-{number}")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = f"{type(error).__name__}: {error}"
                raise ConfigError(f"{path} record {number}: is not {_FORMS} ({why}).") from error


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path == STANDARD_INPUT:
        yield from _lines(path, sys.stdin.buffer)
        return
    if path.is_dir() or path.suffix == ".parquet":
        yield from enumerate(_parquet(path), start=1)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from _lines(path, file)
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > 1 and not line.endswith(b"\n"):  # whoever wrote it was stopped, or writes on
                yield number, _CUT_OFF
                return
            raise ConfigError(f"{path} line {number}: is not JSON ({error}).") from error


def _parquet(path: Path) -> Iterator[Json]:
    try:
        import ray.data  # with pyarrow, which truespec itself does not need
    except ImportError as error:
        raise ConfigError(
            f"{path}: Parquet is read by Ray Data, which is not installed ({error}); pip install -e '.[data]'."
        ) from error
    from ray.exceptions import RayError

    try:
        for row in ray.data.read_parquet(str(path)).iter_rows():
            yield {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    except (OSError, ValueError, RayError) as error:
        raise ConfigError(
            f"{path}: holds no Parquet that can be read ({str(error).splitlines()[0]}); name JSONL files one by one."
        ) from error


def _requests(path: Path) -> dict[str, tuple[str, Json]]:
    """URL and body of each request of a batch, by its custom id."""
    bodies = {}
    for number, line in _rows(path):
        try:
            bodies[str(line["custom_id"])] = str(line["url"]), dict(line["body"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--requests {path} line {number} is not a line of a batch's input ({error}).") from error
    return bodies


def _exchange(record: Json, bodies: Mapping[str, tuple[str, Json]], name: str) -> Exchange | str:
    if not isinstance(record, dict):
        raise ValueError("it is not an object")
    if "custom_id" in record and "request" not in record:
        custom_id, response = str(record["custom_id"]), record.get("response")
        if response is None or response.get("status_code") != _OK:
            return "the batch has no answer to it"
        if custom_id not in bodies:
            raise ValueError(f"the requests have no {custom_id!r}; name the batch's input with --requests")
        path, body = bodies[custom_id]
        if path not in WATCHED_PATHS:
            return f"{path[:40]} generates nothing that can be computed again"
        return _made(path, body, dict(response["body"]) | {"id": custom_id}, record)
    if "request" in record:
        request, response = dict(record["request"]), dict(record["response"])
        path = record.get("path") or (CHAT if "messages" in request else COMPLETIONS)
        return _made(path, request, {"id": name, **response}, record)
    if not all(field in record for field in _ROLLOUT):
        raise ValueError(f"its fields are {', '.join(sorted(record)) or 'none'}"[:300])
    ids, logprobs = list(record["token_ids"]), record.get("logprobs")
    request = {field: record[field] for field in _SAMPLING if record.get(field) is not None}
    request |= {"prompt": list(record["prompt_token_ids"]), "temperature": record.get("temperature", 1.0)}
    if logprobs is not None and len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} token_ids have {len(logprobs)} logprobs")
    choice = {
        "index": 0,
        "token_ids": ids,
        "prompt_token_ids": list(record["prompt_token_ids"]),
        "logprobs": None if logprobs is None else {"token_logprobs": list(logprobs)},
        "finish_reason": record.get("finish_reason") or "length",
    }
    return _made(COMPLETIONS, request, {"id": str(record.get("id") or name), "choices": [choice]}, record)


def _made(path: str, request: Json, response: Json, record: Json) -> Exchange:
    at = float(record.get("at") or response.get("created") or 0.0)
    if not math.isfinite(at):
        raise ValueError("its time is not finite")
    replica = str(record.get("replica") or "")
    return Exchange(path, json.dumps(request).encode(), json.dumps(response).encode(), False, at, at, replica)
