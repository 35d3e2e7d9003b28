"""`truespec batch`: each request answered once and none lost, through kills, refusals and broken servers."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deploy.cli.main import main
from deploy.jobs import batch as sending
from deploy.jobs.batch import retry_wait_s
from deploy.jobs.batch_files import BatchOutput
from tests.support.fake_openai import BREAK, FakeOpenAI, Reply, completion, failure
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

TRUESPEC = Path(sys.executable).with_name("truespec")
NOBODY = "http://127.0.0.1:9"


def line(custom_id: Any, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": custom_id, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes}


def write_lines(folder: Path, lines: Iterable[object]) -> tuple[Path, Path]:
    """The input, and where its output will be."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path, folder / "out.jsonl"


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "a line stands twice"
    return {one["custom_id"]: one for one in found}


def batch(files: tuple[Path, Path], url: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["batch", *map(str, files), "--url", url, *options])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nobody waits between two tries; the headers that were to say how long."""
    found: list[str] = []

    def wait_s(tries: int, retry_after: str) -> float:
        found.append(retry_after)
        return 0.0

    monkeypatch.setattr(sending, "retry_wait_s", wait_s)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_in_the_middle_continues(tmp_path: Path, number: int) -> None:
    ids = [f"request-{one}" for one in range(60)]
    files = write_lines(tmp_path, map(line, ids))
    served, gate = threading.Semaphore(25), threading.Event()

    def answer(prompt: str, times: int) -> Reply:
        if not gate.is_set() and not served.acquire(blocking=False):
            gate.wait(60)  # these are in flight when the process is ended
        return completion(f"to {prompt}")

    with FakeOpenAI(answer).running() as server:
        command = [str(TRUESPEC), "batch", *map(str, files), "--url", server.url, "--concurrency", "8"]
        first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: server.asked.total() == 33, "a stop in the middle")
        wait_for(lambda: files[1].read_bytes().count(b"\n") == 25, "25 lines on the disk")
        first.send_signal(number)
        assert "Traceback" not in first.communicate()[1]
        before = files[1].read_bytes()
        files[1].write_bytes(before + b'{"id": "batch_req_0123", "custom_id": "request-59", "respo')
        gate.set()
        again = batch(files, server.url)
        assert again.exit_code == 0 and "60 of 60 requests done, 25 of them before" in again.output
        assert files[1].read_bytes().startswith(before), "what was answered stays as it was"
        found = by_id(files[1])
        assert {one: found[one]["response"]["body"]["choices"][0]["text"] for one in found} == {
            one: f"to {one}" for one in ids
        }
        assert server.asked.total() == 68, "only those that were in flight were asked twice"
        third = batch(files, server.url)
        assert third.exit_code == 0 and "60 of them before" in third.output and server.asked.total() == 68


def test_a_line_of_the_output_is_openais(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESPEC_API_KEY", "a-key")
    files = write_lines(tmp_path, [line("a")])

    def answer(prompt: str, times: int) -> Reply:
        return 200, {"x-request-id": "req-7"}, completion("text")[2]

    with FakeOpenAI(answer).running() as server:
        run = batch(files, server.url + "/v1/")
    assert run.exit_code == 0, run.output
    result = by_id(files[1])["a"]
    assert result.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-7", "body": completion("text")[2]}
    assert result == {"custom_id": "a", "response": response, "error": None}
    assert (server.headers[0]["path"], server.headers[0]["authorization"]) == ("/v1/completions", "Bearer a-key")
    assert server.bodies == [line("a")["body"]]


def test_verdicts_are_asked_for_and_a_suspect_answer_fails_each_run(tmp_path: Path) -> None:
    lines = [line("a"), line("b", url="/v1/responses"), line("c")]
    lines[2]["body"]["verify"] = False
    files = write_lines(tmp_path, lines)

    def answer(prompt: str, times: int) -> Reply:
        return completion("text", **{} if prompt == "c" else {"verdict": "suspect" if prompt == "b" else "verified"})

    with FakeOpenAI(answer).running() as server:
        for _ in range(2):
            run = batch(files, server.url, "--verify")
            assert run.exit_code == 1
            assert "1 answered, 1 suspect, 1 verified" in run.output and "Do not use these" in run.output
    assert {body["prompt"]: body["verify"] for body in server.bodies} == {"a": True, "b": True, "c": False}
    assert server.asked.total() == 3


def test_a_refusal_is_kept_and_what_has_no_answer_is_asked_in_the_next_run(tmp_path: Path, waits: list[str]) -> None:
    files = write_lines(tmp_path, map(line, "abcde"))

    def answer(prompt: str, times: int) -> Reply:
        page = (200, {}, "<html>a proxy's page</html>")
        failures = {"b": failure(404, "model_not_found"), "c": page, "d": failure(429, "busy")}
        return failures.get(prompt) or completion("fine")

    with FakeOpenAI(answer).running() as server:
        run = batch(files, server.url, "--retries", "2")
        assert run.exit_code == 1
        assert "c has no answer: HTTP 200: not JSON: <html>" in run.output
        assert "d has no answer: HTTP 429: busy" in run.output
        assert "3 of 5 requests done" in run.output and "2 requests have no answer; the same command" in run.output
        assert server.asked == {"a": 1, "b": 1, "c": 1, "d": 3, "e": 1}
        refused = by_id(files[1])["b"]["response"]
        assert (refused["status_code"], refused["body"]["error"]["code"]) == (404, "model_not_found")
        server.answer = lambda prompt, times: completion(f"to {prompt}")
        run = batch(files, server.url)
    assert run.exit_code == 1 and "5 of 5" in run.output and "1 requests were refused" in run.output
    assert server.asked == {"a": 1, "b": 1, "c": 2, "d": 4, "e": 1} and by_id(files[1]).keys() == set("abcde")


STARTING = (404, {}, "Path '/v1/completions' not found. Ping http://.../-/routes for available routes.")  # HAProxy's


@pytest.mark.parametrize("passing", [failure(one, "", retry_after="7") for one in (408, 429, 500)] + [STARTING, BREAK])
def test_what_may_pass_is_tried_again(tmp_path: Path, waits: list[str], passing: Reply) -> None:
    files = write_lines(tmp_path, map(line, "ab"))

    def answer(prompt: str, times: int) -> Reply:
        return passing if prompt == "b" and times < 4 else completion("at last")

    with FakeOpenAI(answer).running() as server:
        assert batch(files, server.url).exit_code == 0
    assert server.asked == {"a": 1, "b": 4} and waits == [passing[1].get("retry_after", "")] * 3


def test_retry_after_is_honoured_and_without_it_waits_double() -> None:
    assert [retry_wait_s(5, asked) for asked in ("7", "0", "100000")] == [7, 0, 300]
    assert [retry_wait_s(tries, "soon") for tries in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_is_gone_or_refuses_the_key_stops_the_batch(tmp_path: Path, waits: list[str]) -> None:
    files = write_lines(tmp_path, map(line, "abc"))
    run = batch(files, NOBODY, "--retries", "1")
    assert run.exit_code == 1 and f"{NOBODY} does not answer; run the same command" in run.output
    assert "a: no reply: " in run.output and "; retry 1 of 1 in 0 s" in run.output
    with FakeOpenAI(lambda prompt, times: STARTING).running() as server:
        run = batch(files, server.url, "--retries", "1", "--concurrency", "1")
    assert server.asked == {"a": 2} and f"{server.url} does not answer; run" in run.output
    key = tmp_path / "key"
    key.write_text("key-of-the-file\n")
    with FakeOpenAI(lambda prompt, times: failure(401, "no")).running() as server:
        run = batch(files, server.url, "--concurrency", "1", "--api-key-file", str(key))
    assert server.asked.total() == 1 and server.headers[0]["authorization"] == "Bearer key-of-the-file"
    assert run.exit_code == 1 and "refuses the key (HTTP 401" in run.output and "key-of" not in run.output
    assert files[1].read_bytes() == b"", "nothing is marked as failed"


def test_no_more_requests_than_asked_for_are_in_flight(tmp_path: Path) -> None:
    full = threading.Barrier(3)

    def answer(prompt: str, times: int) -> Reply:
        full.wait(30)  # passes only when three are here together
        return completion("fine")

    with FakeOpenAI(answer).running() as server:
        run = batch(write_lines(tmp_path, (line(str(one)) for one in range(30))), server.url, "--concurrency", "3")
    assert run.exit_code == 0 and server.most_at_once == 3


ANSWER = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "", "body": {}}}
WHOLE = json.dumps(ANSWER).encode() + b"\n"


def test_two_processes_do_not_write_the_same_output(tmp_path: Path) -> None:
    files = write_lines(tmp_path, [line("a")])
    with BatchOutput.opened(files[1], ["a"]):
        run = batch(files, NOBODY)
    assert run.exit_code == 1 and "is being written by another process" in run.output


@pytest.mark.parametrize(
    ("found", "number"),
    [
        (b"my notes", 1),
        (b'{"id": 7}\n', 1),
        (WHOLE + b"{torn\n" + WHOLE, 2),
        (WHOLE + WHOLE, 2),
        (WHOLE.replace(b'"a"', b'"z"'), 1),
    ],
)
def test_a_file_that_is_no_output_of_this_input_is_kept(tmp_path: Path, found: bytes, number: int) -> None:
    files = write_lines(tmp_path, [line("a")])
    files[1].write_bytes(found)
    run = batch(files, NOBODY)
    assert run.exit_code == 1 and f"line {number} is no answer to this batch" in run.output
    assert files[1].read_bytes() == found


@pytest.mark.parametrize("torn", [WHOLE[:5], WHOLE[:40], WHOLE[:-1], b"\0" * 100])
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE + torn)
    with BatchOutput.opened(path, ["a"]) as output:
        assert output.outcomes == {"a": "answered"}
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([line("a"), line("a")], "line 2: custom_id 'a' is an earlier line's too"),
        ([line("")], "line 1: custom_id must be a text"),
        ([line("a", url="http://elsewhere/v1/completions")], "line 1: method must be POST, and url one of"),
        ([line("a", body={"stream": True})], "line 1: body must be an object, without stream"),
        ([line("a", body={"temperature": float("nan")})], "line 1: Out of range float"),
        ([line("\ud800")], "line 1: 'utf-8' codec can't encode"),
        (["a text", 7], "2 lines are no requests:\nline 1: not an object.\nline 2: not an object."),
        ([], "holds no request"),
    ],
)
def test_a_wrong_input_is_refused_before_anything_is_sent(tmp_path: Path, lines: list[Any], fault: str) -> None:
    files = write_lines(tmp_path, lines)
    run = batch(files, NOBODY)
    assert run.exit_code == 1 and fault in run.output and not files[1].exists()


def test_exactly_one_server_is_named_and_an_engine_serves_what_is_asked_for(tmp_path: Path) -> None:
    files = [str(path) for path in write_lines(tmp_path, [line("a")])]
    for options in ([], ["--url", "http://a", "--model", "b"], ["--model", "b", "--config", "c.yaml"]):
        run = CliRunner().invoke(main, ["batch", *files, *options])
        assert run.exit_code == 2 and "Give exactly one of --url" in run.output
    run = CliRunner().invoke(main, ["batch", *files, "--config", "demo"])
    assert run.exit_code == 1 and "The requests ask for 'tiny'; this engine serves 'SmolLM2" in run.output
    run = CliRunner().invoke(main, ["batch", *files, "--config", "none.yaml"])
    assert run.exit_code == 1 and "none.yaml" in run.output
    assert not Path(files[1]).exists(), "an option that is wrong leaves no output behind"
