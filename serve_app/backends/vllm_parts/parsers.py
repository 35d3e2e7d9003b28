"""vLLM's parsers of reasoning and tool calls, read as the front end reads (`Parsers`).

vLLM composes the two of a model in one `Parser`, which we ask as its own server does for streams: a whole answer says
what its stream says. Calls that have to be made are none of its business here: they come in a form of our own
(`serve_app.openai.tools.forced_calls`), and only the reasoning before them is parsed.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from serve_app.backends.base import CallPart, ChatPrompt, ParsedDelta
from speculative.errors import ConfigError, EngineFault, InvalidRequest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Else parsers expect calls that vLLM's own structured output (xgrammar's) has forced into the model's format.
os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

_OF_HARMONY = ("openai", "openai_gptoss")


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Check that vLLM has these parsers. Raises ConfigError: it has not, and the message lists those that it has."""
    for field, name, known in (
        ("tool_parser", tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name in _OF_HARMONY:
            raise ConfigError(f"vllm.{field} is {name}, which uses no chat template; it is not supported here.")
        if name is not None and name not in known:
            raise ConfigError(f"vllm.{field} is {name}, which the installed vLLM lacks; it has {', '.join(known)}.")


class VllmParsers:
    """Reads answers with vLLM's parsers.

    Args:
        tool_parser: its name; None = calls that the model makes as it likes are not read.
        reasoning_parser: its name; None = reasoning is content like any other text.
        folder: the checkpoint, or what of it a tokenizer is made of.

    Raises:
        ConfigError: vLLM has no such parser, or it cannot be used with the model's tokenizer.
    """

    def __init__(self, tool_parser: str | None, reasoning_parser: str | None, folder: str) -> None:
        check_names(tool_parser, reasoning_parser)
        self.reads_tools = tool_parser is not None
        self.reads_reasoning = reasoning_parser is not None
        self._tokenizer = get_tokenizer(folder)
        try:
            self._full = self._compose(tool_parser, reasoning_parser)
            self._without_reasoning = self._compose(tool_parser, None) if self.reads_reasoning else self._full
        except (ImportError, TypeError) as error:
            names = " and ".join(name for name in (tool_parser, reasoning_parser) if name)
            raise ConfigError(
                f"vllm.tool_parser, vllm.reasoning_parser: {names} cannot be used with this model's tokenizer: "
                f"{error.__cause__ or error}"
            ) from error

    def reading(self, chat: ChatPrompt, prompt: Sequence[int]) -> "VllmReading":
        """Return how answers to a conversation are to be read, whose prompt has these tokens. Raises InvalidRequest:
        the parser cannot do what is asked."""
        request = _request(chat)
        reading = VllmReading(self._full, self._tokenizer, request, prompt)
        if self.reads_reasoning and reading.thought_end == "":
            return VllmReading(self._without_reasoning, self._tokenizer, request, prompt)
        return reading

    def _compose(self, tool_parser: str | None, reasoning_parser: str | None) -> Any:
        return ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=tool_parser is not None,
            tokenizer=self._tokenizer,
        )


class VllmReading:
    """The way in which the answers to one request are read."""

    def __init__(self, kind: Any, tokenizer: Any, request: Any, prompt: Sequence[int]) -> None:
        self._kind = kind  # None: there is nothing to parse
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._request = request
        self.keeps_special = False
        self.thought_end: str | None = ""
        if kind is not None:
            parser = self._make()
            with _refusing():
                self._request = parser.adjust_request(request)
            self.keeps_special = not self._request.skip_special_tokens
            reasoning = parser.reasoning_parser
            thinks = reasoning is not None and not parser.is_reasoning_end(self._prompt)
            self.thought_end = (reasoning.reasoning_end_str or None) if thinks else ""

    def parser(self) -> "VllmReplyParser":
        """A parser of one answer."""
        return VllmReplyParser(None if self._kind is None else self._make(), self._request, self._prompt)

    def _make(self) -> Any:
        request = self._request
        return self._kind(self._tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs or {})


class VllmReplyParser:
    """Reads one answer. `parser` is None where all of it is content."""

    def __init__(self, parser: Any, request: Any, prompt: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt = prompt

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        """Return what the next part of the text says."""
        if self._parser is None:
            return ParsedDelta(text)
        try:
            delta = self._parser.parse_delta(
                delta_text=text,
                delta_token_ids=list(token_ids),
                request=self._request,
                prompt_token_ids=self._prompt,
                finished=last,
            )
        except Exception as error:
            raise EngineFault(f"vLLM's parser failed at the answer: {error!r}") from error
        if delta is None:
            return ParsedDelta()
        return ParsedDelta(delta.content or "", delta.reasoning or "", tuple(map(_part, delta.tool_calls)))


def _part(call: Any) -> CallPart:
    function = call.function
    arguments = "" if function is None else function.arguments or ""
    name = None if function is None else function.name
    # One that the model did not name gets an id in vLLM's form; vLLM's own function moves between versions.
    made = f"chatcmpl-tool-{uuid.uuid4().hex}" if name else None
    return CallPart(call.index, arguments, name, call.id or made)


def _request(chat: ChatPrompt) -> Any:
    """The request in vLLM's words, as far as parsers look at it; what has to be called is not theirs to find."""
    auto = chat.use == "auto"
    with _refusing():
        return ChatCompletionRequest(
            messages=[dict(message) for message in chat.messages],
            tools=[dict(tool) for tool in chat.tools] if auto else None,
            tool_choice="auto" if auto else "none",
            parallel_tool_calls=chat.parallel,
            chat_template_kwargs=dict(chat.variables) or None,
        )


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (VLLMClientError, ValueError) as error:
        field = getattr(error, "parameter", None) or "messages"
        raise InvalidRequest(field, f"{field}: vLLM's parser rejects this: {error}") from error
