"""A request that was read and checked, and the limits that it was checked against."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from serve_app.openai.chat.chat_preprocessor import ResponseParser
from serve_app.openai.chat.control_tokens import Policy
from serve_app.openai.completions.echo import EchoedPrompt
from serve_app.openai.replies import ReplyFormat, ReplyHead
from serve_app.openai.requests import TextForm
from serve_app.referee.records.tapped_reply import TappedReply
from serve_app.text.tokenizer import StopStrings
from speculative.request import Request

T = TypeVar("T")

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
    keep_alive_s: float = 0.0  # after which a silent stream is sent a comment; 0 = never
    special_tokens_in_text: Policy = "allow"  # that a conversation's texts spell


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
    tapped: TappedReply | None = None  # what keeps the bytes of request and reply
    unrepeatable: str | None = None  # why its seed may give another text again; "" = it gives the same, None = no seed

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests; their order gives the choices' indices."""
        return tuple(request for group in self.groups for request in group)


async def off_loop(num_characters: int, work: Callable[[], T]) -> T:
    """Do long text work on a thread, so that other streams keep flowing; short work at once."""
    return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()
