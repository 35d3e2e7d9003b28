"""Tools and reasoning of chat requests: whether they can be served, the form that the answer must have, and how its
text is read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.backends.base import CallPart, ChatPrompt, Parsers, Reading, ReplyParser
from serve_app.errors import UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.tools.call_readers import (
    FORMATS,
    AnswerReader,
    CallReader,
    ForcedList,
    FreeCalls,
    NamedCall,
    NewId,
    format_of,
    new_call_id,
)
from serve_app.openai.tools.forced_calls import behind_thought, call_form, forces_calls
from serve_app.text.schemas import SchemaRefused, held
from serve_app.text.tokenizer import ChatTemplate, Tokenizer, shipped_templates
from speculative.request import FinishReason, Structure

# What a template is given in any case, by us or by transformers.
_GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"))


@dataclass(frozen=True, slots=True)
class ResponseParser:
    """The way in which the answers to one chat request are to be read."""

    chat: ChatPrompt
    form: Structure | None  # that they must have
    reading: Reading | None  # None: nobody separates reasoning, nor finds calls with a parser of vLLM's
    format: type[FreeCalls] | None = None  # of calls that the model makes; None: `reading` finds them, if anybody does
    new_id: NewId = new_call_id  # names calls that had to be made

    @property
    def keeps_special(self) -> bool:
        """Return whether the text is to hold special tokens."""
        return self.reading is not None and self.reading.keeps_special

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the text is to hold in any case."""
        return () if self.format is None else self.format.markers

    def parser(self) -> ReplyParser:
        """A parser of one answer."""
        inner = None if self.reading is None else self.reading.parser()
        calls = self._calls()
        if calls is None:
            assert inner is not None  # or there was nothing to read
            return inner
        return AnswerReader(calls, inner)

    def _calls(self) -> CallReader | None:
        if self.chat.use == "named":
            return NamedCall(self.chat.function, self.new_id)
        if self.chat.use == "required":
            return ForcedList(self.new_id)
        return None if self.format is None else self.format(self.chat.tools)

    def allowed(self, calls: Sequence[CallPart]) -> tuple[CallPart, ...]:
        """Calls, or parts of them, as far as an answer may hold any, or several."""
        if self.chat.use == "none":  # vLLM's parsers may read some at the end of a stream all the same
            return ()
        return tuple(calls) if self.chat.parallel else tuple(part for part in calls if part.index == 0)

    def reason(self, reason: str | None, *, called: bool) -> str | None:
        """Return the finish reason; `tool_calls`, as OpenAI has it, where the model chose to call a tool."""
        chose = called and self.chat.use != "named"
        return "tool_calls" if chose and reason == FinishReason.STOP.value else reason


class ChatPreprocessor:
    """Takes chat requests in, with one model's chat template and its parsers."""

    def __init__(self, tokenizer: Tokenizer, parsers: Parsers | None = None) -> None:
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._format = format_of(tokenizer)

    def chat_prompt(self, wire: ChatCompletionRequest) -> ChatPrompt:
        """The conversation and its tools, as far as the chat template shows them to the model. Raises
        UnsupportedParameter: it does not, or nobody here can read the calls."""
        chat = wire.chat_prompt()
        template = self._tokenizer.chat_template(with_tools=bool(chat.tools))
        self._check_tools(wire, chat, template)
        known = template.variables - _GIVEN
        for name in chat.variables:
            if name not in known or name.endswith("_token"):
                raise UnsupportedParameter(
                    f"chat_template_kwargs.{name[:100]}",
                    f"chat_template_kwargs: the model's chat template has no variable {name[:100]!r}; "
                    f"it has: {', '.join(sorted(known)) or 'none'}.",
                )
        effort, settings = wire.reasoning_effort, {}
        if effort is not None:  # by the names that the template has for that, as vLLM sets them
            wanted = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            settings = {name: value for name, value in wanted.items() if name in template.variables}
            if not settings and effort != "none":
                raise UnsupportedParameter(
                    "reasoning_effort", "reasoning_effort: the model's chat template has no setting for the effort."
                )
        return dataclasses.replace(chat, variables=settings | dict(chat.variables))

    def answers(self, chat: ChatPrompt, prompt: Sequence[int], form: Structure | None) -> ResponseParser | None:
        """Return how the answers to a prompt are to be read, that are to have a form; None where all their text is
        content. Raises UnsupportedParameter: the form that is asked for cannot start after the model's reasoning."""
        parsers, form = self._parsers, call_form(chat) if forces_calls(chat) else form
        finds_calls = parsers is not None and parsers.reads_tools
        reads = parsers is not None and (parsers.reads_reasoning or (finds_calls and chat.use == "auto"))
        reading = parsers.reading(chat, prompt) if parsers is not None and reads else None
        own = self._format if chat.use == "auto" and not finds_calls else None
        if reading is None and own is None and not forces_calls(chat):
            return None
        if form is not None and reading is not None and reading.thought_end is None:
            field = "tool_choice" if forces_calls(chat) else "response_format"
            raise UnsupportedParameter(
                field, f"{field}: the model reasons first, and its parser does not say where that ends; leave it out."
            )
        if form is not None and reading is not None and reading.thought_end:
            tokenizer, end = self._tokenizer, reading.thought_end
            form = behind_thought(form, end, tokenizer.added_id(end), tokenizer.eos_token_ids)
        new_id = new_call_id if self._format is None else self._format.new_id
        return ResponseParser(chat, form, reading, own, new_id)

    def _check_tools(self, wire: ChatCompletionRequest, chat: ChatPrompt, template: ChatTemplate) -> None:
        shipped = " or ".join(shipped_templates())
        fix = f"Set model.chat_template to one that does; for ChatML models {shipped} comes with the package."
        if chat.use != "none" and template.source and "tools" not in template.variables:
            raise UnsupportedParameter("tools", f"tools: the chat template does not show the model any. {fix}")
        for number, tool in enumerate(chat.tools if forces_calls(chat) else ()):
            if chat.use == "named" and tool["function"]["name"] != chat.function:
                continue  # no call of it is to be made
            try:
                held(tool["function"].get("parameters") or {})
            except SchemaRefused as error:
                field = f"tools.{number}.function.parameters"
                raise UnsupportedParameter(field, f"{field}: {error}") from error
        finds_calls = self._format is not None or (self._parsers is not None and self._parsers.reads_tools)
        if chat.use == "auto" and template.source and not finds_calls:
            field = "tools" if wire.tool_choice is None else "tool_choice"
            raise UnsupportedParameter(
                field,
                f"{field}: the model decides whether to call a tool, and its chat template writes calls in none of "
                f"the supported formats: {', '.join(one.title for one in FORMATS)}. Send tool_choice = "
                "required or a function; or set engine.kind: vllm and vllm.tool_parser in the server's configuration, "
                f"or model.chat_template to a template of such a format (for ChatML models {shipped}).",
            )
