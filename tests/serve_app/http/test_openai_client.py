"""The `openai` client library, unchanged, against the real server."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from serve_app.text.tokenizer import Tokenizer
from tests.support.fake_serving import Served

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TEXT = "one two three, four 🙂 five"


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    server.script.say(TEXT)
    return server.client()


def test_chat_whole_streamed_and_by_the_stream_helper(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "truespec"
    reply = client.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=3)
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model, reply.system_fingerprint) == ("chat.completion", "fake", "fp_fake-fingerp")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert bytes(byte for entry in choice.logprobs.content[:-1] for byte in entry.bytes or []) == TEXT.encode()
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1  # and the end token
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens > 0
    *chunks, last = client.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage == reply.usage
    with client.chat.completions.stream(model="fake", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT


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
    server.script.fail_at = 4
    with pytest.raises(openai.APIError, match="failed"):
        list(client.chat.completions.create(model="fake", messages=HI, stream=True))
