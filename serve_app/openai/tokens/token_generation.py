"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's server has it for trainers and renderers."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, create_model, field_validator
from pydantic_core import PydanticCustomError

from serve_app.errors import UnknownParameter
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.off_loop import off_loop
from serve_app.openai.parsing import checked, in_words
from serve_app.openai.plan import Planned
from serve_app.openai.replies import ChoiceDelta, ReplyFormat, ReplyHead, ReplyStream, TokenEntry, Usage
from serve_app.openai.requests import MAX_CACHE_SALT, TokenId
from serve_app.openai.wire import Many, Wire
from speculative.errors import InvalidRequest
from speculative.request import MAX_PRIORITY

# Of vLLM's SamplingParams: those that /v1/completions has by the same name, and those that change nothing here.
_SAMPLING = {
    *("max_tokens", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs"),
    *("temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "structured_outputs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
}
_WITHOUT_EFFECT = {"detokenize", "output_kind"}


def _described() -> dict[str, Any]:
    """The JSON schema of the sampling parameters, from the fields of a completion; without the one that has its own."""
    fields = {name: info for name, info in CompletionRequest.model_fields.items() if name in _SAMPLING}
    del fields["structured_outputs"]
    made = create_model("SamplingParams", **{name: (info.annotation, info) for name, info in fields.items()})  # type: ignore[call-overload]
    schema: dict[str, Any] = made.model_json_schema()
    return schema


class GenerateRequest(Wire):
    """POST /inference/v1/generate."""

    token_ids: Annotated[Many[TokenId], Field(min_length=1)]
    """The prompt."""
    sampling_params: Annotated[dict[str, Any], WithJsonSchema(_described())]
    """Fields of `/v1/completions`, by the same names. `detokenize` and `output_kind` have no effect."""
    model: str | None = None
    """The served model's name, or an adapter's. Default: the model."""
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The id of the reply."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)
    """The prefix cache is shared with requests of the same salt only."""
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Order in the queue, the lower the earlier."""
    output_mode: str | None = Field(None, json_schema_extra={"enum": ["tokens", None]})
    """Only `tokens` is served."""
    stream: bool | None = Field(None, json_schema_extra={"enum": [False, None]})
    """Only `false` is served."""
    return_token_ids: bool | None = None
    """Accepted, without effect: they are always returned."""
    features: None = None
    """Must be null: images are not served."""
    content_parts: None = None
    """Must be null."""

    @field_validator("output_mode")
    @classmethod
    def _only_tokens(cls, mode: str | None) -> str | None:
        if mode not in (None, "tokens"):
            raise PydanticCustomError("unsupported", "only tokens are returned; send the prompt to /v1/completions.")
        return mode

    @field_validator("stream")
    @classmethod
    def _whole(cls, stream: bool | None) -> bool | None:
        if stream:
            raise PydanticCustomError(
                "unsupported", "is not served here; stream /v1/completions with return_token_ids."
            )
        return stream

    def check_together(self) -> None:
        """Check the sampling parameters. Raises InvalidRequest: one is wrong, unknown, or not served."""
        self.completion("")

    def completion(self, model: str) -> CompletionRequest:
        """The same as a request for a completion.

        Args:
            model: that answers where the request names none.

        Raises:
            InvalidRequest: a sampling parameter is wrong, unknown, or not served.
        """
        sampling = {name: value for name, value in self.sampling_params.items() if name not in _WITHOUT_EFFECT}
        other = next((name for name in sampling if name not in _SAMPLING), None)
        if other is not None:
            path = f"sampling_params.{other[:100]}"
            raise UnknownParameter(path, f"Unknown field '{path}'. Remove it, or check its spelling.")
        if type(sampling.get("max_tokens")) is int and sampling["max_tokens"] < 1:
            path = "sampling_params.max_tokens"
            raise InvalidRequest(path, f"{path} must be at least 1, got {sampling['max_tokens']}.")
        fields = {
            "model": self.model or model,
            "prompt": self.token_ids,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "return_token_ids": True,
        }
        with in_words(_own_names):
            return checked(fields | sampling, CompletionRequest)


async def prepare_generation(front_end: FrontEnd, wire: GenerateRequest, timeout_s: float | None = None) -> Planned:
    """Check a request and make it one for a completion. Raises InvalidRequest: it can never be served; `field` names
    what is wrong."""
    completion = await off_loop(wire, lambda: wire.completion(front_end.served_name))
    return await front_end.prepare(completion, TokensFormat(wire.request_id), _own_names, timeout_s=timeout_s)


_NAMES = re.compile(rf"(?<![\w.])({'|'.join(sorted(_SAMPLING))}|prompt)\b")


def _own_names(text: str) -> str:
    """A text with the names of this API for the fields of a completion."""
    return _NAMES.sub(lambda name: "token_ids" if name[0] == "prompt" else f"sampling_params.{name[0]}", text)


class TokensFormat(ReplyFormat):
    """Replies of /inference/v1/generate."""

    id_prefix = "cmpl-"
    operation = "text_completion"

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id

    def stream(self, *, continuous_usage: bool) -> ReplyStream:
        """Refused before."""
        raise AssertionError("streams of tokens are refused when the request is read")

    async def whole(
        self, head: ReplyHead, choices: Sequence[ChoiceDelta], usage: Usage, reported: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The whole reply."""
        prompt = choices[0].prompt_fields().get("prompt_logprobs")
        return {
            "request_id": self._request_id or head.reply_id,
            "choices": [_choice(piece) for piece in choices],
            "prompt_logprobs": prompt,
            "usage": usage.to_wire(),
            **(reported or {}),
        }


def _choice(piece: ChoiceDelta) -> dict[str, Any]:
    logprobs = None
    if piece.logprobs is not None:
        content = [_token(entry) | {"top_logprobs": [_token(other) for other in entry.top]} for entry in piece.logprobs]
        logprobs = {"content": content}
    chosen = {"index": piece.index, "finish_reason": piece.finish_reason, "token_ids": list(piece.token_ids)}
    return chosen | {"logprobs": logprobs} | piece.version_fields()


def _token(entry: TokenEntry) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob}
