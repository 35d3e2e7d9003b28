"""The gate over HTTP: which routes need a key, how many requests one may run, what a refusal looks like."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from serve_app.http.access.access import Access
from serve_app.http.access.keys import KeyStore
from serve_app.http.access.request_gate import TRAINER, Gate
from serve_app.http.admin import Admin
from serve_app.http.page.feed import StatusFeed
from serve_app.http.page.page_routes import add_page
from serve_app.http.routes import Operations, build_ingress
from serve_app.http.vllm_routes import VllmRoutes
from serve_app.openai.asked import Limits
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from tests.serve_app.http.access.test_access_keys import file_with
from tests.serve_app.http.test_routes import error_of
from tests.support.fake_operator import FakeWeights, exposition, replicas, status, well
from tests.support.fake_serving import Served, ServeFake
from tests.support.front_ends import fake_front_end

KEYS: dict[str, dict[str, Any]] = {  # by id; the key itself is secret-<id>
    "user": {},
    "admin": {"scopes": ["admin"]},
    "one-at-a-time": {"max_concurrent": 1},
}
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 4}


class Guarded:
    def __init__(self, served: Served, sink: PrometheusSink) -> None:
        self.served = served
        self.sink = sink

    def ask(self, path: str, key: str | None, body: Any = None, **headers: str) -> httpx.Response:
        """GET, or POST of a body, with the key of an id."""
        if key is not None:
            headers["authorization"] = f"Bearer secret-{key}"
        url = self.served.url + path
        if body is None:
            return httpx.get(url, headers=headers, timeout=120)
        return httpx.post(url, json=body, headers=headers, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        found = [value for what, own, value in self.sink.samples() if what == name and labels.items() <= own.items()]
        return sum(found)


@pytest.fixture(scope="module")
def make(serve_fake: ServeFake, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Guarded]:
    keys = {name: {"key": f"secret-{name}", **own} for name, own in KEYS.items()}
    path = file_with(tmp_path_factory.mktemp("keys") / "keys.yaml", **keys)

    def make(**options: bool) -> Guarded:
        sink = PrometheusSink()
        access = Access(KeyStore(path).find)
        gate = Gate(access, Metrics(sink, model_name="fake", pool="decode"), **options)
        operations = Operations(exposition, well, kept=ResponseStore(10**6, 60.0))
        admin = Admin(replicas, replicas)
        page = StatusFeed(status, status)
        return Guarded(serve_fake(operations=operations, admin=admin, page=page, gate=gate, step_s=0.01), sink)

    return make


@pytest.fixture(scope="module")
def module_guarded(make: Callable[..., Guarded]) -> Guarded:
    return make()


@pytest.fixture
def guarded(module_guarded: Guarded) -> Iterator[Guarded]:
    module_guarded.served.script.clear()
    yield module_guarded
    module_guarded.served.wait_until_idle()


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/V1/models", "/%76%31/models", "/v1%2fmodels", "/page/../v1/models"]
)
def test_no_spelling_of_a_path_leads_around_the_gate(guarded: Guarded, path: str) -> None:
    with httpx.Client() as client:
        request = client.build_request("GET", guarded.served.url)
        request.url = request.url.copy_with(raw_path=path.encode())
        assert client.send(request).status_code in (401, 404)


OPEN = {"/", "/page/{name}", "/healthz", "/health", "/ping", "/metrics", "/openapi.json", "/version"}
FOR_ADMINS = {*TRAINER, "/admin/speculation", "/admin/weights", "/admin/pause", "/admin/resume"}


def test_what_each_route_of_the_whole_app_needs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = file_with(tmp_path / "keys.yaml", user={}, admin={"scopes": ["admin"]})
    access, weights = Access(KeyStore(path).find), FakeWeights()
    app = build_ingress(
        fake_front_end(tokenizer)[0],
        operations=Operations(exposition, well, VllmRoutes({}, weights)),
        admin=Admin(replicas, replicas, weights),
        gate=Gate(access),
    )
    add_page(app, StatusFeed(status, status))
    served = {(method, route.path) for route in app.routes for method in route.methods}  # type: ignore[attr-defined]
    with TestClient(app) as client:
        for method, route in served:
            url = re.sub(r"\{[^}]*\}", "page.js", route)

            def status_of(key: str, method: str = method, url: str = url) -> int:
                return client.request(method, url, headers={"authorization": f"Bearer {key}"}).status_code

            for denied in (client.request(method, url).status_code, status_of("unknown")):
                assert (denied == 401) == (route not in OPEN), route
            if route not in OPEN:
                assert status_of("user" if route in FOR_ADMINS else "admin") == 403, route
    assert {*OPEN, *FOR_ADMINS} <= {route for _, route in served}
    assert weights.asked == []


def test_operations_can_be_closed(make: Callable[..., Guarded]) -> None:
    closed = make(open_metrics=False, open_health=False)
    for path in ("/metrics", "/healthz", "/health", "/ping"):
        assert [closed.ask(path, key).status_code for key in (None, "unknown", "user", "admin")] == [401, 401, 200, 200]


def test_the_right_key_opens_and_a_refusal_has_openais_form(guarded: Guarded) -> None:
    assert (
        guarded.ask("/v1/models", "user").status_code == guarded.ask("/admin/speculation", "admin").status_code == 200
    )
    denied = guarded.ask("/v1/models", None)
    assert denied.headers["www-authenticate"] == "Bearer"
    assert denied.headers["x-request-id"]
    assert denied.json()["error"] == {
        "message": "This needs a valid key: send it as 'Authorization: Bearer KEY'.",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    forbidden = guarded.ask("/admin/speculation", "user").json()["error"]
    assert (forbidden["type"], forbidden["code"]) == ("permission_error", "forbidden")
    assert "admin" in forbidden["message"]
    assert guarded.metric("truespec_refusals_total", reason="unauthenticated") >= 1
    assert guarded.metric("truespec_refusals_total", reason="forbidden") >= 1


def test_a_response_is_shown_and_deleted_by_the_key_that_made_it(guarded: Guarded) -> None:
    own, other = (guarded.served.client(f"secret-{key}") for key in ("user", "one-at-a-time"))
    response = own.responses.create(model="fake", input="hi")
    with pytest.raises(openai.NotFoundError) as missing:
        other.responses.retrieve(response.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        other.responses.create(model="fake", input="hi", previous_response_id=response.id)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    assert own.responses.retrieve(response.id).to_dict() == response.to_dict()
    with pytest.raises(openai.BadRequestError, match="whole"):
        own.responses.retrieve(response.id, stream=True)
    own.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        own.responses.retrieve(response.id)
    for method in ("GET", "DELETE"):
        assert httpx.request(method, f"{guarded.served.url}/v1/responses/{response.id}").status_code == 401


# ---- limits


def test_a_key_has_so_many_requests_under_way(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = guarded.served.backend
    monkeypatch.setattr(backend, "config", dataclasses.replace(backend.config, step_s=0.15))  # 10 s, for a busy machine
    before = guarded.metric("truespec_refusals_total", reason="key_concurrency")
    long = HI | {"max_tokens": 200, "stream": True}
    headers = {"authorization": "Bearer secret-one-at-a-time"}
    url = f"{guarded.served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=long, headers=headers, timeout=120) as first:
        assert first.status_code == 200
        lines = first.iter_lines()
        next(lines)
        refused = guarded.ask("/v1/completions", "one-at-a-time", PROMPT)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert guarded.ask("/v1/completions", "user", PROMPT).status_code == 200, "others go on"
    guarded.served.wait_until_idle()  # the client left; what it held is free again
    assert guarded.ask("/v1/completions", "one-at-a-time", PROMPT).status_code == 200
    assert guarded.ask("/v1/completions", "one-at-a-time", {"nonsense": 1}).status_code == 400
    assert [guarded.ask("/tokenize", "one-at-a-time", {"prompt": "a"}).status_code for _ in range(2)] == [200, 200]
    assert guarded.ask("/v1/completions", "one-at-a-time", PROMPT).status_code == 200, "a refused one holds nothing"
    assert guarded.metric("truespec_refusals_total", reason="key_concurrency") == before + 1


# ---- secrets


HOSTILE = "hunter2-s3cret"


def hostile_requests(url: str) -> None:
    """Requests that try to have a key written somewhere."""
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/models", {}),
        ("GET", f"/v1/models/{HOSTILE}", {"headers": {"authorization": "Bearer secret-user"}}),
        ("POST", "/v1/completions", {"content": b"\xff{"}),
        ("POST", "/v1/completions", {"json": {"model": "fake", "prompt": "x", "authorization": HOSTILE}}),
        ("POST", "/v1/chat/completions", {"json": {"model": "fake", "messages": [{"role": HOSTILE, "content": "x"}]}}),
        ("POST", "/admin/speculation", {"json": {"mode": "off"}}),
        ("GET", "/status", {"headers": {"authorization": f"Basic {HOSTILE}"}}),
        ("GET", "/metrics", {}),
        ("GET", f"/nowhere?api_key={HOSTILE}", {}),
    ]
    for method, path, options in attempts:
        headers = {"authorization": f"Bearer {HOSTILE}", "x-request-id": "r1"} | options.pop("headers", {})
        response = httpx.request(method, url + path, headers=headers, timeout=120, **options)
        assert "secret-user" not in response.text
        if HOSTILE not in path:  # who puts it into a path is reported of that path
            assert HOSTILE not in response.text


def test_no_key_gets_into_logs_errors_or_metrics(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        hostile_requests(guarded.served.url)
        for key in ("user", "admin", "one-at-a-time"):
            body = PROMPT | {"priority": -1, "prompt": "a private prompt"}
            guarded.ask("/v1/completions", key, body)
        guarded.served.script.fail_at = 1
        assert guarded.ask("/v1/completions", "user", PROMPT | {"max_tokens": 9}).status_code == 500
    ours = [record for record in caplog.records if record.name.startswith(("serve_app", "truespec", "speculative"))]
    assert ours, "something was logged at all"
    reported = "\n".join(logging.Formatter("%(message)s").format(record) + repr(record.__dict__) for record in ours)
    assert not re.search(r"secret-(user|admin|one)", reported)
    assert "private prompt" not in reported
    for line in reported.splitlines():  # the path is what the client put there itself
        assert HOSTILE not in re.sub(r"/v1/models/\S+", "", line), line
    exposed = guarded.sink.exposition()[0].decode()
    assert "secret-" not in exposed and HOSTILE not in exposed


def test_the_service_has_a_limit_for_prompts_too(serve_fake: ServeFake) -> None:
    served = serve_fake(Limits(max_prompt_tokens=6))
    assert served.post("/v1/completions", **PROMPT | {"prompt": [5] * 6}).status_code == 200
    for path, body, param in (
        ("/v1/completions", PROMPT | {"prompt": [[5], [5] * 7]}, "prompt"),
        ("/v1/chat/completions", HI | {"messages": [{"role": "user", "content": "a long question, this"}]}, "messages"),
    ):
        refused = error_of(served.post(path, **body), 400)
        assert (refused["param"], refused["code"]) == (param, "context_length_exceeded")
        assert "the limit is 6" in refused["message"]
    assert not served.source.requests[1:], "none of a body is begun where one of its prompts is refused"


def test_responses_of_the_api_are_counted_by_code_and_nothing_else_is(guarded: Guarded) -> None:
    def counts() -> tuple[float, ...]:
        return tuple(guarded.metric("truespec_http_responses_total", code=code) for code in ("200", "400", "401"))

    before = counts()
    assert guarded.ask("/v1/completions", "user", PROMPT).status_code == 200
    assert guarded.ask("/v1/completions", "user", {**PROMPT, "max_tokens": -1}).status_code == 400
    assert guarded.ask("/v1/completions", None, PROMPT).status_code == 401
    assert guarded.ask("/metrics", None).status_code == guarded.ask("/healthz", None).status_code == 200
    guarded.served.wait_until_idle()
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 1, 1]
