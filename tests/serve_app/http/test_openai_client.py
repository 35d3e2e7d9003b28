"""The `openai` client library, unchanged, against the real server."""

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletionMessageParam

from serve_app.access.access import Access
from serve_app.access.request_gate import Gate
from serve_app.http.routes import PastReplies, build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.text.tokenizer import Tokenizer
from tests.support.fake_operator import FakeKeys
from tests.support.fake_serving import BackendSource, Served, make_backend

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


# ---- responses


@pytest.fixture(scope="module")
def served(tooled: Tokenizer, serve_http: Callable[[FastAPI], int]) -> Served:
    """A server that shows tools, keeps responses, and needs a key."""
    backend, script = make_backend(tooled, max_model_len=2048)
    backend._started = True
    source = BackendSource(backend)
    replies = PastReplies(kept=ResponseStore(10**6, 60.0))
    app = build_ingress(FrontEnd(source, tooled, backend.info), replies=replies, gate=Gate(Access(FakeKeys())))
    port = serve_http(app)
    return Served(f"http://127.0.0.1:{port}", port, backend, source, script)


@pytest.fixture
def keyed(served: Served) -> Iterator[openai.OpenAI]:
    served.script.say(TEXT)
    yield served.client("key-1")
    served.close()
    served.wait_until_idle()


def test_the_librarys_stream_helper_ends_with_the_whole_response(keyed: openai.OpenAI) -> None:
    whole = keyed.responses.create(model="fake", input="hi")
    with keyed.responses.stream(model="fake", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text == TEXT
    own = {"id", "created_at", "completed_at", "output"}
    assert final.to_dict().keys() == whole.to_dict().keys()
    assert {name: value for name, value in final.to_dict().items() if name not in own} == {
        name: value for name, value in whole.to_dict().items() if name not in own
    }


def test_a_response_is_shown_and_deleted_by_the_key_that_made_it(keyed: openai.OpenAI, served: Served) -> None:
    response = keyed.responses.create(model="fake", input="hi")
    other = served.client("key-2")
    with pytest.raises(openai.NotFoundError) as missing:
        other.responses.retrieve(response.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        other.responses.create(model="fake", input="hi", previous_response_id=response.id)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    assert keyed.responses.retrieve(response.id).to_dict() == response.to_dict()
    with pytest.raises(openai.BadRequestError, match="whole"):
        keyed.responses.retrieve(response.id, stream=True)
    keyed.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        keyed.responses.retrieve(response.id)
    for method in ("GET", "DELETE"):
        assert httpx.request(method, f"{served.url}/v1/responses/{response.id}").status_code == 401
