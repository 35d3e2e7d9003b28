"""A replica that answers HTTP: what it logs at its start, and what it hands to the referee."""

import json
import logging
import shutil
from pathlib import Path

import httpx
import pytest

from serve_app.backends.base import ModelInfo
from serve_app.config.files import parse_args
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.runtime import ReplicaRuntime, Reporter
from serve_app.http.routes import build_ingress
from serve_app.referee.judge.answer import Answer
from serve_app.referee.records.records import Records
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import StopMatcher, Tokenizer
from speculative.request import FinishReason, TokenDelta, TokenKind
from tests.support.front_ends import DeltaSource


def opened(folder: Path, source: DeltaSource, template: str | None = None, num_engines: int = 1) -> HttpFront:
    """The front of a replica that has the tokenizer of this folder, and replays all of its answers."""
    runtime = object.__new__(ReplicaRuntime)
    model = {"source": "fake", "chat_template": template}
    limits = {"max_ongoing_requests": 40}
    runtime.config = parse_args({"model": model, "replay": {"sample_rate": 1}, "limits": limits})
    runtime.metrics = Metrics(PrometheusSink(), model_name="m", pool="router")
    front = HttpFront(runtime, Reporter(runtime))
    front.open(source, Records("r1", 1000), ModelInfo("m", 1000, 340, "f", str(folder), (2,)), num_engines=num_engines)
    return front


async def test_what_its_source_could_never_take_is_refused_for_good(tokenizer_folder: Path) -> None:
    served = opened(tokenizer_folder, DeltaSource(), num_engines=2)._front_end
    assert served is not None and served.limits.max_sequences == 80


@pytest.mark.parametrize("lost", [False, True])
async def test_a_lost_stop_string_is_found_in_what_went_over_the_wire(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    ids = tuple(Tokenizer.from_folder(tokenizer_folder).encode_continuation("one two three"))
    kinds = (TokenKind.FIRST, *[TokenKind.BONUS] * (len(ids) - 1))
    submitted: list[Answer] = []
    monkeypatch.setattr(HttpFront, "_submit", lambda _, answer, how: submitted.append(answer))
    front = opened(tokenizer_folder, DeltaSource(TokenDelta("", ids, kinds, finish_reason=FinishReason.LENGTH)))
    if lost:
        monkeypatch.setattr(StopMatcher, "push", lambda _, text: text)
    served = front._front_end
    assert served is not None
    transport = httpx.ASGITransport(app=build_ingress(served))
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        body = {"model": "m", "prompt": "hello", "max_tokens": len(ids), "stop": " three"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    await front._checks.settled()
    assert [answer.broken_limit.startswith("wire: ") for answer in submitted] == [lost]


async def test_what_a_model_ends_with_and_contradicts_is_logged_at_start(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def started(folder: Path, template: str | None = None) -> list[tuple[int, str]]:
        """The lines of a replica's start, by level."""
        caplog.clear()
        with caplog.at_level(logging.INFO, "truespec.serve"):
            opened(folder, DeltaSource(), template)
        logged = [(one.levelno, one.getMessage()) for one in caplog.records if one.name == "truespec.serve"]
        return [one for one in logged if "access.keys_file" not in one[1]]

    ends = "An answer ends with any of the tokens 2 '<|im_end|>' (generation_config.json, tokenizer_config.json); 0 "
    (only,) = started(tokenizer_folder)
    assert only[0] == logging.INFO and only[1].startswith(ends)
    _, shipped = started(tokenizer_folder, "smollm2-tools")
    assert shipped[0] == logging.WARNING and "model.chat_template: smollm2-tools replaces" in shipped[1]
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"eos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    (folder / "config.json").write_text('{"vocab_size": 300}')
    logged = [text for _, text in started(folder)]
    assert len(logged) == 4
    assert "0 '<|endoftext|>' (generation_config.json, tokenizer_config.json)" in logged[0]
    assert "`add_bos_token` is true" in logged[1] and "`vocab_size` is 300: prompts with" in logged[2]
    assert "ends an answer with <|im_end|> (token 2), which no file names as an end token" in logged[3]
