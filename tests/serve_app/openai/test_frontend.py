import asyncio
import dataclasses
import json
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from serve_app.errors import ContextLengthExceeded, ModelNotFound, NoRoom, RateLimited, RequestAborted, reply_for
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.plan import choice_seed
from serve_app.streams.merge import merge
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, EngineOverloaded, HandoffRefused, InvalidRequest, RequestTimeout
from speculative.request import FinishReason, Request, TokenDelta, TokenKind, TokenLogprobs
from tests.support.fake_serving import BackendSource, make_backend
from tests.support.front_ends import (
    DeltaSource,
    chat,
    chunks_of,
    completion,
    counts_by,
    fake_front_end,
    front_end,
    info,
    observed,
    reply_to,
)


async def test_a_model_says_how_its_weights_are_rounded(tokenizer: Tokenizer) -> None:
    backend, _ = make_backend(tokenizer, max_model_len=100)
    served = dataclasses.replace(info(tokenizer), quantization="w4a8")
    front = FrontEnd(BackendSource(backend), tokenizer, served)
    assert front.model("m")["quantization"] == "w4a8"
    front.weights_switched(info(tokenizer))
    assert front.model("m")["quantization"] is None


def run_of(tokenizer: Tokenizer, text: str, index: int = 0, **fields: Any) -> TokenDelta:
    return TokenDelta(str(index), tuple(tokenizer.encode(text)), **fields)


# ---- text and stop strings


async def test_a_character_that_stays_half_ends_as_a_replacement_mark(tokenizer: Tokenizer) -> None:
    front, _, script = fake_front_end(tokenizer)
    script.say(tokenizer.encode("ok🙂"))
    half = len(tokenizer.encode("ok🙂")) - 1
    choice = (await reply_to(front, completion(max_tokens=half)))["choices"][0]
    assert choice["text"] == "ok\ufffd"
    assert choice["finish_reason"] == "length"


async def test_a_choice_that_meets_its_stop_string_is_aborted_alone(tokenizer: Tokenizer) -> None:
    source = DeltaSource(
        run_of(tokenizer, "x!y", 0),
        run_of(tokenizer, "more", 1),
        run_of(tokenizer, "late", 0, finish_reason=FinishReason.LENGTH),
        run_of(tokenizer, "end", 1, finish_reason=FinishReason.LENGTH),
    )
    metrics = Metrics(sink := PrometheusSink(), model_name="m", pool="monolith")
    reply = await reply_to(front_end(observed(source, metrics), tokenizer), completion(stop="!", n=2))
    assert counts_by(sink, "requests", "outcome") == {"stop": 1, "length": 1}, "as in the reply"
    assert [choice["text"] for choice in reply["choices"]] == ["x", "moreend"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "length"]
    assert source.aborted == [source.requests[0].request_id]
    assert source.num_open == 0


async def test_the_source_is_reported_of_a_stop_string_in_the_last_delta_and_of_no_other_end(
    tokenizer: Tokenizer,
) -> None:
    for text, reason in (("x!y", "stop"), ("xy", "length")):
        source = DeltaSource(run_of(tokenizer, text, finish_reason=FinishReason.LENGTH))
        reply = await reply_to(front_end(source, tokenizer), completion(stop="!"))
        assert reply["choices"][0]["finish_reason"] == reason
        assert source.aborted == ([source.requests[0].request_id] if reason == "stop" else [])
    source = DeltaSource(run_of(tokenizer, "x!"), *[run_of(tokenizer, "late")] * 5)
    await reply_to(front_end(source, tokenizer), completion(stop="!"))
    assert (source.num_given, source.num_open) == (1, 0), "nothing is drawn once all choices ended"


@pytest.mark.parametrize("prompts", [["a"], ["a", "b", "c"]])
async def test_how_a_request_ended_is_counted_as_its_client_is_reported(
    tokenizer: Tokenizer, prompts: list[str]
) -> None:
    backend, script = make_backend(tokenizer, max_model_len=100)
    await backend.start()
    ids = tokenizer.encode("one STOP")
    script.say(ids)
    sink = PrometheusSink()
    source = observed(BackendSource(backend), Metrics(sink, model_name="m", pool="monolith"))
    reply = await reply_to(front_end(source, tokenizer), completion(prompt=prompts, stop="STOP", max_tokens=len(ids)))
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    assert counts_by(sink, "requests", "outcome") == {"stop": len(prompts)}
    assert backend.aborted == [] and backend.num_live == 0


async def test_a_completion_keeps_the_space_between_itself_and_the_prompt(sentencepiece: Tokenizer) -> None:
    ids = tuple(sentencepiece.encode("world"))
    source = DeltaSource(TokenDelta("0", ids, finish_reason=FinishReason.LENGTH))
    reply = await reply_to(front_end(source, sentencepiece), completion())
    assert reply["choices"][0]["text"] == " world"


# ---- usage, logprobs, token ids


async def test_usage_counts_prompts_once_and_drafts_as_predictions(tokenizer: Tokenizer) -> None:
    front, _, script = fake_front_end(tokenizer, run_length=3, num_cached_tokens=2)
    script.say(list(range(10, 18)))
    reply = await reply_to(front, completion(n=2, prompt=[[5, 6, 7], [8, 9]], max_tokens=7))
    # Each choice: the first token, then two rounds of three tokens with three drafts of which two are accepted.
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 28,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 16, "rejected_prediction_tokens": 8},
    }


async def test_accepted_predictions_never_exceed_what_was_delivered(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("abcd"))
    kinds = (TokenKind.ACCEPTED,) * 7 + (TokenKind.RECOVERED,)
    source = DeltaSource(TokenDelta("0", (*ids, *tokenizer.encode("!!!!")), kinds, num_drafted=9, num_accepted=7))
    usage = (await reply_to(front_end(source, tokenizer), completion(stop="!")))["usage"]
    assert usage["completion_tokens"] == len(ids) + 1
    details = usage["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": len(ids) + 1, "rejected_prediction_tokens": 2}


async def test_a_stream_has_the_prompt_once_and_null_for_usage_up_to_the_last_chunk(tokenizer: Tokenizer) -> None:
    front, _, script = fake_front_end(tokenizer)
    script.say("one two three four")
    fields = {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = await chunks_of(front, completion(**fields))
    assert all(chunk["usage"] is None for chunk in chunks) and last["usage"] and last["choices"] == []
    told = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert told == [tokenizer.encode("hello"), *[None] * (len(chunks) - 1)]


async def test_chat_logprobs_carry_bytes_and_a_token_that_cannot_occur_is_finite(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    entry = TokenLogprobs(a, -0.5, 1, ((a, -0.5), (b, float("-inf"))))
    source = DeltaSource(TokenDelta("0", (a,), logprobs=(entry,), finish_reason=FinishReason.LENGTH))
    reply = await reply_to(front_end(source, tokenizer), chat(logprobs=True, top_logprobs=2))
    content = reply["choices"][0]["logprobs"]["content"]
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -9999.0, "bytes": [98]}]
    assert content == [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]


# ---- streams


@pytest.mark.parametrize("error", [EngineFault("secret"), RuntimeError("secret"), RequestTimeout("too long")])
async def test_a_later_error_ends_the_stream_with_an_error_event(tokenizer: Tokenizer, error: Exception) -> None:
    source = DeltaSource(run_of(tokenizer, "ab"), error)
    chunks = await chunks_of(front_end(source, tokenizer), completion(stream=True))
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert chunks[1] == reply_for(error).body()
    assert len(chunks) == 2
    assert "secret" not in json.dumps(chunks)
    assert source.num_open == 0


@pytest.mark.parametrize(
    ("delta", "expected", "words"),
    [
        (TokenDelta("0", finish_reason=FinishReason.ERROR, error="NaN row"), EngineFault, "NaN row"),
        (TokenDelta("0", finish_reason=FinishReason.ABORT), RequestAborted, "aborted"),
        (TokenDelta("0", (5,)), EngineFault, "ended before"),  # the stream ends, the request does not
        (TokenDelta("0", (5, 6), finish_reason=FinishReason.LENGTH), EngineFault, "2 tokens came with 0 logprobs"),
    ],
)
async def test_what_does_not_end_well_is_an_error(
    tokenizer: Tokenizer, delta: TokenDelta, expected: type[Exception], words: str
) -> None:
    source, logprobs = DeltaSource(delta), 0 if "logprobs" in words else None
    with pytest.raises(expected, match=words):
        await reply_to(front_end(source, tokenizer), completion(prompt=[1], logprobs=logprobs))
    assert source.num_open == 0


async def test_closing_a_stream_or_cancelling_frees_the_engine(tokenizer: Tokenizer) -> None:
    front, source, _ = fake_front_end(tokenizer, step_s=0.001)
    job = await front.prepare(completion(stream=True, n=3, prompt=["a", "b"], ignore_eos=True))
    async with aclosing(front.events(job)) as events:
        await anext(events)
        assert source._backend.num_live == 6
    assert source._backend.num_live == 0 and len(source._backend.aborted) == 6
    task = asyncio.create_task(reply_to(front, completion(n=2, ignore_eos=True)))
    while source._backend.num_live < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source._backend.num_live == 0


# ---- from the wire to requests


async def requests_of(tokenizer: Tokenizer, wire: Any) -> tuple[Request, ...]:
    return (await front_end(DeltaSource(), tokenizer).prepare(wire)).requests


async def test_what_could_never_be_served_is_refused_by_name(tokenizer: Tokenizer) -> None:
    limited = front_end(source := DeltaSource(), tokenizer, Limits(max_sequences=6))
    for fits in (completion(prompt=["a"] * 3, n=2), completion(n=6), chat(n=6)):
        assert len((await limited.prepare(fits)).requests) == 6
    for wire, kind, field, words in (
        (completion(prompt=["a"] * 4, n=2), InvalidRequest, "prompt", "4 prompts with 2 choices each are 8 sequences"),
        (completion(prompt=["a"] * 7), InvalidRequest, "prompt", "at most 6"),
        (completion(n=7), InvalidRequest, "n", "n asks for 7 choices"),
        (chat(n=7), InvalidRequest, "n", "at most 6"),
        (completion(model="other"), ModelNotFound, "model", "served: m"),
        (completion(prompt=[5] * 100), ContextLengthExceeded, "prompt", "100 tokens, and prompt has 100"),
        (chat(max_completion_tokens=99), ContextLengthExceeded, "max_completion_tokens", "may be at most"),
        (completion(prompt=[5] * 60, max_tokens=41), ContextLengthExceeded, "max_tokens", "60 of prompt and 41"),
        (completion(prompt=[5, 9999]), InvalidRequest, "prompt", "token id 9999"),
    ):
        with pytest.raises(kind, match=words) as caught:
            await limited.prepare(wire)
        assert caught.value.field == field and source.requests == ()


async def test_choices_of_one_prompt_share_all_but_id_and_seed(tokenizer: Tokenizer) -> None:
    first, second, third = await requests_of(tokenizer, completion(n=3, seed=-1, temperature=0.5, top_k=-1))
    assert first.prompt_token_ids == second.prompt_token_ids == tuple(tokenizer.encode("hello"))
    assert first.params == second.params == third.params
    assert first.params.top_k == 0
    assert first.seed == 2**64 - 1  # the two's complement of -1
    assert len({first.seed, second.seed, third.seed}) == 3
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    again = await requests_of(tokenizer, completion(n=3, seed=-1, temperature=0.5))
    assert [request.seed for request in again] == [first.seed, second.seed, third.seed]
    unseeded = await requests_of(tokenizer, completion(n=2))
    assert unseeded[0].seed != unseeded[1].seed
    listed = await requests_of(tokenizer, completion(prompt=["hello", "there"], n=2, seed=7))
    assert [request.seed for request in listed] == [7, choice_seed(7, 1)] * 2, "each is sampled as if it were alone"
    assert len({request.request_id for request in listed}) == 4


async def test_output_length_defaults_to_16_for_completions_and_to_all_that_fits_for_chat(tokenizer: Tokenizer) -> None:
    (old,) = await requests_of(tokenizer, completion(max_tokens=None))
    assert old.params.max_tokens == 16
    (new,) = await requests_of(tokenizer, chat())
    assert new.params.max_tokens == 100 - len(new.prompt_token_ids)
    (near_the_end,) = await requests_of(tokenizer, completion(prompt=[5] * 95, max_tokens=None))
    assert near_the_end.params.max_tokens == 5
    limited = front_end(DeltaSource(), tokenizer, Limits(default_max_tokens=7))
    assert (await limited.prepare(chat())).requests[0].params.max_tokens == 7


# ---- merge, errors


async def counted(closed: list[str], name: str, num_items: int) -> AsyncGenerator[str, None]:
    try:
        for index in range(num_items):
            await asyncio.sleep(0)
            yield f"{name}{index}"
    finally:
        closed.append(name)


async def test_merge_keeps_each_order_and_closes_all_also_when_one_fails() -> None:
    closed: list[str] = []
    items = [item async for item in merge([counted(closed, "a", 3), counted(closed, "b", 5)])]
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert [item for item in items if item[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    assert sorted(closed) == ["a", "b"]

    async def failing() -> AsyncGenerator[str, None]:
        yield "x"
        raise EngineFault("broken")

    closed.clear()
    with pytest.raises(EngineFault):
        async for _ in merge([counted(closed, "a", 1000), failing()]):
            pass
    assert closed == ["a"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("top_p", "bad"), 400, "invalid_value"),
        (ModelNotFound("model", "bad"), 404, "model_not_found"),
        (EngineOverloaded("full", 2.1), 429, "engine_overloaded"),
        (NoRoom("capacity", "full", 2.1), 429, "engine_overloaded"),
        (RateLimited("key_concurrency", "full", 2.1), 429, "rate_limit_exceeded"),
        (RequestAborted("gone"), 503, "request_aborted"),
        (RequestTimeout("slow"), 504, "request_timeout"),
        (EngineFault("secret"), 500, "engine_fault"),
        (HandoffRefused("model", "secret"), 500, "handoff_refused"),
        (ValueError("secret"), 500, "internal_error"),
    ],
)
def test_errors_have_their_status_also_after_a_journey(error: Exception, status: int, code: str) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        reply = reply_for(each)
        assert (reply.status, reply.code) == (status, code)
        assert "secret" not in reply.message
        assert reply.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
