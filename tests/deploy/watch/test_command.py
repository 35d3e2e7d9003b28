"""`truespec watch files` and `truespec watch proxy`, as a user calls them."""

import itertools
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from deploy.cli.main import main
from deploy.run.ports import free_port
from serve_app.config.serve_file import HttpOptions
from serve_app.referee.book.transformers_model import TransformersModel

pytestmark = pytest.mark.slow

NUM_ROLLOUTS = 30


@pytest.fixture(scope="module")
def rollouts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sampled by transformers at temperature 1, with its own logprobs."""
    model, draw = TransformersModel(folder), random.Random(3)
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(NUM_ROLLOUTS):
            prompt = [draw.randrange(3, 512) for _ in range(6)]
            ids: list[int] = []
            logprobs: list[float] = []
            for _ in range(12):
                row = model.logits((*prompt, *ids, 0), len(prompt) + len(ids))[0].log_softmax(-1)
                token = draw.choices(range(512), row.exp().tolist())[0]
                ids.append(token)
                logprobs.append(float(row[token]))
            file.write(json.dumps({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}) + "\n")
    return path


def _free_port() -> int:
    return free_port(HttpOptions(host="127.0.0.1"))


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["watch", "files", *map(str, words)], catch_exceptions=False)


def test_sound_rollouts_pass(folder: Path, rollouts: Path, tmp_path: Path) -> None:
    found, page = tmp_path / "report.json", tmp_path / "report.html"
    options = ("--model", folder, "--precision", "float32", "--threads", 1, "--json", found, "--html", page)
    result = call(rollouts, *options)
    assert result.exit_code == 0, result.output
    report = json.loads(found.read_text())
    assert report["all"]["tokens"] == report["all"]["compared"] == report["all"]["drawn"] == 12 * NUM_ROLLOUTS
    assert report["all"]["tme"] == pytest.approx(1.0, abs=1e-3)
    assert report["findings"] == report["suspect"] == []
    assert "No alarm" in page.read_text()


@pytest.mark.parametrize(
    ("temperature", "noise", "said"),
    [(0.3, 0.0, "the model's distribution"), (1.0, 0.4, "drift")],
    ids=["drawn at another temperature, with right logprobs", "logprobs of other weights"],
)
def test_rollouts_of_another_model_fail(
    temperature: float, noise: float, said: str, folder: Path, rollouts: Path, tmp_path: Path
) -> None:
    draw, claimed = random.Random(4), tmp_path / "claimed.jsonl"
    lines = [json.loads(line) | {"temperature": temperature} for line in rollouts.read_text().splitlines()]
    for line in lines:
        line["logprobs"] = [value + draw.gauss(0, noise) for value in line["logprobs"]]
    claimed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = call(claimed, "--model", folder, "--precision", "float32", "--threads", 1)
    assert result.exit_code == 1
    assert said in result.output


def test_what_was_judged_until_an_interrupt_is_reported(folder: Path, rollouts: Path, tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    options = ("--model", str(folder), "--precision", "float32", "--threads", "1", "--json", str(found))
    command = [sys.executable, "-m", "deploy.cli.main", "watch", "files", "-", *options]
    lines = rollouts.read_bytes().splitlines(keepends=True)
    wrong = json.loads(lines[0])
    wrong["logprobs"] = [value + 9 for value in wrong["logprobs"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None and process.stdout is not None
        # The last line is cut off: the command waits for the rest of it with all others judged.
        process.stdin.write(b"".join([*lines[:9], json.dumps(wrong).encode(), b"\n", b"{"]))
        process.stdin.flush()
        for line in process.stderr:
            if b"10 records read, 10 answers judged" in line:
                break
        process.send_signal(signal.SIGINT)
        began = process.stdout.read(1)  # the report; a file that ended before it would be judged to its end
        process.stdin.close()
        said, heard = (began + process.stdout.read()).decode(), process.stderr.read().decode()
    assert process.returncode == 130, heard
    assert (
        "found so far" in line.decode() and "the report covers the answers judged so far" in heard and "suspect" in said
    )
    report = json.loads(found.read_text())
    assert report["interrupted"] and report["all"]["tokens"] == 120 and len(report["suspect"]) == 1


def test_nothing_that_can_be_compared_fails_too(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "texts.jsonl"
    empty.write_text(
        '{"request": {"prompt": "a"}, "response": {"choices": [{"text": "", "finish_reason": "length"}]}}\n'
    )
    result = call(empty, "--model", folder, "--threads", 1)
    assert result.exit_code == 1
    assert "no token ids" in result.output


@pytest.mark.parametrize("wrong", ["none.jsonl", "rollouts.txt"])
def test_records_and_servers_are_looked_at_before_a_model_is(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts.txt").write_text("no JSON\n")
    result = call(tmp_path / wrong, "--model", "none/such")
    assert result.exit_code == 1 and wrong in result.output and "none/such" not in result.output
    for command in (["audit"], ["calibrate", "--out", str(tmp_path / "t.json")]):
        result = CliRunner().invoke(main, ["watch", *command, "http://127.0.0.1:9", "--model", "none/such"])
        assert result.exit_code > 0 and "127.0.0.1:9" in result.output and "none/such" not in result.output


def test_a_proxy_is_ready_with_its_own_referee_whose_options_it_takes(folder: Path) -> None:
    ports = [str(_free_port()) for _ in range(2)]
    command = [sys.executable, "-m", "deploy.cli.main", "watch", "proxy", "http://127.0.0.1:9", "--port", ports[0]]
    options = ["--model", str(folder), "--referee-port", ports[1], "--precision", "float32", "--logprobs", "processed"]
    options += ["--default", "top_k=5", "--default", "top_p=0.9", "--keep-prompts", "--threads", "1"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: not line.startswith("Ready"), process.stderr))
        report = httpx.get(f"http://127.0.0.1:{ports[1]}/report.json").json()
        process.send_signal(signal.SIGINT)
    assert report["tolerance"]["source"] == "for float32", said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "none/such/model"), "The referee did not start"),
        (("--referee", "http://r", "--precision", "fp8"), "--precision is for the referee"),
    ],
)
def test_a_proxy_ends_where_its_referee_cannot_start(options: tuple[str, ...], said: str) -> None:
    proxy = ("proxy", "http://127.0.0.1:9", "--port", _free_port(), "--referee-port", _free_port())
    result = CliRunner().invoke(main, ["watch", *map(str, proxy), *options])
    assert result.exit_code > 0 and said in result.output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--default", "temperature"), "--default"),
        (("--default", "colour=1"), "--default"),
        (("--precision", "float32", "--tolerance", "t.json"), "--precision"),
        (("--tolerance", "none.json"), "--tolerance none.json"),
        (("--engine", "transformers", "--dtype", "bfloat16"), "--dtype"),
    ],
)
def test_bad_options_name_themselves(
    folder: Path, rollouts: Path, options: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(rollouts, "--model", folder, *options)
    assert result.exit_code == 1
    assert named in result.output
