"""The `openai` client library, unchanged, against the real server."""

import asyncio
import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from serve_app.text.tokenizer import Tokenizer
from speculative.request import Structure
from tests.support.fake_backend import fake_logprob
from tests.support.fake_serving import Served

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TEXT = "one two three, four 🙂 five"


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    server.script.say(TEXT)
    return server.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "truespec"


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = client.chat.completions.create(model="fake", messages=HI)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == "fake"
    assert reply.system_fingerprint == "fp_fake-fingerp"
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1  # and the end token
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_librarys_own_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="a", max_tokens=30)
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == ("text_completion", TEXT, "stop")
    stream = client.completions.create(model="fake", prompt="a", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_length_is_a_finish_reason_and_16_the_default(client: openai.OpenAI, server: Served) -> None:
    server.script.say(TEXT * 3)
    reply = client.completions.create(model="fake", prompt="a")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


@pytest.mark.parametrize("stop", ["three", ["zzz", "three,"]])
def test_stop(client: openai.OpenAI, stop: str | list[str]) -> None:
    reply = client.chat.completions.create(model="fake", messages=HI, stop=stop)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one two ", "stop")
    stream = client.chat.completions.create(model="fake", messages=HI, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two "


def test_chat_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    reply = client.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=3)
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    ids = [*tokenizer.encode(TEXT), 2]
    assert [entry.logprob for entry in content] == [fake_logprob(token) for token in ids]
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes or []) == TEXT.encode()
    stream = client.chat.completions.create(model="fake", messages=HI, logprobs=True, stream=True)
    streamed = [
        entry.logprob
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == [entry.logprob for entry in content]


def test_completion_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    logprobs = client.completions.create(model="fake", prompt="a", max_tokens=5, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    ids = tokenizer.encode(TEXT)[:5]
    assert logprobs.tokens == [tokenizer.token_text(token) for token in ids]
    assert logprobs.token_logprobs == [fake_logprob(token) for token in ids]
    assert logprobs.text_offset is not None
    pairs = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(TEXT[start:].startswith(token) for start, token in pairs)


def test_n_choices_with_one_seed_differ_and_repeat(server: Served) -> None:
    server.script.clear()
    client = server.client()

    def ask(seed: int, n: int) -> list[str | None]:
        reply = client.chat.completions.create(model="fake", messages=HI, n=n, seed=seed, max_tokens=20)
        assert [choice.index for choice in reply.choices] == list(range(n))
        return [choice.message.content for choice in reply.choices]

    first = ask(11, 3)
    assert ask(11, 3) == first
    assert ask(11, 1) == first[:1]
    assert len(set(first)) == 3
    assert ask(-11, 3) != first


def test_several_prompts_keep_their_order(server: Served) -> None:
    server.script.say("first", "second", "third", "fourth")
    reply = server.client().completions.create(model="fake", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [
        (0, "first"), (1, "second"), (2, "third"), (3, "fourth"),
    ]  # fmt: skip


def test_tokens_in_and_tokens_out(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("some prompt")
    reply = client.completions.create(
        model="fake", prompt=prompt, max_tokens=40, logprobs=0, extra_body={"return_token_ids": True}
    )
    choice = reply.choices[0].model_dump()
    ids = [*tokenizer.encode(TEXT), 2]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == ids
    assert choice["token_logprobs"] == [fake_logprob(token) for token in ids]


def test_speculation_can_be_switched_off_for_one_request(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HI, extra_body={"speculate": False, "top_k": 5})
    assert reply.choices[0].message.content == TEXT
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_what_the_library_can_ask_of_sampling_reaches_the_engine(client: openai.OpenAI, server: Served) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    client.chat.completions.create(
        model="fake",
        messages=HI,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}},
        extra_body={"repetition_penalty": 1.1, "min_p": 0.05, "bad_words": ["two"]},
    )
    params = server.source.requests[-1].params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.logit_bias, params.min_p) == (((5, -100.0),), 0.05)
    assert params.structure == Structure("json_schema", json.dumps(schema))
    assert params.bad_words


def test_prompt_logprobs_and_scores_come_beside_what_the_library_knows(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 1, "logprob_token_ids": [5, 7]}
    reply = client.completions.create(model="fake", prompt=[4, 6, 8], extra_body=extra)
    reported = reply.choices[0].model_dump()
    assert [None if entry is None else sorted(entry) for entry in reported["prompt_logprobs"]] == [None, ["6"], ["8"]]
    assert {tuple(scores) for scores in reported["logprobs"]["scored_logprobs"]} == {("5", "7")}


def test_errors_are_the_librarys_own(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=HI)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HI, max_tokens=-1)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        client.embeddings.create(model="fake", input="a")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="fake", messages=HI, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    server.script.fail_at = 3
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake", messages=HI)


def test_an_error_amid_a_stream_is_raised_by_the_library(client: openai.OpenAI, server: Served) -> None:
    server.script.fail_at = 4
    stream = client.chat.completions.create(model="fake", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="failed"):
        list(stream)


def test_a_stream_closed_early_frees_the_engine(client: openai.OpenAI, server: Served) -> None:
    server.script.clear()
    stream = client.chat.completions.create(model="fake", messages=HI, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    server.wait_until_idle()


async def test_the_async_client_streams_many_at_once(server: Served) -> None:
    server.script.say(TEXT)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(ask() for _ in range(16))) == [TEXT] * 16
