"""A request as it was asked, in one vocabulary for every API, and what this server serves to nobody.

    Asked      its fields, which are right by themselves     here
    Prompted   and the token ids of its prompts              `prompts`
    Planned    and the engine's requests                     `plan`

Each is made of the one before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.backends.base import ModelInfo, Pace
from serve_app.errors import ModelNotFound, UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.chat.control_tokens import Policy
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.replies import ReplyFormat
from speculative.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one HTTP request, and the pace that its stream shares with others."""

    max_body_bytes: int = 8 * 2**20
    max_choices: int = 64  # of each prompt
    max_sequences: int | None = None  # choices of all prompts; None = as many as the others allow
    max_prompt_tokens: int | None = None  # None = the model's own
    default_max_tokens: int | None = None  # chat without max_tokens; None = all that fits
    resumes: bool | None = None  # whether a request that does not say is resumed; None = none can be
    pace: Pace = field(default_factory=Pace)  # of the streams' messages
    keep_alive_s: float = 0.0  # after which a silent stream is sent a comment; 0 = never
    special_tokens_in_text: Policy = "allow"  # that a conversation's texts spell


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, as a completion or a chat, whichever API it came by."""

    wire: CompletionRequest | ChatCompletionRequest
    format: ReplyFormat
    words: Callable[[str], str] = str  # a text with the names of a completion's fields, with those of the client's API
    timeout_s: float | None = None  # until it is given up; None = as long as the server allows

    @property
    def num_choices(self) -> int:
        """Return the choices of each prompt."""
        return self.wire.n or 1

    def check(self, model: ModelInfo, limits: Limits, *, can_verify: bool) -> None:
        """Refuse what a server serves to nobody, or could not run at once if it had nothing else to do. Raises
        ModelNotFound, InvalidRequest."""
        wire, num_choices = self.wire, self.num_choices
        check_served(wire.model, model)
        if num_choices > limits.max_choices:
            raise InvalidRequest("n", f"n may be at most {limits.max_choices} here, got {num_choices}.")
        if wire.verify and not can_verify:
            raise UnsupportedParameter(
                "verify", "verify needs a server whose logprobs_mode is raw_logprobs: only these are compared."
            )
        if wire.receipt and not model.computing.keeps_rounds:
            raise UnsupportedParameter(
                "receipt", "receipt needs engine.kind: torch; only its own service can make vLLM's draws again."
            )
        if wire.resume and limits.resumes is None:
            raise UnsupportedParameter(
                "resume", "resume needs a server with a stream router; set pools.router in its configuration."
            )
        num_prompts = len(wire.prompts()) if isinstance(wire, CompletionRequest) else 1
        most, num_sequences = limits.max_sequences, num_prompts * num_choices
        if most is None or num_sequences <= most:
            return
        if num_prompts == 1:
            raise InvalidRequest("n", f"n asks for {num_sequences} choices; this server runs at most {most} at once.")
        raise InvalidRequest(
            "prompt",
            f"{num_prompts} prompts with {num_choices} choices each are {num_sequences} sequences; this server runs at "
            f"most {most} at once. Send several requests, or raise limits.max_ongoing_requests.",
        )


def check_served(name: str, model: ModelInfo) -> None:
    """Refuse the name of a model that is not served. Raises ModelNotFound."""
    if name not in model.names:
        served = ", ".join(model.names)
        raise ModelNotFound("model", f"The model '{name[:100]}' does not exist here; served: {served}.")
