"""The items of the Responses API that a client sends, and the chat messages that they make up."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.chat.messages import ArgumentsText, CalledFunction, Message, TextPart, ToolCall
from serve_app.openai.wire import Many, OneOf, Wire

Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Wire):
    """One part of an item's content. Only text is served; a refusal is text, too."""

    type: Annotated[str, OneOf(("input_text", "output_text", "refusal", "text"), "text parts")]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = Field(None, exclude=True)  # accepted: as an answer returned them
    prompt_cache_breakpoint: Any = None
    parsed: Any = Field(None, exclude=True)  # accepted: the content as parsed by the `openai` client

    def as_text(self) -> TextPart:
        """The part as chat has it."""
        return TextPart(type="text", text=self.text or self.refusal or "")


def content_kind(value: Any) -> str:
    """Return whether a text, or a list in its place, is to be read."""
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[ContentPart], Tag("<parts>")], Discriminator(content_kind)
]

_NO_ROLE = ("tool", "send a function's result as an item function_call_output.")
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class MessageItem(Wire):
    """A message, in the short form or as an answer returned it. Items of unknown types are taken for one, too, so that
    their type is what is wrong with them."""

    type: str | None = Field(None, json_schema_extra={"enum": ["message", None]})
    role: Annotated[str, OneOf(("user", "system", "developer", "assistant"), instead=_NO_ROLE)]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None  # of OpenAI's models

    @field_validator("type")
    @classmethod
    def _only_message(cls, kind: str | None) -> str | None:
        if kind not in (None, "message"):
            known = {"kind": kind[:40], "known": ", ".join(_KINDS[:-1])}
            raise PydanticCustomError("unsupported", "items of the type '{kind}' are not served; {known} are.", known)
        return kind


class FunctionCallItem(Wire):
    """A call that the model made."""

    type: Literal["function_call"]
    name: str
    arguments: ArgumentsText = None
    call_id: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: Any = None
    parsed_arguments: Any = None  # accepted: as parsed by the `openai` client


class FunctionOutputItem(Wire):
    """The output of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: Any = None


class ReasoningText(Wire):
    """A part of the model's reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Wire):
    """The model's reasoning before an answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # accepted: only who encrypted it can read it
    status: Status | None = None

    @property
    def text(self) -> str:
        """The reasoning; its summary where that is all."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(Wire):
    """An item of a response that the server kept."""

    type: Literal["item_reference"] | None = None
    id: str


def _item_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "<message>"
    kind = value.get("type")
    if kind is None and "id" in value and "role" not in value:
        return "<item_reference>"
    return f"<{kind}>" if isinstance(kind, str) and kind in _KINDS else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_item_kind),
]

AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference

_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[Item])


def items_from(kept: Sequence[Any]) -> list[AnyItem]:
    """Items that were kept, read again."""
    return _ITEMS.validate_python(list(kept))


@dataclass(slots=True)
class _Turn:
    """The words of the model in one turn: one message in chat, several items here."""

    path: str = ""
    reasoning: str = ""
    content: list[TextPart] | None = None
    calls: list[ToolCall] = field(default_factory=list)
    call_paths: list[str] = field(default_factory=list)


class Conversation:
    """Items put together to chat messages, each of which knows the items that it came from."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._paths: list[tuple[str, list[str]]] = []  # of each message: its own, and those of its calls
        self._turn = _Turn()

    def say(self, role: str, text: str, path: str) -> None:
        """Add a message of plain text."""
        self._add(Message(role=role, content=text), path)

    def add(self, item: AnyItem, path: str) -> None:
        """Add an item; a reference must have been replaced by what it refers to."""
        turn = self._turn
        if isinstance(item, ReasoningItem):
            if turn.content is not None or turn.calls:
                self.close()
            self._turn.reasoning += item.text
            self._turn.path = self._turn.path or path
        elif isinstance(item, FunctionCallItem):
            called = CalledFunction(name=item.name, arguments=item.arguments)
            turn.path = turn.path or path
            turn.calls.append(ToolCall(id=item.call_id, function=called))
            turn.call_paths.append(path)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if turn.content is not None and not turn.calls:
                self.close()
            self._turn.content, self._turn.path = [*(self._turn.content or ()), *_parts(item.content)], path
        elif isinstance(item, MessageItem):
            self._add(Message(role=item.role, content=_parts(item.content)), path)
        elif isinstance(item, FunctionOutputItem):
            name, output = item.name, _parts(item.output)
            self._add(Message(role="tool", content=output, tool_call_id=item.call_id, name=name), path)

    def close(self) -> None:
        """End the model's output. Reasoning alone, as of an answer that was cut off in it, is a message, too."""
        turn, self._turn = self._turn, _Turn()
        if turn.content is None and not turn.calls and not turn.reasoning:
            return
        said = Message(
            role="assistant", content=turn.content, tool_calls=turn.calls or None, reasoning=turn.reasoning or None
        )
        self._put(said, turn.path, turn.call_paths)

    def in_our_words(self, text: str) -> str:
        """A text with the names of the Responses API for the fields of a chat request."""

        def path_of(match: re.Match[str]) -> str:
            own, calls = self._paths[int(match["message"])]
            return own if match["calls"] is None else calls[int(match["call"] or 0)]

        text = _OF_MESSAGE.sub(path_of, text)
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return text

    def _add(self, message: Message, path: str) -> None:
        self.close()
        self._put(message, path, [])

    def _put(self, message: Message, path: str, call_paths: list[str]) -> None:
        self.messages.append(message)
        self._paths.append((path, call_paths))


_OF_MESSAGE = re.compile(r"\bmessages\.(?P<message>\d+)(?P<calls>\.tool_calls(\.(?P<call>\d+)(\.function)?)?)?")
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\bmessages\b", "input"),
        (r"\bmax_completion_tokens\b", "max_output_tokens"),
        (r"\breasoning_effort\b", "reasoning.effort"),
        (r"\bresponse_format(\.json_schema)?\b", "text.format"),
        (r"\btools\.(\d+)\.function\b", r"tools.\1"),
    )
)


def _parts(content: str | list[ContentPart]) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [part.as_text() for part in content] or [TextPart(type="text", text="")]
