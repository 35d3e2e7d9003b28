"""Responses that are kept, through the `openai` client library; tests/clients has the rest of it."""

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from fastapi import FastAPI

from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import Gate
from serve_app.http.routes import Operations, build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.text.tokenizer import Tokenizer
from tests.support.fake_operator import FakeKeys
from tests.support.fake_serving import BackendSource, Served, make_backend


@pytest.fixture(scope="module")
def served(tooled: Tokenizer, serve_http: Callable[[FastAPI], int]) -> Served:
    """A server that shows tools, keeps responses, and needs a key."""
    backend, script = make_backend(tooled, max_model_len=2048)
    backend._started = True
    source = BackendSource(backend)
    operations = Operations(kept=ResponseStore(10**6, 60.0))
    app = build_ingress(FrontEnd(source, tooled, backend.info), operations=operations, gate=Gate(Access(FakeKeys())))
    port = serve_http(app)
    return Served(f"http://127.0.0.1:{port}", port, backend, source, script)


@pytest.fixture
def keyed(served: Served) -> Iterator[openai.OpenAI]:
    yield served.client("key-1")
    served.close()
    served.wait_until_idle()


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
