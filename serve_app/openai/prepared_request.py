"""A request that was read and checked, and what it may cost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from serve_app.errors import ContextLengthExceeded, PriorityForbidden
from serve_app.openai.chat.chat_preprocessor import ResponseParser
from serve_app.openai.chat.control_tokens import Policy
from serve_app.openai.completions.echo import EchoedPrompt
from serve_app.openai.replies import ReplyFormat, ReplyHead
from serve_app.openai.requests import TextForm
from serve_app.referee.client_demands import ClientDemands
from serve_app.text.tokenizer import StopStrings
from speculative.request import MAX_PRIORITY, Request

T = TypeVar("T")

Charge = Callable[[int], None]
"""Called with the number of further tokens used."""


def charge_nothing(num_tokens: int) -> None:
    """Charges nobody."""


LONG_TEXT = 4096  # characters; encoding more than this leaves the event loop
FORM = "response_format"  # how an engine names the form of an answer, whichever field asked for it


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one HTTP request."""

    max_body_bytes: int = 8 * 2**20
    max_choices: int = 64  # of each prompt
    max_sequences: int | None = None  # choices of all prompts; None = as many as the others allow
    max_prompt_tokens: int | None = None  # None = the model's own
    default_max_tokens: int | None = None  # chat without max_tokens; None = all that fits
    resumes: bool | None = None  # whether a request that does not say is resumed; None = none can be
    stream_interval_s: float = 0.0  # between two messages of a stream, while there are few streams
    special_tokens_in_text: Policy = "allow"  # that a conversation's texts spell


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The terms of one HTTP request beside its body: what who sent it may ask for."""

    max_prompt_tokens: int | None = None
    earliest_priority: int = -MAX_PRIORITY
    timeout_s: float | None = None  # as the header asks

    def check_prompt(self, name: str, num_tokens: int, longest: int | None) -> None:
        """Refuse a prompt of more tokens than these terms or the server (`longest`) allow.

        Raises:
            ContextLengthExceeded: it has more.
        """
        most = min((limit for limit in (self.max_prompt_tokens, longest) if limit is not None), default=num_tokens)
        if num_tokens > most:
            raise ContextLengthExceeded(name, f"{name} has {num_tokens} tokens; the limit is {most}. Shorten it.")

    def priority(self, asked: int | None) -> int:
        """The priority of a request: what it asks for, or 0 where that is allowed.

        Raises:
            PriorityForbidden: it asks for an earlier one than it may.
        """
        if asked is not None and asked < self.earliest_priority:
            raise PriorityForbidden("priority", f"priority must be at least {self.earliest_priority} for this key.")
        return max(0, self.earliest_priority) if asked is None else asked

    def time_limit_s(self, asked: float | None) -> float | None:
        """The stricter of body and header; None where neither asks."""
        return min((limit for limit in (asked, self.timeout_s) if limit is not None), default=None)


NO_TERMS = RequestTerms()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, checked and tokenised: what to generate and how to answer."""

    head: ReplyHead
    format: ReplyFormat
    groups: tuple[tuple[Request, ...], ...]  # one group a prompt, one request a choice
    stops: StopStrings
    text_form: TextForm
    stream: bool
    verify: bool
    receipt: bool = False
    continuous_usage: bool = False  # every chunk of a stream has the usage up to there
    echoed: tuple[EchoedPrompt, ...] = ()  # one a group; () = no echo
    prompt_only: bool = False  # nothing is to follow the echo
    answers: ResponseParser | None = None  # None: all text is content
    form_field: str = FORM  # that asks for the form of the answers
    words: Callable[[str], str] = str  # an engine's names of fields, in a text, as this endpoint's
    demands: ClientDemands | None = None  # that what is sent is compared with; None = it is not
    unrepeatable: str | None = None  # why its seed may give another text again; "" = it gives the same, None = no seed

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests; their order gives the choices' indices."""
        return tuple(request for group in self.groups for request in group)


async def off_loop(num_characters: int, work: Callable[[], T]) -> T:
    """Do long text work on a thread, so that other streams keep flowing; short work at once."""
    return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()
