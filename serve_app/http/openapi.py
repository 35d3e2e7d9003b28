"""GET /openapi.json: the API as an OpenAPI 3.1 document, generated from the models that parse the requests."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from serve_app.backends.base import PauseMode
from serve_app.http.access.access import Scope
from serve_app.http.access.request_gate import HEALTH, scope_of
from serve_app.http.admin import PauseOrder, RehearsalOrder, SpeculationOrder, WeightsOrder
from serve_app.http.vllm_routes import FinishUpdate, InitTransfer, StartUpdate, UpdateOrder
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.tokens.token_generation import GenerateRequest
from serve_app.openai.tokens.tokenization import DetokenizeRequest, TokenizeRequest
from serve_app.openai.wire import Wire

Schema = dict[str, Any]


def _object(required: Schema, **more: Schema) -> Schema:
    return {"type": "object", "required": [*required], "properties": required | more}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_STOPPED: Schema = {"type": ["string", "integer", "null"]}  # a stop string, or the id of a stop token

_SEEDED = {"reproducible": _FLAG, "reproducible_reason": _TEXT}  # if a seed was sent
_CHECKED = {"verdict": _TEXT, "verdicts": _list(_TEXT), "checked": _list(_TEXT), "receipts": _list({"type": "object"})}
_VERDICT = _object(
    {"index": _COUNT, "checked": _list(_TEXT)} | dict.fromkeys(("verdict", "reason", "distribution"), _TEXT)
)


def _reply(kind: str, *choice_fields: str) -> Schema:
    ended = {"index": _COUNT, "finish_reason": _MAYBE_TEXT, "stop_reason": _STOPPED}
    choice = _object(ended | {name: {} for name in choice_fields}, **_SEEDED)
    about = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT, "choices": _list(choice)}
    return _object(about, usage=_ref("Usage"), **_CHECKED)


_REPLIES: dict[str, Schema] = {
    "Error": _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _TEXT})}),
    "Usage": _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}),
    "Completion": _reply("text_completion", "text", "logprobs"),
    "ChatCompletion": _reply("chat.completion", "message", "logprobs"),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "model": _TEXT,
            "output": _list(_object({"type": {"enum": ["message", "function_call", "reasoning"]}, "id": _TEXT})),
            "incomplete_details": {"type": ["object", "null"]},
            "error": {"type": ["object", "null"]},
            "store": _FLAG,
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
        },
        **_SEEDED,
        **_CHECKED,
    ),
    "Deleted": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "root": _TEXT,
            "parent": _MAYBE_TEXT,
            "max_model_len": _COUNT,
            "quantization": _MAYBE_TEXT,
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Verdict": _object({"id": _TEXT, "verdict": _TEXT, "checked": _list(_TEXT), "choices": _list(_VERDICT)}),
    "Verdicts": _object({"verdicts": _list(_object({"id": _TEXT, "ended_at": {"type": "number"}, "verdict": _TEXT}))}),
    "Replicas": _object({"replicas": _list({"type": "object"})}),
    "Health": _object({"status": _TEXT}),
    "Status": {"type": "object"},
    "Version": _object({"version": _TEXT}),
    "Done": _object({"message": _TEXT}),
    "GeneratedTokens": _object(
        {
            "request_id": _TEXT,
            "choices": _list(_object({"index": _COUNT, "finish_reason": _MAYBE_TEXT, "token_ids": _list(_COUNT)})),
        }
    ),
    "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}),
    "Text": _object({"prompt": _TEXT}),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    reply: str  # a schema's name, or a content type without a schema
    body: type[Wire] | None = None
    streams: bool = False  # the reply may be server-sent events
    body_required: bool = True
    query: tuple[tuple[str, Schema], ...] = ()  # parameters in the URL, none of which is required


OPERATIONS = (
    Operation("GET", "/v1/models", "List the models.", "Models"),
    Operation("GET", "/v1/models/{name}", "Show one model.", "Model"),
    Operation("POST", "/v1/completions", "Continue prompts.", "Completion", CompletionRequest, streams=True),
    Operation("POST", "/v1/chat/completions", "Answer a conversation.", "ChatCompletion", ChatCompletionRequest,
              streams=True),
    Operation("POST", "/v1/responses", "Answer a conversation, as items.", "Response", ResponsesRequest, streams=True),
    Operation("GET", "/v1/responses/{response_id}", "Show a response that was kept.", "Response",
              query=(("stream", _FLAG),)),
    Operation("DELETE", "/v1/responses/{response_id}", "Forget a response that was kept.", "Deleted"),
    Operation("POST", "/inference/v1/generate", "Continue token ids.", "GeneratedTokens", GenerateRequest),
    Operation("GET", "/v1/verdicts/{reply_id}", "Return the verdict on a reply.", "Verdict"),
    Operation("GET", "/admin/speculation", "Return each replica's speculation state.", "Replicas"),
    Operation("POST", "/admin/speculation", "Set the speculation mode.", "Replicas", SpeculationOrder),
    Operation("GET", "/admin/verdicts", "List a replica's answers since a time, with their verdicts.", "Verdicts",
              query=(("replica", _TEXT), ("since", {"type": "number"}))),
    Operation("POST", "/admin/rehearsal", "Rehearse a fault on one replica.", "Replicas", RehearsalOrder),
    Operation("GET", "/admin/weights", "Return the weights that each replica serves.", "Replicas"),
    Operation("POST", "/admin/weights", "Update weights on every replica.", "Replicas", WeightsOrder),
    Operation("POST", "/admin/pause", "Stop starting requests on all replicas.", "Replicas", PauseOrder,
              body_required=False),
    Operation("POST", "/admin/resume", "Resume starting requests.", "Replicas"),
    *(Operation("GET", path, "Report whether this replica can serve.", "Health") for path in HEALTH),
    Operation("GET", "/version", "Report the server's version.", "Version"),
    Operation("POST", "/tokenize", "Tokenize a prompt or a conversation.", "Tokens", TokenizeRequest),
    Operation("POST", "/detokenize", "Turn token ids into text.", "Text", DetokenizeRequest),
    Operation("GET", "/tokenizer_info", "Describe the tokenizer.", "Status"),
    Operation("GET", "/server_info", "Return the engine's settings, as vLLM does.", "Status",
              query=(("config_format", {"enum": ["text", "json"]}),)),
    Operation("GET", "/get_world_size", "Count the replicas that hold weights.", "Status"),
    Operation("POST", "/init_weight_transfer_engine", "Check how weights are to be sent.", "Done", InitTransfer),
    Operation("POST", "/start_weight_update", "Begin a weight update.", "Done", StartUpdate, body_required=False),
    Operation("POST", "/update_weights", "Name the folder of new weights.", "Done", UpdateOrder),
    Operation("POST", "/finish_weight_update", "Update the weights on every replica.", "Done", FinishUpdate,
              body_required=False),
    Operation("GET", "/weight_info", "Return the version of the weights.", "Status"),
    Operation("POST", "/reset_prefix_cache", "Empty every replica's prefix cache.", "Status"),
    Operation("POST", "/pause", "Stop starting requests on all replicas, as vLLM does.", "Status",
              query=(("mode", {"enum": [*PauseMode]}), ("clear_cache", _FLAG))),
    Operation("POST", "/resume", "Resume starting requests, as vLLM does.", "Status"),
    Operation("GET", "/is_paused", "Report whether all replicas are paused.", "Status"),
    Operation("GET", "/metrics", "Metrics for Prometheus.", "text/plain"),
    Operation("GET", "/status", "The data of the status page.", "Status"),
    Operation("GET", "/status/history", "The last hour of the status page.", "Status"),
    Operation("GET", "/status/events", "Stream the status each second.", "text/event-stream"),
)  # fmt: skip

_HEADERS = (
    ("x-request-id", "Returned with the reply, and logged.", _TEXT),
    (
        "x-request-timeout",
        "Time limit for the whole request in seconds, above 0; same as `timeout` in the body.",
        _TEXT | {"pattern": r"^[0-9]{1,6}(\.[0-9]{1,6})?$"},
    ),
)


def document(routes: Collection[tuple[str, str]], *, version: str, needs_key: bool) -> Schema:
    """The document for the routes that are served.

    Args:
        routes: (method, path) of each.
        version: of this program.
        needs_key: whether users need a key; `/admin` always requires one.
    """
    served = [operation for operation in OPERATIONS if (operation.method, operation.path) in routes]
    models = sorted(
        {operation.body for operation in served if operation.body is not None}, key=lambda kind: kind.__name__
    )
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Schema] = {}
    for operation in served:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "truespec", "version": version, "description": "An OpenAI-compatible API."},
        "paths": paths,
        "components": {
            "schemas": made.get("$defs", {}) | _REPLIES,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, needs_key: bool) -> Schema:
    reported: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}_{operation.path.strip('/').replace('/', '_')}",
        "parameters": _parameters(operation),
        "responses": {"200": {"description": "Done.", "content": _content(operation)}}
        | {code: _failed(code) for code in ("4XX", "5XX")},
    }
    if operation.body is not None:
        schema = _ref(operation.body.__name__)
        reported["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": schema}},
        }
    scope = scope_of(operation.path)
    if scope is Scope.ADMIN or (scope is Scope.USER and needs_key):
        reported["security"] = [{"key": []}]
    return reported


def _parameters(operation: Operation) -> list[Schema]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    in_url = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    in_url += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query]
    if scope_of(operation.path) is not Scope.USER or operation.body is None:
        return in_url
    return in_url + [
        {"name": name, "in": "header", "description": text, "schema": schema} for name, text, schema in _HEADERS
    ]


def _content(operation: Operation) -> Schema:
    if "/" in operation.reply:
        return {operation.reply: {}}
    whole = {"application/json": {"schema": _ref(operation.reply)}}
    return whole | ({"text/event-stream": {}} if operation.streams else {})


def _failed(code: str) -> Schema:
    whose = "The request is invalid, or cannot be served now." if code == "4XX" else "The server failed."
    return {"description": whose, "content": {"application/json": {"schema": _ref("Error")}}}
