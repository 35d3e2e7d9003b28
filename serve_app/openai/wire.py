"""Rules for every request body: which fields are refused, ignored or limited."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.text.json_text import clean_key

T = TypeVar("T")

MAX_TOOLS = 128
MAX_LEVELS = 64  # of lists and objects in what a chat template shows
INT32_MAX = 2**31 - 1

Harmless = Callable[[Any, Mapping[str, Any]], bool]
"""Test whether a value of an unsupported field has no effect; gets the value and the whole body."""


def _one_of(*values: Any) -> Harmless:
    return lambda value, body: value is None or any(type(value) is type(v) and value == v for v in values)


def _empty(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or value in ([], {}, "")


_ONLY_CHAT = "is a field of /v1/chat/completions; send messages there."
_ONLY_TEXT = "only text is served."
_NOT_RETURNED = "is not returned here; POST /tokenize shows how a prompt is tokenized."
_NOT_HERE = "is a field of vLLM's that is not served here; leave it out."
_OLD_TOOLS = "is an old name; send tools and tool_choice."

UNSUPPORTED: dict[str, tuple[Harmless, str]] = {
    "top_logprobs": (_one_of(0), "is a field of /v1/chat/completions; send their number as logprobs here."),
    "tools": (_empty, _ONLY_CHAT),
    "tool_choice": (_one_of("none", "auto"), _ONLY_CHAT),
    "functions": (_empty, _OLD_TOOLS),
    "function_call": (_one_of("none", "auto"), _OLD_TOOLS),
    "echo": (_one_of(False), "is a field of /v1/completions; send a prompt there."),
    "suffix": (_empty, "filling in before a suffix is not served; send a prompt only."),
    "best_of": (
        lambda value, body: value is None or (type(value) is int and value == (body.get("n") or 1)),
        "only best_of = n is served; ask for n choices with logprobs and pick the best.",
    ),
    "modalities": (lambda value, body: value in (None, [], ["text"]), "only text is served."),
    "audio": (_empty, "audio is not served; only text is."),
    "prediction": (_empty, "predicted outputs are not served; the server drafts by itself."),
    "reasoning_effort": (_one_of("none"), _ONLY_CHAT),
    "chat_template_kwargs": (_empty, _ONLY_CHAT),
    "include_reasoning": (_one_of(True), "reasoning is always returned, apart from the answer; ignore it."),
    "verbosity": (_one_of("medium"), "there is no verbosity control; ask for it in the prompt."),
    "web_search_options": (lambda value, body: value is None, "there is no web search."),
    "moderation": (lambda value, body: value is None, "there is no moderation."),
    "store": (_one_of(False), "nothing is stored; leave it out or send false."),
    "guided_decoding_backend": (
        lambda value, body: value is None or isinstance(value, str),
        "must be a string; which one makes no difference here.",
    ),
    "guided_whitespace_pattern": (_empty, "JSON is laid out as json.dumps does; leave it out."),
    "kv_transfer_params": (_empty, "the server hands prompts from prefill to decode replicas by itself; leave it out."),
    "use_beam_search": (_one_of(False), "beam search is not served; send n and pick by logprobs."),
    "length_penalty": (_one_of(1, 1.0), "belongs to beam search, which is not served."),
    "vllm_xargs": (_empty, "is for plugins of vLLM's; there are none here."),
    "documents": (_empty, "documents are not served; put their text into the messages."),
    "mm_processor_kwargs": (_empty, _ONLY_TEXT),
    "media_io_kwargs": (_empty, _ONLY_TEXT),
    "mm_payload": (_empty, _ONLY_TEXT),
    "return_mm_kwargs": (_one_of(False), _ONLY_TEXT),
    "prompt_embeds": (_empty, "embeddings are not taken; send text or token ids."),
    "request_id": (_empty, "is a header here; send it as x-request-id."),
    "session_id": (_empty, "is a header here; send it as x-session-id."),
    "truncation_side": (_one_of("left"), "prompts are cut at their beginning; leave it out."),
    "return_prompt_text": (_one_of(False), _NOT_RETURNED),
    "return_token_offsets": (_one_of(False), _NOT_RETURNED),
    "ec_transfer_params": (_empty, _NOT_HERE),
    "repetition_detection": (_empty, _NOT_HERE),
    "stream_interval": (_empty, "is a setting here: limits.stream_interval_s."),
    "thinking_token_budget": (_empty, _NOT_HERE),
    "watermarking": (_empty, _NOT_HERE),
    "chat_template": (_empty, "the model's own chat template is used; send a ready prompt to /v1/completions instead."),
    "lora_request": (_empty, "an adapter is chosen by its name as `model`; GET /v1/models lists those that are there."),
}
"""Fields that OpenAI's or vLLM's API has and this server does not, with the values that have no effect. An endpoint's
own fields are not refused there."""

_ONLY_ELSEWHERE = "is a field of /v1/completions and /v1/chat/completions."
_MOVED = "is a field of /v1/chat/completions; here it is "

UNSUPPORTED_IN_RESPONSES: dict[str, tuple[Harmless, str]] = {
    "background": (_one_of(False), "nothing is computed in the background; send stream = true instead."),
    "conversation": (_empty, "there are no conversations; send the items, or previous_response_id."),
    "prompt": (_empty, "there are no prompt templates; send instructions and input."),
    "truncation": (_one_of("disabled"), "no items are left out; shorten the input, or send truncate_prompt_tokens."),
    "context_management": (_empty, "no input is compacted; shorten it."),
    "access_programs": (_empty, "there are none."),
    "image": (_empty, "images are not served; only text is."),
    "messages": (_one_of(), f"{_MOVED}input."),
    "max_tokens": (_one_of(), f"{_MOVED}max_output_tokens."),
    "max_completion_tokens": (_one_of(), f"{_MOVED}max_output_tokens."),
    "response_format": (_one_of(), f"{_MOVED}text.format."),
    "reasoning_effort": (_one_of(), f"{_MOVED}reasoning.effort."),
    "verbosity": (_one_of(), f"{_MOVED}text.verbosity."),
    "logprobs": (_one_of(False), f"{_MOVED}include = ['message.output_text.logprobs'], with top_logprobs."),
    "n": (_one_of(1), "a response has one answer; send several requests, or n to /v1/chat/completions."),
    "prompt_logprobs": (_one_of(), _ONLY_ELSEWHERE),
    "logprob_token_ids": (_empty, _ONLY_ELSEWHERE),
    "return_token_ids": (_one_of(False), _ONLY_ELSEWHERE),
    "return_token_kinds": (_one_of(False), _ONLY_ELSEWHERE),
}
"""The same for /v1/responses: fields of OpenAI's that are not served, and those that other endpoints have."""

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that may be long. It is read up to its first error: only that one is reported, and each takes memory."""

_IGNORED = frozenset(("cache_control", "provider_specific_fields", "finish_reason", "reasoning_details"))
"""Fields that clients' libraries add to any object, or send back as another server returned them; they ask nothing."""


class Wire(BaseModel):
    """Any object of a request's body: known fields only, and no type coercion."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    unsupported: ClassVar[Mapping[str, tuple[Harmless, str]]] = {}
    """Entries of `UNSUPPORTED` for this body alone; inherited fields may be among them."""

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, fields: Any) -> Any:
        """Leave out unknown fields that ask nothing; of the others, reporting the first is enough."""
        if not isinstance(fields, dict) or fields.keys() <= cls.__pydantic_fields__.keys():
            return fields
        known = {field.alias or name for name, field in cls.__pydantic_fields__.items()}
        asking = (n for n, value in fields.items() if n not in known | _IGNORED and value not in (None, [], {}))
        unknown = next(asking, None)
        return {name: value for name, value in fields.items() if name in known or name == unknown}

    @property
    def deprecated_fields(self) -> tuple[str, ...]:
        """Old names that the client used."""
        return ()

    def check_together(self) -> None:
        """Check fields against each other. Raises InvalidRequest: two fields contradict each other."""


W = TypeVar("W", bound=Wire)


@dataclass(frozen=True)
class OneOf(GroupedMetadata):
    """Metadata of a text that must be one of some words."""

    words: Sequence[str]
    served: str = ""  # what these are, where any other is one that is not served
    instead: tuple[str, str] = ("", "")  # a word of other servers, and what is to be sent here
    further: tuple[str, ...] = ()  # how one says what is no word

    def __iter__(self) -> Iterator[object]:
        def known(word: str) -> str:
            if word in self.words:
                return word
            if word == self.instead[0] and word:
                raise PydanticCustomError("unsupported", "{instead}", {"instead": self.instead[1]})
            if self.served:
                about = {"what": self.served, "kind": word[:40]}
                raise PydanticCustomError("unsupported", "only {what} are served, not '{kind}'.", about)
            *others, last = (*self.words, *self.further)
            raise PydanticCustomError("word", "must be {known}.", {"known": f"{', '.join(others)} or {last}"})

        yield Field(json_schema_extra={"enum": [*self.words]} if self.words[1:] else {"const": self.words[0]})
        yield AfterValidator(known)


# What JSON text must hold for its strings to contain a NUL or a lone surrogate: UTF-8 itself can encode neither here.
SUSPECT_ESCAPE = re.compile(r"\\u(0000|[dD][89a-fA-F])")

HALF_PAIR = re.compile("[\ud800-\udfff]")
NOT_WHOLE = "holds half a surrogate pair; send whole characters."


def strings_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value with its path; a key counts as its own value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings_in(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, dict):
        for key, item in value.items():
            clean = clean_key(key)
            yield clean, key
            yield from strings_in(item, f"{path}.{clean}" if path else clean)
