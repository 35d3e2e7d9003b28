"""Deltas that are passed on together: nothing of them is lost on their way to a client, a record or a metric."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from serve_app.backends.base import Pace
from serve_app.backends.torch_backend import TorchBackend, _Inbox
from serve_app.referee.judge.answer import Answer
from serve_app.referee.records.records import Record, Records
from serve_app.streams.observed import SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig
from speculative.request import Round, TokenDelta
from tests.support.backend_conformance import serving
from tests.support.engines import settings
from tests.support.front_ends import chunks_of, completion, front_end, observed

FOR_EVER = 1000.0  # seconds: what waits for this does not come
DELTA = TokenDelta("r", (1,), rounds=(Round("token_wise", 1),))


async def served(
    folder: Path, tokenizer: Tokenizer, interval_s: float, **fields: Any
) -> tuple[list[dict[str, Any]], Answer, int]:
    """A stream's chunks, the answer that the referee gets, and the number of latencies that were observed."""
    records, sink, ended = Records("r1", 256), PrometheusSink(), list[Record]()
    config = settings(drafter=DrafterConfig.of(ngram_min=1), max_model_len=256)
    async with serving(TorchBackend(str(folder), "m", config, pace=Pace(interval_s))) as backend:
        metrics = Metrics(sink, model_name="m", pool="p")
        source = observed(
            PooledTokenSource(backend, metrics), metrics, SourceLimits(4, 300.0), records,
            ended=lambda record, _: ended.append(record),
        )  # fmt: skip
        wire = completion(max_tokens=90, temperature=0, ignore_eos=True, stream=True, return_token_kinds=True, **fields)
        chunks = await chunks_of(front_end(source, tokenizer), wire)
    (answer,) = (one.answer() for one in ended)
    assert answer is not None
    latencies = sum(sink.histogram("truespec_inter_token_latency_seconds").counts)
    return chunks, dataclasses.replace(answer, request=wire, began_at=0.0), latencies


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "return_token_ids": True}])
async def test_a_gathered_stream_says_and_records_what_one_by_step_does(
    folder: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    fields["stream_options"] = {"include_usage": True}
    (apart, answer, latencies), (joined, same, as_many) = [
        await served(folder, tokenizer, interval_s, **fields) for interval_s in (0.0, FOR_EVER)
    ]
    assert len(joined) < 15 < len(apart), "nothing was joined"

    def whole(chunks: list[dict[str, Any]], name: str) -> Any:
        return [part for one in chunks for choice in one["choices"] for part in choice.get(name) or ()]

    for name in ("text", "token_kinds", "token_ids", "token_logprobs"):
        assert whole(joined, name) == whole(apart, name)
    assert joined[-1]["usage"] == apart[-1]["usage"] and same == answer and as_many == latencies
    assert answer.num_drafted and len(answer.rounds) == latencies + 1


async def test_a_text_that_is_searched_gets_every_step_by_itself(folder: Path, tokenizer: Tokenizer) -> None:
    chunks, answer, _ = await served(folder, tokenizer, FOR_EVER, stop=["\0never"])
    assert len(chunks) >= len(answer.rounds)


async def test_tokens_wait_two_intervals_at_most_where_no_more_come() -> None:
    inbox = _Inbox(Pace(0.2), gathers=True)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        waiting = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        inbox.put(DELTA, began := loop.time())
        await asyncio.wait_for(waiting, 20)
    assert 0.15 < loop.time() - began < 5
