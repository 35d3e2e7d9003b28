"""The `openai` client library, unchanged, against the real server."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from serve_app.text.tokenizer import Tokenizer
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
