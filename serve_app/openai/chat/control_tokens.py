"""Special tokens that a client's text spells out: what becomes of `<|im_end|>` in a message, as it is configured."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from serve_app.backends.base import ChatPrompt
from serve_app.text.json_text import CallArguments, clean_key
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError, InvalidRequest

Policy = Literal["allow", "escape", "refuse"]
_OWN = frozenset(("role", "type"))  # what a request cannot choose freely


class ControlTokens:
    """Encodes what chat templates have rendered, by the policy for special tokens in the texts of clients.

    To escape them, words stand for them while the template renders. What it writes between its own special tokens is
    then encoded as plain text wherever such a word is in it.

    Args:
        tokenizer: of the model.
        policy: `allow` = they are tokens, as in vLLM; `escape` = they are the characters that they are spelt with;
            `refuse` = the request is refused.

    Raises:
        ConfigError: this tokenizer's special tokens cannot be escaped.
    """

    def __init__(self, tokenizer: Tokenizer, policy: Policy) -> None:
        self._tokenizer = tokenizer
        self._policy = policy
        self._specials = tokenizer.special_texts
        if not self._specials:
            self._policy = "allow"
        any_of_them = "|".join(map(re.escape, sorted(self._specials, key=len, reverse=True)))
        self._spelt = re.compile(f"({any_of_them})")
        tag = secrets.token_hex(4)
        self._words = {text: f"zs{tag}x{number}sz" for number, text in enumerate(self._specials)}
        self._texts = {word: text for text, word in self._words.items()}
        self._word = re.compile(rf"zs{tag}x\d+sz")
        known = tokenizer.encode_rendered
        for text in self._specials if self._policy == "escape" else ():
            plain, behind = (tokenizer.encode_plain(one, begins=False) for one in (text, "\ncd"))
            parts = [*known("ab "), *known(text), *behind]
            if known(f"ab {text}\ncd") != parts or not tokenizer.special_ids.isdisjoint(plain):
                raise ConfigError(
                    f"model.special_tokens_in_text: escape is not possible with this tokenizer, which does not encode "
                    f"{text!r} as plain text. Set it to refuse, or to allow."
                )

    def guarded(self, chat: ChatPrompt) -> ChatPrompt:
        """A conversation as the template is given it. Raises InvalidRequest: a text of it spells a special token, and
        that is refused."""
        if self._policy == "allow":
            return chat
        return replace(
            chat,
            messages=tuple(self._guard(chat.messages, "messages")),
            tools=tuple(self._guard(chat.tools, "tools")),
            variables=self._guard(chat.variables, "chat_template_kwargs"),
        )

    def _guard(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            return self._guard_text(value, path)
        if isinstance(value, list | tuple):
            return [self._guard(item, f"{path}.{number}") for number, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        guarded = {
            self._guard_text(key, path): item if key in _OWN else self._guard(item, f"{path}.{clean_key(key)}")
            for key, item in value.items()
        }
        return (
            CallArguments(guarded, self._guard_text(value.text, path)) if isinstance(value, CallArguments) else guarded
        )

    def _guard_text(self, text: str, path: str) -> str:
        if self._policy == "escape":
            return self._spelt.sub(lambda found: self._words[found[0]], text)
        spelt = self._spelt.search(text)
        if spelt is None:
            return text
        raise InvalidRequest(
            path, f"{path} holds {spelt[0]}, which is a special token of this model; this server refuses it in text."
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of what the template has rendered of a guarded conversation."""
        if self._policy != "escape" or self._word.search(text) is None:
            return self._tokenizer.encode_rendered(text)
        ids: list[int] = []
        waiting = ""
        for part in self._spelt.split(text):
            if self._word.search(part) is None:
                waiting += part
                continue
            ids += self._tokenizer.encode_rendered(waiting)
            spelt = self._word.sub(lambda word: self._texts[word[0]], part)
            ids += self._tokenizer.encode_plain(spelt, begins=not ids)
            waiting = ""
        return ids + self._tokenizer.encode_rendered(waiting)
