"""Chat messages and tools as clients send them."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.wire import HALF_PAIR, MAX_LEVELS, SUSPECT_ESCAPE, Many, OneOf, Wire, strings_in
from serve_app.text.json_text import CallArguments, repaired
from serve_app.text.schema_types import value_types
from speculative.errors import InvalidRequest


def _content_kind(value: Any) -> str:
    return "<nothing>" if value is None or value == [] else "<parts>" if isinstance(value, list) else "<text>"


def _nothing(value: Any) -> None:
    """Take no parts for no content."""


class TextPart(Wire):
    """One part of a message's content. Only text is served."""

    type: Annotated[str, OneOf(("text",), "text parts")]
    """Only `text` is served."""
    text: str
    """The part's text."""


def _is_deep(value: dict[str, Any]) -> bool:
    """Return whether a JSON object is nested deeper than is passed to templates."""
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for items in inner for item in items if type(item) in (list, dict)]
    return bool(level)


FunctionKind = Annotated[str, OneOf(("function",), "functions")]
ToolName = Annotated[str, Field(min_length=1, max_length=256)]


def _as_text(arguments: Any) -> Any:
    """Arguments that a client has parsed, as the text that they were."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


ArgumentsText = Annotated[str | None, BeforeValidator(_as_text)]


class CalledFunction(Wire):
    """The function that a tool call of the conversation called."""

    name: str
    """The function's name."""
    arguments: ArgumentsText = None
    """The text of a JSON object, or the object; what is none, and cannot be put right, counts as an empty one."""
    parsed_arguments: Any = None
    """Accepted, without effect."""


class ToolCall(Wire):
    """A tool call of the conversation, as an answer returned it."""

    id: str | None = None
    """The call's id, which its result names."""
    type: FunctionKind | None = "function"
    """Only `function` is served."""
    function: CalledFunction
    """`name` and `arguments` of the call."""
    index: int | None = None
    """Accepted, without effect."""

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: its arguments are an object."""
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments or "{}")}
        called = {"type": "function", "function": function}
        return called if self.id is None else {"id": self.id} | called


def _arguments(text: str) -> CallArguments:
    """The arguments of a call in the conversation, from what a model wrote: put right where they are no JSON, and none,
    as in vLLM, where that does not help. Else one bad call would end its conversation for good."""
    try:
        try:
            arguments = json.loads(text)
        except ValueError:
            text = repaired(text)
            arguments = json.loads(text)
        if SUSPECT_ESCAPE.search(text) and any(HALF_PAIR.search(one) for _, one in strings_in(arguments, "")):
            text = HALF_PAIR.sub("\ufffd", json.dumps(arguments, ensure_ascii=False))
            arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or _is_deep(arguments):
        arguments, text = {}, "{}"
    return CallArguments(arguments, text)


_OLD_ROLE = ("function", "is an old role; send the function's result as role tool.")


class Message(Wire):
    """One message of a conversation."""

    role: Annotated[str, OneOf(("system", "developer", "user", "assistant", "tool"), instead=_OLD_ROLE)]
    """The speaker. `developer` is shown as `system`."""
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[Many[TextPart], Field(min_length=1), Tag("<parts>")]
        | Annotated[None, BeforeValidator(_nothing), Tag("<nothing>")],
        Discriminator(_content_kind),
    ] = None
    """A text, or parts of type `text`, which are joined by line breaks."""
    name: str | None = None
    """The participant's name; the chat template decides whether it is shown."""
    refusal: str | None = None
    """An assistant's message that has no content, as another server returned it."""
    tool_calls: Many[ToolCall] | None = None
    """Calls of an assistant's message, as an answer returned them."""
    tool_call_id: str | None = None
    """The call that a message of role `tool` answers."""
    reasoning: str | None = None
    """Reasoning of an assistant's message; the chat template decides whether it is shown."""
    reasoning_content: str | None = None
    """Older name of `reasoning`."""
    function_call: None = None
    """Must be null: an old name of `tool_calls`."""
    audio: None = None
    """Must be null: audio is not served."""
    annotations: list[Any] | None = None
    """Accepted, without effect."""
    parsed: Any = None
    """Accepted, without effect."""

    def check(self, path: str) -> None:
        """Check the fields of the role; `path` is the message's position. Raises InvalidRequest: a field is missing, or
        belongs to another role."""
        of_assistant = ("tool_calls", "reasoning", "reasoning_content", "refusal")
        for name in of_assistant if self.role != "assistant" else ():
            if getattr(self, name):
                raise InvalidRequest(f"{path}.{name}", f"{path}.{name} belongs to messages of role assistant.")
        if self.role != "tool" and self.tool_call_id is not None:
            raise InvalidRequest(f"{path}.tool_call_id", f"{path}.tool_call_id belongs to messages of role tool.")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise InvalidRequest(f"{path}.content", f"The field '{path}.content' is missing.")

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or self.refusal or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        reported: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": None if self.content is None and self.tool_calls else self.text,
        }
        if self.tool_calls:
            reported["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if reasoning := self.reasoning or self.reasoning_content:
            reported |= {"reasoning": reasoning, "reasoning_content": reasoning}
        names = {"tool_call_id": self.tool_call_id, "name": self.name}
        return reported | {name: value for name, value in names.items() if value is not None}


class FunctionSpec(Wire):
    """A function that the model may call."""

    name: ToolName
    """The function's name."""
    description: str | None = None
    """Its description, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of an object."""
    strict: bool | None = None
    """Accepted, without effect: forced calls follow the schema in any case."""
    result: dict[str, Any] | None = Field(default=None, alias="return")
    """A JSON schema of the result, which the chat template may show."""

    @field_validator("result")
    @classmethod
    def _not_deep(cls, result: dict[str, Any] | None) -> dict[str, Any] | None:
        if _is_deep(result or {}):
            raise PydanticCustomError("schema", "may be nested at most {most} levels deep.", {"most": MAX_LEVELS})
        return result

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if "object" not in value_types(parameters or {}, parameters):
            raise PydanticCustomError("schema", "must be the JSON schema of an object.")
        if _is_deep(parameters or {}):
            raise PydanticCustomError("schema", "may be nested at most {most} levels deep.", {"most": MAX_LEVELS})
        return parameters


class Tool(Wire):
    """A tool that the model may use."""

    type: FunctionKind
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(by_alias=True, exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class FunctionName(Wire):
    """A function by its name."""

    name: ToolName


class NamedTool(Wire):
    """The tool that must be used."""

    type: FunctionKind
    function: FunctionName


def choice_kind(value: Any) -> str:
    """Return which kind of tool_choice a value is to be."""
    return "<function>" if isinstance(value, dict) else "<nothing>" if value is None else "<word>"


ChoiceWord = Annotated[str, OneOf(("none", "auto", "required"), further=("a function",))]

ToolChoice = Annotated[
    Annotated[ChoiceWord, Tag("<word>")] | Annotated[NamedTool, Tag("<function>")] | Annotated[None, Tag("<nothing>")],
    Discriminator(choice_kind),
]
