"""From a request as it was asked to the token ids of its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.backends.base import ChatPrompt, ModelInfo
from serve_app.errors import ContextLengthExceeded
from serve_app.openai.asked import Asked, Limits
from serve_app.openai.chat.chat_preprocessor import ChatPreprocessor, ResponseParser
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.chat.control_tokens import ControlTokens
from serve_app.openai.chat.shown import prompt_text
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.completions.echo import EchoedPrompt
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request and its prompts, which the model has room for."""

    asked: Asked
    prompts: tuple[Ids, ...]
    answers: ResponseParser | None = None  # None: all text is content
    echoed: tuple[EchoedPrompt, ...] = ()  # one a prompt; () = no echo


class PromptEncoder:
    """Encodes, checks and truncates the prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo, limits: Limits, chats: ChatPreprocessor) -> None:
        self._tokenizer, self._chats = tokenizer, chats
        self._controls = ControlTokens(tokenizer, limits.special_tokens_in_text)
        self._vocab_size, self._longest, self._limits = model.vocab_size, model.max_model_len, limits

    def prompted(self, asked: Asked) -> Prompted:
        """Encode the prompts of a request, or the one that the chat template makes of its conversation. Raises
        InvalidRequest: the template refuses the messages or leaves out a part of them, an id is not in the vocabulary,
        or a prompt is empty or too long."""
        wire = asked.wire
        if isinstance(wire, ChatCompletionRequest):
            chat = self._chats.chat_prompt(wire)
            ids = self._fit(self.template(wire, chat), wire, "messages")
            return Prompted(asked, (ids,), self._chats.answers(chat, ids, wire.structure))
        special = wire.add_special_tokens
        cut = wire.truncate_prompt_tokens is not None
        prompts = tuple(self._fit(self.encoded(one, special, cut=cut), wire, "prompt") for one in wire.prompts())
        return Prompted(asked, prompts, echoed=self._echoed(wire, prompts) if wire.echo else ())

    def template(self, wire: ChatCompletionRequest, chat: ChatPrompt) -> Ids:
        """Return what the chat template makes of a conversation. Raises ContextLengthExceeded: as of `encoded`."""
        continues, adds = bool(wire.continue_final_message), wire.add_generation_prompt
        ending = {"add_generation_prompt": not continues if adds is None else adds, "continue_final_message": continues}
        guarded = self._controls.guarded(chat)
        text = prompt_text(self._tokenizer, guarded, {**guarded.variables, **ending})
        if wire.truncate_prompt_tokens is None:
            self._check_length(text, "messages")
        ids = self._controls.encode(text)
        before, behind = self._tokenizer.prefix_ids, self._tokenizer.suffix_ids
        return (*before, *ids, *behind) if wire.add_special_tokens else tuple(ids)

    def encoded(self, prompt: str | list[int], add_special_tokens: bool | None, *, cut: bool = False) -> Ids:
        """Return the token ids of a text, or those that were sent. Raises ContextLengthExceeded: its length alone says
        that the model has no room for it, and it is not to be `cut`."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if not cut:
            self._check_length(prompt, "prompt")
        return tuple(self._tokenizer.encode(prompt, special=add_special_tokens is not False))

    def _check_length(self, text: str, name: str) -> None:
        """Refuse a text before it is tokenized, which takes seconds and memory where it is megabytes."""
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest >= self._longest:
            raise ContextLengthExceeded(
                name,
                f"The model's context is {self._longest} tokens, and {name} with its {len(text)} characters has at "
                f"least {fewest}. Shorten it.",
            )

    def _echoed(self, wire: CompletionRequest, prompts: Sequence[Ids]) -> tuple[EchoedPrompt, ...]:
        sent = [prompt if isinstance(prompt, str) else None for prompt in wire.prompts()]
        if wire.truncate_prompt_tokens is not None:
            sent = [None] * len(sent)  # what was cut off is not echoed
        prefix = 0 if wire.add_special_tokens is False else len(self._tokenizer.prefix_ids)
        return tuple(
            EchoedPrompt.of(text, ids, self._tokenizer, added=0 if text is None else prefix)
            for text, ids in zip(sent, prompts, strict=True)
        )

    def _fit(self, ids: Ids, wire: CompletionRequest | ChatCompletionRequest, name: str) -> Ids:
        """The prompt, truncated where that is asked for, if the model knows its ids and has room for an answer."""
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            has_text = 0 <= wrong < self._tokenizer.vocab_size  # a tokenizer may have more tokens than the model
            named = f" ({self._tokenizer.token_text(wrong)!r})" if has_text else ""
            raise InvalidRequest(
                name, f"{name} holds the token id {wrong}{named}; the model's ids run from 0 to {self._vocab_size - 1}."
            )
        most = wire.truncate_prompt_tokens
        if most is not None:
            room = self._longest - max(wire.token_budget[1] or 1, 1)
            ids = ids[-most if most > 0 else -max(room, 1) :]
        if not ids:
            raise InvalidRequest(name, f"{name} must hold at least one token.")
        if len(ids) + 1 > self._longest:
            raise ContextLengthExceeded(
                name,
                f"The model's context is {self._longest} tokens, and {name} has {len(ids)}, which leaves no room for "
                "an answer. Shorten it.",
            )
        if self._limits.max_prompt_tokens is not None and len(ids) > self._limits.max_prompt_tokens:
            raise ContextLengthExceeded(
                name, f"{name} has {len(ids)} tokens; the limit is {self._limits.max_prompt_tokens}. Shorten it."
            )
        return ids
