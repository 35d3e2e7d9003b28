"""A replica that answers HTTP hands an answer to the referee where what it sent breaks the client's own request."""

import json
from pathlib import Path

import pytest

from serve_app.backends.base import ModelInfo
from serve_app.config.files import parse_args
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.runtime import ReplicaRuntime, Reporter
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.parsing import parse
from serve_app.referee.answer import Answer
from serve_app.referee.records import Records
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import StopStrings, Tokenizer
from speculative.request import FinishReason, TokenDelta, TokenKind
from tests.support.front_ends import DeltaSource

TEXT = "one two three"


@pytest.mark.parametrize(
    ("stop", "found"), [("four", None), ("two", "its text goes on behind stop string 0, or holds it")]
)
async def test_a_lost_stop_string_makes_an_answer_that_was_not_selected_suspect(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, stop: str, found: str | None
) -> None:
    ids = tuple(Tokenizer.from_folder(tokenizer_folder).encode(TEXT, continuation=True))
    kinds = (TokenKind.FIRST, *[TokenKind.BONUS] * (len(ids) - 1))
    runtime = object.__new__(ReplicaRuntime)
    runtime.config = parse_args({"model": {"source": "fake"}, "replay": {"sample_rate": 0}})
    runtime.metrics = Metrics([PrometheusSink()], model_name="m", pool="router")
    front = HttpFront(runtime, Reporter(runtime))
    submitted: list[Answer] = []
    monkeypatch.setattr(front, "_submit", submitted.append)
    source = DeltaSource(TokenDelta("", ids, kinds, finish_reason=FinishReason.LENGTH))
    front.open(source, Records("r1", 1000), ModelInfo("m", 1000, 340, "f", str(tokenizer_folder), (2,)))
    monkeypatch.setattr("serve_app.openai.frontend.StopStrings", lambda strings: StopStrings(()))
    body = {"model": "m", "prompt": "hello", "max_tokens": len(ids), "stop": stop}
    served = front._front_end
    assert served is not None
    await served.collect(await served.prepare(parse(json.dumps(body).encode(), CompletionRequest)))
    assert [answer.broken_limit for answer in submitted] == ([] if found is None else [found])
