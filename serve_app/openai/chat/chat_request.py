"""POST /v1/chat/completions: what requests may contain."""

from typing import Annotated, Any

from pydantic import Field

from serve_app.backends.base import ChatPrompt
from serve_app.openai.chat.messages import Message, NamedTool, Tool, ToolChoice
from serve_app.openai.requests import WireRequest
from serve_app.openai.wire import INT32_MAX, MAX_TOOLS, Many, OneOf
from speculative.errors import InvalidRequest
from speculative.request import MAX_LOGPROBS

Effort = Annotated[str, OneOf(("none", "minimal", "low", "medium", "high", "xhigh", "max"))]


class ChatCompletionRequest(WireRequest):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    """The conversation."""
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    """Newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return the logprob of each token of the answer."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """With `logprobs`: of so many likeliest tokens at each position, too."""
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    """Functions that the model may call."""
    tool_choice: ToolChoice = None
    """`auto`, `none`, `required`, or the function to call."""
    reasoning_effort: Effort | None = None
    """A variable of the chat template, if it has it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """The template begins the answer. Default: true, unless the last message is continued."""
    continue_final_message: bool | None = None
    """The answer continues the last message."""
    add_special_tokens: bool | None = None
    """Add the tokens that begin a text beside those of the template."""

    @property
    def num_logprobs(self) -> int | None:
        """Return it as in SamplingParams: None = off, 0 = the emitted token only."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, or its older name `max_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def check_together(self) -> None:
        """Check fields against each other. Raises InvalidRequest: two fields contradict each other."""
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs = true.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens differ; send one of them.")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt",
                "continue_final_message continues the last message, and add_generation_prompt begins another; send one "
                "of them.",
            )
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
            name = self.structure_field.partition(".")[0]
            raise InvalidRequest(name, f"{name} leaves no room for tool calls; send it without tools.")
        if choice not in (None, "auto"):
            self._check_structure("tool_choice")

    def chat_prompt(self) -> ChatPrompt:
        """The conversation and the tools as chat templates expect them, and the tool choice."""
        messages = tuple(message.for_template() for message in self.messages)
        tools = tuple(tool.for_template() for tool in self.tools or ())
        choice = self.tool_choice or "auto"
        named = choice.function.name if isinstance(choice, NamedTool) else ""
        use: Any = "none" if not tools else "named" if named else choice
        return ChatPrompt(
            messages, tools, use, named, self.parallel_tool_calls is not False, self.chat_template_kwargs or {}
        )
