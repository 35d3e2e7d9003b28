"""Answers that were kept: every form is read into the exchange that it came from, and nothing else is."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from deploy.watch.records import read_records
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, Exchange
from serve_app.referee.wire.reply import read_reply
from speculative.errors import ConfigError

pytestmark = pytest.mark.slow

ROLLOUT = {"prompt_token_ids": [5, 6], "token_ids": [7, 8, 9], "logprobs": [-0.1, -0.2, -0.3], "temperature": 0.7}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def exchange_of(path: Path, requests: Path | None = None) -> Exchange:
    (found,) = read_records([path], requests)
    assert isinstance(found, Exchange)
    return found


def check_rollout(exchange: Exchange) -> None:
    body, reply = json.loads(exchange.request), read_reply(exchange)
    assert (exchange.path, body["prompt"], body["temperature"]) == (COMPLETIONS, [5, 6], 0.7)
    assert reply.choices[0].token_ids == [7, 8, 9]
    assert reply.choices[0].logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert reply.choices[0].prompt_token_ids == (5, 6)


def test_a_rollout_in_a_line(tmp_path: Path) -> None:
    check_rollout(exchange_of(write(tmp_path / "rollouts.jsonl", ROLLOUT)))
    plain = {name: value for name, value in ROLLOUT.items() if name != "temperature"}
    assert json.loads(exchange_of(write(tmp_path / "a", plain)).request)["temperature"] == 1.0


@pytest.mark.ray
@pytest.mark.usefixtures("ray_ended")
def test_a_rollout_in_a_row_of_parquet_and_what_is_no_parquet(tmp_path: Path) -> None:
    """One test, since either starts Ray."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROLLOUT]), tmp_path / "rollouts.parquet")
    check_rollout(exchange_of(tmp_path / "rollouts.parquet"))
    (again,) = read_records([tmp_path])  # the folder
    assert isinstance(again, Exchange)
    check_rollout(again)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", ROLLOUT)
    for path in (tmp_path / "bad.parquet", folder):
        with pytest.raises(ConfigError, match="no Parquet"):
            list(read_records([path]))


def test_a_request_with_its_response(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    response = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": {"content": "Ho"}, "finish_reason": "stop"}]}
    record = {"request": request, "response": response, "replica": "pod-3", "at": 12.5}
    found = exchange_of(write(tmp_path / "log.jsonl", record))
    assert (found.path, found.replica, found.began_at) == (CHAT, "pod-3", 12.5)
    assert json.loads(found.request) == request
    assert read_reply(found).id == "chatcmpl-1"


def test_a_batch_is_its_output_and_its_input(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "A", "max_tokens": 2}
    reply = {"id": "cmpl-9", "choices": [{"index": 0, "text": "bc", "token_ids": [3, 4], "finish_reason": "length"}]}
    asked = write(tmp_path / "in.jsonl", *({"custom_id": f"r{n}", "url": COMPLETIONS, "body": body} for n in range(3)))
    answered = write(
        tmp_path / "out.jsonl",
        {"custom_id": "r1", "response": {"status_code": 200, "body": reply}, "error": None},
        {"custom_id": "r2", "response": {"status_code": 500, "body": {}}, "error": None},
        {"custom_id": "r0", "response": None, "error": {"code": "timeout"}},
    )
    first, *others = read_records([answered], asked)
    assert isinstance(first, Exchange)
    assert json.loads(first.request) == body
    assert read_reply(first).id == "r1", "findings name a line of the batch by its own id"
    assert others == ["the batch has no answer to it"] * 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 1: is not JSON"),
        ('{"prompt": "x"}', "record 1: is not a line of a batch's output"),
        ('{"custom_id": "z", "response": {"status_code": 200, "body": {}}}', "--requests"),
        ('{"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-1]}', "2 token_ids have 1 logprobs"),
        ("[1]", "not an object"),
        (json.dumps(ROLLOUT | {"at": math.nan}), "not finite"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.jsonl") as refused:
        list(read_records([path]))
    assert named in str(refused.value)
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read: No such file"):
        list(read_records([tmp_path / "none.jsonl"]))


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    """As where the run that writes it was stopped, or goes on."""
    path = write(tmp_path / "torn.jsonl", ROLLOUT, ROLLOUT)
    path.write_bytes(path.read_bytes()[:-30])
    first, second = read_records([path])
    assert isinstance(first, Exchange)
    assert second == "the last line of its file is cut off"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_records([path]))


def test_a_packed_file(tmp_path: Path) -> None:
    path, packed = tmp_path / "rollouts.jsonl.gz", gzip.compress(json.dumps(ROLLOUT).encode())
    path.write_bytes(packed)
    check_rollout(exchange_of(path))
    for damaged in (packed[:-9], b"plain"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            list(read_records([path]))
