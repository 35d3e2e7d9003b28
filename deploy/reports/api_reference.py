"""The tables of docs/api.md, from the operations that are served and the models that parse their requests."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deploy.reports.markdown import with_section
from deploy.run.reference import bounds
from serve_app.access.access import Scope
from serve_app.access.request_gate import OPEN, scope_of
from serve_app.http.openapi import OPERATIONS
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.chat.messages import FunctionSpec, Message, ToolCall
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.requests import JsonSchemaFormat, ResponseFormat, StreamOptions, StructuredOutputs
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.wire import UNSUPPORTED, Harmless, Wire
from speculative.options import options_of
from speculative.request import SamplingParams

COMMAND = "api reference"

_GENERATION = (CompletionRequest, ChatCompletionRequest, ResponsesRequest)
OWN = {"receipt", "reproducible", "resume", "return_token_kinds", "speculate", "timeout", "verify"}
VLLMS = {
    *("add_generation_prompt", "add_special_tokens", "chat_template_kwargs", "continue_final_message"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
    *("allowed_token_ids", "bad_words", "ignore_eos", "min_tokens", "stop_token_ids"),
    *("min_p", "repetition_penalty", "top_k", "logprob_token_ids", "prompt_logprobs"),
    *("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
    *("cache_salt", "priority", "truncate_prompt_tokens"),
}
"""Fields of requests that generate, by whose they are; the others are OpenAI's."""
NESTED: dict[str, type[Wire]] = {
    "messages[]": Message,
    "messages[].tool_calls[]": ToolCall,
    "tools[].function": FunctionSpec,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchemaFormat,
    "structured_outputs": StructuredOutputs,
    "stream_options": StreamOptions,
}
"""Objects in requests that generate, by their places."""
_SAMPLING = options_of(SamplingParams)
"""The ranges of sampling parameters, which are checked after the request was parsed."""

Schema = Mapping[str, Any]


def api_reference() -> dict[str, str]:
    """Each generated section of docs/api.md, by its name."""
    return {
        "endpoints": "\n".join(_endpoints()),
        "fields": "\n".join(_generation_fields()),
        "objects": "\n".join(_objects()),
        "responses": "\n".join(_fields(_own_fields(ResponsesRequest, CompletionRequest), whose=True)),
        "other requests": "\n".join(_other_requests()),
    }


def with_reference(page: str) -> str:
    """The page with its generated sections as they are now."""
    for name, body in api_reference().items():
        page = with_section(page, COMMAND, name, body)
    return page


def _endpoints() -> Iterator[str]:
    yield "| endpoint | | key |\n|---|---|---|"
    for operation in OPERATIONS:
        summary = operation.summary.rstrip(".") + ("; streams with `stream`" if operation.streams else "")
        yield f"| `{operation.method} {operation.path}` | {summary} | {_key(operation.path)} |"


def _key(path: str) -> str:
    if path in OPEN:
        return "none"
    scope = scope_of(path)
    return "none unless closed" if scope is None else "`admin`" if scope is Scope.ADMIN else "`user`"


def _generation_fields() -> Iterator[str]:
    completion, chat = _schema(CompletionRequest), _schema(ChatCompletionRequest)
    shared = {name: field for name, field in completion.items() if chat.get(name) == field}
    for heading, fields in (
        ("`/v1/completions` and `/v1/chat/completions`", shared),
        ("`/v1/chat/completions` alone", {name: field for name, field in chat.items() if name not in shared}),
        ("`/v1/completions` alone", {name: field for name, field in completion.items() if name not in shared}),
    ):
        yield f"### {heading}\n"
        yield from _fields(fields, whose=True)
        yield ""
    yield "### Refused\n"
    yield "These fields of OpenAI's and vLLM's are refused by name, unless their value asks for nothing.\n"
    yield from _refused({name: rule for name, rule in UNSUPPORTED.items() if name not in completion | chat})


def _refused(fields: Mapping[str, tuple[Harmless, str]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, (_, why) in fields.items():
        names.setdefault(why, []).append(f"`{name}`")
    yield "| field | |\n|---|---|"
    for why, those in names.items():
        yield f"| {' '.join(those)} | {why.rstrip('.')} |"


def _other_requests() -> Iterator[str]:
    for operation in OPERATIONS:
        if operation.body is not None and operation.body not in _GENERATION:
            yield f"### `{operation.method} {operation.path}`\n"
            yield from _fields(_schema(operation.body), whose=False)
            yield ""


def _objects() -> Iterator[str]:
    for place, model in NESTED.items():
        yield f"### `{place}`\n"
        yield from _fields(_schema(model), whose=False)
        yield ""


def _own_fields(model: type[Wire], other: type[Wire]) -> dict[str, Schema]:
    inherited = _schema(other)
    return {name: field for name, field in _schema(model).items() if inherited.get(name) != field}


def _schema(model: type[Wire]) -> dict[str, Schema]:
    """The fields of a model, required ones first, with `required` in those."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    fields = {name: {**field, "required": name in required} for name, field in schema["properties"].items()}
    return dict(sorted(fields.items(), key=lambda item: not item[1]["required"]))


def _fields(fields: Mapping[str, Schema], *, whose: bool) -> Iterable[str]:
    yield "| field | type | of | |\n|---|---|---|---|" if whose else "| field | type | |\n|---|---|---|"
    for name, field in fields.items():
        kind = _in_range(name, _type(field)) + (", **required**" if field["required"] else "")
        owner = f"{_whose(name)} | " if whose else ""
        yield f"| `{name}` | {kind} | {owner}{' '.join(field['description'].split()).rstrip('.')} |"


def _in_range(name: str, kind: str) -> str:
    known = _SAMPLING.get(name)
    if known is None or kind != "number":
        return kind
    return f"{kind} {bounds({'minimum': known.least, 'maximum': known.most})}"


def _whose(name: str) -> str:
    return "truespec" if name in OWN else "vLLM" if name in VLLMS else "OpenAI"


def _type(field: Schema) -> str:
    options = field.get("anyOf") or field.get("oneOf") or [field]
    kinds = dict.fromkeys(_kind(option) for option in options if option.get("type") != "null")
    return " or ".join(kinds) or "null"


def _kind(option: Schema) -> str:
    if "$ref" in option:
        return "object"
    if values := [value for value in option.get("enum", ()) if value is not None]:
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    if "const" in option:
        return f"`{option['const']}`"
    if option.get("type") == "array":
        items = _type(option["items"]) if option.get("items") else "values"
        return f"list of ({items})" if " or " in items else f"list of {items}"
    return f"{option.get('type', 'any')} {bounds(option)}".strip()
