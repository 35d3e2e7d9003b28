"""A replica that answers HTTP says at its start how answers end, and where the model's files disagree."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from serve_app.backends.base import ModelInfo
from serve_app.config.files import parse_args
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.runtime import ReplicaRuntime, Reporter
from serve_app.referee.records import Records
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from tests.support.front_ends import DeltaSource


def started(folder: Path, caplog: pytest.LogCaptureFixture, template: str | None) -> list[tuple[int, str]]:
    """The lines of a replica's start, by level."""
    caplog.clear()
    runtime = object.__new__(ReplicaRuntime)
    runtime.config = parse_args({"model": {"source": "fake", "chat_template": template}})
    runtime.metrics = Metrics([PrometheusSink()], model_name="m", pool="router")
    front = HttpFront(runtime, Reporter(runtime))
    with caplog.at_level(logging.INFO, "truespec.serve"):
        front.open(DeltaSource(), Records("r1", 1000), ModelInfo("m", 1000, 340, "f", str(folder), (2,)))
    return [(one.levelno, one.getMessage()) for one in caplog.records if one.name == "truespec.serve"]


async def test_what_a_model_ends_with_and_contradicts_is_logged_at_start(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = "An answer ends with any of the tokens 2 '<|im_end|>' (generation_config.json, tokenizer_config.json); 0 "
    (only,) = started(tokenizer_folder, caplog, None)
    assert only[0] == logging.INFO and only[1].startswith(ends)
    _, shipped = started(tokenizer_folder, caplog, "smollm2-tools")
    assert shipped[0] == logging.WARNING and "model.chat_template: smollm2-tools replaces" in shipped[1]
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"eos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    (folder / "config.json").write_text('{"vocab_size": 300}')
    logged = [text for _, text in started(folder, caplog, None)]
    assert len(logged) == 4
    assert "0 '<|endoftext|>' (generation_config.json, tokenizer_config.json)" in logged[0]
    assert "`add_bos_token` is true" in logged[1] and "`vocab_size` is 300: prompts with" in logged[2]
    assert "ends an answer with <|im_end|> (token 2), which no file names as an end token" in logged[3]
