"""The OpenAI API on the wire: what requests may hold, and what replies look like.

Requests are checked here as far as that needs neither model nor tokenizer. Replies are built as plain dictionaries, one
`Piece` of a choice at a time; a whole reply is rendered from the joined pieces by the same code as a streamed chunk.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from serve_app.backends.base import CallPart, Talk
from serve_app.errors import MalformedBody, UnknownParameter, UnsupportedParameter
from speculative.errors import InvalidRequest
from speculative.request import MAX_LOGPROBS, MAX_PRIORITY, MAX_SCORED_IDS, MAX_SEED, Structure

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of each
MAX_LOGIT_BIASES = 300
MAX_BAD_WORDS = 1024
MAX_TOOLS = 128
MAX_LEVELS = 64  # of lists and objects in what a chat template shows
LEGACY_MAX_TOKENS = 16  # what /v1/completions generates when nothing is said
_INT32_MAX = 2**31 - 1
_MAX_ECHO = 100  # characters of a name that a client made up

Harmless = Callable[[Any, Mapping[str, Any]], bool]
"""Whether a value of an unsupported field asks for nothing; sees the value and the whole body."""


def _one_of(*values: Any) -> Harmless:
    return lambda value, body: value is None or any(type(value) is type(v) and value == v for v in values)


def _empty(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or value in ([], {}, "")


def _same_as_n(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or (type(value) is int and value == (body.get("n") or 1))


_ONLY_CHAT = "is a field of /v1/chat/completions; send messages there."
_OLD_TOOLS = "is an old name; send tools and tool_choice."
_OLD_NAME = "is an old name; send structured_outputs with json, regex, choice or grammar in it."

UNSUPPORTED: dict[str, tuple[Harmless, str]] = {
    "tools": (_empty, _ONLY_CHAT),
    "tool_choice": (_one_of("none", "auto"), _ONLY_CHAT),
    "functions": (_empty, _OLD_TOOLS),
    "function_call": (_one_of("none", "auto"), _OLD_TOOLS),
    "echo": (_one_of(False), "echo is not served yet; put the prompt before the text yourself."),
    "suffix": (_empty, "filling in before a suffix is not served; send a prompt only."),
    "best_of": (_same_as_n, "only best_of = n is served; ask for n choices with logprobs and pick the best."),
    "modalities": (lambda value, body: value is None or value == ["text"], "only text is served."),
    "audio": (_empty, "audio is not served; only text is."),
    "prediction": (_empty, "predicted outputs are not served; the server drafts by itself."),
    "reasoning_effort": (_one_of("none"), _ONLY_CHAT),
    "chat_template_kwargs": (_empty, _ONLY_CHAT),
    "include_reasoning": (_one_of(True), "reasoning is always told, apart from the answer; pass over it."),
    "verbosity": (_one_of("medium"), "there is no verbosity control; ask for it in the prompt."),
    "web_search_options": (lambda value, body: value is None, "there is no web search."),
    "moderation": (lambda value, body: value is None, "there is no moderation."),
    "store": (_one_of(False), "nothing is stored; leave it out or send false."),
    "guided_json": (_empty, _OLD_NAME),
    "guided_regex": (_empty, _OLD_NAME),
    "guided_choice": (_empty, _OLD_NAME),
    "guided_grammar": (_empty, _OLD_NAME),
    "chat_template": (_empty, "the model's own chat template is used; send a ready prompt to /v1/completions instead."),
    "lora_request": (_empty, "an adapter is chosen by its name as `model`; GET /v1/models lists those that are there."),
}
"""Fields that OpenAI's or vLLM's API has and this server does not, with the values that ask for nothing. What an
endpoint has is not refused there."""

UNSUPPORTED_ENDPOINTS: dict[str, str] = {
    "embeddings": "embeddings are not served; this server generates text.",
    "responses": "the responses API is not served; use /v1/chat/completions.",
    "images": "images are not served; this server generates text.",
    "audio": "audio is not served; this server generates text.",
    "moderations": "moderation is not served; this server generates text.",
    "rerank": "reranking is not served; this server generates text.",
    "batches": "batches are not served; send the requests themselves.",
    "files": "files are not served; send text in the request.",
    "fine_tuning": "fine-tuning is not served.",
    "assistants": "assistants are not served; use /v1/chat/completions.",
    "threads": "threads are not served; use /v1/chat/completions.",
    "load_lora_adapter": "adapters are those of vllm.lora_modules in the configuration; add it there and restart.",
    "unload_lora_adapter": "adapters are those of vllm.lora_modules in the configuration; remove it there and restart.",
}
"""First path parts under /v1 that clients may try, and what to use instead."""


# ---------------------------------------------------------------- requests

T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that may be long. It is read up to its first fault: only that one is told, and each takes memory."""


def _content_kind(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<nothing>" if value is None else "<text>"


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "<text>" if not isinstance(value, list) else "<ids>"
    first = value[0]
    return "<texts>" if isinstance(first, str) else "<id lists>" if isinstance(first, list) else "<ids>"


class Wire(BaseModel):
    """Any object of a request's body: known fields only, and no value read as if it were of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, fields: Any) -> Any:
        """Of more fields than there are, the first unknown one is enough to be told."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.__pydantic_fields__):
            return fields
        known = {field.alias or name for name, field in cls.__pydantic_fields__.items()}
        unknown = next(name for name in fields if name not in known)
        return {name: value for name, value in fields.items() if name in known or name == unknown}

    def check_together(self) -> None:
        """Check fields against each other.

        Raises:
            InvalidRequest: two fields contradict each other.
        """


class TextPart(Wire):
    """One part of a message's content. Only text is served."""

    type: str = Field(json_schema_extra={"const": "text"})
    text: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, kind: str) -> str:
        if kind != "text":
            raise PydanticCustomError("unsupported", "only text parts are served, not '{kind}'.", {"kind": kind[:40]})
        return kind


def _is_deep(value: dict[str, Any]) -> bool:
    """Whether lists and objects are nested in a JSON object deeper than templates are given them."""
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for items in inner for item in items if type(item) in (list, dict)]
    return bool(level)


def _only_function(kind: str) -> str:
    if kind != "function":
        raise PydanticCustomError("unsupported", "only functions are served, not '{kind}'.", {"kind": kind[:40]})
    return kind


FunctionKind = Annotated[str, Field(json_schema_extra={"const": "function"}), AfterValidator(_only_function)]
ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(Wire):
    """What a tool call of the conversation called."""

    name: ToolName
    arguments: str
    parsed_arguments: Any = None  # accepted: what the `openai` client made of them


class ToolCall(Wire):
    """A tool call of the conversation, as an answer told it."""

    id: str | None = None
    type: FunctionKind = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The call as chat templates know it: its arguments are an object.

        Raises:
            InvalidRequest: they are not, or cannot be shown; `path` is where the call stands.
        """
        name, text = f"{path}.function.arguments", self.function.arguments or "{}"
        try:
            arguments = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(name, f"{name} must be the text of a JSON object. Leave out a call that was cut off.")
        if _is_deep(arguments):
            raise InvalidRequest(name, f"{name} may be nested at most {MAX_LEVELS} levels deep.")
        if _SUSPECT_ESCAPE.search(text) and any(_UNCLEAN.search(string) for _, string in _strings(arguments, "")):
            raise InvalidRequest(name, f"{name} {_NOT_WHOLE}")
        called = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return called if self.id is None else {"id": self.id} | called


_ROLES = ("system", "developer", "user", "assistant", "tool")


class Message(Wire):
    """One message of a conversation."""

    role: str = Field(json_schema_extra={"enum": [*_ROLES]})
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[Many[TextPart], Field(min_length=1), Tag("<parts>")]
        | Annotated[None, Tag("<nothing>")],
        Discriminator(_content_kind),
    ] = None
    name: str | None = None
    refusal: None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None  # of the call that a message of role tool answers
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    parsed: Any = None  # accepted: what the `openai` client made of the content

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role == "function":
            raise PydanticCustomError("unsupported", "is an old role; send the function's result as role tool.")
        if role not in _ROLES:
            raise PydanticCustomError("role", "must be system, developer, user, assistant or tool.")
        return role

    def check(self, path: str) -> None:
        """Check what belongs to the role; `path` is where the message stands.

        Raises:
            InvalidRequest: something is missing, or belongs to another role.
        """
        of_assistant = ("tool_calls", "reasoning", "reasoning_content")
        for name in of_assistant if self.role != "assistant" else ():
            if getattr(self, name):
                raise InvalidRequest(f"{path}.{name}", f"{path}.{name} belongs to messages of role assistant.")
        if self.role != "tool" and self.tool_call_id is not None:
            raise InvalidRequest(f"{path}.tool_call_id", f"{path}.tool_call_id belongs to messages of role tool.")
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{path}.content", f"The field '{path}.content' is missing.")

    @property
    def text(self) -> str:
        """The content, its parts put together."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self, path: str = "messages") -> dict[str, Any]:
        """The message as chat templates know it.

        Raises:
            InvalidRequest: the arguments of a call are damaged; `path` is where the message stands.
        """
        told: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            told["tool_calls"] = [call.for_template(f"{path}.tool_calls.{number}") for number, call in calls]
        if reasoning := self.reasoning or self.reasoning_content:
            told |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.role == "tool":
            of_tool = {"tool_call_id": self.tool_call_id, "name": self.name}
            told |= {name: value for name, value in of_tool.items() if value is not None}
        return told


class FunctionSpec(Wire):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object
    strict: bool | None = None  # accepted: calls that must be made keep to the schema in any case

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise PydanticCustomError("schema", "must be the JSON schema of an object.")
        if _is_deep(parameters or {}):
            raise PydanticCustomError("schema", "may be nested at most {most} levels deep.", {"most": MAX_LEVELS})
        return parameters


class Tool(Wire):
    """A tool that the model may use."""

    type: FunctionKind
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(Wire):
    """A function by its name."""

    name: ToolName


class NamedTool(Wire):
    """The tool that must be used."""

    type: FunctionKind
    function: FunctionName


_CHOICES = ("none", "auto", "required")


def _choice_kind(value: Any) -> str:
    return "<function>" if isinstance(value, dict) else "<nothing>" if value is None else "<word>"


def _known_choice(word: str) -> str:
    if word not in _CHOICES:
        raise PydanticCustomError("choice", "must be none, auto, required, or a function.")
    return word


ToolChoice = Annotated[
    Annotated[str, Field(json_schema_extra={"enum": [*_CHOICES]}), AfterValidator(_known_choice), Tag("<word>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[None, Tag("<nothing>")],
    Discriminator(_choice_kind),
]


class StreamOptions(Wire):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: OpenAI's padding of chunks, not done here


class JsonSchemaFormat(Wire):
    """A JSON schema as OpenAI's response_format wraps it. Every one is kept to strictly."""

    name: str
    description: str | None = None
    schema_text: str = Field(alias="schema")
    strict: bool | None = None

    @field_validator("schema_text", mode="before", json_schema_input_type=dict[str, Any])
    @classmethod
    def _to_text(cls, schema: Any) -> str:
        return _schema_text(schema)


_FORMATS = ("text", "json_object", "json_schema")


class ResponseFormat(Wire):
    """The form an answer must have, as OpenAI names it."""

    type: str = Field(json_schema_extra={"enum": [*_FORMATS]})
    json_schema: JsonSchemaFormat | None = None

    @field_validator("type")
    @classmethod
    def _known_type(cls, kind: str) -> str:
        if kind not in _FORMATS:
            raise PydanticCustomError("type", "must be text, json_object or json_schema.")
        return kind

    def structure(self) -> Structure | None:
        """What the engine keeps to; None for plain text.

        Raises:
            InvalidRequest: type and json_schema do not belong together.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format.json_schema",
                "response_format.json_schema goes with type = json_schema, and only with it.",
            )
        if self.json_schema is not None:
            return Structure("json_schema", self.json_schema.schema_text)
        return Structure("json_object") if self.type == "json_object" else None


class StructuredOutputs(Wire):
    """The form an answer must have, as vLLM names it: exactly one of the fields."""

    schema_text: str | None = Field(None, alias="json")  # an object, or its JSON text
    regex: str | None = Field(None, min_length=1)
    choice: Many[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)

    @field_validator("schema_text", mode="before", json_schema_input_type=dict[str, Any] | str | None)
    @classmethod
    def _to_text(cls, schema: Any) -> str | None:
        if isinstance(schema, str):
            try:
                schema = json.loads(schema, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise PydanticCustomError("schema", "must be a JSON schema; this text is not JSON.") from error
        return None if schema is None else _schema_text(schema)

    def structure(self) -> Structure:
        """What the engine keeps to.

        Raises:
            InvalidRequest: none or several are asked for.
        """
        structures = (
            None if self.schema_text is None else Structure("json_schema", self.schema_text),
            None if self.regex is None else Structure("regex", self.regex),
            None if self.choice is None else Structure("choice", json.dumps(self.choice)),
            None if self.grammar is None else Structure("grammar", self.grammar),
        )
        asked = [structure for structure in structures if structure is not None]
        if len(asked) != 1:
            raise InvalidRequest(
                "structured_outputs",
                f"structured_outputs takes exactly one of json, regex, choice and grammar; got {len(asked)}.",
            )
        return asked[0]


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise PydanticCustomError("schema", "must be a JSON schema: an object.")
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise PydanticCustomError("schema", "is nested too deeply.") from error


TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Seconds = Annotated[float, Field(ge=0.001, le=86400)]


class WireRequest(Wire):
    """What both generation endpoints take."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    min_tokens: int | None = Field(None, ge=0, le=_INT32_MAX)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_BAD_WORDS)
    allowed_token_ids: Many[TokenId] | None = Field(None, min_length=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reproducible: bool | None = None
    logprob_token_ids: list[TokenId] | None = Field(None, max_length=MAX_SCORED_IDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    n: int | None = Field(None, ge=1, le=_INT32_MAX)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_token_kinds: bool | None = None
    speculate: bool | None = None
    verify: bool | None = None  # the answer waits for its replay, and tells the verdict
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # the lower, the earlier
    timeout: Seconds | None = None  # for all of it, from its arrival
    resume: bool | None = None  # goes on elsewhere when the replica that decodes it is lost
    # accepted and not used: clients send them to be told apart, billed or cached
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # used where there are tools

    @field_validator("stop", mode="before")
    @classmethod
    def _few_whole_strings(cls, stop: Any) -> Any:
        strings = [stop] if isinstance(stop, str) else stop
        if strings is None:
            return None
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise PydanticCustomError("stop", "must be a string or a list of strings.")
        if len(strings) > MAX_STOP_STRINGS:
            raise PydanticCustomError("stop", "may hold at most {most} strings.", {"most": MAX_STOP_STRINGS})
        if "" in strings:
            raise PydanticCustomError("stop", "must not hold an empty string.")
        if max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
            most = {"most": MAX_STOP_CHARACTERS}
            raise PydanticCustomError("stop", "may hold strings of at most {most} characters.", most)
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_token_ids(cls, bias: Any) -> Any:
        if isinstance(bias, dict):
            if len(bias) > MAX_LOGIT_BIASES:
                raise PydanticCustomError("logit_bias", "may hold at most {most} tokens.", {"most": MAX_LOGIT_BIASES})
            if not all(_TOKEN_ID.fullmatch(token) for token in bias):
                raise PydanticCustomError("logit_bias", "must have token ids as its keys.")
        return bias

    @property
    def structure(self) -> Structure | None:
        """The form the answer must have, however it was asked for."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure()
        return None if self.response_format is None else self.response_format.structure()

    @property
    def structure_field(self) -> str:
        """The field that asks for the form."""
        if self.structured_outputs is None:
            return "response_format"
        kind = self.structured_outputs.structure().kind
        return f"structured_outputs.{'json' if kind == 'json_schema' else kind}"

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of SamplingParams, as far as they need neither model nor tokenizer; what was not sent is left out."""
        sent = {name: value for name in _AS_SENT if (value := getattr(self, name)) is not None}
        lists = {name: tuple(dict.fromkeys(value)) for name in _ID_LISTS if (value := getattr(self, name)) is not None}
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return sent | lists | {"logit_bias": bias, "top_k": max(self.top_k or 0, 0), "structure": self.structure}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were sent."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def check_together(self) -> None:
        """Check fields against each other.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream = true.")
        if self.structure is not None:
            self._check_structure("response_format" if self.structured_outputs is None else "structured_outputs")

    def _check_structure(self, name: str) -> None:
        if self.response_format is not None and name != "response_format" and self.response_format.type != "text":
            raise InvalidRequest(name, "response_format and structured_outputs both ask for a form; send one of them.")
        other = "min_tokens" if self.min_tokens else "ignore_eos" if self.ignore_eos else None
        if other is not None:
            raise InvalidRequest(name, f"{name} ends the answer by itself: it cannot be combined with {other}.")


# Fields that SamplingParams has by the same name: values, and lists of token ids.
_AS_SENT = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "prompt_logprobs",
    "speculate",
    "reproducible",
)
_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_TOKEN_ID = re.compile("[0-9]{1,10}")


# How a prompt that is not empty is described; that it is not is told in one way for all of them.
_NOT_EMPTY: dict[str, Any] = {
    "text": {"type": "string", "minLength": 1},
    "ids": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}},
}
_NOT_EMPTY |= {
    "texts": {"type": "array", "minItems": 1, "items": _NOT_EMPTY["text"]},
    "id lists": {"type": "array", "minItems": 1, "items": _NOT_EMPTY["ids"]},
}


class CompletionRequest(WireRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("<text>"), WithJsonSchema(_NOT_EMPTY["text"])]
        | Annotated[Many[str], Tag("<texts>"), WithJsonSchema(_NOT_EMPTY["texts"])]
        | Annotated[Many[int], Tag("<ids>"), WithJsonSchema(_NOT_EMPTY["ids"])]
        | Annotated[
            Many[Annotated[Many[int], Field(min_length=1)]], Tag("<id lists>"), WithJsonSchema(_NOT_EMPTY["id lists"])
        ],
        Discriminator(_prompt_kind),
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="after")
    @classmethod
    def _not_empty(cls, prompt: Any) -> Any:
        if not prompt or (isinstance(prompt, list) and "" in prompt):
            raise PydanticCustomError("empty", "must hold at least one token.")
        return prompt

    @property
    def num_logprobs(self) -> int | None:
        """As in SamplingParams: None = off, 0 = the emitted token only."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, however they were sent: each a text or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatCompletionRequest(WireRequest):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    reasoning_effort: str | None = Field(None, json_schema_extra={"enum": [*_EFFORTS, None]})
    chat_template_kwargs: dict[str, Any] | None = None  # variables that the chat template reads

    @field_validator("reasoning_effort")
    @classmethod
    def _known_effort(cls, effort: str | None) -> str | None:
        if effort is not None and effort not in _EFFORTS:
            raise PydanticCustomError("effort", "must be {known}.", {"known": ", ".join(_EFFORTS)})
        return effort

    @property
    def num_logprobs(self) -> int | None:
        """As in SamplingParams: None = off, 0 = the emitted token only."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, or its older name `max_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def check_together(self) -> None:
        """Check fields against each other.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs = true.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens differ; send one of them.")
        for number, message in enumerate(self.messages):
            message.check(f"messages.{number}")
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidRequest(f"tools.{number}.function.name", "tools holds two functions of this name.")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest("tool_choice", "tool_choice names a function that is not in tools.")
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice", "tool_choice = required needs tools.")
        if not names or choice == "none":
            return
        if self.structure is not None:
            name = "response_format" if self.structured_outputs is None else "structured_outputs"
            raise InvalidRequest(name, f"{name} asks for a form in which no tool can be called; send it without tools.")
        if choice not in (None, "auto"):
            self._check_structure("tool_choice")

    def talk(self) -> Talk:
        """The conversation and the tools as chat templates know them, and what is to become of the tools.

        Raises:
            InvalidRequest: a call of the conversation has damaged arguments.
        """
        messages = tuple(message.for_template(f"messages.{n}") for n, message in enumerate(self.messages))
        tools = tuple(tool.for_template() for tool in self.tools or ())
        choice = self.tool_choice or "auto"
        named = choice.function.name if isinstance(choice, NamedTool) else ""
        use: Any = "none" if not tools else "named" if named else choice
        return Talk(messages, tools, use, named, self.parallel_tool_calls is not False, self.chat_template_kwargs or {})


W = TypeVar("W", bound=Wire)

# What JSON text must hold for its strings to contain a NUL or a lone surrogate: UTF-8 itself can spell neither here.
_SUSPECT_ESCAPE = re.compile(r"\\u(0000|[dD][89a-fA-F])")
_UNCLEAN = re.compile("[\x00\ud800-\udfff]")
_NOT_WHOLE = "holds a NUL or half a surrogate pair; send whole characters."


def parse(body: bytes, kind: type[W]) -> W:
    """Read a request body.

    Raises:
        MalformedBody: not a JSON object.
        UnsupportedParameter, UnknownParameter: a field this server does not serve, or nobody knows.
        InvalidRequest: a value is wrong; `field` is its path, such as `messages.0.content`.
    """
    fields, known = _load(body), kind.model_fields
    supported = {}
    for name, value in fields.items():
        if name in known or name not in UNSUPPORTED:
            supported[name] = value
            continue
        harmless, reason = UNSUPPORTED[name]
        if not harmless(value, fields):
            raise UnsupportedParameter(name, f"{name}: {reason}")
    try:
        wire = kind.model_validate(supported)
    except ValidationError as error:
        _complain(error.errors(include_url=False)[0])
    wire.check_together()
    return wire


def _load(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise MalformedBody("", f"The body is not valid JSON in UTF-8: {reason}.") from error
    if not isinstance(fields, dict):
        raise MalformedBody("", "The body must be a JSON object.")
    if _SUSPECT_ESCAPE.search(text):
        _refuse_unclean(fields)
    return fields


def _refuse_unclean(fields: dict[str, Any]) -> None:
    try:
        for path, string in _strings(fields, ""):
            if _UNCLEAN.search(string):
                raise InvalidRequest(path, f"{path} {_NOT_WHOLE}")
    except RecursionError as error:
        raise MalformedBody("", "The body is nested too deeply.") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value with its path; a key counts as its own value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, dict):
        for key, item in value.items():
            clean = _UNCLEAN.sub("\ufffd", key[:_MAX_ECHO])
            yield clean, key
            yield from _strings(item, f"{path}.{clean}" if path else clean)


def _complain(error: ErrorDetails) -> NoReturn:
    """Turn pydantic's first complaint into ours, in OpenAI's words for the field."""
    *way, last = error["loc"]
    ours = [str(part) for part in way if not _is_tag(part)]
    if error["type"] == "extra_forbidden":  # the last part is the client's own name, and all others are ours
        path = ".".join((*ours, str(last)[:_MAX_ECHO]))
        raise UnknownParameter(path, f"Unknown field '{path}'. Remove it, or check its spelling.")
    path = ".".join(ours if _is_tag(last) else (*ours, str(last)))
    if error["type"] == "missing":
        raise InvalidRequest(path, f"The field '{path}' is missing.")
    if error["type"] == "unsupported":
        raise UnsupportedParameter(path, f"{path}: {error['msg']}")
    got = error.get("input")
    shown = f"{got}"[:24] if isinstance(got, int | float) else _json_type(got)
    raise InvalidRequest(path, f"{path}: {error['msg'].rstrip('.')}. Got {shown}.")


def _is_tag(part: str | int) -> bool:
    """Whether a part of a location is no field, but a kind that a value may have."""
    return isinstance(part, str) and part.startswith("<")


def _json_type(value: Any) -> str:
    names = {str: "a string", dict: "an object", list: "a list", type(None): "null"}
    return names.get(type(value), "something else")


# ---------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class TopEntry:
    """One candidate token of a logprobs entry."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """The logprobs entry of one delivered token."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[TopEntry, ...]  # most likely first
    text_offset: int  # characters of the choice before this token
    scored: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of logprob_token_ids


@dataclass(frozen=True, slots=True)
class RankedEntry:
    """What is told of one token at a position of the prompt."""

    token_id: int
    text: str
    logprob: float
    rank: int  # 1 = the most likely

    def to_wire(self) -> dict[str, Any]:
        """As vLLM writes it."""
        return {"logprob": self.logprob, "rank": self.rank, "decoded_token": self.text}


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to one choice of a reply."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_kinds: tuple[str, ...] = ()  # how each token came to be, as TokenKind says it
    logprobs: tuple[TokenEntry, ...] | None = None
    finish_reason: str | None = None
    first: bool = False  # the choice's first piece
    # of prompt tokens 1.., each the token itself and then the most likely; in the first piece of a prompt's choice 0
    prompt_logprobs: tuple[tuple[RankedEntry, ...], ...] | None = None
    weight_versions: tuple[tuple[str, int], ...] = ()  # which weights made so many tokens, in order
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def version_fields(self) -> dict[str, Any]:
        """`weight_versions`, where the weights changed in the middle."""
        if len(self.weight_versions) < 2:
            return {}
        return {"weight_versions": [{"version": name, "tokens": count} for name, count in self.weight_versions]}

    def prompt_fields(self) -> dict[str, Any]:
        """`prompt_logprobs` where they are told, as vLLM writes them: nothing is known of the first token."""
        if self.prompt_logprobs is None:
            return {}
        told = [{str(entry.token_id): entry.to_wire() for entry in entries} for entries in self.prompt_logprobs]
        return {"prompt_logprobs": [None, *told]}


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece that says what all the pieces of a choice say."""
    asked = pieces[0].logprobs is not None
    return Piece(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        token_kinds=tuple(kind for piece in pieces for kind in piece.token_kinds),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs or ()) if asked else None,
        finish_reason=pieces[-1].finish_reason,
        first=True,
        prompt_logprobs=pieces[0].prompt_logprobs,
        weight_versions=_runs(piece.weight_versions for piece in pieces),
    )


def _runs(parts: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    """Counts of tokens by version, neighbours of one version put together; a part without tokens says nothing new."""
    runs: list[tuple[str, int]] = []
    for version, count in (run for part in parts for run in part):
        if runs and (runs[-1][0] == version or count == 0):
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        elif runs and runs[-1][1] == 0:
            runs[-1] = (version, count)
        else:
            runs.append((version, count))
    return tuple(runs)


def metadata_of(versions: Iterable[str]) -> dict[str, Any]:
    """`metadata` with the weights' version, as SGLang's OpenAI endpoints have it: the newest, and all where there are
    several."""
    names = list(dict.fromkeys(versions))
    if not names:
        return {}
    several = {"weight_versions": names} if len(names) > 1 else {}
    return {"metadata": {"weight_version": names[-1], **several}}


@dataclass(slots=True)
class Usage:
    """Tokens of one reply: what was delivered, and how much of it came from drafts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def to_wire(self) -> dict[str, Any]:
        """OpenAI's usage object; draft tokens stand where OpenAI counts predicted outputs."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all chunks of one reply share."""

    reply_id: str
    created: int  # unix seconds
    model: str
    system_fingerprint: str
    prompts: tuple[tuple[int, ...], ...]  # token ids
    num_choices: int  # of each prompt
    with_token_ids: bool
    with_scored: bool  # logprobs of logprob_token_ids
    with_usage: bool  # streams only
    with_token_kinds: bool = False

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A reply object or a chunk."""
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream; it says `usage: null` when a usage chunk is to come, as OpenAI does."""
        envelope = self.envelope(kind, choices)
        if self.with_usage:
            envelope["usage"] = None
        return envelope

    def token_fields(self, piece: Piece) -> dict[str, Any]:
        """`token_ids` and plain `token_logprobs`, and `token_kinds`, where they were asked for."""
        fields: dict[str, Any] = {"token_kinds": list(piece.token_kinds)} if self.with_token_kinds else {}
        if not self.with_token_ids:
            return fields
        fields["token_ids"] = list(piece.token_ids)
        if piece.logprobs is not None:
            fields["token_logprobs"] = [entry.logprob for entry in piece.logprobs]
        return fields


class ReplyFormat(Protocol):
    """How one endpoint's replies look."""

    id_prefix: str

    def opening(self, head: ReplyHead) -> list[dict[str, Any]]:
        """The chunks before the first piece."""
        ...

    def chunk(self, head: ReplyHead, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece."""
        ...

    def closing_chunk(self, head: ReplyHead, told: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where there is something to tell of the whole reply."""
        ...

    def whole(self, head: ReplyHead, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The whole reply."""
        ...


class CompletionFormat:
    """Replies of /v1/completions. Chunks and whole replies share one shape."""

    id_prefix = "cmpl"
    _kind = "text_completion"

    def opening(self, head: ReplyHead) -> list[dict[str, Any]]:
        """No chunk: the text starts at once."""
        return []

    def chunk(self, head: ReplyHead, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece."""
        return head.chunk(self._kind, [self._choice(head, piece)]) | _metadata([piece])

    def closing_chunk(self, head: ReplyHead, told: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where there is something to tell of the whole reply."""
        return head.envelope(self._kind, []) | told

    def whole(self, head: ReplyHead, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The whole reply."""
        rendered = [self._choice(head, piece) for piece in choices]
        return head.envelope(self._kind, rendered) | {"usage": usage.to_wire()} | _metadata(choices)

    def _choice(self, head: ReplyHead, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else _legacy_logprobs(piece.logprobs, head.with_scored),
            "finish_reason": piece.finish_reason,
        }
        if head.with_token_ids and piece.first:
            choice["prompt_token_ids"] = list(head.prompts[piece.index // head.num_choices])
        return choice | head.token_fields(piece) | piece.version_fields() | piece.prompt_fields()


class ChatFormat:
    """Replies of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    _kind = "chat.completion"

    def opening(self, head: ReplyHead) -> list[dict[str, Any]]:
        """One chunk a choice that tells the role."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            head.chunk(self._kind + ".chunk", [_chat_choice(index, "delta", delta, None, None)])
            for index in range(head.num_choices)
        ]
        chunks[0] |= self._prompt_fields(head)
        return chunks

    def chunk(self, head: ReplyHead, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece."""
        says_other = piece.finish_reason is not None or piece.reasoning or piece.calls
        delta: dict[str, Any] = {"content": piece.text} if piece.text or not says_other else {}
        if piece.reasoning:
            delta["reasoning"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [_call_delta(part) for part in piece.calls]
        chunk = head.chunk(self._kind + ".chunk", [self._choice(head, piece, "delta", delta)])
        return chunk | _metadata([piece]) | piece.prompt_fields()

    def closing_chunk(self, head: ReplyHead, told: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where there is something to tell of the whole reply."""
        return head.envelope(self._kind + ".chunk", []) | told

    def whole(self, head: ReplyHead, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The whole reply."""
        rendered = [self._choice(head, piece, "message", _message(piece)) for piece in choices]
        prompt = self._prompt_fields(head) | choices[0].prompt_fields()
        return head.envelope(self._kind, rendered) | {"usage": usage.to_wire()} | _metadata(choices) | prompt

    def _choice(self, head: ReplyHead, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else _chat_logprobs(piece.logprobs)
        choice = _chat_choice(piece.index, name, said, logprobs, piece.finish_reason)
        return choice | head.token_fields(piece) | piece.version_fields()

    def _prompt_fields(self, head: ReplyHead) -> dict[str, Any]:
        return {"prompt_token_ids": list(head.prompts[0])} if head.with_token_ids else {}


def _metadata(pieces: Sequence[Piece]) -> dict[str, Any]:
    return metadata_of(version for piece in pieces for version, _ in piece.weight_versions)


def _message(piece: Piece) -> dict[str, Any]:
    says_other = piece.reasoning or piece.calls
    content = None if says_other and not piece.text else piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if piece.reasoning:
        message["reasoning"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = [
            {
                "id": part.call_id,
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            for part in piece.calls
        ]
    return message


def _call_delta(part: CallPart) -> dict[str, Any]:
    """A part of a call, as OpenAI streams it: the first names the call."""
    told: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.name is not None:
        told |= {"id": part.call_id, "type": "function"}
        told["function"] = {"name": part.name, "arguments": part.arguments}
    return told


def _chat_choice(index: int, name: str, said: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, name: said, "logprobs": logprobs, "finish_reason": finish}


def _legacy_logprobs(entries: Sequence[TokenEntry], with_scored: bool) -> dict[str, Any]:
    """The parallel arrays of the old completions API; the emitted token is always among the top ones."""
    scored = {"scored_logprobs": [_scored(entry) for entry in entries]} if with_scored else {}
    return scored | {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_legacy_top(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _scored(entry: TokenEntry) -> dict[str, float]:
    return {str(token): logprob for token, logprob in entry.scored}


def _legacy_top(entry: TokenEntry) -> dict[str, float]:
    top: dict[str, float] = {}
    for candidate in entry.top:
        top.setdefault(candidate.text, candidate.logprob)
    top.setdefault(entry.text, entry.logprob)
    return top


def _chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    def render(entry: TokenEntry | TopEntry) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.raw)}

    content = []
    for entry in entries:
        scored = {"scored": _scored(entry)} if entry.scored else {}
        content.append(render(entry) | {"top_logprobs": [render(candidate) for candidate in entry.top]} | scored)
    return {"content": content, "refusal": None}


def finite_logprob(logprob: float) -> float:
    """A logprob that JSON can hold: OpenAI writes -9999.0 for a token that cannot occur."""
    return -9999.0 if logprob == -math.inf else logprob


def model_card(name: str, created: int, max_model_len: int, *, root: str, parent: str | None) -> dict[str, Any]:
    """One entry of /v1/models, as vLLM writes it: an adapter's parent is the model, and its root the folder."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "truespec",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }
