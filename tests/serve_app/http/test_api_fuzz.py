"""Any request that the API's own description allows, and many that it does not: never a 500, and nothing is left held.

The engine behind it is a fake; front end, admission, gate and HTTP server are the real ones. Requests are
drawn from the document that the service serves, the same in every run.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve_app.backends.base import ModelInfo
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import Gate
from serve_app.http.admin import Admin
from serve_app.http.openapi import OPERATIONS, document
from serve_app.http.page.feed import StatusFeed
from serve_app.http.page.page_routes import add_page
from serve_app.http.routes import Operations, build_ingress
from serve_app.http.vllm_routes import VllmRoutes
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked
from serve_app.referee.records.own_reader import OwnReader
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.wire.exchange import Exchange
from serve_app.streams.observed import SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.json_text import clean_key
from serve_app.text.tokenizer import Tokenizer
from tests.support.engines import settings as engine_settings
from tests.support.fake_operator import FakeWeights, exposition, replicas, status, well
from tests.support.front_ends import observed
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# The stream of the status page lasts 30 s; weights have tests of their own.
LEFT_OUT = ("/status/events", "/admin/weights", "/admin/pause", "/admin/resume")
# Of tool calls: JSON inside JSON, half of it what no template can show.
ARGUMENTS = [
    *(
        "{}",
        '{"city": "\\ud83d\\ude42"}',
        '{"a": [null, 1e400, {"b": "</tool_call>"}]}',
        '{"a": ' * 60 + "1" + "}" * 60,
    ),
    *('{"a": "\\ud800"}', '{"\\u0000": 1}', '{"a": ' + "[" * 900 + "]" * 900 + "}", "[" * 5000, "[]", "{", "\0"),
]
COMPUTING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate")
WITH_BODY = {f"{one.method} {one.path}" for one in OPERATIONS if one.body is not None}
TOKEN = "operator"


class Fuzzed:
    """A service over a real engine, every reply of which is compared with its request and its trace.

    accused: what was found in replies.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, serve_http: Callable[[FastAPI], int]) -> None:
        self.backend = TorchBackend(str(folder), "fake", engine_settings(max_model_len=64))
        self.accused: list[str] = []
        self._reader: OwnReader
        metrics = Metrics(PrometheusSink(), model_name="fake", pool="monolith")
        limits = SourceLimits(64, 20.0, max_queued_tokens=5000, max_first_token_s=20.0)
        checks = Checks(lambda _: True, lambda _: True, self._read, self._submit, self._judge, timeout_s=0.0)
        self.source = observed(
            PooledTokenSource(self.backend, metrics),
            metrics,
            limits,
            Records("r1", 64, eos_token_ids=tokenizer.eos_token_ids),
            select=checks.select,
            ended=lambda record, checked: checks.ended(record),
        )
        info = ModelInfo("fake", 64, tokenizer.vocab_size, "abcdef0123456789", str(folder), tokenizer.eos_token_ids)
        self._reader = OwnReader(info, tokenizer)
        self.app = build_ingress(
            FrontEnd(self.source, tokenizer, info, Limits(max_body_bytes=2**18, max_choices=8), checks=checks),
            operations=Operations(
                exposition, well, VllmRoutes({}, FakeWeights()), self.verdict, ResponseStore(10**6, 60.0)
            ),
            admin=Admin(replicas, replicas, rehearse=replicas),
            gate=Gate(Access(admin_token=TOKEN), metrics),
        )
        add_page(self.app, StatusFeed(status, status))
        self.app.router.on_startup.append(self.backend.start)
        self.app.router.on_shutdown.append(self.backend.stop)
        self.url = f"http://127.0.0.1:{serve_http(self.app)}"
        self.session = requests.Session()
        self.session.headers["authorization"] = f"Bearer {TOKEN}"

    def _read(self, exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
        answers = self._reader.answers(exchange, records)
        self.accused += [f"{one.broken_limit}: {exchange}" for one in answers if one.broken_limit]
        return answers

    def _submit(self, answer: Answer, reply_bytes: str) -> None:
        if reply_bytes not in ("agrees", "ended_early"):
            self.accused.append(f"{reply_bytes}: {answer}")

    async def _judge(self, answer: Answer) -> Checked:
        raise AssertionError("nobody asks for a verdict")

    async def verdict(self, reply_id: str) -> dict[str, Any] | None:
        return {"id": reply_id, "verdict": "verified"} if reply_id.startswith("a") else None

    def assert_idle(self) -> None:
        def is_idle() -> bool:
            usage = self.backend.usage()
            return usage.num_free_blocks == usage.num_blocks and not self.source._watched

        wait_for(is_idle, "letting go of every request")
        assert not self.accused
        assert self.source._backlog.num_tokens() == 0


@pytest.fixture(scope="module")
def fuzzed(tooled: Tokenizer, tokenizer_folder: Path, serve_http: Callable[[FastAPI], int]) -> Fuzzed:
    folder = write_tiny_model(tokenizer_folder / "model", vocab_size=tooled.vocab_size)
    for file in tokenizer_folder.glob("*.json"):
        shutil.copy(file, folder)
    return Fuzzed(tooled, folder, serve_http)


def narrowed(schema: Any) -> Any:
    """A schema with no token id beyond the fake's vocabulary."""
    if isinstance(schema, list):
        return [narrowed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "integer" and schema.get("maximum", 2**31) == 2**31 - 1 and schema.get("minimum") == 0:
        return schema | {"maximum": 300}
    return {key: narrowed(part) for key, part in schema.items()}


def described() -> dict[str, Any]:
    """The document, with models and token ids that are there (others give one error each time), and with time enough: a
    deadline that passes is a 504, and no fault."""
    fuzzed = [one for one in OPERATIONS if one.path not in LEFT_OUT]
    made = document({(one.method, one.path) for one in fuzzed}, version="1", needs_key=False)
    for name in ("TokenizeRequest", "DetokenizeRequest", "GenerateRequest"):
        made["components"]["schemas"][name]["properties"]["model"] = {"enum": ["fake", None]}
    for name in ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"):
        fields = made["components"]["schemas"][name]["properties"]
        fields["model"] = {"enum": ["fake"]}
        fields["timeout"] = {"type": "number", "minimum": 20, "maximum": 1000}
    _narrow_chats(made["components"]["schemas"])
    for methods in made["paths"].values():
        for parameter in methods.get("post", {}).get("parameters", ()):
            if parameter["name"] == "x-request-timeout":
                parameter["schema"]["pattern"] = "^[2-9][0-9]$"
    result: dict[str, Any] = narrowed(made)
    return result


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _narrow_chats(schemas: dict[str, Any]) -> None:
    """Mostly what fits together: fields of their role, and what this template and this engine have."""
    message, fields = schemas["Message"], schemas["ChatCompletionRequest"]["properties"]
    of_message = message["properties"]
    del of_message["tool_call_id"]
    message["required"] = ["role", "content"]
    kinds = of_message["content"]["oneOf"]
    of_message["content"] = {"oneOf": [kind for kind in kinds if kind != {"type": "null"}]}
    of_assistant = ("tool_calls", "reasoning", "reasoning_content")
    plain = {name: field for name, field in of_message.items() if name not in of_assistant}
    calling = of_message | {"role": {"const": "assistant"}}
    schemas["Message"] = {"anyOf": [message | {"properties": plain}, message | {"properties": calling}]}
    schemas["CalledFunction"]["properties"]["arguments"] = {"enum": ARGUMENTS}
    parameters = schemas["FunctionSpec"]["properties"]["parameters"]
    parameters["anyOf"] = [*parameters["anyOf"], {"enum": [{"type": "object"}, nested(60), nested(100)]}]
    fields["reasoning_effort"] = {"enum": [None, "none"]}
    schemas["FunctionCallItem"]["properties"]["arguments"] = {"enum": ARGUMENTS}
    schemas["Reasoning"]["properties"]["effort"] = {"enum": [None, "none"]}
    for name in ("ChatCompletionRequest", "ResponsesRequest"):
        schemas[name]["properties"]["chat_template_kwargs"] = {"enum": [None, {}]}
    del schemas["ResponsesRequest"]["properties"]["previous_response_id"]  # there is none that a stranger could name


API = {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(described()).get_all_operations()}


def assert_names_a_field(response: Any, case: Case) -> None:
    """Fail unless what an error complains of is a field or parameter of this endpoint, or one that was sent."""
    if not 400 <= response.status_code < 500 or "application/json" not in str(response.headers["content-type"]):
        return
    error = response.json()["error"]
    if error["param"] is None or "\ufffd" in error["param"]:  # a key that was made up, as far as it can be shown
        return
    body = next(one.body for one in OPERATIONS if f"{one.method} {one.path}" == case.operation.label)
    fields = set() if body is None else {field.alias or name for name, field in body.model_fields.items()}
    sent = set(case.body) if isinstance(case.body, dict) else set()
    named = {parameter.name for parameter in case.operation.iter_parameters()} | {"x-request-timeout", ""}
    if case.operation.label == "GET /v1/models/{name}":
        named.add("model")  # as OpenAI has it
    keys = {clean_key(key) for key in sent}
    root = error["param"].partition(".")[0]
    assert root in fields | named or any(error["param"].startswith(key) for key in keys), error


def examples(label: str) -> int:
    return 80 if label.partition(" ")[2] in COMPUTING else 20


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in API]
    + [(label, GenerationMode.NEGATIVE) for label in API if label in WITH_BODY],
)
def test_no_request_breaks_the_service(fuzzed: Fuzzed, label: str, mode: GenerationMode) -> None:
    seen: dict[int, int] = {}

    @settings(
        max_examples=examples(label),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=API[label].as_strategy(generation_mode=mode))
    def fuzz(case: Case) -> None:
        response = case.call(base_url=fuzzed.url, session=fuzzed.session, timeout=120)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        case.validate_response(response, checks=CHECKS)
        assert_names_a_field(response, case)

    fuzz()
    fuzzed.assert_idle()
    if label.startswith("POST") and mode is GenerationMode.POSITIVE:
        assert seen.get(200, 0) > 0, f"none of them was served, so little was tried: {seen}"
    if mode is GenerationMode.NEGATIVE:
        assert sum(count for status, count in seen.items() if 400 <= status < 500) > 0.5 * sum(seen.values()), seen


@pytest.mark.parametrize("label", API)
def test_no_value_at_an_edge_breaks_the_service(fuzzed: Fuzzed, label: str) -> None:
    """Each field by itself at the edges of what it may be, just beyond them, and as another type; other methods."""
    operation = API[label]
    cases = operation.schema.iter_coverage_cases(
        operation,
        generation_modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE],
        generation_config=operation.schema.config.generation_for(operation=operation, phase="coverage"),
    )
    for case in cases:
        response = case.call(base_url=fuzzed.url, session=fuzzed.session, timeout=120)
        case.validate_response(response, checks=CHECKS)
        assert_names_a_field(response, case)
    fuzzed.assert_idle()


def test_the_document_says_of_every_field_what_it_is() -> None:
    bodies = {one.body for one in OPERATIONS if one.body is not None}
    fields = {f"{body.__name__}.{name}": field for body in bodies for name, field in body.model_fields.items()}
    assert not [name for name, field in fields.items() if not field.description]


def test_the_document_is_the_one_of_the_routes(fuzzed: Fuzzed) -> None:
    """Each route but those of the page is described, and nothing that is not there."""
    served = httpx.get(f"{fuzzed.url}/openapi.json").json()
    reported = {(method.upper(), path) for path, methods in served["paths"].items() for method in methods}
    routes = {
        (method, route.path_format)
        for route in fuzzed.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    of_the_page = {("GET", "/"), ("GET", "/page/{name}"), ("GET", "/openapi.json")}
    catch_all = {(method, path) for method, path in routes if path == "/v1/{path}"}
    assert routes - catch_all - of_the_page == reported
    assert "security" not in served["paths"]["/v1/models"]["get"]
    assert served["paths"]["/admin/speculation"]["get"]["security"] == [{"key": []}]
    queries = {
        (method.upper(), path): {one["name"] for one in described["parameters"] if one["in"] == "query"}
        for path, methods in served["paths"].items()
        for method, described in methods.items()
    }
    assert queries == {
        (method, route.path_format): {one.alias for one in route.dependant.query_params}
        for route in fuzzed.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
        if (method, route.path_format) in reported
    }
    assert queries["POST", "/pause"] == {"mode", "clear_cache"}
    needing = document(reported, version="1", needs_key=True)["paths"]
    assert needing["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in needing["/healthz"]["get"]
