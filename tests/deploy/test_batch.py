"""`truespec batch`: each request answered once and none lost, through kills, refusals and broken servers."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from deploy.cli.main import main
from deploy.jobs.batch import BatchOptions, BatchStopped, retry_wait_s, run_batch
from deploy.jobs.batch_engine import batch_application
from deploy.jobs.batch_files import BatchInput, BatchLine, BatchOutput, Tally
from deploy.reports.progress import View
from deploy.run.own_model import OwnModel, own_application
from speculative.errors import ConfigError
from tests.support.fake_openai import BREAK, FakeOpenAI, Reply, completion, failure, wait_until

TRUESPEC = Path(sys.executable).with_name("truespec")


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": custom_id, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes}


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(one) for one in text.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    found = results(path)
    assert len({one["custom_id"] for one in found}) == len(found), "a line stands twice"
    return {one["custom_id"]: one for one in found}


def batch(requests: Path, answers: Path, url: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["batch", str(requests), str(answers), "--url", url, *options])


def echo(prompt: str, times: int) -> Reply:
    return completion(f"to {prompt}")


def run_here(
    requests: Path, answers: Path, url: str, said: io.StringIO | None = None, **options: Any
) -> dict[str, Any]:
    """Without the command line, so that waits can be short."""
    read, console = BatchInput(requests), Console(file=said or io.StringIO())
    with BatchOutput.opened(answers, read.custom_ids) as output, View(console) as view:
        return run_batch(read, output, BatchOptions(url=url, backoff_s=0.01, **options), view)


def test_500_requests_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    ids = [f"request-{number}" for number in range(500)]
    requests = write_lines(tmp_path / "in.jsonl", map(line, ids))
    answers = tmp_path / "out.jsonl"
    served, gate = threading.Semaphore(230), threading.Event()

    def answer(prompt: str, times: int) -> Reply:
        if not gate.is_set() and not served.acquire(blocking=False):
            gate.wait(60)  # these are in flight when the process is killed
        return completion(f"to {prompt}")

    with FakeOpenAI(answer).running() as server:
        command = [str(TRUESPEC), "batch", str(requests), str(answers), "--url", server.url, "--concurrency", "8"]
        first = subprocess.Popen(command, stderr=subprocess.PIPE)
        wait_until(lambda: len(server.asked) == 238, "a stop in the middle")
        wait_until(lambda: answers.read_bytes().count(b"\n") == 230, "230 lines on the disk")
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        before = answers.read_bytes()
        torn = b'{"id": "batch_req_0123", "custom_id": "request-499", "respo'  # as a kill within a write leaves it
        answers.write_bytes(before + torn)
        gate.set()
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert again.returncode == 0, again.stderr
        assert "500 of 500 requests done, 230 of them before" in again.stdout
        assert answers.read_bytes().startswith(before), "what was answered stays as it was"
        found = by_id(answers)
        assert found.keys() == set(ids)
        assert all(one["response"]["body"]["choices"][0]["text"] == f"to {name}" for name, one in found.items())
        assert all(server.asked[name] <= 2 for name in ids)
        assert sum(server.asked.values()) == 508, "only those that were in flight were asked twice"
        asked = server.asked.total()
        third = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert third.returncode == 0 and "500 of them before" in third.stdout
        assert server.asked.total() == asked, "nothing was left to ask"


def test_a_line_of_the_output_is_openais(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [line("a")])

    def answer(prompt: str, times: int) -> Reply:
        status, _, body = completion("text", verdict="verified", verdicts=["verified"])
        return status, {"x-request-id": "req-7"}, body

    with FakeOpenAI(answer).running() as server:
        run = batch(
            requests, tmp_path / "out.jsonl", server.url + "/v1/", "--verify", "--json", str(tmp_path / "f.json")
        )
    assert run.exit_code == 0, run.output
    (result,) = results(tmp_path / "out.jsonl")
    assert result.keys() == {"id", "custom_id", "response", "error"}
    assert result["id"].startswith("batch_req_") and result["custom_id"] == "a" and result["error"] is None
    assert result["response"].keys() == {"status_code", "request_id", "body"}
    assert (result["response"]["status_code"], result["response"]["request_id"]) == (200, "req-7")
    assert result["response"]["body"]["verdict"] == "verified"
    assert server.bodies == [{"verify": True, **line("a")["body"]}]
    assert server.headers[0]["path"] == "/v1/completions"
    assert server.headers[0]["x-request-id"] == result["id"], "the server's log has the id of the line"
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["seconds"] > 0
    del figures["seconds"]
    assert figures == {
        "requests": 1,
        "done": 1,
        "done_before": 0,
        "failed": 0,
        "failures": {},
        "verdicts": {"verified": 1},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "retries": 0,
    }


def test_a_suspect_answer_ends_with_an_error(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "ab"))

    def answer(prompt: str, times: int) -> Reply:
        return completion("text", verdict="suspect" if prompt == "b" else "verified")

    with FakeOpenAI(answer).running() as server:
        run = batch(requests, tmp_path / "out.jsonl", server.url, "--verify")
    assert run.exit_code == 1
    assert "1 suspect, 1 verified" in run.output and "Do not use these" in run.output


def test_verify_is_asked_of_generated_answers_only_and_a_line_may_say_otherwise(tmp_path: Path) -> None:
    lines = [line("a"), line("b", url="/v1/embeddings"), line("c"), line("d", url="/v1/responses")]
    lines[2]["body"]["verify"] = False
    requests = write_lines(tmp_path / "in.jsonl", lines)
    with FakeOpenAI(echo).running() as server:
        batch(requests, tmp_path / "out.jsonl", server.url, "--verify")
    assert {body["prompt"]: body.get("verify") for body in server.bodies} == {
        **{"a": True, "b": None, "c": False, "d": True}
    }


def test_tokens_are_counted_whatever_the_endpoint_calls_them() -> None:
    tally = Tally()
    for usage in ({"prompt_tokens": 3, "completion_tokens": 5}, {"input_tokens": 30, "output_tokens": 50}, None):
        body = {"usage": usage, "error": None}
        tally.add({"response": {"status_code": 200, "body": body}, "error": None})
    assert (tally.done, tally.failed, tally.prompt_tokens, tally.completion_tokens) == (3, 0, 33, 55)


def test_a_refused_line_gets_its_error_and_the_others_their_answers(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "abcd"))
    answers = tmp_path / "out.jsonl"

    def answer(prompt: str, times: int) -> Reply:
        page = (200, {}, "<html>a proxy's page</html>")
        return {"b": failure(400, "unknown_parameter"), "c": page}.get(prompt) or completion("fine")

    with FakeOpenAI(answer).running() as server:
        run = batch(requests, answers, server.url)
        assert run.exit_code == 1
        assert "2 failed: 1 200 not_json, 1 400 unknown_parameter" in run.output
        found = by_id(answers)
        assert found["b"]["response"]["status_code"] == 400 and found["b"]["error"] is None
        assert found["b"]["response"]["body"]["error"]["code"] == "unknown_parameter"
        assert "a proxy's page" in found["c"]["response"]["body"]["error"]["message"]
        assert server.asked == {"a": 1, "b": 1, "c": 1, "d": 1}, "what is wrong with a request stays wrong: no retry"
        assert batch(requests, answers, server.url).exit_code == 1, "a failed line is no lesser failure the second time"
        assert server.asked.total() == 4
        server.answer = echo
        run = batch(requests, answers, server.url, "--retry-failed")
    assert run.exit_code == 0, run.output
    assert server.asked == {"a": 1, "b": 2, "c": 2, "d": 1}
    assert {name: one["response"]["status_code"] for name, one in by_id(answers).items()} == dict.fromkeys("abcd", 200)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(tmp_path: Path, status: int) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "ab"))

    def answer(prompt: str, times: int) -> Reply:
        return failure(status, "later", retry_after="0") if prompt == "b" and times < 4 else completion("at last")

    with FakeOpenAI(answer).running() as server:
        figures = run_here(requests, tmp_path / "out.jsonl", server.url)
    assert server.asked == {"a": 1, "b": 4}
    assert (figures["retries"], figures["failed"]) == (3, 0)
    assert len({headers["x-request-id"] for headers in server.headers}) == 2, "a retry keeps its id"


def test_after_the_last_try_the_line_says_what_came(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "abc"))

    def answer(prompt: str, times: int) -> Reply:
        return {"a": failure(503, "busy"), "b": BREAK}.get(prompt) or completion("fine")

    with FakeOpenAI(answer).running() as server:
        figures = run_here(requests, tmp_path / "out.jsonl", server.url, retries=2)
    assert server.asked == {"a": 3, "b": 3, "c": 1}
    found = by_id(tmp_path / "out.jsonl")
    assert found["a"]["response"]["status_code"] == 503
    assert found["b"]["response"] is None and found["b"]["error"]["code"] == "connection_broken"
    assert figures["failures"] == {"503 busy": 1, "connection_broken": 1}


def test_a_server_that_is_gone_stops_the_batch_and_marks_nothing_as_failed(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "ab"))
    answers = tmp_path / "out.jsonl"
    with FakeOpenAI(echo).running() as server:
        pass
    run = batch(requests, answers, server.url, "--retries", "0")
    assert run.exit_code == 1
    assert "cannot be reached" in run.output and "0 of 2 requests are done; the same command continues" in run.output
    assert answers.read_bytes() == b""
    with FakeOpenAI(echo).running() as server:
        assert batch(requests, answers, server.url).exit_code == 0
    assert by_id(answers).keys() == {"a", "b"}


def test_a_server_that_does_not_answer_is_reported_at_once_and_given_up_soon(tmp_path: Path) -> None:
    requests, said = write_lines(tmp_path / "in.jsonl", map(line, "abcd")), io.StringIO()
    with FakeOpenAI(echo).running() as server:
        pass
    with pytest.raises(BatchStopped, match=r"cannot be reached: .*, tried 5 times. Start the server, or check --url"):
        run_here(requests, tmp_path / "out.jsonl", server.url, said, retries=8)
    failures = [line for line in said.getvalue().splitlines() if f"{server.url} does not answer (" in line]
    assert len(failures) == 4, "once for all requests in flight"
    assert all(f"retry {number} of 4 in 0 s" in line for number, line in enumerate(failures, start=1))


def test_a_server_that_is_started_again_is_waited_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, said = write_lines(tmp_path / "in.jsonl", map(line, "ab")), io.StringIO()
    sent = httpx.AsyncClient.post
    failures = iter([None, *[httpx.ConnectError("refused")] * 7])  # after the first answer

    async def post(client: httpx.AsyncClient, *args: Any, **options: Any) -> httpx.Response:
        if (failure := next(failures, None)) is not None:
            raise failure
        return await sent(client, *args, **options)

    monkeypatch.setattr(httpx.AsyncClient, "post", post)
    with FakeOpenAI(echo).running() as server:
        figures = run_here(requests, tmp_path / "out.jsonl", server.url, said, retries=8, concurrency=1)
    assert (figures["done"], figures["failed"], figures["retries"]) == (2, 0, 7)
    reported = said.getvalue()
    assert (
        reported.count("does not answer (refused)") == 7
        and "retry 7 of 8" in reported
        and reported.count("answers again") == 1
    )


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_the_batch_at_once_and_is_not_reported(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESPEC_API_KEY", "key-of-the-environment")
    requests = write_lines(tmp_path / "in.jsonl", map(line, "abc"))
    key = tmp_path / "key"
    key.write_text("key-of-the-file\n")
    with FakeOpenAI(lambda prompt, times: failure(status, "no")).running() as server:
        run = batch(requests, tmp_path / "out.jsonl", server.url, "--concurrency", "1")
        assert server.headers[0]["authorization"] == "Bearer key-of-the-environment"
        second = batch(requests, tmp_path / "out.jsonl", server.url, "--api-key-file", str(key))
        assert server.headers[1]["authorization"] == "Bearer key-of-the-file"
    assert run.exit_code == second.exit_code == 1
    assert f"refuses the key ({status})" in run.output
    assert "key-of-" not in run.output + second.output
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("key", ["key-one\nkey-two\n", "key-\u00e9"])
def test_a_key_that_cannot_be_sent_is_refused_before_anything_is(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, answers, file = write_lines(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl", tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    with FakeOpenAI(echo).running() as server:
        of_file = batch(requests, answers, server.url, "--api-key-file", str(file))
        monkeypatch.setenv("TRUESPEC_API_KEY", key)
        of_variable = batch(requests, answers, server.url)
        monkeypatch.setenv("TRUESPEC_API_KEY", "")
        assert not answers.exists() and not server.asked
        assert batch(requests, answers, server.url).exit_code == 0, "an empty variable is no key"
    assert "authorization" not in server.headers[0]
    assert of_file.exit_code == of_variable.exit_code == 1
    assert "--api-key-file" in of_file.output and "TRUESPEC_API_KEY" in of_variable.output
    assert "key-" not in of_file.output.replace("--api-key-file", "") + of_variable.output


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000/v1", "ftp://127.0.0.1", "http://"])
def test_what_is_no_url_is_refused_before_anything_is_sent(tmp_path: Path, url: str) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [line("a")])
    run = batch(requests, tmp_path / "out.jsonl", url)
    assert run.exit_code == 1 and f"--url {url!r} is not the URL of a server" in run.output
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(("scheme", "key"), [("ftp", None), ("http", "secret\nkey")])
def test_what_cannot_be_sent_at_all_stops_the_batch_and_marks_nothing_as_failed(
    tmp_path: Path, scheme: str, key: str | None
) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "ab"))
    with (
        FakeOpenAI(echo).running() as server,
        pytest.raises(BatchStopped, match=r"cannot be asked \(\w+\)") as reported,
    ):
        run_here(requests, tmp_path / "out.jsonl", server.url.replace("http", scheme), api_key=key, retries=0)
    assert "secret" not in str(reported.value)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_an_input_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(line("a")).encode() + b"\n")
    os.close(writing)
    with FakeOpenAI(echo).running() as server:
        run = batch(Path(f"/dev/fd/{reading}"), tmp_path / "out.jsonl", server.url)
    os.close(reading)
    assert run.exit_code == 1
    assert "is a pipe; the input is read twice, so write it to a file" in run.output
    assert not (tmp_path / "out.jsonl").exists()


def test_requests_that_were_not_read_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = write_lines(tmp_path / "in.jsonl", map(line, "abc"))
    checked = BatchInput.lines

    def shortened(read: BatchInput, but: Collection[str]) -> Iterator[BatchLine]:
        write_lines(requests, [line("a")])
        return checked(read, but)

    monkeypatch.setattr(BatchInput, "lines", shortened)
    with FakeOpenAI(echo).running() as server:
        run = batch(requests, tmp_path / "out.jsonl", server.url)
    assert run.exit_code == 1
    assert "2 requests were not read; did the input change?" in run.output
    assert by_id(tmp_path / "out.jsonl").keys() == {"a"}


def test_no_more_requests_than_asked_for_are_in_flight(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", (line(str(number)) for number in range(30)))
    full = threading.Barrier(3)

    def answer(prompt: str, times: int) -> Reply:
        full.wait(30)  # passes only when three are here together
        return completion("fine")

    with FakeOpenAI(answer).running() as server:
        run = batch(requests, tmp_path / "out.jsonl", server.url, "--concurrency", "3")
    assert run.exit_code == 0, run.output
    assert server.most_at_once == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_answered(tmp_path: Path, number: int) -> None:
    requests = write_lines(tmp_path / "in.jsonl", (line(str(one)) for one in range(20)))
    answers, gate, served = tmp_path / "out.jsonl", threading.Event(), threading.Semaphore(5)

    def answer(prompt: str, times: int) -> Reply:
        if not served.acquire(blocking=False):
            gate.wait(60)
        return completion("fine")

    with FakeOpenAI(answer).running() as server:
        command = [str(TRUESPEC), "batch", str(requests), str(answers), "--url", server.url, "--concurrency", "2"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: server.asked.total() == 7, "a stop in the middle")
        wait_until(lambda: answers.read_bytes().count(b"\n") == 5, "five lines on the disk")
        process.send_signal(number)
        said = process.communicate(timeout=300)[1]
        gate.set()
    assert process.returncode == 1
    assert "Interrupted. 5 of 20 requests are done" in said and "Traceback" not in said
    assert len(by_id(answers)) == 5


def test_two_processes_do_not_write_the_same_output(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [line("a")])
    with BatchOutput.opened(tmp_path / "out.jsonl", ["a"]):
        run = batch(requests, tmp_path / "out.jsonl", "http://127.0.0.1:9")
    assert run.exit_code == 1 and "is being written by another process" in run.output


GOOD = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "", "body": {}}} | {
    "error": None
}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ("my notes\n", "line 1 is not a line of a batch output"),
        ("my notes", "line 1 is not a line of a batch output"),
        ('{"id": 7}\n', "line 1 is not a line of a batch output"),
        (json.dumps(GOOD) + "\n{torn\n" + json.dumps(GOOD) + "\n", "line 2 is not a line of a batch output"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n", "line 2 answers 'a' a second time"),
        (json.dumps(GOOD | {"custom_id": "z"}) + "\n", "line 1 answers 'z', which the input does not have"),
    ],
)
@pytest.mark.parametrize("retry", [(), ("--retry-failed",)])
def test_a_file_that_is_no_output_of_this_input_is_left_alone(
    tmp_path: Path, found: str, fault: str, retry: tuple[str, ...]
) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [line("a")])
    answers = tmp_path / "out.jsonl"
    answers.write_text(found)
    run = batch(requests, answers, "http://127.0.0.1:9", *retry)
    assert run.exit_code == 1 and fault in run.output
    assert answers.read_text() == found


@pytest.mark.parametrize("cut", range(0, len(json.dumps(GOOD)) + 1, 7))
def test_a_line_torn_anywhere_is_asked_again(tmp_path: Path, cut: int) -> None:
    answers = tmp_path / "out.jsonl"
    second = json.dumps(GOOD | {"custom_id": "b"})
    whole = json.dumps(GOOD) + "\n"
    answers.write_text(whole + second[:cut])
    with BatchOutput.opened(answers, ["a", "b"]) as output:
        assert output.done == {"a"}
        assert answers.read_text() == whole
        output.append([GOOD | {"custom_id": "b"}])
    assert [one["custom_id"] for one in results(answers)] == ["a", "b"]


def test_zeros_after_a_loss_of_power_are_cut_off(tmp_path: Path) -> None:
    answers = tmp_path / "out.jsonl"
    answers.write_bytes(json.dumps(GOOD).encode() + b"\n" + b"\0" * 100)
    with BatchOutput.opened(answers, ["a", "b"]) as output:
        assert output.done == {"a"}
    assert answers.read_bytes() == json.dumps(GOOD).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([line("a"), line("a")], "line 2: custom_id 'a' is that of line 1 too"),
        ([line("")], "line 1: custom_id must be a text"),
        ([line(7)], "line 1: custom_id must be a text"),  # type: ignore[arg-type]
        ([line("a", method="GET")], "line 1: method must be POST"),
        ([line("a", url="http://elsewhere/v1/completions")], "line 1: url must be a path"),
        ([line("a", url="/v1/a\0b")], "line 1: url must be a path"),
        ([line("a", url="/v1/\ud800")], "line 1: url must be a path"),
        ([line("a", url="/v1/" + "a" * 70000)], "line 1: url must be a path"),
        ([line("a", body=[1])], "line 1: body must be an object"),
        ([line("a", body={"stream": True})], "line 1: body.stream is not for batches"),
        (["a text"], "line 1: not an object"),
        ([], "holds no request"),
    ],
)
def test_a_wrong_input_is_refused_before_anything_is_sent(tmp_path: Path, lines: list[Any], fault: str) -> None:
    requests = write_lines(tmp_path / "in.jsonl", lines)
    run = batch(requests, tmp_path / "out.jsonl", "http://127.0.0.1:9")
    assert run.exit_code == 1 and fault in run.output
    assert not (tmp_path / "out.jsonl").exists()


def test_faults_of_many_lines_are_reported_together_but_not_without_end(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("\n{\n" * 25)
    with pytest.raises(ConfigError) as reported:
        BatchInput(requests)
    said = str(reported.value)
    assert "line 2: not JSON" in said and "line 4: not JSON" in said, "empty lines are passed over, and counted"
    assert said.endswith("... and 15 more")


def test_what_json_allows_in_python_reaches_the_server(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    odd = (
        r'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x\ud800", "a": NaN}}'
    )
    requests.write_text(odd + "\n")
    with FakeOpenAI(echo).running() as server:
        run = batch(requests, tmp_path / "out.jsonl", server.url)
    assert run.exit_code == 0, run.output
    assert server.bodies[0]["prompt"] == "x\ud800"
    assert by_id(tmp_path / "out.jsonl")["\ud800"]["response"]["body"]["choices"][0]["text"] == "to x\ud800"


def test_retry_after_is_honoured_as_seconds_and_as_a_date() -> None:
    assert retry_wait_s(1, "7", 1.0, 0.0) == 7
    assert retry_wait_s(5, "0", 1.0, 1.0) == 0
    assert retry_wait_s(1, "100000", 1.0, 0.0) == 300, "not for ever"
    assert [retry_wait_s(tries, None, 1.0, 0.0) for tries in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert retry_wait_s(3, "soon", 1.0, 1.0) == 5, "a header that says nothing counts as none; a quarter spreads"
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=50), usegmt=True)
    assert 40 < retry_wait_s(1, date, 1.0, 0.0) <= 50
    assert retry_wait_s(1, format_datetime(datetime(2020, 1, 1, tzinfo=UTC), usegmt=True), 1.0, 0.0) == 0


def test_exactly_one_server_is_named(tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [line("a")])
    for options in ([], ["--url", "http://a", "--model", "b"], ["--model", "b", "--config", "c.yaml"]):
        run = CliRunner().invoke(main, ["batch", str(requests), str(tmp_path / "out.jsonl"), *options])
        assert run.exit_code == 2 and "Set exactly one of --url" in run.output


def test_an_engine_of_its_own_serves_the_model_that_is_asked_for() -> None:
    served = own_application(OwnModel("/models/tiny"))
    found = batch_application(served, {"tiny"}, on_a_cluster=False)
    assert found.application == served.application
    assert found.http_options.port != 8000, "a server that runs here is not in the way"
    assert batch_application(served, {"tiny"}, on_a_cluster=True).http_options.port == 8000
    with pytest.raises(ConfigError, match="'gpt-9'; this engine serves 'tiny'"):
        batch_application(served, {"tiny", "gpt-9"}, on_a_cluster=False)
