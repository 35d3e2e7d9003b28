"""Text to token ids and back over HTTP, as vLLM's server has it: /tokenize, /detokenize and /tokenizer_info."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from serve_app.openai.chat.chat_preprocessor import ChatPreprocessor
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.chat.messages import Message, Tool
from serve_app.openai.prompts import PromptEncoder
from serve_app.openai.requests import TokenId
from serve_app.openai.wire import MAX_TOOLS, Many, Wire
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest


class TokenizeRequest(Wire):
    """POST /tokenize: the tokens of a prompt, or of a conversation in the chat template."""

    model: str | None = None
    """The served model's name."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    """A conversation, in place of `prompt`; the chat template is applied."""
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    """Functions that the template shows."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads."""
    add_generation_prompt: bool | None = None
    """The template begins the answer. Default: true, unless the last message is continued."""
    continue_final_message: bool | None = None
    """The answer would continue the last message."""
    add_special_tokens: bool | None = None
    """Add the tokens that begin a text. Default: true for a prompt, false for a conversation."""
    return_token_strs: bool | None = None
    """Also return the tokens as texts."""

    def check_together(self) -> None:
        """Check fields against each other. Raises InvalidRequest: there is no text, or there are two."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "Send either prompt or messages.")
        if self.messages is not None:
            self.conversation().check_together()

    def conversation(self) -> ChatCompletionRequest:
        """The same conversation as a request for a chat completion."""
        assert self.messages is not None
        own = {name: getattr(self, name) for name in _OF_A_CONVERSATION}
        return ChatCompletionRequest.model_validate({"model": "", "tool_choice": "none", **own})


_OF_A_CONVERSATION = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: str | None = None
    """The served model's name."""
    tokens: Many[TokenId]
    """Token ids."""


@dataclass(slots=True)
class Tokenization:
    """Answers what a client asks of the served model's tokenizer."""

    tokenizer: Tokenizer
    chats: ChatPreprocessor
    encoder: PromptEncoder
    max_model_len: int

    def tokenize(self, wire: TokenizeRequest) -> dict[str, Any]:
        """The reply to /tokenize. Raises InvalidRequest: the chat template refuses the messages, or the length of the
        text alone says that the model has no room for it."""
        if wire.prompt is not None:
            ids = self.encoder.encoded(wire.prompt, wire.add_special_tokens)
        else:
            conversation = wire.conversation()
            ids = self.encoder.template(conversation, self.chats.chat_prompt(conversation))
        strings = [self.tokenizer.token_text(token) for token in ids] if wire.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": list(ids), "token_strs": strings}

    def detokenize(self, wire: DetokenizeRequest) -> dict[str, Any]:
        """The reply to /detokenize; special tokens are shown. Raises InvalidRequest: an id is not in the vocabulary."""
        size = self.tokenizer.vocab_size
        wrong = next((token for token in wire.tokens if token >= size), None)
        if wrong is not None:
            raise InvalidRequest("tokens", f"tokens holds the token id {wrong}; ids run from 0 to {size - 1}.")
        return {"prompt": self.tokenizer.decode(wire.tokens, skip_special=False)}

    def info(self) -> dict[str, Any]:
        """The reply to /tokenizer_info: what a client needs to build the same prompts."""
        return self.tokenizer.description()
