"""POST /v1/responses: what requests may contain, and the chat requests that they stand for."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from serve_app.openai.chat.chat_request import ChatCompletionRequest, Effort
from serve_app.openai.chat.messages import (
    ChoiceWord,
    FunctionKind,
    FunctionName,
    FunctionSpec,
    NamedTool,
    Tool,
    ToolName,
    choice_kind,
)
from serve_app.openai.requests import JsonSchemaFormat, ResponseFormat, WireRequest
from serve_app.openai.responses.response_items import AnyItem, Conversation, Item, MessageItem, content_kind
from serve_app.openai.wire import INT32_MAX, MAX_TOOLS, UNSUPPORTED_IN_RESPONSES, Many, OneOf, Wire
from speculative.request import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"

INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",  # the reasoning itself is in the answer
    # outputs of tools and inputs that are not served
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class Reasoning(Wire):
    """The amount of reasoning."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # reasoning is returned whole, and not summarized
    generate_summary: Literal["auto"] | None = None  # its older name
    context: Literal["auto"] | None = None  # the chat template decides which reasoning the model sees
    mode: Literal["standard"] | None = None


class _TypedFunction(Wire):
    type: FunctionKind


class FunctionTool(FunctionSpec, _TypedFunction):
    """A function that the model may call."""

    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = Field(None, alias="async")

    def for_chat(self) -> Tool:
        """The tool as chat has it."""
        spec = FunctionSpec(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=spec)


class ChosenFunction(_TypedFunction):
    """The function that must be called."""

    name: ToolName


class PlainFormat(Wire):
    """Text, or any JSON."""

    type: Annotated[str, OneOf(("text", "json_object"), further=("json_schema",))]

    def for_chat(self) -> ResponseFormat:
        """The format as chat has it."""
        return ResponseFormat(type=self.type)

    def echo(self) -> dict[str, Any]:
        """The format as a response repeats it."""
        return {"type": self.type}


class SchemaFormat(JsonSchemaFormat):
    """JSON that a schema describes."""

    type: str = Field(json_schema_extra={"const": "json_schema"})

    def for_chat(self) -> ResponseFormat:
        """The format as chat has it."""
        return ResponseFormat(type="json_schema", json_schema=self)

    def echo(self) -> dict[str, Any]:
        """The format as a response repeats it."""
        sent = {"type": self.type, "name": self.name, "description": self.description, "strict": self.strict}
        return sent | {"schema": json.loads(self.schema_text)}


def _format_kind(value: Any) -> str:
    if value is None:
        return "<nothing>"
    return "<schema>" if isinstance(value, dict) and value.get("type") == "json_schema" else "<plain>"


class TextConfig(Wire):
    """The form of the answer's text."""

    format: Annotated[
        Annotated[PlainFormat, Tag("<plain>")]
        | Annotated[SchemaFormat, Tag("<schema>")]
        | Annotated[None, Tag("<nothing>")],
        Discriminator(_format_kind),
    ] = None
    verbosity: Literal["medium"] | None = None  # there is no control of it


class ResponsesRequest(WireRequest):
    """POST /v1/responses."""

    unsupported: ClassVar = UNSUPPORTED_IN_RESPONSES

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Many[Item], Field(min_length=1), Tag("<parts>")],
        Discriminator(content_kind),
    ]
    """A text, or items: messages with text, `function_call`, `function_call_output`, `reasoning` (given to the chat
    template), and `item_reference` where responses are kept."""
    instructions: str | None = None
    """A message of the role `system` before the input."""
    previous_response_id: str | None = None
    """The response whose conversation this one continues; needs `responses.max_mib`."""
    store: bool | None = None
    """Keep the response, which needs `responses.max_mib`. Default: if the server keeps any."""
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    """The longest answer, in tokens, reasoning and calls included."""
    text: TextConfig | None = None
    """`format`: `text`, `json_object`, or `json_schema` with a schema."""
    reasoning: Reasoning | None = None
    """`effort`: a variable of the chat template, if it has it."""
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    """Functions that the model may call."""
    tool_choice: Annotated[
        Annotated[ChoiceWord, Tag("<word>")]
        | Annotated[ChosenFunction, Tag("<function>")]
        | Annotated[None, Tag("<nothing>")],
        Discriminator(choice_kind),
    ] = None
    """`auto`, `none`, `required`, or the function to call."""
    include: list[str] | None = Field(None, json_schema_extra={"items": {"enum": [*INCLUDABLE]}})
    """`message.output_text.logprobs`: the logprob of each token. Other values have no effect."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Logprobs of so many likeliest tokens at each position, too."""
    max_tool_calls: int | None = Field(None, ge=0, le=INT32_MAX)
    """Accepted, without effect: it limits tools that are not served."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads."""
    metadata: dict[str, str] | None = None
    """Returned with the response."""

    @field_validator("include")
    @classmethod
    def _known_parts(cls, include: list[str] | None) -> list[str] | None:
        if include is not None and not set(include) <= set(INCLUDABLE):
            raise PydanticCustomError("include", "may hold: {known}.", {"known": ", ".join(INCLUDABLE)})
        return include

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Without the inherited fields that are not served here."""
        described = handler.resolve_ref_schema(handler(schema))
        for name in cls.unsupported:
            described["properties"].pop(name, None)
        return described

    @property
    def items(self) -> list[AnyItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(type="message", role="user", content=self.input)]
        return list(self.input)

    @property
    def with_logprobs(self) -> bool:
        """Return whether the text comes with logprobs; to ask for the most likely tokens is to ask for them."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def conversation(self, earlier: Sequence[AnyItem], items: Sequence[AnyItem]) -> Conversation:
        """The conversation: instructions, the items of the response before, and those of the input."""
        conversation = Conversation()
        if self.instructions is not None:
            conversation.say("system", self.instructions, "instructions")
        for item in earlier:
            conversation.add(item, "previous_response_id")
        for number, item in enumerate(items):
            conversation.add(item, "input" if isinstance(self.input, str) else f"input.{number}")
        conversation.close()
        return conversation

    def as_chat(self, conversation: Conversation) -> ChatCompletionRequest:
        """The chat request that is answered in the same way; its values have been checked, but not yet together."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in WireRequest.model_fields}
        form = None if self.text is None else self.text.format
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        own: dict[str, Any] = {
            "messages": conversation.messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": None if form is None else form.for_chat(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": choice,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
        }
        return ChatCompletionRequest.model_construct(**(shared | own))

    def echo(self) -> dict[str, Any]:
        """The settings as a response repeats them, with their defaults."""
        form = None if self.text is None else self.text.format
        effort = None if self.reasoning is None else self.reasoning.effort
        chosen = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"} if form is None else form.echo(), "verbosity": "medium"},
            "tool_choice": chosen.model_dump() if isinstance(chosen, ChosenFunction) else chosen or "auto",
            "tools": [_echo_of(tool) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def _echo_of(tool: FunctionTool) -> dict[str, Any]:
    always = {"type": tool.type, "name": tool.name, "description": tool.description}
    return always | {"parameters": tool.parameters, "strict": tool.strict}
