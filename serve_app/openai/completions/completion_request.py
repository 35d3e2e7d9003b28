"""POST /v1/completions: what requests may contain."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.requests import WireRequest
from serve_app.openai.wire import INT32_MAX, Many
from speculative.errors import InvalidRequest
from speculative.request import MAX_LOGPROBS


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "<text>" if not isinstance(value, list) else "<ids>"
    first = value[0]
    return "<texts>" if isinstance(first, str) else "<id lists>" if isinstance(first, list) else "<ids>"


# The forms of a non-empty prompt; an empty one is reported the same way for all of them.
_NOT_EMPTY: dict[str, Any] = {
    "text": {"type": "string", "minLength": 1},
    "ids": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}},
}

_NOT_EMPTY |= {
    "texts": {"type": "array", "minItems": 1, "items": _NOT_EMPTY["text"]},
    "id lists": {"type": "array", "minItems": 1, "items": _NOT_EMPTY["ids"]},
}


class CompletionRequest(WireRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("<text>"), WithJsonSchema(_NOT_EMPTY["text"])]
        | Annotated[Many[str], Tag("<texts>"), WithJsonSchema(_NOT_EMPTY["texts"])]
        | Annotated[Many[int], Tag("<ids>"), WithJsonSchema(_NOT_EMPTY["ids"])]
        | Annotated[
            Many[Annotated[Many[int], Field(min_length=1)]], Tag("<id lists>"), WithJsonSchema(_NOT_EMPTY["id lists"])
        ],
        Discriminator(_prompt_kind),
    ]
    """A text, token ids, or a list of either."""
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    """The longest answer, in tokens. 0 = nothing but the `echo`."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Return the logprobs of each token and of so many likeliest ones; 0 = of the tokens alone."""
    echo: bool | None = None
    """The prompt comes before the text, and with `logprobs` its logprobs before the answer's."""
    add_special_tokens: bool | None = None
    """`false`: a text gets no tokens at its start, whatever the model wants."""

    @field_validator("prompt", mode="after")
    @classmethod
    def _not_empty(cls, prompt: Any) -> Any:
        if not prompt or (isinstance(prompt, list) and "" in prompt):
            raise PydanticCustomError("empty", "must hold at least one token.")
        return prompt

    @property
    def num_logprobs(self) -> int | None:
        """Return it as in SamplingParams: None = off, 0 = the emitted token only."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return it as in SamplingParams: what the echo shows of the prompt, or `prompt_logprobs` asks for, whichever
        is more."""
        counts = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(counts, default=None)

    def check_together(self) -> None:
        """Check fields against each other. Raises InvalidRequest: two fields contradict each other."""
        super().check_together()
        if self.prompt_only and not self.echo:
            raise InvalidRequest("max_tokens", "max_tokens may be 0 only with echo = true; else it must be at least 1.")
        if self.prompt_only and self.receipt:
            raise InvalidRequest("receipt", "receipt needs an answer, and max_tokens = 0 asks for none.")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, in whichever form they were sent: each a text or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
