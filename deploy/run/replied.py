"""Compares the choices of a reply with the receipts that came with it: tokens, logprobs, text, ending and usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.referee.records.receipts import NotAReceipt, Receipt
from serve_app.referee.wire.reply import Choice, Reply, Unreadable
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Replied:
    """A choice of a reply, and what is wrong with the whole reply beside its receipts ("" = nothing)."""

    id: str  # that its receipt must have
    choice: Choice
    broken: str = ""

    def wrong(self, receipt: Receipt, text: str, stop: str | None, tokenizer: Tokenizer) -> str:
        """Return in what the choice differs from a receipt whose contents belong together; "" = in nothing.

        Args:
            receipt: of the choice.
            text: of its tokens.
            stop: the stop string that ended it.
            tokenizer: of the model.
        """
        own, ids = self.choice, list(receipt.token_ids[: receipt.num_delivered])
        if self.broken or receipt.id != self.id:
            return self.broken or f"the reply's choice is {self.id}, and this is the receipt of another"
        if own.token_ids not in (None, ids) or own.prompt_token_ids not in (None, receipt.prompt_token_ids):
            return "the reply has other token ids than its receipt"
        if own.logprobs is not None and own.logprobs[-len(ids) :] != list(receipt.logprobs or ())[: len(ids)]:
            return "the reply has other logprobs than its receipt"
        reason = receipt.ending.finish_reason
        if own.finish_reason not in (reason, *(["tool_calls"] if own.calls else [])):
            return f"the reply's finish_reason is {own.finish_reason!r}, and its tokens' is {reason!r}"
        if own.stopped_by not in (None, stop or ids[-1]):
            return f"the reply's stop_reason is {own.stopped_by!r}, and its tokens end with {stop or ids[-1]!r}"
        return "" if self._says(text, receipt, tokenizer) else "the reply's text is not that of its tokens"

    def _says(self, text: str, receipt: Receipt, tokenizer: Tokenizer) -> bool:
        """Return whether the choice says what its tokens say, behind its prompt where that is echoed."""
        said = self.choice.text
        if self.choice.called:  # the rest of its text is read as calls and reasoning
            return said.strip() in text and all(name in text for name, _ in self.choice.calls.values())
        if said == text or not said.endswith(text):
            return said == text
        prompt, before = list(receipt.prompt_token_ids), said.removesuffix(text)
        return before == tokenizer.decode(prompt, skip_special=False) or prompt in (
            tokenizer.encode(before),
            tokenizer.encode(before, special=False),
        )


def replied_in(wire: dict[str, Any], receipts: Sequence[Any]) -> list[Replied | None]:
    """The choice that belongs to each receipt of a reply; None where there is no reply. Raises NotAReceipt: it cannot
    be read."""
    if not wire:
        return [None] * len(receipts)
    try:
        reply = Reply(is_chat="message" in wire["choices"][0])
        reply.add(wire)
        if any("message" in one and "text" in one for one in wire["choices"]):
            raise Unreadable("one choice is that of a chat and of a completion")
    except (Unreadable, LookupError, TypeError) as error:
        raise NotAReceipt(f"The reply with the receipts cannot be read: {error}; give it as it was sent.") from error
    broken = _broken(reply, len(wire["choices"]), receipts)
    return [Replied(f"{reply.id}-{index}", reply.choice(index), broken) for index in range(len(receipts))]


def _broken(reply: Reply, num_choices: int, receipts: Sequence[Any]) -> str:
    """Return what is wrong with a whole reply; "" = nothing."""
    if not sorted(reply.choices) == list(range(num_choices)) == list(range(len(receipts))):
        return f"the reply has {num_choices} choices, and {len(receipts)} receipts"
    if not all(isinstance(one, Receipt) for one in receipts):
        return ""
    num_tokens = sum(one.num_delivered for one in receipts)
    if reply.num_tokens not in (None, num_tokens):
        return f"the reply's usage counts {reply.num_tokens} completion tokens, and there are {num_tokens}"
    num_prompt = sum(len(one.prompt_token_ids) for one in receipts)
    choices_of_each, rest = divmod(num_prompt, reply.num_prompt or num_prompt)  # a prompt counts once
    if rest or num_choices % choices_of_each:
        return f"the reply's usage counts {reply.num_prompt} prompt tokens, and the choices' prompts have {num_prompt}"
    return ""
